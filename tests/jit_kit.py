"""What the tests of jit share: small kernels in a file, a cache of their own, NVRTC or a skip."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from online_softmax import jit, jit_cache, jit_compile

ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")

FACTOR = "constexpr float FACTOR = 2.0f;\n"
KERNELS = r"""
#include "inc/factor.cuh"

template <typename T>
__global__ void scale(const T* x, T* y, long long n, float by) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = T(float(x[i]) * by * FACTOR);
}

extern "C" __global__ void plain(float* y) { y[threadIdx.x] = 1.0f; }

template <int N>
__global__ void shared_static(float* y) {
  __shared__ float row[N];
  row[threadIdx.x % N] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = row[(threadIdx.x + 1) % N];
}

// The textbook register cache: the index is known only when it runs, so the array is in memory.
template <int N>
__global__ void cache_by_count(const float* x, float* y, long long n) {
  float kept[N];
  for (int i = 0; i < n; i++) kept[i] = x[i * blockDim.x + threadIdx.x];
  for (int i = 0; i < n; i++) y[i * blockDim.x + threadIdx.x] = kept[(i + 1) % N];
}

template <int N>
__global__ void cache_unrolled(const float* x, float* y, long long n) {
  float kept[N];
#pragma unroll
  for (int i = 0; i < N; i++) kept[i] = i < n ? x[i * blockDim.x + threadIdx.x] : 0.0f;
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (i < n) y[i * blockDim.x + threadIdx.x] = kept[(i + 1) % N];
  }
}

// Dynamic shared memory: n ints written forwards, read backwards.
template <int N>
__global__ void reverse(int* y, long long n) {
  extern __shared__ int kept[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) kept[i] = i + N;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = kept[n - 1 - i];
}

// Every block waits for all others: it ends only if they live at once.
template <int N>
__global__ void meet(int* arrived, int* y) {
  if (threadIdx.x == 0) {
    atomicAdd(arrived, N);
    while (atomicAdd(arrived, 0) < N * (int)gridDim.x) {
    }
    y[blockIdx.x] = 1;
  }
}

#if __CUDA_ARCH__ >= 900
// y[block] = 1000 * blocks a cluster + rank in the cluster.
template <int N>
__global__ void cluster_shape(int* y) {
  unsigned size, rank;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
  if (threadIdx.x == 0) y[blockIdx.x] = N * size + rank;
}

// Two links of a chain of dependent launches: each starts early, waits, and adds N to all of y.
template <int N>
__global__ void add(int* y, long long n) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = (y[i] + N) % 1000003 * 3;
}
#endif
"""


@dataclass(frozen=True)
class Work:
    """A launch, as jit.launch reads it."""

    file: str
    symbol: str
    args: tuple[Any, ...]
    grid: int = 1
    block: int = 32
    cluster: int = 1
    shared_bytes: int = 0
    cooperative: bool = False
    dependent: bool = False


def run(script: str, **environment: str) -> str:
    """Run Python with the package on its path; warnings are errors there."""
    paths = os.pathsep.join([str(Path(jit.__file__).parents[1]), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", script],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing left in memory by the test before."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ONLINE_SOFTMAX_CACHE_DIR", str(folder))
    monkeypatch.setattr(jit_cache, "_TOLD", set())
    jit_compile.forget_images()
    return folder


@pytest.fixture
def nvrtc() -> str:
    """NVRTC's version. Without one a test has nothing to run, which CI must not overlook."""
    try:
        return jit.nvrtc_version()
    except jit.Unavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture
def cu_file(nvrtc: str, fresh_cache: Path, tmp_path: Path) -> str:
    """The path of a .cu file with the kernels above, and an include beside it."""
    folder = tmp_path / "source"
    (folder / "inc").mkdir(parents=True)
    (folder / "inc" / "factor.cuh").write_text(FACTOR)
    (folder / "kernels.cu").write_text(KERNELS)
    return str(folder / "kernels.cu")
