// What ships for rows that fit in registers: one read, one write. A row belongs to LANES lanes of a warp,
// or (LANES 0) to a block or a cluster of blocks. 16-bit elements stay as they came, two a register.
#include "emit.cuh"
#include "rows.cuh"

// Threads a block and blocks a multiprocessor that registers shall do for: 64 registers up to 8 vectors.
// 16-bit elements that are written stay as they came, so 9 vectors have room in 64 too, and 10 in 72:
// rows for which 8 would leave many lanes of a cluster idle (rowtables.py).
template <typename X, int VECTORS, int LANES, int LIES, bool WRITES>
struct Room {
  static constexpr bool STAYS = WRITES && sizeof(X) == 2 && LIES != APART;
  static constexpr bool IS_TIGHT = LIES != WHOLE_WORDS && LANES > 0;
  static constexpr int THREADS = STAYS && VECTORS == 10 ? 448 : 512;
  static constexpr int BLOCKS =
      VECTORS < 8 || (VECTORS == 8 && !IS_TIGHT) || (STAYS && VECTORS <= 10 && !IS_TIGHT) ? 2 : 1;
};

template <typename X, typename Y, int VECTORS, int LANES, int LIES, bool STREAM, typename Emit>
__global__ void __launch_bounds__((Room<X, VECTORS, LANES, LIES, Emit::WRITES_ROW>::THREADS),
                                  (Room<X, VECTORS, LANES, LIES, Emit::WRITES_ROW>::BLOCKS))
    rows_in_registers(const X* x,  // (rows, cols) input, rows x_row_stride apart
                      Y* y,        // (rows, cols) output, contiguous; or (rows)
                      int64_t rows, int64_t cols, int64_t x_row_stride, float scale,
                      int64_t zero_empty) {
  constexpr int GROUP = LANES ? LANES : WARP;
  DYNAMIC_SHARED(State, slots);  // an Exchange's
  SHARED_ARRAY(uint64_t, arrived, 2);
  Exchange exchange = {slots, arrived};

  const Place<VECTORS, LANES> at;
  const bool has_row = at.row < rows;  // lanes without one load nothing, and shuffle
  const int64_t row = has_row ? at.row : 0, last = has_row ? cols : 0;
  const X* x_row = x + row * x_row_stride;
  Y* y_row = y + row * (Emit::WRITES_ROW ? cols : 1);
  Share<X, VECTORS, GROUP, LIES> share;
  const auto held = share.of(at.first, last, begin_for<LIES, Emit>(x_row, y_row));
  const Span span(x, rows, cols, x_row_stride);
  const auto fetched = fetch_global<STREAM>(share, held, x_row, span, at.first, -infinity());
  if constexpr (LANES == 0) exchange.open();  // while the words are on their way
  settle_share<false>(share, held, fetched, x_row, span, at.first, -infinity());
  const Folded folded = fold_share<Emit::FROM_TERM>(share, held, scale);
  State s = folded.s;
  if constexpr (LANES == 0) {
    if (cluster_size() * warp_count() > 1) s = exchange.merge(s, 0);
  }

  const float unit = is_finite(s.m) ? weight(folded.s.m, s.m) * folded.shift.back() : 0.0f;
  const Emit emit(s, unit, scale, zero_empty != 0);
  if constexpr (Emit::WRITES_ROW) {
    emit_share<STREAM>(share, held, folded.shift, emit, y_row, at.first, hidden_zero(rows, s));
  } else if (has_row && at.first == 0 && lane_id() % GROUP == 0) {
    store(y_row, emit.value);
  }
}

template <typename X, int VECTORS, int LANES, int LIES, bool STREAM, typename Backward>
__global__ void __launch_bounds__(512, VECTORS > 4 || (VECTORS == 4 && LIES == APART) ? 1 : 2)
    rows_in_registers_backward(const X* dy,  // (rows, cols) gradient of y, rows dy_row_stride apart
                               const X* y,   // (rows, cols), contiguous
                               X* dx,        // (rows, cols) gradient of x, contiguous
                               int64_t rows, int64_t cols, int64_t dy_row_stride, float scale,
                               int64_t zero_empty) {
  constexpr int GROUP = LANES ? LANES : WARP;
  DYNAMIC_SHARED(State, slots);  // an Exchange's
  SHARED_ARRAY(uint64_t, arrived, 2);
  Exchange exchange = {slots, arrived};

  const Place<VECTORS, LANES> at;
  const bool has_row = at.row < rows;
  const int64_t row = has_row ? at.row : 0, last = has_row ? cols : 0;
  X* dx_row = dx + row * cols;
  Share<X, VECTORS, GROUP, LIES> dy_share, y_share;
  const auto held = y_share.of(at.first, last, begin_of<LIES>(dx_row));
  const float y_fill = Backward::y_past_the_end();
  const X *dy_row = dy + row * dy_row_stride, *y_row = y + row * cols;
  const Span dy_span(dy, rows, cols, dy_row_stride), y_span(y, rows, cols, cols);
  const auto of_dy = fetch_global<STREAM>(dy_share, held, dy_row, dy_span, at.first, 0.0f);
  const auto of_y = fetch_global<STREAM>(y_share, held, y_row, y_span, at.first, y_fill);
  if constexpr (LANES == 0) exchange.open();  // while the words are on their way
  settle_share<false>(dy_share, held, of_dy, dy_row, dy_span, at.first, 0.0f);
  settle_share<false>(y_share, held, of_y, y_row, y_span, at.first, y_fill);
  State s = fold_gradient<Backward>(dy_share, y_share, held, zero_empty != 0);
  if constexpr (LANES == 0) {
    if (cluster_size() * warp_count() > 1) s = exchange.add(s, 0);
  }
  const Backward backward(s.d, s.m, scale, zero_empty != 0);
  emit_gradient<STREAM>(dy_share, y_share, held, backward, dx_row, at.first, hidden_zero(rows, s));
}
