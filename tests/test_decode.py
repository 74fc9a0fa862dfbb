"""cuda/decode.cu: a few queries over many keys, by host execution and on a GPU, against the formula
in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_kit import INF, NAN, PLAIN, Inputs, few, written_out
from online_softmax import attention, attentionplan, decodekernels, decodeplan
from online_softmax.attentionplan import Options
from online_softmax.cuda import launch
from online_softmax.cuda.host import sanitizers
from online_softmax.cuda.launch import Launch
from online_softmax.keptcalls import Made
from rows_kit import DEVICES

close = torch.testing.assert_close
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KEYS = 64  # of a part, so that little is many
# Of a step's weights the last bit that 16-bit products see, of values of size 1 or so; and the
# rounding of the result.
EPSILON = {F16: 2.0**-10, BF16: 2.0**-7}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short parts, and few blocks, each of which has several parts."""
    planned = decodeplan.cut
    monkeypatch.setattr(decodeplan, "cut", lambda *sizes: planned(*sizes)._replace(keys=KEYS))
    monkeypatch.setattr(decodekernels, "multiprocessors_of", lambda x: 2)


def run(given: Inputs, o: Options = PLAIN, with_state: bool = False) -> tuple[Tensor, ...]:
    """(out, lse) and, with_state, (m, d); memory of the call's own is NaN before."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, NAN, dtype=dtype, device=device)

    tensors = (*given, None, None)
    assert not decodekernels.unfit(*tensors[:5], None)
    made, work = decodekernels.launches(tensors, o, with_state, empty)
    launch.run(work, given.q.device)
    return tuple(t for t in made if t is not None)


def check(given: Inputs, o: Options = PLAIN) -> None:
    """Against the formula, of the same 16-bit numbers, with states and without."""
    wide = Inputs(*(t if t is None or t.dtype == torch.bool else t.double() for t in given))
    out, lse = written_out(wide, o)
    got, got_lse, m, d = run(given, o, with_state=True)
    bound = EPSILON[given.q.dtype] * given.v.double().abs().max().item()
    close(got.double(), out, rtol=0, atol=bound, equal_nan=True)
    close(got_lse.double(), lse, rtol=2e-6, atol=2e-6)
    close(torch.where(m == -INF, -INF, m + d.log()), got_lse, rtol=2e-6, atol=2e-6)
    rounded, same_lse = run(given, o)
    assert rounded.dtype == given.q.dtype
    close(rounded, got.to(rounded.dtype), rtol=0, atol=0, equal_nan=True)
    close(same_lse, got_lse, rtol=0, atol=0)


@DEVICES
@pytest.mark.parametrize(
    ("o", "shapes"),
    [
        (PLAIN, {}),
        (PLAIN._replace(right=0), {"q_len": 4}),
        (PLAIN._replace(left=70), {"q_len": 2}),
        (PLAIN._replace(left=5, right=3), {"q_len": 4}),
        (PLAIN._replace(right=100, top_left=True), {"q_len": 3}),
        (PLAIN._replace(left=10, right=0, top_left=True, nan_empty=True), {"q_len": 4}),
        (PLAIN._replace(softcap=2.0, right=0), {"q_len": 2, "sinks": True}),
        (PLAIN._replace(scale=-0.3), {"sinks": True}),
        (PLAIN._replace(scale=0.0), {}),
        (PLAIN._replace(scale=3.0), {"group": 4}),
        (PLAIN, {"group": 8, "batch": 1}),
        (PLAIN._replace(right=0), {"group": 1, "q_len": 5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_option(device: str, dtype: torch.dtype, o: Options, shapes: dict[str, Any]) -> None:
    check(few(**{"q_len": 1, "k_len": 203, **shapes}).cast(dtype, device), o)


@DEVICES
@pytest.mark.parametrize(("dim", "rows"), [(64, 1), (64, 16), (128, 3), (128, 15), (256, 8)])
def test_dims_and_rows(device: str, dim: int, rows: int) -> None:
    """One product beside another where rows are more than 8; rows that fill none."""
    check(few(rows, 150, dim, 1, batch=1).cast(BF16, device), PLAIN._replace(right=0))


@DEVICES
@pytest.mark.parametrize("k_len", [65, 79, 80, 81, 127, 128, 129, 255, 257, 449])
def test_lengths_beside_steps_and_parts(device: str, k_len: int) -> None:
    check(few(1, k_len, batch=1).cast(F16, device))


@DEVICES
@pytest.mark.parametrize("dtype", [F32, F16, BF16, torch.float64], ids=str)
def test_sinks_of_any_type(device: str, dtype: torch.dtype) -> None:
    given = few(1, 100, sinks=True).cast(F16, device)
    assert given.sinks is not None
    check(given._replace(sinks=given.sinks.to(dtype)))
    large = given._replace(sinks=torch.full_like(given.sinks, 100.0, dtype=dtype))
    assert run(large)[0].abs().max() < 1e-6


@DEVICES
def test_any_strides(device: str) -> None:
    """Tokens before heads, a batch that is shared, and rows of a wider tensor."""
    q, k, v = few(2, 131).cast(BF16, device)[:3]
    want = run(Inputs(q, k, v), PLAIN)
    for change in (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.cat([t, t + 1], -1)[..., : t.shape[-1]],
        lambda t: torch.cat([t, t + 1], 2)[:, :, : t.shape[2]],
    ):
        close(run(Inputs(*map(change, (q, k, v)))), want, rtol=0, atol=0)
    shared = Inputs(q[:1].expand_as(q), k[:1].expand_as(k), v[:1].expand_as(v))
    close(run(shared)[0], want[0][:1].expand_as(q), rtol=0, atol=0)


@DEVICES
def test_bits_follow_from_the_sequence(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone or in a batch, whatever the blocks; twice."""
    given = few(3, 300, batch=3).cast(BF16, device)
    o = PLAIN._replace(right=0)
    want = run(given, o, with_state=True)
    close(run(given, o, with_state=True), want, rtol=0, atol=0)
    for count in (1, 3, 50):
        monkeypatch.setattr(decodekernels, "multiprocessors_of", lambda x, count=count: count)
        for i in range(3):
            alone = Inputs(*(t[i : i + 1].clone() for t in given[:3]))
            close(run(alone, o, True), tuple(t[i : i + 1] for t in want), rtol=0, atol=0)


@DEVICES
def test_values_beyond_numbers(device: str) -> None:
    """+inf among the scores of a row makes it NaN, a NaN too; the rows beside it stay; keys past
    the last that a query sees count for nothing, whatever they and their values hold."""
    given = few(1, 150, group=4).cast(BF16, device)
    clean = run(given)
    for value in (INF, NAN):
        k = given.k.clone()
        k[1, 0, 77, 3] = value
        out, lse = run(given._replace(k=k, q=given.q.abs()))
        assert out[1, :4].isnan().all()
        assert not out[0].isnan().any()
        assert not out[1, 4:].isnan().any()
        assert not lse[1, :4].isfinite().any()
    k, v = given.k.clone(), given.v.clone()
    k[:, :, 40:] = v[:, :, 40:] = NAN  # of keys that queries at the top left do not see
    o = PLAIN._replace(right=39, top_left=True)
    seen = Inputs(given.q, given.k[:, :, :40].clone(), given.v[:, :, :40].clone())
    wide = written_out(Inputs(*(t.double() for t in seen[:3])), PLAIN)[0]
    close(run(given._replace(k=k, v=v), o)[0].double(), wide, rtol=0, atol=2.0**-6)
    close(run(given), clean, rtol=0, atol=0)


@DEVICES
def test_large_scores(device: str) -> None:
    """Beyond what exp takes: m is taken off first, in each part."""
    given = few(1, 200).cast(BF16, device)
    check(given._replace(q=given.q * 300), PLAIN)
    for size in (1e9, 1e12, 1e30):
        out = run(given._replace(q=given.q * size))[0]
        wide = Inputs(*(t.double() for t in (given.q * size, *given[1:3])))
        close(out.double(), written_out(wide, PLAIN)[0], rtol=0, atol=2.0**-6)


def planned(given: Inputs, o: Options = PLAIN) -> tuple[Made, list[Launch]]:
    return decodekernels.launches(
        (*given, None, None), o, False, lambda *a: torch.empty(*a[:1], dtype=a[1])
    )


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize(("dim", "rows"), [(64, 2), (256, 3)])
def test_nothing_outside_and_no_race(dim: int, rows: int, sanitizer: str) -> None:
    """Two boards in turn (64), and one that is taken before it is put again (256)."""
    work = planned(few(rows, 203, dim, 1, batch=2).cast(BF16), PLAIN._replace(right=0))[1]
    report = sanitizers.sanitize(work, sanitizer=sanitizer)
    assert report.ok, report.text


def test_each_key_and_value_is_read_once() -> None:
    given = few(1, 333, 64, 4, batch=1).cast(F16)
    made, work = planned(given)
    counts = launch.run(work[:1], given.q.device)
    assert counts.reads == given.k.numel() + given.v.numel()
    parts, rows = -(-333 // KEYS), given.q[..., 0].numel()
    assert counts.writes == parts * rows * (64 + 2)
    merged = launch.run(work[1:], given.q.device)
    assert merged.writes == made[0].numel() + made[1].numel()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dtype": F32}, "float16 and bfloat16"),
        ({"dim": 96}, "head_dim of 64, 128, 256"),
        ({"value_dim": 128}, "this has 64, 128"),
        ({"q_len": 9, "group": 2}, "1 to 16 queries"),
        ({"k_len": KEYS}, "one part"),
        ({"bias": (1, 1, 1, 0)}, "no bias"),
        ({"mask": (1, 1, 1, 0)}, "no mask"),
        ({"q_len": 0}, "queries"),
    ],
)
def test_what_it_does_not_take(change: dict[str, Any], word: str) -> None:
    shapes = {"q_len": 1, "k_len": 200, **change}
    given = few(**{k: v for k, v in shapes.items() if k != "dtype"}).cast(shapes.get("dtype", BF16))
    (why,) = decodekernels.unfit(*given[:5], None)
    assert word in why


def test_rows_that_do_not_lie_on_vectors() -> None:
    given = few(1, 200).cast(BF16)
    odd = torch.cat([given.k, given.k], -1)[..., 1:65]
    assert "16 bytes" in decodekernels.unfit(given.q, odd, given.v, None, None, None)[0]
    assert "packed" in decodekernels.unfit(*given[:5], torch.empty(2))[0]


@pytest.mark.parametrize(
    ("batch", "k_len"),
    [(1, 2**30 + 1), (2**23 + 1, 8192), (2**29, 65)],
    ids=["keys", "parts", "blocks of a merge"],
)
def test_more_than_it_counts(batch: int, k_len: int) -> None:
    """Tensors as large as no GPU holds, but for expanded ones."""
    one = torch.empty((1, 1, 1, 64), dtype=BF16, device="meta")
    q, k = one.expand(batch, 4, 1, 64), one.expand(batch, 1, k_len, 64)
    (why,) = decodekernels.unfit(q, k, k, None, None, None)
    assert "more keys or parts" in why
    assert not decodekernels.unfit(q[:256], k[:256, :, :4096], k[:256, :, :4096], None, None, None)


def test_by_name_on_a_cpu() -> None:
    given = few(1, 200).cast(BF16)
    with pytest.raises(ValueError, match="kernel 'cuda' cannot run this"):
        attention(*given[:3], kernel="cuda")


@pytest.mark.parametrize("dim", decodeplan.DIMS)
def test_the_plan(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts follow from the number of keys, are whole steps, and never too many."""
    monkeypatch.undo()
    for rows in (1, 8, 16)[: 1 + decodeplan.tiles(dim)]:
        for k_len in (1, 256, 4096, 4097, 65_536, 524_288, 1 << 20, 10_000_000):
            cut = decodeplan.cut(dim, rows, k_len)
            assert cut.keys % 16 == 0
            assert cut.keys * attentionplan.MAX_PARTS >= k_len
            assert cut.warps * cut.resident * 32 * 128 <= 65_536
