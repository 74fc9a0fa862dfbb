"""Every kernel compiles for each architecture that its record names, without a GPU; and nothing
that belongs in registers lies in local memory (the stack frame tells: spills may read 0).

Compiling takes most of these tests' time: `make test` takes the fullest instance of each kind and
some of the others, `make test-all` every one."""

from __future__ import annotations

import importlib.util
import os
import re

import pytest
import torch

from online_softmax import jit
from online_softmax.catalogue import FLOATS, KERNELS
from online_softmax.cuda import (
    crossentropy_launch,
    decode_launch,
    merge_launch,
    outer_launch,
    reduce_launch,
    row_launch,
    tokenstats_launch,
)
from online_softmax.cuda.launch import C_TYPE, LADDER, RUNG, instances
from online_softmax.plan import ARCHES, Problem
from online_softmax.rowplan import CLUSTER_ARCHES

NUMBER = re.compile(r"\b\d+\b")

# NVRTC 13.5 keeps a few bytes of the fullest v3 in local memory on sm_120, at the cap of 64
# registers that 1,024 threads allow; NVRTC 13.0 none. Nobody has measured that card.
TOLERATED_STACK_BYTES = {("sm_120", "v3_register_cache"): 32}

ALL = bool(os.environ.get("ONLINE_SOFTMAX_TEST_ALL"))

missing = jit.missing()
if missing and not os.environ.get("CI"):
    pytest.skip(missing, allow_module_level=True)


Instances = list[tuple[str, str]]  # file, symbol


def some(found: Instances, every: int) -> Instances:
    """The instance of each kind that holds most, and so many of the others, unless all are asked
    for. Instances are of one kind where their names differ in numbers alone."""
    if ALL:
        return found
    fullest: dict[str, tuple[list[int], str]] = {}
    for _, symbol in found:
        kind, numbers = NUMBER.sub("#", symbol), [int(n) for n in NUMBER.findall(symbol)]
        fullest[kind] = max(fullest.get(kind, ([], "")), (numbers, symbol))
    most = {symbol for _, symbol in fullest.values()}
    others = {symbol for _, symbol in [each for each in found if each[1] not in most][::every]}
    return [each for each in found if each[1] in most | others]


def test_some_are_the_fullest_and_every_so_many() -> None:
    found = [("a.cu", f"a<float, {n}>") for n in (1, 2, 16, 8, 4)] + [("a.cu", "b<float>")]
    if not ALL:
        assert some(found, 3) == [found[0], found[2], found[4], found[5]]
        assert some(found, 9) == [found[0], found[2], found[5]]


@pytest.mark.parametrize("arch", KERNELS["safe"].arches)
@pytest.mark.parametrize("name", [rung.name for rung in LADDER])
def test_cuda(name: str, arch: str) -> None:
    assert arch in ARCHES
    for file, symbol in instances(RUNG[name]):
        found = jit.resources(file, symbol, arch)
        allowed = TOLERATED_STACK_BYTES.get((arch, name), 0)
        assert found.stack_bytes <= allowed, f"{symbol} for {arch}: {found}"
        if not allowed:
            assert not found.has_local_memory, f"{symbol} for {arch}: {found}"
        assert found.registers <= 64, f"{symbol} for {arch} leaves no room for 1,024 threads"


@pytest.mark.skipif(
    not missing and jit.nvrtc_version() != "13.5", reason="the pages say what NVRTC 13.5 gives"
)
@pytest.mark.parametrize(
    ("symbol", "registers"),
    [("v3_register_cache<float, 2>", 29), ("v3_register_cache<float, 8>", 60),
     ("v4_grid_stride<bfloat16_t>", 32), ("v4_grid_stride<half_t>", 32)],
)  # fmt: skip
def test_registers_that_pages_name(symbol: str, registers: int) -> None:
    """README and the lessons of v3 and v4 name these for sm_90a, beside those of stored runs."""
    file = f"ladder/{symbol.partition('<')[0]}.cu"
    assert jit.resources(file, symbol, "sm_90a").registers == registers


@pytest.mark.parametrize("arch", KERNELS["safe"].arches)
def test_the_rows(arch: str) -> None:
    """What is planned in float32 and one 16-bit type on the measured architecture; on the others
    fewer widths, of which each compiles another sixth. Whole rows stay in registers; at other
    alignments all but a few words do."""
    measured = arch == "sm_90a"
    widths = row_launch.WIDTHS if measured else row_launch.WIDTHS[3::9]
    found = row_launch.instances(arch, widths, (torch.float32, torch.bfloat16))
    assert len(found) > 20
    if not measured and not ALL:
        found = found[KERNELS["safe"].arches.index(arch) % 6 :: 6]
    for file, symbol in some(found, 10) if measured else found:
        taken = jit.resources(file, symbol, arch)
        # sm_75 has no maximum of two 16-bit floats: its fullest shares spill.
        spare = 40 if arch in CLUSTER_ARCHES and "WHOLE_WORDS" not in symbol else 16
        allowed = 1024 if arch == "sm_75" else spare
        assert taken.stack_bytes <= allowed, f"{symbol} for {arch}: {taken}"
        assert taken.registers <= 128, f"{symbol} for {arch} leaves no room for 512 threads"


@pytest.mark.parametrize("arch", KERNELS["safe"].arches)
def test_what_takes_x_as_it_lies(arch: str) -> None:
    """Along any dim, and the gradient of logsumexp: all of it on the measured architecture, some on
    the others."""
    found = outer_launch.instances((torch.float32, torch.bfloat16))
    assert {file for file, _ in found} == {"outer.cu", "lse_backward.cu"}
    for file, symbol in found if arch == "sm_90a" else found[:: 8 if arch == "sm_80" else 15]:
        taken = jit.resources(file, symbol, arch)
        assert not taken.has_local_memory, f"{symbol} for {arch}: {taken}"
        assert taken.registers <= 128, f"{symbol} for {arch} leaves no room for 512 threads"


@pytest.mark.parametrize("arch", KERNELS["safe"].arches)
def test_cross_entropy(arch: str) -> None:
    """The loss, its gradient and both at once, with every option: some widths on the measured
    architecture, fewer on the others."""
    widths = (1000, 50257, 131072) if arch == "sm_90a" else (1000, 131072)
    types = (torch.float32, torch.bfloat16) if arch == "sm_90a" else (torch.bfloat16,)
    found = crossentropy_launch.instances(arch, widths, types)
    assert len({file for file, _ in found}) == 4
    for file, symbol in some(found, 10) if arch in ("sm_80", "sm_90a") else found[::7]:
        taken = jit.resources(file, symbol, arch)
        # As of the rows; and the fullest shares of floats have no room for smoothing's options.
        is_full = re.search(r"<float, \w+, 1[1-6], ", symbol) is not None
        is_whole = "APART" not in symbol and "ALIKE" not in symbol
        allowed = 16 if is_whole else 192
        if arch == "sm_75" or (is_full and symbol[-2] != "0"):
            allowed = 1024
        assert taken.stack_bytes <= allowed, f"{symbol} for {arch}: {taken}"
        assert taken.registers <= 128, f"{symbol} for {arch} leaves no room for 512 threads"


@pytest.mark.parametrize("arch", KERNELS["safe"].arches)
def test_around_cross_entropy(arch: str) -> None:
    """Losses in one, a gradient for what arrives: whole blocks of 1,024 and 256 threads."""
    found = reduce_launch.instances()
    assert {file for file, _ in found} == {"crossentropy_reduce.cu"}
    for file, symbol in found if arch == "sm_90a" else found[::5]:
        taken = jit.resources(file, symbol, arch)
        assert not taken.has_local_memory, f"{symbol} for {arch}: {taken}"
        assert taken.registers <= (96 if "rescale" in symbol else 64), f"{symbol} for {arch}"


@pytest.mark.parametrize("arch", KERNELS["safe"].arches)
def test_token_stats(arch: str) -> None:
    """All of it, of short rows and of long ones, on the measured architecture; some on the
    others."""
    measured = arch == "sm_90a"
    types = tuple(C_TYPE) if measured and ALL else (torch.float32, torch.bfloat16)
    found = tokenstats_launch.instances((1000, 50257, 128256) if measured else (128256,), types)
    assert {file for file, _ in found} == {"tokenstats.cu", "tokenstats_backward.cu"}
    for file, symbol in found if measured else found[::5]:
        taken = jit.resources(file, symbol, arch)
        # Four blocks share a multiprocessor; three where words are shifted together.
        room = 80 if "fold<" in symbol and "APART" in symbol else 64
        assert taken.stack_bytes <= 16, f"{symbol} for {arch}: {taken}"
        assert taken.registers <= (room if measured else 128), f"{symbol} for {arch}: {taken}"


@pytest.mark.parametrize("arch", KERNELS["safe"].arches)
def test_merging(arch: str) -> None:
    """States and pairs, few parts and many: four blocks of 256 threads share a multiprocessor."""
    found = merge_launch.instances()
    assert {file for file, _ in found} == {"merge.cu"}
    for file, symbol in found[:: 9 if arch == "sm_90a" else 41]:
        taken = jit.resources(file, symbol, arch)
        assert taken.stack_bytes <= (0 if arch == "sm_90a" else 16), f"{symbol} for {arch}: {taken}"
        assert taken.registers <= 64, f"{symbol} for {arch}: {taken}"


@pytest.mark.parametrize("arch", [a for a in KERNELS["safe"].arches if a != "sm_75"])
def test_decoding(arch: str) -> None:
    """As many warps share a multiprocessor as are planned: all but a few words are in registers."""
    found = decode_launch.instances()
    assert {file for file, _ in found} == {"decode.cu"}
    for file, symbol in found[:: 2 if arch == "sm_90a" else 7]:
        taken = jit.resources(file, symbol, arch)
        assert taken.stack_bytes <= 40, f"{symbol} for {arch}: {taken}"
        if "decode_merge" in symbol:
            assert taken.registers <= 64, f"{symbol} for {arch}: {taken}"


@pytest.mark.parametrize("symbol", ["copy", "add", "read"])
def test_the_ceilings(symbol: str) -> None:
    for arch in KERNELS["safe"].arches:
        assert not jit.resources("ceilings.cu", symbol, arch).has_local_memory


def test_what_runs_is_what_was_compiled() -> None:
    """Every symbol that a plan may launch is among the instances compiled above."""
    for rung in LADDER:
        compiled = set(instances(rung))
        for dtype in FLOATS:
            for cols in (1, 33, 4096, 8193, 32768, 131072, 1_048_576):
                x = torch.empty(2, cols, dtype=dtype)
                problem = Problem(2, cols, str(dtype).removeprefix("torch."))
                if KERNELS[rung.name].reasons(problem):
                    continue
                for block in (None, 32, 1024):
                    if rung.name == "v3_register_cache" and block and block * 32 < cols:
                        continue
                    numbers = KERNELS[rung.name].numbers(problem, block)
                    launches = rung.build(x, x, numbers)
                    assert {(each.file, each.symbol) for each in launches} <= compiled


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton() -> None:
    from online_softmax.triton import Build, compile_all

    builds = [
        Build(record.name.removeprefix("triton_"), dtype, arch, numbers.tile, numbers.block // 32)
        for record in KERNELS.values()
        if record.backend == "triton"
        for arch in record.arches
        for dtype in FLOATS
        for numbers in [record.numbers(Problem(4096, 4096, str(dtype).removeprefix("torch.")))]
    ]
    assert len(builds) == 2 * len(FLOATS) * len(KERNELS["triton_online"].arches)
    for build, found in zip(builds, compile_all(builds), strict=True):
        assert not isinstance(found, str), f"{build}: {found}"
        assert not found.has_local_memory, f"{build}: {found}"
