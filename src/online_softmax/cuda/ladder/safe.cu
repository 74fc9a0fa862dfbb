// safe: three passes, the textbook's stable softmax. Maximum; sum of exp(x - m); write.
// One block a row. Each element is read three times and written once: 4 transfers, 2 exponentials.
#include "../fold.cuh"

template <typename T>
__global__ void safe(
    const T* __restrict__ x,  // (rows, cols) input, rows x_row_stride elements apart
    T* __restrict__ y,        // (rows, cols) output, contiguous
    int64_t rows, int64_t cols, int64_t x_row_stride) {
  const int64_t row = blockIdx.x;  // 64 bits before the multiplication: rows * cols may pass 2^31
  const T* x_row = x + row * x_row_stride;
  T* y_row = y + row * cols;

  float m = -infinity();
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x) m = maximum(m, load(x_row + col));
  m = block_fold<Maximum>(m);

  float d = 0.0f;
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x)
    d += exponential(load(x_row + col) - m);
  d = block_fold<Sum>(d);

  const State s = {m, d};
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x)
    store(y_row + col, prob(load(x_row + col), s));
}
