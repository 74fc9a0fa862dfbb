"""Every command as a person sees it: piped and on a terminal, of 60 columns and of 160.

A process each for the pipe and for a pseudo-terminal runs them all, one after the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from cli_kit import needs_compiler
from online_softmax.lab import cli

NARROW, WIDE = 60, 160
COMMANDS = {
    "ladder": "ladder --rows 2 --cols 64 --only safe,torch --arch sm_90",
    "trace": "trace 1 5 3 9 2 --block 3",
    "long": "trace -1.234567e-30 -inf nan 3.4028235e38 --block 4",
    "attention": "trace --attention --keys 5 --value-dim 4",
    "explain": "explain 1 300000 --arch sm_80,sm_90",
    "info": "info",
    "list": "bench softmax --grid small --list",
    "help": "trace --help",
    "wrong": "trace two",
}
TRACES = ("trace", "long", "attention")
FITS = {NARROW: (*TRACES, "help"), WIDE: (*TRACES, "help", "ladder")}
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


WORDS = [sys.executable, "-c", PROGRAM, f"{NARROW},{WIDE}", *COMMANDS.values()]


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
    assert code == (2 if name == "wrong" else 0), what
    assert "Traceback" not in page, what
    assert "\u2026" not in page, f"a cell is cut off: {what}"
    if name in FITS[width]:  # its tables; a sentence is the terminal's to wrap
        lines = [line.rstrip() for line in page.splitlines() if re.search(r"\S  |[│─]", line)]
        assert max(map(len, lines)) <= width, what


def bare(text: str) -> str:
    """Without colours and other control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)


def typed() -> str:
    """What a terminal shows: errors and progress are among it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDE, 0, 0))
    running = subprocess.Popen(
        WORDS, env=environment(), stdin=slave, stdout=slave, stderr=slave, close_fds=True
    )
    os.close(slave)
    said = b""
    with contextlib.suppress(OSError):  # Linux's end of a terminal whose last writer has gone
        while more := os.read(master, 1 << 16):
            said += more
    os.close(master)
    assert running.wait(120) == 0, said.decode()
    return said.decode().replace("\r\n", "\n")


@needs_compiler
def test_piped_and_on_a_terminal():
    done = subprocess.run(
        WORDS, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "error: 'two' is not a number\n" * 2
    piped, shown = pages(done.stdout), pages(typed())
    assert (
        set(piped) == set(shown) == {(name, cols) for name in COMMANDS for cols in (NARROW, WIDE)}
    )

    for (name, width), (code, page) in piped.items():
        assert "\x1b" not in page
        check(name, width, code, page)
        code, on_terminal = shown[name, width]
        if name in TRACES:
            assert "\x1b[" in on_terminal  # a title in italics says that it was a terminal
        plain = bare(on_terminal)
        check(name, width, code, plain)
        if name == "wrong":
            assert plain.strip() == "error: 'two' is not a number"
        else:  # before it stood the progress of a ladder, which a terminal wipes away
            # Without figures, since a cache that info counts may grow.
            found, wanted = (re.sub(r"\d+", "0", text).split() for text in (plain, page))
            assert found[-len(wanted) :] == wanted, name

    # Where it is narrow no digit is lost.
    page = piped["trace", NARROW][1]
    for value in ("1.153651", "1.022042", "0.01831564", "0.9784337", "exp(x) / sum of exp(x)"):
        assert value in page
    assert "-1.234567e-30" in piped["long", NARROW][1]
    wide, narrow = (set(piped["attention", cols][1].split()) for cols in (WIDE, NARROW))
    assert {each for each in wide if each[-1].isdigit()} <= narrow
