"""Host execution: CUDA's meaning, its faults told instead of hung on, exact counts."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from host_kit import KERNELS, poisoned, softmax_launch
from online_softmax.cuda import host
from online_softmax.cuda.launch import Launch

FULL = 0xFFFFFFFF
BOTH = ("<true>", "<false>")
ORDERS = (0, 1, 2, 3, 12345)  # of threads: forward, reverse, mixed


@pytest.fixture(scope="module")
def kernels() -> str:
    """The file with this module's kernels, compiled together."""
    found = re.findall(r"^(template.*\n)?__global__ void (\w+)", KERNELS.read_text(), re.MULTILINE)
    arguments = {"row_sum": ("<128>",), "broadcast": BOTH, "exchange": BOTH}
    host.build(str(KERNELS), [k + a for _, k in found for a in arguments.get(k, ("",))])
    return str(KERNELS)


# ---- blocks, warps, counts


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cols", [1, 31, 33, 256, 1000])
def test_row_sum(kernels: str, cols: int, order: int) -> None:
    x, y = torch.randn(5, cols), poisoned(5)
    counts = host.launch(Launch(kernels, "row_sum<128>", (x, y, cols), 5, 128), order)
    torch.testing.assert_close(y, x.sum(-1), rtol=1e-5, atol=1e-5)
    assert counts == host.Counts(5 * cols, 5, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rung_as_shipped(dtype: torch.dtype) -> None:
    x, y = torch.randn(3, 1000).to(dtype), poisoned(3, 1000, dtype=dtype)
    counts = host.launch(softmax_launch(x, y))
    torch.testing.assert_close(y, torch.softmax(x.double(), -1).to(dtype), rtol=8e-3, atol=1e-8)
    assert (counts.reads, counts.writes) == (2 * x.numel(), x.numel())
    assert counts + counts == host.Counts(2 * counts.reads, 2 * counts.writes, 2 * counts.exps)


def test_one_worker_or_many_and_every_block_once(kernels: str) -> None:
    for workers in (1, 2, 5):
        y = torch.zeros(300, dtype=torch.int32)
        launch = Launch(kernels, "visit", (y,), 300, 33)
        assert host.launch(launch, workers=workers).writes == 300 * 33
        assert (y == 33).all()


def test_python_threads_launch_at_once(kernels: str) -> None:
    def total(cols: int) -> float:
        x, y = torch.ones(20, cols), poisoned(20)
        host.launch(Launch(kernels, "row_sum<128>", (x, y, cols), 20, 128))
        return y.sum().item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(total, range(1, 40))) == [20.0 * cols for cols in range(1, 40)]


def test_arguments_arrive(kernels: str) -> None:
    y = poisoned(3, dtype=torch.float64)
    host.launch(Launch(kernels, "arguments", (y, -(2**40), 0.1, 2**62), 1, 1))
    assert y.tolist() == [-(2.0**40), float(torch.tensor(0.1)), 2.0**62]


@pytest.mark.parametrize("width", [32, 16, 4])
def test_shuffles(kernels: str, width: int) -> None:
    y = poisoned(4, 64, dtype=torch.int64)
    host.launch(Launch(kernels, "shuffles", (y, width), 1, 64))
    lane, base = torch.arange(64) % 32, torch.arange(64) // 32 * 32
    group = lane // width * width
    value = lambda source: (base + source) * 10**10  # noqa: E731  (8 bytes: what lane brought)
    assert y[0].tolist() == value(group + 3).tolist()
    down = torch.where(lane % width + 2 < width, lane + 2, lane)
    up = torch.where(lane % width >= 2, lane - 2, lane)
    xor = torch.where((lane ^ 5) < group + width, lane ^ 5, lane)
    assert [y[i].tolist() for i in (1, 2, 3)] == [value(s).tolist() for s in (down, up, xor)]


def test_two_tiles_of_a_warp_shuffle_apart(kernels: str) -> None:
    for order in ORDERS:
        y = poisoned(32, dtype=torch.int32)
        host.launch(Launch(kernels, "tiles", (y,), 1, 32), order)
        assert y.tolist() == [120] * 16 + [376] * 16


def test_partial_warp_with_its_own_mask(kernels: str) -> None:
    y = poisoned(1)
    host.launch(Launch(kernels, "lane_sum", (y, (1 << 20) - 1), 1, 20))
    assert y.item() == sum(range(20))


def test_threads_that_left_are_not_waited_for(kernels: str) -> None:
    y = poisoned(64)
    host.launch(Launch(kernels, "leavers", (y,), 1, 64))
    assert y[:40].isnan().all()
    assert y[40:].tolist() == [float(63)] * 24


# ---- faults


@pytest.mark.parametrize(
    ("symbol", "args", "block", "words"),
    [
        (
            "two_barriers",
            (),
            64,
            ["__syncthreads() at host_kernels.cu:", "must meet at"],
        ),
        ("barrier_and_shuffle", (), 64, ["deadlock", "__syncthreads()", "__shfl_sync()"]),
        ("half_a_warp", (FULL,), 32, ["lane 16 leaves the kernel", "lane 0 waits", "0xffffffff"]),
        ("lane_left", (FULL,), 32, ["names lane 3, which has left the kernel"]),
        ("lane_sum", (None, FULL), 20, ["names lane 20", "only 20 threads"]),
        ("half_a_warp", (0xFFFE,), 32, ["lane 0 calls it", "0x0000fffe, which does not name it"]),
        ("two_masks", (), 32, ["must meet in the same call with the same mask"]),
        ("source_outside", (), 32, ["reads lane 9", "does not name"]),
        ("grid_barrier", (None,), 32, ["grid_sync()", "needs a cooperative launch"]),
        ("wild_spin", (None,), 32, ["it spins"]),
        ("misaligned", (None,), 1, ["misaligned address: 16 bytes"]),
        ("past_the_margin", (None,), 32, ["wrote outside the shared array 'few' of 32 bytes"]),
    ],
)
def test_fault_is_told(
    kernels: str, symbol: str, args: tuple[object, ...], block: int, words: list[str]
) -> None:
    args = tuple(torch.zeros(64) if a is None else a for a in args)
    with pytest.raises(host.Fault) as fault:
        host.launch(Launch(kernels, symbol, args, 2, block))
    assert str(fault.value).startswith(f"{symbol}: block ")
    assert all(word in str(fault.value) for word in words), str(fault.value)
    y = poisoned(5)  # and the next launch is as good as the first
    host.launch(Launch(kernels, "row_sum<128>", (torch.ones(5, 9), y, 9), 5, 128))
    assert y.tolist() == [9.0] * 5


def test_shared_memory_starts_poisoned_in_every_block(kernels: str) -> None:
    y = torch.ones(50, 4)
    host.launch(Launch(kernels, "poison", (y,), 50, 1, shared_bytes=16), workers=1)
    assert y.isnan().all()


def test_dynamic_shared_memory(kernels: str) -> None:
    y = poisoned(4, 256)
    host.launch(Launch(kernels, "reverse", (y,), 4, 256, shared_bytes=1024))
    assert (y == torch.arange(255, -1, -1)).all()


def test_a_missing_barrier_shows_in_some_order(kernels: str) -> None:
    right, wrong = Counter[bool](), Counter[bool]()
    for order in ORDERS:
        for symbol, seen in (("broadcast<true>", right), ("broadcast<false>", wrong)):
            y = poisoned(256)
            host.launch(Launch(kernels, symbol, (y,), 1, 256), order)
            seen[bool((y == 7).all())] += 1
    assert right == {True: len(ORDERS)}
    assert wrong[False] > 0


# ---- clusters, cooperative launches, atomics


@pytest.mark.parametrize("order", ORDERS)
def test_cluster_exchange(kernels: str, order: int) -> None:
    y = poisoned(12, 64)
    launch = Launch(kernels, "exchange<true>", (y,), 12, 64, cluster=4, shared_bytes=256)
    host.launch(launch, order)
    block = torch.arange(12)
    right = block // 4 * 4 + (block + 1) % 4  # the neighbour in the cluster
    assert (y == (right * 1000).unsqueeze(1) + 2 * torch.arange(64)).all()


def test_cluster_without_its_last_barrier(kernels: str) -> None:
    args = (poisoned(4, 64),)
    launch = Launch(kernels, "exchange<false>", args, 4, 64, cluster=4, shared_bytes=256)
    with pytest.raises(host.Fault, match="has left the kernel, its shared memory is gone"):
        host.launch(launch)


def test_cooperative_blocks_wait_for_each_other(kernels: str) -> None:
    for order in ORDERS:
        args = (y := poisoned(40), torch.zeros(1, dtype=torch.int32))
        host.launch(Launch(kernels, "spin_on_all", args, 40, 64, cooperative=True), order)
        assert (y == sum(range(40))).all()
        y = torch.zeros(40)
        host.launch(Launch(kernels, "grid_barrier", (y,), 40, 32, cooperative=True), order)
        assert (y == 41).all()


def test_atomics_between_workers(kernels: str) -> None:
    total, (done, last) = torch.zeros(1), torch.zeros(2, 1, dtype=torch.int32)
    host.launch(Launch(kernels, "last_block", (total, done, last), 200, 32), workers=2)
    assert (total.item(), done.item(), last.item()) == (200 * 32, 200, 1)


# ---- sanitizers


def test_sanitizers_pass_a_clean_kernel() -> None:
    x, y = torch.randn(2, 1003)[:, 3:], poisoned(2, 1000)
    report = host.sanitize(softmax_launch(x, y, block=64))
    assert report.ok, report.text
    assert report.counts.reads == 2 * x.numel()
    torch.testing.assert_close(y, torch.softmax(x, -1))


@pytest.mark.parametrize(
    ("symbol", "words"),
    [
        ("shared_overrun", ["runtime error: index 8 out of bounds"]),
        ("shared_pointer_overrun", ["heap-buffer-overflow", "READ of size 4"]),
        ("output_overrun", ["heap-buffer-overflow", "WRITE of size 4", "output_overrun"]),
        ("stack_overrun", ["index 9 out of bounds"]),
        ("misaligned_load", ["misaligned address"]),
        ("lane_left", ["fault: block ", "names lane 3, which has left the kernel"]),
    ],
)
def test_sanitizers_find(kernels: str, symbol: str, words: list[str]) -> None:
    y = poisoned(64)
    args = (FULL,) if symbol == "lane_left" else (y,)
    report = host.sanitize(Launch(kernels, symbol, args, 2, 32))
    assert not report.ok
    assert all(word in report.text for word in words), report.text


def test_race_found_in_any_order(kernels: str) -> None:
    y = poisoned(2, 64)
    report = host.sanitize(Launch(kernels, "broadcast<true>", (y,), 2, 64), "thread")
    assert report.ok, report.text
    for order in (0, 1):
        report = host.sanitize(Launch(kernels, "broadcast<false>", (y,), 2, 64), "thread", order)
        assert "data race" in report.text
        assert "broadcast<false>" in report.text


def test_sanitizer_refuses_wrong_arguments(kernels: str) -> None:
    with pytest.raises(TypeError, match="another number of parameters"):
        host.sanitize(Launch(kernels, "row_sum<128>", (), 1, 128))
    with pytest.raises(TypeError, match="of another kind"):
        host.sanitize(Launch(kernels, "row_sum<128>", (1, 2, 3.0), 1, 128))


# ---- launches that CUDA would refuse


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"block": 1025}, "1 to 1024 threads"),
        ({"block": 0}, "1 to 1024 threads"),
        ({"grid": 0}, "1 to 2\\^31 - 1 blocks"),
        ({"grid": 6, "cluster": 4}, "divides the grid"),
        ({"shared_bytes": 232449}, "at most 232448 bytes"),
    ],
)
def test_impossible_numbers(kernels: str, numbers: dict[str, int], words: str) -> None:
    args = (torch.ones(4), poisoned(4), 1)
    with pytest.raises(ValueError, match=words):
        host.launch(Launch(kernels, "row_sum<128>", args, **{"grid": 4, "block": 128, **numbers}))


def test_wrong_arguments(kernels: str) -> None:
    x, y = torch.ones(1, 4), poisoned(1)
    for args, words in (
        ((x, y), "takes 3 arguments, got 2"),
        ((x, y, 4.0), "argument 2 of row_sum<128> is an int, got float"),
        ((x, 0, 4), "argument 1 of row_sum<128> is a tensor, got int"),
    ):
        with pytest.raises(TypeError, match=words):
            host.launch(Launch(kernels, "row_sum<128>", args, 1, 128))
    with pytest.raises(ValueError, match="argument 1 is on meta"):
        host.launch(Launch(kernels, "row_sum<128>", (x, y.to("meta"), 4), 1, 128))
