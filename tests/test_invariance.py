"""batch_invariant: call, block and environment variable; who sees it; what it changes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import jit_kit
import jit_notes
from jit_notes import Built, Notes
from online_softmax import batch_invariant, explain, invariance, rowkernels, rowops, softmax

fresh_cache, nvrtc = jit_kit.fresh_cache, jit_kit.nvrtc  # fixtures
notes, built = jit_notes.notes, jit_notes.built
COLS = 32_000  # in 16-bit types: few rows have another cut


def is_on() -> bool:
    return invariance.setting.is_on


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    assert is_on()
    yield
    invariance.setting.is_on = True


def test_a_call_stays_and_a_block_ends() -> None:
    batch_invariant(False)
    assert not is_on()
    batch_invariant(True)
    assert is_on()
    with batch_invariant(False):
        assert not is_on()
    assert is_on()


def test_blocks_nest_and_end_with_an_exception() -> None:
    with batch_invariant(False):
        with batch_invariant(True):
            assert is_on()
            with pytest.raises(KeyError), batch_invariant(False):
                raise KeyError
            assert is_on()
        assert not is_on()
        batch_invariant(True)  # for the rest of the block
        assert is_on()
    assert is_on()
    batch_invariant(False)
    with batch_invariant(True):
        pass
    assert not is_on()


def test_one_may_be_entered_again() -> None:
    off = batch_invariant(False)
    with off:
        with off:
            assert not is_on()
        assert not is_on()
    assert is_on()
    with off:
        assert not is_on()
    assert is_on()


@pytest.mark.parametrize("wrong", [0, 1, None, "no"])
def test_anything_but_a_bool_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"batch_invariant\(\): is_on must be True or False, got"):
        batch_invariant(wrong)
    assert is_on()


def test_every_thread_sees_it() -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(is_on())

    for wanted in (False, True):
        with batch_invariant(wanted):
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
    assert seen == [False, True]


def test_the_environment_says_how_a_process_begins() -> None:
    said = {text: invariance.from_environment(text) for text in (None, "", "1", "0")}
    assert said == {None: True, "": True, "1": True, "0": False}
    with pytest.raises(ValueError, match="ONLINE_SOFTMAX_BATCH_INVARIANT must be 0 or 1, got 'no'"):
        invariance.from_environment("no")
    program = "import online_softmax as o; print(o.invariance.setting.is_on)"
    environment = {**os.environ, invariance.VARIABLE: "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", program]
    said_so = subprocess.check_output(command, text=True, env=environment, timeout=120)
    assert said_so == "False\n"


# ---- what it changes


def test_few_rows_of_16_bits_alone_have_another_cut() -> None:
    def cut(op: str, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> object:
        return rowkernels.numbers(op, torch.empty(rows, cols, dtype=dtype, device="meta"))

    same = [("softmax", 17, COLS), ("softmax", 1, COLS + 1), ("softmax", 1, 4096)]
    same += [("logsumexp", 1, COLS), ("softmax_backward", 1, COLS)]
    before = [cut(*each) for each in same]
    one, float32 = cut("softmax", 1, COLS), cut("softmax", 1, COLS, torch.float32)
    with batch_invariant(False):
        assert [cut(*each) for each in same] == before
        assert cut("softmax", 1, COLS, torch.float32) == float32
        for op in ("softmax", "log_softmax"):
            few = cut(op, 16, COLS)
            assert (few.vectors, few.block, few.cluster) == (4, 128, 8)
            assert few == cut(op, 1, COLS)
    assert cut("softmax", 1, COLS) == one
    assert one.vectors == 8


def test_a_call_like_one_before_asks_again(built: Built, notes: Notes) -> None:
    x = torch.randn(2, COLS).bfloat16()

    def threads(is_invariant: bool) -> int:
        with batch_invariant(is_invariant):
            softmax(x)
        return notes.launches[-1].threads

    on = {threads(True) for _ in range(3)}
    assert built.count == 2
    off = {threads(False) for _ in range(3)}
    assert built.count == 4
    assert (len(on), off) == (1, {128})
    assert {threads(True)} == on
    assert {threads(False)} == off
    assert built.count == 4
    assert on != off


def test_explain_says_what_the_other_setting_would_do() -> None:
    other = "  with batch_invariant(False): 8 blocks a row, 128 threads of 4 vectors; other bits"
    assert other in explain(4, COLS, "bfloat16").splitlines()
    assert "batch_invariant" not in explain(17, COLS, "bfloat16")
    assert "batch_invariant" not in explain(4, COLS, "bfloat16", "sm_80")
    planned = explain(4, COLS, "bfloat16").splitlines()[0].removeprefix("registers: ")
    with batch_invariant(False):
        first, *rest = explain(4, COLS, "bfloat16").splitlines()
        assert first.startswith("registers: few rows, batch invariance off: 8 blocks a row")
        assert f"  with batch_invariant(True): {planned}" in rest
        assert "batch_invariant" not in explain(17, COLS, "bfloat16")


# ---- torch.compile


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The setting at each softmax that runs."""
    found: list[bool] = []
    original = rowops.forward

    def forward(*arguments):
        found.append(is_on())
        return original(*arguments)

    monkeypatch.setattr(rowops, "forward", forward)
    torch._dynamo.reset()
    return found


def test_a_compiled_function_asks_when_it_runs(seen: list[bool]) -> None:
    compiled = torch.compile(lambda x: softmax(x) + 1, fullgraph=True, backend="eager")
    for is_invariant in (True, False, True):
        with batch_invariant(is_invariant):
            compiled(torch.zeros(3))
    assert seen == [True, False, True]


def test_inside_a_compiled_function_the_graph_breaks(seen: list[bool]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = softmax(x)
        with batch_invariant(False):
            y = y + softmax(x)
        return y + softmax(x)

    torch.compile(function, backend="eager")(torch.zeros(3))
    assert seen == [True, False, True]
    assert is_on()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(3))
    assert is_on()
