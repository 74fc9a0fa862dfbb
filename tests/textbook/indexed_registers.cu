// The textbook's register cache: an array filled by a counter that only the run knows. The counter
// cannot be a register number, so the array lives in local memory: a stack frame, with 0 spills. And
// nothing stops it at the array's end when the row is longer than threads x 32.
#include "../../src/online_softmax/cuda/fold.cuh"

template <typename T>
__global__ void indexed_registers(const T* x, T* y, int64_t rows, int64_t cols,
                                  int64_t x_row_stride) {
  const T* x_row = x + blockIdx.x * x_row_stride;
  float cache[32];
  int count = 0;
  State s = empty();
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) {
    cache[count] = load(x_row + col);
    s = merge(s, lift(cache[count++]));
  }
  s = block_merge(s);
  count = 0;
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x)
    store(y + blockIdx.x * cols + col, prob(cache[count++], s));
}
