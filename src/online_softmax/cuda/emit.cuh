// Emitting: what an operation writes for each element once the row's state is known.
#pragma once
#include "online.cuh"

// exp(x - m) / d
struct Softmax {
  State s;
  __device__ float operator()(float x) const { return prob(x, s); }
};

// ---- the same for row kernels, which write FROM_TERM, exp(x scale - shift) times a constant, or from
// x itself. `unit` times a term is exp(x scale - s.m). zero_empty: a row that is all -inf gives
// probabilities 0, not NaN.

struct EmitSoftmax {
  static constexpr bool FROM_TERM = true, WRITES_ROW = true;
  float factor;
  __device__ EmitSoftmax(State s, float unit, float, bool zero_empty)
      : factor(is_finite(s.m) ? unit / s.d
                              : (zero_empty && s.m == -infinity() ? 0.0f : not_a_number())) {}
  __device__ float operator()(float term) const { return term * factor; }
};

struct EmitLogSoftmax {
  static constexpr bool FROM_TERM = false, WRITES_ROW = true;
  float scale, m, log_d;
  __device__ EmitLogSoftmax(State s, float, float scale, bool zero_empty)
      : scale(scale), m(s.m), log_d(is_finite(s.m) ? natural_log(s.d) : not_a_number()) {
    if (zero_empty && s.m == -infinity()) m = log_d = 0.0f;  // x is -inf: -inf comes out
  }
  // x scale is rounded as m was, so that the maximum's own difference is 0.
  __device__ float operator()(float x) const { return (product(x, scale) - m) - log_d; }
};

struct EmitLse {  // one value a row
  static constexpr bool FROM_TERM = false, WRITES_ROW = false;
  float value;
  __device__ EmitLse(State s, float, float, bool) : value(lse(s)) {}
};

// ---- backward: dx = scale y (dy - sum(dy y)), or scale (dy - exp(y) sum(dy)) for log_softmax. With
// zero_empty a row whose result is that of an empty row (`top`: its largest y) has gradient 0.

struct BackwardSoftmax {
  float sum, scale;
  bool is_zero;
  __device__ BackwardSoftmax(float sum, float top, float scale, bool zero_empty)
      : sum(sum), scale(scale), is_zero(zero_empty && top == 0.0f) {}
  __device__ static float y_past_the_end() { return 0.0f; }
  // Rounded by itself, so that it does not matter whether it is added in a loop or past the words.
  __device__ static float term(float dy, float y) { return product(dy, y); }
  __device__ float operator()(float dy, float y) const {
    return is_zero ? 0.0f : scale * (y * (dy - sum));
  }
};

struct BackwardLogSoftmax {
  float sum, scale;
  bool is_zero;
  __device__ BackwardLogSoftmax(float sum, float top, float scale, bool zero_empty)
      : sum(sum), scale(scale), is_zero(zero_empty && top == -infinity()) {}
  __device__ static float y_past_the_end() { return -infinity(); }
  __device__ static float term(float dy, float) { return dy; }
  __device__ float operator()(float dy, float y) const {
    return is_zero ? 0.0f : scale * fused(-exponential(y), sum, dy);
  }
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
