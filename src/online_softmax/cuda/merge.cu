// Merging what several parts give of each row: states (m, d, o), or pairs (out, lse) of attention over
// parts of the keys, where o is divided by d already. One read of each part, one write.
//
// LANES neighbouring lanes own a row, as many as it has vectors, up to a warp: each has vectors of o, at
// any alignment the same elements. Maxima and sums are shared out: a lane has those of a few parts, makes
// their weights, and hands each to the others when the part's vectors are added. A part whose m is -inf
// counts for nothing, whatever its d and o hold. The order of all sums follows from the number of parts
// and dim.
#include "merge.cuh"

// Blocks that share a multiprocessor. What bounds these kernels is how many bytes are on their way: two
// vectors a thread at 32 registers, four at 40. Somewhat more is needed for elements one by one, for
// numbers in several slots or chunks, and to go on along a row.
template <typename X, int LANES, bool WHOLE, int MOST>
constexpr bool IS_WIDE = !WHOLE || LANES < AT_ONCE || !Shared<LANES, MOST>::IS_ALL ||
                         (Shared<LANES, MOST>::IS_LONG && (sizeof(X) == 2 || MOST > 2));
template <typename X, int LANES, bool WHOLE, int MOST, int ROWS>
constexpr int MERGED = ROWS * Shared<LANES, MOST>::GROUP > 4   ? 4
                       : ROWS * Shared<LANES, MOST>::GROUP > 2 ? 6 - IS_WIDE<X, LANES, WHOLE, MOST>
                       : IS_WIDE<X, LANES, WHOLE, MOST>        ? 6
                                                               : 8;

// ROWS: of a thread, their first vectors on their way together.
template <typename X, int KIND, int LANES, bool WHOLE, int MOST, int ROWS>
__global__ void __launch_bounds__(256, (least<ROOM, MERGED<X, LANES, WHOLE, MOST, ROWS>>))
    merge_forward(X* o,      // (rows, dim) output; out of pairs, 0 where no part has a key
                  float* m,  // (rows) output; lse of pairs
                  float* d,  // (rows) output; of pairs not written
                  int64_t rows, int64_t dim, int64_t count,
                  const __grid_constant__ Parts<X, MOST> parts) {
  using Its = Shared<LANES, MOST>;
  constexpr int N = Vector<X>::N, GROUP = Its::GROUP, WIDTH = Its::WIDTH;
  const int lane = int(threadIdx.x % LANES), place = lane % WIDTH, parts_here = int(count);
  const int vectors = int(uint64_t(dim + N - 1) / N), owners = int(blockDim.x / LANES);
  uint4 words[ROWS][GROUP] = {};
  Numbers<Its::SLOTS> its[ROWS];
  int64_t row[ROWS];
  bool has_row[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {  // past the last row it again: all lanes meet in the shuffles
    row[r] = (int64_t(blockIdx.x) * ROWS + r) * owners + int(threadIdx.x / LANES);
    has_row[r] = row[r] < rows;
    if (!has_row[r]) row[r] = rows - 1;
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
      if (Its::has(i) || i < parts_here)
        fetch_part<WHOLE>(parts, i, row[r], lane, vectors, dim, words[r][i]);
    look<KIND, WIDTH>(parts, place, parts_here, row[r], its[r]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const State s = fold_parts<KIND, LANES>(parts, place, parts_here, row[r], its[r]);
    if (lane == 0 && has_row[r]) {
      if (KIND == STATES) store(d + row[r], s.d);
      if (KIND == PAIRS_BASE_2)
        store(m + row[r], is_finite(s.m) ? s.m + natural_log(s.d) * LOG2_E : s.m);
      else
        store(m + row[r], KIND == PAIRS ? lse(s) : s.m);
    }
    float factor = 1.0f;
    if (KIND != STATES)
      factor = s.m == -infinity() ? 0.0f : is_finite(s.m) ? reciprocal(s.d) : not_a_number();
    for (int start = 0; start < (Its::IS_LONG ? vectors : 1); start += LANES) {  // in all lanes
      float total[N] = {};
      for (int some = 0; some < (Its::IS_GROUP ? 1 : parts_here); some += GROUP) {
        if (!Its::IS_ALL && some % Its::CHUNK == 0 && some + start > 0) {
          look<PAIRS, WIDTH>(parts, some + place, parts_here, row[r], its[r]);
          weigh<KIND>(its[r], s.m);
        }
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
          if (!(Its::IS_GROUP && Its::has(i)) && some + i >= parts_here) break;
          const float w = handed<WIDTH>(its[r], some + i, i);
          float x[N];
          unpack<X>(words[r][i], x);
          if (is_there(w)) {
#pragma unroll
            for (int j = 0; j < N; ++j) total[j] = fused(x[j], w, total[j]);
          }
          const int next = some + i + GROUP;
          const bool more = !Its::IS_LONG || next < parts_here;  // else this lane's next vector
          if (Its::IS_LONG || next < parts_here)
            fetch_part<WHOLE>(parts, more ? next : i, row[r], lane + start + (more ? 0 : LANES),
                              vectors, dim, words[r][i]);
        }
      }
#pragma unroll
      for (int j = 0; j < N; ++j) total[j] *= factor;
      const int64_t col = int64_t(start + lane) * N;
      if (has_row[r]) store_vector<WHOLE>(o + row[r] * dim, col, dim, total);
    }
  }
}

// As above, of the gradients' kernel, which holds do beside four vectors, and what the lane knows.
template <int LANES, bool WHOLE, int MOST>
constexpr int APART =
    LANES >= AT_ONCE && Shared<LANES, MOST>::IS_ALL && (WHOLE || LANES < WARP) ? 5 : 4;

// The gradients by all parts. With t_i = o_i do of part i, w_i its weight, b the base:
//   states  do_i = w_i do, dd_i = w_i dd, dm_i = u_i + (its share of the maximum) (dm - sum u),
//           u_i = w_i (d_i dd + t_i)
//   pairs   p_i = w_i / d, do_i = p_i do, dlse_i = log(b) (u_i - p_i sum u) + p_i dlse, u_i = p_i t_i
// One pass over the parts: o is added to t, do_i is written, and the lane that has the part keeps u_i.
// Parts that are equal to the maximum have equal shares of it. NaN in a row of pairs whose lse is
// +inf or NaN; 0 for parts without a key.
template <typename X, int KIND, int LANES, bool WHOLE, int MOST>
__global__ void __launch_bounds__(256, (least<ROOM, APART<LANES, WHOLE, MOST>>))
    merge_backward(const X* by_o,      // (rows, dim) do
                   const float* by_m,  // (rows) dm, dlse of pairs; with has_m
                   const float* by_d,  // (rows) dd; with has_d
                   X* to_o,            // (count, rows, dim) output
                   float* to_m,        // (count, rows) output
                   float* to_d,        // (count, rows) output; of pairs not written
                   int64_t rows, int64_t dim, int64_t count, int64_t has_m, int64_t has_d,
                   const __grid_constant__ Parts<X, MOST> parts) {
  using Its = Shared<LANES, MOST>;
  constexpr int N = Vector<X>::N, GROUP = Its::GROUP, WIDTH = Its::WIDTH, SLOTS = Its::SLOTS;
  constexpr float LOG_BASE = KIND == PAIRS_BASE_2 ? LN_2 : 1.0f;
  const int lane = int(threadIdx.x % LANES), place = lane % WIDTH, parts_here = int(count);
  const int vectors = int(uint64_t(dim + N - 1) / N);
  int64_t row = int64_t(blockIdx.x) * (blockDim.x / LANES) + threadIdx.x / LANES;
  const bool has_row = row < rows;
  if (!has_row) row = rows - 1;  // all lanes meet in the shuffles
  uint4 words[GROUP] = {}, by = {};
  fetch<WHOLE, false>(by_o + row * dim, lane, vectors, dim, by);
  int at = 0, start = 0, next = 0, next_start = 0;  // what is added, and what is fetched
#pragma unroll
  for (int i = 0; i < GROUP; ++i) {
    if (Its::has(next) || next < parts_here)
      fetch_part<WHOLE>(parts, next, row, next_start + lane, vectors, dim, words[i]);
    advance<Its::IS_LONG>(next, next_start, vectors);
  }
  Numbers<SLOTS> its;
  look<KIND, WIDTH>(parts, place, parts_here, row, its);
  const State s = fold_parts<KIND, LANES>(parts, place, parts_here, row, its);
  float factor = 1.0f;
  if (KIND != STATES) factor = is_finite(s.m) ? reciprocal(s.d) : not_a_number();
  float u[SLOTS] = {}, u_of_all = 0.0f, largest = 0.0f;  // parts that are equal to the maximum
  for (int chunk = 0; chunk < parts_here; chunk += Its::CHUNK) {
    if (!Its::IS_ALL && chunk > 0) {
      look<KIND, WIDTH>(parts, chunk + place, parts_here, row, its);
      weigh<KIND>(its, s.m);
    }
#pragma unroll
    for (int k = 0; k < SLOTS; ++k) its.w[k] *= is_there(its.w[k]) ? factor : 1.0f;
    const int end = parts_here < chunk + Its::CHUNK ? parts_here : chunk + Its::CHUNK;
    float t = 0.0f;
    while (at < end) {
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        if (at >= end) break;
        const int v = start + lane;
        const float w = handed<WIDTH>(its, at, i);
        if (Its::IS_LONG && vectors > WARP)
          fetch<WHOLE, false>(by_o + row * dim, v, vectors, dim, by);
        if (v < vectors) {
          float x[N], g[N];
          unpack<X>(words[i], x);
          unpack<X>(by, g);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            t = fused(x[j], g[j], t);
            g[j] = is_there(w) ? g[j] * w : 0.0f;
          }
          if (has_row) store_vector<WHOLE>(to_o + (at * rows + row) * dim, int64_t(v) * N, dim, g);
        }
        if (next < parts_here)
          fetch_part<WHOLE>(parts, next, row, next_start + lane, vectors, dim, words[i]);
        advance<Its::IS_LONG>(next, next_start, vectors);
        const int before = at;
        advance<Its::IS_LONG>(at, start, vectors);
        if (at == before) continue;
        t = lanes_fold<LANES, Sum>(t);
        if (before % WIDTH == place) u[SLOTS > 1 ? i / WIDTH : 0] = t;
        t = 0.0f;
      }
    }
    const float g_d = has_d ? load(by_d + row) : 0.0f;
#pragma unroll
    for (int k = 0; k < SLOTS; ++k) {
      const int mine = chunk + k * WIDTH + place;
      const bool counts = is_there(its.w[k]);
      u[k] = counts ? its.w[k] * (u[k] + (KIND == STATES ? its.d[k] * g_d : 0.0f)) : 0.0f;
      u_of_all += u[k];
      if (KIND == STATES) largest += counts && its.m[k] == s.m ? 1.0f : 0.0f;
      if (!has_row || lane >= WIDTH || mine >= parts_here) continue;
      if (!Its::IS_ALL) store(to_m + mine * rows + row, u[k]);  // for this lane, below
      if (KIND == STATES) store(to_d + mine * rows + row, counts ? its.w[k] * g_d : 0.0f);
    }
    if (Its::IS_ALL) break;
  }
  u_of_all = lanes_fold<WIDTH, Sum>(u_of_all);
  if (KIND == STATES) largest = lanes_fold<WIDTH, Sum>(largest);
  const float g_m = has_m ? load(by_m + row) : 0.0f;
  for (int chunk = 0; chunk < parts_here; chunk += Its::CHUNK) {
    if (!Its::IS_ALL) {
      look<PAIRS, WIDTH>(parts, chunk + place, parts_here, row, its);
      weigh<KIND>(its, s.m);
    }
#pragma unroll
    for (int k = 0; k < SLOTS; ++k) {
      const int mine = chunk + k * WIDTH + place;
      if (!has_row || lane >= WIDTH || mine >= parts_here) continue;
      float by_part = 0.0f;
      if (is_there(its.w[k])) {
        const float p = Its::IS_ALL ? its.w[k] : its.w[k] * factor;
        by_part = Its::IS_ALL ? u[k] : load(to_m + mine * rows + row);
        if (KIND != STATES)
          by_part = LOG_BASE * (by_part - p * u_of_all) + p * g_m;
        else if (its.m[k] == s.m)
          by_part += (g_m - u_of_all) / largest;
      }
      store(to_m + mine * rows + row, by_part);
    }
    if (Its::IS_ALL) break;
  }
}
