// What ships for rows that take a cluster's registers: while a row is in registers, the next one lands in
// shared memory by bulk copies (sm_90 on), so that memory never waits for the exchange. Clusters stay
// and take every n-th row. One read, one write.
#include "emit.cuh"
#include "rows.cuh"

// A warp's part of a tensor's rows: lands as words, leaves as a share.
template <typename X, int VECTORS, bool WHOLE>
struct Landing {
  static constexpr int HELD = VECTORS * WARP, WORDS = HELD + (WHOLE ? 0 : 1);
  uint4* words;
  uint64_t* landed;

  __device__ __forceinline__ void fetch(const X* row, Span span, int64_t first, int64_t last) {
    if (lane_id() != 0) return;
    const Readable<HELD> readable(row, span, first, last);
    const int stop = readable.to < WORDS ? readable.to : WORDS;
    const int count = stop > readable.from ? stop - readable.from : 0;
    bulk_copy(words + readable.from, readable.words + readable.from, count, landed);
  }

  // k counts rows. The words may be overwritten afterwards.
  __device__ __forceinline__ void take(uint32_t k, const X* row, Span span, int64_t first,
                                       int64_t last, float fill, uint4 (&share)[VECTORS]) {
    barrier_wait(landed, k & 1);
    const Readable<HELD> readable(row, span, first, last);
    load_share<WARP, WHOLE>(
        row, first, last, fill, readable, [&](int i) { return words[i]; }, share);
    __syncwarp();  // words: read by all lanes before the next row lands on them
  }
};

template <typename X, typename Y, int VECTORS, bool WHOLE, bool STREAM, typename Emit>
__global__ void __launch_bounds__(512)
    rows_landed(const X* x,  // (rows, cols) input, rows x_row_stride apart
                Y* y,        // (rows, cols) output, contiguous
                int64_t rows, int64_t cols, int64_t x_row_stride, float scale, int64_t zero_empty) {
  using Part = Landing<X, VECTORS, WHOLE>;
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
  const int64_t clusters = gridDim.x / cluster_size(), first_row = blockIdx.x / cluster_size();
  const int64_t first = int64_t(cluster_rank() * warp_count() + warp_id()) * Part::HELD;
  if (first_row < rows) part.fetch(x + first_row * x_row_stride, span, first, cols);
  uint32_t k = 0;
  for (int64_t row = first_row; row < rows; row += clusters, ++k) {
    const X* x_row = x + row * x_row_stride;
    uint4 share[VECTORS];
    part.take(k, x_row, span, first, cols, -infinity(), share);
    if (row + clusters < rows) part.fetch(x_row + clusters * x_row_stride, span, first, cols);
    const Folded folded = fold_share<X, WARP, Emit::FROM_TERM>(share, scale);
    const State s = exchange.merge(folded.s, k);
    const float unit = is_finite(s.m) ? weight(folded.s.m, s.m) * folded.shift.back() : 0.0f;
    const Emit emit(s, unit, scale, zero_empty != 0);
    emit_share<X, Emit, WARP, WHOLE, STREAM>(share, folded.shift, emit, y + row * cols, first, cols,
                                             hidden_zero(rows, s));
  }
}

template <typename X, int VECTORS, bool WHOLE, bool STREAM, typename Backward>
__global__ void __launch_bounds__(512)
    rows_landed_backward(const X* dy,  // (rows, cols) gradient of y, rows dy_row_stride apart
                         const X* y,   // (rows, cols), contiguous
                         X* dx,        // (rows, cols) gradient of x, contiguous
                         int64_t rows, int64_t cols, int64_t dy_row_stride, float scale,
                         int64_t zero_empty) {
  using Part = Landing<X, VECTORS, WHOLE>;
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
  const int64_t clusters = gridDim.x / cluster_size(), first_row = blockIdx.x / cluster_size();
  const int64_t first = int64_t(cluster_rank() * warp_count() + warp_id()) * Part::HELD;
  auto fetch = [&](int64_t row) {
    if (row >= rows) return;
    dy_part.fetch(dy + row * dy_row_stride, dy_span, first, cols);
    y_part.fetch(y + row * cols, y_span, first, cols);
  };
  fetch(first_row);
  uint32_t k = 0;
  for (int64_t row = first_row; row < rows; row += clusters, ++k) {
    uint4 dy_share[VECTORS], y_share[VECTORS];
    dy_part.take(k, dy + row * dy_row_stride, dy_span, first, cols, 0.0f, dy_share);
    y_part.take(k, y + row * cols, y_span, first, cols, Backward::y_past_the_end(), y_share);
    fetch(row + clusters);
    const State part = fold_gradient<X, Backward, WARP>(dy_share, y_share, zero_empty != 0);
    const State s = exchange.add(part, k);
    const Backward backward(s.d, s.m, scale, zero_empty != 0);
    emit_gradient<X, Backward, WARP, WHOLE, STREAM>(dy_share, y_share, backward, dx + row * cols,
                                                    first, cols, hidden_zero(rows, s));
  }
}
