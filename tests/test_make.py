"""`make` with another Python: what is missing there is one sentence, not a traceback."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from house import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


@pytest.mark.parametrize("target", ["run", "test", "test-gpu", "readme"])
@pytest.mark.parametrize(
    ("python", "why"),
    [
        (f"{sys.executable} -S", " has no torch, no numpy, no rich, no typer: name a Python"),
        ("no-such-python", " is no Python that starts here: name another"),
    ],
    ids=["bare", "none"],
)
def test_a_python_without_torch(target: str, python: str, why: str):
    done = subprocess.run(
        ["make", "--no-print-directory", target, f"PYTHON={python}"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert said[0].startswith(f"PYTHON={python}{why}")
    assert said[0].endswith("or leave PYTHON away and make sets up .venv.")
    assert [line[:9] for line in said[1:]] == ["make: ***"]
