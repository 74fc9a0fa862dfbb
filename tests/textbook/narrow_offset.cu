// The textbook's row offset: a product of two 32-bit numbers. Past 2^31 elements it wraps.
#include "../../src/online_softmax/cuda/fold.cuh"

template <typename T>
__global__ void narrow_offset(const T* x, T* y, int64_t rows, int64_t cols, int64_t x_row_stride) {
  const int row = int(blockIdx.x), stride = int(uint32_t(x_row_stride));
  const T* x_row = x + int(uint32_t(row) * uint32_t(stride));  // wraps, as a GPU's int does
  State s = empty();
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x)
    s = merge(s, lift(load(x_row + col)));
  s = block_merge(s);
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x)
    store(y + row * cols + col, prob(load(x_row + col), s));
}
