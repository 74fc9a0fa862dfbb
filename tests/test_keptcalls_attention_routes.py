"""Where attention's kept calls are not taken, and what they hold and do beside other calls."""

from __future__ import annotations

import runpy
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import keptattention_kit
from keptattention_kit import (
    BF16,
    Notes,
    addresses,
    all_options,
    is_kept,
    tokens,
    tritonstub,
    with_all,
)
from online_softmax import attention, attentionkernels, keptcalls
from online_softmax.attentionarguments import check_options
from online_softmax.library import attention_routes
from online_softmax.triton import launcher

ROOT = Path(__file__).parents[1]
notes = keptattention_kit.notes  # a fixture


def test_what_is_refused_stays_refused(notes: Notes) -> None:
    q, k, v = tokens()
    for _ in range(3):
        attention(q, k, v, scale=1.0, window=(1, 1), causal=True)
        attention(q, k, v)
    for options, error in (
        ({"causal": 1}, ValueError),
        ({"scale": True}, TypeError),
        ({"scale": float("nan")}, ValueError),
        ({"window": (True, 1)}, ValueError),
        ({"empty": "none"}, ValueError),
        ({"kernel": "cuda"}, ValueError),
        ({"kernel": 0}, ValueError),
        ({"kernel": ""}, ValueError),
        ({"softcap": -1.0}, ValueError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            attention(q, k, v, **options)
    with pytest.raises(TypeError, match="q must be a Tensor"):
        attention(None, k, v)
    with pytest.raises(RuntimeError, match="one device"):
        attention(q, k.to("meta"), v)
    assert len(notes.started) == 6


def test_hooks_see_every_launch(notes: Notes) -> None:
    q, k, v = tokens()
    hook, seen = launcher.triton.knobs.runtime.launch_enter_hook, []
    for _ in range(3):
        attention(q, k, v)
    hook.add(seen.append)
    try:
        attention(q, k, v)
        assert notes.started[-1].hooks[0] is hook
        assert not is_kept(notes.started[-1:])
    finally:
        hook.remove(seen.append)
    attention(q, k, v)
    assert is_kept(notes.started[-1:])
    assert notes.started[-1].hooks == (None, None)


def test_another_current_device(notes: Notes) -> None:
    """The launch is on the tensors' device and its current stream, and the current device stays."""
    q, k, v = tokens()
    for _ in range(3):
        attention(q, k, v)
    notes.device_index = 1
    out = attention(q, k, v)
    assert is_kept(notes.started[-1:])
    assert notes.started[-1].stream == tritonstub.STREAM
    assert addresses(notes.started[-1])["out_ptr"] == out.data_ptr()
    assert notes.device_index == 1


def test_devices_are_told_apart() -> None:
    class OnDevice:
        dtype, shape = BF16, (1,)

        def __init__(self, index: int) -> None:
            self.device = torch.device("cuda", index)

        stride, data_ptr, is_neg = (lambda _: (1,)), (lambda _: 64), (lambda _: False)

    names = [keptcalls.name_of("attention", (), [OnDevice(i)])[0] for i in (0, 1, 0)]
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast(notes: Notes, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it casts, the checks come first; of what has its dtype already, nothing is cast."""
    q, k, v = tokens()
    for _ in range(3):
        attention(q, k, v)
    monkeypatch.setattr(attention_routes, "_is_autocast", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: dtype)
    arguments = (q, k, v, *[None] * 5), (False, None, None, None, "zero"), (0, 0), False, None
    assert (attention_routes.again(*arguments) is None) == (dtype != BF16)


def test_modes_and_transforms_take_their_routes(notes: Notes) -> None:
    q, k, v = tokens()
    for _ in range(3):
        attention(q, k, v)
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        attention(q, k, v)
    assert "online_softmax.attention.default" in seen
    out = torch.func.vmap(lambda each: attention(each, k, v))(torch.stack([q, q]))
    assert out.shape == (2, *q.shape)


def test_nothing_is_held(notes: Notes) -> None:
    for _ in range(3):
        tensors = all_options()
        made = with_all(*tensors)
    assert is_kept(notes.started[-1:])
    watched = [weakref.ref(t) for t in (*tensors, *made)]
    del tensors, made
    notes.started.clear()
    assert [each() for each in watched] == [None] * len(watched)


class Together(list[int]):
    """Addresses that two threads read at the same moment, one after the other."""

    barrier = threading.Barrier(2, timeout=20)

    def __getitem__(self, at: int) -> int:  # type: ignore[override]
        self.barrier.wait()
        return super().__getitem__(at)


def test_threads_do_not_meet(notes: Notes) -> None:
    """One kept call in two threads at once: each launch has the addresses of one call alone."""
    tensors = tokens(1, 600)
    for _ in range(3):
        attention(*tensors)
    known = keptcalls.find(
        attentionkernels.FORWARD,
        (check_options("attention", False, None, None, None, "zero"), False, ""),
        (*tensors, *[None] * 5),
    )
    assert known is not None
    notes.started.clear()
    (fold, *_), fresh, *_ = known[0]
    count = len(fresh) + len(attentionkernels.INPUTS)
    threads = [
        threading.Thread(target=fold, args=(number, Together([number * 100] * count)))
        for number in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.stream for each in notes.started} == {1, 2}
    for each in notes.started:
        assert {a // 100 * 100 for n, a in addresses(each).items() if n[0] in "qkv"} == {
            each.stream * 100
        }


@pytest.fixture
def ask_again() -> Iterator[None]:
    launcher.missing.cache_clear()
    yield
    launcher.missing.cache_clear()


def test_triton_has_what_is_needed(ask_again: None) -> None:
    assert launcher.missing() is None


@pytest.mark.parametrize("name", ["run", "launch_exit_hook", "CONVENTION"])
def test_what_another_triton_lacks(
    name: str, ask_again: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs
    from triton.compiler import CompiledKernel

    if name == "CONVENTION":
        monkeypatch.setattr(launcher, name, "kernel.run(everything)")
    else:
        where = CompiledKernel if name == "run" else type(knobs.runtime)
        monkeypatch.delattr(where, name)
    assert name.replace("CONVENTION", "kernel.run(everything)") in str(launcher.missing())


def test_where_triton_lacks_it_each_call_goes_the_ordinary_way(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "missing", lambda: "Triton has no launcher")
    q, k, v = tokens()
    for _ in range(4):
        attention(q, k, v)
    assert not keptcalls.kept
    assert not any(is_kept([each]) for each in notes.started)


def test_the_script_s_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "attention_host.py"))
    monkeypatch.setitem(script["least_us"].__globals__, "CALLS", 1)
    monkeypatch.setitem(script["least_us"].__globals__, "REPETITIONS", 2)
    monkeypatch.setattr("sys.argv", ["attention_host.py", "--stub", "--keys", "600"])
    script["main"]()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    figures = {row[0]: float(row[1]) for row in rows if len(row) > 1 and row[1][0].isdigit()}
    assert {"forward", "decode, 600 keys", "packed", "launch"} <= {n.strip() for n in figures}
    assert min(figures.values()) > 0
