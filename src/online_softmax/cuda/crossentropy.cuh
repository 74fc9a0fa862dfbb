// Cross-entropy of rows of logits: a row's loss from its state, and the gradient by each logit. With
// z = scale x, or softcap tanh(scale x / softcap), and t the target:
//   loss = hard w_t (lse - z_t) + soft sum(w (lse - z)) + z_loss lse^2
//   dz = dloss (p (hard w_t + soft sum(w) + 2 z_loss lse) - soft w - [at t] hard w_t) + dlse p
// where hard = 1 - smoothing, soft = smoothing / classes, and w are the weights of classes, or 1. The
// columns of a shard are classes first_class, first_class + 1, ... of them; usually they are all.
#pragma once
#include "rows.cuh"

constexpr int HARD = 0, SMOOTH = 1,
              WEIGHTED = 2;  // no smoothing; with; and with weights of classes

// z = scale map(x).
template <bool CAPPED>
struct Logit {
  float slope, inner, scale;  // slope: dz / dx, but for map's own part
  __device__ Logit(float scale_, float softcap)
      : slope(scale_), inner(CAPPED ? scale_ / softcap : 1.0f), scale(CAPPED ? softcap : scale_) {}
  __device__ __forceinline__ float map(float x) const {
    return CAPPED ? hyperbolic_tangent(product(x, inner)) : x;
  }
  __device__ float z(float mapped) const { return product(mapped, scale); }
};

// A row's target: a class, or ignored, or neither. `col`: its column, in another shard if it is none
// of this one's.
struct Target {
  int64_t col;
  float weight;
  bool is_ignored, is_class;
  __device__ __forceinline__ Target(const int64_t* targets, const float* weights, bool has_weights,
                                    int64_t row, int64_t classes, int64_t ignore_index,
                                    int64_t first_class = 0)
      : col(targets[row]), weight(1.0f) {
    is_ignored = col == ignore_index;
    is_class = !is_ignored && col >= 0 && col < classes;
    if (is_class && has_weights) weight = weights[col];
    col -= first_class;
  }
  __device__ bool is_among(int64_t first, int64_t count) const {
    return is_class && col >= first && col < first + count;
  }
};

// An element as it came. Its value is made where it is used, not before `zero`, a number that is 0, is
// known: else a compiler widens it at once, and the warp waits for it with its row at hand.
template <typename X>
struct Asked {
  uint32_t bits = 0;
  __device__ __forceinline__ void fetch(const X* x) {
    host::count_reads(1);
    if constexpr (sizeof(X) == 4)
      bits = float_to_bits(*x);
    else
      bits = x->bits;
  }
  __device__ __forceinline__ float value(uint32_t zero) const {
    if constexpr (sizeof(X) == 4)
      return bits_to_float(bits ^ zero);
    else
      return widen(X{static_cast<unsigned short>(bits ^ zero)});
  }
};

struct Mix {
  float hard, soft, z_loss;
  float all;  // the sum of all classes' weights
};

// lse = value + rest: what rounding loses of a large lse is kept.
struct TwoPartLse {
  float value, rest;
  __device__ explicit TwoPartLse(State s) : value(s.m), rest(0.0f) {
    if (!is_finite(s.m)) return;
    const float log_d = natural_log(s.d);
    value = s.m + log_d;
    const float taken = value - s.m;  // exact sum of two floats, after Knuth
    rest = (s.m - (value - taken)) + (log_d - taken);
  }
};

// z: of the target. of_all: with smoothing, sum(w (lse - z)).
template <int SMOOTHING>
__device__ __forceinline__ float row_loss(State s, const Target& target, float z, float of_all,
                                          const Mix& mix) {
  if (target.is_ignored) return 0.0f;
  if (!target.is_class || !is_finite(s.m)) return not_a_number();
  const float log_d = natural_log(s.d);
  float loss = mix.hard * target.weight * ((s.m - z) + log_d);
  if (SMOOTHING != HARD) loss += mix.soft * of_all;
  const float whole = s.m + log_d;
  if (mix.z_loss != 0.0f) loss += mix.z_loss * (whole * whole);
  return loss;
}

// `mapped`: of the target's logit. `below`: sum_below by `reference`.
template <int SMOOTHING, bool CAPPED>
__device__ __forceinline__ float row_loss(State s, const Logit<CAPPED>& logit, const Target& target,
                                          float mapped, float reference, float below,
                                          const Mix& mix) {
  float of_all = 0.0f;
  if (SMOOTHING != HARD)
    of_all = mix.all * ((s.m - logit.z(reference)) + natural_log(s.d)) + below * logit.scale;
  return row_loss<SMOOTHING>(s, target, logit.z(mapped), of_all, mix);
}

// What all logits of a row are compared with: the target's, so that a large offset cancels.
__device__ __forceinline__ float reference_of(float mapped) {
  return is_finite(mapped) ? mapped : 0.0f;
}

template <int SMOOTHING>
__device__ __forceinline__ float weight_of(const float* weights, int64_t col, int64_t cols) {
  return SMOOTHING != WEIGHTED ? 1.0f : col >= 0 && col < cols ? weights[col] : 0.0f;
}

// The sum of w (reference - map(x)) over a share. Padding does not count.
template <int SMOOTHING, bool CAPPED, typename S>
__device__ __forceinline__ float sum_below(const S& share, const typename S::At& at,
                                           const Logit<CAPPED>& logit, float reference,
                                           const float* weights, int64_t first, int64_t cols) {
  constexpr int N = S::N;
  const int64_t start = first * N - at.begin;
  Terms<S> terms;
#pragma unroll
  for (int v = 0; v < S::COUNT; ++v) {
    const int k = v * S::GROUP + S::lane(), from = at.from(k), to = at.to(k);
    float x[N];
    unpack<typename S::Element>(share.words[v], x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float below =
          weight_of<SMOOTHING>(weights, start + k * N + i, cols) * (reference - logit.map(x[i]));
      terms.sums[i] += i >= from && i < to ? below : 0.0f;
    }
  }
#pragma unroll
  for (int a = 0; a < S::AFTER; ++a) {
    const int j = a * S::GROUP + S::lane();
    const float below = weight_of<SMOOTHING>(weights, start + S::At::CAPACITY + j, cols) *
                        (reference - logit.map(share.after[a]));
    terms.after[a] = j < at.past_words() ? below : 0.0f;
  }
  return group_sum<S>(terms.sums, at, terms.after);
}

// Between two looks at a share, so that no floats of the first are held for the second. `zero` is 0.
template <typename S>
__device__ __forceinline__ void forget_floats(S& share, uint32_t zero) {
#pragma unroll
  for (int v = 0; v < S::COUNT; ++v) share.words[v] = as_it_came(share.words[v], zero);
}

// fold_share of map(x). tanh grows with x, so the largest x has the largest z; but padding becomes
// -softcap, so it is left out by its place.
template <bool COARSE, bool CAPPED, typename S>
__device__ __forceinline__ void raise_capped(const S& share, const typename S::At& at,
                                             const Logit<CAPPED>& logit, const Shift& shift,
                                             Terms<S>& terms) {
#pragma unroll
  for (int v = 0; v < S::COUNT; ++v) {
    const int k = v * S::GROUP + S::lane(), from = at.from(k), to = at.to(k);
    float x[S::N];
    unpack<typename S::Element>(share.words[v], x);
#pragma unroll
    for (int i = 0; i < S::N; ++i)
      terms.sums[i] += i >= from && i < to ? shift.template term<COARSE>(logit.map(x[i])) : 0.0f;
  }
#pragma unroll
  for (int a = 0; a < S::AFTER; ++a)
    terms.after[a] = a * S::GROUP + S::lane() < at.past_words()
                         ? shift.template term<COARSE>(logit.map(share.after[a]))
                         : 0.0f;
}

template <bool KEEP, bool CAPPED, typename S>
__device__ __forceinline__ Folded fold_logits(S& share, const typename S::At& at,
                                              const Logit<CAPPED>& logit) {
  if constexpr (CAPPED) {
    float top = largest<typename S::Element>(share.words);
#pragma unroll
    for (int a = 0; a < S::AFTER; ++a) top = maximum(top, share.after[a]);
    top = logit.map(lanes_fold<S::GROUP, Maximum>(top));
    const Shift shift(top, logit.scale);
    Terms<S> terms;
    if (shift.is_coarse())
      raise_capped<true>(share, at, logit, shift, terms);
    else
      raise_capped<false>(share, at, logit, shift, terms);
    const float sum = group_sum<S>(terms.sums, at, terms.after);
    return {{logit.z(top), shift.d(sum)}, shift, top};
  } else {
    return fold_share<KEEP>(share, at, logit.scale);
  }
}

// The gradient by x. `prob`: what a term must be multiplied with to be a probability. Rows without a
// target have one where lse has, and else none, whatever stands in them.
template <bool CAPPED, int SMOOTHING>
struct LogitGradient {
  Logit<CAPPED> logit;
  Shift shift;
  float factor, pull, hit;
  bool is_zero;
  const float* weights;
  int64_t cols;
  __device__ __forceinline__ LogitGradient(const Logit<CAPPED>& logit, const Shift& shift,
                                           float prob, float lse, float dloss, const Target& target,
                                           const Mix& mix, const float* weights, int64_t cols,
                                           bool has_dlse = false, float dlse = 0.0f)
      : logit(logit),
        shift(shift),
        factor(0.0f),
        pull(0.0f),
        hit(0.0f),
        is_zero(!target.is_class && !has_dlse),
        weights(weights),
        cols(cols) {
    if (target.is_class) {
      const float slope = dloss * logit.slope, own = mix.hard * target.weight;
      float all = own + 2.0f * mix.z_loss * lse;
      if (SMOOTHING != HARD) all += mix.soft * mix.all;
      factor = slope * all;
      pull = slope * mix.soft;
      hit = slope * own;
    }
    if (has_dlse) factor += dlse * logit.slope;
    factor *= prob;
  }
  // TERM: x is a term already, not a logit.
  template <bool TERM, bool COARSE>
  __device__ __forceinline__ float value(float x, int64_t col, float more = 0.0f) const {
    const float mapped = TERM ? 0.0f : logit.map(x);
    const float term = TERM ? x : shift.template term<COARSE>(mapped);
    float dz = product(term, factor);
    if (SMOOTHING != HARD)
      dz = fused(term, factor, -pull * weight_of<SMOOTHING>(weights, col, cols));
    dz -= more;
    if (CAPPED) dz *= fused(-mapped, mapped, 1.0f);
    return is_zero ? 0.0f : dz;
  }
  template <bool TERM>
  __device__ __forceinline__ float any(float x, int64_t col, float more = 0.0f) const {
    return !TERM && shift.is_coarse() ? value<TERM, true>(x, col, more)
                                      : value<TERM, false>(x, col, more);
  }
};

// A share of a row's gradient, written. KEPT: fold_logits kept the terms of floats. x: the target's
// logit, asked for where the share has it.
template <bool STREAM, bool KEPT, bool CAPPED, int SMOOTHING, typename S, typename DX>
__device__ __forceinline__ void emit_logits(S& share, const typename S::At& at,
                                            const LogitGradient<CAPPED, SMOOTHING>& gradient,
                                            const Target& target, float x_of_target, DX* dx_row,
                                            int64_t first, uint32_t zero) {
  using X = typename S::Element;
  constexpr int N = S::N;
  constexpr bool TERM = KEPT && !CAPPED && sizeof(X) == 4;
  const int64_t start = first * N - at.begin;
  write_share<STREAM, S>(
      at, dx_row + start,
      [&](int v, float (&x)[N]) {
        const int64_t col = start + (v * S::GROUP + S::lane()) * N;
        const uint4 word = pick(share.words, v);
        unpack<X>(sizeof(X) == 4 ? word : as_it_came(word, zero), x);
        if (!TERM && gradient.shift.is_coarse()) {
#pragma unroll
          for (int i = 0; i < N; ++i) x[i] = gradient.template value<TERM, true>(x[i], col + i);
        } else {
#pragma unroll
          for (int i = 0; i < N; ++i) x[i] = gradient.template value<TERM, false>(x[i], col + i);
        }
      },
      [&](int a) {
        const int64_t col = start + S::At::CAPACITY + a * S::GROUP + S::lane();
        return gradient.template any<TERM>(share.after[a], col);
      });
  __syncwarp();  // the target's element: written by a lane above, again by lane 0
  if (target.is_among(first * N, at.count()) && S::lane() == 0)
    store(dx_row + target.col, gradient.template any<false>(x_of_target, target.col, gradient.hit));
}
