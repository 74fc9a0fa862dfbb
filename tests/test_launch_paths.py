"""benchmarks/launch_paths.py: a way that fails, crashes or hangs is a row with its reason."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "launch_paths.py"
    spec = importlib.util.spec_from_file_location("launch_paths", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _crash() -> dict[str, Any]:
    faulthandler.disable()  # pytest's would tell of a crash that is meant
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def _leave() -> dict[str, Any]:
    os._exit(3)


def _refuse() -> dict[str, Any]:
    raise ValueError("no such way")


def _hang() -> dict[str, Any]:
    time.sleep(60)
    return {}


ROWS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "right": (lambda: {"median_us": 1.5}, {"median_us": 1.5}),
    "crash": (_crash, {"why": "SIGSEGV"}),
    "end": (_leave, {"why": "ended with 3"}),
    "error": (_refuse, {"why": "ValueError('no such way')"}),
    "hang": (_hang, {"why": "still at work after 2 s"}),
}


@pytest.mark.parametrize("what", ROWS)
def test_every_end_is_a_row(what: str, script: ModuleType) -> None:
    work, row = ROWS[what]
    assert script.in_a_process(work, 2.0) == row


def test_rows_come_as_they_are_known(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []

    def figures(make: Callable[..., Any], file: Path, cluster: int) -> dict[str, Any]:
        if make is script.WAYS["cuda.core.launch"]:
            _crash()
        return {"median_us": 2.0, "least_us": 1.0}

    def in_a_process(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        ended.append(capfd.readouterr().out)
        return run(work)

    run = script.in_a_process
    monkeypatch.setattr(script, "figures", figures)
    monkeypatch.setattr(script, "in_a_process", in_a_process)
    script.main()
    count = 2 * len(script.WAYS) + len(script.WITHOUT_CLUSTER)
    assert [said.count("\n") for said in ended] == [0] + [1] * (count - 1)
    *said, kept = ("".join(ended) + capfd.readouterr().out).splitlines()
    assert sum("SIGSEGV" in line for line in said) == 2
    assert sum("2.00    1.00" in line for line in said) == count - 2
    assert [line.get("median_us") for line in json.loads(kept)].count(2.0) == count - 2
