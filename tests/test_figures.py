"""What pages say in words of what is stored, of what is public, and of what a command does."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

from online_softmax import nn
from online_softmax.lab import benchfile, cpuclock, goals, grid, report
from online_softmax.lab.benchfile import Row
from online_softmax.lab.fusedsizes import parsed

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/h200/README.md"
SAID = {  # operations that `bench` has, and how a page names them
    "logsumexp_backward": "logsumexp's gradient",
    "softmax_outer": "anything along a dim that is not the last",
    "log_softmax_outer": "anything along a dim that is not the last",
    "logsumexp_outer": "anything along a dim that is not the last",
    "softmax_fp8": "softmax of float8",
    "token_stats_both": "token_stats with its gradient",
    "attention_varlen": "`attention_varlen`",
}
ASKED = ("compile", "quack", "liger")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@functools.cache
def rows(name: str = "bench-*") -> list[Row]:
    return benchfile.latest(benchfile.read(sorted(report.RESULTS.glob(f"{name}.jsonl"))))


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/limits.md", RESULTS])
def test_what_bench_times_and_nobody_stored_is_named(page: str):
    """On the line that says what was not measured; and nothing else is."""
    others = [other for part in report.stored_bench() for other in part.others]
    stored = {row.op for row in rows()} | {f"{each['kind']}_cross_entropy" for each in others}
    missing = {SAID[op] for op in grid.EVERY_OP if op not in stored}
    begin = "Not measured**" if page == "docs/performance.md" else "Of what `bench` times"
    (line,) = [line for line in text_of(page).splitlines() if begin in line]
    said = re.split(r"[:;.]", line.partition(begin)[2])
    assert {words for words in SAID.values() if any(words in each for each in said)} == missing


def test_the_number_of_stored_cells():
    beside = [
        sum(all(row.entry(name) for name in ASKED) for row in rows(f"bench-{kind}"))
        for kind in ("rows", "losses")
    ]
    counts = [len(rows("bench-rows")), len(rows("bench-losses"))]
    said = (
        f"in {counts[0]:,} cells beside torch, cross-entropy and token_stats in {counts[1]}, "
        f"{sum(beside)} of them all beside"
    )
    assert said in text_of("CHANGELOG.md")
    assert f"{counts[0]:,} cells beside torch, {beside[0]} of them beside" in text_of(RESULTS)
    assert f"token_stats: {counts[1]} cells" in text_of(RESULTS)


def test_decodes_beside_cudnn():
    """Behind in so many cells by so much, the one that is further behind apart."""
    times = {
        (parsed(row.sizes)["batch"], row.cols): goals.times(
            row.entry("ours"), row.entry("torch, cudnn")
        )
        for row in rows()
        if row.op == "attention_decode"
    }
    percent = {cell: round(100 * (each - 1)) for cell, each in times.items()}
    ahead = [each for each in percent.values() if each > 0]
    behind = sorted((-each, cell) for cell, each in percent.items() if each < 0)
    most, (batch, keys) = behind.pop()
    words = {3: "three", 5: "five"}
    said = (
        f"ahead in {words[len(ahead)]}, by {min(ahead)} to {max(ahead)} %, behind in "
        f"{words[len(behind)]} by {behind[0][0]} to {behind[-1][0]} %, and in one, {batch} "
        f"sequences of {keys:,} keys, by {most} %"
    )
    assert said in text_of("docs/limits.md")
    chinese = (
        f"五格落后 {behind[0][0]} 到 {behind[-1][0]} %，另一格（{batch} 条序列、各 {keys:,} 个键）"
        f"落后 {most} %"
    )
    assert chinese in text_of("docs/limits.zh.md")


@pytest.mark.parametrize(("page", "heading"), [("README.md", "modules"), ("README.zh.md", "模块")])
def test_the_modules_are_those_of_nn(page: str, heading: str):
    public = {
        f"nn.{name}" for name, each in vars(nn).items()
        if isinstance(each, type) and issubclass(each, torch.nn.Module)
        and each.__module__ == nn.__name__ and not name.startswith("_")
    }  # fmt: skip
    (line,) = [x for x in text_of(page).splitlines() if x.startswith(f"| {heading} |")]
    assert sorted(re.findall(r"nn\.\w+", line)) == sorted(public)


def test_the_guide_says_how_long_bench_takes_on_a_cpu():
    cell, whole = cpuclock.MOST_S, cpuclock.SECONDS
    said = f"for up to {cell:g} seconds a cell, {whole:g} in all, and the least counts"
    assert said in text_of("docs/guide.md")
