"""`trace` and `explain`, and one clear line for whatever words are wrong, of any command."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

import online_softmax
from cli_kit import refusal, run
from online_softmax import explanation, plan
from online_softmax.lab import cli


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["1", "5", "3", "9", "2"], [1, 5, 3, 9, 2]),
        (["-3"], [-3]),
        (["1", "-3", "-inf", "2"], [1, -3, "-inf", 2]),
        (["-1e-3", "+inf", "nan", "-.5"], [-0.0010000000474974513, "inf", "nan", -0.5]),
        (["-infinity", "-nan", "-0"], ["-inf", "nan", -0.0]),
        (["--", "-3", "2"], [-3, 2]),
        (["1,-5, 3"], [1, -5, 3]),
        (["[1 -5]"], [1, -5]),
    ],
)
def test_trace_takes_any_number(words: list[str], values: list[object]):
    for arguments in (["--json", *words], [*words, "--json"]):
        if "--" in words and arguments[-1] == "--json":
            continue  # behind "--" all is values
        found = json.loads(run("trace", *arguments))
        assert [value for step in found["steps"] for value in step["values"]] == values


def test_trace_of_the_worked_example():
    found = json.loads(run("trace", 1, 5, 3, 9, 2, "--block", 3, "--json"))
    states = [(step["m"], round(step["d"], 6)) for step in found["steps"]]
    assert states == [(5.0, 1.153651), (9.0, 1.022042)]
    page = run("trace", 1, 5, 3, 9, 2, "--block", 3)
    assert "1.153651" in page
    assert "1.022042" in page


@pytest.mark.parametrize("words", [["1", "two"], ["--bogus", "1"], ["1", "-x"], [""]])
def test_trace_refuses_in_one_line(words: list[str]):
    refusal("trace", *words)


def test_trace_tells_what_float32_does_to_a_number():
    page = run("trace", "-1e39", "3.4028235e38", "-inf")
    assert "-1e+39 is past the largest float32: it is taken as infinite." in page
    assert page.count("is past the largest float32") == 1


def test_trace_in_one_block():
    steps = json.loads(run("trace", 1, 2, "--block", 2**63 - 1, "--json"))["steps"]
    assert [step["values"] for step in steps] == [[1, 2]]


def test_explain():
    assert run("explain", 4096, 4096).startswith("registers: a block a row, 256 threads")
    page = run("explain", 32, 1048576, "--dtype", "bf16", "--arch", "90")
    assert page.startswith("streamed: ")
    assert "of the ladder's rungs, v5_split_row: " in page
    assert "not v3_register_cache: " in page
    for words in (("3", "4", "--dtype", "double"), ("0", "4")):  # one line, of any architecture
        (line,) = run("explain", *words).splitlines()
        assert line.startswith(("reference: ", "none: "))
    page = run("explain", 8192, 128256, "--dtype", "bf16", "--arch", "90", "--op", "cross_entropy")
    said = online_softmax.explain(8192, 128256, "bfloat16", "sm_90a", op="cross_entropy")
    assert page.rstrip("\n").rpartition("\n")[0] == said
    words = ("--op", "attention", "--kv-heads", 8, "--batch", 64)
    said = online_softmax.explain(
        1, 65536, "bfloat16", "sm_90a", op="attention", kv_heads=8, batch=64
    )
    page = run("explain", 1, 65536, "--dtype", "bf16", "--arch", "90", *words)
    assert page.rstrip("\n").rpartition("\n")[0] == said


@pytest.mark.parametrize("op", explanation.OPERATIONS)
def test_explain_says_of_which_architecture(op: str, monkeypatch: pytest.MonkeyPatch):
    """And how to ask about another, of every operation."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    others = "sm_75, sm_80, sm_86, sm_89, sm_100a, sm_120"
    last = run("explain", 8, 1024, "--op", op).splitlines()[-1]
    assert last == (
        "  this is of sm_90a (H200), since no GPU is here; --arch asks about another: " + others
    )
    last = run("explain", 8, 1024, "--op", op, "--arch", "sm_120").splitlines()[-1]
    assert last.startswith("  this is of sm_120 (RTX 5090), as asked; --arch asks about another: ")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("online_softmax.jit.device_arch", lambda: "sm_80")
    last = run("explain", 8, 1024, "--op", op).splitlines()[-1]
    assert last.startswith("  this is of sm_80 (A100 80GB), the GPU here; --arch asks about ")


def test_explain_on_several_architectures():
    parts = run("explain", 1, 300000, "--arch", "sm_80,90").split("\n\n")
    assert parts == [
        f"on {arch}\n{online_softmax.explain(1, 300000, arch=arch)}" + "\n" * (arch == "sm_90a")
        for arch in ("sm_80", "sm_90a")
    ]


def test_explain_on_a_gpu_without_facts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("online_softmax.lab.arguments.arches", lambda _: ["sm_103"])
    assert refusal("explain", 3, 4).startswith("error: no facts about 'sm_103'; known are sm_75")


# ---- the program itself


def test_version():
    assert run("--version") == f"online-softmax {online_softmax.__version__}\n"


def test_no_command_says_what_there_is():
    page = run(exit_code=2)
    assert page == run("--help")
    for name in ("ladder", "trace", "explain", "info"):
        assert f"online-softmax {name}" in page


# ---- wrong words: options that say nothing, numbers that are none, names that nothing has

BLOCKS = f"give one of {', '.join(map(str, plan.BLOCKS))}"
ARCHES = ", ".join(plan.ARCHES)
ROWS = "give a whole number, at least"
WRONG = [
    ("nope", "no such command 'nope'; see online-softmax --help"),
    ("--nope", "no such option: --nope; see online-softmax --help"),
    ("info more", "got unexpected extra argument(s) (more); see online-softmax info --help"),
    ("ladder more", "got unexpected extra argument(s) (more); see online-softmax ladder --help"),
    ("ladder --xyzzy", "no such option: --xyzzy; see online-softmax ladder --help"),
    ("ladder --rows 0", f"--rows 0: {ROWS} 1"),
    ("ladder --rows -2", f"--rows -2: {ROWS} 1"),
    ("ladder --rows x", f"--rows x: {ROWS} 1"),
    ("ladder --rows 1.5", f"--rows 1.5: {ROWS} 1"),
    ("ladder --cols é", f"--cols é: {ROWS} 1"),
    (f"ladder --rows {2**63}", f"--rows {2**63}: give at most 9,223,372,036,854,775,807"),
    (f"ladder --cols {'9' * 5000}", f"--cols {'9' * 60}...: {ROWS} 1"),
    ("ladder --block 0", f"--block 0: {BLOCKS}"),
    ("ladder --block -32", f"--block -32: {BLOCKS}"),
    ("ladder --block x", f"--block x: {BLOCKS}"),
    ("ladder --seconds 0", "--seconds 0: give a number of seconds, at least 0.1"),
    ("ladder --seconds nan", "--seconds nan: give a number of seconds, at least 0.1"),
    ("ladder --seconds x", "--seconds x: give a number of seconds, at least 0.1"),
    ("ladder --arch ,", f"--arch ,: give one of {ARCHES}, or several"),
    ("explain 3 4 --arch sm_1", f"--arch sm_1: known are {ARCHES}"),
    ("explain 3 4 --arch sm_80,x", f"--arch x: known are {ARCHES}"),
    ("explain 3 4 --dtype int8", "--dtype int8: give float32, float16, bfloat16 or float64"),
    ("explain 3 4 --op topk", f"--op topk: give one of {', '.join(explanation.OPERATIONS)}"),
    ("explain 3 4 --heads 2", "--heads is for --op attention: give --op attention too"),
    (
        "explain 3 4 --op attention --hidden 2",
        "--hidden is for --op linear_cross_entropy: give --op linear_cross_entropy too",
    ),
    ("explain 3 4 --op attention --heads 0", "--heads 0: give a whole number, at least 1"),
    (
        "explain 3 4 --op attention --heads 3 --kv-heads 2",
        "kv_heads must divide heads, got 3 and 2",
    ),
    (
        f"explain {1 << 50} 4 --op attention --heads 64",
        f"q must be at most {2**63 - 1:,} bytes, got (1, 64, {1 << 50}, 128) of float32",
    ),
    ("explain", "missing argument 'ROWS'; see online-softmax explain --help"),
    ("explain 3", "missing argument 'COLS'; see online-softmax explain --help"),
    ("explain -3 4", f"ROWS -3: {ROWS} 0"),
    ("explain 3 -4", f"COLS -4: {ROWS} 0"),
    ("explain 1.5 2", f"ROWS 1.5: {ROWS} 0"),
    ("explain 3 4 5", "explain takes ROWS and COLS, two numbers; there are 3"),
    ("explain --bogus 3 4", "no such option: --bogus; see online-softmax explain --help"),
    ("trace", "missing argument 'NUMBER'; see online-softmax trace --help"),
    ("trace 1 --block 0", f"--block 0: {ROWS} 1"),
    ("trace 1 ∞", "'∞' is not a number"),
]


@pytest.mark.parametrize(("words", "why"), WRONG, ids=[words[:30] for words, _ in WRONG])
def test_wrong_words(words: str, why: str):
    assert refusal(*words.split()) == f"error: {why}"


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize(
    "words",
    [
        *(
            f"ladder {option}"
            for option in (
                "--rows", "--cols", "--dtype", "--input", "--arch", "--only", "--block",
                "--seconds", "--save", "--plot", "--against", "--from",
            )
        ),
        *(
            f"bench softmax {option}"
            for option in (
                "--grid", "--cells", "--dtype", "--against", "--values", "--shard", "--tune",
                "--host", "--save", "--from", "--seconds", "--workers",
            )
        ),
        "explain 3 4 --arch", "explain 3 4 --dtype", "explain 3", "trace 1 --block", "trace",
    ],
)  # fmt: skip
def test_blank_is_no_default(words: str, blank: str):
    """Whoever types `--block "$THREADS"` and has forgotten THREADS hears of it."""
    assert re.search(r": give |needs at least one", refusal(*words.split(), blank))


def test_an_option_without_its_value():
    done = CliRunner().invoke(cli.app, ["ladder", "--rows"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: option '--rows' requires an argument; see online-softmax")
