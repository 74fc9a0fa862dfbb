"""Before any test: Triton interprets where there is no GPU, and random numbers have a seed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from online_softmax.lab.results import Run

KITS = (
    "attention_kit",
    "attention_triton_kit",
    "bench_kit",
    "browser_kit",
    "cli_kit",
    "host_kit",
    "keptattention_kit",
    "ladder_kit",
    "languages",
    "matrix_kit",
    "rows_kit",
    "stats_kit",
    "trace_kit",
    "triton_kit",
)
pytest.register_assert_rewrite(*KITS)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels' module is imported


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The same random numbers in each run and each order; before fixtures, which may draw too."""
    torch.manual_seed(0)


# ---- what tests of the ladder share


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips where CUDA kernels cannot run: neither on a GPU nor through a C++ compiler."""
    from online_softmax.cuda import host

    if not torch.cuda.is_available() and host.compiler() is None:
        lacks = "host execution needs g++ or clang++"
        pytest.fail(lacks) if os.environ.get("CI") else pytest.skip(lacks)


@pytest.fixture(scope="session")
def whole(compiler: None) -> Run:
    """Every line of the ladder, small."""
    from online_softmax.lab import inputs, ladder

    return ladder.climb(inputs.random(3, 1000, torch.float32), seconds=20.0)


# ---- in CI, a test that skips for want of anything but a GPU is a failure

_lacking: list[str] = []


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and os.environ.get("CI"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(word in why for word in ("CUDA device", "GPU", "sm_90")):
            _lacking.append(f"{report.nodeid}: {why}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _lacking and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for each in _lacking:
        terminalreporter.line(f"CI must not skip {each}", red=True)
