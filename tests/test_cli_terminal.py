"""Every command as a person sees it: piped and on a terminal, of 60, 80 and 200 columns.

A process each for the pipe and for a pseudo-terminal runs them all, one after the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from cli_kit import needs_compiler
from online_softmax.lab import cli, fitting

NARROW, USUAL, WIDE = 60, 80, 200
WIDTHS = (NARROW, USUAL, WIDE)
STORED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "h200"
COMMANDS = {
    "ladder": "ladder --rows 2 --cols 64 --only safe,torch --arch sm_90",
    "trace": "trace 1 5 3 9 2 --block 3",
    "long": "trace -1.234567e-30 -inf nan 3.4028235e38 --block 4",
    "attention": "trace --attention --keys 5 --value-dim 4",
    "explain": "explain 1 300000 --arch sm_80,sm_90",
    "info": "info",
    "list": "bench softmax --grid small --list",
    "operations": "bench --list",
    "run": "bench softmax --cells 3x40 --dtype fp32 --seconds 1.5",
    "kept": "bench --from old.jsonl",
    "compare": "bench --compare old.jsonl new.jsonl",
    "report": "report host.jsonl -o host.html",
    "tables": "report host.jsonl --format md -o host.md",
    "check": "check --quick --only torch,merge",
    "profile": "profile --from ncu.jsonl",
    "static": "profile cross_entropy merge --arch sm_80",
    "help": "bench --help",
    "about": "--help",
    "wrong": "trace two",
}
CODES = {"wrong": 2, "compare": 1}
TRACES = ("trace", "long", "attention")
TIMED = ("run",)  # whose figures are its own each time
# Resizes its own terminal; on a pipe it says by COLUMNS how wide it is.
PROGRAM = """
import fcntl, os, struct, sys, termios
from online_softmax.lab import cli
widths, commands = sys.argv[1].split(","), sys.argv[2:]
for cols in widths:
    if sys.stdout.isatty():
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, int(cols), 0, 0))
    else:
        os.environ["COLUMNS"] = cols
    for words in commands:
        code = 0
        sys.argv[1:] = words.split()
        try:
            cli.app(words.split(), prog_name="online-softmax")
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        print(f"==== {cols} {code} {words}", flush=True)
"""


def environment(**more: str) -> dict[str, str]:
    inherited = {
        name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")
    }
    path = os.pathsep.join(
        filter(None, [str(Path(cli.__file__).parents[2]), inherited.get("PYTHONPATH")])
    )
    return {**inherited, "PYTHONPATH": path, "TERM": "xterm-256color", **more}


def words(*widths: int) -> list[str]:
    return [sys.executable, "-c", PROGRAM, ",".join(map(str, widths)), *COMMANDS.values()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Stored results under short names; in the second of two runs ours is slower in each cell."""
    shutil.copy(STORED / "bench-host.jsonl", tmp_path / "host.jsonl")
    shutil.copy(STORED / "ncu-4096x4096-float32.jsonl", tmp_path / "ncu.jsonl")
    lines = (STORED / "bench-losses.jsonl").read_text().splitlines()[:9]
    (tmp_path / "old.jsonl").write_text("\n".join(lines) + "\n")
    found = [json.loads(line) for line in lines]
    for entry in (e for line in found for e in line.get("entries", ()) if e["kind"] == "ours"):
        entry["median_us"] *= 2
    text = "".join(json.dumps(line) + "\n" for line in found)
    (tmp_path / "new.jsonl").write_text(text)
    return tmp_path


def pages(said: str) -> dict[tuple[str, int], tuple[int, str]]:
    """(command, width) -> its exit code and what it printed."""
    names = {line: name for name, line in COMMANDS.items()}
    found, text = {}, ""
    for line in said.splitlines(keepends=True):
        ended = re.fullmatch(r"==== (\d+) (\d+) (.*)\n", line)
        if ended:
            cols, code, command = ended.groups()
            found[names[command], int(cols)] = (int(code), text)
            text = ""
        else:
            text += line
    return found


def check(name: str, width: int, code: int, page: str) -> None:
    what = f"{name} at {width} columns: exit code {code}\n{page}"
    assert code == CODES.get(name, 0), what
    assert "Traceback" not in page, what
    # What goes on is told on one line, which is shortened and wiped away.
    lines = [line for line in page.splitlines() if not re.match(r"\s*(━|╸|\d:)", line)]
    assert "\u2026" not in "".join(lines), f"a cell is cut off: {what}"


def bare(text: str) -> str:
    """Without colours and other control sequences; what goes over a line again is one of its
    own."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")


def typed(folder: Path) -> str:
    """What a terminal shows: errors and progress are among it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDE, 0, 0))
    running = subprocess.Popen(
        words(*WIDTHS), env=environment(), stdin=slave, stdout=slave, stderr=slave,
        close_fds=True, cwd=folder,
    )  # fmt: skip
    os.close(slave)
    said = b""
    with contextlib.suppress(OSError):  # Linux's end of a terminal whose last writer has gone
        while more := os.read(master, 1 << 16):
            said += more
    os.close(master)
    assert running.wait(120) == 0, said.decode()
    return said.decode().replace("\r\n", "\n")


@needs_compiler
def test_piped_and_on_a_terminal(folder: Path):
    done = subprocess.run(
        words(NARROW, WIDE), env=environment(), capture_output=True, text=True, timeout=120,
        check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: 'two' is not a number"] * 2
    piped, shown = pages(done.stdout), pages(typed(folder))
    assert set(piped) == {(name, cols) for name in COMMANDS for cols in (NARROW, WIDE)}
    assert set(shown) == {(name, cols) for name in COMMANDS for cols in WIDTHS}

    for (name, width), (code, page) in shown.items():
        if name in TRACES:
            assert "\x1b[" in page  # a title in italics says that it was a terminal
        plain = bare(page)
        check(name, width, code, plain)
        longest = max(map(len, map(str.rstrip, plain.splitlines())), default=0)
        assert longest <= width, f"{name} at {width} columns has {longest}\n{plain}"
        if name == "wrong":
            assert plain.strip() == "error: 'two' is not a number"

    for (name, width), (code, page) in piped.items():
        assert "\x1b" not in page
        check(name, width, code, page)
        if name in TIMED or (width == NARROW and name not in TRACES):
            continue  # a terminal that narrow has its tables in parts
        # Before a page stands its progress, which a terminal wipes away. Without figures, since a
        # cache that info counts may grow.
        found, wanted = (
            re.sub(r"\d+", "0", text).split() for text in (bare(shown[name, width][1]), page)
        )
        assert not wanted or found[-len(wanted) :] == wanted, name

    # Where it is narrow no digit is lost, on a terminal neither.
    page = piped["trace", NARROW][1]
    for value in ("1.153651", "1.022042", "0.01831564", "0.9784337", "exp(x) / sum of exp(x)"):
        assert value in page
    assert "-1.234567e-30" in piped["long", NARROW][1]
    for name in ("attention", "profile", "kept"):
        wide, narrow = (set(bare(shown[name, cols][1]).split()) for cols in (WIDE, NARROW))
        assert {each for each in wide if each[-1].isdigit()} <= narrow, name
    page = " ".join(bare(shown["check", NARROW][1]).split())
    assert "Too narrow here for: largest error." in page
    assert "To paste it: add `> check.md`, or --save check.md." in page
    assert "To paste it" not in piped["check", NARROW][1] + shown["check", WIDE][1]
    assert "largest error |" in piped["check", NARROW][1]


def test_a_table_is_parted_with_its_first_column_again():
    fields = [fitting.Field("cell", "left", is_words=True), *map(fitting.Field, ("one", "two"))]
    rows = [[Text("a cell of words"), Text("1" * 20), Text("2" * 20)]]
    for width, parts in ((70, 1), (50, 2)):
        console = Console(width=width, force_terminal=True, color_system=None)
        with console.capture() as captured:
            fitting.show(console, fields, rows)
        text = captured.get()
        assert text.count("a cell of words") == parts
        assert "1" * 20 in text
        assert "2" * 20 in text
        assert max(map(len, text.splitlines())) <= width
    console = Console(width=30, force_terminal=False)
    fitting.widen(console, 100)
    assert console.width == 100


def test_a_page_of_markdown_says_which_columns_it_leaves_out():
    page = "# A head\n\n- an item of several words\n\n| what | type | cases |\n| --- | --- | ---: |"
    page += "\n| `softmax` | float32 | 12 |\n\nThe end."
    assert fitting.markdown(page, 200) == page
    lines = fitting.markdown(page, 20).splitlines()
    assert lines[2:4] == ["- an item of several", "  words"]
    assert "| `softmax` |" in lines
    assert "| --- |" in lines
    assert " ".join(" ".join(lines).split()).count("Too narrow here for: type, cases.") == 1
    assert max(map(len, lines)) <= 20


def test_lines_that_begin_as_a_table_does_and_are_none_are_wrapped():
    """One alone, such as what a compiler said; two, of which the second is no rule."""
    for text in ("| error: no such name", "| a | b |\n| c | d |", "|"):
        found = fitting.markdown(f"Said:\n{text}\n\nThe end.", 12)
        assert found.split() == f"Said: {text} The end.".split()
        assert max(map(len, found.splitlines())) <= 12
        assert fitting.markdown(text, 200) == text


def test_lines_go_on_further_in():
    text = "  not this: it is too long for it\nnext"
    assert fitting.wrapped(text, 16) == "  not this: it\n    is too long\n    for it\nnext"
    assert fitting.wrapped("name  of words", 10, 6) == "name  of\n      words"
    assert fitting.wrapped("/a/path/that/is/longer", 10) == "/a/path/that/is/longer"
