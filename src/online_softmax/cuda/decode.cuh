// What a warp does with its keys in decode.cu: where they are, their products with the queries, and the
// states (m, d, o) of a block's warps, merged.
#pragma once
#include "mma.cuh"
#include "words.cuh"

constexpr int STEP = 16;  // keys of a warp at a time
constexpr int TILE = 8;   // rows of queries that a product takes

struct alignas(16) float4_t {
  float x[4];
};

__device__ __forceinline__ void add(float4_t& total, const float4_t& o, float share) {
#pragma unroll
  for (int i = 0; i < 4; ++i) total.x[i] = fused(o.x[i], share, total.x[i]);
}

// Over the lanes that have the same rows of queries, and other keys.
template <typename Monoid>
__device__ __forceinline__ float keys_fold(float value) {
#pragma unroll
  for (int lanes = 4; lanes < WARP; lanes *= 2)
    value = Monoid::combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

// Rows of queries: row r is query r / group of head r % group among those that share keys.
// A kernel's last parameter, a word for each field: the host lays it out flat.
struct Shape {
  static constexpr char KINDS[] = "iiiiiiiiiiiiiiiiii";
  int64_t batch, heads;  // of keys
  int64_t group, q_len, k_len, parts, part_keys;
  int64_t q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row;  // strides
  int64_t first, last;  // query i sees keys i + first to i + last, of those that there are
};
static_assert(sizeof(Shape) == 8 * (sizeof(Shape::KINDS) - 1), "a letter for each field");

// The keys that a query sees.
struct Sight {
  int begin, end;
};

__device__ __forceinline__ Sight sight(const Shape& s, int64_t first_query, int64_t last_query) {
  const int64_t begin = first_query + s.first, end = last_query + s.last + 1;
  return {int(begin > 0 ? begin : 0), int(end < s.k_len ? (end > 0 ? end : 0) : s.k_len)};
}

// Where a warp is: a part, and 16 of its keys.
template <typename X, int WARPS>
struct Place {
  int item, items;  // a part of a batch's and head's keys; all that there are
  int key, end;     // the warp's first key; the end of those of the part that some query sees
  const X *k, *v;   // the head's keys and values

  __device__ __forceinline__ bool is_there() const { return item < items; }

  // The warp's first keys of `item`, or of the first one after it that has some for this warp.
  __device__ __forceinline__ void enter(const X* keys, const X* values, const Shape& s) {
    for (; is_there(); item += gridDim.x) {
      const int pair = item / int(s.parts), low = (item - pair * int(s.parts)) * int(s.part_keys);
      const Sight seen = sight(s, 0, s.q_len - 1);
      const int begin = seen.begin > low ? seen.begin : low;
      end = seen.end < low + int(s.part_keys) ? seen.end : low + int(s.part_keys);
      const int round = WARPS * STEP;  // counted from the part's first key, whatever is seen
      key = low + (begin - low) / round * round + warp_id() * STEP;
      const int64_t batch = pair / int(s.heads), head = pair - batch * s.heads;
      k = keys + batch * s.k_batch + head * s.k_head;
      v = values + batch * s.v_batch + head * s.v_head;
      if (key < end) return;
    }
  }

  // The warp's next keys; of another part, once this one has no more for it.
  __device__ __forceinline__ void advance(const X* keys, const X* values, const Shape& s) {
    key += WARPS * STEP;
    if (key < end) return;
    item += gridDim.x;
    enter(keys, values, s);
  }
};

// 16 bytes; zeros where there is no such key. What no query sees counts 0 times: it must be finite.
template <typename X>
__device__ __forceinline__ uint4 key_words(const X* x, bool is_there) {
  if (!is_there) return {0, 0, 0, 0};
  host::count_reads(Vector<X>::N);
  return fetch16<true>(reinterpret_cast<const uint4*>(x));
}

// The warp's 16 keys. Lane 4 g + c has of keys g and g + 8 the dims from 8 c on, of each 32.
template <int DIM>
struct Keys {
  uint4 of[2][DIM / 32];

  template <typename X, int WARPS>
  __device__ __forceinline__ void fetch(const Place<X, WARPS>& at, const Shape& s) {
    const int g = lane_id() / 4, c = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = at.key + g + 8 * i;
      const X* row = at.k + int64_t(key) * int(s.k_row) + 8 * c;
#pragma unroll
      for (int j = 0; j < DIM / 32; ++j)
        of[i][j] = key_words(row + 32 * j, at.is_there() && key < at.end);
    }
  }
};

// Their values. The lane has of keys 2c, 2c + 1, 2c + 8, 2c + 9 the dims from 8 g on, of each 64.
template <int DIM>
struct Values {
  uint4 of[4][DIM / 64];

  template <typename X, int WARPS>
  __device__ __forceinline__ void fetch(const Place<X, WARPS>& at, const Shape& s) {
    const int g = lane_id() / 4, c = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = at.key + 2 * c + i % 2 + i / 2 * 8;
      const X* row = at.v + int64_t(key) * int(s.v_row) + 8 * g;
#pragma unroll
      for (int j = 0; j < DIM / 64; ++j)
        of[i][j] = key_words(row + 64 * j, at.is_there() && key < at.end);
    }
  }
};

// TILE rows of queries. The lane has of row g the dims from 8 c on, of each 32.
template <int DIM>
struct Queries {
  uint4 of[DIM / 32];

  template <typename X>
  __device__ __forceinline__ void fetch(const X* q, int item, int tile, const Shape& s) {
    const int pair = item / int(s.parts), row = tile * TILE + lane_id() / 4;
    const int query = row / int(s.group);
    const int64_t batch = pair / int(s.heads);
    const int64_t head = (pair - batch * s.heads) * s.group + row - query * s.group;
    const X* x = q + batch * s.q_batch + head * s.q_head + query * s.q_row + lane_id() % 4 * 8;
#pragma unroll
    for (int j = 0; j < DIM / 32; ++j)
      of[j] = query < s.q_len ? fetch16<false>(reinterpret_cast<const uint4*>(x + 32 * j))
                              : uint4{0, 0, 0, 0};
  }
};

// Products of the warp's keys with the queries: of keys g and g + 8, rows 2c and 2c + 1.
template <typename X, int DIM>
__device__ __forceinline__ void score(const Keys<DIM>& keys, const Queries<DIM>& queries,
                                      float (&z)[4]) {
  float more[4];  // two sums beside each other: half the wait
#pragma unroll
  for (int i = 0; i < 4; ++i) z[i] = more[i] = 0.0f;
#pragma unroll
  for (int j = 0; j < DIM / 32; ++j) {
    const uint4 &q = queries.of[j], &k = keys.of[0][j], &k_8 = keys.of[1][j];
    multiply<X>(z, {k.x, k_8.x, k.y, k_8.y}, q.x, q.y);
    multiply<X>(more, {k.z, k_8.z, k.w, k_8.w}, q.z, q.w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) z[i] += more[i];
}

// States of TILE rows: of rows 2c and 2c + 1 (index i % 2) the dims 64 j + 8 g + 2 t + i / 2 of o; of
// d what the keys of this lane have brought. m is as z is, before the factor.
template <int DIM>
struct States {
  float m[2], d[2], o[DIM / 64][4][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) m[i] = -infinity(), d[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 4; ++i) o[i / 16][i / 4 % 4][i % 4] = 0.0f;
  }

  // z times factor, above 0, is a score in base 2, -inf where a row does not see a key. m is taken off
  // before the factor: of large scores the rounding of a product is more than exponents have room for.
  template <typename X>
  __device__ __forceinline__ void absorb(const float (&z)[4], float factor,
                                         const Values<DIM>& values) {
    float w[2], p[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float most = keys_fold<Maximum>(maximum(z[i], z[i + 2]));
      const float next = maximum(m[i], most);
      w[i] = exponential2(fall(m[i], next) * factor);
      m[i] = next;
      const float shift = next == -infinity() ? 0.0f : next;
      p[i] = exponential2((z[i] - shift) * factor);
      p[i + 2] = exponential2((z[i + 2] - shift) * factor);
      d[i] = fused(d[i], w[i], p[i] + p[i + 2]);
    }
    const uint32_t b0 = transposed(pack_pair<X>(p[0], p[1]));
    const uint32_t b1 = transposed(pack_pair<X>(p[2], p[3]));
#pragma unroll
    for (int j = 0; j < DIM / 64; ++j)
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = word_of(values.of[i][j], t);
#pragma unroll
        for (int i = 0; i < 4; ++i) o[j][t][i] *= w[i % 2];
        multiply<X>(o[j][t],
                    {low_halves(v[0], v[1]), high_halves(v[0], v[1]), low_halves(v[2], v[3]),
                     high_halves(v[2], v[3])},
                    b0, b1);
      }
  }
};

// The states of a block's warps, to be merged. Vectors of four dims stand where neither the lanes
// that put them nor those that take them meet in a bank.
template <int DIM, int TILES, int WARPS>
struct Board {
  static constexpr int ROWS = TILES * TILE, VECTORS = DIM / 4;
  float4_t o[WARPS][ROWS * VECTORS];
  float m[WARPS][ROWS], d[WARPS][ROWS];

  static __device__ __forceinline__ int place(int row, int vector) {
    const int c = row / 2;
    return row * VECTORS + (vector ^ ((c & 1) | (c & 2) << 1));
  }

  __device__ __forceinline__ void put(const States<DIM>& states, int tile, float factor) {
    const int g = lane_id() / 4, c = lane_id() % 4, warp = warp_id();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile * TILE + 2 * c + i;
      const float sum = keys_fold<Sum>(states.d[i]);
      if (g == 0) m[warp][row] = states.m[i] * factor, d[warp][row] = sum;
#pragma unroll
      for (int j = 0; j < DIM / 64; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&first)[4] = states.o[j][2 * half], (&second)[4] = states.o[j][2 * half + 1];
          o[warp][place(row, 16 * j + 2 * g + half)] = {first[i], first[i + 2], second[i],
                                                        second[i + 2]};
        }
    }
  }

  // The warps' states as one, in their order: of four dims of o.
  __device__ __forceinline__ State take(int row, int vector, float4_t& total) const {
    State s = empty();
    total = {};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) s.m = maximum(s.m, m[w][row]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      if (m[w][row] == -infinity()) continue;  // whatever o holds
      const float share = exponential2(fall(m[w][row], s.m));
      s.d = fused(d[w][row], share, s.d);
      add(total, o[w][place(row, vector)], share);
    }
    return s;
  }
};
