"""ncu asked and its CSV read: units, unknown metrics, figures of a kernel; and real output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from online_softmax.lab import ncu, profile, profiledriver
from online_softmax.lab.profile import Asked
from profile_kit import MARK, NAMES, V3, asked, csv_of, stand_in

STORED = sorted((Path(__file__).parent / "data").glob("ncu-*.csv"))


@pytest.mark.parametrize(
    ("value", "unit", "wanted"),
    [
        ("67.11", "Mbyte", 67.11e6),
        ("1,536", "byte", 1536.0),
        ("1.5", "Kbyte/block", 1500.0),
        ("2.25", "Gbyte", 2.25e9),
        ("31,040", "ns", 31.04),
        ("31.04", "us", 31.04),
        ("1.25", "ms", 1250.0),
        ("2", "second", 2e6),
        ("31.04", "usecond", 31.04),
        ("61.5", "%", 61.5),
        ("2,097,152", "sector", 2097152.0),
        ("29", "register/thread", 29.0),
        ("(!) n/a", "", None),
        ("nan", "%", None),
        ("", "", None),
    ],
)
def test_units_are_scaled(value: str, unit: str, wanted: float | None):
    assert ncu.scaled(value, unit) == (None if wanted is None else pytest.approx(wanted))


def test_launches_are_read_whatever_stands_between():
    text = csv_of([(MARK, {"time_us": 2.0}), ("void f<float>(T1 *)", {"time_us": 31.04})])
    text = text.replace('\n"1","7"', '\na line of the program\n==PROF== 50%\n"1","7"', 1)
    first, second = ncu.read(text)
    assert profiledriver.MARK in first.name
    assert (second.name, second.capability) == ("void f<float>(T1 *)", "9.0")
    assert second.figure("time_us") == pytest.approx(31.04)
    assert second.figure("dram_read") is None


@pytest.mark.parametrize("text", ["", "==PROF== No kernels were profiled.\n", '"ID","x"\n"1","2"'])
def test_other_text_is_no_csv_of_ncu(text: str):
    with pytest.raises(ValueError, match='no line with "Metric Name"'):
        ncu.read(text)
    with pytest.raises(ValueError, match="lacks the column Kernel Name"):
        ncu.read('"ID","Metric Name","Metric Unit","Metric Value"\n')


@pytest.mark.parametrize("place", ["Host Name", "127.0.0.1"], ids=["heading", "line"])
def test_a_field_past_all_bounds_is_no_csv_of_ncu(place: str):
    text = csv_of([("a", {"registers": 1.0})]).replace(place, "x" * 200_000)
    with pytest.raises(ValueError, match="no CSV of ncu: field larger than field limit"):
        ncu.read(text)


@pytest.mark.parametrize("start", ["#!/there/is/none\n", "\x7fELF"], ids=["interpreter", "format"])
def test_an_ncu_that_cannot_be_started_says_why(tmp_path, monkeypatch, start: str):
    path = stand_in(tmp_path, monkeypatch, "")
    path.write_text(start)
    answer = ncu.ask(str(path), ["true"])
    assert (answer.csv, answer.code) == ("", 126)
    assert answer.why.startswith(f"{path} cannot be run: ")
    assert ncu.version(str(path)) == ""


def test_bytes_that_are_no_text_cost_no_figure(tmp_path, monkeypatch):
    path = stand_in(tmp_path, monkeypatch, f"cat {tmp_path}/csv")
    text = csv_of([("a kernel", {"registers": 29.0})]).encode().replace(b"a kernel", b"a\xff")
    (tmp_path / "csv").write_bytes(text)
    (launch,) = ncu.read(ncu.ask(str(path), ["true"]).csv)
    assert (launch.name, launch.figure("registers")) == ("a\ufffd", 29.0)


def test_of_several_names_the_first_that_has_a_figure_counts():
    names = ncu.METRICS["dram_read"]
    assert (
        ncu.Launch("f", "9.0", dict(zip(names, (1.0, 2.0), strict=True))).figure("dram_read") == 1
    )
    assert ncu.Launch("f", "9.0", {names[1]: 2.0}).figure("dram_read") == 2


# ---- ncu asked


def test_the_driver_runs_under_ncu_with_clocks_left_alone(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, 'echo "$@" >> "$0.said"; cat "$0.csv"')
    (tmp_path / "bin" / "ncu.csv").write_text(csv_of([(MARK, {"time_us": 2.0}), ("v3", V3)]))
    found = profile.run(asked("v3_register_cache"))
    words, version = (tmp_path / "bin" / "ncu.said").read_text().splitlines()
    assert words.startswith("--clock-control none --csv --page details --print-units base")
    assert "--profile-from-start off" in words
    assert words.endswith(f"-m {profile.DRIVER} v3_register_cache 64 256 float32 softmax")
    assert version == "--version"
    assert found.header.device == "NVIDIA H200"
    assert not [note for note in found.header.notes if "no counters" in note]


@pytest.mark.parametrize("form", ["{}", r"regex:^{}\.(sum|avg)$"])
def test_metrics_that_a_chip_does_not_know_are_left_out_and_said(tmp_path, monkeypatch, form):
    """Two in turn, as ncu stops at the first; one of them has another name."""
    gone = [NAMES["stall_gmma"], NAMES["dram_read"]]
    shown = [form.format(name if form == "{}" else name.partition(".")[0]) for name in gone]
    refuse = "\n".join(
        f"case \"$*\" in *{name}*) echo '==ERROR== Failed to find metric {text}'; exit 1;; esac"
        for name, text in zip(gone, shown, strict=True)
    )
    stand_in(tmp_path, monkeypatch, f'{refuse}\necho "$@" >> "$0.said"; cat "$0.csv"')
    figures = {**V3, "tensor": "(!) n/a"}
    text = csv_of([(MARK, {"time_us": 2.0}), ("v3", figures)])
    other = text.replace(NAMES["dram_read"], ncu.METRICS["dram_read"][1])
    (tmp_path / "bin" / "ncu.csv").write_text(other)
    found = profile.run(asked("v3_register_cache"))
    (line,) = found.lines
    assert line.counters["dram_read"] == pytest.approx(4.0)  # by its other name
    assert "tensor" not in line.counters
    (note,) = [note for note in found.header.notes if note.startswith("left out")]
    assert note.startswith("left out, since ncu does not know them here: ")
    assert NAMES["stall_gmma"] in note
    assert NAMES["tensor"] in note
    assert NAMES["dram_read"] not in note
    asked_for = (tmp_path / "bin" / "ncu.said").read_text()
    assert NAMES["stall_gmma"] not in asked_for
    assert "--clock-control none --csv" in asked_for


# ---- figures


def test_bytes_are_an_element_s_and_sectors_a_request_s():
    text = csv_of([(MARK, {"time_us": 2.0}), ("void v3_register_cache<float, 2>(T1 *)", V3)])
    (line,) = profile.from_csv(asked("v3_register_cache"), text).lines
    assert line.launches == ("v3_register_cache",)
    wanted = {"time_us": 31.04, "dram_read": 4.0, "dram_write": 2.5, "l2_read": 4.0}
    wanted |= {"l2_write": 4.0, "l1_load": 4.0, "sectors_load": 16.0, "sectors_store": 16.0}
    wanted |= {"occupancy": 61.5, "occupancy_most": 75.0, "xu": 12.25, "registers": 29.0}
    wanted |= {"shared_bytes": 1280.0}
    assert {name: line.counters[name] for name in wanted} == pytest.approx(wanted)
    assert list(line.stalls.items()) == [("long_scoreboard", 30.0), ("barrier", 10.0),
                                         ("selected", 1.0)]  # fmt: skip
    assert line.reads_predicted == 1.0


def test_kernels_of_one_rung_are_added_and_their_shares_averaged_by_time():
    fold = {**V3, "time_us": 10.0, "occupancy": 80.0, "registers": 30.0}
    emit = {**V3, "time_us": 30.0, "occupancy": 40.0, "registers": 20.0}
    text = csv_of([(MARK, {}), (MARK, {"time_us": 1}), ("v5_fold_part", fold), ("v5_emit", emit)])
    found = profile.from_csv(asked("v5_split_row"), text)
    (line,) = found.lines
    assert line.launches == ("v5_fold_part", "v5_emit")
    assert line.counters["time_us"] == pytest.approx(40.0)
    assert line.counters["dram_read"] == pytest.approx(8.0)
    assert line.counters["sectors_load"] == pytest.approx(16.0)
    assert line.counters["occupancy"] == pytest.approx(50.0)
    assert line.counters["registers"] == 30.0
    assert any("averaged by time" in note for note in found.header.notes)


def test_another_number_of_kernels_is_refused():
    text = csv_of([(MARK, {"time_us": 2.0}), ("v3", V3), (MARK, {"time_us": 2.0})])
    with pytest.raises(ValueError, match="saw launches of 1 kernels where 1 were to run"):
        profile.from_csv(asked("v3_register_cache"), text)
    with pytest.raises(ValueError, match="saw launches of 1 kernels where 2 were to run"):
        profile.from_csv(asked("v2_vectorized", "v3_register_cache"), text)


def test_what_cannot_run_is_not_looked_for():
    """Past v3's registers: the driver gets v2 alone, and the CSV has v2 alone."""
    text = csv_of([(MARK, {"time_us": 2.0}), ("v2", V3)])
    wanted = asked("v3_register_cache", "v2_vectorized", cols=65536, rows=1)
    three, two = profile.from_csv(wanted, text).lines
    assert "holds at most" in three.reasons[0]
    assert not three.counters
    assert two.counters["time_us"] == pytest.approx(31.04)


if STORED:  # without a file there would be a skip, which CI takes for an error

    @pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
    def test_real_output(path: Path):
        """ncu's CSV of `profile ladder registers torch`, ncu-ROWSxCOLS-DTYPE.csv, as an H200 gave
        it to --raw."""
        size = re.fullmatch(r"ncu-(\d+)x(\d+)-(\w+)", path.stem)
        assert size, "name it ncu-ROWSxCOLS-DTYPE.csv"
        rows, cols, dtype = int(size[1]), int(size[2]), size[3]
        names = (*profile.RUNGS, "registers", "torch")
        found = profile.from_csv(Asked(names, rows, cols, dtype, "softmax"), path.read_text())
        assert len([line for line in found.lines if line.counters]) == len(names)
        item = torch.empty((), dtype=getattr(torch, dtype)).itemsize
        for line in found.lines:
            if line.reasons:
                continue
            assert line.counters["time_us"] > 1, line.name
            # Every element comes from DRAM once at least; caches are empty.
            assert 0.99 * item <= line.counters["dram_read"] < 3.3 * item, line.name
            assert line.counters["l1_load"] >= 0.99 * item * (line.reads_predicted or 0), line.name
            assert 0 < line.counters["occupancy"] <= line.counters["occupancy_most"] * 1.02, (
                line.name
            )
            assert sum(line.stalls.values()) > 1, line.name
