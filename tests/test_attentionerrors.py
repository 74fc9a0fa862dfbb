"""The table of attention's errors: its truth, what a wrong contender looks like, and its lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attention_kit import PLAIN, Inputs, wanted
from online_softmax.lab import attentionerrors
from online_softmax.lab.attentionerrors import NAMES, Case, measured, ours, said, torchs, truth
from rows_kit import gpu

close = torch.testing.assert_close
KINDS = ("normal", "large", "causal", "masked", "long", "decode")


def small(kind: str, dtype: str = "float32") -> Case:
    lens = {"long": (3, 200), "decode": (1, 200)}.get(kind, (24, 24))
    return Case(kind, 16, dtype, *lens, batch=2, heads=2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_is_the_formula(kind: str) -> None:
    case = small(kind)
    inputs, mask = case.inputs("cpu"), case.mask("cpu")
    o = PLAIN._replace(right=0) if kind == "causal" else PLAIN
    q, k, v, dout = inputs
    beside = None if mask is None else mask[None, None]
    out, _, by = wanted(Inputs(q, k, v, mask=beside), o, dout.double(), None)
    for got, want in zip(truth(case, inputs, mask), (out, *by), strict=True):
        close(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_errors_are_small_where_it_is_right(kind: str, dtype: str) -> None:
    contenders = {"ours": ours, "torch": torchs(SDPBackend.MATH)}
    line = measured(small(kind, dtype), contenders, "cpu")
    bound = 1e-5 if dtype == "float32" else 2e-2
    for name, found in line["errors"].items():
        for what in NAMES if name == "ours" or kind != "masked" else ("out",):
            assert found[what]["rms"] < bound, (name, what, found)
    if kind == "masked":
        assert line["errors"]["ours"]["rows without a key"] == "0"
    assert json.loads(json.dumps(line)) == line
    assert said(line).startswith(f"{kind} {dtype} 16: ours ")


def test_a_wrong_contender_is_seen() -> None:
    def off(q: Tensor, k: Tensor, v: Tensor, case: Case, mask: Tensor | None) -> Tensor:
        return ours(1.01 * q, k, v, case, mask)

    def unable(*_: object) -> Tensor:
        raise RuntimeError("No available kernel.\nmore")

    found = measured(small("normal"), {"ours": ours, "off": off, "unable": unable}, "cpu")["errors"]
    for what in NAMES:
        assert found["off"][what]["rms"] > 100 * found["ours"][what]["rms"]
        assert found["off"][what]["max"] > 100 * found["ours"][what]["max"]
    assert found["unable"] == {"refused": "No available kernel."}
    gone = measured(small("normal"), {"nan": lambda *t: ours(*t) * torch.nan}, "cpu")
    assert gone["errors"]["nan"]["dq"] == {"max": None, "rms": None}
    assert said(gone).endswith("nan n/a, n/a")


def test_the_table_has_what_it_should() -> None:
    found = attentionerrors.cases()
    assert {case.kind for case in found} == set(KINDS)
    assert {case.head_dim for case in found} == {64, 128, 256}
    assert len(set(found)) == len(found)
    large, normal = small("large").inputs("cpu")[0], small("normal").inputs("cpu")[0]
    close(large, attentionerrors.LARGE * normal)


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "errors.jsonl"
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        attentionerrors.main(["--out", str(out)])
    assert not out.exists()


@gpu
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worse than flash by much, where that runs; memory grows with the length."""
    line = measured(Case("causal", 64), attentionerrors.CONTENDERS, "cuda")
    found = line["errors"]
    for what in NAMES:
        assert found["ours"][what]["rms"] < 1.1 * found[attentionerrors.FLASH][what]["rms"]
    (one,) = attentionerrors.memory({"ours": ours}, 4096)
    (two,) = attentionerrors.memory({"ours": ours}, 8192)
    assert two["forward_bytes"] < 2.5 * one["forward_bytes"]
    assert two["with_backward_bytes"] < 2.5 * one["with_backward_bytes"] < 4096**2 * 4
