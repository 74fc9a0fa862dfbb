"""The ceilings move what they say, by host execution: a wrong one would flatter every kernel."""

from __future__ import annotations

import os

import pytest
import torch

from online_softmax.cuda import host
from online_softmax.lab import ceilings

if host.compiler() is None and not os.environ.get("CI"):
    pytest.skip("no C++ compiler (apt-get install g++)", allow_module_level=True)

ELEMENTS = (4, 1024, 4 * 256 * 4 * 4 + 4)  # a vector, a block of copy, a last block of read


@pytest.mark.parametrize("elements", ELEMENTS)
def test_copy_and_add(elements: int):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(elements, generator=generator) for _ in range(2))
    c = torch.full((elements,), torch.nan)
    host.launch(ceilings.copy(a, c))
    assert torch.equal(c, a)
    host.launch(ceilings.add(a, b, c))
    assert torch.equal(c, a + b)


def test_bits_of_other_types_are_moved():
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    y = torch.zeros_like(x)
    host.launch(ceilings.copy(x, y))
    assert torch.equal(y, x)


@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_read_sees_every_vector(elements: int, where: float):
    """One vector anywhere that combines to the rare value is seen: so each one was read."""
    rare = torch.tensor([0x7FC12345], dtype=torch.int32)
    x, seen = torch.zeros(elements, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    x.view(-1, 4)[:, :2] = rare  # (0 * 0) ^ 0 ^ 0: changes nothing
    host.launch(ceilings.read(x, seen))
    assert int(seen) == 0
    vectors = x.view(-1, 4)
    vectors[round(where * (len(vectors) - 1)), 2] = rare
    host.launch(ceilings.read(x, seen))
    assert int(seen) == int(rare)
