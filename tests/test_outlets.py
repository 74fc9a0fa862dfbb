"""A standard output that is full, closed, or a pipe that nobody reads; standard error likewise."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TextIO

import pytest

from bench_kit import HEADER
from online_softmax.lab import benchfile, cli
from online_softmax.lab.benchfile import Entry, Row

FULL = Path("/dev/full")
no_room = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
COMMANDS = ["trace 1 2 --json", "trace 1 2", "explain 4 4", "bench --list", "--help", "--version",
            "bench --compare FILE FILE", "bench --from FILE --json"]  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    entry = Entry("ours", "ours", True, clock="graph", median_us=5.0, rounds_us=(5.0,))
    row = Row("softmax", "float32", 8, 1024, "normal", 65536, (entry,))
    path = tmp_path / "run.jsonl"
    path.write_text(benchfile.header_line(HEADER) + benchfile.line("cell", row))
    return path


def ended(monkeypatch: pytest.MonkeyPatch, words: str, **streams: TextIO | None) -> int:
    """The exit code of a command, with these in place of its streams."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["online-softmax", *words.split()])
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        for name in ("stdout", "stderr"):  # main puts others in their place
            patch.setattr(sys, name, streams.get(name, getattr(sys, name)))
        with pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0)


@no_room
@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("is_closed", [False, True], ids=["full", "closed"])
def test_an_output_that_takes_nothing_is_one_line(
    words: str, is_closed: bool, kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    words = words.replace("FILE", str(kept))
    said = tmp_path / "said"
    with FULL.open("w") as full, said.open("w") as errors:
        output = None if is_closed else full
        assert ended(monkeypatch, words, stdout=output, stderr=errors) == 2
    why = "it is closed" if is_closed else "No space left on device"
    last = said.read_text().splitlines()[-1]
    assert last == f"error: standard output cannot be written: {why}"


@pytest.mark.parametrize("words", ["bench --list", "trace 1 2"])
def test_a_pipe_that_nobody_reads_ends_in_silence(
    words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    reader, writer = os.pipe()
    os.close(reader)
    said = tmp_path / "said"
    with os.fdopen(writer, "w") as output, said.open("w") as errors:
        assert ended(monkeypatch, words, stdout=output, stderr=errors) == 141
    assert said.read_text() == ""


@no_room
@pytest.mark.parametrize("is_closed", [False, True], ids=["full", "closed"])
def test_words_that_cannot_be_said_stop_nothing(
    is_closed: bool, kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    out = tmp_path / "out"
    with FULL.open("w") as full, out.open("w") as output:
        errors = None if is_closed else full
        words = f"bench --compare {kept} {kept} --json"
        assert ended(monkeypatch, words, stdout=output, stderr=errors) == 0
        assert ended(monkeypatch, "explain 4 x", stdout=output, stderr=errors) == 2
    assert out.read_text().startswith('{"regressions": 0')


def test_what_stands_for_a_stream_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    for stream in (io.StringIO(), io.TextIOWrapper(io.BytesIO())):
        assert ended(monkeypatch, "--version", stdout=stream) == 0
        stream.seek(0)
        assert stream.read().startswith("online-softmax ")


@no_room
def test_a_process_says_it_once():
    """Python does not try again at its end to write what was left."""
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "online_softmax", "explain", "4", "4"], stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    said = "error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)
