// v3: the row stays in registers between the fold and the write: one read, one write, the least
// there is. Limit: cols <= threads x VECTORS x elements a vector, at most 32 elements a thread.
#include "../emit.cuh"
#include "../fold.cuh"

// VECTORS and every index into `cache` are known at compile time: an array indexed at run time
// would land in local memory, which is device memory again.
template <bool READ_WHOLE, bool WRITE_WHOLE, int VECTORS, typename T>
__device__ __forceinline__ void cached_row(const T* x_row, T* y_row, int cols) {
  constexpr int N = Vector<T>::N;
  const int first = int(threadIdx.x) * N, step = int(blockDim.x) * N;
  float cache[VECTORS * N];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    float (&x)[N] = *reinterpret_cast<float (*)[N]>(&cache[v * N]);
    load_vector<READ_WHOLE>(x_row, first + v * step, cols, x);
  }

  const State s = block_merge(of(cache));

  const Softmax emit = {s};
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    float (&x)[N] = *reinterpret_cast<float (*)[N]>(&cache[v * N]);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = emit(x[i]);
    store_vector<WRITE_WHOLE>(y_row, first + v * step, cols, x);
  }
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(MAX_THREADS)
    v3_register_cache(const T* __restrict__ x,  // (rows, cols) input, rows x_row_stride apart
                      T* __restrict__ y,        // (rows, cols) output, contiguous
                      int64_t rows, int64_t cols, int64_t x_row_stride) {
  const int64_t row = blockIdx.x;
  const T* x_row = x + row * x_row_stride;
  T* y_row = y + row * cols;
  if (is_whole(x_row, cols) && is_whole(y_row, cols))
    cached_row<true, true, VECTORS>(x_row, y_row, int(cols));
  else
    cached_row<false, false, VECTORS>(x_row, y_row, int(cols));
}
