"""The page of trace --html computes what Python does: steps, tree, attention, texts of numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from browser_kit import open_page
from online_softmax.attentionplan import Options
from online_softmax.lab import arguments, attentiontrace, trace
from online_softmax.lab.attentiontrace import Sizes
from online_softmax.lab.inputs import BadInput
from online_softmax.reference import attention
from online_softmax.reference.online import State, join
from trace_kit import alike, written

INF, NAN = math.inf, math.nan
NASTY = [
    [1.0, 5.0, 3.0, 9.0, 2.0],
    [-INF], [INF], [NAN], [0.0], [-0.0, 0.0],
    [-INF, -INF, -INF, 3.0], [3.0, -INF, -INF, -INF], [-INF, -INF],
    [1.0, INF, 2.0], [INF, INF], [INF, -INF], [NAN, INF], [INF, NAN], [-INF, NAN], [1.0, NAN, 2.0],
    [1e30, -1e30, 1e30], [3.4028235e38, -3.4028235e38], [1e39, 1.0], [-1e39, -INF], [1e-45, -1e-45],
    [1000.0, 1001.0, 999.0], [-1000.0, -1001.0], [88.7, 88.7], [88.8], [-90.0, -100.0],
    [7.0] * 9, [1e7, 1e7 + 1, 1e7 - 1], [0.1, 0.2, 0.3], [16777217.0, 16777216.0],
]  # fmt: skip
SENTENCES = [[100, -1], [88.7, 88.7], [-200, -INF], [1, 5], [INF, 1], [INF, NAN], [-INF]]
NUMBERS = [
    0.0, -0.0, 1.0, -1.5, 9.021802, 1e-5, 0.0001, 123456.7, 1234567.0, 12345678.0, 9999999.5,
    0.00048828125, 1.00000025, 3.4028234663852886e38, 1e-45, -2.5, 0.5, 1e16, 1e22, INF, -INF, NAN,
]  # fmt: skip


def rows() -> Iterator[tuple[list[float], int]]:
    """Numbers and a block: nasty ones, and random ones with some of these among them."""
    draw = random.Random(0)
    for values in NASTY:
        for block in dict.fromkeys((1, 2, 3, len(values))):
            yield values, min(block, len(values))
    special = (-INF, INF, NAN, 1e30, -1e30, 0.0)
    for _ in range(60):
        count = draw.randint(1, 40)
        values = [draw.uniform(-20, 20) for _ in range(count)]
        for i in range(count):
            if draw.random() < 0.1:
                values[i] = draw.choice(special[: draw.randint(1, 6)])
        yield values, draw.randint(1, count)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("page"))


def test_every_step_of_a_row_is_python_s(path: Path):
    given = list(rows())
    with open_page(path) as page:
        found = page.evaluate(
            "given => given.map(([x, block]) => onlineSoftmax.trace(x, block))", given
        )
    assert len(found) == len(given) > 100
    for (values, block), got in zip(given, found, strict=True):
        want = asdict(trace.trace(values, block))
        assert [step["m"] for step in got["steps"]] == pytest.approx(
            [step["m"] for step in want["steps"]], rel=0, abs=0, nan_ok=True
        )
        for one, other in zip(got["steps"], want["steps"], strict=True):
            if not math.isfinite(other["m"]):
                one["d"] = other["d"] = 0  # means nothing
        alike(got, want)


def test_float64_and_the_tree(path: Path):
    given = [(values, block, kind) for values, block in rows() for kind in ("float32", "float64")]
    with open_page(path) as page:
        found = page.evaluate(
            """given => given.map(([x, block, type]) => {
              const { root, nodes, leaves } = onlineSoftmax.tree(x, block, type);
              const { steps, probabilities } = onlineSoftmax.trace(x, block, type);
              const bare = ({ first, last, m, d, weights, parts }) =>
                ({ first, last, m, d, weights, parts: parts.map((each) => nodes.indexOf(each)) });
              return { root: bare(root), nodes: nodes.map(bare), leaves, probabilities,
                       last: steps.at(-1) };
            })""",
            given,
        )
    for (values, block, kind), got in zip(given, found, strict=True):
        x = torch.tensor(values, dtype=getattr(torch, kind))
        rel = 3e-6 if kind == "float32" else 1e-14
        states = [State.of(part) for part in x.split(block)]
        assert got["leaves"] == len(states)
        assert len(got["nodes"]) == 2 * len(states) - 1
        for node in got["nodes"]:
            parts = states[node["first"] : node["last"] + 1]
            want = parts[0].merge(*parts[1:])
            assert node["m"] == pytest.approx(want.m.item(), rel=0, abs=0, nan_ok=True)
            if want.m.isfinite():
                alike(node["d"], want.d.item(), rel)
            if node["parts"]:
                ms = [torch.tensor(got["nodes"][i]["m"], dtype=x.dtype) for i in node["parts"]]
                alike(node["weights"], [weight.item() for weight in join(*ms)[1:]], rel)
        whole = State.of(x)
        alike(got["root"]["m"], whole.m.item(), 0)
        alike(got["probabilities"], whole.softmax(x).tolist(), rel)
        if whole.m.isfinite():
            alike([got["root"]["d"], got["last"]["d"]], [whole.d.item()] * 2, rel)


def test_attention_is_python_s(path: Path):
    given = [
        Sizes(), Sizes(is_causal=True), Sizes(queries=1), Sizes(keys=7, block=2),
        Sizes(keys=3, block=8), Sizes(queries=4, keys=2, is_causal=True),
        Sizes(5, 9, 3, 1, 4, True), Sizes(8, 32, 16, 8, 5),
    ]  # fmt: skip
    with open_page(path) as page:
        found = page.evaluate(
            """given => given.map((sizes) => onlineSoftmax.attention({
              ...onlineSoftmax.rule(sizes), block: sizes.block, causal: sizes.is_causal }))""",
            [asdict(sizes) for sizes in given],
        )
    for sizes, got in zip(given, found, strict=True):
        want = asdict(attentiontrace.walk(sizes))
        for key in ("sizes", "q", "k", "v", "largest_difference"):
            del want[key]
        want["masked"] = list(want["masked"])
        alike(got, want, least=2e-6)  # sums of signed numbers
        assert got["largest_difference"] < 1e-5


def test_attention_with_a_mask(path: Path):
    """Against the reference's, any values; a query that sees nothing gives 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (7, 4), (7, 2))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    mask = torch.rand(3, 7, generator=generator) < 0.6
    mask[1] = False
    with open_page(path) as page:
        for causal in (False, True):
            got = page.evaluate(
                "given => onlineSoftmax.attention(given)",
                {
                    "q": q.tolist(), "k": k.tolist(), "v": v.tolist(), "mask": mask.tolist(),
                    "block": 3, "causal": causal,
                },
            )  # fmt: skip
            o = Options(0, 0, None, -1, 0 if causal else -1, False, None, False)
            tensors = (t[None, None] for t in (q, k, v))
            want = attention.forward(*tensors, None, mask[None, None], None, o)
            out, lse = want.out[0, 0], want.lse[0, 0]
            alike([row["output"] for row in got["rows"]], out.tolist(), 1e-5, 1e-6)
            alike([row["merged_output"] for row in got["rows"]], out.tolist(), 1e-5, 1e-6)
            alike([row["lse"] for row in got["rows"]], lse.tolist(), 1e-5, 1e-6)
            assert got["rows"][1]["output"] == [0, 0]
            assert all(math.isnan(value) for value in got["rows"][1]["plain"])


def test_numbers_are_written_and_read_as_python_does(path: Path):
    draw = random.Random(1)
    values = NUMBERS + [draw.uniform(-1, 1) * 10.0 ** draw.randint(-40, 38) for _ in range(300)]
    values += [draw.randint(1, 4095) / 2.0 ** draw.randint(1, 20) for _ in range(300)]  # ties
    texts = ["1 5 3", "[1,-5, 3]", "(2)", "-inf +inf nan -nan Infinity", "1e30 .5 5. 1_000 -.5E-3"]
    wrong = ["two", "1 1e", "1__0", "0x10", "--3", "inff", ".", "1.2.3", "x" * 70, "∞"]
    with open_page(path) as page:
        for digits in (4, 5, 7, 10):
            given = "([values, digits]) => values.map((x) => onlineSoftmax.general(x, digits))"
            got = page.evaluate(given, [values, digits])
            assert got == [f"{value:.{digits}g}" for value in values]
        for text in texts:
            alike(page.evaluate("onlineSoftmax.numbers", text), arguments.numbers([text]), 0, 0)
        assert page.evaluate("onlineSoftmax.numbers", "１，−2") == [1, -2]
        for text in wrong:
            with pytest.raises(BadInput) as refused:
                arguments.numbers([text])
            page.fill("#numbers", text)
            assert page.locator("#numbers-error").inner_text() == str(refused.value)


def test_it_says_what_naive_exponentials_would_do(path: Path):
    with open_page(path, locale="en-US") as page:
        for values in SENTENCES:
            page.fill("#numbers", " ".join(map(str, values)))
            said = trace._naive_sentence(values, trace.trace(values, len(values)))
            assert said in page.locator("#said").inner_text()
        page.fill("#numbers", "1e39 1")
        assert "1e+39 is past the largest float32: it is taken as infinite." in (
            page.locator("#said").inner_text()
        )
        page.get_by_role("button", name="float64").click()
        assert "past the largest" not in page.locator("#said").inner_text()
        assert "overflows, as all past 709.78" in page.locator("#said").inner_text()
