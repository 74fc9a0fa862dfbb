"""Who runs in a cell of attention, of merges, of a linear layer's loss; what a table shows."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bench_kit import HEADER, setting
from online_softmax.lab import (
    attentioncontenders,
    benchpage,
    cli,
    contenders,
    fusedcells,
    fusedsizes,
    fusedtables,
    grid,
    opbench,
)
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.fusedsizes import FUSED_OPS, LINEAR, MERGE
from online_softmax.lab.grid import Cell
from online_softmax.lab.rotation import bound

SMALL = {"attention": "2x4x40x16", "attention_backward": "2x4x40x16", "attention_decode": "3x40",
         MERGE: "3x20x16", LINEAR: "24x16x50"}  # fmt: skip


def small(op: str) -> list[Cell]:
    return grid.named_cells([op], ["float32"], SMALL[op])


def tensors(cell: Cell) -> tuple[Tensor, ...]:
    return fusedcells.buffers(cell, setting()).sets[0]


def test_lines_of_a_cell():
    def names(op: str, is_gpu: bool, *rivals: str) -> list[str]:
        return [c.name for c in attentioncontenders.contenders(small(op)[0], rivals, is_gpu)][2:]

    backends = ["torch, flash", "torch, cudnn", "torch, efficient"]
    every = ("torch", "compile", "quack", "liger", "tutorial", "flash-attn", "cut-cross-entropy")
    assert names("attention", True, *every) == [*backends, "compile", "flash-attn", "tutorial"]
    assert names("attention_backward", True, *every) == [*backends, "compile", "flash-attn"]
    assert names("attention_decode", False, *every) == ["torch", "compile", "flash-attn"]
    merged = contenders.contenders(small(MERGE)[0], every)
    assert [c.name for c in merged] == ["ceiling", "ours", "torch", "compile"]
    loss = contenders.contenders(small(LINEAR)[0], every)
    assert [c.name for c in loss] == [
        "ours, low", "ours, fast", "torch", "torch, chunked", "compile", "liger",
        "cut-cross-entropy",
    ]  # fmt: skip


def test_a_rival_that_is_not_installed_is_a_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    cell = small("attention")[0]
    row = opbench.measure(cell, contenders.contenders(cell, ("flash-attn",)), setting())
    assert row.entry("flash-attn").why == "not installed: pip install flash-attn"
    assert row.entry("flash-attn").median_us is None
    assert row.is_right


def test_flash_attn_is_given_tokens_before_heads(monkeypatch: pytest.MonkeyPatch):
    def function(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        turned = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=causal)
        return out.transpose(1, 2)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func = function
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    for cell in small("attention"):
        row = opbench.measure(cell, contenders.contenders(cell, ("flash-attn",)), setting())
        assert row.entry("flash-attn").ok, row.entry("flash-attn")


def test_a_backward_is_timed_without_its_forward():
    cell, ran = small("attention_backward")[0], []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ran.append(len(ran))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    call = attentioncontenders._backward(attend)
    given = tensors(cell)
    run = bound(call, given)
    assert ran == [0]
    first, second = run(), run()
    assert ran == [0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_ceiling_is_as_many_products(monkeypatch: pytest.MonkeyPatch):
    counted = []

    def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
        counted.append(2 * len(a) * a.shape[1] * b.shape[1])

    monkeypatch.setattr(torch, "mm", mm)
    for cell in grid.named_cells(["attention", "attention_backward"], ["float32"], "1x8x512x64"):
        attentioncontenders.products(cell)(*tensors(cell))
        assert sum(counted) == pytest.approx(cell.flops, rel=0.01)
        counted.clear()


# ---- tables


def test_a_table_has_rates_beside_the_ceiling():
    cell = Cell("attention", "bfloat16", *fusedsizes.attention(1, 16, 16384, 128, True))
    row = replace(opbench.blank(cell, "normal"), entries=(
        Entry("ceiling", "ceiling", clock="graph", median_us=1500.0),
        Entry("ours", "ours", True, clock="graph", median_us=2000.0, tflops=549.76),
        Entry("torch, flash", "rival", True, clock="graph", median_us=4000.0, tflops=274.88),
        Entry("compile", "rival", why="too odd"),
    ))  # fmt: skip
    (table,) = fusedtables.tables([row])
    assert table.title == "attention bfloat16, TFLOP/s"
    assert table.head == ("batch", "heads", "tokens", "head_dim", "keys", "ceiling µs", "µs",
                          "TFLOP/s", "of ceiling", "torch, flash", "compile")  # fmt: skip
    assert table.rows == (("1", "16", "16,384", "128", "causal", "1,500", "2,000", "550", "0.750",
                           "275", "refuses"),)  # fmt: skip


def test_the_command_lists_them():
    words = ["bench", *FUSED_OPS, "--grid", "big", "--dtype", "bf16", "--list"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert "attention bfloat16 262144 x 16384 (batch=1 heads=16 kv_heads=16" in done.stdout
    words = ["bench", "attention", "--cells", "1x2x3x16", "--values", "ascending", "--list"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2
    assert "--values ascending is of operations on rows alone" in done.stderr


@pytest.mark.parametrize("op", ["attention", "softmax"])
def test_the_legend_is_of_the_tables_that_stand_there(op: str) -> None:
    (cell, *_) = small(op) if op in SMALL else [Cell("softmax", "float32", 2, 8)]
    row = Row(cell.op, cell.dtype, cell.rows, cell.cols, "normal", 8, sizes=cell.sizes)
    said = " ".join(benchpage.marks([Part(HEADER, (row,))]))
    assert ("x RIVAL" in said, "unit in the title" in said) == (op == "softmax", op != "softmax")
