// Emitting: what an operation writes for each element once the row's state is known.
#pragma once
#include "online.cuh"

// exp(x - m) / d
struct Softmax {
  State s;
  __device__ float operator()(float x) const { return prob(x, s); }
};

// The thread's vectors of columns [first, last), read again and written: see thread_fold.
template <bool READ_WHOLE, bool WRITE_WHOLE, typename T, typename Emit>
__device__ __forceinline__ void emit_vectors(const T* x_row, T* y_row, int64_t first, int64_t last,
                                             Emit emit) {
  constexpr int N = Vector<T>::N;
#pragma unroll 4
  for (int64_t col = first + threadIdx.x * N; col < last; col += blockDim.x * N) {
    float x[N];
    load_vector<READ_WHOLE>(x_row, col, last, x);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = emit(x[i]);
    store_vector<WRITE_WHOLE>(y_row, col, last, x);
  }
}

template <typename T, typename Emit>
__device__ __forceinline__ void thread_emit(const T* x_row, T* y_row, int64_t first, int64_t last,
                                            bool whole, Emit emit) {
  if (whole)
    emit_vectors<true, true>(x_row, y_row, first, last, emit);
  else
    emit_vectors<false, false>(x_row, y_row, first, last, emit);
}
