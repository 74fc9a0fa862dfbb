// What ships for rows that take a cluster's registers: while a row is in registers, the next one lands in
// shared memory by bulk copies (sm_90 on), so that memory never waits for the exchange. Clusters stay
// and take every n-th row. One read, one write.
#include "emit.cuh"
#include "landing.cuh"

template <typename X, typename Y, int VECTORS, int LIES, bool STREAM, typename Emit>
__global__ void __launch_bounds__(512)
    rows_landed(const X* x,  // (rows, cols) input, rows x_row_stride apart
                Y* y,        // (rows, cols) output, contiguous
                int64_t rows, int64_t cols, int64_t x_row_stride, float scale, int64_t zero_empty) {
  using Part = Landing<X, VECTORS, LIES>;
  DYNAMIC_SHARED(uint4, words);  // [warp][WORDS], then an Exchange's slots
  State* slots = reinterpret_cast<State*>(words + warp_count() * Part::WORDS);
  SHARED_ARRAY(uint64_t, arrived, 2);
  SHARED_ARRAY(uint64_t, landed, MAX_WARPS);
  Exchange exchange = {slots, arrived};
  exchange.open();
  Part part = {words + warp_id() * Part::WORDS, landed + warp_id()};
  if (lane_id() == 0) {
    barrier_init(part.landed);
    barrier_init_fence();
  }
  __syncwarp();  // landed: initialised by lane 0 before others wait on it

  const Span span(x, rows, cols, x_row_stride);
  const int64_t clusters = gridDim.x / cluster_size(), first_row = cluster_id();
  const int64_t first = int64_t(cluster_rank() * warp_count() + warp_id()) * Part::At::WORDS;
  auto held_of = [&](int64_t row) {
    return typename Part::At(first, cols,
                             begin_for<LIES, Emit>(x + row * x_row_stride, y + row * cols));
  };
  if (first_row < rows) part.fetch(x + first_row * x_row_stride, span, first, held_of(first_row));
  uint32_t k = 0;
  for (int64_t row = first_row; row < rows; row += clusters, ++k) {
    const X* x_row = x + row * x_row_stride;
    const auto held = held_of(row);
    typename Part::Part share;
    part.take(k, x_row, span, first, held, -infinity(), share);
    const int64_t next = row + clusters;
    if (next < rows) part.fetch(x + next * x_row_stride, span, first, held_of(next));
    const Folded folded = fold_share<Emit::FROM_TERM>(share, held, scale);
    const State s = exchange.merge(folded.s, k);
    const float unit = is_finite(s.m) ? weight(folded.s.m, s.m) * folded.shift.back() : 0.0f;
    const Emit emit(s, unit, scale, zero_empty != 0);
    emit_share<STREAM>(share, held, folded.shift, emit, y + row * cols, first,
                       hidden_zero(rows, s));
  }
}

template <typename X, int VECTORS, int LIES, bool STREAM, typename Backward>
__global__ void __launch_bounds__(512)
    rows_landed_backward(const X* dy,  // (rows, cols) gradient of y, rows dy_row_stride apart
                         const X* y,   // (rows, cols), contiguous
                         X* dx,        // (rows, cols) gradient of x, contiguous
                         int64_t rows, int64_t cols, int64_t dy_row_stride, float scale,
                         int64_t zero_empty) {
  using Part = Landing<X, VECTORS, LIES>;
  DYNAMIC_SHARED(uint4, words);  // [warp][2][WORDS], then an Exchange's slots
  State* slots = reinterpret_cast<State*>(words + warp_count() * 2 * Part::WORDS);
  SHARED_ARRAY(uint64_t, arrived, 2);
  SHARED_ARRAY(uint64_t, landed, 2 * MAX_WARPS);
  Exchange exchange = {slots, arrived};
  exchange.open();
  Part dy_part = {words + warp_id() * 2 * Part::WORDS, landed + 2 * warp_id()};
  Part y_part = {dy_part.words + Part::WORDS, dy_part.landed + 1};
  if (lane_id() == 0) {
    barrier_init(dy_part.landed);
    barrier_init(y_part.landed);
    barrier_init_fence();
  }
  __syncwarp();  // landed: initialised by lane 0 before others wait on it

  const Span dy_span(dy, rows, cols, dy_row_stride), y_span(y, rows, cols, cols);
  const int64_t clusters = gridDim.x / cluster_size(), first_row = cluster_id();
  const int64_t first = int64_t(cluster_rank() * warp_count() + warp_id()) * Part::At::WORDS;
  auto held_of = [&](int64_t row) {
    return typename Part::At(first, cols, begin_of<LIES>(dx + row * cols));
  };
  auto fetch = [&](int64_t row) {
    if (row >= rows) return;
    dy_part.fetch(dy + row * dy_row_stride, dy_span, first, held_of(row));
    y_part.fetch(y + row * cols, y_span, first, held_of(row));
  };
  fetch(first_row);
  uint32_t k = 0;
  for (int64_t row = first_row; row < rows; row += clusters, ++k) {
    const auto held = held_of(row);
    typename Part::Part dy_share, y_share;
    dy_part.take(k, dy + row * dy_row_stride, dy_span, first, held, 0.0f, dy_share);
    y_part.take(k, y + row * cols, y_span, first, held, Backward::y_past_the_end(), y_share);
    fetch(row + clusters);
    const State part = fold_gradient<Backward>(dy_share, y_share, held, zero_empty != 0);
    const State s = exchange.add(part, k);
    const Backward backward(s.d, s.m, scale, zero_empty != 0);
    emit_gradient<STREAM>(dy_share, y_share, held, backward, dx + row * cols, first,
                          hidden_zero(rows, s));
  }
}
