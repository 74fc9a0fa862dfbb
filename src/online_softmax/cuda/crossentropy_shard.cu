// Cross-entropy of rows whose columns lie in several shards: blocks of the vocabulary, one after the
// other, or on several devices. The first kernel folds a shard's parts of each row to partials, one
// read; the second merges a row's partials, of all shards, to the loss and lse. The gradient of a shard
// is crossentropy_backward.cu's, from that lse.
//
// A partial is m, d, the target's z (0 where it is elsewhere) and, with smoothing, the sum of
// w (reference - z) and the sum of w. The reference is m where it is finite, so that a large offset
// cancels within a part.
#include "crossentropy.cuh"

template <int SMOOTHING>
constexpr int FIELDS = SMOOTHING == HARD ? 3 : 5;

template <typename X, int VECTORS, int LIES, bool CAPPED, int SMOOTHING>
__global__ void __launch_bounds__(512)
    cross_entropy_fold_shard(const X* x,  // (rows, cols) logits, rows x_row_stride apart
                             const int64_t* targets,  // (rows)
                             const float* weights,    // (classes), if WEIGHTED
                             float* partials,         // (rows, parts, FIELDS) output, rows
                                                      // partials_row_stride apart
                             int64_t rows, int64_t cols, int64_t x_row_stride,
                             int64_t partials_row_stride, int64_t first_class, int64_t classes,
                             int64_t ignore_index, int64_t parts, float scale, float softcap) {
  using Part = Share<X, VECTORS, WARP, LIES>;
  const int64_t row = blockIdx.x / uint32_t(parts), index = blockIdx.x % uint32_t(parts);
  const int64_t first = (index * warp_count() + warp_id()) * (VECTORS * WARP);
  const X* x_row = x + row * x_row_stride;
  const Logit<CAPPED> logit(scale, softcap);
  Part share;
  const auto held = share.of(first, cols, begin_of<LIES>(x_row));
  const Span span(x, rows, cols, x_row_stride);
  const auto fetched = fetch_global<false>(share, held, x_row, span, first, -infinity());
  const Target target(targets, weights, false, row, classes, ignore_index, first_class);
  const bool has_target = target.is_among(first * Part::N, held.count());
  const float x_of_target = has_target ? load(x_row + target.col) : 0.0f;
  settle_share<false>(share, held, fetched, x_row, span, first, -infinity());
  const Folded folded = fold_logits<false>(share, held, logit);
  const State s = block_merge_of_warps(folded.s);
  const float z = block_fold_of_warps<Sum>(has_target ? logit.z(logit.map(x_of_target)) : 0.0f);
  float below = 0.0f, in_all = 0.0f;
  if constexpr (SMOOTHING != HARD) {
    if (sizeof(X) < 4) forget_floats(share, hidden_zero(rows, s));
    const float reference = reference_of(block_fold_of_warps<Maximum>(folded.top));
    const float* weights_here = weights + first_class;
    below = sum_below<SMOOTHING>(share, held, logit, reference, weights_here, first, cols);
    below = block_fold_of_warps<Sum>(below) * logit.scale;
    for (int i = lane_id(); i < held.count(); i += WARP)
      in_all += weight_of<SMOOTHING>(weights_here, first * Part::N + i, cols);
    in_all = block_fold<Sum>(in_all);
  }
  if (threadIdx.x != 0) return;
  float* partial = partials + row * partials_row_stride + index * FIELDS<SMOOTHING>;
  store(partial, s.m);
  store(partial + 1, s.d);
  store(partial + 2, z);
  if constexpr (SMOOTHING != HARD) {
    store(partial + 3, below);
    store(partial + 4, in_all);
  }
}

// A warp a row.
template <int SMOOTHING>
__global__ void __launch_bounds__(512)
    cross_entropy_finish(const int64_t* targets,    // (rows)
                         const float* weights,      // (classes), with has_weights
                         const float* all_weights,  // their sum, if WEIGHTED
                         const float* partials,     // (rows, parts, FIELDS), of all shards
                         float* loss,               // (rows)
                         float* lse,                // (rows)
                         float* lse_rest,  // (rows), with has_rest: what rounding takes from lse
                         int64_t rows, int64_t partials_row_stride, int64_t classes,
                         int64_t ignore_index, int64_t parts, int64_t has_weights, int64_t has_rest,
                         float hard, float soft, float z_loss) {
  const int64_t row = int64_t(blockIdx.x) * warp_count() + warp_id();
  const bool has_row = row < rows;
  const int64_t place = has_row ? row : 0;
  const Target target(targets, weights, has_weights != 0, place, classes, ignore_index);
  const Mix mix = {hard, soft, z_loss, SMOOTHING == WEIGHTED ? all_weights[0] : float(classes)};
  const float* of_row = partials + place * partials_row_stride;
  State s = empty();
  float z = 0.0f, of_all = 0.0f;
  for (int64_t i = lane_id(); has_row && i < parts; i += WARP) {
    const float* partial = of_row + i * FIELDS<SMOOTHING>;
    s = merge(s, {partial[0], partial[1]});
    z += partial[2];
  }
  s = warp_merge(s);
  z = warp_fold<Sum>(z);
  if constexpr (SMOOTHING != HARD) {
    const float log_d = is_finite(s.m) ? natural_log(s.d) : 0.0f;
    for (int64_t i = lane_id(); has_row && i < parts; i += WARP) {
      const float* partial = of_row + i * FIELDS<SMOOTHING>;
      const float reference = reference_of(partial[0]);
      of_all += partial[4] * ((s.m - reference) + log_d) + partial[3];
    }
    of_all = warp_fold<Sum>(of_all);
  }
  if (!has_row || lane_id() != 0) return;
  const TwoPartLse parts_of_lse(s);
  store(loss + row, row_loss<SMOOTHING>(s, target, z, of_all, mix));
  store(lse + row, parts_of_lse.value);
  if (has_rest) store(lse_rest + row, parts_of_lse.rest);
}
