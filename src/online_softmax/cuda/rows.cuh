// A share of a row folded, and emitted: what the row kernels have in common.
#pragma once
#include "exchange.cuh"
#include "write.cuh"

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
  template <bool COARSE>
  __device__ float term(float x) const {
    return exponential2(COARSE ? (x - raw) * c : fused(x, c, -product));
  }
  // What a term must be multiplied with to be exp(x scale - shift). Of the maximum's own term 1 is left,
  // or the float below: the reciprocal has that term's error, which 2^(-lost) has not.
  __device__ float back() const { return is_coarse() ? 1.0f : reciprocal(exponential2(lost)); }
  // d from the sum of the terms: at least what the maximum's own counts for, where there are any.
  __device__ float d(float sum) const {
    return sum > 0.0f ? maximum(::product(sum, back()), 1.0f) : 0.0f;
  }
};

// Which row a group of lanes works on, and its first vector.
template <int VECTORS, int LANES>
struct Place {
  int64_t row, first;
  __device__ Place() {
    if constexpr (LANES > 0) {
      row = int64_t(blockIdx.x) * (blockDim.x / LANES) + threadIdx.x / LANES;
      first = 0;
    } else {
      row = cluster_id();
      first = int64_t(cluster_rank() * warp_count() + warp_id()) * (VECTORS * WARP);
    }
  }
};

// The same where no group needs another: a row of a group of lanes, or (LANES 0) a warp a part of one.
template <int VECTORS, int LANES>
struct Piece {
  int64_t row, first;
  __device__ __forceinline__ explicit Piece(int64_t parts) : first(0) {
    if constexpr (LANES > 0) {
      row = int64_t(blockIdx.x) * (blockDim.x / LANES) + threadIdx.x / LANES;
    } else {  // rows parts is under 2^32
      const uint32_t index = blockIdx.x * uint32_t(warp_count()) + uint32_t(warp_id());
      row = index / uint32_t(parts);
      first = int64_t(index % uint32_t(parts)) * (VECTORS * WARP);
    }
  }
};

// A share folded: its state, in natural units, how its terms were shifted, and its largest element.
struct Folded {
  State s;
  Shift shift;
  float top;
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

// ---- summing a share. sums[p] of lane l is the sum over v of what stands at position p of its words:
// number l N + p in a ring of GROUP N sums. Numbers half the ring apart are added, then a quarter, and
// so on: an order that turning the ring does not change. Hence the bits follow from the elements'
// numbers in the share alone, wherever the share begins in its words.

// Lanes APART and less: a pair of lanes shares its positions out while there are several.
template <int APART, int COUNT, int N>
__device__ __forceinline__ void add_lanes(float (&sums)[N]) {
  if constexpr (APART > 0) {
    constexpr int HALF = COUNT / 2;
    if constexpr (COUNT == 1) {
      sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], APART);
    } else {
      const bool is_upper = lane_id() & APART;
#pragma unroll
      for (int p = 0; p < HALF; ++p) {
        const float kept = is_upper ? sums[p + HALF] : sums[p];
        const float sent = is_upper ? sums[p] : sums[p + HALF];
        sums[p] = kept + __shfl_xor_sync(0xffffffffu, sent, APART);
      }
    }
    add_lanes<APART / 2, COUNT == 1 ? 1 : HALF>(sums);
  }
}

// Positions STEP and less apart, of which a lane holds HERE; pairs of lanes APART hold the others.
template <int STEP, int HERE, int APART, int N>
__device__ __forceinline__ void add_positions(float (&sums)[N]) {
  if constexpr (STEP > 0) {
#pragma unroll
    for (int p = 0; p < (STEP < HERE ? STEP : HERE); ++p)
      sums[p] += STEP < HERE ? sums[STEP < HERE ? p + STEP : p]
                             : __shfl_xor_sync(0xffffffffu, sums[p], APART);
    add_positions<STEP / 2, HERE, APART / 2>(sums);
  }
}

template <typename S>
__device__ __forceinline__ float group_sum(float (&sums)[S::N], const typename S::At& at,
                                           const float (&after)[S::KEPT]) {
  constexpr int N = S::N, GROUP = S::GROUP, HERE = N / GROUP > 1 ? N / GROUP : 1;
  if (!S::WHOLE && (GROUP == WARP ? at.past_words() > 0 : warp_any(at.past_words() > 0))) {
    const int lane = S::lane(), group = lane_id() - lane;
#pragma unroll
    for (int p = 0; p + 1 < N; ++p) {  // what lies past the words stands where they would go on
      const float past = __shfl_sync(0xffffffffu, after[p / GROUP], group + p % GROUP);
      sums[p] += lane == 0 ? past : 0.0f;
    }
  }
  add_lanes<GROUP / 2, N>(sums);
  add_positions<N / 2, HERE, GROUP / 2>(sums);
  return sums[0];
}

// Sums over a lane's words, by position; and the terms of what lies past them.
template <typename S>
struct Terms {
  float sums[S::N] = {}, after[S::KEPT];
};

// Every element of a share raised. COARSE: see Shift. KEEPS: words are replaced by their terms, which
// saves the second exponential. (16-bit elements stay as they came, two a register, and are raised
// again.)
template <bool COARSE, bool KEEPS, typename S>
__device__ __forceinline__ void raise_share(S& share, const Shift& shift, Terms<S>& terms) {
  using X = typename S::Element;
#pragma unroll
  for (int v = 0; v < S::COUNT; ++v) {
    float x[S::N];
    unpack<X>(share.words[v], x);
#pragma unroll
    for (int i = 0; i < S::N; ++i) terms.sums[i] += x[i] = shift.template term<COARSE>(x[i]);
    if constexpr (KEEPS) share.words[v] = pack<X>(x);
  }
#pragma unroll
  for (int a = 0; a < S::AFTER; ++a) terms.after[a] = shift.template term<COARSE>(share.after[a]);
}

template <bool KEEP, typename S>
__device__ __forceinline__ Folded fold_share(S& share, const typename S::At& at, float scale) {
  using X = typename S::Element;
  constexpr bool KEEPS = KEEP && sizeof(X) == 4;
  float top = largest<X>(share.words);
#pragma unroll
  for (int a = 0; a < S::AFTER; ++a) top = maximum(top, share.after[a]);
  top = lanes_fold<S::GROUP, Maximum>(top);
  const Shift shift(top, scale);
  Terms<S> terms;
  if (shift.is_coarse())
    raise_share<true, KEEPS>(share, shift, terms);
  else
    raise_share<false, KEEPS>(share, shift, terms);
#pragma unroll
  for (int a = 0; KEEPS && a < S::AFTER; ++a) share.after[a] = terms.after[a];
  const float sum = group_sum<S>(terms.sums, at, terms.after);
  // top scale: with scale 0 an empty share would become NaN; callers bring normal numbers alone.
  return {{product(top, scale), shift.d(sum)}, shift, top};
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

// The share of a row whose state is s, written: Emit's value of each element. y_row: the share's row.
// KEPT: fold_share kept the terms of floats.
template <bool STREAM, bool KEPT = true, typename Emit, typename S, typename Y>
__device__ __forceinline__ void emit_share(const S& share, const typename S::At& at,
                                           const Shift& shift, const Emit& emit, Y* y_row,
                                           int64_t first, uint32_t zero) {
  using X = typename S::Element;
  constexpr int N = S::N;
  constexpr bool RAISE = Emit::FROM_TERM && !(KEPT && sizeof(X) == 4);
  auto value = [&](float x) {
    if (RAISE) x = shift.is_coarse() ? shift.template term<true>(x) : shift.template term<false>(x);
    return emit(x);
  };
  auto values = [&](const uint4& word, float (&x)[N]) {
    unpack<X>(sizeof(X) == 4 ? word : as_it_came(word, zero), x);
    if (RAISE && shift.is_coarse()) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = shift.template term<true>(x[i]);
    } else if (RAISE) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = shift.template term<false>(x[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = emit(x[i]);
  };
  write_share<STREAM, S>(
      at, y_row + first * N - at.begin,
      [&](int v, float (&x)[N]) { values(pick(share.words, v), x); },
      [&](int a) { return value(share.after[a]); });
}

// ---- backward: d is the sum of the terms, m the largest y where somebody asks for it

template <typename Backward, typename S>
__device__ __forceinline__ State fold_gradient(const S& dy, const S& y, const typename S::At& at,
                                               bool needs_top) {
  using X = typename S::Element;
  constexpr int N = S::N;
  Terms<S> terms;
#pragma unroll
  for (int v = 0; v < S::COUNT; ++v) {
    float g[N], o[N];
    unpack<X>(dy.words[v], g);
    unpack<X>(y.words[v], o);
#pragma unroll
    for (int i = 0; i < N; ++i) terms.sums[i] += Backward::term(g[i], o[i]);
  }
#pragma unroll
  for (int a = 0; a < S::AFTER; ++a) terms.after[a] = Backward::term(dy.after[a], y.after[a]);
  const float sum = group_sum<S>(terms.sums, at, terms.after);
  if (!needs_top) return {0.0f, sum};
  float top = largest<X>(y.words);
#pragma unroll
  for (int a = 0; a < S::AFTER; ++a) top = maximum(top, y.after[a]);
  return {lanes_fold<S::GROUP, Maximum>(top), sum};
}

template <bool STREAM, typename Backward, typename S, typename X>
__device__ __forceinline__ void emit_gradient(const S& dy, const S& y, const typename S::At& at,
                                              const Backward& backward, X* dx_row, int64_t first,
                                              uint32_t zero) {
  constexpr int N = S::N;
  auto values = [&](const uint4& dy_word, const uint4& y_word, float (&g)[N]) {
    float o[N];
    unpack<X>(sizeof(X) == 4 ? dy_word : as_it_came(dy_word, zero), g);
    unpack<X>(sizeof(X) == 4 ? y_word : as_it_came(y_word, zero), o);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = backward(g[i], o[i]);
  };
  write_share<STREAM, S>(
      at, dx_row + first * N - at.begin,
      [&](int v, float (&g)[N]) { values(pick(dy.words, v), pick(y.words, v), g); },
      [&](int a) { return backward(dy.after[a], y.after[a]); });
}
