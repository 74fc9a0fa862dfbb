"""The command `report`: what it reads, refuses, marks and writes; the page's text is looked at in
test_report_browser.py."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli_kit import refusal
from cli_kit import run as command
from online_softmax.lab import cli, grid, htmlreport, reportcli, reportdata, reportmd, reportread
from online_softmax.lab.inputs import BadInput
from online_softmax.lab.reportdata import Report
from online_softmax.lab.reportmore import attention_memory_sheet
from online_softmax.lab.reportsheet import Sheet, markdown
from online_softmax.lab.results import save
from online_softmax.lab.storedlines import text_of
from report_kit import (
    CELL,
    H200,
    STORED,
    bench_text,
    cell_row,
    climb,
    data,
    fill,
    fused_row,
    report_of,
    rows,
)

pytest.importorskip("plotly", reason="the page needs plotly (the extra lab)")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return fill(tmp_path / "results")


# ---- K16: a report that would be empty, or of nobody knows which machine, is refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("no json\n", "is no JSON"),
        ("[1]\n", "is JSON but holds no results"),
        ('{"a": 1}\n', "holds no results"),
        (bench_text(), "nothing was measured in"),
        (bench_text(*rows()[:1]).split("\n", 1)[1], "has no header before it"),
        (bench_text(*rows()[:1])[:40], "is no JSON"),
        ('{"kind": "header", "what": "another"}\n', "lines are not those of a run"),
    ],
    ids=["empty", "blank", "text", "list", "other", "header-alone", "headless", "torn", "what"],
)
@pytest.mark.parametrize("kind", ["html", "png", "md"])
def test_nothing_to_report_is_one_sentence(text: str, said: str, kind: str, tmp_path: Path):
    path = tmp_path / "given.jsonl"
    path.write_text(text)
    out = tmp_path / "out"
    assert said in refusal("report", path, "--format", kind, "-o", out)
    assert not out.exists()


def test_a_ladder_that_is_headless_is_refused(tmp_path: Path):
    path = tmp_path / "given.jsonl"
    path.write_text(text_of(climb().to_json()).split("\n", 1)[1])
    assert "has no header before it" in refusal("report", path)


def test_folders_without_results_are_refused(tmp_path: Path):
    assert "holds no .jsonl and no .json file" in refusal("report", tmp_path)
    (tmp_path / "a.json").write_text("[]")
    assert "holds no results: a.json was passed over" in refusal("report", tmp_path)
    assert "cannot be read: No such file" in refusal("report", tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "is no text" in refusal("report", tmp_path / "b.jsonl")


def test_words_are_refused(stored: Path):
    assert "--format pdf: give html, png, md" in refusal("report", stored, "--format", "pdf")
    assert "--open shows a page" in refusal("report", stored, "--format", "md", "--open")
    assert "-o" in refusal("report", stored, "-o", "")
    both = stored / "ladder.jsonl"
    assert "both name" in refusal("report", both, "-o", both)
    assert both.read_text() == text_of(climb().to_json())


# ---- what is written


def test_a_page_is_one_file_that_names_nothing_elsewhere(stored: Path, tmp_path: Path):
    out = tmp_path / "new" / "report.html"
    assert command("report", stored, "-o", out) == ""
    text = out.read_text()
    assert text.count("plotly.js v") == 1
    assert len(text.encode()) < 8e6
    bare = re.sub(r"<script>\n/\*\*\n\* plotly.*?</script>", "", text, flags=re.S)
    assert len(bare) < 2e5
    assert re.findall(r"https?:|//cdn|@import|<link[^>]*href=\"(?!data:)", bare) == []
    assert len(re.findall(r"</script>", bare)) == 2
    assert "{{" not in bare


def test_what_results_say_cannot_leave_its_element(stored: Path):
    text = htmlreport.page(Report(reportread.read([stored])))
    assert "</script><script>throw" not in text
    assert "</script><script>throw" in json.dumps(data(text)["bench"]["reasons"])


def test_a_device_is_escaped(tmp_path: Path):
    given = bench_text(cell_row(CELL), header=replace(H200, device="<b>GPU</b> {{data}}"))
    text = htmlreport.page(report_of(tmp_path, given))
    assert "<title>Softmax on &lt;b&gt;GPU&lt;/b&gt; {{data}}</title>" in text


def test_the_stored_results_make_a_page_under_eight_megabytes():
    text = htmlreport.page(Report(reportread.read([STORED])))
    assert len(text.encode()) < 8e6
    found = data(text)
    assert len(found["bench"]["cells"]) > 2000
    assert len(found["ladder"]) == 8
    assert {"accuracy", "memory", "attention_memory", "host", "marks"} <= set(found["sheets"])
    assert found["fused"] == ["attention", "attention_backward", "attention_decode", "merge"]
    assert found["tiles"][0]["of"] == "of a copy's speed, the ladder's best"


def test_tables_hold_what_was_stored(stored: Path, tmp_path: Path):
    out = tmp_path / "report.md"
    command("report", stored, "--format", "md", "-o", out)
    text = out.read_text()
    assert text.startswith("# Softmax on NVIDIA H200\n")
    for heading in ("Machine", "The ladder", "Speed by columns", "Few rows", "Refusals and marks"):
        assert f"\n## {heading}\n" in text
    us = CELL.ideal_bytes / 4e6
    assert (
        f"| 32,768 | 4,096 | {us:.1f} | {us / 0.9:.1f} | 3,600 | 90.0 % | {2 * us:.1f} | 1.80 |"
        in text
    )
    assert "| `" not in text
    assert "after safe: reads 3 to 2, 1.00 times as fast" in text


def test_attention_s_memory_is_a_table_and_a_picture(tmp_path: Path):
    """Each contender as it was measured last; bytes as stored."""
    sizes = {"tokens": 131072, "head_dim": 128, "dtype": "bfloat16", "inputs_bytes": 100_000_000,
             "matrix_bytes_computed": 4 * 131072**2}  # fmt: skip
    many = (("ours", 30, 99), ("torch, flash", 34, 236), ("ours", 33, 169))
    lines = tuple(
        {"kind": "attention_memory", "contender": name, "forward_bytes": forward * 10**6,
         "with_backward_bytes": both * 10**6, **sizes}
        for name, forward, both in many
    )  # fmt: skip
    path = tmp_path / "memory.jsonl"
    path.write_text(bench_text(others=lines))
    command("report", path, "--format", "md", "-o", tmp_path / "report.md")
    memory = (tmp_path / "report.md").read_text().partition("\n## Memory\n")[2]
    of = "| bfloat16, 131,072 queries and keys, head_dim 128"
    assert f"{of} | ours | 33 | 169 | 100 | 68.72 |\n{of} | torch, flash | 34 | 236 |" in memory
    assert "would be 68.7 GB in float32." in memory
    bars = [name for name, _ in attention_memory_sheet(reportread.read([path]).parts).columns]
    assert [name for name in bars if name.endswith(" MB")] == ["forward MB", "with gradients MB"]
    pytest.importorskip("matplotlib")
    command("report", path, "--format", "png", "-o", tmp_path / "drawn")
    assert [each.name for each in (tmp_path / "drawn").iterdir()] == ["attention_memory.png"]
    assert (tmp_path / "drawn" / "attention_memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_cell_of_a_table_is_one_line():
    sheet = Sheet("t", (("a", "text"), ("b", "us")), (("x|y\nz", None),))
    assert markdown(sheet).endswith("| x\\|y z | — |")


@pytest.mark.parametrize("is_timed", [False, True], ids=["counted", "timed"])
def test_pictures_are_drawn(is_timed: bool, tmp_path: Path):
    pytest.importorskip("matplotlib")
    (tmp_path / "bench.jsonl").write_text(bench_text(*rows()[:5] if is_timed else ()))
    save(climb(is_timed=is_timed), tmp_path / "ladder.jsonl")
    out = tmp_path / "drawn"
    command("report", tmp_path, "--format", "png", "-o", out)
    names = ("few-rows-softmax", "ladder-4096x4096-float32", "roofline-4096x4096-float32")
    wanted = [f"{name}.png" for name in (*names, "speed-softmax")]
    wanted = wanted if is_timed else wanted[1:2]
    assert sorted(each.name for each in out.iterdir()) == wanted
    for path in out.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_climb_without_a_gpu_is_a_report(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    save(climb(is_timed=False), path)
    found = data(htmlreport.page(Report(reportread.read([path]))))
    (run,) = found["ladder"]
    assert (run["timed"], run["roof"], found["tiles"]) == (False, None, [])
    assert [rung["reads"] for rung in run["rungs"]] == [3.0, 2.0]


def test_it_says_where_results_came_from_and_opens(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened: list[str] = []
    monkeypatch.setattr(reportcli.webbrowser, "open", lambda url: opened.append(url) or False)
    out = tmp_path / "a b.html"
    done = CliRunner().invoke(cli.app, ["report", str(stored), "-o", str(out), "--open"])
    assert done.exit_code == 0
    assert f"{reportread.shown(stored)}, 2 files" in done.output
    assert "other.json was passed over" in done.output
    assert "no browser was found: open" in done.output
    assert opened == [out.as_uri()]


def test_plotly_missing_is_one_sentence(stored: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str):
        raise ImportError(name)

    monkeypatch.setattr(htmlreport, "import_module", missing)
    with pytest.raises(BadInput, match="the page needs plotly"):
        htmlreport.page(Report(reportread.read([stored])))


# ---- attention and merges


def test_attention_has_a_rate_for_each_contender(tmp_path: Path):
    cells = grid.grid_cells(["attention", "attention_decode", "merge"], ["bfloat16"], "big")
    report = report_of(tmp_path, bench_text(*map(fused_row, cells)))
    found = data(htmlreport.page(report))
    assert found["bench"]["cells"] == []
    assert found["fused"] == ["attention", "attention_decode", "merge"]
    sheet = found["sheets"]["attention"]
    assert [name for name, _ in sheet["columns"]] == [
        "of", "cell", "ours ms", "the limit TFLOP/s", "ours TFLOP/s", "torch, flash TFLOP/s",
        "flash_attn TFLOP/s", "note"]  # fmt: skip
    line = sheet["rows"][0]
    assert line[:2] == ["bfloat16, head_dim 128, all keys", "16 x 1,024 tokens"]
    assert line[3:] == [600, pytest.approx(300), pytest.approx(240), None, "50.0 % of the limit"]
    decode = found["sheets"]["attention_decode"]["rows"][0]
    assert decode[:2] == ["bfloat16, head_dim 128", "1 x 4,096 keys"]
    assert decode[3:5] == [pytest.approx(4000), pytest.approx(2000)]
    (tile,) = [each for each in found["tiles"] if "attention" in each["of"]]
    assert (tile["value"], "torch, flash 240" in tile["note"]) == ("300", True)
    assert "flash_attn" in reportmd.page(report).split("## Refusals and marks")[1]


def test_lines_of_attention_that_were_stored_before_are_read(tmp_path: Path):
    line = {"kind": "attention", "what": "decode", "batch": 1, "keys": 4096, "unit": "GB/s",
            "rates": {"ours": 66.0, "torch, cudnn": 5000.0},
            "rounds_ms": {"ours": [0.3, 0.1, 0.2]}}  # fmt: skip
    report = report_of(tmp_path, bench_text(others=(line,)))
    (row,) = report.sheets["attention_decode"].rows
    assert row[2:5] == (0.2, 66.0, None)
    assert row[5] == "impossible: torch, cudnn past 4,800 GB/s"


# ---- what is said of a run


def test_tiles_are_figures_of_the_tables(stored: Path):
    report = Report(reportread.read([stored]))
    tiles = {each["of"]: each for each in reportdata.tiles(report)}
    assert tiles["of a copy's speed, the ladder's best"]["value"] == "90.0 %"
    assert tiles["of a copy's speed, softmax"]["value"] == "90.0 %"
    assert "1.80 times torch" in tiles["of a copy's speed, softmax"]["note"]
    assert tiles["cells of rows and losses where a rival is faster"]["value"] == "0 of 20"


def test_the_latest_climb_of_a_cell_is_shown(tmp_path: Path):
    old, new = climb(of_copy=0.5), climb(of_copy=0.7)
    path = tmp_path / "both.jsonl"
    path.write_text(text_of(old.to_json()) + text_of(new.to_json()))
    assert Report(reportread.read([path])).runs == [new]
