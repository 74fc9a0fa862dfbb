"""What is here, what is missing, and where the code comes from."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from cli_kit import run
from online_softmax import catalogue
from online_softmax.cuda import host
from online_softmax.lab import info


def test_info():
    found = json.loads(run("info", "--json"))
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["gpus"]) == torch.cuda.device_count()
    page = run("info")
    assert torch.__version__ in page
    assert found["cache"]["folder"] in page
    for sentence in found["missing"].values():
        assert sentence in page


def test_info_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    catalogue.lacks.cache_clear()
    monkeypatch.setattr(host, "compiler", lambda: None)
    page = run("info")
    catalogue.lacks.cache_clear()
    assert "pip install 'online-softmax[triton]'" in page
    assert "install g++ or clang++" in page


def test_where_the_code_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    package = tmp_path / "src" / "online_softmax"
    (package / "cuda" / "ladder").mkdir(parents=True)
    kernel = package / "cuda" / "ladder" / "safe.cu"
    kernel.write_text("1")
    monkeypatch.setattr("online_softmax.__file__", str(package / "__init__.py"))
    first = info.sources()
    (package / "plan.py").write_text("no kernel")
    assert info.sources() == first
    kernel.write_text("2")
    assert info.sources() != first
    assert info.commit() is None
    if not shutil.which("git"):
        pytest.skip("needs git")

    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    git("tag", "v1")
    short = git("rev-parse", "--short", "HEAD")
    assert info.commit() == short
    kernel.write_text("3")
    assert info.commit() == f"{short}+changes"
    inside = tmp_path / "lib" / "python" / "online_softmax" / "__init__.py"  # another's checkout
    monkeypatch.setattr("online_softmax.__file__", str(inside))
    assert info.commit() is None
