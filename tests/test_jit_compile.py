"""jit_compile: every architecture, what a kernel takes, and what is said where something lacks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import jit_kit
from jit_kit import ARCHES, run
from online_softmax import jit, jit_compile, plan
from online_softmax.jit_cache import Resources

cu_file, fresh_cache, nvrtc = jit_kit.cu_file, jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
SCALE = "scale<float>"


# ---- compiling


@pytest.mark.parametrize("arch", ARCHES)
def test_compiles_for_every_architecture(cu_file: str, arch: str):
    image = jit.compile(cu_file, SCALE, arch)
    assert image.code.startswith(b"\x7fELF")
    assert image.target == arch
    assert image.entry.startswith("_Z5scaleIf")
    assert image.resources is not None
    assert 0 < image.resources.registers < 64


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_local_memory_shows_as_a_stack_frame_without_spills(cu_file: str, arch: str):
    textbook = jit.resources(cu_file, "cache_by_count<32>", arch)
    assert textbook.stack_bytes >= 32 * 4
    assert textbook.spill_store_bytes == textbook.spill_load_bytes == 0
    assert textbook.has_local_memory
    unrolled = jit.resources(cu_file, "cache_unrolled<32>", arch)
    assert unrolled.stack_bytes == 0
    assert not unrolled.has_local_memory
    assert unrolled.registers >= 32


def test_symbols_and_static_shared_memory(cu_file: str):
    assert jit.compile(cu_file, "plain", "sm_80").entry == "plain"
    assert jit.resources(cu_file, "plain", "sm_80").shared_bytes == 0
    assert jit.resources(cu_file, "shared_static<100>", "sm_90a").shared_bytes == 400


@pytest.mark.parametrize("symbol", ["absent<float>", "scale<float", "FACTOR +"])
def test_a_wrong_symbol_is_named(cu_file: str, symbol: str):
    with pytest.raises(jit.CompileError) as caught:
        jit.compile(cu_file, symbol, "sm_80")
    for part in (cu_file, symbol, "sm_80", "error"):
        assert part in str(caught.value)
    assert jit.cache_stats() == (0, 0)


@pytest.mark.parametrize("symbol", ["reverse<0>", "meet<1>", "cluster_shape<1000>", "add<1>"])
def test_the_kernels_of_the_gpu_tests_compile(cu_file: str, symbol: str):
    assert jit.compile(cu_file, symbol, "sm_90a").resources is not None


def test_a_wrong_source_is_named_with_its_line(cu_file: str):
    Path(cu_file).write_text("__global__ void k() {\n  nonsense;\n}\n")
    with pytest.raises(jit.CompileError, match=r"kernels\.cu\(2\): error: .*nonsense"):
        jit.compile(cu_file, "k", "sm_80")
    with pytest.raises(OSError, match="no_such"):
        jit.compile("ladder/no_such.cu", "k", "sm_80")


def test_a_newer_gpu_gets_ptx_of_the_highest_known(cu_file: str, nvrtc: str, monkeypatch):
    highest = jit_compile.compiler().known[-1]
    monkeypatch.setattr(jit.torch.cuda, "get_device_capability", lambda _=None: (99, 0))
    assert jit.device_arch(0) == "sm_990"
    image = jit.compile(cu_file, SCALE, "sm_990")
    assert image.target == f"compute_{highest}"
    assert b".entry" in image.code
    assert image.resources is None
    with pytest.raises(jit.Unavailable, match=rf"NVRTC {nvrtc} .*sm_990.*sm_{highest}"):
        jit.resources(cu_file, SCALE, "sm_990")
    # The suffix goes: code for one architecture's own instructions runs on no later one.
    known = jit_compile.Compiler(jit_compile.compiler().nvrtc, nvrtc, (75, 80, 90))
    monkeypatch.setattr(jit_compile, "compiler", lambda: known)
    assert jit_compile.target_of("sm_100a") == "compute_90"


@pytest.mark.parametrize(
    ("capability", "arch"), [((7, 5), "sm_75"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")]
)
def test_the_architecture_of_a_device(monkeypatch, capability: tuple[int, int], arch: str):
    monkeypatch.setattr(jit.torch.cuda, "get_device_capability", lambda _=None: capability)
    assert jit.device_arch(0) == arch


def test_an_older_gpu_is_refused_with_the_remedy(cu_file: str, nvrtc: str):
    with pytest.raises(jit.Unavailable, match=rf"NVRTC {nvrtc} .*sm_20.*pip install"):
        jit.compile(cu_file, SCALE, "sm_20")
    with pytest.raises(ValueError, match="gfx90a"):
        jit.compile(cu_file, SCALE, "gfx90a")


# ---- what is missing


def test_without_cuda_libraries_a_sentence_names_the_extra():
    said = run(
        "import sys\n"
        "class NoCuda:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'cuda': raise ModuleNotFoundError(f'no {name}')\n"
        "sys.meta_path.insert(0, NoCuda())\n"
        "import torch, online_softmax\n"
        "from online_softmax import jit\n"
        "print(online_softmax.softmax(torch.zeros(2)).tolist())\n"
        "print(jit.missing())\n"
        "try: jit.compile('ladder/safe.cu', 'safe<float>', 'sm_80')\n"
        "except jit.Unavailable as error: print(error)\n"
    )
    softmax, *sentences = said.splitlines()
    assert softmax == "[0.5, 0.5]"
    assert len(sentences) == 2
    for sentence in sentences:
        assert "NVRTC" in sentence
        hints = (f"pip install 'online-softmax[{extra}]'" for extra in ("cuda12", "cuda13"))
        assert any(hint in sentence for hint in hints)


def test_a_missing_library_is_told_with_the_places(monkeypatch):
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

    def absent() -> None:
        raise RuntimeError("libnvrtc.so:\n no such file")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", absent)
    monkeypatch.setenv("CUDA_HOME", "/opt/a-toolkit")
    monkeypatch.setattr(jit_compile, "compiler", jit_compile.compiler.__wrapped__)
    with pytest.raises(jit.Unavailable) as caught:
        jit.nvrtc_version()
    for part in ("libnvrtc.so: no such file", "pip install", "site-packages", "/opt/a-toolkit"):
        assert part in str(caught.value)


def test_importing_imports_no_cuda_and_initialises_nothing():
    run(
        "import sys, torch\n"  # torch may import cuda.bindings of its own accord
        "before = set(sys.modules)\n"
        "import online_softmax.jit as jit\n"
        "jit.cache_dir(), jit.cache_stats()\n"
        "new = [name for name in set(sys.modules) - before if name.split('.')[0] == 'cuda']\n"
        "assert not new, new\n"
        "assert not torch.cuda.is_initialized()\n"
    )


# ---- occupancy: figures of NVIDIA's cuda_occupancy.h


@pytest.mark.parametrize(
    ("arch", "registers", "static", "block", "dynamic", "warps"),
    [
        ("sm_75", 32, 0, 256, 0, 32),
        ("sm_75", 64, 0, 1024, 0, 32),
        ("sm_75", 32, 0, 64, 8192, 16),  # 8 KB a block, nothing kept: 8 blocks of 64 KB
        ("sm_80", 32, 0, 32, 0, 32),  # 32 blocks at most
        ("sm_80", 40, 1000, 256, 0, 48),
        ("sm_86", 128, 0, 512, 0, 16),
        ("sm_89", 255, 0, 256, 0, 8),
        ("sm_90a", 32, 0, 256, 0, 64),
        ("sm_90a", 33, 0, 256, 0, 48),  # 33 registers take 40
        ("sm_90a", 168, 0, 96, 0, 12),
        ("sm_90a", 32, 0, 256, 100_000, 16),
        (
            "sm_90a",
            32,
            0,
            256,
            116_224,
            8,
        ),  # two blocks fit in 227 KB, but not with 1 KB kept of each
        ("sm_90a", 32, 128, 1024, 227 * 1024, 0),
        ("sm_90a", 72, 0, 1024, 0, 0),  # 1,024 threads of 72 registers are more than there are
        ("sm_120", 48, 4096, 192, 8192, 36),
    ],
)
def test_occupancy(arch: str, registers: int, static: int, block: int, dynamic: int, warps: int):
    facts = plan.ARCHES[arch]
    used = Resources(registers, 0, 0, 0, static)
    assert jit.occupancy(used, facts, block, dynamic) == warps / facts.max_warps


def test_the_log_is_read_for_the_right_kernel():
    def report(entry: str, figures: tuple[int, ...], shared: str = "") -> str:
        registers, stack, stores, loads = figures
        return (
            f"ptxas info    : Compiling entry function '{entry}' for 'sm_80'\n"
            f"ptxas info    : Function properties for {entry}\n"
            f"ptxas         .     {stack} bytes stack frame, {stores} bytes spill stores, "
            f"{loads} bytes spill loads\n"
            f"ptxas info    : Used {registers} registers, used 1 barriers{shared}\n"
        )

    log = "note\n" + report("a", (10, 0, 0, 0), ", 256 bytes smem") + report("b", (20, 8, 4, 12))
    assert jit_compile._figures(log, "a") == Resources(10, 0, 0, 0, 256)
    assert jit_compile._figures(log, "b") == Resources(20, 8, 4, 12, 0)
    assert jit_compile._figures(log, "c") is None


def test_a_bad_status_is_named():
    status = SimpleNamespace(name="NVRTC_ERROR_OUT_OF_MEMORY")
    with pytest.raises(jit_compile.BindingError, match="NVRTC_ERROR_OUT_OF_MEMORY"):
        jit_compile.checked((status, None))
    assert jit_compile.checked((0,)) == []
    assert jit_compile.checked((0, 5)) == 5
    assert jit_compile.checked((0, 5, 6)) == [5, 6]
