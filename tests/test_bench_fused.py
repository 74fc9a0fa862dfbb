"""Attention, merges and a linear layer's loss as cells: their sizes, and what is right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench_kit import HEADER, setting
from online_softmax.lab import (
    attentioncontenders,
    attentionjudge,
    benchclock,
    benchfile,
    contenders,
    fusedcells,
    fusedsizes,
    grid,
    opbench,
)
from online_softmax.lab.fusedsizes import ATTENTION_OPS, FUSED_OPS, LINEAR, MERGE
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.opjudge import OUR_ULPS, RIVAL_ULPS

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SMALL = {"attention": "2x4x40x16", "attention_backward": "2x4x40x16", "attention_decode": "3x40",
         MERGE: "3x20x16", LINEAR: "24x16x50"}  # fmt: skip


def small(op: str, dtype: str = "float32") -> list[Cell]:
    return grid.named_cells([op], [dtype], SMALL[op])


def tensors(cell: Cell) -> tuple[Tensor, ...]:
    return fusedcells.buffers(cell, setting()).sets[0]


# ---- sizes


def test_what_a_cell_moves_and_counts():
    cell = Cell("attention", "bfloat16", *fusedsizes.attention(2, 16, 4096, 128, True))
    tokens, features = 2 * 4096, 2048
    assert cell.ideal_bytes == 4 * tokens * features * 2  # q, k, v, out
    assert cell.flops == 4 * 2 * 4096**2 * features // 2
    backward = replace(cell, op="attention_backward")
    assert backward.flops == cell.flops * 5 // 2
    assert backward.ideal_bytes == 8 * tokens * features * 2 + 4 * 2 * 16 * 4096
    decode = Cell("attention_decode", "bfloat16", *fusedsizes.decode(8, 4096))
    assert decode.ideal_bytes == (2 * 8 * 8 * 4096 * 128 + 2 * 8 * 32 * 128) * 2
    assert decode.flops == 0
    merged = Cell(MERGE, "float32", 100, 64, "parts=3")
    assert merged.ideal_bytes == 4 * 100 * (64 * 4 + 4)
    loss = Cell(LINEAR, "bfloat16", 8192, 128256, "features=4096")
    assert loss.flops == 6 * 8192 * 4096 * 128256


@pytest.mark.parametrize("name", grid.GRIDS)
@pytest.mark.parametrize("op", FUSED_OPS)
def test_grids_have_cells_each_once_and_in_bounds(op: str, name: str):
    cells = grid.grid_cells([op], ["bfloat16"], name)
    assert cells
    assert len(set(cells)) == len(cells)
    assert all(cell.has_rivals and not cell.is_large for cell in cells)
    sets = {cell: max(2, -(-3 * 60 * 2**20 // cell.ideal_bytes)) for cell in cells}
    assert max(cell.memory_bytes(min(sets[cell], 1024), 0) for cell in cells) < 130 * 2**30
    assert {cell.cell for cell in [opbench.blank(c, "normal") for c in cells]} == set(cells)


def test_attention_s_large_cells_are_those_that_are_compared():
    cells = grid.grid_cells(["attention"], ["bfloat16"], "big")
    assert len(cells) == 2 * 2 * 5
    for cell in cells:
        sizes = fusedsizes.parsed(cell.sizes)
        assert sizes["heads"] * sizes["head_dim"] == 2048
        assert sizes["batch"] * cell.cols == 16384
    decodes = {(fusedsizes.parsed(c.sizes)["batch"], c.cols)
               for c in grid.grid_cells(["attention_decode"], ["bfloat16"], "big")}  # fmt: skip
    assert decodes >= {(1, 4096), (1, 524288), (8, 131072), (64, 32768)}
    assert (64, 524288) not in decodes  # 128 GiB of keys


@pytest.mark.parametrize("op", FUSED_OPS)
def test_shapes_of_another_operation_are_refused(op: str):
    for text in ("4", "4x0x2x16", "axb", "1x2x3x4x5"):
        with pytest.raises(BadInput, match=f"of {op} give {fusedsizes.WANTED[op]}"):
            grid.named_cells([op], ["float32"], text)


def test_a_row_is_the_cell_that_it_was_of(tmp_path: Path):
    cells = [cell for op in (*ATTENTION_OPS, MERGE) for cell in small(op)]
    lines = [opbench.blank(cell, "normal") for cell in cells]
    text = benchfile.header_line(HEADER) + "".join(benchfile.line("cell", row) for row in lines)
    (part,) = benchfile.parse(text, "x")
    assert [row.cell for row in part.rows] == cells
    of_before = opbench.blank(grid.Cell("softmax", "bfloat16", 8, 64), "normal")
    old = {key: value for key, value in json.loads(benchfile.line("cell", of_before)).items()
           if key not in ("sizes", "flops", "repeats", "clocks")}  # fmt: skip
    text = benchfile.header_line(HEADER) + json.dumps(old) + "\n"
    assert benchfile.parse(text, "x")[0].rows[0].sizes == ""  # a file from before them


# ---- what is right


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", [*ATTENTION_OPS, MERGE])
def test_ours_and_torch_s_are_right(op: str, dtype: str):
    for cell in small(op, dtype):
        found = contenders.contenders(cell, ("torch",))
        assert [line.name for line in found] == ["ceiling", "ours", "torch"]
        row = opbench.measure(cell, found, setting())
        assert [entry.why for entry in row.entries] == ["", "", ""], cell.text
        errors = [entry.share_max for entry in row.entries[1:]]
        assert all(0 < error < 0.01 for error in errors)
        assert row.entry("ours").gbs == pytest.approx(cell.ideal_bytes / 100.0 / 1e3)
        assert (row.entry("ours").tflops is None) is (cell.flops == 0)


def spoiled(cell: Cell, place: int, change: float) -> str:
    """Why a right result with one element of its place-th tensor changed is none."""
    given = tensors(cell)
    call = contenders.contenders(cell, ())[1].make()
    made = call(*given)
    results = [t.clone() for t in (made if isinstance(made, tuple) else (made,))]
    assert fusedcells.check(cell, given, tuple(results), OUR_ULPS).ok
    flat = results[place].view(-1)
    flat[-1] = flat[-1] + change
    return fusedcells.check(cell, given, tuple(results), OUR_ULPS).why


@pytest.mark.parametrize(
    ("op", "place", "name"),
    [("attention", 0, "out"), ("attention_decode", 0, "out"), ("attention_backward", 0, "dq"),
     ("attention_backward", 1, "dk"), ("attention_backward", 2, "dv"), (MERGE, 0, "out"),
     (MERGE, 1, "lse")],
)  # fmt: skip
@pytest.mark.parametrize("change", [0.01, float("nan"), float("inf")])
def test_one_wrong_element_is_seen(op: str, place: int, name: str, change: float):
    why = spoiled(small(op)[-1], place, change)
    assert name in why
    assert "should be" in why or "NaN" in why


def test_a_mask_that_is_left_out_is_seen():
    plain, causal = small("attention")
    given = tensors(causal)
    call = contenders.contenders(plain, ())[1].make()
    assert "out[" in fusedcells.check(causal, given, call(*given), RIVAL_ULPS).why


def test_results_of_another_shape_or_type_are_none():
    cell = small("attention")[0]
    given = tensors(cell)
    assert (
        "should be (2, 4, 40, 16) torch.float32"
        in fusedcells.check(cell, given, given[0][:1], OUR_ULPS).why
    )
    assert "float16" in fusedcells.check(cell, given, given[0].half(), OUR_ULPS).why
    backward = small("attention_backward")[0]
    assert (
        "1 results, should be dq, dk, dv"
        in fusedcells.check(backward, tensors(backward), given[0], OUR_ULPS).why
    )


def test_gradients_by_formula_are_autograd_s():
    cell = small("attention_backward")[1]
    q, kv, g = (t.double() for t in tensors(cell))
    leaves = [t.detach().requires_grad_() for t in (q, kv[0], kv[1])]
    attend = attentioncontenders._torchs(None)(cell, True)
    wanted = attentioncontenders.gradients.by((attend(*leaves), leaves), g)
    for batch in range(2):
        for head in range(4):
            mine = (q[batch, head : head + 1], kv[0, batch, head], kv[1, batch, head])
            found = attentionjudge._gradients(*mine, g[batch, head : head + 1], True)
            for (gradient, size), want in zip(found, wanted, strict=True):
                torch.testing.assert_close(gradient.squeeze(0), want[batch, head])
                assert bool((size.squeeze(0) >= want[batch, head].abs() * (1 - 1e-9)).all())


def test_values_are_independent_of_each_other():
    """Of one generator: keys that are the queries again would make each row a one."""
    q, kv, out = tensors(Cell("attention", "float32", *fusedsizes.attention(1, 4, 64, 16, False)))
    columns = torch.stack([t.reshape(-1)[:4096] for t in (q, kv[0], kv[1], out)])
    assert float((torch.corrcoef(columns) - torch.eye(4)).abs().max()) < 0.1


# ---- for real


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("op", [*ATTENTION_OPS, MERGE])
def test_a_cell_on_the_gpu(op: str):
    shapes = {"attention": "2x4x512x64", "attention_backward": "2x4x512x64",
              "attention_decode": "2x4096", MERGE: "4x4096x128"}  # fmt: skip
    for cell in grid.named_cells([op], ["bfloat16"], shapes[op]):
        found = contenders.contenders(cell, ("torch", "tutorial"))
        row = opbench.measure(cell, found, benchclock.gpu_setting())
        assert row.is_right, row
        for name in ("ceiling", "ours"):
            assert row.entry(name).clock == "graph", row.entry(name)
            assert 0 < row.entry(name).median_us < 10_000
        timed = [entry for entry in row.entries if entry.kind == "rival" and entry.median_us]
        assert timed, row
