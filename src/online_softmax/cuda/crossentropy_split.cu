// Cross-entropy of long rows: several blocks a row. The first kernel folds each part of a row to a
// state, the second merges a row's states and makes the loss. One read; the parts follow from the
// column count alone, so a row has the same bits in any batch.
#include "crossentropy.cuh"

template <typename X, int VECTORS, int LIES, bool CAPPED, int SMOOTHING>
__global__ void __launch_bounds__(512)
    cross_entropy_fold(const X* x,              // (rows, cols) logits, rows x_row_stride apart
                       const int64_t* targets,  // (rows)
                       const float* weights,    // (cols), if WEIGHTED
                       State* states,           // (rows, parts) output
                       float* sums,             // (rows, parts) output, with smoothing: sum_below
                       int64_t rows, int64_t cols, int64_t x_row_stride, int64_t ignore_index,
                       int64_t parts, float scale, float softcap) {
  allow_next_kernel();  // it waits before it reads states
  const int64_t row = blockIdx.x / uint32_t(parts), index = blockIdx.x % uint32_t(parts);
  const int64_t first = (index * warp_count() + warp_id()) * (VECTORS * WARP);
  const X* x_row = x + row * x_row_stride;
  const Logit<CAPPED> logit(scale, softcap);
  Share<X, VECTORS, WARP, LIES> share;
  const auto held = share.of(first, cols, begin_of<LIES>(x_row));
  const Span span(x, rows, cols, x_row_stride);
  const auto fetched = fetch_global<false>(share, held, x_row, span, first, -infinity());
  settle_share<false>(share, held, fetched, x_row, span, first, -infinity());
  if constexpr (SMOOTHING != HARD) {
    const Target target(targets, weights, false, row, cols, ignore_index);
    const float mapped = target.is_class ? logit.map(load(x_row + target.col)) : 0.0f;
    const float below =
        sum_below<SMOOTHING>(share, held, logit, reference_of(mapped), weights, first, cols);
    if (sizeof(X) < 4) forget_floats(share, hidden_zero(rows, {below, below}));
    const float of_block = block_fold_of_warps<Sum>(below);
    if (threadIdx.x == 0) sums[blockIdx.x] = of_block;
  }
  const State s = block_merge_of_warps(fold_logits<false>(share, held, logit).s);
  if (threadIdx.x == 0) states[blockIdx.x] = s;
}

// A warp a row.
template <typename X, bool CAPPED, int SMOOTHING>
__global__ void __launch_bounds__(512)
    cross_entropy_merge(const X* x,                // (rows, cols) logits, rows x_row_stride apart
                        const int64_t* targets,    // (rows)
                        const float* weights,      // (cols), with has_weights
                        const float* all_weights,  // their sum, if WEIGHTED
                        const State* states,       // (rows, parts)
                        const float* sums,         // (rows, parts), with smoothing
                        float* loss,               // (rows)
                        float* lse,                // (rows)
                        float* lse_rest,  // (rows), with has_rest: what rounding takes from lse
                        int64_t rows, int64_t cols, int64_t x_row_stride, int64_t ignore_index,
                        int64_t parts, int64_t has_weights, int64_t has_rest, float scale,
                        float softcap, float hard, float soft, float z_loss) {
  allow_next_kernel();  // the sum of the losses: it waits before it reads them
  const int64_t row = int64_t(blockIdx.x) * warp_count() + warp_id();
  const bool has_row = row < rows;
  const Logit<CAPPED> logit(scale, softcap);
  const int64_t place = has_row ? row : 0;
  const Target target(targets, weights, has_weights != 0, place, cols, ignore_index);
  const float mapped =
      target.is_class ? logit.map(load(x + place * x_row_stride + target.col)) : 0.0f;
  const Mix mix = {hard, soft, z_loss, SMOOTHING == WEIGHTED ? all_weights[0] : float(cols)};
  wait_for_previous_kernel();  // states: written by cross_entropy_fold, read below
  State s = empty();
  float below = 0.0f;
  for (int64_t i = lane_id(); has_row && i < parts; i += WARP) {
    s = merge(s, states[row * parts + i]);
    if (SMOOTHING != HARD) below += sums[row * parts + i];
  }
  s = warp_merge(s);
  if constexpr (SMOOTHING != HARD) below = warp_fold<Sum>(below);
  if (!has_row || lane_id() != 0) return;
  const TwoPartLse parts_of_lse(s);
  store(loss + row,
        row_loss<SMOOTHING>(s, logit, target, mapped, reference_of(mapped), below, mix));
  store(lse + row, parts_of_lse.value);
  if (has_rest) store(lse_rest + row, parts_of_lse.rest);
}
