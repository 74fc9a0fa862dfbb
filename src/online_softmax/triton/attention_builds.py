"""What attention's kernels take of a GPU, without one: a call's launches, built and not run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from online_softmax import jit
from online_softmax.attentionplan import Options
from online_softmax.triton import ALIGNED, TRITON_TYPE, ask_all, built
from online_softmax.triton import answer as answer_by

POINTER = {torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", **TRITON_TYPE}
LENGTHS = {"forward": 4096, "backward": 4096, "decode": 4}
KEYS = 1 << 16  # of a decode: in parts


@dataclass(frozen=True)
class Build:
    """A call whose kernels are built: 8 heads of queries share 2 of keys, on 16-byte addresses."""

    direction: str  # "forward", "backward" or "decode"
    dtype: torch.dtype
    arch: str  # "sm_90a"
    head_dim: int
    causal: bool = True
    has_all: bool = False  # a window, softcap, bias, mask and sinks
    is_packed: bool = False


def compile_all(builds: Sequence[Build]) -> list[dict[str, jit.Resources | str]]:
    """By the name of each kernel what it takes, or a sentence if it does not build."""
    return [dict(found) for found in _answers(tuple(builds))]


@functools.lru_cache(maxsize=64)
def _answers(builds: tuple[Build, ...]) -> tuple[dict[str, jit.Resources | str], ...]:
    questions = [{**asdict(build), "dtype": TRITON_TYPE[build.dtype]} for build in builds]
    names = [f"attention {b.direction} for {b.arch}" for b in builds]
    return tuple(
        {"": found}
        if isinstance(found, str)
        else {n: f if isinstance(f, str) else jit.Resources(**f) for n, f in found.items()}
        for found in ask_all(__name__, questions, names)
    )


# ---- in a process of its own


def answer() -> None:
    """For `ask_all` alone."""
    answer_by(_figures)


def _figures(
    direction: str,
    dtype: str,
    arch: str,
    head_dim: int,
    causal: bool,
    has_all: bool,
    is_packed: bool,
) -> dict[str, Any]:
    from online_softmax.triton import attention_backward_launch, attention_launch

    torch_type = next(t for t, name in TRITON_TYPE.items() if name == dtype)
    length, keys = LENGTHS[direction], KEYS if direction == "decode" else LENGTHS[direction]
    given = _inputs(torch_type, head_dim, length, keys, has_all, is_packed)
    left, right = (512, 0) if has_all else (-1, 0 if causal else -1)
    o = Options(length, keys, None, left, right, False, 30.0 if has_all else None, False)
    made = attention_launch.forward(given, o, arch, direction == "decode")
    launches = made.launches
    if direction == "backward":
        wanted = attention_backward_launch.Wanted(True, True, True, has_all, has_all)
        rows = made.lse if has_all else None
        launches = attention_backward_launch.backward(
            made.out, rows, given, made.out, made.lse, o, wanted, arch
        ).launches
    return {
        launch.kernel.__name__: built(
            source(launch), f"attention's {launch.kernel.__name__}", arch,
            launch.options,
        )
        for launch in launches
    }  # fmt: skip


def _inputs(
    dtype: torch.dtype, head_dim: int, q_len: int, k_len: int, has_all: bool, is_packed: bool
) -> Any:
    from online_softmax.triton.attention_launch import Inputs

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if is_packed:
        q, k = empty(2 * q_len, 8, head_dim), empty(2 * k_len, 2, head_dim)
        ends = empty(3, dtype=torch.int32)
        return Inputs(q, k, k, None, None, None, ends, ends)
    q, k = empty(2, 8, q_len, head_dim), empty(2, 2, k_len, head_dim)
    if not has_all:
        return Inputs(q, k, k, None, None, None, None, None)
    mask = empty(2, 1, q_len, k_len, dtype=torch.bool)
    return Inputs(q, k, k, empty(1, 8, q_len, k_len), mask, empty(8), None, None)


def source(launch: Any) -> Any:
    """The kernel as Triton specialises it for these arguments."""
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}

    def specialise(value: Any, path: tuple[int, ...], is_number: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(specialise(v, (*path, at), False) for at, v in enumerate(value))
        if isinstance(value, Tensor):
            aligned[path] = [["tt.divisibility", ALIGNED]]
            return f"*{POINTER[value.dtype]}"
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{POINTER[value.base.dtype]}{[*value.block_shape]}>"
        if value is None or (not is_number and value == 1):
            constants[path] = value
            return "constexpr"
        if not is_number and value % ALIGNED == 0:
            aligned[path] = [["tt.divisibility", ALIGNED]]
        return "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"

    for at, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(at,)] = value
        else:
            is_number = parameter.do_not_specialize or isinstance(value, float)
            signature[parameter.name] = specialise(value, (at,), is_number)
    return ASTSource(launch.kernel, signature, constexprs=constants, attrs=aligned)
