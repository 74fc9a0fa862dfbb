"""The public losses: check the arguments once, then call the library.

A call like one before, without the options that ask for another way, starts its kernels again at
once.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from online_softmax import library
from online_softmax.arguments import check_bool, check_input, check_scale
from online_softmax.lossarguments import (
    check_class_dim,
    check_ignore_index,
    check_in_forward,
    check_loss_kernel,
    check_reduction,
    check_smoothing,
    check_softcap,
    check_weight,
    check_z_loss,
    targets_are_classes,
)

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    dim: int | None = None,
    return_lse: bool = False,
    grad_in_forward: bool = False,
    overwrite_logits: bool = False,
    check_target: bool = False,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of softmax(z) and the target, as `torch.nn.functional.cross_entropy`.

    z = cap(scale * logits), where cap(t) is softcap * tanh(t / softcap), or t without one. The loss
    of a row with target y is w_y ((max - z_y) + log(sum(exp(z - max)))), in float32 (float64);
    rounded once, after the reduction. Differentiable by logits, twice and in forward mode.

    Args:
        logits: float16, bfloat16, float32, float64 or fp8; (classes,), (rows, classes) or
            (rows, classes, ...); any strides, any device.
        target: classes, int64 or uint8, of logits' shape without `dim`; or probabilities, of a
            float type and logits' shape.
        weight: (classes,), what each class counts for; of a float type, on logits' device. It has
            no gradient where target is classes.
        ignore_index: rows with this target have loss 0 and gradient 0, whatever their logits hold,
            and do not count in the mean. It may be no class, where target is probabilities.
        reduction: "mean": the sum over the sum of the weights of the rows that count (without
            weight: their number; for probabilities: the number of rows); NaN if none counts.
            "sum", or "none": one loss for each row.
        label_smoothing: in [0, 1]: the target becomes (1 - label_smoothing) of itself and
            label_smoothing / classes of every class.
        z_loss: at least 0: z_loss * lse^2 is added to the loss of each row that counts, before the
            reduction and not weighted; the mean divides it by the same sum.
        softcap: above 0 and finite, or None.
        scale: at least 0 and finite; multiplies the logits first.
        dim: of the classes. None: as in torch, 1, or 0 where logits have one dimension.
        return_lse: return (loss, lse).
        grad_in_forward: compute the gradient by logits in the forward, for the loss as it is
            reduced, and keep it in place of logits; the backward multiplies it by what arrives,
            in place unless `retain_graph` keeps it for another. It is as correct for any upstream
            gradient, logits stay as they are, and a second derivative is an error. Without a
            gradient to record, under `torch.compile`, transforms, modes and forward mode, and where
            target is probabilities, it changes nothing.
        overwrite_logits: where grad_in_forward has an effect, write that gradient over logits: no
            second tensor of their size. They must be a tensor of their own: no leaf, no view, not
            fp8. To autograd it is an in-place operation: a backward that had saved logits, one
            through what is computed from them later, one by lse and a second one by the loss are
            errors. The values of logits are lost; where grad_in_forward has no effect they stay.
        check_target: on the CPU a target that is no class is an error always. On other devices its
            row gives a NaN loss and a gradient of 0, since to look would make the host wait;
            True: look, and raise (not while a CUDA graph is captured).
        kernel: force a kernel by name: "registers", "split", "torch" (by blocks of rows, as on the
            CPU) or "reference"; where target is probabilities, one of `online_softmax.KERNELS` for
            log_softmax. None: the planner chooses (`online_softmax.explain` with
            op="cross_entropy" says what and why).

    Returns:
        The loss in logits' dtype (bfloat16 for fp8; float32 for half types under autocast; where
        target is probabilities the wider of the dtypes): 0-dim, or of target's shape without
        classes. With return_lse also lse, log(sum(exp(z))) of each row in float32 (float64),
        differentiable, also of ignored rows.

    Raises:
        TypeError: logits, target or weight is not a tensor, or a number or a bool is of another
            type.
        IndexError: a target is neither a class nor ignore_index (above); dim is out of range.
        ValueError: the number of rows of target and logits differs; reduction, z_loss, softcap,
            scale or ignore_index is none of these; overwrite_logits without grad_in_forward; the
            named kernel cannot run this.
        RuntimeError: target or weight has another shape, dtype or device than is wanted;
            label_smoothing is not in [0, 1]; weight requires a gradient; logits that cannot be
            written over.
        NotImplementedError: a dtype of logits that is not listed above, or not a dense tensor.

    Examples:
        >>> import torch
        >>> logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [1.0, 1.0, 1.0]])
        >>> cross_entropy(logits, torch.tensor([0, -100, 2]))
        tensor(0.7531)
        >>> cross_entropy(logits, torch.tensor([0, 1, 2]), reduction="none", return_lse=True)
        (tensor([0.4076, 0.0949, 1.0986]), tensor([2.4076, 3.0949, 2.0986]))
    """
    if (
        dim is None
        and kernel is None
        and type(ignore_index) is int
        and type(label_smoothing) is float
        and type(z_loss) is float
        and (softcap is None or type(softcap) is float)
        and type(scale) is float
        and grad_in_forward is False
        and overwrite_logits is False
        and check_target is False
        and type(return_lse) is bool
    ):
        options = (ignore_index, label_smoothing, z_loss, softcap, scale)
        if (known := library.loss_again(logits, target, weight, reduction, options)) is not None:
            return known if return_lse else known[0]
    name = "cross_entropy"
    given = (logits, target) if weight is None else (logits, target, weight)
    if not all(isinstance(t, Tensor) for t in given) and has_torch_function(given):
        return handle_torch_function(
            cross_entropy,
            given,
            logits,
            target,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            scale=scale,
            dim=dim,
            return_lse=return_lse,
            grad_in_forward=grad_in_forward,
            overwrite_logits=overwrite_logits,
            check_target=check_target,
            kernel=kernel,
        )
    check_input(name, logits, "logits")
    axis = check_class_dim(name, logits, dim)
    is_classes = targets_are_classes(name, logits, target, axis)
    if weight is not None:
        check_weight(name, logits, weight, axis)
    checked = library.LossOptions(
        axis,
        check_ignore_index(name, ignore_index, is_classes),
        check_smoothing(name, label_smoothing),
        check_z_loss(name, z_loss),
        check_softcap(name, softcap),
        check_scale(name, scale),
    )
    check_reduction(name, reduction)
    makes, overwrites = check_in_forward(name, grad_in_forward, overwrite_logits)
    checks = check_bool(name, "check_target", check_target)
    with_lse = check_bool(name, "return_lse", return_lse)
    forced = check_loss_kernel(name, kernel, is_classes)
    if is_classes:
        if target.dim() == logits.dim():  # torch takes (1,) for a row alone
            target = target.reshape(())
        loss, lse = library.of_classes(
            logits,
            target,
            weight,
            reduction,
            checked,
            checks,
            makes,
            overwrites,
            with_lse,
            forced,
        )
        return (loss, lse) if with_lse else loss
    return library.of_probabilities(logits, target, weight, reduction, checked, forced, with_lse)
