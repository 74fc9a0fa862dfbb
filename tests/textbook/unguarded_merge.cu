// The textbook's merge of two states: exp(m_a - m) with no guard. Two empty states give NaN.
#include "../../src/online_softmax/cuda/fold.cuh"

__device__ State textbook_merge(State a, State b) {
  const float m = maximum(a.m, b.m);
  return {m, a.d * exponential(a.m - m) + b.d * exponential(b.m - m)};
}

__device__ State textbook_warp(State s) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) {
    const State other = {__shfl_xor_sync(0xffffffffu, s.m, mask),
                         __shfl_xor_sync(0xffffffffu, s.d, mask)};
    s = textbook_merge(s, other);
  }
  return s;
}

template <typename T>
__global__ void unguarded_merge(const T* x, T* y, int64_t rows, int64_t cols,
                                int64_t x_row_stride) {
  SHARED_ARRAY(State, partial, MAX_WARPS);
  const T* x_row = x + blockIdx.x * x_row_stride;
  State s = lift(load(x_row + threadIdx.x));  // at least one element a thread
  for (int64_t col = threadIdx.x + blockDim.x; col < cols; col += blockDim.x)
    s = textbook_merge(s, lift(load(x_row + col)));
  s = textbook_warp(s);
  if (lane_id() == 0) partial[warp_id()] = s;
  __syncthreads();
  s = textbook_warp(lane_id() < warp_count() ? partial[lane_id()] : empty());
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x)
    store(y + blockIdx.x * cols + col, prob(load(x_row + col), s));
}
