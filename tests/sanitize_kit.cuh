// What the drivers for compute-sanitizer share: checked calls, and elements to floats and back, which run
// on the GPU, so that the CPU side needs no half arithmetic.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../src/online_softmax/cuda/memory.cuh"

#define CHECK(call)                                                                         \
  do {                                                                                      \
    cudaError_t status = (call);                                                            \
    if (status != cudaSuccess) {                                                            \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (0)

template <typename T>
__global__ void to_type(const float* x, T* y, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) y[i] = narrow<T>(x[i]);
}
template <typename T>
__global__ void to_float(const T* x, float* y, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) y[i] = widen(x[i]);
}
