// The recurrence in CUDA: the running pair (m, d), same names and order as reference/online.py.
// M. Milakov, N. Gimelshein: Online normalizer calculation for softmax, arXiv:1805.02867.
#pragma once
#include "memory.cuh"

constexpr float LOG2_E = 1.4426950408889634f;  // exp(x) = 2^(x LOG2_E)
constexpr float LN_2 = 1.0f / LOG2_E;

// m: maximum so far, natural units. d: sum of exp(x - m). Where m is not finite, d means nothing.
struct State {
  float m, d;
};

// 2^x by the hardware (2 ulp; results under 2^-126 become 0).
__device__ __forceinline__ float exponential2(float x) {
  host::count_exps(1);
#ifdef ONLINE_SOFTMAX_HOST
  return __builtin_exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// 1 / x of a number near 1: the hardware's, and one step of Newton's, without a division's branch.
__device__ __forceinline__ float reciprocal(float x) {
#ifdef ONLINE_SOFTMAX_HOST
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmaf_rn(y, __fmaf_rn(-x, y, 1.0f), y);
#endif
}

// exp(x) with two roundings: x LOG2_E, and 2^x. The caller subtracts the maximum first, so the
// maximum's own term is exactly 1.
__device__ __forceinline__ float exponential(float x) { return exponential2(x * LOG2_E); }

// a b, rounded by itself: never part of a fused a b + c, which the compiler else forms as it likes,
// in one kernel or on one path and not on another: where bits must agree, this or `fused` says which.
__device__ __forceinline__ float product(float a, float b) {
#ifdef ONLINE_SOFTMAX_HOST
  float y = a * b;
#ifdef __FMA__
  asm("" : "+r"(y));  // opaque: not fused either
#endif
  return y;
#else
  return __fmul_rn(a, b);
#endif
}

// a b + c, rounded once.
__device__ __forceinline__ float fused(float a, float b, float c) {
#ifdef ONLINE_SOFTMAX_HOST
  return __builtin_fmaf(a, b, c);
#else
  return __fmaf_rn(a, b, c);
#endif
}

// The larger of two; NaN if either is NaN (fmaxf would drop it, and [NaN, +inf] would become +inf).
__device__ __forceinline__ float maximum(float a, float b) {
#if !defined(ONLINE_SOFTMAX_HOST) && __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a > b || a != a ? a : b;
#endif
}

// The same for two 16-bit floats in a word.
template <typename X>
__device__ __forceinline__ uint32_t maximum_pair(uint32_t a, uint32_t b) {
#if !defined(ONLINE_SOFTMAX_HOST) && __CUDA_ARCH__ >= 800
  uint32_t y;
  if constexpr (IsBfloat16<X>::value)
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  auto larger = [](uint32_t u, uint32_t v) {
    const float x = widen(X{static_cast<unsigned short>(u & 0xffffu)});
    const float y = widen(X{static_cast<unsigned short>(v & 0xffffu)});
    return (x > y || x != x ? u : v) & 0xffffu;
  };
  return larger(a, b) | larger(a >> 16, b >> 16) << 16;
#endif
}

__device__ __forceinline__ bool is_finite(float x) {
  return (float_to_bits(x) & 0x7fffffffu) < 0x7f800000u;
}

// The identity of merge.
__device__ __forceinline__ State empty() { return {-infinity(), 0.0f}; }

// One element as a state.
__device__ __forceinline__ State lift(float x) { return {x, 1.0f}; }

// part - m, and 0 where they are equal, so that equal infinities are never subtracted. The only place
// where two maxima meet in a subtraction.
__device__ __forceinline__ float fall(float part, float m) { return part == m ? 0.0f : part - m; }

// What a part counts for once the maximum is m: exp(part - m), and exp(0) = 1 where they are equal.
__device__ __forceinline__ float weight(float part, float m) { return exponential(fall(part, m)); }

struct Joined {
  float m, w_a, w_b;
};

__device__ __forceinline__ Joined join(float m_a, float m_b) {
  const float m = maximum(m_a, m_b);
  return {m, weight(m_a, m), weight(m_b, m)};
}

__device__ __forceinline__ State merge(State a, State b) {
  const Joined j = join(a.m, b.m);
  return {j.m, product(a.d, j.w_a) + product(b.d, j.w_b)};
}

// The state of N elements: one maximum, one exponential each. All -inf gives the identity.
template <int N>
__device__ __forceinline__ State of(const float (&x)[N]) {
  float m = x[0];
#pragma unroll
  for (int i = 1; i < N; ++i) m = maximum(m, x[i]);
  const float shift = m == -infinity() ? 0.0f : m;
  float d = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) d += exponential(x[i] - shift);
  return {m, d};
}

// The inner loop: N more elements for one rescaling.
template <int N>
__device__ __forceinline__ State absorb(State s, const float (&x)[N]) {
  return merge(s, of(x));
}

// exp(x - m) / d; NaN where m is not finite. The factor depends on the row alone: one division and
// one test a row, since the compiler moves them out of the loop over columns.
__device__ __forceinline__ float prob(float x, State s) {
  const float factor = is_finite(s.m) ? 1.0f / s.d : not_a_number();
  return exponential(x - s.m) * factor;
}

__device__ __forceinline__ float natural_log(float x) {
#ifdef ONLINE_SOFTMAX_HOST
  return __builtin_logf(x);
#else
  return logf(x);
#endif
}

__device__ __forceinline__ float hyperbolic_tangent(float x) {
#ifdef ONLINE_SOFTMAX_HOST
  return __builtin_tanhf(x);
#else
  return tanhf(x);
#endif
}

// (x - m) - log d, in that order: a large m must not swallow log d. NaN where m is not finite.
__device__ __forceinline__ float log_prob(float x, State s) {
  const float log_d = is_finite(s.m) ? natural_log(s.d) : not_a_number();
  return (x - s.m) - log_d;
}

// Natural log of the sum of exponentials; m itself where m is not finite.
__device__ __forceinline__ float lse(State s) {
  return is_finite(s.m) ? s.m + natural_log(s.d) : s.m;
}
