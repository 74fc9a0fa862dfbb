"""What is here, what is missing, and where the code comes from."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from cli_kit import run
from online_softmax import catalogue, plan
from online_softmax.catalogue import KERNELS
from online_softmax.cuda import host
from online_softmax.lab import info, rung


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


def test_caches_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("triton")
    for name in ("ONLINE_SOFTMAX_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "not" / "yet"))
    assert (info.no_cache(), info.no_triton_cache()) == (None, None)
    (tmp_path / "not").write_text("a file")
    page, missing = run("info"), json.loads(run("info", "--json"))["missing"]
    for sentence in (missing["cache"], missing["triton_cache"]):
        assert sentence in page
        assert str(tmp_path / "not" / "yet") in sentence
    assert "set ONLINE_SOFTMAX_CACHE_DIR to a folder that can be written" in missing["cache"]
    assert "set TRITON_CACHE_DIR to a folder that can" in missing["triton_cache"]


def test_a_folder_without_the_right_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert info.no_triton_cache() is None
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert f"Triton compiles into {tmp_path / 'cache'}" in (info.no_triton_cache() or "")
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "triton.runtime.cache:RemoteCacheManager")
    assert info.no_triton_cache() is None


def test_triton_is_refused_where_it_cannot_compile(monkeypatch: pytest.MonkeyPatch):
    """On a GPU, where a launch compiles; an interpreter wants no folder."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/cache")
    record = KERNELS["triton_online"]
    setting = rung.Setting(plan.Problem(2, 64), 2, torch.float32, torch.device("cuda"))
    (reason,) = rung.refusals(record, setting)
    assert "set TRITON_CACHE_DIR" in reason
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", "/dev/null")
    assert rung.refusals(record, setting)


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
