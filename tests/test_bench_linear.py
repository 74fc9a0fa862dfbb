"""linear_cross_entropy's measurement without a GPU: checked, timed, kept, drawn; the script."""

from __future__ import annotations

import sys
import types
from dataclasses import asdict

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import online_softmax
from bench_kit import HEADER
from online_softmax.lab import benchfile, benchpage, goals, linear, lineartable, refusal
from online_softmax.lab.benchfile import Part
from online_softmax.lab.linear import Work

CPU = torch.device("cpu")
WORK = Work(24, 16, 50, "float32")
US = {"ours, low": 460.0, "ours, fast": 340.0, "torch": 600.0, "three products": 300.0,
      "four products": 400.0}  # fmt: skip


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The package's function, as torch's parts; and torch.compile as what it is given."""
    asked: list[str] = []

    def function(x: Tensor, weight: Tensor, target: Tensor, *, memory: str) -> Tensor:
        asked.append(memory)
        return functional.cross_entropy(functional.linear(x.float(), weight.float()), target)

    monkeypatch.setattr(online_softmax, "linear_cross_entropy", function, raising=False)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return asked


def measured(work: Work = WORK, us: dict[str, float] = US) -> dict:
    """A clock that runs each call and says what it is told, in the order of `linear`."""
    names: list[str] = []

    def clock(call, device) -> float:
        call()
        names.append("")
        return 100.0

    line = linear.measure(work, CPU, 2, clock)
    for entry in line["entries"]:
        if "median_us" in entry:
            assert entry["rounds_us"] == [100.0, 100.0]
            entry["median_us"] = us.get(entry["name"], 900.0)
    assert len(names) == 3 * sum("median_us" in entry for entry in line["entries"])
    return line


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_contender_is_checked_and_timed(ours: list[str], dtype: str):
    line = measured(Work(24, 16, 50, dtype))
    entries = {each["name"]: each for each in line["entries"]}
    assert list(entries) == [*linear.CONTENDERS, "three products", "four products"]
    for name in ("ours, low", "ours, fast", "torch", "compile"):
        assert entries[name]["why"] == "", entries[name]
        assert 0 < entries[name]["dx_error"] < 0.01
        assert 0 < entries[name]["dweight_error"] < 0.01
        assert entries[name]["memory_bytes"] is None  # no GPU counts it
    assert set(ours) == {"low", "fast"}
    assert benchfile.parse(
        benchfile.header_line(HEADER) + benchfile.line("linear", line), "x"
    )[0].others[0]["tokens"] == 24  # fmt: skip


def test_what_is_wrong_has_no_time(monkeypatch: pytest.MonkeyPatch, ours: list[str]):
    def wrong(x: Tensor, weight: Tensor, target: Tensor, *, memory: str) -> Tensor:
        loss = functional.cross_entropy(functional.linear(x, weight), target)
        return loss if memory == "low" else loss + 0.01 * weight.square().mean()

    monkeypatch.setattr(online_softmax, "linear_cross_entropy", wrong)
    entries = {each["name"]: each for each in measured()["entries"]}
    assert entries["ours, low"]["why"] == ""
    assert entries["ours, fast"]["why"].startswith("wrong: loss_error is ")
    assert "median_us" not in entries["ours, fast"]


def test_a_wrong_gradient_of_a_right_loss_is_seen(monkeypatch: pytest.MonkeyPatch, ours: list[str]):
    def wrong(x: Tensor, weight: Tensor, target: Tensor, *, memory: str) -> Tensor:
        frozen = weight.detach() + 0 * weight if memory == "fast" else weight
        return functional.cross_entropy(functional.linear(x, frozen), target)

    monkeypatch.setattr(online_softmax, "linear_cross_entropy", wrong)
    entries = {each["name"]: each for each in measured()["entries"]}
    assert entries["ours, low"]["why"] == ""
    assert entries["ours, fast"]["why"].startswith("wrong: dweight_error is 1, over ")


def test_what_is_missing_is_a_row_with_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(online_softmax, "linear_cross_entropy", raising=False)
    monkeypatch.delattr(functional, "linear_cross_entropy", raising=False)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    why = {each["name"]: each["why"] for each in measured()["entries"]}
    assert why["ours, low"] == "the package has no linear_cross_entropy yet"
    assert why["torch, chunked"].startswith("torch 2.")
    assert why["torch, chunked"].endswith(" has no linear_cross_entropy")
    assert why["torch"] == ""
    with pytest.raises(refusal.Refusal):
        linear.CONTENDERS["ours, fast"]()


def test_how_rivals_are_called(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def liger(x, weight, target):
        seen.append("liger")
        return linear._eager(x, weight, target)

    def cut(e, c, targets, filter_eps):
        assert filter_eps is None
        seen.append("cut")
        return linear._eager(e, c, targets)

    modules = {"liger_kernel": {}, "liger_kernel.transformers": {},
               "liger_kernel.transformers.functional": {"liger_fused_linear_cross_entropy": liger},
               "cut_cross_entropy": {"linear_cross_entropy": cut}}  # fmt: skip
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    given = linear.inputs(WORK, CPU)
    wanted = linear.exact(*given)
    for name in ("liger", "cut-cross-entropy"):
        assert "why" not in linear._entry(name, linear.CONTENDERS[name](), given, wanted)
    assert set(seen) == {"liger", "cut"}


def test_float64_by_chunks_is_what_autograd_gives(monkeypatch: pytest.MonkeyPatch):
    given = linear.inputs(WORK, CPU)
    x, weight, target = given
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    loss = functional.cross_entropy(leaves[0] @ leaves[1].t(), target)
    loss.backward()
    monkeypatch.setattr(linear, "CHUNK", 7 * WORK.classes)  # four chunks
    wanted = (loss.detach(), *(leaf.grad for leaf in leaves))
    for found, want in zip(linear.exact(*given), wanted, strict=True):
        torch.testing.assert_close(found, want)
    assert linear.error(x * 1.01, x.double()) == pytest.approx(0.01, rel=1e-4)
    assert linear.error(torch.full_like(x, torch.nan), x.double()) != 0


def test_memory_is_counted_beyond_what_was_there_and_the_gradients(
    monkeypatch: pytest.MonkeyPatch,
):
    now = {"allocated": 1000, "most": 0}
    for name, value in (("synchronize", lambda device: None),
                        ("reset_peak_memory_stats", lambda device: now.update(most=0)),
                        ("memory_allocated", lambda device: now["allocated"]),
                        ("max_memory_allocated", lambda device: now["most"])):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)

    def call() -> tuple[Tensor, ...]:
        now["most"] = 1000 + 48 + 500
        return torch.zeros(4), torch.zeros(8)

    assert linear.memory_bytes(call, torch.device("cuda")) == 500
    assert linear.memory_bytes(call, CPU) is None


# ---- tables


def shown(**more: dict) -> list:
    entries = [{"name": name, "why": "", "median_us": us, "memory_bytes": 10**8} for name, us in
               US.items()]  # fmt: skip
    for entry in entries:
        entry |= more.get(entry["name"].replace("ours, ", ""), {})
    line = {"kind": "linear", **asdict(Work()), "device": "cuda", "entries": entries}
    return lineartable.tables([line])


def test_a_table_says_what_is_over_its_goal():
    ((title, head, rows, _),) = shown()
    assert title.endswith("_entropy bfloat16, 8,192 tokens, 4,096 features, 128,256 classes")
    assert head[:5] == ("contender", "ms", "x three products", "x four products", "memory GB")
    found = {row[0]: row[1:5] for row in rows}
    assert found["ours, low"] == ("0.46", "1.53", "1.15", "0.10")
    assert found["ours, fast"] == ("0.34", "1.13", "0.85", "0.10")
    late = {"memory_bytes": 9 * 10**8, "median_us": 470.0}
    ((_, _, rows, _),) = shown(low=late, fast=late)
    found = {row[0]: row[1:5] for row in rows}
    assert found["ours, low"] == ("0.47", "1.57", "1.18 (over 1.15)", "0.90 (over 0.8)")
    assert found["ours, fast"] == ("0.47", "1.57 (over 1.15)", "1.18", "0.90")
    assert goals.LINEAR["ours, fast"][0] == 3.2e9
    timed, refused = shown(torch={"why": "no such thing"})
    assert [row[0] for row in timed[2]] == [name for name in US if name != "torch"]
    assert refused[2] == (("torch", "no such thing"),)


def test_the_last_measurement_of_a_size_is_shown():
    line = {"kind": "linear", **asdict(WORK), "device": "cpu", "entries": []}
    again = {**line, "entries": [{"name": "torch", "why": "", "median_us": 5000.0}]}
    part = Part(HEADER, (), (line, again))
    (table,) = benchpage.sections([part])["linear"]
    assert table.title.endswith("50 classes, cpu")
    assert table.rows[0][:2] == ("torch", "5.00")
