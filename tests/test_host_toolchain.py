"""Host execution: the compiler, its errors, and the folder of compiled libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from host_kit import KERNELS, poisoned  # skips this module too where there is no compiler
from online_softmax.cuda import host
from online_softmax.cuda.host import toolchain
from online_softmax.cuda.launch import Launch

SMALL = """#include "small.cuh"
__global__ void small(float* y) { y[threadIdx.x] = VALUE; }
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with an include, and an empty cache."""
    monkeypatch.setenv("ONLINE_SOFTMAX_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "small.cuh").write_text('#include "memory.cuh"\n#define VALUE 1.0f\n')
    (tmp_path / "small.cu").write_text(SMALL)
    return tmp_path / "small.cu"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled from here on."""
    seen: list[str] = []
    real = toolchain._compile

    def spy(command: list[str], path: Path, symbols: tuple[str, ...]) -> None:
        seen.append(path.name)
        real(command, path, symbols)

    monkeypatch.setattr(toolchain, "_compile", spy)
    return seen


def test_compiled_once_until_an_include_changes(small: Path, compiled: list[str]) -> None:
    first = toolchain.build(small, ("small",))
    assert toolchain.build(small, ("small",)) == first
    assert compiled == ["small.cu"]
    (small.parent / "small.cuh").write_text('#include "memory.cuh"\n#define VALUE 2.0f\n')
    assert toolchain.build(small, ("small",)) != first
    assert compiled == ["small.cu"] * 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda code: b"not a library",
        lambda code: b"",
        lambda code: code[: len(code) // 2],  # loading it would be a bus error
        lambda code: code[:5000] + bytes([code[5000] ^ 1]) + code[5001:],
    ],
    ids=["replaced", "empty", "half", "one bit"],
)
def test_damaged_library_is_made_again(
    small: Path, compiled: list[str], damage: Callable[[bytes], bytes]
) -> None:
    library = toolchain.build(small, ("small",))
    library.write_bytes(damage(library.read_bytes()))
    y = poisoned(8)
    with pytest.warns(RuntimeWarning, match=r"small-.* is damaged and is compiled again"):
        host.launch(Launch(str(small), "small", (y,), 1, 8))
    assert (y == 1).all()
    assert len(compiled) == 2


def test_processes_compile_at_once(small: Path) -> None:
    code = (
        "import sys, torch\n"
        "from online_softmax.cuda import host\n"
        "from online_softmax.cuda.launch import Launch\n"
        "y = torch.zeros(8)\n"
        "host.launch(Launch(sys.argv[1], 'small', (y,), 1, 8))\n"
        "sys.exit(0 if (y == 1).all() else 1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(small)]
    running = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    left = sorted(file.suffix for file in (small.parent / "cache" / "host").iterdir())
    assert left == [".lock", ".so"]


def test_folder_that_cannot_be_made(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONLINE_SOFTMAX_CACHE_DIR", str(small))  # a file
    y = poisoned(8)
    with pytest.warns(RuntimeWarning, match="cannot be kept in"):
        host.launch(Launch(str(small), "small", (y,), 1, 8))
    assert (y == 1).all()


def test_missing_compiler(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(str(small), "small", (poisoned(8),), 1, 8)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(host.CompilerMissing, match="CXX names 'no-such-compiler'"):
        host.launch(launch)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(small.parent))
    assert host.compiler() is None
    with pytest.raises(host.CompilerMissing, match=r"apt-get install g\+\+"):
        host.sanitize(launch)


def test_compile_error_has_the_compilers_words(small: Path) -> None:
    with pytest.raises(host.CompileError, match="no_such_kernel"):
        host.launch(Launch(str(small), "no_such_kernel", (poisoned(8),), 1, 8))


def test_without_assembly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ucontext, which machines other than x86-64 and aarch64 use."""
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-DONLINE_SOFTMAX_UCONTEXT"))
    path = tmp_path / "copy.cu"
    path.write_text(KERNELS.read_text())
    x, y = torch.randn(5, 300), poisoned(5)
    host.launch(Launch(str(path), "row_sum<128>", (x, y, 300), 5, 128))
    torch.testing.assert_close(y, x.sum(-1), rtol=1e-5, atol=1e-5)
    with pytest.raises(host.Fault, match="deadlock"):
        host.launch(Launch(str(path), "barrier_and_shuffle", (), 2, 64))
