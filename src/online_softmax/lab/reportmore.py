"""What a report shows beside ladder and cells: machine, accuracy, memory, the host's cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from online_softmax.lab import accuracy, goals, lineartable, marks
from online_softmax.lab.benchfile import Part, Row
from online_softmax.lab.reportread import of_kind
from online_softmax.lab.reportsheet import Sheet, Value
from online_softmax.lab.results import Run

Line = dict[str, Any]


def _latest(lines: Iterable[Line], *keys: str) -> list[Line]:
    """Each once by these keys, as it was measured last."""
    return list({tuple(line.get(key) for key in keys): line for line in lines}.values())


# ---- machine


def machine_sheet(parts: Sequence[Part], runs: Sequence[Run]) -> Sheet:
    """The facts of every run, a line for those that agree in all but the time of day."""
    headers: list[Any] = [each.header for each in parts]
    headers += [each.header for each in runs]
    lines: dict[tuple[Value, ...], int] = {}
    for h in headers:
        v, m = h.versions, h.machine
        peak = marks.peak_gbs(h.device, runs)
        line = (device(h), m.get("multiprocessors"), m.get("l2_bytes", 0) / 2**20 or None, peak,
                m.get("driver_version"), v.get("nvrtc"), v.get("torch"), v.get("triton"),
                v.get("commit"), v.get("sources"), h.date[:10], h.clock)  # fmt: skip
        lines[line] = lines.get(line, 0) + 1
    columns = (("device", "text"), ("multiprocessors", "count"), ("L2 MiB", "number"),
               ("datasheet GB/s", "count"), ("driver", "text"), ("NVRTC", "text"),
               ("torch", "text"), ("Triton", "text"), ("commit", "code"), ("sources", "code"),
               ("date", "text"), ("clock", "text"), ("runs", "count"))  # fmt: skip
    rows = tuple((*line, count) for line, count in lines.items())
    return Sheet("Machines and versions", columns, rows)


def device(header: Any) -> str:
    """What ran, for people: a CPU is told by its name."""
    if header.device != "cpu":
        return str(header.device)
    return f"{header.machine.get('cpu', 'unknown')}, a CPU"


# ---- accuracy


def accuracy_sheet(parts: Sequence[Part], rows: Sequence[Row]) -> Sheet:
    """Errors against float64, ours beside torch's; of the cells where no run was kept of them."""
    keys = ("op", "dtype", "values", "rows", "cols", "device")
    lines: list[tuple[Value, ...]] = []
    for line in _latest(of_kind(parts, "accuracy"), *keys):
        ours, torchs = line["ours"], line["torch"]
        said = "yes" if accuracy.is_exact(line) else "no"
        said = said if ours["ok"] else f"WRONG: {ours['why']}"
        lines.append((line["op"], line["dtype"], line["values"], line["rows"], line["cols"],
                      ours["max"], torchs["max"], ours["mean"], torchs["mean"], said))  # fmt: skip
    if not lines:
        for row in rows:
            mine, other, right = row.entry("ours"), row.entry("torch"), goals.is_as_exact(row)
            if row.cell.is_main and mine and other and right is not None:
                lines.append((row.op, row.dtype, row.values, row.rows, row.cols, mine.share_max,
                              other.share_max, mine.share_mean, other.share_mean,
                              "yes" if right else "no"))  # fmt: skip
    columns = (("operation", "code"), ("type", "text"), ("input", "text"), ("rows", "count"),
               ("columns", "count"), ("largest error", "error"), ("torch's", "error"),
               ("mean error", "error"), ("torch's mean", "error"),
               ("at most torch's + 2⁻²³", "text"))  # fmt: skip
    note = "An error is a share of its row's size: of softmax, of the row's largest probability."
    return Sheet("Errors against float64, beside torch's", columns, tuple(lines), note)


# ---- memory


def memory_sheet(parts: Sequence[Part]) -> Sheet:
    """linear_cross_entropy: time, bytes beyond inputs and gradients, errors; refusals too."""
    keys = ("tokens", "features", "classes", "dtype", "device")
    lines: list[tuple[Value, ...]] = []
    for line in _latest(of_kind(parts, "linear"), *keys):
        size = f"{line['tokens']:,} x {line['features']:,} x {line['classes']:,} {line['dtype']}"
        us = {each["name"]: each.get("median_us") for each in line["entries"]}
        for each in line["entries"]:
            mine = us[each["name"]]
            ratios = [_over(mine, us.get(name)) for name in lineartable.PRODUCTS]
            errors = [each.get(name) for name in lineartable.ERRORS]
            lines.append((size, each["name"], mine / 1000 if mine else None,
                          each.get("memory_bytes"), *ratios, *errors, each["why"]))  # fmt: skip
    columns = (("tokens x features x classes", "text"), ("contender", "text"), ("ms", "ms"),
               ("memory GB", "gigabytes"), ("of three products", "times"),
               ("of four", "times"), ("error of the loss", "error"),
               ("of the input's gradient", "error"), ("of the weight's", "error"),
               ("note", "text"))  # fmt: skip
    note = (
        "Forward and backward. Memory is the most that was allocated at once beyond inputs and "
        "gradients. The products are matrix products alone."
    )
    return Sheet("linear_cross_entropy", columns, tuple(lines), note)


def _over(us: float | None, products_us: float | None) -> float | None:
    return us / products_us if us and products_us else None


def attention_memory_sheet(parts: Sequence[Part]) -> Sheet:
    """Attention of one head over a long row of keys: bytes at the most, forward and with its
    gradients; and what the whole matrix of scores would take."""
    keys = ("contender", "tokens", "head_dim", "dtype")
    lines: list[tuple[Value, ...]] = []
    for line in _latest(of_kind(parts, "attention_memory"), *keys):
        size = f"{line['dtype']}, {line['tokens']:,} queries and keys, head_dim {line['head_dim']}"
        names = ("forward_bytes", "with_backward_bytes", "inputs_bytes")
        megabytes = (line[name] / 1e6 for name in names)
        lines.append((size, line["contender"], *megabytes, line["matrix_bytes_computed"]))
    columns = (("of", "text"), ("contender", "text"), ("forward MB", "number"),
               ("with gradients MB", "number"), ("MB of the inputs", "number"),
               ("all scores GB, computed", "gigabytes"))  # fmt: skip
    scores = max((line["matrix_bytes_computed"] for line in of_kind(parts, "attention_memory")),
                 default=0)  # fmt: skip
    note = (
        "One head. The most that was allocated at once beyond the inputs, which are q, k and v; "
        "what a call returns is in it. The matrix of all scores, which none of them has, would "
        f"be {scores / 1e9:.1f} GB in float32."
    )
    return Sheet("Attention of one long head, beyond its inputs", columns, tuple(lines), note)


# ---- host and fusion


def host_sheet(parts: Sequence[Part]) -> Sheet:
    """Microseconds of the host for an eager call, the last run's."""
    found = of_kind(parts, "host")[-1:]
    rows = [
        (each["name"], "recorded" if each["recorded"] else "none", each.get("median_us"),
         each.get("p20_us"), each.get("p80_us"), each.get("why", ""))
        for line in found
        for each in line["calls"]
    ]  # fmt: skip
    columns = (("call", "text"), ("gradient", "text"), ("µs", "us"), ("p20", "us"), ("p80", "us"),
               ("note", "text"))  # fmt: skip
    sizes = [f"{x['op']} {x['rows']:,} x {x['cols']:,} {x['dtype']}" for x in found]
    return Sheet(f"Host cost of an eager call, {''.join(sizes)}", columns, tuple(rows))
