"""Inputs that softmax kernels get wrong: shared by tests, benchmarks and the command line.

A case is values and a layout; judge.py lays it out in a dtype and compares results with float64.
A nasty input is one line: in KINDS if it is about values, in _layouts or VIEWS if it is about
memory. `source` names the public reports that a case restates, keys of REPORTS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from online_softmax.lab.judge import DTYPES, Case, View

INF, NAN = math.inf, math.nan
CPU_ELEMENTS = 2**16  # the largest case of size class "cpu": what host execution can afford

# The public reports that cases restate.
REPORTS = {
    "S01": "Dao-AILab/flash-attention#1930",
    "S02": "gabrieldemarmiesse/torch-mojo-backend PR#319",
    "S03": "KarhouTam/cuda-kernels#1",
    "S05": "tracel-ai/burn#4815",
    "S06": "NVIDIA/TransformerEngine#2734",
    "S07": "pytorch/pytorch#71550",
    "S09": "pytorch/pytorch PR#36485",
    "S10": "pytorch/pytorch#147284",
    "S11": "huggingface/candle#3727",
    "S12": "pytorch/pytorch#101039",
    "S13": "pytorch/pytorch#38839",
    "S14": "tinygrad/tinygrad PR#17822",
    "S15": "pytorch/pytorch#17256",
    "S16": "deepspeedai/DeepSpeed PR#1239",
    "S17": "pytorch/pytorch#3240",
    "S24": "pytorch/pytorch#52716",
    "S25": "microsoft/onnxruntime#32299",
    "S26": "unslothai/unsloth#19",
    "S30": "flashinfer-ai/flashinfer#4267",
    "S51": "tiny-dnn/tiny-dnn#410",
    "S53": "triton-lang/triton PR#7349",
    "S61": "thinking-machines-lab/batch_invariant_ops#13",
    "S63": "pytorch/pytorch#3246",
    "S64": "pytorch/pytorch#75923",
    "S66": "pytorch/pytorch PR#62897",
    "S67": "intel/torch-xpu-ops#4772",
    "S75": "pytorch/pytorch PR#154634",
    "S76": "ROCm/rocm-libraries#11387",
}

# ---- values: x is random (rows, cols), r and c are row and column numbers, n is cols

Kind = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _odd(r: Tensor, spoiled: Tensor | float, x: Tensor) -> Tensor:
    """Spoil every second row, so that a spoiled row has a normal neighbour."""
    return torch.where(r % 2 == 1, spoiled, x)


def _at(c: Tensor, col: Tensor | int, value: float, x: Tensor | float) -> Tensor:
    return torch.where(c == col, value, x)


KINDS: dict[str, tuple[str, Kind]] = {
    "random": ("", lambda x, r, c, n: x),
    "shifted": ("", lambda x, r, c, n: x + 1e4),
    "shifted_down": ("", lambda x, r, c, n: x - 1e4),
    "from_200_to_300": ("S66", lambda x, r, c, n: 250 + 50 * x.tanh()),
    "from_minus_300_to_minus_200": ("S66", lambda x, r, c, n: -250 + 50 * x.tanh()),
    "outlier": ("S03", lambda x, r, c, n: _at(c, n // 2 + r, 60.0, x)),
    "ramp": ("S03", lambda x, r, c, n: 0.05 * c + 0 * x),
    "ramp_down": ("S03", lambda x, r, c, n: 0.05 * (n - c) + 0 * x),
    "linspace": ("S61", lambda x, r, c, n: 200 * c / max(n - 1, 1) - 100 + 0 * x),
    "ascending": ("", lambda x, r, c, n: x.sort(-1).values),
    "descending": ("", lambda x, r, c, n: x.sort(-1, descending=True).values),
    "zeros": ("S10 S11", lambda x, r, c, n: torch.zeros_like(x)),
    "signed_zeros": ("", lambda x, r, c, n: torch.zeros_like(x).copysign(x)),
    # Every term the same: a running float sum rounds the same way each time and loses digits.
    "one_then_equal": ("", lambda x, r, c, n: _at(c, 0, 0.0, -1.3 + 0 * x)),
    "equal": ("S11", lambda x, r, c, n: torch.full_like(x, 300.0)),
    "pattern_minus_1e7": (
        "S13",
        lambda x, r, c, n: (c % 4 == 1) * 1.0 - (c % 4 == 2) * 1.0 - 1e7 + 0 * x,
    ),
    "one_hot_scores": ("S12", lambda x, r, c, n: x * 3e6),
    "past_sentinels": ("S30", lambda x, r, c, n: -245000.0 - 10 * (c % 2) + 0 * x),
    "steps_of_95": ("S51", lambda x, r, c, n: -95.0 * ((c + r) % 3) + 0 * x),
    "plus_1e30": ("", lambda x, r, c, n: torch.full_like(x, 1e30)),
    "minus_1e30": ("S30", lambda x, r, c, n: torch.full_like(x, -1e30)),
    "both_1e30": ("", lambda x, r, c, n: x.sign() * 1e30),
    "largest_half": ("", lambda x, r, c, n: x.sign() * 65504),
    "largest_float": ("", lambda x, r, c, n: x.sign() * torch.finfo(torch.float32).max),
    "subnormal": ("", lambda x, r, c, n: x * 1e-40),
    "minus_inf_in_places": ("", lambda x, r, c, n: torch.where(x > 0.5, -INF, x)),
    "minus_inf_above_diagonal": ("", lambda x, r, c, n: torch.where(c > r, -INF, x)),
    "minus_inf_but_the_end": ("S01", lambda x, r, c, n: torch.where(c < n - 1 - r, -INF, x)),
    "minus_inf_but_one": ("S01", lambda x, r, c, n: _at(c, r * (n - 1) // 4, 10.0, -INF)),
    "minus_inf_rows": ("S14", lambda x, r, c, n: _odd(r, -INF, x)),
    "plus_inf": ("", lambda x, r, c, n: _odd(r, _at(c, n // 2, INF, x), x)),
    "plus_inf_among_minus_inf": ("", lambda x, r, c, n: _odd(r, _at(c, n - 1, INF, -INF), x)),
    "nan_first": ("S53", lambda x, r, c, n: _odd(r, _at(c, 0, NAN, x), x)),
    "nan_last": ("S53", lambda x, r, c, n: _odd(r, _at(c, n - 1, NAN, x), x)),
    "nan_then_plus_inf": ("S53", lambda x, r, c, n: _odd(r, _at(c, 0, NAN, INF), x)),
    "plus_inf_then_nan": ("S53", lambda x, r, c, n: _odd(r, _at(c, n - 1, NAN, INF), x)),
    "nan_among_minus_inf": ("S53", lambda x, r, c, n: _odd(r, _at(c, 0, NAN, -INF), x)),
}
# What also has to hold where a row is walked in many steps or shared by blocks.
LONG_KINDS = (
    "random",
    "ramp",
    "zeros",
    "minus_inf_but_the_end",
    "minus_inf_but_one",
    "minus_inf_rows",
    "plus_inf",
    "nan_first",
    "nan_last",
    "plus_inf_then_nan",
)


def _case(
    rows: int,
    cols: int,
    kind: str = "random",
    size: str = "cpu",
    source: str = "",
    phase: int = 0,
    gap: int = 0,
    period: int = 0,  # rows built if fewer than all; they repeat
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    checked: tuple[int, ...] = (),
) -> Case:
    reported, values = KINDS[kind]

    def build(generator: torch.Generator) -> Tensor:
        built = period or rows
        x = torch.randn(built, cols, generator=generator, dtype=torch.float64) * 2
        return values(
            x, torch.arange(built).unsqueeze(1), torch.arange(cols).unsqueeze(0), cols
        ).double()

    name = f"{kind}-{rows}x{cols}" + f"-phase{phase}" * (phase > 0) + f"-gap{gap}" * (gap > 0)
    return Case(name, rows, cols, build, phase, gap, size, source or reported, dtypes, checked)


def _as_given(source: str, x: Tensor) -> Case:
    """The very numbers of a report, or of the worked example."""
    name = f"{source or 'worked_example'}_as_given"
    return Case(name, x.shape[0], x.shape[1], lambda _: x, source=source)


# ---- shapes


def _near(values: Iterable[int], offsets: Iterable[int]) -> list[int]:
    return [value + offset for value in values for offset in offsets]


def _widths() -> Iterator[Case]:
    """S02, S10, S17, S67: where vectors, warps, blocks and powers of two end. Two rows each, so
    that the second of an odd width starts at another 16-byte phase."""
    narrow = {*range(1, 71), *_near(range(96, 1025, 32), (-1, 0, 1)), 1002, 1400, 1531}
    wide = {*_near((2**k for k in range(7, 15)), (-1, 0, 1, 2)), 3072, 5003, 12289}
    for cols in sorted(narrow | wide):
        yield _case(2, cols, source="S02 S10 S17 S67")
    # Thread limits, vocabularies, and a row longer than any shared memory (64 K floats).
    for cols in (32000, 32767, 32768, 32769, 32771, 50257, 65521, 65536):
        yield _case(1, cols, source="S26")
    for cols in sorted({*range(71, 1101)} - narrow - wide):
        yield _case(2, cols, size="gpu", source="S10")


def _heights() -> Iterator[Case]:
    """S15, S16, S17: no rows, no columns, one of each, more rows than a grid or a block takes."""
    for rows, cols in ((0, 2), (10, 0), (0, 0), (1, 1), (5, 1), (31, 3), (33, 33), (65, 64)):
        yield _case(rows, cols, source="S15 S17")
    for rows, cols in ((1030, 7), (4300, 3)):  # past v0's block, past v4's grid on 132 processors
        yield _case(rows, cols, source="S16")
    for rows, cols in ((65536, 64), (70000, 8), (4096, 4096), (2048, 40960)):
        yield _case(rows, cols, size="gpu", source="S16 S61", period=1021)


def _layouts() -> Iterator[Case]:
    """S09, S75, S76: row starts at every 16-byte phase, gaps between rows, NaN all around."""
    for cols in (5, 16, 33, 256, 1000, 1024, 1027):
        for phase in range(1, 8):
            yield _case(3, cols, phase=phase, gap=phase * 3, source="S09 S75")
    for cols, gap in ((8, 8), (33, 7), (1024, 8), (1024, 1), (1017, 0), (4096, 16), (8191, 2)):
        yield _case(3, cols, gap=gap, source="S75 S76")
    yield _case(2, 30443, phase=3, gap=157, source="S09")
    for phase, width in ((1, 30475), (6, 30554), (0, 30443), (3, 30597), (7, 131072)):
        yield _case(110, width, size="gpu", phase=phase, gap=30600 - width % 30600, source="S09")


def _values() -> Iterator[Case]:
    for kind in KINDS:
        yield _case(5, 33, kind)
        yield _case(5, 1030, kind)
        yield _case(7, 4099, kind, "gpu")
        yield _case(3, 131072, kind, "gpu")
    for kind in LONG_KINDS:
        yield _case(2, 9001, kind)
        yield _case(5, 1_048_577, kind, "gpu")
    yield _case(5, 64, "nan_then_plus_inf", phase=1, gap=2)
    yield _case(1, 40960, "linspace", source="S61")
    yield _case(1, 65536, "one_then_equal")
    yield _case(3, 4096, "zeros", source="S11")
    for source, given in (
        ("S13", [[-1e7, 1 - 1e7, -1 - 1e7, -1e7]]),
        ("S14", [[1, 2], [-INF, -INF], [0, 1]]),
        ("S30", [[-245000, -245010]]),
        ("S53", [[NAN, 1, 2]]),
        ("", [[1, 5, 3, 9, 2]]),
    ):
        yield _as_given(source, torch.tensor(given, dtype=torch.float64))
    yield Case("attention_scores", 120, 40, lambda _: sample().double().flatten(0, 2)[::16])


def _large() -> Iterator[Case]:
    """S24, S25, S26: whole vocabularies, and past 2^31 elements, rows or a row's offset."""
    for cols in (65537, 102400, 128256, 151936, 262144):
        yield _case(3, cols, size="gpu", source="S26")
    half = (torch.float16,)
    yield _case(2, 1000, size="gpu", source="S25", gap=2**31, dtypes=half)
    # A prime period, so that a row index that wraps at a power of two meets other values.
    for source, rows, cols, checked in (
        ("S25", 2_097_216, 1024, (0, 1, 2_097_140, 2_097_151, 2_097_152, 2_097_153, 2_097_215)),
        ("S24", 70_000_000, 2, (0, 1, 34_999_999, 69_999_998, 69_999_999)),
    ):
        yield _case(rows, cols, "random", "gpu", source, 0, 0, 1021, half, checked)


CASES: tuple[Case, ...] = (*_widths(), *_heights(), *_layouts(), *_values(), *_large())


def _all_dims(name: str, shape: tuple[int, ...], source: str) -> View:
    return View(name, shape, lambda t: t, tuple(range(-len(shape), len(shape))), source)


VIEWS: tuple[View, ...] = (
    View("scalar", (), lambda t: t, (0, -1)),
    View("vector", (33,), lambda t: t, (0, -1)),
    View("transposed", (4, 3), lambda t: t.t(), (0, 1), "S05"),
    View("transposed_wide", (257, 64), lambda t: t.t(), (0, 1), "S05"),
    View("swapped_batch", (4, 2, 8), lambda t: t.transpose(0, 1), (0, 1, 2), "S06"),
    View("padded_rows", (6, 40), lambda t: t[:, :33], (0, 1), "S76"),
    View("padded_batch", (2, 8, 2, 2), lambda t: t[:, :4], (0, 1, 2, 3), "S76"),
    View("every_second_column", (4, 66), lambda t: t[:, ::2], (0, 1), "S64"),
    View("every_second_row", (8, 33), lambda t: t[::2], (0, 1)),
    View("inner_slice", (11, 1027), lambda t: t[1:-1, 3:], (0, 1), "S09 S75"),
    View("expanded_rows", (1, 33), lambda t: t.expand(5, 33), (0, 1), "S07"),
    View("expanded_columns", (5, 1), lambda t: t.expand(5, 33), (0, 1), "S07"),
    View("negated_bit", (5, 33), torch._neg_view, (0, 1)),  # as imag of a conjugate
    View("many_inner", (1, 2, 65536, 1), lambda t: t, (1,), "S16"),
    View("middle", (4, 64, 33), lambda t: t, (1,), "S66"),
    _all_dims("three", (2, 3, 4), "S63"),
    _all_dims("five", (2, 1, 11, 7, 5), "S63"),
    _all_dims("no_rows", (0, 2), "S15"),
    _all_dims("no_columns", (10, 0), "S15"),
    _all_dims("nothing", (0, 0), "S15"),
    _all_dims("nothing_of_four", (4, 0, 5, 2), "S15"),
)


def sample() -> Tensor:
    """Real attention scores, (4, 12, 40, 40) float16, masked keys -inf: see data/README.md."""
    with (files("online_softmax.lab") / "data" / "minilm_attention_scores.npy").open("rb") as file:
        return torch.from_numpy(np.load(file))
