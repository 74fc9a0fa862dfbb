"""Attention's Triton kernels built for architectures, without a GPU: what they take of it."""

from __future__ import annotations

import pytest
import torch

from online_softmax import jit
from online_softmax.arches import ARCHES
from online_softmax.triton import TRITON_TYPE

builds = pytest.importorskip("online_softmax.triton.attention_builds")
Build = builds.Build
BF16, F32 = torch.bfloat16, torch.float32

KERNELS = {
    "forward": {"forward"},
    "decode": {"forward", "merge_parts"},
    "backward": {"prepare", "by_keys", "by_queries"},
}
BUILDS = [
    *(Build(what, BF16, "sm_90a", 128) for what in KERNELS),
    Build("forward", BF16, "sm_90a", 128, has_all=True),
    Build("backward", torch.float16, "sm_90a", 80, has_all=True),
    Build("backward", F32, "sm_90a", 64),
    Build("backward", BF16, "sm_80", 64, causal=False, is_packed=True),
    Build("forward", BF16, "sm_86", 64, is_packed=True),
    Build("decode", BF16, "sm_90a", 128, is_packed=True),
]
# Bytes of spilled registers that the tables have, the fastest tiles by the clock all the same; the
# other kernels have none.
SPILLS = {"by_keys": 384}
SPILLS_OF_ALL = 1024


@pytest.fixture(scope="module")
def figures() -> list[tuple[Build, dict[str, jit.Resources | str]]]:
    return list(zip(BUILDS, builds.compile_all(BUILDS), strict=True))


def test_every_call_builds_and_fits(figures: list) -> None:
    for build, found in figures:
        wanted = set(KERNELS[build.direction])
        wanted |= {"by_bias"} if build.has_all and build.direction == "backward" else set()
        assert set(found) == wanted, (build, found)
        for kernel, figure in found.items():
            assert not isinstance(figure, str), figure
            assert figure.shared_bytes <= ARCHES[build.arch].shared_bytes_block, (build, kernel)
            allowed = SPILLS_OF_ALL if build.has_all else SPILLS.get(kernel, 0)
            assert figure.spill_store_bytes <= allowed, (build, kernel, figure)


def test_a_refused_build_says_why() -> None:
    (found,) = builds.compile_all([Build("forward", BF16, "sm_999", 64)])
    assert all("sm_999" in figure for figure in found.values())


def test_all_types_have_a_name() -> None:
    assert set(TRITON_TYPE) <= set(builds.POINTER)
