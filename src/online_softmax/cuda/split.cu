// What ships past a cluster's registers, and for logsumexp of long rows: several blocks a row, in two
// kernels. The first folds each part of a row to a state, the second merges a row's states and writes.
// Two reads, the second from L2 where the matrix fits, and one write. The parts follow from the column
// count alone, so a row has the same bits in any batch.
#include "emit.cuh"
#include "rows.cuh"

// Which part of which row a warp works on.
template <int VECTORS>
struct Part {
  int64_t row, index, first;
  __device__ explicit Part(int64_t parts)
      : row(blockIdx.x / uint32_t(parts)),
        index(blockIdx.x % uint32_t(parts)),
        first((index * warp_count() + warp_id()) * (VECTORS * WARP)) {}
};

template <typename X, int VECTORS, int LIES>
__global__ void __launch_bounds__(512)
    split_fold(const X* x,     // (rows, cols) input, rows x_row_stride apart
               State* states,  // (rows, parts) output
               int64_t rows, int64_t cols, int64_t x_row_stride, float scale, int64_t parts) {
  allow_next_kernel();  // it waits before it reads states
  const Part<VECTORS> at(parts);
  const X* x_row = x + at.row * x_row_stride;
  Share<X, VECTORS, WARP, LIES> share;
  const auto held = share.of(at.first, cols, begin_of<LIES>(x_row));
  const Span span(x, rows, cols, x_row_stride);
  const auto fetched = fetch_global<false>(share, held, x_row, span, at.first, -infinity());
  settle_share<false>(share, held, fetched, x_row, span, at.first, -infinity());
  const State s = block_merge_of_warps(fold_share<false>(share, held, scale).s);
  if (threadIdx.x == 0) states[blockIdx.x] = s;
}

template <typename X, typename Y, int VECTORS, int LIES, typename Emit>
__global__ void __launch_bounds__(512)
    split_emit(const X* x,           // (rows, cols) input, rows x_row_stride apart
               Y* y,                 // (rows, cols) output, contiguous
               const State* states,  // (rows, parts)
               int64_t rows, int64_t cols, int64_t x_row_stride, float scale, int64_t zero_empty,
               int64_t parts) {
  wait_for_previous_kernel();  // states: written by split_fold, read below
  const Part<VECTORS> at(parts);
  const X* x_row = x + at.row * x_row_stride;
  Y* y_row = y + at.row * cols;
  Share<X, VECTORS, WARP, LIES> share;
  const auto held = share.of(at.first, cols, begin_for<LIES, Emit>(x_row, y_row));
  const Span span(x, rows, cols, x_row_stride);
  const auto fetched = fetch_global<true>(share, held, x_row, span, at.first, -infinity());
  const State* of_row = states + at.row * parts;
  const State s = block_merge_of_warps(merge_parts(parts, [&](int64_t i) { return of_row[i]; }));
  settle_share<false>(share, held, fetched, x_row, span, at.first, -infinity());
  const Folded folded = fold_share<Emit::FROM_TERM>(share, held, scale);
  const float unit = is_finite(s.m) ? weight(folded.s.m, s.m) * folded.shift.back() : 0.0f;
  const Emit emit(s, unit, scale, zero_empty != 0);
  emit_share<true>(share, held, folded.shift, emit, y_row, at.first, hidden_zero(rows, s));
}

// A warp a row.
template <typename Y>
__global__ void split_lse(const State* states,  // (rows, parts)
                          Y* y,                 // (rows)
                          int64_t rows, int64_t parts) {
  wait_for_previous_kernel();  // states: written by split_fold, read below
  const int64_t row = int64_t(blockIdx.x) * warp_count() + warp_id();
  State s = empty();
  if (row < rows)
    for (int64_t i = lane_id(); i < parts; i += WARP) s = merge(s, states[row * parts + i]);
  s = warp_merge(s);
  if (row < rows && lane_id() == 0) store(y + row, lse(s));
}

template <typename X, int VECTORS, int LIES, typename Backward>
__global__ void __launch_bounds__(512)
    split_fold_backward(const X* dy,    // (rows, cols) gradient of y, rows dy_row_stride apart
                        const X* y,     // (rows, cols), contiguous
                        State* states,  // (rows, parts): the largest y, the sum of the terms
                        int64_t rows, int64_t cols, int64_t dy_row_stride, int64_t zero_empty,
                        int64_t parts) {
  allow_next_kernel();  // it waits before it reads states
  const Part<VECTORS> at(parts);
  Share<X, VECTORS, WARP, LIES> dy_share, y_share;
  const auto held = y_share.of(at.first, cols, begin_of<LIES>(y + at.row * cols));
  const float y_fill = Backward::y_past_the_end();
  const X *dy_row = dy + at.row * dy_row_stride, *y_row = y + at.row * cols;
  const Span dy_span(dy, rows, cols, dy_row_stride), y_span(y, rows, cols, cols);
  const auto of_dy = fetch_global<false>(dy_share, held, dy_row, dy_span, at.first, 0.0f);
  const auto of_y = fetch_global<false>(y_share, held, y_row, y_span, at.first, y_fill);
  settle_share<false>(dy_share, held, of_dy, dy_row, dy_span, at.first, 0.0f);
  settle_share<false>(y_share, held, of_y, y_row, y_span, at.first, y_fill);
  const State s = fold_gradient<Backward>(dy_share, y_share, held, zero_empty != 0);
  const float top = block_fold_of_warps<Maximum>(s.m), sum = block_fold_of_warps<Sum>(s.d);
  if (threadIdx.x == 0) states[blockIdx.x] = {top, sum};
}

template <typename X, int VECTORS, int LIES, typename Backward>
__global__ void __launch_bounds__(512)
    split_emit_backward(const X* dy,  // (rows, cols) gradient of y, rows dy_row_stride apart
                        const X* y,   // (rows, cols), contiguous
                        X* dx,        // (rows, cols) gradient of x, contiguous
                        const State* states,  // (rows, parts)
                        int64_t rows, int64_t cols, int64_t dy_row_stride, float scale,
                        int64_t zero_empty, int64_t parts) {
  wait_for_previous_kernel();  // states: written by split_fold_backward, read below
  const Part<VECTORS> at(parts);
  X* dx_row = dx + at.row * cols;
  Share<X, VECTORS, WARP, LIES> dy_share, y_share;
  const auto held = y_share.of(at.first, cols, begin_of<LIES>(dx_row));
  const float y_fill = Backward::y_past_the_end();
  const X *dy_row = dy + at.row * dy_row_stride, *y_row = y + at.row * cols;
  const Span dy_span(dy, rows, cols, dy_row_stride), y_span(y, rows, cols, cols);
  const auto of_dy = fetch_global<true>(dy_share, held, dy_row, dy_span, at.first, 0.0f);
  const auto of_y = fetch_global<true>(y_share, held, y_row, y_span, at.first, y_fill);
  const State* of_row = states + at.row * parts;
  const State mine = add_parts(parts, [&](int64_t i) { return of_row[i]; });
  const State s = {block_fold_of_warps<Maximum>(mine.m), block_fold_of_warps<Sum>(mine.d)};
  settle_share<false>(dy_share, held, of_dy, dy_row, dy_span, at.first, 0.0f);
  settle_share<false>(y_share, held, of_y, y_row, y_span, at.first, y_fill);
  const Backward backward(s.d, s.m, scale, zero_empty != 0);
  emit_gradient<true>(dy_share, y_share, held, backward, dx_row, at.first, hidden_zero(rows, s));
}
