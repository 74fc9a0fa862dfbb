"""profile without counters and with: the static report, the driver, the command and its files."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from cli_kit import needs_compiler, refusal, run
from online_softmax import catalogue
from online_softmax.catalogue import KERNELS
from online_softmax.lab import (
    cli,
    laddertables,
    ncu,
    opjudge,
    profile,
    profiledriver,
    profilefile,
    sass,
)
from online_softmax.plan import Problem
from profile_kit import ELEMENTS, H200, MARK, V3, asked, csv_of, stand_in

PERMISSION = (
    "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
    "Performance Counters on the target device 0. For instructions see ...'; exit 1"
)


# ---- where there are no counters


@pytest.fixture
def no_ncu(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(ncu, "PLACES", ())


@needs_compiler
def test_without_ncu_the_static_report_stands_in(no_ncu, monkeypatch):
    monkeypatch.setattr(profile, "here", lambda: H200)
    found = profile.run(asked("v2_vectorized", "v5_split_row", "triton_online", "torch"))
    assert found.header.notes == (profile.NO_NCU,)
    assert found.header.device == ""
    two, five, triton, torchs = found.lines
    assert (two.reads_predicted, two.reads, two.writes) == (2.0, 2.0, 1.0)
    (figures,) = two.figures
    assert (figures.arch, figures.spill_bytes) == ("sm_90a", 0)
    assert 16 <= figures.registers <= 64
    assert two.code
    assert five.code
    assert triton.reads_predicted == 2.0
    assert triton.code
    if not catalogue.lacks("triton"):
        assert triton.figures[0].registers > 0
        assert sum(triton.code.loads.values()) > 0
    if sass.disassembler():
        assert two.code.loads["128"] > 0
        assert two.code.stores["128"] > 0
        assert two.code.exps > 0
        assert sum(five.code.loads.values()) > sum(two.code.loads.values())  # two kernels
    assert torchs.code
    assert "PyTorch" in torchs.code.missing


def test_without_permission_one_sentence_says_what_to_allow(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, PERMISSION)
    raw: list[str] = []
    found = profile.run(asked("v3_register_cache"), raw.append)
    assert found.header.notes[-1] == profile.NO_PERMISSION
    assert "NVreg_RestrictProfilingToAdminUsers=0" in profile.NO_PERMISSION
    assert found.lines[0].figures
    assert not found.lines[0].counters
    assert "ERR_NVGPUCTRPERM" in raw[0]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo '==ERROR== Cuda driver is not compatible with Nsight Compute.'; exit 1",
         "ncu gave none: Cuda driver is not compatible"),
        ("echo '==PROF== Connected'; echo 'torch.OutOfMemoryError: no' >&2; exit 1",
         "ncu gave none: torch.OutOfMemoryError: no"),
        ("echo '==PROF== nothing'", 'ncu gave none: no CSV of ncu: it has no line with "Metric'),
    ],
)  # fmt: skip
def test_whatever_else_ncu_says_is_said(tmp_path, monkeypatch, script: str, said: str):
    stand_in(tmp_path, monkeypatch, script)
    found = profile.run(asked("v3_register_cache"))
    assert said in found.header.notes[-1]


def test_without_a_gpu_no_program_is_asked(tmp_path, monkeypatch):
    path = stand_in(tmp_path, monkeypatch, 'echo "$@" > "$0.said"', here=None)
    found = profile.run(asked("v3_register_cache", arches=("sm_80",)))
    assert found.header.notes[-1].startswith("no counters: torch sees no CUDA device")
    assert [figures.arch for figures in found.lines[0].figures] == ["sm_80"]
    assert not path.with_name("ncu.said").exists()


def test_machine_code_is_read_by_section():
    text = """
\t.section\t.text._Z1aIfE,"ax",@progbits
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E R5, desc[UR4][R2.64] ;
        /*0030*/              @UP0 UBLKCP.S.G [UR4], [UR6], UR8 ;
        /*0040*/                   MUFU.EX2 R1, R1 ;
        /*0050*/                   MUFU.RCP R1, R1 ;
        /*0060*/                   STG.E.U16 desc[UR4][R2.64], R5 ;
        /*0068*/                   LDGSTS.E.LTC128B.64 [R1], desc[UR4][R2.64] ;
\t.section\t.text._Z1bIfE,"ax",@progbits
        /*0010*/                   STG.E.64 desc[UR4][R2.64], R5 ;
"""
    one = sass.counted(text, "_Z1aIfE")
    assert one == profilefile.Code({"128": 1, "64": 1, "32": 1}, {"16": 1}, bulk=1, exps=1)
    assert sass.counted(text).stores == {"64": 1, "16": 1}
    both = sass.together([one, sass.counted(text, "_Z1bIfE")])
    assert (both.stores, both.bulk) == ({"16": 1, "64": 1}, 1)
    assert sass.together([one, profilefile.Code(missing="why")]).missing == "why"


def test_without_a_disassembler_widths_are_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(sass, "disassembler", lambda: None)
    assert sass.code(b"") == profilefile.Code(missing=sass.NO_TOOL)


# ---- the driver


def test_torch_still_has_the_kernel_that_marks():
    assert callable(torch.cuda._sleep)  # a private name: it launches spin_kernel


@needs_compiler
@pytest.mark.parametrize(
    ("name", "op"),
    [("v2_vectorized", "softmax"), ("v5_split_row", "softmax"), ("landed", "log_softmax"),
     ("registers", "softmax_backward"), ("split", "log_softmax_backward"),
     ("split", "logsumexp"), ("torch", "softmax_backward"), ("production", "logsumexp")],
)  # fmt: skip
def test_what_runs_under_ncu_is_the_operation(name: str, op: str):
    given = profiledriver.tensors(op, 3, 1000, torch.float32, "cpu")
    given[-1].fill_(torch.nan)
    made = profiledriver.call(name, op)(*given)
    result = made if isinstance(made, torch.Tensor) else given[-1]
    assert opjudge.check(op, given[:-1], result).ok


@needs_compiler
@pytest.mark.parametrize("op", ["softmax_backward", "logsumexp"])
def test_row_kernels_read_what_is_predicted(op: str):
    for name in ("registers", "split"):
        (line,) = profile._lines(asked(name, op=op), Problem(64, 256), backends_run=False)
        assert line.reads == pytest.approx(line.reads_predicted), name


def test_what_ships_is_the_catalogue_s_choice():
    problem = Problem(4096, 4096)
    assert profiledriver.shipped("softmax", problem) == "registers"
    assert profiledriver.shipped("softmax_backward", problem) in KERNELS
    assert profiledriver.shipped("cross_entropy", problem) == ""


# ---- the command


@needs_compiler
def test_a_run_is_shown_kept_and_read_again(tmp_path, monkeypatch):
    csv = csv_of([(MARK, {"time_us": 2.0}), ("v2", {**V3, "dram_read": 4.1 * ELEMENTS}),
                  (MARK, {"time_us": 2.0}), ("v3", V3)])  # fmt: skip
    stand_in(
        tmp_path,
        monkeypatch,
        'case "$1" in --version) echo "Version 2025.3.1.0 (build 1)";; *) cat "$0.csv";; esac',
    )
    (tmp_path / "bin" / "ncu.csv").write_text(csv)
    kept, raw = tmp_path / "kept.jsonl", tmp_path / "raw.csv"
    words = ("profile", "v2", "v3", "--rows", 64, "--cols", 256)
    page = run(*words, "--save", kept, "--raw", raw)
    assert raw.read_text() == csv
    assert "by the counters of NVIDIA H200" in page
    assert "Nsight Compute 2025.3.1.0" in page
    row = next(line.split() for line in page.splitlines() if line.startswith("  v2_vectorized"))
    assert row[1:7] == ["31.0", "2.00", "2.00", "1.00", "1.00", "1.02"]
    assert "long_scoreboard 73 %, barrier 24 %" in " ".join(page.split())
    assert "DRAM sees about one read" in " ".join(page.split())
    (again,) = profilefile.read(kept)
    assert [line.name for line in again.lines] == ["v2_vectorized", "v3_register_cache"]
    assert again.header.ncu == "2025.3.1.0"
    shown = run("profile", "--from", kept)
    assert shown == page
    as_json = json.loads(run("profile", "--from", kept, "--json"))
    assert as_json["kernels"][1]["counters"]["dram_read"] == pytest.approx(4.0)
    (tmp_path / "kept.json").write_text(json.dumps(as_json, indent=2))
    assert profilefile.read(tmp_path / "kept.json") == [again]
    page = run(*words, "--from", raw)
    assert "by the counters of a GPU of compute capability 9.0" in page


def test_the_file_of_before_is_read(tmp_path):
    figures = {"dram_read": 4.0057, "dram_write": 2.75, "l2_read": 7.29, "l2_write": 4.0,
               "l1_load": 12.0, "time": 62.752}  # fmt: skip
    stored = {"date": "2026-11-30T07:10:24+00:00", "command": "python benchmarks/traffic.py",
              "machine": {"gpu": "NVIDIA H200"}, "rows": 4096, "cols": 4096, "dtype": "float32",
              "unit": "", "metrics": {}, "rungs": {"safe": figures}}  # fmt: skip
    path = tmp_path / "ncu-4096x4096-float32.json"
    path.write_text(json.dumps(stored, indent=1))
    (found,) = profilefile.read(path)
    (safe,) = found.lines
    assert safe.counters["dram_read"] == 4.0057
    assert safe.counters["time_us"] == 62.752
    assert safe.reads_predicted == 3.0
    table = laddertables.traffic_table(tmp_path)
    assert "| `safe` | 12 | 12 | 7.3 | 4 | 4 | 62.8 |" in table
    page = run("profile", "--from", path)
    assert "What moves" in page
    assert "What it waits for" not in page  # nothing is known of it


@pytest.mark.parametrize("text", ["", "{", '{"kind": "header", "what": "bench", "format": 1}',
                                  '{"kind": "profile"}', "[1]"])  # fmt: skip
def test_other_files_are_refused(tmp_path, text: str):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    assert "holds no results of `profile --save`" in refusal("profile", "--from", path)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "profile takes kernels: give one of ladder, safe,"),
        ("nope", "kernel nope: there are ladder, safe,"),
        ("v3 --op mean", "--op mean: there are softmax, log_softmax"),
        ("v3 --op logsumexp", "nothing to profile: v3_register_cache computes softmax, not"),
        ("v3 --cols 0", "--cols 0: give a whole number, at least 1"),
        ("v3 --dtype float64", "no kernel takes dtype 'float64'"),
        ("--from x.jsonl --op softmax", "--from shows what was kept: --op cannot change it"),
        ("--from gone.jsonl", "--from gone.jsonl cannot be read: No such file"),
    ],
)
def test_wrong_words_are_one_line(words: str, why: str):
    assert why in refusal("profile", *words.split())


@needs_compiler
@pytest.mark.parametrize("option", ["--save", "--raw"])
def test_a_full_disk_is_one_line(tmp_path, monkeypatch, option: str):
    stand_in(tmp_path, monkeypatch, 'cat "$0.csv"')
    (tmp_path / "bin" / "ncu.csv").write_text(csv_of([(MARK, {"time_us": 2.0}), ("v2", V3)]))
    words = ("profile", "v2", "--rows", 2, "--cols", 8, "--json", option, "/dev/full")
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert (done.exit_code, done.stderr) == (
        2,
        f"error: {option} /dev/full: No space left on device\n",
    )


@needs_compiler
def test_without_counters_no_raw_file_is_written_and_that_is_said(tmp_path, no_ncu):
    raw = tmp_path / "raw.csv"
    words = ("profile", "v2", "--rows", 2, "--cols", 8, "--json", "--raw", raw)
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == 0
    assert f"--raw {raw} is not written: there were no counters" in done.stderr
    assert not raw.exists()
