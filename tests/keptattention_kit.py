"""What the tests of attention's kept calls share: calls, and what they launch without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from online_softmax import OutputState, attention, attention_state, attention_varlen

pytest.importorskip("triton")
from online_softmax.lab import tritonstub
from online_softmax.lab.tritonstub import Notes, Started

BF16 = torch.bfloat16


@pytest.fixture
def notes() -> Iterator[Notes]:
    with tritonstub.stubbed() as found:
        yield found


def tokens(
    q_len: int = 24, k_len: int = 40, dim: int = 32, heads: int = 4, dtype: torch.dtype = BF16
) -> list[Tensor]:
    shapes = (2, heads, q_len, dim), (2, 2, k_len, dim), (2, 2, k_len, dim)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def packed() -> list[Tensor]:
    ends = [torch.tensor([0, 5, 12], dtype=torch.int32) for _ in range(2)]
    return [
        torch.randn(14, 4, 32).to(BF16),
        *(torch.randn(14, 2, 32).to(BF16) for _ in "kv"),
        *ends,
    ]


def all_options() -> list[Tensor]:
    return [*tokens(), torch.randn(1, 4, 24, 40), torch.rand(2, 1, 1, 40) > 0.1, torch.randn(4)]


def with_all(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, sinks: Tensor) -> Any:
    return attention(
        q, k, v, causal=True, window=(9, 3), softcap=2.0, scale=0.3, bias=bias, mask=mask,
        sinks=sinks, empty="nan", return_lse=True,
    )  # fmt: skip


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attention(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)))


# What makes a call's tensors, and the call.
CALLS: dict[str, tuple[Callable[[], list[Tensor]], Callable[..., Any]]] = {
    "plain": (tokens, attention),
    "causal": (tokens, lambda *t: attention(*t, causal=True)),
    "top left": (tokens, lambda *t: attention(*t, causal="top_left", kernel="triton")),
    "everything": (all_options, with_all),
    "heads between": (tokens, transposed),
    "rows copied": (tokens, lambda q, k, v: attention(q.mT.contiguous().mT, k, v)),
    "bias of keys": (lambda: [*tokens(), torch.randn(40)], lambda *t: attention(*t[:3], bias=t[3])),
    "state": (tokens, attention_state),
    "odd": (lambda: tokens(7, 13, 17), lambda *t: attention(*t, return_lse=True)),
    "one part": (lambda: tokens(1, 40), lambda *t: attention(*t, causal=True)),
    "parts": (lambda: tokens(1, 600, 33), lambda *t: attention(*t, return_lse=True)),
    "parts of a state": (lambda: tokens(3, 1300), attention_state),
    "packed": (packed, lambda *t: attention_varlen(*t, 8, 9, causal=True, return_lse=True)),
    "packed, parts": (packed, lambda *t: attention_varlen(*t, 8, 1200, return_lse=True)),
}


def is_kept(work: list[Started]) -> bool:
    """Whether no launch of a call went through Triton's binder, which takes tensors."""
    return not any(isinstance(value, Tensor) for each in work for value in each.arguments)


def addresses(started: Started) -> dict[str, int]:
    """By the name of an argument: what the kernel reads or writes from."""
    names = KERNELS[started.kernel].arg_names
    return {
        name: value.data_ptr() if isinstance(value, Tensor) else value
        for name, value in zip(names, started.arguments, strict=True)
        if name.endswith("_ptr") and value is not None
    }


KERNELS = {name: getattr(module, name) for module, names in tritonstub.KERNELS for name in names}


def described(work: list[Started], tensors: list[Tensor]) -> Any:
    """All of a call's launches; addresses by which of the tensors, or how far from the first."""
    known = {t.data_ptr(): i for i, t in reversed([*enumerate(tensors)])}
    found, own = [], []
    for each in work:
        where = addresses(each)
        own += [a for a in where.values() if a not in known and a not in own]
        numbers = [None if isinstance(v, Tensor) else v for v in each.arguments]
        names = KERNELS[each.kernel].arg_names
        rest = [(n, v) for n, v in zip(names, numbers, strict=True) if n not in where]
        at = {n: known.get(a, ("own", own.index(a) if a in own else 0)) for n, a in where.items()}
        assert all(type(v) is not Tensor for _, v in rest)
        found.append((each.kernel, each.built_for, each.stream, each.grid, rest, at))
    return found


def written(made: Any) -> list[Tensor]:
    """Of a call's results those that its launches write. A state's o is made of one that is gone by
    then: it may have the address of other memory of the call."""
    return [made.m, made.d] if isinstance(made, OutputState) else results(made)


def results(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)
