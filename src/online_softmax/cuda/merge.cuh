// The parts of a row that are merged: who has which part's numbers, their state, and their vectors.
#pragma once
#include "words.cuh"

constexpr int STATES = 0, PAIRS = 1, PAIRS_BASE_2 = 2;  // KIND; the base is that of lse
constexpr float NOTHING = -1.0f;  // in place of the weight of a part that counts for nothing
constexpr int AT_ONCE = 4;        // parts whose vectors are on their way together

// Blocks of 256 threads for which a multiprocessor has room.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 800
constexpr int ROOM = 4;
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int ROOM = 6;
#else
constexpr int ROOM = 8;
#endif

template <int A, int B>
constexpr int least = A < B ? A : B;

template <typename X>
struct Part {
  const X* o;      // (rows, dim), rows o_row_stride apart; dim may be 0
  const float* m;  // (rows); lse of a pair
  const float* d;  // (rows); of a pair not read
  int64_t o_row_stride;
};

// Last of a kernel's parameters, a word for each field: the host lays it out flat.
template <typename X, int MOST>
struct Parts {
  static constexpr char KINDS[] = "pppi";  // of the fields of each part, for host execution
  Part<X> part[MOST];
};

// Which parts a lane has the numbers of. Of CHUNK parts, slot * WIDTH + lane % WIDTH in each slot; where
// a row has more lanes than parts, several lanes have the same.
template <int LANES, int MOST>
struct Shared {
  static constexpr int GROUP = MOST < AT_ONCE ? MOST : AT_ONCE;
  static constexpr int WIDTH = LANES < MOST ? LANES : MOST;
  static constexpr int SLOTS = WIDTH < GROUP ? GROUP / WIDTH : 1;
  static constexpr int CHUNK = WIDTH * SLOTS;
  static constexpr bool IS_GROUP = MOST <= GROUP;  // one group has every part
  static constexpr bool IS_ALL = MOST <= CHUNK;    // one chunk has
  static constexpr bool IS_LONG = LANES == WARP;   // a lane may have several vectors of a row

  // Whether the table has part `at` for sure: MOST is the least power of two that holds all parts, and
  // places without a part have the first one.
  __device__ static constexpr bool has(int at) { return at <= MOST / 2; }
};

template <int KIND>
__device__ __forceinline__ float weight_of(float part, float m) {
  if (part == -infinity()) return NOTHING;
  return KIND == PAIRS_BASE_2 ? exponential2(fall(part, m)) : weight(part, m);
}

__device__ __forceinline__ bool is_there(float w) { return !(w < 0.0f); }  // NaN is there

// m or d of part `at`, in which lanes differ; `none` past the last. Of few addresses one is chosen; of
// many the table is read as memory, since constants at several places are read one after the other.
template <bool D, int WIDTH, typename X, int MOST>
__device__ __forceinline__ float number(const Parts<X, MOST>& parts, int at, int count, int64_t row,
                                        float none) {
  if (at >= count) return none;
  const Part<X>* part = WIDTH > 1 && MOST > AT_ONCE ? unseen(parts.part) + at : parts.part;
  if (WIDTH == 1) part += at;
  const float* from = D ? part->d : part->m;
  if constexpr (WIDTH > 1 && MOST <= AT_ONCE) {
#pragma unroll
    for (int i = 1; i < MOST; ++i)
      if (at == i) from = D ? parts.part[i].d : parts.part[i].m;
  }
  return load(from + row);
}

// What a lane knows of its parts of a chunk.
template <int SLOTS>
struct Numbers {
  float m[SLOTS], d[SLOTS], w[SLOTS];
};

// m and, of states, d: all on their way together.
template <int KIND, int WIDTH, typename X, int MOST, int SLOTS>
__device__ __forceinline__ void look(const Parts<X, MOST>& parts, int first, int count, int64_t row,
                                     Numbers<SLOTS>& its) {
#pragma unroll
  for (int k = 0; k < SLOTS; ++k) {
    const int at = first + k * WIDTH;
    its.m[k] = number<false, WIDTH>(parts, at, count, row, -infinity());
    its.d[k] = KIND == STATES ? number<true, WIDTH>(parts, at, count, row, 0.0f) : 1.0f;
  }
}

template <int KIND, int SLOTS>
__device__ __forceinline__ void weigh(Numbers<SLOTS>& its, float m) {
#pragma unroll
  for (int k = 0; k < SLOTS; ++k) its.w[k] = weight_of<KIND>(its.m[k], m);
}

// The state of all parts of a row, m in the base of the parts', in every lane; and the weights of the
// lane's parts of the first chunk, whose numbers it has. place: lane % WIDTH.
template <int KIND, int LANES, typename X, int MOST, int SLOTS>
__device__ __forceinline__ State fold_parts(const Parts<X, MOST>& parts, int place, int count,
                                            int64_t row, Numbers<SLOTS>& its) {
  using Its = Shared<LANES, MOST>;
  constexpr int WIDTH = Its::WIDTH;
  const int first = Its::CHUNK + place, end = Its::IS_ALL ? 0 : count;  // of the other chunks
  float m = its.m[0], d = 0.0f;
#pragma unroll
  for (int k = 1; k < SLOTS; ++k) m = maximum(m, its.m[k]);
#pragma unroll 4
  for (int at = first; at < end; at += WIDTH)
    m = maximum(m, number<false, WIDTH>(parts, at, count, row, -infinity()));
  m = lanes_fold<WIDTH, Maximum>(m);
  weigh<KIND>(its, m);
#pragma unroll
  for (int k = 0; k < SLOTS; ++k) d += is_there(its.w[k]) ? product(its.d[k], its.w[k]) : 0.0f;
#pragma unroll 4
  for (int at = first; at < end; at += WIDTH) {
    Numbers<1> one;
    look<KIND, WIDTH>(parts, at, count, row, one);
    weigh<KIND>(one, m);
    d += is_there(one.w[0]) ? product(one.d[0], one.w[0]) : 0.0f;
  }
  return {m, lanes_fold<WIDTH, Sum>(d)};
}

// The weight of part `at`, the i-th of a group, from the lane that has it. All lanes of a warp meet.
template <int WIDTH, int SLOTS>
__device__ __forceinline__ float handed(const Numbers<SLOTS>& its, int at, int i) {
  const float w = its.w[SLOTS > 1 ? i / WIDTH : 0];
  if constexpr (WIDTH == 1) return w;
  return __shfl_sync(0xffffffffu, w, at, WIDTH);
}

// ---- vectors, in the words that they came as until they are added

__device__ __forceinline__ uint32_t bits_of(float x) { return float_to_bits(x); }

template <typename T>
__device__ __forceinline__ uint32_t bits_of(T x) {
  return x.bits;
}

// Vector v of a row's `vectors`, zeros past the row's end; where there is none, words stay.
template <bool WHOLE, bool STREAM, typename X>
__device__ __forceinline__ void fetch(const X* row, int v, int vectors, int64_t dim, uint4& words) {
  constexpr int N = Vector<X>::N, IN_WORD = N / 4;
  if (v >= vectors) return;
  const X* from = row + int64_t(v) * N;
  if constexpr (WHOLE) {
    host::count_reads(N);
    words = fetch16<STREAM>(reinterpret_cast<const uint4*>(from));
  } else {
    const int64_t left = dim - int64_t(v) * N;
    uint32_t word[4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= left) break;
      host::count_reads(1);
      word[i / IN_WORD] |= bits_of(from[i]) << (i % IN_WORD * 16);
    }
    words = {word[0], word[1], word[2], word[3]};
  }
}

template <bool WHOLE, typename X, int MOST>
__device__ __forceinline__ void fetch_part(const Parts<X, MOST>& parts, int at, int64_t row, int v,
                                           int vectors, int64_t dim, uint4& words) {
  const Part<X>& part = parts.part[at];
  fetch<WHOLE, true>(part.o + row * part.o_row_stride, v, vectors, dim, words);
}

// From one vector of a lane to its next: of the row, then of the next part.
template <bool IS_LONG>
__device__ __forceinline__ void advance(int& at, int& start, int vectors) {
  start = IS_LONG && start + WARP < vectors ? start + WARP : 0;
  if (start == 0) ++at;
}
