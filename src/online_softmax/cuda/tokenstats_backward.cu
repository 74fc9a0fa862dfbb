// The gradient of token_stats by the logits, from each row's largest z and log d: one read, one write,
// which may go over the logits themselves. With z = scale x, p = softmax(z), H the entropy and t the
// target, the gradients g by lse, by the entropy and by log p_t give
//   dx = scale p (g_lse - g_t - g_entropy (log p + H)) + [at t] scale g_t
// where p = 0 gives 0. A group of lanes has a row, or (LANES 0) a warp a part of one; no group knows of
// another.
#include "tokenstats.cuh"

// dx = e (a + b y), e = 2^y the term of x relative to about lse.
struct StatsGradient {
  Shift shift;
  float a, b, hit;
  // Of a row that is not normal: NaN, but where lse alone has a gradient and is inf; p = exp(z - lse) is
  // 0 there of all but inf.
  bool is_normal, is_spared;

  __device__ __forceinline__ StatsGradient(float m, float log_d, float entropy, float scale,
                                           float g_lse, float g_entropy, float g_target,
                                           bool lse_alone)
      : shift((m + (is_finite(m) ? log_d : 0.0f)) / scale, scale),
        is_normal(is_finite(m)),
        is_spared(lse_alone && m == infinity()) {
    // log p = y ln 2 + rest: m + log d was rounded, and so was what terms are shifted by.
    const float rest = (fused(shift.raw, scale, -m) - log_d) -
                       product(shift.is_coarse() ? 0.0f : shift.lost, LN_2);
    const float factor = product(scale, exponential(rest));  // 2^y factor = scale p
    const float whole = g_lse - g_target - product(g_entropy, entropy);
    a = factor * fused(-g_entropy, rest, whole);
    b = factor * product(-g_entropy, LN_2);
    hit = product(scale, g_target);
  }
  template <bool COARSE>
  __device__ __forceinline__ float value(float x, float more = 0.0f) const {
    const float y = exponent<COARSE>(shift, x);
    const float dx = fused(exponential2(y), fused(y, b, a), more);
    return is_normal ? dx : is_spared && x < infinity() ? 0.0f : not_a_number();
  }
};

template <typename X, int VECTORS, int LANES, int LIES, bool STREAM>
__global__ void __launch_bounds__(256, 4)
    token_stats_backward(const X* x,              // (rows, cols) logits, rows x_row_stride apart
                         const int64_t* targets,  // (rows), with has_target
                         const float* g_lse,      // (rows), g_lse_stride apart, with has_lse
                         const float* g_entropy,  // the same, with has_entropy
                         const float* g_target,   // the same, with has_target
                         const float* entropy,    // (rows)
                         const float* state,      // (rows, 2): m and log d
                         X* dx,                   // (rows, cols), rows dx_row_stride apart
                         int64_t rows, int64_t cols, int64_t x_row_stride, int64_t dx_row_stride,
                         int64_t g_lse_stride, int64_t g_entropy_stride, int64_t g_target_stride,
                         int64_t has_lse, int64_t has_entropy, int64_t has_target, int64_t parts,
                         float scale) {
  constexpr int GROUP = LANES ? LANES : WARP;
  const Piece<VECTORS, LANES> at(parts);
  const bool has_row = at.row < rows;  // lanes without one load nothing, and shuffle
  const int64_t row = has_row ? at.row : 0, first = at.first, last = has_row ? cols : 0;
  const X* x_row = x + row * x_row_stride;
  X* dx_row = dx + row * dx_row_stride;
  using Part = Share<X, VECTORS, GROUP, LIES>;
  constexpr int N = Part::N;
  Part share;
  const auto held = share.of(first, last, begin_of<LIES>(dx_row));
  const Span span(x, rows, cols, x_row_stride);
  const auto fetched = fetch_global<STREAM>(share, held, x_row, span, first, -infinity());
  const int64_t target = has_target ? targets[row] : -1;
  const bool is_class = target >= 0 && target < cols;
  const bool is_here = is_class && target >= first * N && target < first * N + held.count();
  const float of_target = is_here ? load(x_row + target) : 0.0f;
  const float m = state[2 * row], log_d = state[2 * row + 1];
  const StatsGradient gradient(m, log_d, has_entropy ? entropy[row] : 0.0f, scale,
                               has_lse ? g_lse[row * g_lse_stride] : 0.0f,
                               has_entropy ? g_entropy[row * g_entropy_stride] : 0.0f,
                               is_class ? g_target[row * g_target_stride] : 0.0f,
                               !has_entropy && !has_target);
  settle_share<false>(share, held, fetched, x_row, span, first, -infinity());
  const uint32_t zero = hidden_zero(rows, {log_d, log_d});
  write_share<STREAM, Part>(
      held, dx_row + first * N - held.begin,
      [&](int v, float (&y)[N]) {
        const uint4 word = pick(share.words, v);
        unpack<X>(sizeof(X) == 4 ? word : as_it_came(word, zero), y);
        if (gradient.shift.is_coarse()) {
#pragma unroll
          for (int i = 0; i < N; ++i) y[i] = gradient.template value<true>(y[i]);
        } else {
#pragma unroll
          for (int i = 0; i < N; ++i) y[i] = gradient.template value<false>(y[i]);
        }
      },
      [&](int a) {
        return gradient.shift.is_coarse() ? gradient.template value<true>(share.after[a])
                                          : gradient.template value<false>(share.after[a]);
      });
  __syncwarp();  // the target's element: written by a lane above, again by lane 0
  if (is_here && Part::lane() == 0) {
    const float value = gradient.shift.is_coarse()
                            ? gradient.template value<true>(of_target, gradient.hit)
                            : gradient.template value<false>(of_target, gradient.hit);
    store(dx_row + target, value);
  }
}
