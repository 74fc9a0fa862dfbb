"""The streamed kernel: rings that turn, rows of many parts, the bits that split gives; numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from matrix_kit import ARCH, awkward, close, expected, matrix, needs_compiler
from online_softmax import catalogue, jit, ring, rowchoice, rowkernels, rowplan, rowsweep
from online_softmax.arches import ARCHES
from online_softmax.cuda import host, row_launch
from online_softmax.cuda.launch import Launch, run
from online_softmax.plan import Problem, ceil_div
from online_softmax.rowplan import BACKWARD, Row, vectors_a_row
from rows_kit import gpu

OPERATIONS = tuple(op for op in rowplan.OPERATIONS if op != "logsumexp")
DTYPES = (torch.float32, torch.bfloat16)
EACH = pytest.mark.parametrize("op", OPERATIONS)
TYPED = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def cut(op: str, cols: int, dtype: torch.dtype, kernel: str = "streamed") -> Row:
    """Blocks of 64 threads, so that short rows have many parts: 256 vectors, in a backward 128."""
    row = vectors_a_row(cols, dtype.itemsize)
    return replace(rowplan.streamed(row, op, (64, 2 if op in BACKWARD else 4)), kernel=kernel)


def launches(op: str, tensors: tuple[Tensor, ...], row: Row, zero_empty: bool) -> list[Launch]:
    if op in BACKWARD:
        return row_launch.backward(op, *tensors, 0.5, zero_empty, row, streams=False)
    return row_launch.forward(op, *tensors, 0.5, zero_empty, row, streams=True)


def ran(op: str, inputs: tuple[Tensor, ...], row: Row, zero_empty: bool = False) -> Tensor:
    """The result; the threads take turns in an order that changes from launch to launch."""
    out = torch.full(inputs[0].shape, 7.0, dtype=inputs[0].dtype)
    for order, launch in enumerate(launches(op, (*inputs, out), row, zero_empty)):
        host.launch(launch, order=5 * order + len(out))
    return out


def tight(monkeypatch: pytest.MonkeyPatch, blocks: int, spare: int) -> None:
    """So many blocks, and rings of so many stages more than a row of parts asks for at least."""
    monkeypatch.setattr(row_launch, "HOST_BLOCKS", blocks)
    original = row_launch._streamed

    def streamed(symbol: str, tensors: tuple, sizes: tuple, row: Row, whole: bool) -> list[Launch]:
        grid = min(blocks, len(tensors[0]) * row.parts)
        monkeypatch.setattr(ring, "stages", lambda *_: ceil_div(row.parts, grid) + spare)
        return original(symbol, tensors, sizes, row, whole)

    monkeypatch.setattr(row_launch, "_streamed", streamed)


def inputs_of(op: str, x: Tensor, zero_empty: bool = False) -> tuple[Tensor, ...]:
    """x, or dy and y; y is that of x, contiguous."""
    if op not in BACKWARD:
        return (x,)
    y = expected(op.removesuffix("_backward"), x, 0.5, zero_empty).to(x.dtype)
    return matrix(*x.shape, x.dtype, 2, 1), y


@needs_compiler
@TYPED
@EACH
def test_rings_that_turn_agree_with_float64(
    op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ragged last part, rows of one part, more blocks than items; every 16-byte phase."""
    phases = range(16 // dtype.itemsize)
    part = 256 * 16 // dtype.itemsize
    sizes = [(part * 5, 0, 3, 2), (40, 0, 2, 1), (part + 8, 0, 40, 1)]
    sizes += [(part * 2 + 99 + start, start, 1 + start % 4, 1 + start % 3) for start in phases]
    for cols, start, blocks, spare in sizes:
        zero_empty = bool(start % 2)
        with monkeypatch.context() as patch:
            tight(patch, blocks, spare)
            x = awkward(cols, dtype, start, 0)
            given = inputs_of(op, x, zero_empty)
            got = ran(op, given, cut(op, cols, dtype), zero_empty)
        if op not in BACKWARD:
            close(got, expected(op, x, 0.5, zero_empty), 1e-6)
            continue
        g, o = (each.double() for each in given)
        if op.startswith("log"):
            want = 0.5 * (g - o.exp() * g.sum(-1, keepdim=True))
        else:
            want = 0.5 * o * (g - (g * o).sum(-1, keepdim=True))
        if zero_empty:
            want[(x == -math.inf).all(-1)] = 0.0
        close(got, want, 1e-5)


@needs_compiler
@TYPED
@EACH
def test_a_row_has_the_bits_that_split_gives(
    op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many blocks and stages there are: the choice between the two is free."""
    for cols, start in ((16384, 0), (8195, 0), (8195, 3)):
        x = matrix(4, cols, dtype, start, 0)
        x[1, cols // 2 :] = -math.inf
        given = inputs_of(op, x)
        want = ran(op, given, cut(op, cols, dtype, "split"))
        for blocks, spare in ((1, 1), (3, 1), (7, 4)):
            with monkeypatch.context() as patch:
                tight(patch, blocks, spare)
                assert torch.equal(ran(op, given, cut(op, cols, dtype)), want)


@needs_compiler
@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
def test_planned_cuts_give_one_row_the_same_bits(op: str) -> None:
    """Few rows go to split and many to streamed; by the numbers that are planned."""
    cols = 262_151
    row = rowplan.numbers(op, cols, "float32", ARCH)
    assert row.kernel == "streamed"
    given = inputs_of(op, matrix(1, cols, torch.float32, 1, 0))
    want = ran(op, given, rowchoice.mechanism(row, op, Problem(1, cols)))
    assert torch.equal(ran(op, given, row), want)


@needs_compiler
def test_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tight(monkeypatch, 2, 1)
    for cols in (4096, 2051):
        x = matrix(3, cols, torch.float32, 0, 0).contiguous()
        want = expected("softmax", x, 0.5, False)
        for launch in launches("softmax", (x, x), cut("softmax", cols, x.dtype), False):
            host.launch(launch)
        close(x, want, 1e-6)


@needs_compiler
def test_nothing_outside_is_touched_and_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    tight(monkeypatch, 2, 1)
    for op, sanitizer in (("softmax", "address,undefined"), ("softmax_backward", "thread")):
        x = matrix(2, 1543, torch.float32, 1, 0)
        given, out = inputs_of(op, x), torch.empty(x.shape)
        report = host.sanitize(
            launches(op, (*given, out), cut(op, 1543, x.dtype), False), sanitizer
        )
        assert report.ok, report.text


@needs_compiler
def test_a_row_too_long_for_the_blocks_at_hand_goes_to_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "lag", lambda *_: 0)
    x = matrix(2, 300, torch.float32, 0, 0)
    found = launches("softmax", (x, torch.empty(2, 300)), cut("softmax", 300, x.dtype), False)
    assert [launch.file for launch in found] == ["split.cu", "split.cu"]
    close(
        ran("softmax", (x,), cut("softmax", 300, x.dtype)), expected("softmax", x, 0.5, False), 1e-6
    )


@gpu
@TYPED
@EACH
def test_on_the_gpu_every_run_gives_the_bits_of_split(op: str, dtype: torch.dtype) -> None:
    """Rows of more parts than there are blocks, and of fewer; whole, and off 16-byte boundaries."""
    if not rowplan.has_clusters(jit.device_arch()):
        pytest.skip("needs bulk copies: sm_90a or sm_100a")
    function = torch.log_softmax if op.startswith("log") else torch.softmax
    for rows, vectors, gap in ((40, 65_536, 0), (40, 65_536, 3), (7, 500_000, 0), (1, 5, 1)):
        cols = vectors * 16 // dtype.itemsize - gap
        x = torch.randn(rows, cols, device="cuda").to(dtype)
        given = (x, function(0.5 * x, -1)) if op in BACKWARD else (x,)
        row = rowplan.streamed(vectors_a_row(cols, dtype.itemsize), op)
        results = []
        for kernel in ("split", *["streamed"] * 10):
            out = torch.full_like(x, math.nan)
            work = launches(op, (*given, out), replace(row, kernel=kernel), False)
            assert {each.file for each in work} == {f"{kernel}.cu"}
            run(work, x.device)
            results.append(out)
        assert not results[0].isnan().any()
        assert all(torch.equal(result, results[0]) for result in results)
        if op not in BACKWARD:
            close(results[1][0].cpu(), expected(op, x[0].cpu(), 0.5, False), 1e-6)


# ---- numbers


def test_a_lag_lets_all_parts_of_a_row_be_posted() -> None:
    for parts in (1, 2, 7, 64, 1000):
        for blocks in (1, 2, 63, 64, 65, 264):
            for stages in range(1, 20):
                lag = ring.lag(parts, blocks, stages)
                last = max((block + parts - 1) // blocks for block in range(blocks))
                assert (lag == 0) == (ceil_div(parts, blocks) >= stages)
                assert lag == 0 or last <= lag < stages


@pytest.mark.parametrize("arch", rowplan.CLUSTER_ARCHES)
@EACH
def test_rings_fit_a_multiprocessor(op: str, arch: str) -> None:
    facts, tensors = ARCHES[arch], 2 if op in BACKWARD else 1
    found = rowsweep.sweep(op, 524_288, "float32", arch)
    cuts = [row for row in found if row.kernel == "streamed"]
    assert len(cuts) >= 3
    for row in cuts:
        assert replace(row, kernel="split", why="") in [replace(each, why="") for each in found]
        for whole in (False, True):
            sizes = row.block, row.vectors, tensors, whole
            stages = ring.stages(*sizes, facts)
            bytes_a_block = ring.shared_bytes(*sizes, stages)
            resident = ring.THREADS // row.block
            assert bytes_a_block <= facts.shared_bytes_block
            assert resident * (bytes_a_block + ring.RESERVED_BYTES) <= facts.shared_bytes_sm
            lag = ring.lag(row.parts, resident * facts.sm_count, stages)
            assert stages - lag >= 1
            under_way = (stages - lag) * row.block * row.vectors * 16 * tensors * resident
            assert under_way >= 32 << 10


def test_the_number_of_rows_decides_between_streamed_and_split_alone() -> None:
    cols = 1_048_576
    row = rowplan.numbers("softmax", cols, "float32", ARCH)
    assert row.kernel == "streamed"
    few = rowchoice.mechanism(row, "softmax", Problem(1, cols))
    assert few.kernel == "split"
    assert replace(few, kernel="streamed", why="") == replace(row, why="")
    assert rowchoice.mechanism(row, "softmax", Problem(64, cols)) == row
    assert rowchoice.mechanism(row, "softmax", Problem(64, cols, sm_count=20)).kernel == "split"
    shorter = rowplan.numbers("softmax", 4096, "float32", ARCH)
    assert rowchoice.mechanism(shorter, "softmax", Problem(1, 4096)) == shorter
    assert catalogue.choose(Problem(1, cols))[0].name == "split"
    assert catalogue.choose(Problem(64, cols))[0].name in ("streamed", "triton_online")
    x = torch.empty(64, cols, device="meta")
    assert rowkernels.numbers("softmax", x) == row
    assert rowkernels.numbers("softmax", x[:1]).kernel == "split"


def test_what_is_too_long_is_told() -> None:
    for op, arch in itertools.product(OPERATIONS, rowplan.CLUSTER_ARCHES):
        planned = 2_097_152 if op in BACKWARD else 4_194_304
        assert rowplan.most_cols("streamed", op, "float32", arch) >= planned
        assert rowplan.numbers(op, planned, "float32", arch).kernel == "streamed"
        assert rowplan.numbers(op, planned + 1, "float32", arch).kernel == "split"
    most = rowplan.most_cols("streamed", "softmax", "float32", ARCH)
    (why,) = rowplan.reasons("streamed", "softmax", Problem(4, most + 1, device="cuda"))
    assert why == (
        f"streamed holds at most {most} columns here; this row has {most + 1}: split does"
    )
    assert rowplan.reasons("streamed", "softmax", Problem(4, most, device="cuda", sm_count=60))
    (why,) = rowplan.reasons("streamed", "softmax", Problem(4, 4, arch="sm_80", device="cuda"))
    assert why == "streamed needs bulk copies: planned for sm_90a and sm_100a, this is sm_80"
