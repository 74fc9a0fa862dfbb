"""Times that cannot be: of a launch nobody waited for, of a warm cache, past a limit. And a clock
that reads nothing but memory, so that a warm cache shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor

from bench_kit import HEADER, lines, make, right, setting
from online_softmax.lab import (
    benchfile,
    benchpage,
    benchtable,
    doubts,
    goals,
    repeats,
    report,
    verdicts,
)
from online_softmax.lab.bench import Timing
from online_softmax.lab.benchfile import Entry, Part, Row
from online_softmax.lab.benchoptions import HELP
from online_softmax.lab.doubts import Limits
from online_softmax.lab.fusedsizes import parsed
from online_softmax.lab.grid import Cell
from online_softmax.lab.rotation import Call, Rotation

BESIDE = "bench-attention-flash-attn"  # no table of the page has its cells
CELL = Cell("softmax", "float32", 256, 1024)  # 2 MiB: 1 in, 1 out
H200 = doubts.of_card("NVIDIA H200", 4800.0, "datasheet of the H200")
L2_BYTES = 2**22  # of the pretended card
MEMORY_GBS, L2_GBS = 4000.0, 12000.0


def timing(us: float) -> Timing:
    return Timing(us, us, us, (us,) * 3)


def cached(turns: bool) -> Callable[..., dict[str, Timing]]:
    """A clock on a card with an L2 of L2_BYTES, which keeps what was touched last. It calls one set
    after the other; or, with `turns` off, the first again and again."""

    def interleaved(
        sets: Rotation, calls: dict[str, Call], may_fail: Sequence[str]
    ) -> dict[str, Timing]:
        lying: dict[int, int] = {}  # tensor -> bytes, the oldest first

        def one_us(tensors: tuple[Tensor, ...]) -> float:
            us = 0.0
            for tensor in tensors:
                size, key = tensor.numel() * tensor.element_size(), id(tensor)
                us += size / (L2_GBS if key in lying else MEMORY_GBS) / 1e3
                lying.pop(key, None)
                lying[key] = size
                while sum(lying.values()) > L2_BYTES:
                    lying.pop(next(iter(lying)))
            return us

        found = {}
        for name, call in calls.items():
            times = []
            for turn in range(3 * len(sets.sets)):
                tensors = sets.sets[turn % len(sets.sets) if turns else 0]
                call(*tensors)
                times.append(one_us(tensors))
            found[name] = timing(sorted(times)[len(times) // 2])
        return found

    return interleaved


def measured(interleaved: Callable[..., dict[str, Timing]], limits: Limits = H200) -> Row:
    here = setting(l2_bytes=L2_BYTES, interleaved=interleaved, limits=limits)
    return repeats.measure(CELL, lines("softmax", theirs=right("softmax")), here)


def test_sets_in_rotation_are_read_from_memory():
    row = measured(cached(turns=True))
    assert row.sets * row.ideal_bytes >= 3 * L2_BYTES
    assert row.is_cold_l2
    assert row.entry("ours").gbs == pytest.approx(MEMORY_GBS)
    assert doubts.lines([row]) == []


def test_a_clock_that_leaves_the_cache_warm_is_seen():
    row = measured(cached(turns=False))
    assert row.entry("ours").gbs == pytest.approx(L2_GBS)
    assert "its input lay in the cache, or nothing waited for it" in row.entry("ours").doubt
    assert {name for _, name, _ in doubts.lines([row])} == {"ceiling", "ours", "theirs"}


def test_a_launch_that_nobody_waited_for_is_seen():
    """1 GiB in the time of a launch; and it grows with the bytes, or it is none."""
    found = []
    for rows in (2**8, 2**18):
        row = Row("softmax", "float32", rows, 1024, "normal", 8 * 1024 * rows, is_cold_l2=True)
        us = 5.0
        entry = Entry("ours", "ours", True, median_us=us, gbs=row.ideal_bytes / us / 1e3)
        found.append(doubts.marked(replace(row, entries=(entry,)), H200).entry("ours").doubt)
    assert found[0] == ""
    assert found[1].startswith("429,497 GB/s are 8948% of the datasheet of the H200")


@pytest.mark.parametrize(("parts", "why"), [(2, doubts.WARM), (4, doubts.PARTS_READ)])
def test_a_read_of_parts_is_counted_with_a_write_that_it_leaves_out(parts: int, why: str):
    """So it passes the datasheet where an addition, which writes, would have to be doubted."""
    row = Row("merge", "bfloat16", 1024, 128, "normal", 2**28, is_cold_l2=True,
              sizes=f"parts={parts}")  # fmt: skip
    entries = [Entry(name, name, True, median_us=50.0, gbs=5369.0) for name in ("ceiling", "ours")]
    ceiling, ours = doubts.marked(replace(row, entries=tuple(entries)), H200).entries
    assert ceiling.doubt.endswith(f"of the datasheet of the H200: {why}")
    assert ours.doubt.endswith(doubts.WARM)


def row_of(cold: bool = True, **us: float) -> Row:
    row = Row("softmax", "bfloat16", 4096, 4096, "normal", 2**26, is_cold_l2=cold)
    entries = []
    for name, each in us.items():
        kind = "rival" if name == "torch" else name
        gbs = row.ideal_bytes / each / 1e3 if each else None
        entries.append(Entry(name, kind, True, clock="graph", median_us=each, gbs=gbs))
    return replace(row, entries=tuple(entries))


def test_the_ceiling_is_a_limit_too():
    """Of a card whose datasheet nobody knows: what beats the copy beside it did not move as much.
    A little is noise."""
    limits = Limits(ceiling_times=doubts.CEILING_TIMES)
    row = doubts.marked(row_of(ceiling=20.0, ours=19.5, torch=18.0), limits)
    assert [bool(entry.doubt) for entry in row.entries] == [False, False, True]
    assert row.entry("torch").doubt == (
        "it takes 0.90 times what the ceiling takes beside it, which it cannot"
    )


def test_a_warm_cache_that_was_said_may_be_faster_than_memory():
    fast = row_of(cold=False, ceiling=5.0, ours=5.0)  # 13,422 GB/s
    assert doubts.lines([doubts.marked(fast, H200)]) == []
    row = doubts.marked(row_of(cold=False, ceiling=1.0, ours=1.0), H200)
    assert "no L2 is so fast" in row.entry("ours").doubt


def test_more_than_the_tensor_cores_can_is_seen():
    row = Row("attention", "bfloat16", 2**18, 2**14, "normal", 2**28, is_cold_l2=True, flops=2**41)
    entry = Entry("ours", "ours", True, median_us=2000.0, gbs=134.0, tflops=2**41 / 2000 / 1e6)
    row = doubts.marked(replace(row, entries=(entry,)), H200)
    assert row.entry("ours").doubt.startswith("1,100 TFLOP/s are 111% of the datasheet's 989.5")
    assert doubts.of_card("NVIDIA A100-SXM4-80GB", None, "").tflops["float16"] == 312.0
    assert doubts.of_card("NVIDIA X", None, "").tflops == {}
    ceiling = Entry("ceiling", "ceiling", median_us=9000.0)  # of products of another shape
    beside = replace(row, entries=(ceiling, replace(entry, median_us=2500.0, tflops=880.0)))
    assert doubts.lines([doubts.marked(beside, H200)]) == []


def test_a_time_of_zero_is_no_time():
    row = doubts.marked(row_of(ceiling=20.0, ours=0.0), H200)
    assert row.entry("ours").doubt == "its time is not above 0: nothing waited for it"


def test_what_is_doubted_is_marked_and_counts_nowhere():
    row = doubts.marked(row_of(ceiling=20.0, ours=25.0, torch=10.0), H200)
    assert row.entry("torch").doubt
    assert goals.of_ceiling(row) == pytest.approx(0.8)
    assert benchtable.time(row.entry("torch")) == "10.0!"
    assert benchtable.beside(row, "torch") == "—!"
    assert goals.slower([row]) == []
    assert verdicts.slower_table([row]).rows == ()
    console = Console(file=StringIO(), width=200)
    benchpage.render([Part(HEADER, (row,))], console)
    shown = console.file.getvalue()
    assert "Times to doubt" in shown
    assert "!: not to be believed, and counted nowhere." in shown


def test_nothing_to_doubt_is_no_table():
    row = repeats.measure(CELL, make(CELL), setting())
    assert benchpage.sections([Part(HEADER, (row,))])["doubts"] == []


def test_stored_times_have_nothing_to_doubt():
    """Which is what the limits were set by. Of merges two ceilings have: a read of more than two
    parts, whose speed is counted with the write."""
    rows = stored_rows()
    assert len(rows) > 1000
    found = [line for line in doubts.lines(rows) if line[1] != "the cell"]
    assert {(row.op, row.sizes, name) for row, name, _ in found} == {
        ("merge", "parts=4", "ceiling"), ("merge", "parts=16", "ceiling")
    }  # fmt: skip
    assert "two ceilings have it, those of merges of 4 and 16 parts" in page()


def test_nothing_stored_passed_the_ceiling_by_more_than_the_comment_says():
    shares = [
        row.entry("ceiling").median_us / entry.median_us
        for row in stored_rows()
        for entry in row.entries
        if not row.flops and entry.median_us and entry.clock == row.entry("ceiling").clock
    ]
    told = re.search(r"nothing passed ([\d.]+) times", Path(doubts.__file__).read_text())
    assert told
    assert float(told[1]) - 0.001 < max(shares) <= float(told[1]) < doubts.CEILING_TIMES


def test_stored_cells_that_were_slowed_are_few_and_say_so():
    """The page of performance tells the reader which."""
    shown = [row for row in benchfile.latest(report.stored_bench()) if row.is_throttled]
    others = [row for row in stored_rows(f"{BESIDE}.jsonl") if row.is_throttled]
    for row in [*shown, *others]:
        assert set(row.clocks["reasons"]) == {"power limit"}
    told = re.search(r"(\w+) stored cells ran at the power limit: (.*)", page())
    assert told
    assert {"three": 3, "four": 4, "five": 5}[told[1]] == len(shown)
    for row in shown:
        sizes = parsed(row.sizes)
        if row.op == "merge":
            assert re.search(rf"merges of [\w ]*\b{sizes['parts']} ", told[2])
        elif row.op == "attention_decode":
            assert f"{sizes['batch']} sequences of {row.cols:,} keys" in told[2]
        else:
            assert f"{row.op} of {row.rows:,} x {row.cols:,} in {row.dtype}" in told[2]
    counted = re.search(r"so did (\w+) decodes of the run beside flash-attn", told[2])
    assert counted
    assert {"two": 2, "three": 3, "four": 4}[counted[1]] == len(others)
    assert {row.op for row in others} == {"attention_decode"}


@pytest.mark.parametrize("name", ["attention", "losses"])
def test_a_stored_file_shows_what_is_said_of_its_doubts_now(name: str):
    """What a line says of itself, words of the day that it was stored, gives way to what is known
    now; and no sentence explains a mark that no table has."""
    parts = benchfile.read([report.RESULTS / f"bench-{name}.jsonl"])
    (doubted,) = benchpage.sections(parts)["doubts"]
    lines = [line for line in doubted.rows if line[1] != "the cell"]
    assert bool(lines) == (name == "attention")
    for _, _, why, *_ in lines:
        assert why.endswith(doubts.PARTS_READ)
    assert any(row.is_throttled for part in parts for row in part.rows)
    assert any(text.startswith("!:") for text in benchpage.marks(parts)) == bool(lines)


def test_help_says_which_cells_count():
    """A throttled cell has no mark of its own, and its times are in every mean."""
    slow = replace(row_of(ceiling=20.0, ours=25.0), clocks={"reasons": ["power limit"]})
    assert slow.is_throttled
    assert benchtable.mark(slow.entry("ours")) == ""
    assert goals.of_ceiling(slow) == pytest.approx(0.8)
    said = " ".join(HELP.split())
    assert "! says that it beats its limit: it is counted nowhere." in said
    assert "A cell whose clock was throttled is listed, and counts." in said


def stored_rows(names: str = "bench-*.jsonl") -> list[Row]:
    parts = benchfile.read(sorted(report.RESULTS.glob(names)))
    return [doubts.marked(row, H200) for part in parts for row in part.rows]


def page() -> str:
    return (report.ROOT / "docs/performance.md").read_text().lower()
