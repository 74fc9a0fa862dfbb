"""What a call of attention costs the host: whole calls, kept and not, and the pieces of a kept one.

python benchmarks/attention_host.py [--stub] [--q-len 64] [--k-len 64] [--keys 4096]

Microseconds a call: the least of many repetitions, of batches shorter than a GPU's queue of
launches, so that the host alone is timed. --stub: without a GPU; Triton binds and looks up its
kernels, and its launcher and the driver, which are missing then, take no time.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from online_softmax import attention, attention_varlen, attentionkernels, keptcalls
from online_softmax.attentionarguments import check_options
from online_softmax.attentionplan import Options
from online_softmax.catalogue import arch_of
from online_softmax.library import attention_again

CALLS, REPETITIONS = 20, 400  # short batches: some are disturbed by nothing
Call = Callable[[], Any]
HEADS = {"cuda": 32, "cpu": 4}  # few where large allocations are the operating system's affair
OPTIONS = (True, None, None, None, "zero")  # of attention(causal=True), as check_options takes them


def least_us(call: Call, synchronize: Call) -> float:
    """The least, over the repetitions, of the mean time of a call."""
    least = float("inf")
    for _ in range(REPETITIONS):
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        least = min(least, time.perf_counter() - start)
    synchronize()
    return least / CALLS * 1e6


def tokens(q_len: int, k_len: int, device: str) -> list[Tensor]:
    heads = HEADS[device]
    shapes = (1, heads, q_len, 128), (1, heads // 4, k_len, 128), (1, heads // 4, k_len, 128)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]


def ours(q_len: int, k_len: int, keys: int, device: str) -> dict[str, Call]:
    """Whole calls, by what they are."""
    q, k, v = tokens(q_len, k_len, device)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    recorded = attention(*leaves, causal=True)
    above = torch.ones_like(recorded)
    few = tokens(1, keys, device)
    packed = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    ends = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (q_len, k_len)]
    return {
        "forward": lambda: attention(q, k, v, causal=True),
        "forward, lse as well": lambda: attention(q, k, v, causal=True, return_lse=True),
        "forward, a gradient recorded": lambda: attention(*leaves, causal=True),
        "backward": lambda: torch.autograd.grad(recorded, leaves, above, retain_graph=True),
        f"decode, {keys} keys": lambda: attention(*few, causal=True),
        "packed": lambda: attention_varlen(*packed, *ends, q_len, k_len, causal=True),
    }


def torchs(q_len: int, k_len: int, keys: int, device: str) -> dict[str, Call]:
    q, k, v = tokens(q_len, k_len, device)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    recorded = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    above = torch.ones_like(recorded)
    few = tokens(1, keys, device)
    options = {"is_causal": True, "enable_gqa": True}
    return {
        "forward": lambda: scaled_dot_product_attention(q, k, v, **options),
        "forward, a gradient recorded": lambda: scaled_dot_product_attention(*leaves, **options),
        "backward": lambda: torch.autograd.grad(recorded, leaves, above, retain_graph=True),
        f"decode, {keys} keys": lambda: scaled_dot_product_attention(*few, enable_gqa=True),
    }


def unkept(call: Call) -> Call:
    """The call as one that none came before, and that none will come after."""

    def whole() -> None:
        kept, keep = keptcalls.kept, keptcalls.keep
        keptcalls.kept, keptcalls.keep = {}, lambda *_: None
        try:
            call()
        finally:
            keptcalls.kept, keptcalls.keep = kept, keep

    return whole


def pieces(q_len: int, k_len: int, device: str) -> dict[str, Call]:
    """Of a kept forward in one launch, and of the same call by Triton's own way."""
    from online_softmax.triton import attention_launch

    q, k, v = tokens(q_len, k_len, device)
    for _ in range(3):
        attention(q, k, v, causal=True)
    given = (q, k, v, *[None] * 5)
    o = check_options("attention", *OPTIONS)
    known = keptcalls.find(attentionkernels.FORWARD, (o, False, ""), given)
    if known is None:
        raise SystemExit("nothing is kept here: this Triton's launcher is not known")
    call, addresses, _ = known
    starts, fresh, _, _, _, index, _, _, raw_stream = call
    made = [torch.empty(shape, dtype=t, device=device) for shape, _, t, _ in fresh]
    every = [*addresses, *(t.data_ptr() for t in made)]
    stream = raw_stream(index)
    inputs = attention_launch.Inputs(*given)
    planned = attention_launch.forward(inputs, o, arch_of(q), False).launches[0]
    other = (Options(*o[:2], 0.5, *o[3:]), False, "")
    return {
        "  options checked": lambda: check_options("attention", *OPTIONS),
        "  name made and looked up": lambda: keptcalls.find("attention", other, given),
        "  route, options, name": lambda: attention_again(
            given, (True, 0.5, *OPTIONS[2:]), (0, 0), False, None
        ),
        "  allocation and launch": lambda: keptcalls.start(known),
        "    launch": lambda: starts[0](stream, every),
        "by Triton's own way: planning, allocation": lambda: attention_launch.forward(
            inputs, o, arch_of(q), False
        ),
        "by Triton's own way: launch": planned.start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stub", action="store_true", help="without a GPU")
    parser.add_argument("--q-len", type=int, default=64)
    parser.add_argument("--k-len", type=int, default=64)
    parser.add_argument("--keys", type=int, default=4096, help="of a decode")
    given = parser.parse_args()
    stack = contextlib.ExitStack()
    device, synchronize = "cuda", torch.cuda.synchronize
    if given.stub:
        from online_softmax.lab import tritonstub

        device, synchronize = "cpu", lambda: None
        stack.enter_context(tritonstub.stubbed()).is_noting = False
    sizes = (given.q_len, given.k_len, given.keys, device)
    with stack:
        rival = {} if given.stub else torchs(*sizes)
        print("| call, us of the host | ours, as one before | ours, the whole way | torch |")
        print("|---|---|---|---|")
        for name, call in ours(*sizes).items():
            for _ in range(3):
                call()
            each = [call, unkept(call), *([rival[name]] if name in rival else [])]
            cells = [f"{least_us(one, synchronize):.1f}" for one in each]
            print("| " + " | ".join([name, *cells, *["-"] * (3 - len(cells))]) + " |")
        print("\n| of a forward as one before | us |\n|---|---|")
        for name, call in pieces(given.q_len, given.k_len, device).items():
            print(f"| {name} | {least_us(call, synchronize):.2f} |")


if __name__ == "__main__":
    main()
