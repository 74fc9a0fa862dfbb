"""On a GPU, what the library chooses: a row has the same bits alone at every 16-byte phase, among
7, among 4,096, twice, and beside a busy stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from online_softmax import batch_invariant, rowchoice, rowops
from online_softmax.catalogue import problem_of
from online_softmax.lab import opjudge
from online_softmax.rowplan import BACKWARD, OPERATIONS
from rows_kit import gpu

SEVERAL, MANY, RUNS = 7, 4096, 10
COLS = pytest.mark.parametrize("cols", [4096, 32_001, 50_257, 128_256, 1_048_576])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
EACH = pytest.mark.parametrize("op", OPERATIONS)


def computed(op: str, *tensors: Tensor) -> Tensor:
    if op == "logsumexp":
        return rowops.logsumexp(*tensors, (-1,), False, None, 1.0, "")
    if op in BACKWARD:
        return rowops.backward(op.removesuffix("_backward"), *tensors, -1, None, 1.0, False)
    return rowops.forward(op, *tensors, -1, None, 1.0, False, "")


def inputs(op: str, rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x; or dy and y."""
    x = torch.randn(rows, cols, device="cuda", dtype=dtype)
    if op not in BACKWARD:
        return (x,)
    function = torch.log_softmax if op.startswith("log") else torch.softmax
    return torch.randn(rows, cols, device="cuda", dtype=dtype), function(x, -1)


def changed(change: Callable[[Tensor], Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(change(t) for t in tensors)


def moved(t: Tensor, start: int) -> Tensor:
    """A copy that begins so many elements behind a 16-byte boundary."""
    return (
        torch.empty(t.numel() + start, device=t.device, dtype=t.dtype)[start:].view_as(t).copy_(t)
    )


def alone(op: str, given: tuple[Tensor, ...], row: int) -> Tensor:
    return computed(op, *changed(lambda t: t[row : row + 1].clone(), given))[0]


@gpu
@COLS
@DTYPES
@EACH
def test_at_every_phase_and_among_seven(op: str, dtype: torch.dtype, cols: int) -> None:
    given = inputs(op, SEVERAL, cols, dtype)
    want = computed(op, *given)
    for row in range(SEVERAL):
        assert torch.equal(alone(op, given, row), want[row]), row
    for start in range(16 // dtype.itemsize):
        for rows in (1, SEVERAL):
            shifted = changed(lambda t, n=rows, s=start: moved(t[:n], s), given)
            assert torch.equal(computed(op, *shifted), want[:rows]), (start, rows)


@gpu
@COLS
@DTYPES
@EACH
def test_among_many(op: str, dtype: torch.dtype, cols: int) -> None:
    """The first, the last and some between: each as it is alone, and among few."""
    matrices = 3 if op in BACKWARD else 1 if op == "logsumexp" else 2
    needed = (matrices + 1) * MANY * cols * dtype.itemsize  # one more while they are made
    torch.cuda.empty_cache()
    if needed > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of device memory")
    given = inputs(op, MANY, cols, dtype)
    got = computed(op, *given)
    for row in (0, 1, 1000, MANY - 1):
        assert torch.equal(alone(op, given, row), got[row]), row
    for rows in (2, SEVERAL, 17, 133):
        assert torch.equal(computed(op, *changed(lambda t, n=rows: t[:n], given)), got[:rows]), rows


@gpu
@COLS
@DTYPES
@EACH
def test_twice_and_beside_a_busy_stream(op: str, dtype: torch.dtype, cols: int) -> None:
    given = inputs(op, SEVERAL, cols, dtype)
    want = computed(op, *given)
    got = [computed(op, *given) for _ in range(RUNS)]
    noise = torch.randn(4096, 4096, device="cuda")
    busy, side = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(40):
            noise = noise @ noise * 1e-3
    with torch.cuda.stream(side):
        got += [computed(op, *given) for _ in range(RUNS)]
    torch.cuda.synchronize()
    for place, result in enumerate(got):
        assert torch.equal(result, want), place


@gpu
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("cols", [20_480, 32_000, 65_536, 128_256, 262_144])
def test_few_rows_where_it_was_given_up(op: str, cols: int) -> None:
    """Right, the same at every run and in every small batch; many rows are as before."""
    (x,) = inputs(op, 64, cols, torch.bfloat16)
    many = computed(op, x)
    with batch_invariant(False):
        if rowchoice.few(op, problem_of(x[:1])) is None:
            pytest.skip("no such cut on this architecture")
        assert torch.equal(computed(op, x), many)
        want = computed(op, x[:16])
        for rows in (1, 5, 16) * 3:
            assert torch.equal(computed(op, x[:rows]), want[:rows])
        verdict = opjudge.check(op, (x[:16],), want, opjudge.OUR_ULPS, 16)
        assert verdict.ok, verdict.why
    assert torch.equal(computed(op, x[:16]), many[:16])
