"""Rows in parts, on a GPU: what two kernels hand on belongs to one call, whatever runs beside it.

The two kernels of `split`, and those of `streamed`, share a workspace, the parts' states. A
workspace that calls shared, one on another stream, or one that a graph did not keep would give a
row another row's states.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from online_softmax import logsumexp, rowkernels, softmax
from rows_kit import gpu

ROWS = {"split": 1, "streamed": 12}  # few rows are split, many are streamed
COLS = pytest.mark.parametrize("cols", [1_100_000, 1_100_003])  # whole 16-byte vectors, and not
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SPIN = 20_000_000  # cycles: about 10 ms, in which the host has launched all of a test's calls


def _gradient(x: Tensor) -> Tensor:
    """The gradient of a softmax: the row kernel for y, then that for dx."""
    x = x.detach().requires_grad_()
    y = softmax(x)
    return torch.autograd.grad(y, x, x.detach().flip(-1))[0]


WORK: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": softmax, "softmax_backward": _gradient, "logsumexp": logsumexp,
}  # fmt: skip
EACH = pytest.mark.parametrize(
    ("op", "kernel"),
    [(op, kernel) for op in WORK for kernel in ROWS if (op, kernel) != ("logsumexp", "streamed")],
)


def inputs(op: str, kernel: str, count: int, cols: int, dtype: torch.dtype) -> list[Tensor]:
    """Rows that differ in their largest element as in all others: no state is another's. Of which
    the planner does what is wanted."""
    made = [torch.randn(ROWS[kernel], cols, device="cuda") * (1 + n) + n for n in range(count)]
    found = [x.to(dtype) for x in made]
    if (planned := rowkernels.numbers(op, found[0]).kernel) != kernel:
        pytest.skip(f"this GPU's planner takes {planned}")
    return found


def right(op: str, x: Tensor) -> Tensor:
    """What the call gives alone; and that it is right."""
    got = WORK[op](x)
    torch.cuda.synchronize()
    wide = x.double().requires_grad_()
    if op == "logsumexp":
        want = torch.logsumexp(wide, -1)
    else:
        want = torch.softmax(wide, -1)
    eps = torch.finfo(x.dtype).eps
    if op == "softmax_backward":
        y = softmax(x).double()
        dy = x.flip(-1).double()
        want = y * (dy - (dy * y).sum(-1, keepdim=True))
    largest = want.abs().amax(-1, keepdim=True)
    assert bool(((got.double() - want).abs() <= (2 * eps + 1e-5) * largest).all())
    return got


def agree(got: list[Tensor], want: list[Tensor]) -> None:
    torch.cuda.synchronize()
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), place


@gpu
@COLS
@DTYPES
@EACH
def test_it_is_right(op: str, kernel: str, dtype: torch.dtype, cols: int) -> None:
    right(op, inputs(op, kernel, 1, cols, dtype)[0])


@pytest.mark.parametrize("kernel", ROWS)
@COLS
@DTYPES
@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
def test_the_planner_takes_both_for_these_rows(
    op: str, dtype: torch.dtype, cols: int, kernel: str
) -> None:
    """On the measured GPU, so that nothing below is skipped there."""
    x = torch.empty(ROWS[kernel], cols, dtype=dtype, device="meta")
    assert rowkernels.numbers(op, x).kernel == kernel
    assert rowkernels.numbers("logsumexp", x).kernel == "split"


@gpu
@COLS
@DTYPES
@EACH
def test_two_calls_in_flight(op: str, kernel: str, dtype: torch.dtype, cols: int) -> None:
    """Both are launched before either runs, on two streams that a sleep holds back."""
    xs = inputs(op, kernel, 2, cols, dtype)
    want = [right(op, x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    got: list[Tensor] = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN)
    for _ in range(5):
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                got.append(WORK[op](x))
    agree(got, want * 5)


@gpu
@COLS
@DTYPES
@EACH
def test_several_streams(op: str, kernel: str, dtype: torch.dtype, cols: int) -> None:
    xs = inputs(op, kernel, 4, cols, dtype)
    want = [right(op, x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    got: list[Tensor] = []
    for _ in range(10):
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                got.append(WORK[op](x))
    agree(got, want * 10)


@gpu
@COLS
@DTYPES
@EACH
def test_beside_a_busy_stream(op: str, kernel: str, dtype: torch.dtype, cols: int) -> None:
    """Another stream takes every multiprocessor meanwhile: parts of a row run far apart."""
    (x,) = inputs(op, kernel, 1, cols, dtype)
    want = right(op, x)
    noise = torch.randn(4096, 4096, device="cuda")
    busy, side = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(40):
            noise = noise @ noise * 1e-3
    got: list[Tensor] = []
    with torch.cuda.stream(side):
        for _ in range(10):
            late = x * 1  # on this stream: another would read it too early
            got.append(WORK[op](late))
    agree(got, [want] * 10)


@gpu
@COLS
@DTYPES
@EACH
def test_captured_and_replayed_on_changed_inputs(
    op: str, kernel: str, dtype: torch.dtype, cols: int
) -> None:
    """Two calls in one graph keep workspaces of their own, at every replay."""
    xs = inputs(op, kernel, 2, cols, dtype)
    for x in xs:
        right(op, x)  # compiles and loads before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [WORK[op](x) for x in xs]
    for turn in range(3):
        for x in xs:
            x.copy_(torch.randn(x.shape, device="cuda") * (turn + 1) - turn)
        graph.replay()
        torch.cuda.synchronize()
        kept = [each.clone() for each in got]
        agree(kept, [right(op, x) for x in xs])
