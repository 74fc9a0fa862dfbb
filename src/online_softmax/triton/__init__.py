"""The kernels in Triton, and what they take of a GPU, without one.

Importing this package does not import Triton; its modules do. `compile` asks a process of its own,
since a Triton that interprets cannot compile, and since the switch that shows the assembler's log
holds for a whole process.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from online_softmax import jit

TRITON_TYPE = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
ALIGNED = 16  # bytes of an address, elements of a stride or a length: Triton makes 16-byte loads
WARP = 32
# Without the current folder, where a file or folder may be named triton.
PROGRAM = """
import sys
sys.path = [folder for folder in sys.path if folder]
from {module} import answer
answer()
"""


@dataclass(frozen=True)
class Build:
    """A kernel of rows.py as Triton builds it for a matrix that starts on 16 bytes."""

    kernel: str  # "online" or "two_pass"
    dtype: torch.dtype
    arch: str  # "sm_90a"
    block: int = 4096  # columns a step
    num_warps: int = 8  # warps a row
    emits: str = "softmax"  # or "log_softmax"
    is_whole: bool = True  # columns and row strides are multiples of 16: Triton builds apart for it


def compile(  # noqa: A001
    kernel: str,
    dtype: torch.dtype,
    arch: str,
    block: int = 4096,
    num_warps: int = 8,
    emits: str = "softmax",
    is_whole: bool = True,
) -> jit.Resources:
    """What a kernel takes of a multiprocessor, as the assembler reports it; needs no GPU.

    Shared memory is what Triton asks for at launch. Raises jit.Unavailable, with a sentence, if
    this Triton does not build for the architecture. `compile_all` does many in about one's time.
    """
    answer = compile_all([Build(kernel, dtype, arch, block, num_warps, emits, is_whole)])[0]
    if isinstance(answer, str):
        raise jit.Unavailable(answer)
    return answer


def compile_all(builds: Sequence[Build]) -> list[jit.Resources | str]:
    """`compile` for each of several builds; a sentence where there are no figures to give."""
    return list(_answers(tuple(builds)))


@functools.lru_cache(maxsize=64)
def _answers(builds: tuple[Build, ...]) -> tuple[jit.Resources | str, ...]:
    questions = [{**asdict(build), "dtype": TRITON_TYPE[build.dtype]} for build in builds]
    answers = ask_all(__name__, questions, [f"{b.kernel} for {b.arch}" for b in builds])
    return tuple(a if isinstance(a, str) else jit.Resources(**a) for a in answers)


def ask_all(
    module: str,
    questions: list[dict[str, Any]],
    names: Sequence[str],
    seconds: float | None = None,
) -> list[Any]:
    """What `answer` of a module makes of each question in a process of its own; a sentence, with
    the question's name, where Triton dies of it. `seconds`: a process that takes longer is ended,
    as if it had died."""
    answers: list[Any] = []
    while len(answers) < len(questions):
        given, last_words = _ask(module, questions[len(answers) :], seconds)
        if given is None:
            return [f"Triton does not start here: {last_words}"] * len(questions)
        answers += given
        if last_words and len(answers) < len(questions):  # LLVM aborts on what it cannot translate
            answers.append(f"Triton died of {names[len(answers)]}: {last_words}")
    return answers


def _ask(
    module: str, questions: list[dict[str, Any]], seconds: float | None
) -> tuple[list[Any] | None, str]:
    """Answers from a process of its own, None if it did not start; its last words if it died."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(module=module)],
            input=json.dumps(questions),
            capture_output=True,
            text=True,
            env=environment,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as slow:
        said = (slow.stdout or b"").decode()  # bytes, whatever `text` says
        lines, last_words = said[: said.rfind("\n") + 1], f"still at work after {seconds:g} s"
    else:
        lines, last_words = done.stdout, ""
        if done.returncode:
            last_words = [f"exit status {done.returncode}", *done.stderr.strip().splitlines()][-1]
    started, *given = [json.loads(line) for line in lines.splitlines()] or [None]
    return (given if started else None), last_words


# ---- in that process


def answer(figures: Callable[..., Any] | None = None) -> None:
    """Questions from standard input; answers to standard output, a line each. For `_ask` alone."""
    from online_softmax.triton import rows  # noqa: F401

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not come between
    print(json.dumps("started"), file=out, flush=True)
    for question in json.load(sys.stdin):
        print(json.dumps((figures or _figures)(**question)), file=out, flush=True)


def _figures(
    kernel: str, dtype: str, arch: str, block: int, num_warps: int, emits: str, is_whole: bool
) -> dict[str, int] | str:
    from online_softmax.triton import rows

    source = source_of(kernel, dtype, block, emits, is_whole)
    return built(source, kernel, arch, {"num_warps": num_warps, **rows.OPTIONS})


def source_of(kernel: str, dtype: str, block: int, emits: str, is_whole: bool) -> Any:
    """A kernel of rows.py as Triton takes it to compile; for a process that does not interpret."""
    from triton.compiler import ASTSource

    from online_softmax.triton import rows

    function = rows.KERNELS[kernel]
    types = {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "EMIT": "constexpr", "LANES": "constexpr"}
    names = [parameter.name for parameter in function.params]
    signature = {name: types.get(name, "i64") for name in names}
    constants = {"EMIT": emits, "LANES": block // rows.UNROLL.value}
    aligned = names if is_whole else ["x_ptr", "y_ptr"]
    attributes = {
        (i,): [["tt.divisibility", ALIGNED]]
        for i, n in enumerate(names)
        if n in aligned and n not in constants
    }
    return ASTSource(function, signature, constexprs=constants, attrs=attributes)


def built(source: Any, kernel: str, arch: str, options: dict[str, Any]) -> dict[str, int] | str:
    """What a kernel takes, compiled from its source here; a sentence if it does not compile."""
    found = made(source, kernel, arch, options)
    return found if isinstance(found, str) else found[1]


def made(
    source: Any, kernel: str, arch: str, options: dict[str, Any]
) -> tuple[Any, dict[str, int]] | str:
    """The same, with Triton's compiled kernel."""
    import contextlib
    import io

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompilationError
    from triton.errors import TritonError

    triton.knobs.compilation.always_compile = True  # a cached kernel has no log
    triton.knobs.nvidia.dump_ptxas_log = True
    target = GPUTarget("cuda", int(re.sub(r"\D", "", arch)), WARP)
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            compiled: Any = triton.compile(source, target=target, options=options)
    except (TritonError, RuntimeError, ValueError, AssertionError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[-1 if isinstance(error, CompilationError) else 0]  # it quotes source first
        return f"Triton {triton.__version__} does not build {kernel} for {arch}: {reason}"
    text = log.getvalue()
    registers = re.search(r"Used (\d+) registers", text)
    local = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", text)
    if not registers or not local:
        return f"Triton {triton.__version__} built {kernel} for {arch}; its assembler said nothing"
    stack, stores, loads = map(int, local.groups())
    return compiled, {
        "registers": int(registers[1]),
        "stack_bytes": stack,
        "spill_store_bytes": stores,
        "spill_load_bytes": loads,
        "shared_bytes": compiled.metadata.shared,
    }
