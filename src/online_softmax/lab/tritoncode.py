"""The machine code of Triton's kernels, read in a process of its own, without a GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from online_softmax.lab import results
from online_softmax.lab.profilefile import Code
from online_softmax.triton import TRITON_TYPE, WARP, Build, ask_all, source_of
from online_softmax.triton import answer as answer_by


def codes(builds: Sequence[Build]) -> list[Code]:
    """What stands in the code of each build; `missing` says why where there is none."""
    return list(_codes(tuple(builds)))


@functools.lru_cache(maxsize=64)
def _codes(builds: tuple[Build, ...]) -> tuple[Code, ...]:
    questions = [{**asdict(build), "dtype": TRITON_TYPE[build.dtype]} for build in builds]
    answers = ask_all(__name__, questions, [f"{b.kernel} for {b.arch}" for b in builds])
    return tuple(
        Code(missing=each) if isinstance(each, str) else results.record(Code, each)
        for each in answers
    )


# ---- in that process


def answer() -> None:
    """For `ask_all` alone."""
    answer_by(_read)


def _read(
    kernel: str, dtype: str, arch: str, block: int, num_warps: int, emits: str, is_whole: bool
) -> dict[str, Any] | str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompilationError
    from triton.errors import TritonError

    from online_softmax.lab import sass
    from online_softmax.triton import rows

    source = source_of(kernel, dtype, block, emits, is_whole)
    target = GPUTarget("cuda", int(re.sub(r"\D", "", arch)), WARP)
    options = {"num_warps": num_warps, **rows.OPTIONS}
    try:
        made: Any = triton.compile(source, target=target, options=options)
    except (CompilationError, TritonError, RuntimeError, ValueError, AssertionError) as error:
        return f"Triton {triton.__version__} does not build {kernel} for {arch}: {error}"[:300]
    return asdict(sass.code(made.asm["cubin"]))
