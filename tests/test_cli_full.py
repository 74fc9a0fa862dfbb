"""A disk that is full, and a machine on which nothing runs: one line, and exit code 2."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cli_kit import refusal
from online_softmax.lab import check, checkpage, cli, profile
from online_softmax.lab.benchfile import Log
from online_softmax.lab.check import Outcome, Report
from online_softmax.lab.inputs import BadInput
from report_kit import bench_text, rows

FULL = Path("/dev/full")
no_room = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def ended(*arguments: object) -> str:
    """What a command that ran says before it ends with exit code 2: its last line."""
    done = CliRunner().invoke(cli.app, [str(each) for each in arguments])
    assert done.exit_code == 2, f"{done.output}{done.exception!r}"
    return done.output.strip().splitlines()[-1]


def ran(*outcomes: Outcome) -> Report:
    return Report("cpu", "", True, {}, outcomes)


@pytest.fixture
def no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpage, "_facts", lambda report: "")


@no_room
def test_check_says_that_a_disk_is_full(monkeypatch: pytest.MonkeyPatch, no_facts: None):
    right = ran(Outcome("safe", "float32", "kernel", 1, passed=1))
    monkeypatch.setattr(check, "run", lambda *_: right)
    assert "--save /dev/full: No space left on device" in ended("check", "--save", FULL)


@no_room
def test_profile_says_that_a_disk_is_full(monkeypatch: pytest.MonkeyPatch):
    kernel = ("profile", "safe", "--rows", "2", "--cols", "64")
    assert "--save /dev/full: No space left on device" in ended(*kernel, "--save", FULL)

    def write_raw(asked: object, raw: object, progress: object) -> SimpleNamespace:
        return raw("text")  # type: ignore[operator]

    monkeypatch.setattr(profile, "run", write_raw)
    assert "--raw /dev/full: No space left on device" in refusal(*kernel, "--raw", FULL)


@no_room
def test_bench_says_that_a_disk_is_full(tmp_path: Path):
    with pytest.raises(BadInput, match="/dev/full cannot be written: No space left on device"):
        Log(FULL).write("a line\n")
    path = tmp_path / "run.jsonl"
    path.write_text(bench_text(*rows()[:1]))
    assert "/dev/full cannot be written" in refusal("bench", "--from", path, "--save", FULL)


def test_a_check_of_nothing_is_no_success(monkeypatch: pytest.MonkeyPatch, no_facts: None):
    none = ran(Outcome("safe", "float32", "kernel", 1, why_not="no compiler"))
    monkeypatch.setattr(check, "run", lambda *_: none)
    assert "nothing ran: the page says why" in ended("check")
