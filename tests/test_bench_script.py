"""`benchmarks/h200.sh`: the commands that it runs on every GPU, and what a failure does.

A script stands for the interpreter: it says how many GPUs there are, and keeps what it is given.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from online_softmax.lab import benchcli, fusedsizes, grid, moresizes

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "h200.sh"
INTERPRETER = """#!/bin/sh
if [ "$1" = -c ]; then echo {gpus}; exit; fi
echo "$CUDA_VISIBLE_DEVICES: $*" >>{log}
case "$*" in *{failing}*) exit 3;; esac
"""

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


def run(tmp_path: Path, *words: str, gpus: int = 2, failing: str = "nothing", **more: str):
    """What the script did: its exit status, its errors, and each command with its GPU."""
    log, interpreter = tmp_path / "log", tmp_path / "python"
    interpreter.write_text(
        INTERPRETER.format(gpus=gpus, log=shlex.quote(str(log)), failing=failing)
    )
    interpreter.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(interpreter), **more}
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path / "out"), *words],
        capture_output=True, text=True, check=False, timeout=60, env=environment,
    )  # fmt: skip
    said = log.read_text().splitlines() if log.exists() else []
    return done.returncode, done.stderr, [line.partition(": ") for line in said]


def test_all_stages_in_order(tmp_path: Path):
    code, errors, commands = run(tmp_path)
    assert code == 0, errors
    assert [word for word in errors.split() if word.endswith("s,") or word == "s"] != []
    texts = [text for _, _, text in commands]
    order = ["softmax log_softmax softmax_backward log_softmax_backward logsumexp --grid all",
             "bench-rows.jsonl", "token_stats --grid all", "bench-losses.jsonl",
             "attention_decode merge --grid all", "bench-attention.jsonl",
             "linear_cross_entropy --grid all", "bench-linear.jsonl",
             "attention_varlen --grid all", "bench-more.jsonl", "--accuracy", "fusion.py",
             "--host", "--tune", "ladder.py", "profile ladder", "attentionerrors"]  # fmt: skip
    places = [next(i for i, text in enumerate(texts) if each in text) for each in order]
    assert places == sorted(places)
    assert len([text for text in texts if "--prepare" in text]) == 2 * 5  # GPUs, kinds of cells
    tuned = [text for text in texts if "--tune" in text]
    assert len(tuned) == len(grid.OPS)
    shards = [text.split("--shard ")[1] for text in texts if "ladder.py" in text]
    assert sorted(shards) == ["0/2", "1/2"]
    kept = [text.rpartition("/")[2] for text in texts if "profile" in text or "errors" in text]
    assert kept == ["ncu-4096x4096-float32.jsonl", "ncu-4096x65536-float32.jsonl",
                    "attention-errors.jsonl", "attention-memory.jsonl"]  # fmt: skip


def test_each_gpu_has_a_shard(tmp_path: Path):
    code, errors, commands = run(tmp_path, "cells=77", gpus=3)
    assert code == 0, errors
    found = {}
    for gpu, _, text in commands:
        words = text.split()
        assert words[words.index("--seconds") + 1] == "77"
        assert set(grid.OPS) <= set(words)
        assert words[words.index("--save") + 1].startswith(str(tmp_path / "out" / "shards"))
        found[gpu] = words[words.index("--shard") + 1]
    assert found == {"0": "0/3", "1": "1/3", "2": "2/3"}


@pytest.mark.parametrize(
    ("name", "ops", "dtypes"),
    [
        ("losses", grid.LOSS_OPS, "bf16,fp32"),
        ("attention", [*fusedsizes.ATTENTION_OPS, fusedsizes.MERGE], "bf16"),
        ("linear", [fusedsizes.LINEAR], "bf16"),
        ("more", moresizes.MORE_OPS, "bf16,fp32"),
    ],
)
def test_cells_are_compiled_and_measured_in_shards_and_become_a_file(
    tmp_path: Path, name: str, ops: Sequence[str], dtypes: str
):
    code, errors, commands = run(tmp_path, f"prepare-{name}=50", f"{name}=70", gpus=2)
    assert code == 0, errors
    *sharded, (_, _, merged) = commands
    assert sorted(gpu for gpu, _, _ in sharded) == ["0", "0", "1", "1"]
    for _, _, text in sharded:
        words = text.split()
        assert set(ops) <= set(words)
        assert words[words.index("--dtype") + 1] == dtypes
        is_prepared = "--prepare" in words
        assert words[words.index("--seconds") + 1] == ("50" if is_prepared else "70")
        assert is_prepared or "--resume" in words
    saved = [text.split("--save ")[1] for _, _, text in sharded if "--save" in text]
    shards = tmp_path / "out" / "shards"
    assert sorted(saved) == [f"{shards}/{name}-2-{index}.jsonl" for index in range(2)]
    assert f"--from {shards}/{name}-*.jsonl" in merged
    assert merged.endswith(f"/results/bench-{name}.jsonl")


def test_gpus_that_are_named_and_torch_alone(tmp_path: Path):
    more = {"CUDA_VISIBLE_DEVICES": "5,7", "ONLY_TORCH": "1"}
    _, _, commands = run(tmp_path, "cells=9", gpus=2, **more)
    assert sorted(gpu for gpu, _, _ in commands) == ["5", "7"]
    assert all("--against torch " in text for _, _, text in commands)


def test_a_stage_that_fails_is_told_and_the_next_runs(tmp_path: Path):
    code, errors, commands = run(tmp_path, "cells=9", "accuracy", failing="1/2")
    assert code == 1
    assert "cells: " in errors
    assert "exit status 1" in errors
    assert "--accuracy" in commands[-1][2]


def test_without_a_gpu_and_a_stage_that_is_none(tmp_path: Path):
    code, errors, _ = run(tmp_path, gpus=0)
    assert (code, errors) == (2, "h200.sh: torch sees no CUDA GPU here\n")
    code, errors, commands = run(tmp_path, "measure")
    assert (code, commands) == (2, [])
    assert "no stage measure: prepare, cells" in errors


def test_its_commands_are_ones_that_bench_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every line is parsed and checked by the command itself; nothing is measured."""
    from typer.testing import CliRunner

    from online_softmax.lab import cli

    taken = []
    for name in ("_measure", "_prepare", "_accuracy", "_stored"):
        monkeypatch.setattr(benchcli, name, lambda *given, name=name: taken.append(name))
    _, _, commands = run(tmp_path, gpus=1)
    asked = [shlex.split(text) for _, _, text in commands if "lab.cli bench " in text]
    for words in asked:
        done = CliRunner().invoke(cli.app, words[words.index("bench") :])
        assert done.exit_code == 0, (words, done.output)
    cells = ["_prepare", "_measure", "_stored"]
    assert taken == [*cells * 5, "_accuracy", "_measure", *["_measure"] * len(grid.OPS)]
