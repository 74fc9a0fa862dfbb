// Attention of a few queries over many keys, at the speed of reading keys and values once.
//
// Keys are cut into parts, by their number alone; a block takes one part after another of one head of
// keys, for all queries of the heads that share it. Its warps have 16 keys each at a time, which go
// from memory into the registers that tensor cores read, past shared memory: a product's inner
// dimension may have any order that both sides have, so a lane loads 16 bytes that lie together.
// While a warp works on its keys, those of its next step are on their way, those of another part
// too. A state (m, d, o) for each warp, merged in the block; decode_merge merges the parts. The order
// of all sums follows from the number of keys and the shapes, never from the batch or the grid.
//
// T. Dao et al.: flash-decoding (2023), https://crfm.stanford.edu/2023/10/12/flashdecoding.html
#include "decode.cuh"

constexpr int STATIC_SHARED = 48 << 10;            // bytes of a block without asking for more
constexpr float LARGEST = 1.7014118346046923e38f;  // 2^127: LOG2_E times as much is finite

// The states of all parts, (parts, batch, heads of queries, q_len) each, in one piece of memory.
template <int DIM>
struct Made {
  float4_t* o;   // with DIM / 4 each
  float *m, *d;  // m in base 2

  __device__ __forceinline__ Made(float* made, int64_t states)
      : o(reinterpret_cast<float4_t*>(made)), m(made + states * DIM), d(m + states) {}
};

// Reads each key and value once; writes a state a part and row of queries.
// RESIDENT: blocks of a multiprocessor. IS_PLAIN: a score is a product times a scale above 0.
template <typename X, int DIM, int TILES, int WARPS, int RESIDENT, bool IS_PLAIN>
__global__ void __launch_bounds__(WARPS* WARP, RESIDENT)
    decode_parts(const X* q,   // (batch, heads group, q_len, DIM)
                 const X* k,   // (batch, heads, k_len, DIM)
                 const X* v,   // the same
                 float* made,  // output, as Made has it
                 float scale,  // in base 2; with a cap, of what goes into the tangent
                 float cap,    // in base 2; 0: none
                 const __grid_constant__ Shape s) {
  using Warps = Board<DIM, TILES, WARPS>;
  // Two where they have room, so that nobody waits until one has been taken.
  constexpr int BOARDS = 2 * sizeof(Warps) <= STATIC_SHARED ? 2 : 1;
  SHARED_ARRAY(Warps, boards, BOARDS);
  int turn = 0;
  const int g = lane_id() / 4, c = lane_id() % 4, rows = int(s.group * s.q_len);
  const float factor = IS_PLAIN ? scale : 1.0f;
  const Sight whole = {sight(s, s.q_len - 1, s.q_len - 1).begin, sight(s, 0, 0).end};
  Place<X, WARPS> next;
  next.item = int(blockIdx.x);
  next.items = int(s.batch * s.heads * s.parts);
  next.enter(k, v, s);
  Queries<DIM> queries[TILES];
  Keys<DIM> keys;
  Values<DIM> values;
  if (next.is_there())
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) queries[tile].fetch(q, next.item, tile, s);
  keys.fetch(next, s);
  values.fetch(next, s);
  for (int item = int(blockIdx.x); item < next.items; item += int(gridDim.x)) {
    const int pair = item / int(s.parts), part = item - pair * int(s.parts);
    const int64_t batch = pair / int(s.heads), head = (pair - batch * s.heads) * s.group;
    States<DIM> states[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) states[tile].clear();
    while (next.item == item) {  // not at all where the warp has no keys of this part
      const int key = next.key + g;
      const bool is_whole = next.key >= whole.begin && next.key + STEP <= whole.end;
      float z[TILES][4];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        score<X>(keys, queries[tile], z[tile]);
        if (!IS_PLAIN)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            z[tile][i] =
                cap > 0.0f ? cap * hyperbolic_tangent(z[tile][i] * scale) : z[tile][i] * scale;
        if (!is_whole)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int query = (tile * TILE + 2 * c + i % 2) / int(s.group);
            const Sight seen = sight(s, query, query);
            const int other = key + i / 2 * 8;
            if (other < seen.begin || other >= seen.end) z[tile][i] = -infinity();
          }
      }
      next.advance(k, v, s);
      if (next.item != item && next.is_there())
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) queries[tile].fetch(q, next.item, tile, s);
      keys.fetch(next, s);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
        states[tile].template absorb<X>(z[tile], factor, values);
      values.fetch(next, s);
    }
    if (item + int(gridDim.x) >= next.items) allow_next_kernel();
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) boards[turn].put(states[tile], tile, factor);
    __syncthreads();  // the board: put by each warp, taken by all
    const int64_t all = s.batch * s.heads * rows;
    const Made<DIM> to(made, s.parts * all);
    const int64_t first = part * all + batch * s.heads * rows + head * s.q_len;
    for (int i = int(threadIdx.x); i < rows * Warps::VECTORS; i += WARPS * WARP) {
      const int row = i / Warps::VECTORS, vector = i % Warps::VECTORS;
      const int query = row / int(s.group);
      const int64_t at = first + (row - query * s.group) * s.q_len + query;
      float4_t total;
      const State merged = boards[turn].take(row, vector, total);
      host::count_writes(4);
      put16_kept(to.o + at * Warps::VECTORS + vector, pack<float>(total.x));
      if (vector == 0) store(to.m + at, merged.m), store(to.d + at, merged.d);
    }
    if (BOARDS == 1) __syncthreads();  // taken here before the next part is put
    turn = (turn + 1) % BOARDS;
  }
}

__device__ __forceinline__ void put_four(float* y, const float4_t& t) {
  host::count_writes(4);
  store16(y, pack<float>(t.x));
}
template <typename Y>  // of 16 bits
__device__ __forceinline__ void put_four(Y* y, const float4_t& t) {
  host::count_writes(4);
  put8<false>(y, pack_pair<Y>(t.x[0], t.x[1]), pack_pair<Y>(t.x[2], t.x[3]));
}

// kind: 1 float, 2 half_t, 3 bfloat16_t.
__device__ __forceinline__ float sink_of(const void* sinks, int kind, int64_t head) {
  if (kind == 1) return load(static_cast<const float*>(sinks) + head);
  if (kind == 2) return load(static_cast<const half_t*>(sinks) + head);
  return load(static_cast<const bfloat16_t*>(sinks) + head);
}

// x LOG2_E, finite where x is.
__device__ __forceinline__ float in_base_2(float x) {
  const float held = x > LARGEST ? LARGEST : x < -LARGEST ? -LARGEST : x;
  return (is_finite(x) ? held : x) * LOG2_E;
}

// The states of one row of queries over all parts, merged: PIECE dims of its output, divided, and its
// lse. A block a piece; reads o once. Groups of lanes take the parts in turn; their sums are added in
// the groups' order.
template <typename Y, int DIM, int PIECE, int BLOCK>
__global__ void __launch_bounds__(BLOCK)
    decode_merge(float* made,        // input, as Made has it
                 const void* sinks,  // (heads), natural, of type sinks_kind
                 Y* out,             // (batch, heads, q_len, DIM) output, contiguous
                 float* lse_out,     // (batch, heads, q_len) output
                 float* m_out,       // the same, natural; with has_state
                 float* d_out,       // the same
                 int64_t rows, int64_t heads, int64_t q_len, int64_t parts, int64_t sinks_kind,
                 int64_t has_state, int64_t nan_empty) {
  constexpr int LANES = PIECE / 4, GROUPS = BLOCK / LANES, PIECES = DIM / PIECE;
  SHARED_ARRAY(float4_t, o_of, BLOCK);
  SHARED_ARRAY(float, d_of, GROUPS);
  const int lane = int(threadIdx.x) % LANES, group = int(threadIdx.x) / LANES;
  const int64_t row = blockIdx.x / PIECES, vector = blockIdx.x % PIECES * LANES + lane;
  const Made<DIM> of(made, parts * rows);
  wait_for_previous_kernel();
  float most = -infinity();
  for (int64_t i = lane_id(); i < parts; i += WARP)
    most = maximum(most, load(of.m + i * rows + row));
  State s = {warp_fold<Maximum>(most), 0.0f};
  float4_t total = {};
#pragma unroll 4
  for (int64_t part = group; part < parts; part += GROUPS) {
    const int64_t at = part * rows + row;
    const float share = exponential2(fall(load(of.m + at), s.m));  // o and d of an empty part are 0
    s.d = fused(load(of.d + at), share, s.d);
    host::count_reads(4);
    add(total, of.o[at * (DIM / 4) + vector], share);
  }
  o_of[threadIdx.x] = total;
  if (lane == 0) d_of[group] = s.d;
  __syncthreads();  // written by each group, read by the first
  if (group != 0) return;
#pragma unroll
  for (int other = 1; other < GROUPS; ++other) {
    s.d += d_of[other];
    add(total, o_of[other * LANES + lane], 1.0f);
  }
  State all = s;
  float share = 1.0f;
  if (sinks_kind != 0) {
    const float sink = in_base_2(sink_of(sinks, int(sinks_kind), row / q_len % heads));
    all.m = maximum(s.m, sink);
    share = exponential2(fall(s.m, all.m));
    all.d = fused(s.d, share, exponential2(fall(sink, all.m)));
  }
  share = is_finite(all.m) ? share / all.d : not_a_number();
  const bool is_empty = s.m == -infinity();
  const float of_empty = nan_empty ? not_a_number() : 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) total.x[j] = is_empty ? of_empty : total.x[j] * share;
  put_four(out + row * DIM + vector * 4, total);
  if (vector != 0) return;
  s.m *= LN_2;
  store(lse_out + row, lse(s));
  if (has_state) store(m_out + row, s.m), store(d_out + row, s.d);
}
