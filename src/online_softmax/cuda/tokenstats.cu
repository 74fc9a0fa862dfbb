// Statistics of rows of logits: log-sum-exp, entropy, the target's log-probability and rank, the first
// `count` elements. One read: the first kernel folds each part of a row, the second merges the parts.
// The parts follow from the columns alone, so a row has the same bits in any batch.
#include "tokenstats_top.cuh"

// Blocks that share a multiprocessor's registers. Words shifted together leave floats less room; and
// before sm_90 bfloat16 elements are compared one by one, unpacked meanwhile.
template <typename X, bool WHOLE>
struct FoldBlocks {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int COUNT = 2;
#else
  static constexpr int COUNT = WHOLE ? 4 : 3;
#endif
};

// A block has a part of a row, and reads it once; the elements written down a second time. Writes 16
// bytes, and 8 for each of the first `count`.
template <typename X, int VECTORS, int LIES, bool TARGET, bool FIRST>
__global__ void __launch_bounds__(256, (FoldBlocks<X, LIES == WHOLE_WORDS>::COUNT))
    token_stats_fold(const X* x,              // (rows, cols) logits, rows x_row_stride apart
                     const int64_t* targets,  // (rows), if TARGET
                     Spread* spreads,         // (rows, parts) output
                     uint64_t* keys,          // (rows, parts, count) output, if FIRST
                     int64_t rows, int64_t cols, int64_t x_row_stride, int64_t parts, int64_t count,
                     int64_t groups, float scale) {
  using Part = Share<X, VECTORS, WARP, LIES>;
  allow_next_kernel();  // it waits before it reads
  // 32 bits: a division of 64 is long. cols is under 2^24.
  const uint32_t of_row = uint32_t(parts), at_row = blockIdx.x / of_row;
  const int64_t row = at_row;
  const int part =
      int(blockIdx.x - at_row * of_row) * warp_count() * (VECTORS * WARP);  // first word
  const int first = part + warp_id() * (VECTORS * WARP);
  const X* x_row = x + row * x_row_stride;
  // What follows the target comes before the words, so that nobody waits for it after them.
  const int64_t target = TARGET ? targets[row] : 0;
  Part share;
  // Words as of an aligned row, whatever this one's alignment: the same lane has the same element.
  const auto held = share.of(first, cols, 0);
  const Span span(x, rows, cols, x_row_stride);
  const auto fetched = fetch_global<false>(share, held, x_row, span, first, -infinity());
  uint32_t of_target = Code<X>::NO_NUMBER;  // which nothing is above
  if (TARGET && target >= 0 && target < cols) {
    host::count_reads(1);
    of_target = Code<X>::stored(x_row[target]);
  }
  settle_share<false>(share, held, fetched, x_row, span, first, -infinity());

  SHARED_ARRAY(Spread, of_warp, MAX_WARPS);
  SHARED_ARRAY(uint32_t, of_group, FIRST ? MOST_GROUPS : 1);
  SHARED_ARRAY(uint32_t, found, 2);
  SHARED_ARRAY(unsigned short, places, FIRST ? FIRST_CAPACITY : 1);
  SHARED_ARRAY(uint64_t, found_keys, FIRST ? FIRST_CAPACITY : 1);
  const FirstMemory memory = {of_group, found, places, found_keys};
  const int words = int((cols + Part::N - 1) / Part::N) - part;  // of the row, from this part on
  const int of_warps = First<Part>::groups_of(int(groups), words);
  const First<Part> taker = {share, held, memory, of_warps, int(count)};
  const float lane_top = largest<X>(share.words);
  const float top = FIRST ? taker.note_groups(lane_top) : warp_fold<Maximum>(lane_top);
  Spread s = spread_of(share, top, scale);
  if constexpr (TARGET) {
    const uint32_t than = Code<X>::in_all(of_target);
    s.above = warp_fold<Sum>(float(mark_above<false>(share, than).count()));  // padding is -inf
  }
  if (lane_id() == 0) of_warp[warp_id()] = s;
  __syncthreads();  // of_warp, of_group: written by each warp, read by all
  if (warp_id() == warp_count() - 1) {
    s = warp_merge(lane_id() < warp_count() ? of_warp[lane_id()] : no_spread());
    if (lane_id() == 0) spreads[blockIdx.x] = s;
  }
  if constexpr (FIRST) {
    const int64_t col = int64_t(part) * Part::N;
    taker.take(lane_top, x_row + col, col, keys + int64_t(blockIdx.x) * count);
  }
}

// A block has a row; its first warp merges the spreads, and all of them lists. KEYS: count / 32, up to a
// power of two, or 0.
template <typename X, int KEYS, bool TARGET>
__global__ void __launch_bounds__(256)
    token_stats_merge(const X* x,              // (rows, cols) logits, rows x_row_stride apart
                      const int64_t* targets,  // (rows), if TARGET
                      const Spread* spreads,   // (rows, parts)
                      const uint64_t* keys,    // (rows, parts, count), if KEYS
                      float* state,            // (rows, 2) output: m and log d
                      float* lse,              // (rows) output
                      float* entropy,          // (rows) output, in nats
                      float* log_prob,         // (rows) output, if TARGET; NaN: it is no class
                      int64_t* rank,  // (rows) output, if TARGET, from 1; 0: it is no class
                      float* first_log_probs,  // (rows, count) output, if KEYS
                      int64_t* first_cols,     // (rows, count) output, if KEYS
                      int64_t rows, int64_t cols, int64_t x_row_stride, int64_t parts,
                      int64_t count, float scale) {
  const int64_t row = blockIdx.x;
  const int64_t target = TARGET ? targets[row] : 0;
  const bool is_class = TARGET && target >= 0 && target < cols;
  const float of_target = is_class ? load(x + row * x_row_stride + target) : 0.0f;
  wait_for_previous_kernel();  // spreads, keys: written by token_stats_fold, read below
  Spread s = no_spread();
  if (warp_id() == 0)
    for (int64_t i = lane_id(); i < parts; i += WARP) s = merge(s, spreads[row * parts + i]);
  s = warp_merge(s);
  const bool is_normal = is_finite(s.m);
  const float log_d = is_normal ? natural_log(s.d) : not_a_number();
  if (threadIdx.x == 0) {
    store(state + row * 2, s.m);
    store(state + row * 2 + 1, log_d);
    store(lse + row, ::lse(State{s.m, s.d}));
    const float h = log_d - s.t / s.d;
    store(entropy + row, is_normal ? (h > 0.0f ? h : 0.0f) : not_a_number());
    if constexpr (TARGET) {
      const float log_p = (product(of_target, scale) - s.m) - log_d;
      store(log_prob + row, is_class ? log_p : not_a_number());
      host::count_writes(1);
      rank[row] = is_class ? 1 + int64_t(s.above) : 0;
    }
  }
  if constexpr (KEYS > 0) {
    using List = TopList<KEYS>;
    SHARED_ARRAY(uint64_t, of_warp, MAX_WARPS / 4 * List::SIZE);
    const int n = int(count);
    const uint64_t* of_row = keys + row * parts * count;
    List list;
    for (int64_t i = warp_id(); i < parts; i += warp_count())
      if (of_row[i * count] > list.at(n - 1)) list.merge(of_row + i * count, n);
#pragma unroll
    for (int j = 0; j < KEYS; ++j)
      of_warp[warp_id() * List::SIZE + j * WARP + lane_id()] = list.keys[j];
    __syncthreads();  // of_warp: written by each warp, read by the first
    if (warp_id() > 0) return;
    for (int i = 1; i < warp_count(); ++i) list.merge(of_warp + i * List::SIZE, n);
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
      const int place = j * WARP + lane_id();
      if (place >= n) continue;
      const float z = product(value_of(list.keys[j]), scale);
      store(first_log_probs + row * count + place, (z - s.m) - log_d);
      host::count_writes(1);
      first_cols[row * count + place] = col_of(list.keys[j]);
    }
  }
}
