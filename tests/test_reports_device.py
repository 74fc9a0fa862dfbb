"""Public bug reports about devices, streams and repeats, on every public operation.

Where there is no GPU what can be asked is asked of the CPU: the bits, thinned.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from device_kit import WORKS, Work, rows
from rows_kit import DEVICES, GPU, gpu

EACH = pytest.mark.parametrize("name", WORKS)
REPEATS = 50  # of S28
RUNS = {"cpu": 3, "cuda": 200}  # of S56
# Widths of S56; host and interpreter are not asked for more than a row of 4,097 here.
WIDTHS = pytest.mark.parametrize(
    ("cols", "device"),
    [
        *((cols, "cpu") for cols in (1000, 4097)),
        *(pytest.param(c, "cuda", marks=GPU) for c in (1000, 4097, 32_000, 151_936)),
    ],
)


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def near(got: list[Tensor], want: list[Tensor]) -> bool:
    """To a hundredth of the largest: what other tensors give is farther away."""
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True)]
    return all(bool((a - b).abs().max() <= 0.01 * b.abs().max()) for a, b in pairs)


# ---- S27: the device of the tensors, not the current one


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@EACH
def test_s27_the_device_of_the_input(name: str) -> None:
    """Three times, so that kept calls start again; backwards too; the current device stays."""
    work = WORKS[name]
    want = work.run(work.given("cuda:0"))
    with torch.cuda.device(0):
        given = work.given("cuda:1")
        for _ in range(3):
            got = work.run(given)
            assert torch.cuda.current_device() == 0
            assert {t.device.index for t in got} == {1}
            for mine, other in zip(got, want, strict=True):
                torch.testing.assert_close(mine.cpu(), other.cpu(), equal_nan=True)
        with torch.cuda.device(1):
            assert same(work.run(given), got)
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    "devices",
    [
        ("cpu", "meta"),
        pytest.param(("cuda:0", "cpu"), marks=GPU),
        pytest.param(
            ("cuda:1", "cuda:0"),
            marks=[*GPU, pytest.mark.skipif(torch.cuda.device_count() < 2,
                                            reason="needs a second CUDA device")],
        ),
    ],
    ids="/".join,
)  # fmt: skip
@pytest.mark.parametrize("name", [each for each, w in WORKS.items() if len(w.given("meta")) > 1])
def test_s27_mixed_devices(name: str, devices: tuple[str, str]) -> None:
    """An error of ours that names a device; each tensor in turn is the one that is elsewhere."""
    first, second = devices
    work = WORKS[name]
    here, there = work.given(first), work.given(second)
    for at in range(len(here)):
        given = [*here[:at], there[at], *here[at + 1 :]]
        with pytest.raises((RuntimeError, ValueError), match=rf"\(\): .*({first}|{second})"):
            work.run(given)


# ---- S28: the current stream


@gpu
@EACH
def test_s28_what_was_just_written_is_read(name: str) -> None:
    """On a stream of its own, beside a busy one: after some ms of other work the tensors are
    written, and the call stands right behind. It would read those of the turn before."""
    work = WORKS[name]
    seeds = (1, 2)
    fresh = {seed: work.given("cuda", seed) for seed in seeds}
    want = {seed: work.run(fresh[seed]) for seed in seeds}
    given = [t.clone() for t in fresh[2]]
    work.run(given)
    torch.cuda.synchronize()
    assert not near(want[1], want[2])
    stream, busy = torch.cuda.Stream(), torch.cuda.Stream()
    kept = []
    for turn in range(REPEATS):
        with torch.cuda.stream(busy):
            torch.cuda._sleep(5_000_000)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host runs ahead
            for mine, other in zip(given, fresh[seeds[turn % 2]], strict=True):
                mine.copy_(other)
            kept.append([t.clone() for t in work.run(given)])
    torch.cuda.synchronize()
    wrong = [turn for turn, got in enumerate(kept) if not near(got, want[seeds[turn % 2]])]
    assert not wrong, f"{len(wrong)} of {REPEATS} turns: {wrong}"


# ---- S56: the same bits at every run


def repeat(work: Work, device: str) -> None:
    given = work.given(device)
    want = work.run(given)
    assert all(t.isfinite().all() for t in want if t.is_floating_point())
    if device == "cuda":
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            noise = torch.randn(2048, 2048, device="cuda")
            for _ in range(250):  # as long as the runs take
                noise = noise @ noise * 1e-3
    is_other = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(RUNS[device]):
        for got, expected in zip(work.run(given), want, strict=True):
            is_other |= (got != expected).any()
    assert not is_other


@WIDTHS
@pytest.mark.parametrize("name", rows())
def test_s56_rows_have_the_same_bits_every_time(name: str, cols: int, device: str) -> None:
    repeat(rows(cols, 8)[name], device)


@DEVICES
@pytest.mark.parametrize("name", [each for each in WORKS if each not in rows()])
def test_s56_the_same_bits_every_time(name: str, device: str) -> None:
    repeat(WORKS[name], device)
