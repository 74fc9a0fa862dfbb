"""The clock: on a GPU for real; without one, on a pretended device that counts what it does."""

from __future__ import annotations

import contextlib
import subprocess

import pytest
import torch
from torch import Tensor

from online_softmax.lab import (
    bench,
    benchclock,
)
from online_softmax.lab.rotation import Follows, Overwrites, Rotation


class Device:
    """Time passes by the microseconds that each call says; a graph keeps calls and replays them."""

    def __init__(self) -> None:
        self.now_us, self.recording, self.broken = 0.0, None, False
        self.replays, self.pools = 0, []

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
                device.replays += 1

            def capture_begin(self, pool: object) -> None:
                assert device.recording is None
                device.recording, device.broken = self, False
                device.pools.append(pool)

            def capture_end(self) -> None:
                device.recording = None
                if device.broken:
                    raise RuntimeError("the capture was invalidated")

        for name, value in (("Event", Event), ("CUDAGraph", CUDAGraph), ("Stream", object),
                            ("stream", contextlib.nullcontext), ("graph_pool_handle", object),
                            ("synchronize", lambda: None)):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)


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
            device.broken = True
            raise RuntimeError("it synchronises")
        device.run(10.0)

    calls = {"fast": lambda x, y: device.run(20.0), "slow": lambda x, y: device.run(80.0)}
    found = bench.interleaved(rotation(2, 2), {**calls, "bad": failing}, may_fail=["bad"])
    assert found["fast"].median_us == pytest.approx(20.0)
    assert found["slow"].rounds_us == pytest.approx((80.0,) * bench.ROUNDS)
    assert found["bad"].refused == "RuntimeError: it synchronises"
    with pytest.raises(RuntimeError, match="it synchronises"):
        bench.interleaved(rotation(2, 2), {"bad": failing})


def test_contenders_share_a_pool_until_a_capture_fails(device: Device):
    """What failed may take its pool with it; and why it failed is what it said itself."""

    def failing(x: Tensor, y: Tensor) -> None:
        if device.recording is not None:
            device.broken = True
            raise ValueError("too large for a graph")

    def fine(x: Tensor, y: Tensor) -> None:
        device.run(20.0)

    calls = {"a": fine, "b": fine, "bad": failing, "c": fine, "d": fine}
    found = bench.interleaved(rotation(2, 2), calls, may_fail=["bad"])
    a, b, bad, c, d = device.pools
    assert a is b is bad
    assert c is d is not a
    assert found["bad"].refused == "ValueError: too large for a graph"
    assert device.recording is None


def test_a_round_s_time_bounds_the_replays(device: Device):
    """Of a graph that takes 1,000 us four replays a round, and one that flushes; of slow ones one,
    and they need no flush; nobody has more than REPLAYS."""

    def replays(us: float, **more: float) -> int:
        before = device.replays
        bench.interleaved(rotation(2, 2), {"one": lambda x, y: device.run(us)}, **more)
        return device.replays - before

    assert replays(500.0, round_us=4000.0) == 1 + 3 * (1 + 4)
    assert replays(3000.0, round_us=4000.0) == 1 + 3 * 1
    assert replays(500.0) == 1 + 3 * (1 + bench.REPLAYS)


def test_a_graph_s_time_is_measured_and_not_the_host_s(device: Device):
    """A call that takes the host long, and the device not, has as many replays as fit."""

    def call(x: Tensor, y: Tensor) -> None:
        device.run(10.0 if device.recording is not None else 800.0)

    bench.interleaved(rotation(100, 2), {"one": call}, round_us=4000.0)
    assert device.replays == 1 + 3 * (1 + 4)


def test_what_overwrites_its_input_has_it_back_before_each_replay_outside_of_the_time(
    device: Device, monkeypatch: pytest.MonkeyPatch
):
    """One turn over the sets is a graph: a second would run on what the first left."""
    sets = rotation(6, 2)
    restored: list[bool] = []
    restore = sets.restore

    def slowly() -> None:
        restored.append(bool((sets.sets[0][0] == 0).all()))
        device.run(7000.0)
        restore()

    monkeypatch.setattr(sets, "restore", slowly)

    def spoil(x: Tensor, y: Tensor) -> None:
        x.fill_(1.0)
        device.run(50.0)

    graph = sets.capture(Overwrites(spoil))
    assert graph.calls == 6
    assert all(bool((x == 0).all()) for x, _ in sets.sets)
    sets.sets[0][0].fill_(1.0)  # as a replay on a device would
    assert graph.replay_us(3) == pytest.approx([50.0] * 3)
    assert restored == [False, False, True, True, True]  # the capture's, each replay's, the last
    assert sets.capture(spoil).calls == 24
    found = bench.interleaved(sets, {"spoils": Overwrites(spoil), "other": spoil})
    assert [found[name].median_us for name in ("spoils", "other")] == pytest.approx([50.0] * 2)


def test_what_precedes_a_call_is_made_before_it_is_timed(device: Device):
    """As a forward before its backward: once for each set, and in no graph."""
    made: list[object] = []

    def first(x: Tensor, y: Tensor) -> Tensor:
        assert device.recording is None
        device.run(9000.0)
        made.append(x)
        return x

    def then(given: Tensor, x: Tensor, y: Tensor) -> None:
        assert given is x
        device.run(50.0)

    sets = rotation(6, 2)
    graph = sets.capture(Follows(first, then))
    assert len(made) == 6
    assert graph.calls == 24
    assert graph.replay_us(3) == pytest.approx([50.0] * 3)
    found = bench.interleaved(sets, {"one": Follows(first, then)})
    assert found["one"].median_us == pytest.approx(50.0)


def test_a_capture_that_fails_leaves_the_input_as_it_was(device: Device):
    def failing(x: Tensor, y: Tensor) -> None:
        x.fill_(1.0)
        if device.recording is not None:
            raise RuntimeError("it synchronises")
        device.run(10.0)

    sets = rotation(3, 2)
    found = bench.interleaved(sets, {"bad": Overwrites(failing)}, may_fail=["bad"])
    assert found["bad"].refused == "RuntimeError: it synchronises"
    assert all(bool((x == 0).all()) for x, _ in sets.sets)


def test_the_second_clock_gives_the_input_back_too(device: Device):
    x, cache, seen = torch.zeros(2), torch.ones(4), []

    def call() -> None:
        seen.append((float(x.sum()), float(cache.sum())))
        x.fill_(1.0)
        cache.fill_(1.0)
        device.run(30.0)

    def before() -> None:
        x.zero_()
        device.run(500.0)

    assert benchclock._restored_us(call, before, cache) == pytest.approx(30.0)
    assert set(seen) == {(0.0, 0.0)}
    assert len(seen) == benchclock.WARMUPS + benchclock.RESTORED_CALLS


@pytest.mark.parametrize("knows", [True, False])
def test_clocks_are_those_of_the_gpu_in_use(monkeypatch: pytest.MonkeyPatch, knows: bool):
    """Two shards on two GPUs: each states its own, if nvidia-smi can tell them apart."""

    def smi(query: list[str], **options: object) -> subprocess.CompletedProcess:
        if "--id=GPU-12ab" in query and not knows:
            raise subprocess.CalledProcessError(6, query)
        clock = 1980 if "--id=GPU-12ab" in query else 345
        return subprocess.CompletedProcess(query, 0, f"580.1, {clock} MHz, 3201 MHz, 38, 79 W\n")

    monkeypatch.setattr(bench.subprocess, "run", smi)
    found = bench._driver("12ab")
    assert found["driver_version"] == "580.1"
    assert found["clocks.sm"] == ("1980 MHz" if knows else "345 MHz")
