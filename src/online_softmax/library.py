"""How torch sees us: schemas, fakes, autograd, autocast, vmap.

No other file names torch.library or autograd. Three routes to one kernel, since no single
registration gives opcheck, fullgraph, vmap, forward mode and double backward together:

- traced (torch.compile): the registered op, its Autograd kernel redispatching below autograd;
- eager with a gradient or a functorch transform: an `autograd.Function` per direction;
- eager with nothing recorded: the kernel itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.library import Library, register_autocast, register_fake, register_vmap

from online_softmax import catalogue

# Private names of torch, with _SingleLevelFunction above; tests/test_library.py says which is gone.
_functorch_active = torch._C._are_functorch_transforms_active
_below_autograd = torch._C._AutoDispatchBelowAutograd
_after_autograd = torch._C._after_autograd_keyset
_torch_function_modes = torch._C._len_torch_function_stack
_torch_dispatch_modes = torch._C._len_torch_dispatch_stack
_set_forward_mode = forward_ad._set_fwd_grad_enabled


def _is_forward_mode() -> bool:
    return forward_ad._current_level >= 0


NAMESPACE = "online_softmax"
_library = Library(NAMESPACE, "DEF")
_library.define("softmax(Tensor x, int dim, str kernel) -> Tensor")
_library.define("softmax_backward(Tensor dy, Tensor y, int dim) -> Tensor")


# ---- the kernels, on plain tensors


def _forward(x: Tensor, dim: int, kernel: str) -> Tensor:
    return catalogue.softmax(x, dim, kernel)


def _backward(dy: Tensor, y: Tensor, dim: int) -> Tensor:
    """dx = y (dy - sum(dy y)), accumulated in float32 (float64), one rounding at the end."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    dy_wide, y_wide = dy.to(wide), y.to(wide)
    dx = y_wide * (dy_wide - (dy_wide * y_wide).sum(dim, keepdim=True))
    return dx.to(y.dtype).contiguous()


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("softmax", _forward, "CompositeExplicitAutograd")
_library.impl("softmax_backward", _backward, "CompositeExplicitAutograd")
register_fake(f"{NAMESPACE}::softmax", lambda x, dim, kernel: _like(x), lib=_library)
register_fake(f"{NAMESPACE}::softmax_backward", lambda dy, y, dim: _like(y), lib=_library)
# float32 under autocast, as torch's own list has it for CUDA.
register_autocast(f"{NAMESPACE}::softmax", "cuda", torch.float32, lib=_library)
_op = torch.ops.online_softmax.softmax.default
_op_backward = torch.ops.online_softmax.softmax_backward.default


# ---- the calculus, in differentiable torch operations, rounded once as in _backward


def _wide(*tensors: Tensor) -> Iterator[Tensor]:
    return (t if t.dtype == torch.float64 else t.float() for t in tensors)


def _backward_gradients(dy: Tensor, y: Tensor, g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Gradients of dx = y (dy - sum(dy y)) by dy and by y, for an upstream g."""
    types = dy.dtype, y.dtype
    dy, y, g = _wide(dy, y, g)
    dot_dy, dot_g = (dy * y).sum(dim, keepdim=True), (g * y).sum(dim, keepdim=True)
    by_dy, by_y = y * (g - dot_g), g * (dy - dot_dy) - dy * dot_g
    return by_dy.to(types[0]), by_y.to(types[1])


def _forward_tangent(y: Tensor, x_tangent: Tensor, dim: int) -> Tensor:
    with _set_forward_mode(True):  # torch has it off in here: a jvp of this jvp would be zero
        wide, x_tangent = _wide(y, x_tangent)
        return (wide * (x_tangent - (x_tangent * wide).sum(dim, keepdim=True))).to(y.dtype)


def _backward_tangent(
    dy: Tensor, y: Tensor, dy_tangent: Tensor | None, y_tangent: Tensor | None, dim: int
) -> Tensor:
    with _set_forward_mode(True):
        # Inputs, so they still carry the tangents of this level, which are not to be used twice.
        dy, y = (forward_ad.unpack_dual(t).primal for t in (dy, y))
        dtype = y.dtype
        dy_tangent = torch.zeros_like(dy) if dy_tangent is None else dy_tangent
        y_tangent = torch.zeros_like(y) if y_tangent is None else y_tangent
        dy, y, dy_tangent, y_tangent = _wide(dy, y, dy_tangent, y_tangent)
        dot = (dy * y).sum(dim, keepdim=True)
        dot_tangent = (dy_tangent * y + dy * y_tangent).sum(dim, keepdim=True)
        return (y_tangent * (dy - dot) + y * (dy_tangent - dot_tangent)).to(dtype)


def _batched(x: Tensor, batch_dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if batch_dim is None else x.movedim(batch_dim, 0)


def _over_batch(function: Callable[..., Tensor], tensors: Sequence[Tensor], dim: int) -> Tensor:
    """function(*tensors, dim) for each example of a batch, whose dimension comes first in all."""
    if tensors[0].dim() == 1:  # each example is a scalar: a row of one element
        return function(*(t.unsqueeze(-1) for t in tensors), -1).squeeze(-1)
    return function(*tensors, dim if dim < 0 else dim + 1)


# ---- route: eager, a gradient or a transform


class _SoftmaxBackward(Function):
    @staticmethod
    def forward(dy: Tensor, y: Tensor, dim: int) -> Tensor:
        return _backward(dy, y, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dy, y, ctx.dim = inputs
        ctx.save_for_backward(dy, y)
        ctx.save_for_forward(dy, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        dy, y = ctx.saved_tensors
        return *_backward_gradients(dy, y, g, ctx.dim), None

    @staticmethod
    def jvp(ctx: Any, dy_tangent: Tensor, y_tangent: Tensor, _: None) -> Tensor:  # type: ignore[override]
        dy, y = ctx.saved_tensors
        return _backward_tangent(dy, y, dy_tangent, y_tangent, ctx.dim)

    @staticmethod
    def vmap(info: Any, in_dims: Any, dy: Tensor, y: Tensor, dim: int) -> Any:  # type: ignore[override]
        dy, y = (_batched(t, in_dims[i], info.batch_size) for i, t in enumerate((dy, y)))
        return _over_batch(_eager_backward, (dy, y), dim), 0


class _Softmax(Function):
    @staticmethod
    def forward(x: Tensor, dim: int, kernel: str) -> Tensor:
        # Below the transforms x may still be a subclass, or a mode may be at work.
        return _forward(x, dim, kernel) if _is_plain(x) else _op(x, dim, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dim = inputs[1]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _eager_backward(dy, ctx.saved_tensors[0], ctx.dim), None, None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        return _forward_tangent(ctx.saved_tensors[0], x_tangent, ctx.dim)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dim: int, kernel: str) -> Any:  # type: ignore[override]
        batch = (x.movedim(in_dims[0], 0),)
        return _over_batch(lambda x, dim: _eager(x, dim, kernel), batch, dim), 0


def _entry(function: type[Function]) -> Any:
    """`apply`, by the base class's faster entry unless a functorch transform is at work."""
    base_apply = super(Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Tensor:
        return function.apply(*args) if _functorch_active() else base_apply(*args)

    return apply


_eager, _eager_backward = _entry(_Softmax), _entry(_SoftmaxBackward)


# ---- route: traced. Dynamo refuses an autograd.Function that has a jvp; these it never sees.


class _OpSoftmaxBackward(_SingleLevelFunction):
    @staticmethod
    def forward(keys: Any, dy: Tensor, y: Tensor, dim: int) -> Tensor:
        with _below_autograd():
            return _op_backward.redispatch(keys & _after_autograd, dy, y, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, dy, y, ctx.dim = inputs
        ctx.save_for_backward(dy, y)
        ctx.save_for_forward(dy, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, Tensor, None]:  # type: ignore[override]
        dy, y = ctx.saved_tensors
        return None, *_backward_gradients(dy, y, g, ctx.dim), None

    @staticmethod
    def jvp(ctx: Any, _: None, dy_tangent: Tensor, y_tangent: Tensor, __: None) -> Tensor:  # type: ignore[override]
        dy, y = ctx.saved_tensors
        return _backward_tangent(dy, y, dy_tangent, y_tangent, ctx.dim)


class _OpSoftmax(_SingleLevelFunction):
    @staticmethod
    def forward(keys: Any, x: Tensor, dim: int, kernel: str) -> Tensor:
        with _below_autograd():
            return _op.redispatch(keys & _after_autograd, x, dim, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dim = inputs[2]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None]:  # type: ignore[override]
        return None, _op_backward(dy, ctx.saved_tensors[0], ctx.dim), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, x_tangent: Tensor, *__: None) -> Tensor:  # type: ignore[override]
        return _forward_tangent(ctx.saved_tensors[0], x_tangent, ctx.dim)


_library.impl(
    "softmax",
    _OpSoftmax.apply,  # type: ignore[attr-defined]
    "Autograd",
    with_keyset=True,
)
_library.impl(
    "softmax_backward",
    _OpSoftmaxBackward.apply,  # type: ignore[attr-defined]
    "Autograd",
    with_keyset=True,
)


def _op_vmap(info: Any, in_dims: Any, x: Tensor, dim: int, kernel: str) -> tuple[Tensor, int]:
    batch = (x.movedim(in_dims[0], 0),)
    return _over_batch(lambda x, dim: _op(x, dim, kernel), batch, dim), 0


def _op_backward_vmap(
    info: Any, in_dims: Any, dy: Tensor, y: Tensor, dim: int
) -> tuple[Tensor, int]:
    dy, y = (_batched(t, in_dims[i], info.batch_size) for i, t in enumerate((dy, y)))
    return _over_batch(_op_backward, (dy, y), dim), 0


register_vmap(f"{NAMESPACE}::softmax", _op_vmap, lib=_library)
register_vmap(f"{NAMESPACE}::softmax_backward", _op_backward_vmap, lib=_library)


# ---- the way in


def _is_plain(x: Tensor) -> bool:
    """No subclass, mode or autocast (registered for CUDA alone) that must see the op."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not _torch_function_modes()
        and not _torch_dispatch_modes()
        and not (x.is_cuda and torch.is_autocast_enabled("cuda"))
    )


def softmax(x: Tensor, dim: int, kernel: str) -> Tensor:
    """The cheapest of the three routes that is right for this call."""
    if torch.compiler.is_compiling():
        return _op(x, dim, kernel)
    if _functorch_active():  # whose levels the op's Autograd kernel does not know
        return _eager(x, dim, kernel)
    if not _is_plain(x):
        return _op(x, dim, kernel)
    if (x.requires_grad and torch.is_grad_enabled()) or _is_forward_mode():
        return _eager(x, dim, kernel)
    return _forward(x, dim, kernel)
