"""The clock: on a GPU for real; without one, on a pretended device that counts what it does."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from bench_kit import HEADER
from online_softmax.lab import bench, benchclock, benchfile, contenders, grid, opbench, tune
from online_softmax.lab.bench import Rotation
from online_softmax.lab.grid import Cell

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Device:
    """Time passes by the microseconds that each call says; a graph keeps calls and replays them."""

    def __init__(self) -> None:
        self.now_us, self.recording = 0.0, None
        self.allocated: list[Tensor] = []

    def run(self, us: float) -> None:
        if self.recording is None:
            self.now_us += us
        else:
            self.recording.us += us

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.us = device.now_us

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, later: Event) -> float:
                return (later.us - self.us) / 1000

        class CUDAGraph:
            us = 0.0

            def replay(self) -> None:
                device.now_us += self.us

        @contextlib.contextmanager
        def graph(recorded: CUDAGraph):
            device.recording = recorded
            try:
                yield
            finally:
                device.recording = None

        for name, value in (("Event", Event), ("CUDAGraph", CUDAGraph), ("graph", graph)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    found.patch(monkeypatch)
    return found


def rotation(sets: int, tensors: int) -> Rotation:
    return Rotation([tuple(torch.zeros(1) for _ in range(tensors)) for _ in range(sets)], True)


@pytest.mark.parametrize("tensors", [2, 3])
def test_a_graph_takes_every_set_in_turn_and_is_long_enough(device: Device, tensors: int):
    sets, seen = rotation(6, tensors), []

    def call(*given: Tensor) -> None:
        assert len(given) == tensors
        device.run(50.0)
        if device.recording is not None:
            seen.append(given[0])

    graph = sets.capture(call)
    assert graph.calls == 24  # 1,000 us of calls that take 50, in whole turns of 6
    assert all(x is sets.sets[n % 6][0] for n, x in enumerate(seen))
    assert graph.replay_us(3) == pytest.approx([50.0] * 3)


def test_what_calls_allocate_rotates(device: Device):
    """As many outputs live at once as there are sets: none is reused while it lies in the L2."""
    import weakref

    live: list[weakref.ref] = []
    most = 0

    def call(x: Tensor, y: Tensor) -> Tensor:
        nonlocal most
        device.run(100.0)
        made = torch.zeros(1)
        if device.recording is not None:
            live.append(weakref.ref(made))
            most = max(most, sum(each() is not None for each in live))
        return made

    rotation(4, 2).capture(call)
    assert len(live) == 12
    assert 4 <= most <= 5


def test_rounds_are_interleaved_and_failures_are_rows(device: Device):
    def failing(x: Tensor, y: Tensor) -> None:
        if device.recording is not None:
            raise RuntimeError("it synchronises")
        device.run(10.0)

    calls = {"fast": lambda x, y: device.run(20.0), "slow": lambda x, y: device.run(80.0)}
    found = bench.interleaved(rotation(2, 2), {**calls, "bad": failing}, may_fail=["bad"])
    assert found["fast"].median_us == pytest.approx(20.0)
    assert found["slow"].rounds_us == pytest.approx((80.0,) * bench.ROUNDS)
    assert found["bad"].refused == "RuntimeError: it synchronises"
    with pytest.raises(RuntimeError, match="it synchronises"):
        bench.interleaved(rotation(2, 2), {"bad": failing})


# ---- for real


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("op", grid.OPS)
def test_a_cell_on_the_gpu(op: str):
    cell = Cell(op, "bfloat16", 64, 1000)
    found = contenders.contenders(op, True, ("torch", "compile"))
    row = opbench.measure(cell, found, benchclock.gpu_setting())
    assert row.is_right, row
    for name in ("ceiling", "torch", "compile"):
        entry = row.entry(name)
        assert entry.why == "", entry
        assert entry.clock == "graph"
        assert 0 < entry.median_us < 1000
        assert entry.do_bench_us > 0
    ours = row.entry("ours")
    assert ours.median_us or "no kernel" in ours.why


@needs_gpu
@pytest.mark.gpu
def test_a_ranking_on_the_gpu():
    line = tune.tune(Cell("softmax", "float32", 64, 1000), benchclock.gpu_setting())
    best = line["ranking"][0]
    assert best["why"] == ""
    assert 0 < best["median_us"] < 1000
    assert [each["why"] for each in line["ranking"] if each["why"]] == []
    assert benchfile.parse(
        benchfile.header_line(HEADER) + benchfile.line("tuning", {**line, "kind": "tuning"}), "x"
    )[0].others[0]["ranking"]
