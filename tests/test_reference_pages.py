"""The reference in Chinese: each name of the English pages, its signature, every argument and its
default, what is returned and raised, and the docstring's examples below."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import online_softmax
from pages_kit import ROOT, counterpart, tables

PAGES = sorted(p for p in (ROOT / "docs" / "reference").glob("*.md") if ".zh" not in p.name)
NONE = "无"  # of an argument that has no default
RAISED = re.compile(r"    [\w.]*(Error|Unavailable): ")  # a line of a docstring's Raises
NAME = re.compile(r"^::: (\S+)$", re.MULTILINE)


def named(page: Path) -> list[str]:
    return NAME.findall(page.read_text(encoding="utf-8"))


def public(name: str) -> Any:
    found: Any = online_softmax
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def default(given: Any) -> str:
    return f'"{given}"' if isinstance(given, str) else repr(given)


def words(parameter: inspect.Parameter) -> tuple[str, str]:
    """How a page names an argument, and its default."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    has_default = parameter.default is not parameter.empty
    return stars + parameter.name, default(parameter.default) if has_default else NONE


def signature(name: str) -> str:
    """As the pages write it, without annotations."""
    found, bare = inspect.signature(public(name)), []
    for each in found.parameters.values():
        is_first = each.kind is each.KEYWORD_ONLY and "*" not in "".join(bare)
        bare += ["*"] if is_first else []
        said, value = words(each)
        bare.append(said if value == NONE else f"{said}={value}")
    return f"{name.rpartition('.')[2]}({', '.join(bare)})"


def parts(text: str) -> dict[str, str]:
    """What stands above each docstring of a page, from its heading on."""
    found = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        (name,) = NAME.findall(part)
        found[name] = part.partition(":::")[0]
    return found


def test_every_public_operation_is_on_a_page():
    there = {name.rpartition(".")[2] for page in PAGES for name in named(page)}
    assert set(online_softmax.__all__) - there == {"KERNELS", "nn"}


def wrong(text: str) -> list[str]:
    """What a Chinese page's parts lack, or say otherwise than the code."""
    found = []
    for name, part in parts(text).items():
        it = public(name)
        shown = [(line[0].strip("`"), line[1]) for table in tables(part) for line in table[1:]]
        if len(re.findall(r"[\u4e00-\u9fff]", part.partition("|")[0])) < 8:
            found.append(f"{name}: no sentence")
        if inspect.isclass(it) and issubclass(it, tuple):
            found += [f"{name}: fields"] * ([field for field, _ in shown] != list(it._fields))
            continue
        sections = {"Returns:": "**返回**", "Raises": "**报错**"}
        says = (inspect.getdoc(it) or "").splitlines()
        for begins, chinese in sections.items():
            if any(line.startswith(begins) for line in says) != (chinese in part):
                found.append(f"{name}: {chinese}")
        if "Raises:" in says:
            kinds = {line.strip().partition(":")[0] for line in says if RAISED.match(line)}
            found += [f"{name}: {kind}" for kind in kinds if f"`{kind}`" not in part]
        if f"`{signature(name)}`" not in part:
            found.append(f"{name}: {signature(name)}")
        wanted = [words(each) for each in inspect.signature(it).parameters.values()]
        given = [(argument, value.strip("`")) for argument, value in shown]
        apart = [each for each in wanted if each not in given]
        apart += [each for each in given if each not in wanted]
        found += [f"{name}: {each}" for each in apart]
    return found


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_chinese_page_has_every_argument(page: Path):
    said = counterpart(page)
    assert named(said) == named(page)
    assert wrong(said.read_text(encoding="utf-8")) == []


def test_what_is_no_longer_so_is_seen():
    text = counterpart(PAGES[0].with_name("rows.md")).read_text(encoding="utf-8")
    changed = text.replace("| `dim` | `-1` | 沿哪一维 |", "| `dim` | `0` | 沿哪一维 |", 1)
    name = "online_softmax.log_softmax"
    assert wrong(changed) == [f"{name}: ('dim', '-1')", f"{name}: ('dim', '0')"]
    line = next(each for each in text.splitlines() if each.startswith("| `keepdim`"))
    assert wrong(text.replace(line + "\n", "")) == [
        "online_softmax.logsumexp: ('keepdim', 'False')"
    ]
    changed = text.replace("keepdim=False, *, scale", "*, keepdim=False, scale")
    assert wrong(changed) == [f"online_softmax.logsumexp: {signature('online_softmax.logsumexp')}"]
