"""Tuning: every variant judged, ranked and kept; and the variants of a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench_kit import HEADER, right, setting, wrong
from online_softmax import catalogue, rowplan
from online_softmax.cuda import host, launch
from online_softmax.lab import benchfile, benchpage, contenders, tune
from online_softmax.lab.benchfile import Log
from online_softmax.lab.benchrun import Outlet
from online_softmax.lab.grid import Cell
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.tune import Variant
from online_softmax.plan import Problem

CELL = Cell("softmax", "float32", 5, 40)
US = {"ceiling": 10.0, "row: block 32": 30.0, "row: block 64": 12.0, "row: block 128": 20.0,
      "row: block 256": 15.0, "row: block 512": 40.0}  # fmt: skip


@pytest.fixture(autouse=True)
def _a_ceiling_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contenders.CEILING, "softmax", lambda x, y: None)


def source(op: str, problem: Problem) -> list[Variant]:
    def raising(x: Tensor, y: Tensor) -> None:
        raise ValueError("too many threads")

    call = right(op)
    found = [Variant("row", {"block": block}, call) for block in (32, 64, 128, 256)]
    found.append(Variant("row", {"block": 512}, call, is_planned=True))
    return [*found, Variant("bad", {"block": 1}, wrong(op)), Variant("big", {"block": 2}, raising)]


def test_variants_are_ranked_and_wrong_ones_have_no_time():
    line = tune.tune(CELL, setting(US), source)
    assert (line["op"], line["rows"], line["ceiling_us"]) == ("softmax", 5, 10.0)
    assert [each["numbers"]["block"] for each in line["ranking"][:5]] == [64, 256, 128, 32, 512]
    timed = [each["numbers"]["block"] for each in line["ranking"] if "median_us" in each]
    assert timed == [64, 256, 128, 512]  # the best three, and what is planned
    bad, big = line["ranking"][5:]
    assert bad["why"].startswith("wrong: [4, 39] is ")
    assert big["why"] == "ValueError: too many threads"
    assert "quick_us" not in bad
    assert json.loads(benchfile.line("tuning", line))["ranking"][0]["kernel"] == "row"


def test_a_variant_that_no_graph_holds_has_a_reason():
    line = tune.tune(CELL, setting(US, uncaptured=["row: block 64"]), source)
    last = next(each for each in line["ranking"] if each["numbers"]["block"] == 64)
    assert last["why"] == "RuntimeError: it synchronises"
    assert "median_us" not in last
    assert line["ranking"][0]["numbers"]["block"] == 256


def test_rankings_are_kept_shown_and_resumed(tmp_path: Path):
    path = tmp_path / "tuning.jsonl"
    cells = [CELL, Cell("softmax", "float32", 2, 64)]
    tune.run(cells[:1], setting(US), Outlet(Log(path), HEADER), source)
    found, left = tune.run(cells, setting(US), Outlet(Log(path, resume=True), HEADER), source)
    assert ([each["cols"] for each in found], left) == ([64], 0)
    parts = benchfile.read([path])
    assert [len(part.others) for part in parts] == [1, 1]
    first, second = benchpage.sections(parts)["tuning"]
    assert first.title == "softmax float32 5 x 40: the best of 7 variants"
    assert first.rows[0] == ("row", "block 64", "12.00", "0.833")
    assert first.rows[-1] == ("row", "block 512 (planned)", "40.00", "0.250")
    assert second.title.startswith("softmax float32 2 x 64")


def test_a_cell_that_does_not_fit_is_told():
    line = tune.tune(CELL, setting(US, free_bytes=1), source)
    assert "GiB are free" in line["why"]
    assert line["why"] in tune.table(line)[0]


@pytest.mark.parametrize("op", rowplan.OPERATIONS)
def test_the_variants_of_a_row(op: str):
    problem = Problem(64, 32768, "bfloat16")
    found = tune.variants(op, problem)
    assert len({each.name for each in found}) == len(found)
    by_kernel = {each.kernel for each in found}
    assert by_kernel == {"registers", "split"} | ({"landed"} if op != "logsumexp" else set())
    (planned,) = [each for each in found if each.is_planned]
    wanted = rowplan.numbers(op, 32768, "bfloat16", problem.arch)
    assert (planned.kernel, planned.numbers["block"]) == (wanted.kernel, wanted.block)
    assert planned.numbers["vectors"] == wanted.vectors


@pytest.mark.parametrize("op", rowplan.OPERATIONS)
def test_what_runs_few_rows_is_among_the_variants(op: str):
    """The same shares over more blocks, which many rows would not take."""
    problem = Problem(4, 32768, "bfloat16")
    found = tune.variants(op, problem)
    assert len({each.name for each in found}) == len(found)
    (planned,) = [each for each in found if each.is_planned]
    many = rowplan.numbers(op, problem.cols, problem.dtype, problem.arch)
    assert planned.numbers["cluster"] == 16 > many.cluster
    assert planned.numbers["vectors"] == many.vectors


@pytest.mark.parametrize(("rows", "planned"), [(64, "streamed"), (1, "split")])
def test_long_rows_are_streamed_in_parts_of_several_sizes(rows: int, planned: str):
    """And split has each of these cuts: one of the two is what is planned for so many rows."""
    found = tune.variants("softmax", Problem(rows, 1_048_576))
    assert [each.kernel for each in found if each.is_planned] == [planned]
    sizes = {
        kernel: {
            (each.numbers["block"], each.numbers["vectors"])
            for each in found
            if each.kernel == kernel
        }
        for kernel in ("streamed", "split")
    }
    assert {block * vectors * 16 for block, vectors in sizes["streamed"]} == {16384, 32768, 65536}
    assert {block for block, _ in sizes["streamed"]} == {256, 512}
    assert sizes["streamed"] == sizes["split"]


@pytest.mark.skipif(host.compiler() is None, reason="host execution needs g++ or clang++")
@pytest.mark.parametrize("op", rowplan.OPERATIONS)
def test_a_variant_s_call_runs_its_kernel_with_its_numbers(op: str):
    x, other = torch.randn(3, 100), torch.randn(3, 100)
    tensors = {"logsumexp": (x, torch.empty(3))}.get(op, (x, torch.empty(3, 100)))
    if op in rowplan.BACKWARD:
        tensors = (x, other.softmax(-1), torch.empty(3, 100))
    results = []
    for variant in tune.variants(op, Problem(3, 100)):
        tensors[-1].fill_(torch.nan)
        variant.call(*tensors)
        results.append(tensors[-1].clone())
    assert len(results) > 2
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", rowplan.OPERATIONS)
def test_a_variant_counts_the_matrices_that_its_operation_moves(
    op: str, monkeypatch: pytest.MonkeyPatch
):
    """As what ships does: it decides whether they leave the L2 first."""
    counted: list[int] = []
    monkeypatch.setattr(catalogue, "streams", lambda matrix, tensors: bool(counted.append(tensors)))
    monkeypatch.setattr(launch, "run", lambda work, device: None)
    matrices = 3 if op in rowplan.BACKWARD else 1 if op == "logsumexp" else 2
    tensors = [torch.ones(2, 8) for _ in range(matrices)]
    if op == "logsumexp":
        tensors.append(torch.empty(2))
    tune.variants(op, Problem(2, 8))[0].call(*tensors)
    assert counted == [matrices]


def test_a_type_without_variants():
    with pytest.raises(BadInput, match="--tune logsumexp"):
        tune.variants("logsumexp", Problem(1, 1, "float64"))
