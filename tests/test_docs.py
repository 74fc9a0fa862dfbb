"""Pages: their examples run, their links lead somewhere.

That translations keep up: test_chinese.py; the site made of them: test_site.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import sys
import types

import pytest
import torch

from house import ROOT

_spec = importlib.util.spec_from_file_location("assemble", ROOT / "docs" / "assemble.py")
assemble = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(assemble)

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
RUN = ["docs/guide.md", "docs/index.md", "docs/semantics.md"]
PRINTED = re.compile(r"^(print\(.*\))  # (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


# ---- what pages show


def run_page(text: str) -> list[str]:
    """Run a page's Python blocks in order; what is printed otherwise than the page says."""
    module = sys.modules["page"] = types.ModuleType("page")  # where torch.compile looks for names
    names = vars(module)
    wrong = []
    for language, block in FENCED.findall(text):
        if language != "python":
            continue
        wanted = [said for _, said in PRINTED.findall(block)]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "page", "exec"), names)
        got = printed.getvalue().splitlines()
        if got != wanted:
            wrong.append(f"{got} is printed, {wanted} was said")
    return wrong


def test_what_a_page_says_wrong_is_seen():
    assert run_page("```python\nprint(1)  # 2\n```\n") == ["['1'] is printed, ['2'] was said"]
    assert run_page("```python\na = 1\n```\ntext\n```python\nprint(a + 1)  # 2\n```\n") == []
    with pytest.raises(AssertionError):
        run_page("```python\nassert 1 == 2\n```\n")


@pytest.mark.parametrize("page", RUN)
def test_examples_run(page: str, monkeypatch: pytest.MonkeyPatch):
    if not torch.cuda.is_available():  # the graph is captured whole; Inductor's compiler stays out
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert run_page(text_of(page)) == []


@pytest.mark.parametrize("page", RUN)
def test_a_translation_says_what_is_printed(page: str):
    """Its code is the same but for comments: test_chinese.py."""
    own = PRINTED.findall(text_of(page.replace(".md", ".zh.md")))
    assert own == PRINTED.findall(text_of(page))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("page", RUN)
def test_examples_run_on_a_gpu(page: str):
    assert run_page(text_of(page)) == []


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_a_new_user_s_path_is_on_the_first_screen(page: str):
    """From the README through the ladder to the page of what was measured, in the order in which
    the commands work: `make run` is what installs the second one."""
    lines = text_of(page).splitlines()
    first = [line.partition("#")[0].strip() for line in lines[:60]]
    path = ["make run", ".venv/bin/online-softmax report --open", "make test"]
    at = [first.index(command) for command in path]
    assert at == sorted(at)
    assert at[1] < 20
    assert re.search(r"^run:", text_of("Makefile"), re.MULTILINE)
    words = " ".join(lines[: at[1]]).split()
    assert len(words) < 200, "the page is a minute of reading away"


# ---- where links lead


def dead_links(page: str, text: str) -> list[str]:
    """Links of a page's text to files that are not there; anchors are test_chinese.py's."""
    folder = (ROOT / page).parent
    return [
        target
        for target in assemble.targets(text)
        if not assemble.resolve(target, page) and not (folder / target).is_dir()
    ]


def test_a_dead_link_is_seen():
    page = "[a](guide.md) [b](none.md) [c](guide.md#install) [`e[0]`](no.md) [f](lessons)"
    page += "\n```\n[g](none.md)\n```\n[h](https://example.org) ![i](none.png) [j](#x)"
    assert dead_links("docs/x.md", page) == ["none.md", "no.md", "none.png"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    assert dead_links(page, text_of(page)) == []


def test_every_page_is_in_the_navigation():
    nav = re.findall(r"(\S+\.md)$", text_of("mkdocs.yml").partition("\nnav:")[2], re.MULTILINE)
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    pages = {page for page in pages if not page.endswith(".zh.md")}
    assert sorted(nav) == sorted({*pages, *assemble.RENAMED.values()})
