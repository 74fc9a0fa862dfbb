"""The command line for tests: run in this process, refused, or as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from online_softmax.cuda import host
from online_softmax.lab import cli

CHEAP = "safe,v2,v3,torch,prod"  # Triton's interpreter takes milliseconds a row

needs_compiler = pytest.mark.skipif(
    not torch.cuda.is_available() and host.compiler() is None and not os.environ.get("CI"),
    reason="host execution needs g++ or clang++",
)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the ladder takes the GPU here")


def run(*arguments: object, exit_code: int = 0) -> str:
    """Run in this process; return standard output."""
    done = invoke(*arguments)
    said = f"{arguments}: {done.exit_code}\n{done.output}\n{done.exception!r}"
    assert done.exit_code == exit_code, said
    return done.stdout


def invoke(*arguments: object) -> Any:
    """Run in this process, whatever comes of it: click's result."""
    return CliRunner().invoke(cli.app, [str(each) for each in arguments])


def bench(*arguments: object) -> Any:
    """The command `bench`, as `invoke` runs it."""
    return invoke("bench", *arguments)


def refusal(*arguments: object) -> str:
    """Run what must be refused; return the one line that says why."""
    done = invoke(*arguments)
    assert done.exit_code == 2, f"{arguments}: {done.exit_code}\n{done.output}{done.exception!r}"
    lines = done.output.strip().splitlines()
    assert len(lines) == 1, done.output
    assert lines[0].startswith("error: ")
    return lines[0]


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run as a person does, piped."""
    path = os.pathsep.join(
        filter(None, [str(Path(cli.__file__).parents[2]), os.environ.get("PYTHONPATH")])
    )
    return subprocess.run(
        [sys.executable, "-m", "online_softmax.lab.cli", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
