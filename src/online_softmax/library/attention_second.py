"""The second derivative of attention: of the reference, whose tiles torch differentiates.

It holds the scores of all tiles, so its memory grows with q_len times k_len.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from online_softmax.attentionplan import Options
from online_softmax.library.second import pulled_back
from online_softmax.reference import attention, packed
from online_softmax.reference.outputs import without_autocast
from online_softmax.reference.packed import Packed

FLOATS = (0, 1, 2, 3, 5)  # q, k, v, bias, sinks: the tensors that have a gradient


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    tensors: Sequence[Tensor | None],
    o: Options,
    given: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """By dout, dlse and the eight tensors, for the gradients `given` by what the first order gave.

    out and lse, which the first order takes too, have none: the tensors have all of it.

    Args:
        dout, dlse, tensors, o: of the first order.
        given: of its five results; None: there is none, or the result was not wanted.
    """
    places = [at for at in FLOATS if tensors[at] is not None]
    wanted = [at for at, g in zip(FLOATS, given, strict=True) if g is not None]
    above = [dout] if dlse is None else [dout, dlse]

    def first(*floats: Tensor) -> Sequence[Tensor]:
        upstream, inputs = floats[: len(above)], floats[len(above) :]

        def forward(*some: Tensor) -> Sequence[Tensor]:
            now = list(tensors)
            for at, t in zip(places, some, strict=True):
                now[at] = t
            return _forward(now, o)[: len(above)]

        found = dict(zip(places, pulled_back(forward, inputs, upstream), strict=True))
        return [found[at] for at in wanted]

    result: list[Tensor | None] = [None] * (2 + len(tensors))
    if not wanted:
        return result
    floats = [*above, *(t for at in places if (t := tensors[at]) is not None)]
    with without_autocast(dout.device.type):
        by = pulled_back(first, floats, [g for g in given if g is not None])
    for at, gradient in zip((*range(len(above)), *(2 + at for at in places)), by, strict=True):
        result[at] = gradient
    return result


def _forward(tensors: Sequence[Tensor | None], o: Options) -> tuple[Tensor, Tensor]:
    """out, not rounded, and lse."""
    q, k, v, bias, mask, sinks, cu_seq_q, cu_seq_k = tensors
    if q is None or k is None or v is None:
        raise AssertionError("attention has q, k and v")
    if cu_seq_q is not None and cu_seq_k is not None:
        lens = Packed(cu_seq_q, cu_seq_k)
        found = packed.forward(q, k, v, sinks, lens, o, keeps_float=True)
    else:
        found = attention.forward(q, k, v, bias, mask, sinks, o, keeps_float=True)
    return found.out, found.lse
