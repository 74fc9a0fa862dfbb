// The gradient of logsumexp: dx = dlse scale exp(x scale - lse). x is (outer, cols, inner); lse and dlse
// have one value for each outer and inner position (inner 1: one a row). A thread owns the 16 bytes
// between two boundaries of dx: one read of x, one write of dx, at any alignment. No thread knows of
// another, so an element's bits follow from its own values.
#include "words.cuh"

// What all elements of one position share.
struct LseGradient {
  float lse, factor, scale;
  bool is_zero;  // an empty slice, with zero_empty
  __device__ __forceinline__ LseGradient(float lse, float dlse, float scale, int64_t zero_empty)
      : lse(lse),
        factor(dlse * scale),
        scale(scale),
        is_zero(zero_empty != 0 && lse == -infinity()) {}
  // x scale is rounded as the forward rounded it.
  __device__ __forceinline__ float operator()(float x) const {
    return is_zero ? 0.0f : exponential(product(x, scale) - lse) * factor;
  }
};

// N elements from any address. Two aligned words are fetched where both lie among the tensor's
// bytes; the second is the neighbour's first, from L1.
template <typename T>
__device__ __forceinline__ void load_anywhere(const T* at, const T* begin, const T* end,
                                              float (&x)[Vector<T>::N]) {
  constexpr int N = Vector<T>::N;
  const uint32_t phase = uint32_t(reinterpret_cast<uint64_t>(at) % VECTOR_BYTES);
  const T* low = at - phase / sizeof(T);
  if (phase == 0 || (low >= begin && end - low >= 2 * N)) {
    host::count_reads(N);
    const uint4* word = reinterpret_cast<const uint4*>(low);
    uint4 words = fetch16<false>(word);
    if (phase != 0) words = shifted<(sizeof(T) < 4)>(words, fetch16<false>(word + 1), phase);
    unpack<T>(words, x);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = load(at + i);
  }
}

// N values of neighbouring positions.
template <int N, typename T>
__device__ __forceinline__ void load_positions(const T* at, int64_t stride, float (&values)[N]) {
  static_assert(N % Vector<T>::N == 0, "whole words: T is no narrower than x's type");
  if (stride == 1 && reinterpret_cast<uint64_t>(at) % VECTOR_BYTES == 0) {
#pragma unroll
    for (int i = 0; i < N; i += Vector<T>::N) {
      float part[Vector<T>::N];
      load_vector<true>(at, i, N, part);
#pragma unroll
      for (int k = 0; k < Vector<T>::N; ++k) values[i + k] = part[k];
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = load(at + i * stride);
  }
}

template <typename X, typename G, bool INNER>
__global__ void __launch_bounds__(256)
    lse_backward(const X* __restrict__ x,        // (outer, plane), planes x_stride apart
                 const G* __restrict__ dlse,     // (outer x inner), dlse_stride apart
                 const float* __restrict__ lse,  // the same, lse_stride apart
                 X* __restrict__ dx,             // (outer, plane), contiguous
                 int64_t total,                  // outer x plane
                 int64_t plane,                  // cols x inner
                 int64_t inner, int64_t x_stride, int64_t dlse_stride, int64_t lse_stride,
                 float scale, int64_t zero_empty) {
  constexpr int N = Vector<X>::N;
  const int64_t lead = reinterpret_cast<uint64_t>(dx) % VECTOR_BYTES / sizeof(X);
  const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N - lead;
  if (first >= total) return;
  const int64_t start = first < 0 ? 0 : first;
  int64_t outer = start / plane, at = start - outer * plane;
  int64_t position = INNER ? at % inner : 0;
  auto gradient = [&](int64_t outer, int64_t position) {
    const int64_t index = INNER ? outer * inner + position : outer;
    return LseGradient(load(lse + index * lse_stride), load(dlse + index * dlse_stride), scale,
                       zero_empty);
  };
  float values[N];
  const bool is_whole = first >= 0 && first + N <= total;
  if (is_whole && at + N <= plane && (!INNER || position + N <= inner)) {
    const X* end = x + (total / plane - 1) * x_stride + plane;
    load_anywhere(x + outer * x_stride + at, x, end, values);
    if constexpr (INNER) {
      const int64_t index = outer * inner + position;
      float l[N], g[N];
      load_positions(lse + index * lse_stride, lse_stride, l);
      load_positions(dlse + index * dlse_stride, dlse_stride, g);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = LseGradient(l[i], g[i], scale, zero_empty)(values[i]);
    } else {
      const LseGradient of_row = gradient(outer, 0);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = of_row(values[i]);
    }
  } else {  // across the end of a row of positions, or of dx: one by one
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (first + i < 0 || first + i >= total) continue;
      values[i] = gradient(outer, position)(load(x + outer * x_stride + at));
      if (INNER && ++position == inner) position = 0;
      if (++at == plane) {
        at = 0;
        ++outer;
      }
    }
  }
  if (is_whole) {
    host::count_writes(N);
    store16(dx + first, pack<X>(values));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (first + i >= 0 && first + i < total) store(dx + first + i, values[i]);
  }
}
