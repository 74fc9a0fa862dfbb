// What memory alone allows for the other traffic mixes: two reads and a write, and a read.
#include "../../../src/online_softmax/cuda/memory.cuh"

// 16 bytes a thread.
__global__ void add(const float4* __restrict__ a, const float4* __restrict__ b,
                    float4* __restrict__ c, int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= vectors) return;
  const float4 u = a[i], v = b[i];
  c[i] = {u.x + v.x, u.y + v.y, u.z + v.z, u.w + v.w};
}

// 64 bytes a thread; `out` is written only if a word has a value that random data never has, so that
// the loads are kept.
__global__ void read(const uint4* __restrict__ x, float* out, int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x * 4 + threadIdx.x;
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int64_t j = i + k * blockDim.x;
    if (j < vectors) {
      const uint4 v = x[j];
      bits |= (v.x ^ 0x7fc12345u) * (v.y ^ 0x7fc12345u) ^ v.z ^ v.w;
    }
  }
  if (bits == 0x7fc12345u) out[0] = 1.0f;
}
