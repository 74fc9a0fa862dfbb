// The gradient of cross-entropy by the logits, from each row's lse: one read, one write, which may go
// over the logits themselves. A group of lanes has a row, or (LANES 0) a warp a part of one; no group
// knows of another. The columns may be a shard of the classes, lse that of all. Floats may have a
// gradient of a 16-bit type, apart from them.
#include "crossentropy.cuh"

template <typename X, typename DX, int VECTORS, int LANES, int LIES, bool STREAM, bool CAPPED,
          int SMOOTHING>
__global__ void __launch_bounds__(256, SMOOTHING == WEIGHTED ? 2 : 4)
    cross_entropy_backward(const X* x,              // (rows, cols) logits, rows x_row_stride apart
                           const int64_t* targets,  // (rows)
                           const float* weights,    // (classes), with has_weights
                           const float* all_weights,  // their sum, if WEIGHTED
                           const float* dloss,        // (rows), dloss_stride apart, with has_dloss
                           const float* dlse,         // (rows), dlse_stride apart, with has_dlse
                           const float* lse,          // (rows)
                           const float* lse_rest,     // (rows), with has_rest
                           DX* dx,                    // (rows, cols), rows dx_row_stride apart
                           int64_t rows, int64_t cols, int64_t x_row_stride, int64_t dx_row_stride,
                           int64_t dloss_stride, int64_t dlse_stride, int64_t first_class,
                           int64_t classes, int64_t ignore_index, int64_t parts,
                           int64_t has_weights, int64_t has_dloss, int64_t has_dlse,
                           int64_t has_rest, float scale, float softcap, float hard, float soft,
                           float z_loss) {
  constexpr int GROUP = LANES ? LANES : WARP;
  const Piece<VECTORS, LANES> at(parts);
  const bool has_row = at.row < rows;  // lanes without one load nothing, and shuffle
  const int64_t row = has_row ? at.row : 0, first = at.first, last = has_row ? cols : 0;
  const X* x_row = x + row * x_row_stride;
  DX* dx_row = dx + row * dx_row_stride;
  using Part = Share<X, VECTORS, GROUP, LIES>;
  Part share;
  const auto held = share.of(first, last, begin_of<LIES>(dx_row) % Part::N);
  const Span span(x, rows, cols, x_row_stride);
  const auto fetched = fetch_global<STREAM>(share, held, x_row, span, first, -infinity());
  const Target target(targets, weights, has_weights != 0, row, classes, ignore_index, first_class);
  const bool has_target = target.is_among(first * Part::N, held.count());
  Asked<X> asked;
  if (has_target) asked.fetch(x_row + target.col);
  const Mix mix = {hard, soft, z_loss, SMOOTHING == WEIGHTED ? all_weights[0] : float(classes)};
  const float whole = lse[row], rest = has_rest ? lse_rest[row] : 0.0f;

  // Terms are shifted by what is about lse; `prob` makes up for the difference.
  const Logit<CAPPED> logit(scale, softcap);
  const Shift shift(whole / logit.scale, logit.scale);
  const float off = fused(shift.raw, logit.scale, -whole) - rest;
  const float prob = is_finite(whole) ? exponential(off) * shift.back() : not_a_number();
  const float of_loss = has_dloss ? dloss[row * dloss_stride] : 0.0f;
  const float of_lse = has_dlse ? dlse[row * dlse_stride] : 0.0f;
  const LogitGradient<CAPPED, SMOOTHING> gradient(logit, shift, prob, whole, of_loss, target, mix,
                                                  weights + first_class, cols, has_dlse != 0,
                                                  of_lse);
  settle_share<false>(share, held, fetched, x_row, span, first, -infinity());
  const State unused = {whole, whole};
  const uint32_t zero = hidden_zero(rows, unused);
  emit_logits<STREAM, false>(share, held, gradient, target, asked.value(zero), dx_row, first, zero);
}
