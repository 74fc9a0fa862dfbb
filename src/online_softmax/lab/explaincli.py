"""The command `explain`: the planner's choice for an operation, and its reasons."""

from __future__ import annotations

import typer

from online_softmax.lab import fitting, options


def explain(
    context: typer.Context,
    rows: options.ExplainedRows,
    cols: options.ExplainedCols,
    dtype: options.ExplainedType = "float32",
    arch: options.ExplainedArch = None,
    op: options.ExplainedOp = "softmax",
    inner: options.ExplainedInner = None,
    hidden: options.ExplainedHidden = None,
    batch: options.ExplainedBatch = None,
    heads: options.ExplainedHeads = None,
    kv_heads: options.ExplainedKvHeads = None,
    head_dim: options.ExplainedHeadDim = None,
    parts: options.ExplainedParts = None,
) -> None:
    """Print the planner's choice and its reasons."""
    import torch

    from online_softmax import explained, explanation, jit, plan
    from online_softmax.lab import arguments
    from online_softmax.lab.inputs import BadInput

    size = arguments.sizes([rows, cols, *context.args])
    kind, arches = arguments.dtype_name(dtype), arguments.arches(arch)
    if op not in explanation.OPERATIONS:
        raise BadInput(f"--op {op}: give one of {', '.join(explanation.OPERATIONS)}")
    given = {"inner": inner, "hidden": hidden, "batch": batch, "heads": heads}
    sizes = {}
    for name, text in (
        given | {"kv_heads": kv_heads, "head_dim": head_dim, "parts": parts}
    ).items():
        option = f"--{name.replace('_', '-')}"
        if name not in explained.SIZES.get(op, {}):
            of = next(other for other, names in explained.SIZES.items() if name in names)
            arguments.only_with(f"--op {of}", {option: text})
        number = arguments.whole(option, text)
        if number is not None:
            sizes[name] = number
    is_gpu = torch.cuda.is_available()
    why = "as asked" if arches else "the GPU here" if is_gpu else "since no GPU is here"
    if not arches:
        arches = [jit.device_arch() if is_gpu else plan.DEFAULT_ARCH]
    try:
        said = [explanation.explain(*size, kind, each, op=op, **sizes) for each in arches]
    except ValueError as error:  # an architecture that came out after the planner's facts; heads
        raise BadInput(str(error).removeprefix("explain(): ")) from None
    if len(said) > 1:
        said = [f"on {each}\n{text}" for each, text in zip(arches, said, strict=True)]
    elif explanation.asks_arch(op, *size, kind):
        said = [f"{said[0]}\n  {_arch(arches[0], why)}"]
    fitting.say("\n\n".join(said))


def _arch(name: str, why: str) -> str:
    """Which architecture was spoken of, and how to ask about another."""
    from online_softmax import plan

    known = plan.ARCHES.get(name)
    card = f" ({known.card})" if known else ""
    others = ", ".join(each for each in plan.ARCHES if each != name)
    return f"this is of {name}{card}, {why}; --arch asks about another: {others}"
