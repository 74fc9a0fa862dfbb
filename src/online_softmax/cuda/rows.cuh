// A share of a row folded, and emitted: what the row kernels have in common.
#pragma once
#include "exchange.cuh"
#include "share.cuh"

// exp(x scale - shift) = 2^(x c - product), c = scale log2(e), product = round(shift c): one FFMA and
// one exponential an element. What rounding the product loses, `lost`, is known exactly and the same
// for all elements, so it is taken back once a row: no error grows with |x|. Where it is too large for
// that (|x| past 10^7, or a product past float's range), the shift is subtracted first: two operations.
struct Shift {
  float raw, c, product, lost;
  __device__ Shift(float raw_max, float scale)
      : raw(is_finite(raw_max) ? raw_max : 0.0f), c(scale * LOG2_E) {
    product = raw * c;
    lost = fused(raw, c, -product);
  }
  __device__ bool is_coarse() const { return !(lost > -1.0f && lost < 1.0f); }
  __device__ float exponent(float x) const { return fused(x, c, -product); }
  __device__ float exponent_if_coarse(float x) const { return (x - raw) * c; }
  // What 2^exponent must be multiplied with to be exp(x scale - shift).
  __device__ float back() const { return is_coarse() ? 1.0f : exponential2(-lost); }
};

// A share folded: its state, in natural units, and how its terms were shifted.
struct Folded {
  State s;
  Shift shift;
};

// The largest of 16-byte words; 16-bit types two at a time.
template <typename X, int VECTORS>
__device__ __forceinline__ float largest(const uint4 (&share)[VECTORS]) {
  if constexpr (sizeof(X) == 4) {
    float m[4] = {bits_to_float(share[0].x), bits_to_float(share[0].y), bits_to_float(share[0].z),
                  bits_to_float(share[0].w)};
#pragma unroll
    for (int v = 1; v < VECTORS; ++v) {
      m[0] = maximum(m[0], bits_to_float(share[v].x));
      m[1] = maximum(m[1], bits_to_float(share[v].y));
      m[2] = maximum(m[2], bits_to_float(share[v].z));
      m[3] = maximum(m[3], bits_to_float(share[v].w));
    }
    return maximum(maximum(m[0], m[1]), maximum(m[2], m[3]));
  } else {
    uint4 m = share[0];
#pragma unroll
    for (int v = 1; v < VECTORS; ++v)
      m = {maximum_pair<X>(m.x, share[v].x), maximum_pair<X>(m.y, share[v].y),
           maximum_pair<X>(m.z, share[v].z), maximum_pair<X>(m.w, share[v].w)};
    const uint32_t w = maximum_pair<X>(maximum_pair<X>(m.x, m.y), maximum_pair<X>(m.z, m.w));
    return maximum(widen(X{static_cast<unsigned short>(w & 0xffffu)}),
                   widen(X{static_cast<unsigned short>(w >> 16)}));
  }
}

// KEEP: floats are replaced by their terms, which saves the second exponential. (16-bit elements stay
// as they came, two a register, and are raised again.)
template <typename X, int GROUP, bool KEEP, int VECTORS>
__device__ __forceinline__ Folded fold_share(uint4 (&share)[VECTORS], float scale) {
  constexpr int N = Vector<X>::N;
  const float top = lanes_fold<GROUP, Maximum>(largest<X>(share));
  const Shift shift(top, scale);
  float sum = 0.0f;
  if (shift.is_coarse()) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      float x[N];
      unpack<X>(share[v], x);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += x[i] = exponential2(shift.exponent_if_coarse(x[i]));
      if constexpr (KEEP && sizeof(X) == 4) share[v] = pack<X>(x);
    }
  } else {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      float x[N];
      unpack<X>(share[v], x);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += x[i] = exponential2(shift.exponent(x[i]));
      if constexpr (KEEP && sizeof(X) == 4) share[v] = pack<X>(x);
    }
  }
  // top scale: with scale 0 an empty share would become NaN; callers bring normal numbers alone.
  return {{product(top, scale), lanes_fold<GROUP, Sum>(sum) * shift.back()}, shift};
}

// Keeps the compiler from unpacking early and holding floats in place of the words: `zero` is 0, but
// only the launch knows, and only once the row's state is there.
__device__ __forceinline__ uint4 as_it_came(uint4 v, uint32_t zero) {
  return {unseen_xor(v.x, zero), unseen_xor(v.y, zero), unseen_xor(v.z, zero),
          unseen_xor(v.w, zero)};
}

// 0, from a count that is not negative.
__device__ __forceinline__ uint32_t hidden_zero(int64_t count, State s) {
  return float_to_bits(s.d) & uint32_t(uint64_t(count) >> 63);
}

// Elements of another type than the share's, wider: two vectors for one.
template <int GROUP, bool WHOLE, int VECTORS, int N, typename Y, typename Value>
__device__ __forceinline__ void write_wider(Y* y_row, int64_t first, int64_t last, Value value) {
  const Extent<VECTORS * GROUP, N> extent(first, last);
  const int lane = lane_id() % GROUP;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int k = v * GROUP + lane;
    float x[N];
    value(v, x);
    Y* y = y_row + (first + k) * N;
    const int count = k < extent.full ? N : k == extent.full ? extent.tail : 0;
    host::count_writes(count);
    if (WHOLE && count == N) {
#pragma unroll
      for (int part = 0; part < N / Vector<Y>::N; ++part)
        put16<false>(y + part * Vector<Y>::N,
                     pack<Y>(*reinterpret_cast<float (*)[Vector<Y>::N]>(&x[part * Vector<Y>::N])));
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (i < count) y[i] = narrow<Y>(x[i]);
    }
  }
}

// The share of a row whose state is s, written: Emit's value of each element.
template <typename X, typename Emit, int GROUP, bool WHOLE, bool STREAM, typename Y, int VECTORS>
__device__ __forceinline__ void emit_share(const uint4 (&share)[VECTORS], const Shift& shift,
                                           const Emit& emit, Y* y_row, int64_t first, int64_t last,
                                           uint32_t zero) {
  constexpr int N = Vector<X>::N;
  constexpr bool RAISE = Emit::FROM_TERM && sizeof(X) != 4;
  auto values = [&](int v, float (&x)[N]) {
    unpack<X>(sizeof(X) == 4 ? share[v] : as_it_came(share[v], zero), x);
    if (RAISE && shift.is_coarse()) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = exponential2(shift.exponent_if_coarse(x[i]));
    } else if (RAISE) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = exponential2(shift.exponent(x[i]));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = emit(x[i]);
  };
  if constexpr (sizeof(X) == sizeof(Y)) {
    write_share<GROUP, WHOLE, STREAM, VECTORS>(y_row, first, last, [&](int v) {
      float x[N];
      values(v, x);
      return pack<Y>(x);
    });
  } else {
    write_wider<GROUP, WHOLE, VECTORS, N>(y_row, first, last, values);
  }
}

// ---- backward: d is the sum of the terms, m the largest y where somebody asks for it

template <typename X, typename Backward, int GROUP, int VECTORS>
__device__ __forceinline__ State fold_gradient(const uint4 (&dy)[VECTORS],
                                               const uint4 (&y)[VECTORS], bool needs_top) {
  constexpr int N = Vector<X>::N;
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    float g[N], o[N];
    unpack<X>(dy[v], g);
    unpack<X>(y[v], o);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += Backward::term(g[i], o[i]);
  }
  const float top = needs_top ? lanes_fold<GROUP, Maximum>(largest<X>(y)) : 0.0f;
  return {top, lanes_fold<GROUP, Sum>(sum)};
}

template <typename X, typename Backward, int GROUP, bool WHOLE, bool STREAM, int VECTORS>
__device__ __forceinline__ void emit_gradient(const uint4 (&dy)[VECTORS], const uint4 (&y)[VECTORS],
                                              const Backward& backward, X* dx_row, int64_t first,
                                              int64_t last, uint32_t zero) {
  constexpr int N = Vector<X>::N;
  write_share<GROUP, WHOLE, STREAM, VECTORS>(dx_row, first, last, [&](int v) {
    float g[N], o[N];
    unpack<X>(sizeof(X) == 4 ? dy[v] : as_it_came(dy[v], zero), g);
    unpack<X>(sizeof(X) == 4 ? y[v] : as_it_came(y[v], zero), o);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = backward(g[i], o[i]);
    return pack<X>(g);
  });
}
