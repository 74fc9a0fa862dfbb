"""profile of whole operations by name: their calls, the kernels that they launch, the command."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

import online_softmax
from cli_kit import refusal, run
from online_softmax import attentionplan, catalogue, jit, plan
from online_softmax.lab import (
    ncu,
    profile,
    profilecalls,
    profiledriver,
    profilefile,
    profilepage,
    reportread,
)
from online_softmax.lab.inputs import BadInput
from online_softmax.plan import Problem
from profile_kit import H200, MARK, V3, asked, csv_of, stand_in

SMALL = Problem(64, 96, "float32")


def test_each_name_calls_its_public_function(monkeypatch: pytest.MonkeyPatch):
    """With sizes that follow from rows and columns, beside kernels on rows."""
    public = {"attention": "attention", "decode": "attention", "merge": "merge_outputs",
              "token_stats": "token_stats", "cross_entropy": "cross_entropy"}  # fmt: skip
    for name, function in public.items():
        seen = []
        right = getattr(online_softmax, function)
        monkeypatch.setattr(
            online_softmax, function,
            lambda *given, right=right, seen=seen, **o: (seen.append(given), right(*given, **o))[1],
        )  # fmt: skip
        made = profilecalls.call(name, SMALL, "cpu")()
        assert len(seen) == 1
        result = made if isinstance(made, torch.Tensor) else made[0]
        assert not bool(result.isnan().any())
        monkeypatch.undo()
    shapes = [tuple(t.shape) for t in profilecalls.tensors("decode", SMALL, "meta")]
    assert shapes == [(2, 32, 1, 128), *[(2, 8, 96, 128)] * 2]
    shapes = [tuple(t.shape) for t in profilecalls.tensors("attention", SMALL, "meta")]
    assert shapes == [(1, 16, 64, 128), *[(1, 16, 96, 128)] * 2]
    assert [len(t) for t in profilecalls.tensors("merge", SMALL, "meta")] == [4, 4]


def test_the_driver_has_kernels_and_operations_in_the_order_asked_for():
    calls = profiledriver.bound(["merge", "torch", "cross_entropy"], "softmax", SMALL, "cpu")
    merged, softmax, loss = (each() for each in calls)
    assert [t.shape for t in merged] == [(64, 96), (64,)]
    torch.testing.assert_close(softmax.sum(-1), torch.ones(64))
    assert loss.shape == ()


def test_the_launches_are_those_of_a_gpu():
    problem = Problem(4096, 4096, "bfloat16", arch="sm_90a")
    found = {n: [w.symbol for w in profilecalls.launches(n, problem)] for n in profilecalls.NAMES}
    kernels = {name: [symbol.partition("<")[0] for symbol in all_] for name, all_ in found.items()}
    assert kernels == {
        "attention": [],  # Triton's
        "decode": ["decode_parts", "decode_merge"],
        "merge": ["merge_forward"],
        "token_stats": ["token_stats_fold", "token_stats_merge"],
        "cross_entropy": ["cross_entropy_in_registers"],
    }
    assert profilecalls.launches("decode", replace(problem, dtype="float32")) == []
    long = profilecalls.launches("cross_entropy", Problem(4, 2**22, "float32"))
    assert [each.symbol.partition("<")[0] for each in long] == [
        "cross_entropy_fold", "cross_entropy_merge",
    ]  # fmt: skip


def test_the_static_report_has_registers_of_each(monkeypatch: pytest.MonkeyPatch):
    """What Triton builds is tested apart, which takes seconds: here it says what it is told."""
    if not catalogue.lacks("triton"):
        from online_softmax.triton import attention_builds

        taken = jit.Resources(168, 0, 0, 0, 2**16)
        monkeypatch.setattr(attention_builds, "compile_all", lambda builds: [{"forward": taken}])
    names = ("attention", "decode", "merge")
    found = profile.run(asked(*names, rows=64, cols=4096, dtype="bfloat16", op=", ".join(names)))
    for line in found.lines:
        assert line.reasons == ()
        (figures,) = line.figures
        if line.name == "attention" and catalogue.lacks("triton"):
            assert figures.missing
            continue
        assert figures.registers > 16
        assert 0 < figures.occupancy <= 1
        assert line.code
    page = run("profile", "merge", "decode", "--rows", "48")
    assert "merge, decode of 48 x 4,096 float32" in page
    assert "decode did not run: decode has 32 rows a sequence" in page
    (figures,), code = profilecalls.report("merge", SMALL, ["sm_999"])
    assert figures.missing == code.missing == "the planner has no facts about sm_999"


def test_of_several_kernels_the_worst_occupancy_counts(monkeypatch: pytest.MonkeyPatch):
    """Each by its own warps: of a decode in float32 the one that folds, and the one that merges."""
    if catalogue.lacks("triton"):
        pytest.skip("needs Triton")
    from online_softmax.triton import attention_builds, attention_launch

    names = {profilecalls.MERGES, "attention_forward"}
    assert hasattr(attention_launch.attention, profilecalls.MERGES)
    problem = Problem(32, 4096, "float32", arch="sm_90a")
    fold, merge = jit.Resources(32, 0, 0, 0, 0), jit.Resources(255, 0, 0, 0, 0)
    tiles = attentionplan.decode(4, 128, 4)
    arch = plan.ARCHES["sm_90a"]
    for by_name in (dict(zip(sorted(names), (fold, merge), strict=True)),
                    dict(zip(sorted(names), (merge, fold), strict=True))):  # fmt: skip
        monkeypatch.setattr(
            attention_builds, "compile_all", lambda builds, found=by_name: [dict(found)]
        )
        (figures,), _ = profilecalls.report("decode", problem, ["sm_90a"])
        warps = {profilecalls.MERGES: attentionplan.MERGE_WARPS}
        each = [jit.occupancy(taken, arch, 32 * warps.get(name, tiles.warps))
                for name, taken in by_name.items()]  # fmt: skip
        assert figures.registers == 255
        assert figures.occupancy == min(each) < max(each)


def test_counters_are_theirs(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The driver is asked for the names; what it launches after each mark is that operation's."""
    text = csv_of([(MARK, {"time_us": 1}), ("merge_forward", V3), (MARK, {"time_us": 1}),
                   ("decode_parts", V3), ("decode_merge", V3)])  # fmt: skip
    (tmp_path / "said.csv").write_text(text)
    script = f'case "$*" in *--version*) exit;; esac; echo "$@" >{tmp_path}/words'
    script += f"; cat {tmp_path}/said.csv"
    stand_in(tmp_path, monkeypatch, script)
    monkeypatch.setattr(profile.catalogue, "lacks", lambda backend: None)
    found = profile.run(asked("merge", "decode"))
    assert "merge,decode 64 256" in (tmp_path / "words").read_text()
    merge, decode = found.lines
    # Four parts of 64 x 256 float32 and what they give, each with a number a row; two sequences.
    assert merge.least_bytes == 5 * 64 * (256 + 1) * 4
    assert decode.least_bytes == 2 * 2 * 8 * 256 * 128 * 4 + 2 * 64 * 128 * 4
    for line, times in ((merge, 1), (decode, 2)):
        moved = line.counters["dram_read"] * line.least_bytes
        assert moved == pytest.approx(times * V3["dram_read"], rel=1e-3)
    console = Console(width=200, file=StringIO())
    profilepage.render(found, console)
    page = console.file.getvalue()
    assert "in bytes for each byte of the least" in page
    assert "elements for each element" not in page
    profilefile.save(found, tmp_path / "kept.jsonl")
    assert profilefile.read(tmp_path / "kept.jsonl") == [found]
    with pytest.raises(BadInput, match="counters of whole operations"):
        reportread.read([tmp_path / "kept.jsonl"])
    assert decode.counters["time_us"] == pytest.approx(2 * merge.counters["time_us"])
    assert H200.name == found.header.device
    assert ncu.find() is not None


def test_the_command_refuses_what_is_not_meant():
    said = refusal("profile", "merge", "--op", "logsumexp")
    assert "--op logsumexp is of kernels on rows; merge: whole operations" in said
    for words in (("attention", "registers"), ("merge", "v3", "--op", "logsumexp")):
        said = refusal("profile", *words)
        assert f"{words[0]}: whole operations, which have no size and no unit in common" in said
        assert "profile them apart" in said
    assert "attention, decode, merge" in refusal("profile", "nothing")
