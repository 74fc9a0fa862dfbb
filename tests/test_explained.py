"""`explain` of every operation: what it says is what runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from online_softmax import (
    attentionplan,
    catalogue,
    decodekernels,
    decodeplan,
    explain,
    explanation,
    linearplan,
    mergekernels,
    rowchoice,
    rowplan,
)
from online_softmax.cuda import merge_launch, outer_launch, tokenstats_launch
from online_softmax.plan import Problem

needs_cuda_bindings = pytest.mark.skipif(
    catalogue.lacks("cuda") is not None, reason="explain says what is missing instead"
)
needs_triton = pytest.mark.skipif(
    catalogue.lacks("triton") is not None, reason="explain says what is missing instead"
)


def lines(*args: Any, **options: Any) -> list[str]:
    return explain(*args, **options).splitlines()


@needs_cuda_bindings
@pytest.mark.parametrize("op", ["log_softmax", "logsumexp", "softmax_backward"])
@pytest.mark.parametrize("cols", [64, 32_000, 300_000])
def test_rows(op: str, cols: int) -> None:
    row = rowchoice.chosen(op, Problem(4096, cols, "bfloat16"))
    found = lines(4096, cols, "bfloat16", op=op)
    assert found[0] == f"{row.kernel}: {row.why}"
    named = {line.split("not ")[1].split(":")[0] for line in found[1:]}
    assert named == {"registers", "landed", "streamed", "split"} - {row.kernel}
    assert lines(4, 4, "float64", op=op)[0].startswith("reference: ")


@needs_cuda_bindings
@pytest.mark.parametrize("op", rowplan.FORWARD)
@pytest.mark.parametrize(("cols", "inner"), [(8, 64), (700, 33), (1500, 4), (30_000, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_along_another_dim(op: str, cols: int, inner: int, dtype: torch.dtype) -> None:
    """The launch's blocks, and passes as its kernel makes them; the gradient's too."""
    x = torch.empty(5, cols, inner, dtype=dtype, device="meta")
    forward = outer_launch.outer(op, x, x, 1, 1.0, False)
    backward = outer_launch.outer_backward(f"{op}_backward", x, x, x, 1, 1.0, False)
    for name, launch in ((op, forward), (f"{op}_backward", backward)):
        found = lines(5, cols, str(dtype).removeprefix("torch."), op=name, inner=inner)
        side, along = map(int, re.findall(r"(\d+) threads side by side, (\d+) along", found[0])[0])
        assert side * along == launch.block
        blocks = "1 block " if launch.grid == 1 else f"{launch.grid} blocks "
        assert f": {blocks}for 132" in found[0]
        width, held = re.findall(r", (\d+), (\d+), \w+>", launch.symbol)[0]
        kept = "nothing is kept: two" if held == "0" else f"each thread keeps {held} elements: one"
        assert kept in found[0]
        assert f"  {width} neighbours" in found[1] or (width, found[1][:13]) == (
            "1",
            "  one element",
        )
    assert lines(5, cols, op=op, inner=1) == lines(5, cols, op=op)


@needs_cuda_bindings
def test_logsumexp_along_another_dim_copies() -> None:
    found = lines(5, 700, op="logsumexp", inner=33)
    assert found[:-1] == lines(5 * 33, 700, op="logsumexp")
    assert "x is copied first" in found[-1]
    assert lines(5, 700, op="logsumexp_backward", inner=33) == lines(
        5, 700, op="logsumexp_backward"
    )


@pytest.mark.parametrize("op", explanation.OPERATIONS)
def test_nothing_to_do(op: str) -> None:
    """One line, and it names no kernel; where rows without columns give something, that is said."""
    said = "none: {} x {} has no element: no kernel of ours is launched"
    assert lines(0, 4096, op=op) == [said.format(0, 4096)]
    gives = op in ("attention", "merge")
    assert (lines(8, 0, op=op) == [said.format(8, 0)]) == (not gives)
    assert not explanation.asks_arch(op, 0, 4096, "float32")
    assert explanation.asks_arch(op, 8, 4096, "float32")


@pytest.mark.parametrize("op", explanation.OPERATIONS)
def test_float64_is_one_line(op: str) -> None:
    found = lines(8, 4096, "float64", op=op)
    if op == "linear_cross_entropy":  # whose matrix products are cut all the same
        assert "this is float64" in found[2]
        return
    (line,) = found
    assert line.startswith("reference: ")
    assert "float64" in line
    assert not explanation.asks_arch(op, 8, 4096, "float64")


@needs_cuda_bindings
def test_split_says_what_else_there_is() -> None:
    """Parts for each multiprocessor decide between two kernels; the reason names both sides."""
    few = rowchoice.chosen("softmax", Problem(4, 1_048_576))
    assert few.kernel == "split"
    assert "each of 512 parts of rows: streamed wants 528 or more" in few.why
    assert rowchoice.chosen("softmax", Problem(5, 1_048_576)).kernel == "streamed"


@needs_cuda_bindings
def test_few_rows_and_other_bits() -> None:
    found = lines(1, 32_000, "bfloat16", op="log_softmax")
    cut = rowchoice.few("log_softmax", Problem(1, 32_000, "bfloat16"))
    assert cut is not None
    assert f"  with batch_invariant(False): {cut.why}" in found


@needs_cuda_bindings
def test_token_stats() -> None:
    cut = tokenstats_launch.cut(128_256, 2)
    found = lines(8192, 128_256, "bfloat16", op="token_stats")
    assert found[0].startswith(f"split: {cut.parts} parts a row, {cut.block} threads")
    assert "float64" in lines(4, 4, "float64", op="token_stats")[0]
    assert "do not fit float32" in lines(1, 1 << 25, op="token_stats")[0]


@needs_cuda_bindings
def test_linear_cross_entropy() -> None:
    found = lines(8192, 128_256, "bfloat16", op="linear_cross_entropy", hidden=4096)
    assert found[0].startswith(f"low: 16 blocks of {linearplan.block_cols(8192, 128_256, 4, 2)}")
    cut = linearplan.fast_cut(8192, 4096, 128_256, 4, 2, 4)
    assert f"1 group of {cut.group} tokens in chunks of {cut.chunk}" in found[1]
    most = linearplan.most_bytes("fast", 8192, 4096, 128_256, 4, 2)
    assert f"{most / 1e6:.0f} MB" in found[1]


@needs_cuda_bindings
def test_merge() -> None:
    """As many blocks as the launch has."""
    found = lines(4096, 128, "bfloat16", op="merge", parts=4)
    out, lse = torch.empty(4096, 128, dtype=torch.bfloat16, device="meta"), torch.empty(4096)
    work = merge_launch.forward([lse] * 4, [], [out] * 4, "e", lse, lse, out)
    assert f": {work[0].grid} blocks for 132 multiprocessors: one read of each" in found[0]
    assert found[0].startswith("merge: 4 pairs in one kernel, 16 lanes a row, 256 threads a block")
    most = mergekernels.MOST_PARTS
    for parts in (1, most + 1):
        (line,) = lines(4096, 128, op="merge", parts=parts)
        assert line.endswith(f"a kernel merges 2 to {most} pairs; this is {parts}")
    assert "no element" in lines(0, 128, op="merge")[0]
    assert "nobody has measured sm_80" in lines(4096, 128, arch="sm_80", op="merge")[-1]


@needs_triton
def test_attention() -> None:
    found = lines(16_384, 16_384, "bfloat16", op="attention", heads=16)
    t = attentionplan.tiles("forward", "sm_90a", 2, 128)
    assert found[0].startswith(f"triton: tiles of {t.block_q} queries x {t.block_k} keys, 8 warps")
    assert f": {16 * 16_384 // t.block_q} blocks for 132 multiprocessors" in found[0]
    assert "chosen by the clock among seven, on an H200" in found[1]
    assert "nobody timed them" in lines(100, 100, "bfloat16", "sm_80", op="attention")[1]
    assert "nobody has measured sm_80" in lines(100, 100, "bfloat16", "sm_80", op="attention")[-1]
    assert "head_dim 80 is padded to 128" in lines(100, 100, op="attention", head_dim=80)[-1]
    (line,) = lines(100, 100, "float64", op="attention")
    assert line.startswith("reference: ")
    assert "this is 300" in lines(100, 100, "float16", op="attention", head_dim=300)[0]


@needs_triton
@pytest.mark.parametrize("k_len", [200, 65_536])
def test_a_decode(k_len: int) -> None:
    """As many blocks and parts as the launch has."""
    launch = pytest.importorskip("online_softmax.triton.attention_launch")
    sizes = {"batch": 3, "heads": 8, "kv_heads": 2, "head_dim": 64}
    found = lines(1, k_len, "float32", op="attention", **sizes)
    q = torch.empty(3, 8, 1, 64, device="meta")
    k = torch.empty(3, 2, k_len, 64, device="meta")
    given = launch.Inputs(q, k, k, None, None, None, None, None)
    o = attentionplan.Options(0, 0, None, -1, -1, False, None, False)
    first = launch.forward(given, o, "sm_90a", False).launches[0]
    tiles = f"tiles of {first.arguments['BLOCK_Q']} queries x {first.arguments['BLOCK_K']} keys"
    assert found[0].startswith(f"triton, a decode: {tiles}")
    assert f": {first.programs} blocks for" in found[0]
    parts = first.arguments["parts"]
    assert found[1].startswith(f"  keys in {parts if parts > 1 else 'one'} part")
    assert found[2] == "  not cuda: it takes float16 and bfloat16; this is torch.float32" + (
        "; 200 keys are one part: nothing to merge" if k_len == 200 else ""
    )


@needs_cuda_bindings
@needs_triton
@pytest.mark.parametrize("q_len", [1, 4])
def test_a_decode_of_16_bits(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By cuda/decode.cu: as many blocks and parts as the launches have."""
    sizes = {"batch": 3, "heads": 8, "kv_heads": 2, "head_dim": 64}
    found = lines(q_len, 65_536, "bfloat16", op="attention", **sizes)
    q = torch.empty(3, 8, q_len, 64, dtype=torch.bfloat16)
    k = torch.empty(3, 2, 65_536, 64, dtype=torch.bfloat16)
    o = attentionplan.Options(0, 0, None, -1, -1, False, None, False)
    given = (q, k, k, *[None] * 5)
    _, work = decodekernels.launches(given, o, False, lambda s, t, _: torch.empty(s, dtype=t))
    assert f"{work[0].block // 32} warps a block: {work[0].grid} blocks for 132" in found[0]
    parts = -(-65_536 // decodeplan.cut(64, 4 * q_len, 65_536).keys)
    assert found[1].startswith(f"  keys in {parts} parts of ")
    assert found[2].startswith("  gradient by k and v, in Triton: ")
    why = lines(q_len, 65_536, "bfloat16", "sm_75", op="attention", **sizes)
    assert any("not cuda: it takes sm_80 or later; this is sm_75" in line for line in why)
    monkeypatch.setattr(catalogue, "lacks", {"triton": "no Triton"}.get)
    *same, last = lines(q_len, 65_536, "bfloat16", op="attention", **sizes)
    assert (same, last) == (
        found[:2], "  gradient by the reference, in PyTorch operations: no Triton"
    )  # fmt: skip


@pytest.mark.parametrize("op", explanation.OPERATIONS)
def test_every_operation_says_something(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in ("float32", "bfloat16", "float64"):
        for shape in ((0, 0), (1, 1), (3, 70_000)):
            assert len(lines(*shape, dtype, op=op)[0]) > 20
    missing = {"cuda": "no NVRTC", "triton": "no Triton"}
    monkeypatch.setattr(catalogue, "lacks", missing.get)
    assert "no NVRTC" in explain(64, 64, op=op) or op == "attention"
    assert "no Triton" in explain(64, 64, op="attention")


WRONG = {
    "a size of another": (TypeError, "takes inner, got heads", lambda: explain(2, 2, heads=2)),
    "a size of none": (TypeError, "takes rows and cols alone, got inner",
                       lambda: explain(2, 2, op="cross_entropy", inner=2)),
    "an unknown size": (TypeError, "takes batch, heads, kv_heads, head_dim, got dim",
                        lambda: explain(2, 2, op="attention", dim=2)),
    "no number": (TypeError, "heads must be an int",
                  lambda: explain(2, 2, op="attention", heads=2.0)),
    "none": (ValueError, "at least 1", lambda: explain(2, 2, op="attention", head_dim=0)),
    "heads": (ValueError, "must divide heads, got 4 and 3",
              lambda: explain(2, 2, op="attention", heads=4, kv_heads=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()
