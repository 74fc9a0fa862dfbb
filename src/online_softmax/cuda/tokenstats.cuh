// Statistics of rows of logits, each folded to a few numbers in one read. With z = scale x:
//   lse = m + log d, entropy = log d - t / d, log p = (z - m) - log d
// where m is the largest z, d = sum(exp(z - m)) and t = sum(exp(z - m) (z - m)).
// And the order of elements, which top-k and rank go by: NaN first, then the larger, and of equal ones
// (0 and -0 too) that of the lower column.
#pragma once
#include "rows.cuh"

constexpr float LEAST_EXPONENT = -200.0f;  // 2^-200 is 0 in float32, and times -200 too: no 0 inf

// m, d as a State has them, and t; all of one part. above: how many elements are above the target's.
struct alignas(16) Spread {
  float m, d, t, above;
};

// The same relative to a larger maximum.
__device__ __forceinline__ Spread under(Spread s, float m) {
  const float by = maximum(fall(s.m, m), LEAST_EXPONENT), w = weight(s.m, m);
  return {m, product(s.d, w), product(fused(s.d, by, s.t), w), s.above};
}

__device__ __forceinline__ Spread merge(Spread a, Spread b) {
  const float m = maximum(a.m, b.m);
  a = under(a, m);
  b = under(b, m);
  return {m, a.d + b.d, a.t + b.t, a.above + b.above};
}

__device__ __forceinline__ Spread no_spread() { return {-infinity(), 0.0f, 0.0f, 0.0f}; }

__device__ __forceinline__ Spread warp_merge(Spread s) {
  s = under(s, warp_fold<Maximum>(s.m));
  return {s.m, warp_fold<Sum>(s.d), warp_fold<Sum>(s.t), warp_fold<Sum>(s.above)};
}

// The exponent of a term by base 2 (rows.cuh: Shift::term), as large a number as -inf can be.
template <bool COARSE>
__device__ __forceinline__ float exponent(const Shift& shift, float x) {
  const float y = COARSE ? product(x - shift.raw, shift.c) : fused(x, shift.c, -shift.product);
  return maximum(y, LEAST_EXPONENT);
}

// The terms of a share added, and each times its exponent. Two sums each, so that an addition need not
// wait for the last.
template <bool COARSE, typename S>
__device__ __forceinline__ void add_terms(const S& share, const Shift& shift, float& d, float& t) {
  float sum[2] = {}, weighted[2] = {};
#pragma unroll
  for (int v = 0; v < S::COUNT; ++v) {
    float x[S::N];
    unpack<typename S::Element>(share.words[v], x);
#pragma unroll
    for (int i = 0; i < S::N; ++i) {
      const float y = exponent<COARSE>(shift, x[i]), e = exponential2(y);
      sum[i % 2] += e;
      weighted[i % 2] = fused(e, y, weighted[i % 2]);
    }
  }
  d = warp_fold<Sum>(sum[0] + sum[1]);
  t = warp_fold<Sum>(weighted[0] + weighted[1]);
}

// A warp's share, whose elements stand where they would in an aligned row. top: the largest, of the
// warp.
template <typename S>
__device__ __forceinline__ Spread spread_of(const S& share, float top, float scale) {
  const Shift shift(top, scale);
  float d, t;
  if (shift.is_coarse())
    add_terms<true>(share, shift, d, t);
  else
    add_terms<false>(share, shift, d, t);
  const float back = shift.back(), lost = shift.is_coarse() ? 0.0f : shift.lost;
  const float m = product(top, scale);
  return {m, shift.d(d), product(product(fused(-lost, d, t), back), LN_2), 0.0f};
}

// ---- order: codes are integers that grow as elements do. NaN's is the largest; that of -0 is unused.

template <typename X>
struct Code {
  static constexpr uint32_t ZERO = sizeof(X) == 4 ? 0x80000000u : 0x8000u;
  static constexpr uint32_t INFINITE = ZERO | (sizeof(X) == 4         ? 0x7f800000u
                                               : IsBfloat16<X>::value ? 0x7f80u
                                                                      : 0x7c00u);
  static constexpr uint32_t NOTHING_LESS = ~INFINITE & (ZERO | (ZERO - 1));  // -inf's
  static constexpr uint32_t NO_NUMBER = ZERO - 1;                            // bits of NaN

  __device__ static uint32_t stored(X x) {
    if constexpr (sizeof(X) == 4)
      return float_to_bits(x);
    else
      return x.bits;
  }
  // A word of elements that all have these bits.
  __device__ static uint32_t in_all(uint32_t bits) {
    return sizeof(X) == 4 ? bits : bits | bits << 16;
  }
  __device__ static uint32_t of(float x) {  // x: an element, widened
    if (x != x) return INFINITE + 1;
    if (x == 0.0f) return ZERO;
    const uint32_t bits = stored(narrow<X>(x));
    return bits & ZERO ? ~bits & (ZERO - 1) : bits | ZERO;
  }
  // The word whose elements are all p, where a code is at least `code` if and only if its element is
  // above p or NaN. With a code of -inf or less p is NaN, and all are.
  __device__ static uint32_t below(uint32_t code) {
    uint32_t before = code - 1;
    if (before == ZERO - 1) --before;  // -0 is not below 0
    const uint32_t bits = before & ZERO ? before ^ ZERO : ZERO | (~before & (ZERO - 1));
    return in_all(bits);
  }
};

// An element and its column as one number, which is larger where the element comes first. 0: none.
__device__ __forceinline__ uint64_t key_of(float x, int64_t col) {
  return uint64_t(Code<float>::of(x)) << 32 | uint32_t(~uint32_t(col));
}

__device__ __forceinline__ int64_t col_of(uint64_t key) { return int64_t(~uint32_t(key)); }

__device__ __forceinline__ float value_of(uint64_t key) {
  const uint32_t code = uint32_t(key >> 32);
  if (code > Code<float>::INFINITE) return not_a_number();
  return bits_to_float(code & Code<float>::ZERO ? code ^ Code<float>::ZERO : ~code);
}

// ---- marks: a bit for each element of a lane's words. Of 16-bit elements the lower halves of 16 words
// of 4 bytes have the lower bits.

template <typename S>
struct Marks {
  static constexpr bool HALVES = sizeof(typename S::Element) == 2;
  static constexpr int EACH = HALVES ? 4 : 8, COUNT = (S::COUNT + EACH - 1) / EACH;
  uint32_t bits[COUNT] = {};

  // Of the four words of vector v, which mask v / EACH has.
  __device__ static constexpr uint32_t of_vector(int v) {
    return (HALVES ? 0x000f000fu : 0xfu) << (4 * (v % EACH));
  }
  __device__ int count() const {
    int found = 0;
#pragma unroll
    for (int a = 0; a < COUNT; ++a) found += count_bits(bits[a]);
    return found;
  }
  // The element's number among those of its lane's warp.
  __device__ static int place(int a, int bit) {
    const int word = HALVES ? bit % 16 : bit, half = HALVES ? bit / 16 : 0;
    const int i = word % 4 * (HALVES ? 2 : 1) + half;
    return ((a * EACH + word / 4) * WARP + lane_id()) * S::N + i;
  }
};

// Those above `than` (or NaN), which stands in every element of a word.
template <bool OR_UNORDERED, typename S>
__device__ __forceinline__ Marks<S> mark_above(const S& share, uint32_t than) {
  using X = typename S::Element;
  Marks<S> marks;
#pragma unroll
  for (int v = 0; v < S::COUNT; ++v) {
    const uint32_t word[4] = {share.words[v].x, share.words[v].y, share.words[v].z,
                              share.words[v].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bit = 4 * (v % Marks<S>::EACH) + i;
      uint32_t found;
      if constexpr (sizeof(X) == 4)
        found =
            is_above<OR_UNORDERED>(bits_to_float(word[i]), bits_to_float(than)) ? 1u << bit : 0u;
      else
        found = above_pair<X, OR_UNORDERED>(word[i], than) & (0x00010001u << bit);
      marks.bits[v / Marks<S>::EACH] |= found;
    }
  }
  return marks;
}
