"""What a person sees who waits: lines where there is no terminal, nothing where a run is short."""

from __future__ import annotations

import re
import time

import pytest

from online_softmax.lab import waiting


def test_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One is said while a step is at work, not only between steps."""
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "EVERY_SECONDS", 0.05)
    seen = ""
    with waiting.progress(True) as tell:
        assert tell is not None
        tell("one", 0, 3)
        tell("two", 1, 3)
        until = time.monotonic() + 10
        while "two" not in seen and time.monotonic() < until:
            seen += capsys.readouterr().err
        tell("three", 3, 3)
    assert re.match(r"0:00 two \(step 2 of 3\)\n", seen)
    time.sleep(0.2)
    late = capsys.readouterr()
    assert late.out == ""
    assert set(late.err.splitlines()) <= {"0:00 two (step 2 of 3)", "0:00 three (step 3 of 3)"}


def test_a_short_run_says_nothing(capsys: pytest.CaptureFixture[str]):
    with waiting.progress(True) as tell:
        assert tell is not None
        tell("one", 0, 1)
    with waiting.progress(False) as tell:
        assert tell is None
    assert capsys.readouterr() == ("", "")
