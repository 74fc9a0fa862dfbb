"""Checkers for the rules of CONTRIBUTING.md: the text of one file goes in, what is wrong comes out.

test_house.py tries each on planted violations, then runs it over the tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "online_softmax"
C_SUFFIXES = (".cu", ".cuh", ".h", ".cpp")
Found = dict[str, list[str]]


def hits(checker: Callable[[str], list[str]], *suffixes: str, root: Path = PACKAGE) -> Found:
    """What a checker finds, by path inside the package, or inside another folder."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.suffix in suffixes and (wrong := checker(path.read_text())):
            found[path.relative_to(root).as_posix()] = wrong
    return found


def elsewhere(found: Found, *allowed: str) -> Found:
    return {path: wrong for path, wrong in found.items() if not path.startswith(allowed)}


def bare_c(text: str) -> str:
    """C++ without comments and strings."""
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', " ", text, flags=re.DOTALL)


def names(node: ast.AST) -> list[str]:
    """Every name and attribute in an expression."""
    parts = list(ast.walk(node))
    return [p.id for p in parts if isinstance(p, ast.Name)] + [
        p.attr for p in parts if isinstance(p, ast.Attribute)
    ]


def imported(text: str) -> Iterator[str]:
    """Dotted names that a module imports, `from a import b` as a.b."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)


# ---- two maxima are subtracted in one place a language

MAXIMUM = re.compile(r"m|m_\w+|\w+_m|m\d|part|\w*max|max\w*|\w*maximum\w*")


def are_maxima(*sides: list[str]) -> bool:
    return all(any(MAXIMUM.fullmatch(word) for word in side) for side in sides)


def subtractions_py(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            sides = [node.left, node.right]
        elif isinstance(node, ast.Call) and {"sub", "subtract"} & {*names(node.func)}:
            sides = [node.func, *node.args][-2:]
        else:
            continue
        if are_maxima(*(names(side) for side in sides)):
            found.append(ast.unparse(node))
    return found


def subtractions_c(text: str) -> list[str]:
    tokens = re.findall(r"[A-Za-z_]\w*|\.?\d[\w.]*|->|[-+*/%<>=!]=|\S", bare_c(text))
    found = []
    for i, token in enumerate(tokens):
        before = tokens[i - 1]
        if token == "-" and re.fullmatch(r"[\w.]+|[)\]]", before) and before != "return":
            left = operand(tokens[i - 1 :: -1], ")]", "([")
            right = operand(tokens[i + 1 :], "([", ")]")
            if are_maxima(left, right):
                found.append(" ".join([*left[::-1], "-", *right]))
    return found


def operand(tokens: list[str], opens: str, closes: str) -> list[str]:
    """Tokens up to the next bracket that is not theirs, or the next operator as weak as minus."""
    depth, taken = 0, []
    for token in tokens:
        depth += (token in opens) - (token in closes)
        if depth < 0 or (depth == 0 and re.fullmatch(r"[,;={}?:<>&|+-]|return|[^-]=", token)):
            break
        taken.append(token)
    return taken


# ---- imports point down

LEVELS = {
    "arches": 0,
    "float32": 0,
    "plan": 1,
    "linearplan": 1.2,
    "rowtables": 1,
    "ring": 1.5,
    "rowplan": 2,
    "outerplan": 2,
}
LEVELS |= {
    "attentionplan": 2,
    "decodeplan": 2.5,
    "rowsweep": 2.5,
    "rowchoice": 2.5,
    "invariance": 3,
    "jit": 3,
    "keptcalls": 3.5,
    "cuda": 4,
    "triton": 4,
    "reference": 4,
    "catalogue": 5,
    "notedcalls": 5.2,
    "attentionkernels": 5.5,
    "rowkernels": 5.5,
    "cekernels": 5.6,
    "cereduce": 5.6,
    "ceblocks": 5.6,
    "shardkernels": 5.7,
    "statskernels": 5.6,
    "mergekernels": 5.6,
    "decodekernels": 5.6,
    "explained": 5.9,
    "explanation": 6,
    "rowops": 6,
    "arguments": 6,
    "ceops": 6.2,
    "attentionops": 6.2,
    "celoss": 6.3,
    "statsops": 6.3,
    "linearops": 6.4,
    "linearfast": 6.4,
    "linearparts": 6.3,
    "lossarguments": 6.5,
    "attentionarguments": 6.6,
    "library": 7,
    "api": 8,
    "attentions": 8,
    "losses": 8,
    "linear": 8.5,
    "stats": 8,
    "merging": 8,
    "distributed": 8,
}
LEVELS |= {"nn": 9, "__init__": 10, "lab": 11}
LEVELS |= {"__main__": 12}  # `python -m online_softmax`: the command, so the lab


def upward(path: str, text: str) -> list[str]:
    """Imports of a file (its path inside the package) that do not point to a lower level."""

    def part(dotted: str) -> str:
        first = dotted.split(".")[0]
        if first.startswith("jit_"):
            return "jit"
        return first if first in LEVELS else "__init__"  # a public name

    own = part(path.removesuffix(".py").replace("/", "."))
    wrong = []
    for name in imported(text):
        if name.startswith("."):
            wrong.append(f"{name} (relative)")
        if name.split(".")[0] != "online_softmax" or name == "online_softmax.__version__":
            continue
        other = part(name.removeprefix("online_softmax."))
        if other != own and LEVELS[other] >= LEVELS[own]:
            wrong.append(name)
    return wrong


# ---- what may stand where


def torch_registration(text: str) -> list[str]:
    found = [name for name in imported(text) if re.match(r"torch\.(library|autograd)\b", name)]
    attributes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute))
    dotted = (ast.unparse(attribute) for attribute in attributes)
    return found + [name for name in dotted if name in ("torch.library", "torch.autograd")]


def thresholds_py(text: str) -> list[str]:
    """Comparisons of rows or columns with a number over 1."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            if {"rows", "cols"} & {*names(node)} and any(
                isinstance(n, int) and n > 1 for n in numbers
            ):
                found.append(ast.unparse(node))
    return found


def thresholds_c(text: str) -> list[str]:
    size, compare, number = r"\b(?:\w*_)?(?:rows|cols)\b", r"\s*[<>=!]=?\s*", r"(?:[2-9]|\d\d+)\b"
    return re.findall(f"{size}{compare}{number}|{number}{compare}{size}", bare_c(text))


def framework_headers(text: str) -> list[str]:
    """Every header but the project's own, which are named by relative path, and <stdint.h>."""
    framework = "(?:torch|ATen|c10|cuda|cub|cooperative)"
    return re.findall(rf'#include\s*<(?!stdint)[^>]*>|#include\s*"{framework}[^"]*"', text)


def ptx(text: str) -> list[str]:
    return re.findall(r"\basm\b", bare_c(text))


def bare_numbers(text: str) -> list[str]:
    """log2(e) without its name, and finite stand-ins for infinity."""
    return re.findall(r"1\.4426\d*|FLT_MAX|-\s*(?:1[eE]\+?\d\d|5e4|3\.4028\d*)", text)


# ---- what pages say


def missing_tests(text: str) -> list[str]:
    """Tests that a page names and nobody has."""
    wrong = []
    for file, test in re.findall(r"(tests/\w+\.py)(?:::(\w+))?", text):
        path, wanted = ROOT / file, f"def {test}(" if test else ""
        if not path.is_file() or wanted not in path.read_text():
            wrong.append(f"{file}::{test}")
    return wrong
