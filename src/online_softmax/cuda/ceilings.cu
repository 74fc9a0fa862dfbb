// The ceilings: kernels that only move memory, timed beside the others as what the card can do.
// Vectors of 16 bytes on a plain grid, which beats a persistent loop on pure streams here.
#include "memory.cuh"

constexpr int READ_VECTORS = 4;         // a thread of `read` has under way at once
constexpr uint32_t RARE = 0x7fc12345u;  // a NaN's bits that no arithmetic makes

// One read, one write: 16 bytes a thread.
__global__ void copy(const uint4* __restrict__ x,  // (vectors) input
                     uint4* __restrict__ y,        // (vectors) output
                     int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < vectors) store16(y + i, x[i]);
}

// Two reads, one write: c = a + b in float32, 16 bytes of each a thread.
__global__ void add(const uint4* __restrict__ a,  // (vectors) input
                    const uint4* __restrict__ b,  // (vectors) input
                    uint4* __restrict__ c,        // (vectors) output
                    int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  float u[Vector<float>::N], v[Vector<float>::N];
  unpack<float>(a[i], u);
  unpack<float>(b[i], v);
#pragma unroll
  for (int k = 0; k < Vector<float>::N; ++k) u[k] += v[k];
  store16(c + i, pack<float>(u));
}

// One read: 64 bytes a thread. `seen` is written where a thread's words combine to RARE, one thread
// in 2^32; the test keeps the compiler from dropping the loads.
__global__ void read(const uint4* __restrict__ x,  // (vectors) input
                     uint32_t* __restrict__ seen,  // (1) output
                     int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x * READ_VECTORS + threadIdx.x;
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < READ_VECTORS; ++k) {
    const int64_t j = i + int64_t(k) * blockDim.x;
    if (j < vectors) {
      const uint4 words = x[j];
      bits ^= (words.x ^ RARE) * (words.y ^ RARE) ^ words.z ^ words.w;
    }
  }
  if (bits == RARE) *seen = bits;
}
