"""Cells of further operations: logsumexp's gradient, outer dims, fp8, token_stats' gradient and
packed sequences: what they move, who runs, and that one wrong element is seen."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import online_softmax
from bench_kit import setting
from online_softmax.lab import (
    benchclock,
    contenders,
    cpufit,
    fusedcells,
    fusedtables,
    grid,
    morecells,
    morecontenders,
    moresizes,
    opbench,
    opjudge,
    rotation,
)
from online_softmax.lab.benchfile import Entry
from online_softmax.lab.grid import Cell
from online_softmax.lab.moresizes import FP8, LSE_BACKWARD, MORE_OPS, OUTER_OPS, STATS_BOTH, VARLEN
from online_softmax.lab.opjudge import OUR_ULPS

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPES = dict.fromkeys(MORE_OPS, "30x50") | dict.fromkeys(OUTER_OPS, "3x40x16")
SHAPES[VARLEN] = "3x4x40x16"


def small(op: str, dtype: str = "float32") -> list[Cell]:
    return grid.named_cells([op], [dtype], SHAPES[op])


def tensors(cell: Cell) -> tuple[Tensor, ...]:
    return fusedcells.buffers(cell, setting()).sets[0]


def test_what_a_cell_moves_and_counts():
    moved = {op: small(op, "bfloat16")[0].ideal_bytes for op in MORE_OPS}
    assert moved == {
        LSE_BACKWARD: 2 * 1500 * 2 + 30 * (2 + 4),
        "softmax_outer": 2 * 3 * 40 * 16 * 2,
        "log_softmax_outer": 2 * 3 * 40 * 16 * 2,
        "logsumexp_outer": (3 * 40 * 16 + 3 * 16) * 2,
        FP8: 1500 * (1 + 2),
        STATS_BOTH: 3 * 1500 * 2 + 30 * 8,
        VARLEN: 4 * (14 + 27 + 40) * 4 * 16 * 2,
    }
    assert moresizes.lengths(3, 40) == [14, 40, 27]
    whole, causal = small(VARLEN)
    assert whole.flops == 2 * causal.flops == 4 * (14**2 + 27**2 + 40**2) * 4 * 16
    assert {small(op)[0].flops for op in MORE_OPS[:-1]} == {0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", MORE_OPS)
def test_ours_and_torch_s_are_right(op: str, dtype: str):
    for cell in small(op, dtype):
        row = opbench.measure(cell, contenders.contenders(cell, ("torch",)), setting())
        assert [entry.name for entry in row.entries] == ["ceiling", "ours", "torch"]
        assert [entry.why for entry in row.entries] == ["", "", ""], cell.text
        # torch.logsumexp rounds more than once to bfloat16, and its gradient starts from that.
        assert 0 < row.entry("ours").share_max < 0.02
        assert 0 < row.entry("torch").share_max < (0.04 if op == LSE_BACKWARD else 0.02)
        assert row.entry("ours").gbs == pytest.approx(cell.ideal_bytes / 100.0 / 1e3)


@pytest.mark.parametrize("change", [0.02, float("nan"), float("inf")])
@pytest.mark.parametrize("op", MORE_OPS)
def test_one_wrong_element_is_seen(op: str, change: float):
    """The last one, of the last row that is compared."""
    cell = small(op)[-1]
    given = tensors(cell)
    made = contenders.contenders(cell, ())[1].make()(*given).clone()
    assert fusedcells.check(cell, given, made, OUR_ULPS).ok
    made.view(-1)[-1] += change
    why = fusedcells.check(cell, given, made, OUR_ULPS).why
    assert "should be" in why or "NaN" in why


def test_what_is_not_written_is_seen():
    """Also beyond the rows that are compared: the last tensor is NaN before a call."""
    cell = small("softmax_outer")[0]

    def half(x: Tensor, y: Tensor) -> Tensor:
        y[0] = torch.softmax(x[0], 0)
        return y

    tensors(cell)
    found = opbench.judged(half, cell, tensors(cell), OUR_ULPS)
    assert "1280 of 1920 elements of the result are NaN" in found.why


def test_large_cells_are_compared_in_part():
    for cell in grid.grid_cells(MORE_OPS, ["bfloat16"], "all"):
        rows, sizes = morecells.checked_rows(cell), fusedcells.parsed(cell.sizes)
        assert 0 < rows <= cell.rows
        if cell.op != VARLEN and not sizes and rows > 2:
            assert rows * cell.cols <= morecells.CHECKED_ELEMENTS
    planes = morecells._spread(5, 100, torch.device("cpu"))
    assert planes.tolist() == [0, 24, 49, 74, 99]
    assert morecells._sequences({"batch": 4}, 100) == [(0, 25), (100, 200), (200, 250)]


@pytest.mark.parametrize("op", [*OUTER_OPS, LSE_BACKWARD])
def test_the_part_that_is_compared_is_what_the_judge_reads(monkeypatch, op: str):
    """Of planes, and of slices side by side in one; the price of a cell on a CPU goes by it."""
    judge, seen = opjudge.check, []
    monkeypatch.setattr(
        opjudge, "check", lambda op, xs, *r: (seen.append(xs[0].numel()), judge(op, xs, *r))[1]
    )
    (wide,) = grid.named_cells(["softmax_outer"], ["float32"], "1x32768x4096")
    assert fusedcells.checked_share(wide) == 1 / 8
    for most in (2**24, 320, 64):
        monkeypatch.setattr(morecells, "CHECKED_ELEMENTS", most)
        (cell,) = small(op)
        given = tensors(cell)
        made = contenders.contenders(cell, ())[1].make()(*given)
        assert fusedcells.check(cell, given, made, OUR_ULPS).ok
        count = given[0].numel()
        wanted = seen.pop() / count if op in OUTER_OPS else morecells.checked_rows(cell) / 30
        assert fusedcells.checked_share(cell) == pytest.approx(wanted)
        assert cpufit._judged(cell) == pytest.approx(wanted * cell.ideal_bytes)


def test_of_packed_sequences_the_longest_are_most_of_the_work():
    (cell, _) = grid.named_cells([VARLEN], ["float32"], "4x8x100x64")
    assert fusedcells.checked_share(cell) == (25**2 + 100**2 + 50**2) / (
        25**2 + 75**2 + 100**2 + 50**2
    ) * (2 / 8)


def test_torch_s_gradient_is_autograd_s_of_torch_logsumexp(monkeypatch: pytest.MonkeyPatch):
    """Its forward ran before, outside of the time."""
    (cell,), right, seen = small(LSE_BACKWARD), torch.logsumexp, []
    x, dlse, lse, dx = tensors(cell)
    call = contenders.contenders(cell, ("torch",))[2].make()
    monkeypatch.setattr(torch, "logsumexp", lambda *given: (seen.append(1), right(*given))[1])
    timed = rotation.bound(call, (x, dlse, lse, dx))
    assert seen == [1]
    found = timed()
    assert seen == [1]
    torch.testing.assert_close(found, dlse[:, None] * torch.softmax(x, -1))


def test_fp8_is_the_head_of_what_a_copy_reads():
    """A copy of it moves as many bytes as the operation, and x is what it was."""
    x, source, y = tensors(small(FP8, "bfloat16")[0])
    assert (x.dtype, y.dtype, len(source)) == (torch.float8_e4m3fn, torch.bfloat16, 2250)
    assert x.data_ptr() == source.data_ptr()
    before = x.clone()
    morecontenders._copied(x, source, y)
    assert torch.equal(y.view(-1).view(torch.uint8)[:2250], source)
    assert torch.equal(before.view(torch.uint8), x.view(torch.uint8))


def test_lines_of_packed_sequences():
    cell, every = small(VARLEN)[0], contenders.KNOWN

    def names(is_gpu: bool, *rivals: str) -> list[str]:
        return [line.name for line in morecontenders.contenders(cell, rivals, is_gpu)]

    assert names(False, *every) == ["ceiling", "ours", "torch", "compile", "flash-attn"]
    assert names(True, "torch") == ["ceiling", "ours", "torch", "torch, one by one"]


def test_varlen_functions_are_given_ends_and_the_longest(monkeypatch: pytest.MonkeyPatch):
    """torch's, which has no kernel on a CPU, and flash-attn's: each by ours, as it is called."""

    def torchs(q, k, v, ends_q, ends_k, max_q, max_k, *, window_size):
        return online_softmax.attention_varlen(
            q, k, v, ends_q, ends_k, max_q, max_k, window_size=window_size
        )

    def flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        return (online_softmax.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal
        ), None)  # fmt: skip

    module, flash_attn = types.ModuleType("varlen"), types.ModuleType("flash_attn")
    module.varlen_attn, flash_attn.flash_attn_varlen_func = torchs, flash
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    for cell in small(VARLEN):
        lines = morecontenders.contenders(cell, ("torch", "flash-attn"), True)
        row = opbench.measure(cell, lines, setting())
        assert [entry.why for entry in row.entries] == [""] * 5, row


def test_a_mask_parts_documents():
    """flex_attention is compiled with it: tokens see their own sequence, those before if causal."""
    from torch.nn.attention import flex_attention

    for cell in small(VARLEN):
        made, q = morecontenders._Packed(cell), tensors(cell)[0]
        mask = made._mask(flex_attention, q).mask_mod
        place = torch.arange(len(q))
        seen = mask(torch.tensor(0), torch.tensor(0), place[:, None], place[None, :])
        want = torch.block_diag(*(torch.ones(n, n) for n in made.lengths)).bool()
        want = want.tril() if made.is_causal else want
        assert torch.equal(seen.expand(len(q), len(q)), want)


def test_tables_say_the_sizes():
    said = {}
    for op in MORE_OPS:
        row = replace(opbench.blank(small(op, "bfloat16")[-1], "normal"), entries=(
            Entry("ceiling", "ceiling", clock="graph", median_us=100.0),
            Entry("ours", "ours", True, clock="graph", median_us=125.0, gbs=900.0, tflops=30.0),
        ))  # fmt: skip
        (table,) = fusedtables.tables([row])
        assert table.rows[0][-1] == "0.800"
        said[op] = dict(zip(table.head, table.rows[0], strict=True))
    assert said[LSE_BACKWARD]["columns"] == "50"
    outer = [said["softmax_outer"][name] for name in ("planes", "along", "inner", "GB/s")]
    assert outer == ["3", "40", "16", "900"]
    packed = [said[VARLEN][name] for name in ("tokens", "longest", "keys", "TFLOP/s")]
    assert packed == ["81", "40", "causal", "30"]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("op", MORE_OPS)
def test_a_cell_on_the_gpu(op: str):
    shapes = dict.fromkeys(MORE_OPS, "64x5000") | dict.fromkeys(OUTER_OPS, "4x512x256")
    shapes[VARLEN] = "4x4x512x64"
    for cell in grid.named_cells([op], ["bfloat16"], shapes[op]):
        found = contenders.contenders(cell, ("torch",))
        row = opbench.measure(cell, found, benchclock.gpu_setting())
        assert row.is_right, row
        for name in ("ceiling", "ours"):
            assert row.entry(name).clock == "graph", row.entry(name)
            assert 0 < row.entry(name).median_us < 10_000
        assert [e for e in row.entries if e.kind == "rival" and e.median_us], row
