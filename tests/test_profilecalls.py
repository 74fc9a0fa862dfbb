"""profile of whole operations by name: their calls, the kernels that they launch, the command."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import online_softmax
from cli_kit import refusal, run
from online_softmax import catalogue, jit
from online_softmax.lab import ncu, profile, profilecalls, profiledriver
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
    assert decode.counters["time_us"] == pytest.approx(2 * merge.counters["time_us"])
    assert H200.name == found.header.device
    assert ncu.find() is not None


def test_the_command_refuses_what_is_not_meant():
    said = refusal("profile", "merge", "--op", "logsumexp")
    assert "--op logsumexp is of kernels on rows; merge are operations" in said
    assert "attention, decode, merge" in refusal("profile", "nothing")
