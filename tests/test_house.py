"""The rules of CONTRIBUTING.md that a machine can hold, each checker tried on planted violations.

The checkers are in house.py.
"""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import online_softmax
from house import (
    C_SUFFIXES,
    PACKAGE,
    ROOT,
    bare_numbers,
    elsewhere,
    framework_headers,
    hits,
    imported,
    missing_tests,
    ptx,
    subtractions_c,
    subtractions_py,
    thresholds_c,
    thresholds_py,
    torch_registration,
    upward,
)
from online_softmax.catalogue import KERNELS
from online_softmax.lab import report
from online_softmax.lab.cases import CASES
from online_softmax.plan import Problem

MAX_LINES, MAX_RUNG_LINES = 300, 80
SECOND_COPIES = [
    "exp(old_m - m)",
    "f(m_a - m_b, 1)",
    "a.m - s.m",
    "exp2(scale * a.m - scale * m)",
    "0.5 * (row_max - block_max[i])",
]


@pytest.mark.parametrize("planted", SECOND_COPIES)
def test_a_second_subtraction_is_seen(planted: str):
    assert len(subtractions_py(f"w = {planted}")) == 1
    assert len(subtractions_c(f"float w = {planted};  // why")) == 1
    assert subtractions_py("torch.sub(m_a, m_b)")
    assert subtractions_py("m_a.sub(m_b)")
    assert subtractions_c("return a->m - b->m;")


@pytest.mark.parametrize("fine", ["exp(x - m)", "x[i] - shift", "cols - 1", "-m", "m + log(d)"])
def test_other_subtractions_are_fine(fine: str):
    assert not subtractions_py(f"'m_a - m_b'\ny = {fine}  # m_a - m_b")
    assert not subtractions_c(f"/* m_a - m_b */ float y = {fine}, m = -infinity(), z = a - b;")


def test_maxima_are_subtracted_once_a_language():
    sites = hits(subtractions_py, ".py") | hits(subtractions_c, *C_SUFFIXES)
    once = dict.fromkeys(("cuda/online.cuh", "reference/online.py", "triton/online.py"), 1)
    assert {path: len(found) for path, found in sites.items()} == once, sites


def test_an_upward_import_is_seen():
    assert upward("jit.py", "from online_softmax.cuda import launch")
    assert upward("plan.py", "import online_softmax.jit_cache")
    assert upward("triton/rows.py", "def f():\n    from online_softmax import reference")
    assert upward("api.py", "from online_softmax.lab.cases import CASES")
    assert upward("cuda/launch.py", "from . import host")
    assert upward("catalogue.py", "from online_softmax import softmax")
    assert upward("library/routes.py", "import online_softmax")
    assert upward("rowops.py", "from online_softmax import library")
    assert not upward("cuda/launch.py", "from online_softmax import jit, plan\nimport torch")
    assert not upward("jit.py", "from online_softmax.jit_cache import cache_dir")


def test_imports_point_down():
    paths = [(path.relative_to(PACKAGE).as_posix(), path) for path in PACKAGE.rglob("*.py")]
    assert {path: wrong for path, p in paths if (wrong := upward(path, p.read_text()))} == {}
    decisions = ("arches", "float32", "plan", "ring", "rowtables", "rowplan", "outerplan")
    decisions += ("rowchoice", "rowsweep", "attentionplan", "decodeplan")
    for file in decisions:  # the standard library alone, and each other
        for name in imported((PACKAGE / f"{file}.py").read_text()):
            top, _, rest = name.partition(".")
            if top not in sys.stdlib_module_names:
                assert (top, rest.split(".")[0] in decisions) == ("online_softmax", True), name


def test_importing_the_package_needs_torch_alone():
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "cuda", "typer", "rich", "matplotlib", "pandas"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import online_softmax, torch
assert not torch.cuda.is_initialized()
assert online_softmax.softmax(torch.zeros(2)).tolist() == [0.5, 0.5]
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr


IMPORT = """
import inspect, json, sys, torch
before = set(sys.modules)
def refuse(*_):
    raise AssertionError("it looks through the files of all modules, for 40 ms")
inspect.getmodule = refuse
import online_softmax
new = sorted(set(sys.modules) - before)
assert online_softmax.jit.Unavailable.__module__ == "online_softmax.jit_compile"
print(json.dumps(new))
"""
OWN = """
    __init__ api arches arguments attentionarguments attentionkernels attentionops
    attentionplan attentions catalogue ceblocks cekernels celoss ceops cereduce cuda.__init__
    cuda.launch decodekernels decodeplan explained explanation float32 invariance keptcalls
    library.__init__ library.attention
    library.attention_routes library.attention_second library.calculus library.eager
    library.linear_routes library.linear_traced library.loss_calculus library.loss_eager
    library.loss_routes library.loss_traced library.merges library.operations library.override
    library.private library.routes library.second library.stats library.stats_calculus
    library.stats_traced library.traced linear linearfast linearops linearparts linearplan
    lossarguments losses mergekernels merging nn notedcalls plan reference.__init__
    reference.attention reference.attention_gradient reference.cross_entropy reference.online
    reference.ops reference.outputs reference.packed reference.parts reference.shards ring rowchoice
    rowkernels rowops rowplan rowtables shardkernels stats statskernels statsops
"""


def test_an_import_brings_what_every_call_needs():
    """What compiles, launches or explains kernels comes with the first that asks for it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    new = json.loads(done.stdout)
    own = [name for name in new if name.split(".")[0] == "online_softmax"]
    wanted = {f"online_softmax.{name}".removesuffix(".__init__") for name in OWN.split()}
    assert set(own) == wanted
    outside = {name.split(".")[0] for name in new} - {"online_softmax", *sys.stdlib_module_names}
    assert outside <= {"torch"}
    heavy = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "torch.onnx")
    assert [name for name in new if name.startswith(heavy)] == []


def test_misplaced_code_is_seen():
    assert torch_registration("import torch\ntorch.library.Library('a', 'DEF')")
    assert torch_registration("from torch.autograd import Function")
    assert torch_registration("class F(torch.autograd.Function): pass")
    assert not torch_registration("'torch.library is not named here'\ntorch.softmax(x, 0)")
    assert thresholds_py("if cols > 1024: pass")
    assert thresholds_py("ok = 2**31 > p.rows * p.cols")
    assert not thresholds_py("if cols == 0 or rows < 1 or cols <= LIMIT: pass")
    assert thresholds_c("if (cols <= 4096) f();")
    assert thresholds_c("while (32 < part_cols) f();")
    assert not thresholds_c("// cols > 4096\nif (cols > 0 && col < cols) f(cols, 4096);")
    assert framework_headers("#include <torch/extension.h>")
    assert framework_headers('#include "ATen/ATen.h"')
    assert not framework_headers('#include "../online.cuh"')
    assert ptx('asm volatile("bar.sync 0;");')
    assert not ptx("// asm\nint assembled;")
    assert bare_numbers("exp2f(x * 1.44269504f)")
    assert bare_numbers("float m = -1e30f;")
    assert not bare_numbers("y = x - 1; z = 1e-30")


def test_registration_stands_in_library():
    """And gradients that the benchmark asks for in one file of its own."""
    assert elsewhere(hits(torch_registration, ".py"), "library/", "lab/gradients.py") == {}


def test_thresholds_stand_in_plan():
    found = hits(thresholds_py, ".py") | hits(thresholds_c, *C_SUFFIXES)
    assert elsewhere(found, "plan.py", "rowtables.py", "outerplan.py", "lab/") == {}


def test_device_code_knows_no_framework():
    assert elsewhere(hits(framework_headers, *C_SUFFIXES), "cuda/host/") == {}


def test_ptx_stands_beside_its_host_twin():
    beside = ("memory", "fold", "online", "words", "exchange", "mma")
    allowed = (*(f"cuda/{name}.cuh" for name in beside), "cuda/rows.cuh", "cuda/host/")
    assert elsewhere(hits(ptx, *C_SUFFIXES), *allowed) == {}


def test_numbers_have_names():
    found = hits(bare_numbers, *C_SUFFIXES) | hits(bare_numbers, ".py")
    online = ("cuda/online.cuh", "triton/online.py", "reference/online.py")
    assert elsewhere(found, "lab/", *online) == {}


def test_files_have_one_idea():
    def too_long(limit: int) -> Callable[[str], list[str]]:
        return lambda text: [f"{n} lines"] if (n := text.count("\n")) > limit else []

    assert too_long(2)("a\nb\nc\n")
    assert hits(too_long(MAX_LINES), ".py", *C_SUFFIXES) == {}
    assert hits(too_long(MAX_LINES), ".py", *C_SUFFIXES, root=ROOT / "tests") == {}
    rungs = hits(too_long(MAX_RUNG_LINES), ".cu")
    assert {path: n for path, n in rungs.items() if path.startswith("cuda/ladder/")} == {}


# ---- records and pages


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_record_has_an_idea_a_case_and_a_lesson(kernel):
    assert kernel.idea.strip()
    for dtype in kernel.dtypes:
        name = str(dtype).removeprefix("torch.")
        problems = (Problem(case.rows, case.cols, name) for case in CASES if case.size == "cpu")
        assert any(not kernel.reasons(problem) for problem in problems), f"no case in {dtype}"
    if kernel.rung:
        lesson = ROOT / "docs" / "lessons" / f"{kernel.name}.md"
        assert lesson.is_file(), f"docs/lessons/{kernel.name}.md is missing"


def test_public_names_are_the_documented_ones():
    """docs/api.md has one heading, ## `name...`, for each name of __all__, in its order."""
    page = (ROOT / "docs" / "api.md").read_text()
    assert re.findall(r"^## `(\w+)", page, flags=re.MULTILINE) == sorted(online_softmax.__all__)
    assert all(hasattr(online_softmax, name) for name in online_softmax.__all__)


def test_documents_are_what_the_generator_writes():
    documents = report.documents(report.stored())
    assert ROOT / "README.md" in documents
    stale = [path.name for path, text in documents.items() if path.read_text() != text]
    assert stale == [], "run `make readme`"


def test_pages_name_tests_that_there_are():
    assert missing_tests("tests/house.py, tests/house.py::none") == ["tests/house.py::none"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [wrong for page in pages for wrong in missing_tests(page.read_text())] == []


@pytest.mark.parametrize(
    "module",
    [
        "",
        ".api",
        ".attentions",
        ".explanation",
        ".invariance",
        ".library.override",
        ".linear",
        ".linearplan",
        ".losses",
        ".merging",
        ".stats",
        ".nn",
        ".plan",
        ".rowplan",
        ".rowchoice",
        ".reference.online",
        ".reference.ops",
        ".reference.outputs",
        ".attentionplan",
        ".lab.trace",
        ".lab.attentiontrace",
        ".lab.tracecli",
        ".lab.arguments",
        ".lab.benchplot",
        ".lab.benchtable",
        ".lab.chinese",
        ".lab.goals",
        ".lab.places",
        ".lab.verdicts",
    ],
)
def test_examples_in_docstrings_hold(module: str):
    tried = doctest.testmod(importlib.import_module(f"online_softmax{module}"), verbose=False)
    assert tried.attempted > 0
    assert tried.failed == 0
