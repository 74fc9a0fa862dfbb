// What ships for long rows, many of them: every element is read once at any length that fits the shared
// memory of all multiprocessors together. Blocks stay, and take parts of rows in turn, cut as split.cu
// cuts them. A part lands in a ring of stages by bulk copies (sm_90 on); its state is posted for the
// other blocks; and `lag` turns later, when the row's last state has long been posted, it is written from
// the stage where it still lies. One read, one write, and a word of 8 bytes a part.
//
// No block waits for ever. Block b takes items b, b + g, b + 2 g, .. of (rows, parts), g blocks, and
// in turn n posts its item n before it waits for the row of its item n - lag. All of that row is posted
// in turn n - lag + ceil((parts - 1) / g) at the latest, and lag is no less than this last term: so who
// waits in turn n waits for posts of that turn or of earlier ones. All blocks are resident (a cooperative
// launch), so by induction over turns every block comes to post, and every wait ends.
#include "emit.cuh"
#include "landing.cuh"

// One of a block's items: which part of which row, which stage it lies in, and how often that stage was
// filled before.
struct Item {
  int64_t row;
  uint32_t part, stage, round;
};

struct Walk {
  uint32_t parts, stages, rows_on, parts_on;  // a step goes so many rows and parts on
  __device__ Walk(int64_t parts, int64_t stages)
      : parts(uint32_t(parts)),
        stages(uint32_t(stages)),
        rows_on(gridDim.x / this->parts),
        parts_on(gridDim.x % this->parts) {}
  __device__ Item first() const { return {blockIdx.x / parts, blockIdx.x % parts, 0, 0}; }
  __device__ __forceinline__ void advance(Item& at) const {
    at.row += rows_on;
    at.part += parts_on;
    if (at.part >= parts) {
      at.part -= parts;
      ++at.row;
    }
    if (++at.stage == stages) {
      at.stage = 0;
      ++at.round;
    }
  }
};

// The states of a block's warps as one, of one item after another: two sets of slots take turns, so
// that one barrier will do. What a warp writes now all have read before the barrier that came last.
struct Warps {
  State* slots;  // [2][warps]
  uint32_t turn = 0;

  __device__ __forceinline__ State meet(State s) {
    State* here = slots + (turn++ & 1) * warp_count();
    if (lane_id() == 0) here[warp_id()] = s;
    __syncthreads();  // here: written by each warp's lane 0, read by all
    return lane_id() < warp_count() ? here[lane_id()] : empty();
  }
  __device__ __forceinline__ State merge(State s) { return warp_merge(meet(s)); }
  __device__ __forceinline__ State add(State s) {
    s = meet(s);
    return {warp_fold<Maximum>(s.m), warp_fold<Sum>(s.d)};
  }
};

// The shared memory of a block: words of [stage][warp][TENSORS], a barrier for each, slots, and the
// largest element of each warp's share, [stage][warp], from folding it to writing it.
template <typename X, int TENSORS, int VECTORS, int LIES>
struct Ring {
  using Part = Landing<X, VECTORS, LIES>;
  uint4* words;
  uint64_t* landed;
  State* slots;
  float* tops;

  __device__ Ring(uint4* memory, uint32_t stages)
      : words(memory),
        landed(reinterpret_cast<uint64_t*>(memory + stages * warp_count() * TENSORS * Part::WORDS)),
        slots(reinterpret_cast<State*>(landed + stages * warp_count() * TENSORS)),
        tops(reinterpret_cast<float*>(slots + 2 * warp_count())) {
    if (lane_id() == 0) {
      for (uint32_t stage = 0; stage < stages; ++stage)
        for (int tensor = 0; tensor < TENSORS; ++tensor) barrier_init(part(stage, tensor).landed);
      barrier_init_fence();
    }
    __syncwarp();  // landed: initialised by lane 0 before others wait on it
  }
  __device__ __forceinline__ Part part(uint32_t stage, int tensor) const {
    const int place = (int(stage) * warp_count() + warp_id()) * TENSORS + tensor;
    return {words + place * Part::WORDS, landed + place};
  }
  __device__ __forceinline__ float& top(uint32_t stage) const {  // by lane 0 alone, for all
    return tops[int(stage) * warp_count() + warp_id()];
  }
};

// No state is there yet.
__global__ void clear_states(uint64_t* states,  // (count) output
                             int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) states[i] = 0;
}

// (512, 1): the ring leaves no room for another 512 threads, so they may have 128 registers each.
template <typename X, typename Y, int VECTORS, int LIES, bool STREAM, typename Emit>
__global__ void __launch_bounds__(512, 1)
    rows_streamed(const X* x,        // (rows, cols) input, rows x_row_stride apart
                  Y* y,              // (rows, cols) output, contiguous
                  uint64_t* states,  // (rows, parts) workspace, cleared
                  int64_t rows, int64_t cols, int64_t x_row_stride, float scale, int64_t zero_empty,
                  int64_t parts, int64_t stages, int64_t lag) {
  DYNAMIC_SHARED(uint4, memory);
  const Walk walk(parts, stages);
  const Ring<X, 1, VECTORS, LIES> ring(memory, walk.stages);
  Warps warps = {ring.slots};
  const Span span(x, rows, cols, x_row_stride);
  Item ahead = walk.first(), fresh = ahead, due = ahead;  // to fetch, to post, to write
  using Part = Share<X, VECTORS, WARP, LIES>;
  auto first = [&](const Item& at) {
    return (int64_t(at.part) * warp_count() + warp_id()) * (VECTORS * WARP);
  };
  auto held = [&](const Item& at) {
    const int begin = begin_for<LIES, Emit>(x + at.row * x_row_stride, y + at.row * cols);
    return Part::of(first(at), cols, begin);
  };
  auto fetch = [&] {
    if (ahead.row >= rows) return;
    ring.part(ahead.stage, 0).fetch(x + ahead.row * x_row_stride, span, first(ahead), held(ahead));
    walk.advance(ahead);
  };
  auto take = [&](const Item& at, Part& share) {
    ring.part(at.stage, 0)
        .take(at.round, x + at.row * x_row_stride, span, first(at), held(at), -infinity(), share);
  };
  for (uint32_t i = 0; i < walk.stages; ++i) fetch();

  State s = empty();
  bool is_known = false;           // s is that of the row that is due
  uint32_t early = uint32_t(lag);  // turns until the first item is due
  while (due.row < rows) {
    // A look at the states that will be needed, so that the answer is on its way meanwhile.
    const uint64_t* of_row = states + due.row * parts;
    const bool looks = early == 0 && !is_known && threadIdx.x < walk.parts;
    const uint64_t seen = looks ? peek(of_row + threadIdx.x) : 0;
    if (fresh.row < rows) {
      Part share;
      take(fresh, share);
      const Folded folded = fold_share<false>(share, held(fresh), scale);
      if (lane_id() == 0) ring.top(fresh.stage) = folded.top;
      const State part = warps.merge(folded.s);
      if (threadIdx.x == 0) post(states + fresh.row * parts + fresh.part, part);
      walk.advance(fresh);
    }
    if (early > 0) {
      --early;
      continue;
    }
    Part share;
    take(due, share);
    fetch();  // onto the words that were just taken
    if (!is_known) {
      s = warps.merge(merge_parts(parts, [&](int64_t i) {
        return wait_for_state(of_row + i, i == threadIdx.x ? seen : 0);
      }));
    }
    const float top = ring.top(due.stage);
    const Shift shift(top, scale);
    const float unit = is_finite(s.m) ? weight(product(top, scale), s.m) * shift.back() : 0.0f;
    const Emit emit(s, unit, scale, zero_empty != 0);
    emit_share<STREAM, false>(share, held(due), shift, emit, y + due.row * cols, first(due),
                              hidden_zero(rows, s));
    const int64_t row = due.row;
    walk.advance(due);
    is_known = due.row == row;
  }
}

template <typename X, int VECTORS, int LIES, bool STREAM, typename Backward>
__global__ void __launch_bounds__(512, 1)
    rows_streamed_backward(const X* dy,  // (rows, cols) gradient of y, rows dy_row_stride apart
                           const X* y,   // (rows, cols), contiguous
                           X* dx,        // (rows, cols) gradient of x, contiguous
                           uint64_t* states,  // (rows, parts) workspace, cleared
                           int64_t rows, int64_t cols, int64_t dy_row_stride, float scale,
                           int64_t zero_empty, int64_t parts, int64_t stages, int64_t lag) {
  DYNAMIC_SHARED(uint4, memory);
  const Walk walk(parts, stages);
  const Ring<X, 2, VECTORS, LIES> ring(memory, walk.stages);
  Warps warps = {ring.slots};
  const Span dy_span(dy, rows, cols, dy_row_stride), y_span(y, rows, cols, cols);
  Item ahead = walk.first(), fresh = ahead, due = ahead;  // to fetch, to post, to write
  using Part = Share<X, VECTORS, WARP, LIES>;
  auto first = [&](const Item& at) {
    return (int64_t(at.part) * warp_count() + warp_id()) * (VECTORS * WARP);
  };
  auto held = [&](const Item& at) {
    return Part::of(first(at), cols, begin_of<LIES>(dx + at.row * cols));
  };
  auto fetch = [&] {
    if (ahead.row >= rows) return;
    const auto part = held(ahead);
    ring.part(ahead.stage, 0).fetch(dy + ahead.row * dy_row_stride, dy_span, first(ahead), part);
    ring.part(ahead.stage, 1).fetch(y + ahead.row * cols, y_span, first(ahead), part);
    walk.advance(ahead);
  };
  auto take = [&](const Item& at, Part& dy_share, Part& y_share) {
    const auto part = held(at);
    ring.part(at.stage, 0)
        .take(at.round, dy + at.row * dy_row_stride, dy_span, first(at), part, 0.0f, dy_share);
    ring.part(at.stage, 1)
        .take(at.round, y + at.row * cols, y_span, first(at), part, Backward::y_past_the_end(),
              y_share);
  };
  for (uint32_t i = 0; i < walk.stages; ++i) fetch();

  State s = empty();
  bool is_known = false;           // s is that of the row that is due
  uint32_t early = uint32_t(lag);  // turns until the first item is due
  while (due.row < rows) {
    const uint64_t* of_row = states + due.row * parts;
    const bool looks = early == 0 && !is_known && threadIdx.x < walk.parts;
    const uint64_t seen = looks ? peek(of_row + threadIdx.x) : 0;
    Part dy_share, y_share;
    if (fresh.row < rows) {
      take(fresh, dy_share, y_share);
      const State part =
          warps.add(fold_gradient<Backward>(dy_share, y_share, held(fresh), zero_empty != 0));
      if (threadIdx.x == 0) post(states + fresh.row * parts + fresh.part, part);
      walk.advance(fresh);
    }
    if (early > 0) {
      --early;
      continue;
    }
    take(due, dy_share, y_share);
    fetch();  // onto the words that were just taken
    if (!is_known) {
      s = warps.add(add_parts(parts, [&](int64_t i) {
        return wait_for_state(of_row + i, i == threadIdx.x ? seen : 0);
      }));
    }
    const Backward backward(s.d, s.m, scale, zero_empty != 0);
    emit_gradient<STREAM>(dy_share, y_share, held(due), backward, dx + due.row * cols, first(due),
                          hidden_zero(rows, s));
    const int64_t row = due.row;
    walk.advance(due);
    is_known = due.row == row;
  }
}
