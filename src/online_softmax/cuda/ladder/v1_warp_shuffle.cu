// v1: one block a row, a state per thread, states merged by warp shuffles and then across warps
// through shared memory. Neighbouring threads read neighbouring elements: every byte moved is used.
#include "../fold.cuh"

template <typename T>
__global__ void v1_warp_shuffle(
    const T* __restrict__ x,  // (rows, cols) input, rows x_row_stride apart
    T* __restrict__ y,        // (rows, cols) output, contiguous
    int64_t rows, int64_t cols, int64_t x_row_stride) {
  const int64_t row = blockIdx.x;
  const T* x_row = x + row * x_row_stride;
  T* y_row = y + row * cols;

  State s = empty();
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x)
    s = merge(s, lift(load(x_row + col)));  // the bare recurrence: 2 exponentials an element
  s = block_merge(s);

  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x)
    store(y_row + col, prob(load(x_row + col), s));
}
