"""What the tests of cross-entropy's kernels share: options, float64's answer, cuts of rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from online_softmax import rowkernels, rowplan
from online_softmax.cuda import crossentropy_launch, host, launch
from online_softmax.cuda.crossentropy_launch import Options
from online_softmax.cuda.launch import Launch
from online_softmax.rowplan import Row
from rows_kit import GPU

needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="host execution needs g++ or clang++"
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ((0, 0), (1, 0), (3, 5))  # elements before the first row, and between rows
WIDTHS = (1, 6, 33, 257, 1024, 2051)
IGNORED, NO_CLASS = -100, 10**9
INF = math.inf
VARIANTS: dict[str, dict[str, Any]] = {  # options of the public functions; weight: whether
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "capped": {"softcap": 5.0, "weight": True, "z_loss": 1e-2},
    "weighted": {"weight": True, "scale": 0.3, "z_loss": 1e-2},
    "all": {"weight": True, "label_smoothing": 0.3, "scale": 1.7, "softcap": 8.0, "z_loss": 0.1},
    "weighted_smooth": {"weight": True, "label_smoothing": 0.3},
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors have kernels, by host execution; the names of those that ran."""
    found: list[str] = []
    run = launch.run

    def note(work: list[Launch], device: torch.device) -> Any:
        found.extend(each.symbol.partition("<")[0].removeprefix("cross_entropy_") for each in work)
        return run(work, device)

    monkeypatch.setattr(rowkernels, "has_kernels", lambda x: x.device.type == "cpu")
    monkeypatch.setattr(launch, "run", note)
    return found


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("kernels", marks=needs_compiler),
        pytest.param("cuda", marks=GPU),
    ]
)
def place(request: pytest.FixtureRequest) -> str:
    """A device; "kernels" is the CPU, with kernels by host execution."""
    if request.param != "kernels":
        return str(request.param)
    request.getfixturevalue("ran")
    return "cpu"


def arguments(variant: str, cols: int) -> dict[str, Any]:
    """A variant with its weights."""
    found = dict(VARIANTS[variant])
    if found.get("weight"):
        found["weight"] = torch.rand(cols) + 0.5
    return found


def options(weight: Tensor | None = None, label_smoothing: float = 0.0, **rest: Any) -> Options:
    total = None if weight is None else weight.sum()
    return Options(weight, total, smoothing=label_smoothing, **rest)


def problem(
    rows: int, cols: int, dtype: torch.dtype, start: int = 0, gap: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits among NaN, and targets: some ignored, some no class."""
    base = torch.full((rows, start + cols + gap), math.nan, dtype=dtype)
    x = base[:, start : start + cols].copy_(torch.randn(rows, cols) * 3)
    target = torch.randint(cols, (rows,))
    target[0], target[-1] = cols - 1, 0
    if rows > 4:
        target[1], target[2], target[3] = IGNORED, cols, -1
    return x, target


def expected(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, lse and the gradient of each row's loss, in float64."""
    x = x.double().requires_grad_()
    cols = x.shape[1]
    w = torch.ones(cols, dtype=torch.double) if weight is None else weight.double()
    z = x * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    lse = torch.logsumexp(z, -1)
    is_class = (target != ignore_index) & (target >= 0) & (target < cols)
    at = torch.where(is_class, target, 0)
    loss = (1 - label_smoothing) * w[at] * (lse - z.gather(1, at[:, None])[:, 0])
    if label_smoothing:
        loss = loss + label_smoothing / cols * (w * (lse[:, None] - z)).sum(-1)
    loss = loss + z_loss * lse * lse
    (dx,) = torch.autograd.grad(loss.sum(), x)
    loss = torch.where(is_class, loss, torch.where(target == ignore_index, 0.0, math.nan))
    return loss.detach(), lse.detach(), torch.where(is_class[:, None], dx, 0.0)


def cuts(cols: int, item: int) -> dict[str, Row]:
    """One of each strategy that holds a row."""
    words = rowplan.vectors_a_row(cols, item)
    warps = -(-words // 32)
    found = {
        "block": Row("registers", 2, 0, 32 * -(-warps // 2)),
        "cluster": Row("registers", 1, 0, 32 * -(-warps // 2), 2),
        "split": Row("split", 1, 0, 64, parts=-(-words // 64)),
    }
    if words <= 128:
        lanes = 4 if words <= 8 else 32
        found["lanes"] = Row("registers", -(-words // lanes), lanes, 64)
    return found


def work(
    x: Tensor, target: Tensor, given: Options, row: Row, dloss: Tensor | None, dx: Tensor | None
) -> tuple[list[Launch], Tensor, Tensor]:
    loss, lse = torch.full((2, len(x)), 7.0)
    if row.kernel == "split":
        return crossentropy_launch.split(x, target, loss, lse, None, given, row), loss, lse
    tensors = (x, target, dloss, loss, lse, None, dx)
    return crossentropy_launch.in_registers(*tensors, given, row, True), loss, lse


def close(got: Tensor, want: Tensor, atol: float, rtol: float = 2.0**-21) -> None:
    eps = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps / 2
    torch.testing.assert_close(got.double(), want, rtol=rtol + eps, atol=atol, equal_nan=True)


def build(launches: list[Launch]) -> None:
    """Compile together what shares a file, which is far sooner than one by one."""
    for file in {each.file for each in launches}:
        host.build(file, [each.symbol for each in launches if each.file == file])
