// A thread's share of a row in registers, as 16-byte words: loaded and written at any alignment.
//
// A group of GROUP lanes owns vectors first, first + 1, .. of a row; vector v of lane l is number
// k = v * GROUP + l of them, whatever the row's address, so an element's place in a sum follows from
// its column alone. A misaligned row moves in aligned 16-byte words, each shifted together from two
// neighbours'; nothing is ever read outside the matrix.
#pragma once
#include "words.cuh"

// ---- which part of a row a group holds

template <typename T>
__device__ __forceinline__ uint32_t phase_of(const T* row) {
  return uint32_t(reinterpret_cast<uint64_t>(row) % VECTOR_BYTES);
}

// A matrix's bytes, which may be read as words though they lie between rows.
struct Span {
  uint64_t begin, end;
  template <typename T>
  __device__ Span(const T* x, int64_t rows, int64_t cols, int64_t row_stride)
      : begin(reinterpret_cast<uint64_t>(x)),
        end(reinterpret_cast<uint64_t>(x + (rows - 1) * row_stride + cols)) {}
};

// Vectors [0, full) are in the row, and `tail` elements of vector `full`. HELD: how many a group has.
template <int HELD, int N>
struct Extent {
  int full, tail;
  __device__ Extent(int64_t first, int64_t last) {
    const int64_t left = last - first * N;
    full = left <= 0 ? 0 : left / N < HELD ? int(left / N) : HELD;
    tail = left <= 0 || full == HELD ? 0 : int(left - int64_t(full) * N);
  }
};

// Words [from, to) of a row's share may be read, counted from the word where vector 0 begins.
template <int HELD>
struct Readable {
  uint32_t phase;
  const uint4* words;
  int from, to;
  template <typename T>
  __device__ Readable(const T* row, Span span, int64_t first, int64_t last) : phase(phase_of(row)) {
    const uint64_t zero = reinterpret_cast<uint64_t>(row) - phase;
    words = reinterpret_cast<const uint4*>(zero) + first;
    const int64_t in_row = (last * int64_t(sizeof(T)) + phase + VECTOR_BYTES - 1) / VECTOR_BYTES;
    const int64_t in_span = int64_t(span.end - zero) / VECTOR_BYTES;
    const int64_t stop = (in_row < in_span ? in_row : in_span) - first;
    from = first == 0 && zero < span.begin ? 1 : 0;
    to = stop < 0 ? 0 : stop < HELD + 1 ? int(stop) : HELD + 1;
  }
};

// ---- loading

template <typename T>
__device__ __forceinline__ uint4 vector_of(float value) {
  float x[Vector<T>::N];
#pragma unroll
  for (int i = 0; i < Vector<T>::N; ++i) x[i] = value;
  return pack<T>(x);
}

// The first `count` elements of `v`, then `fill`.
template <typename T>
__device__ __forceinline__ uint4 cut(const uint4& v, int count, float fill) {
  float x[Vector<T>::N];
  unpack<T>(v, x);
#pragma unroll
  for (int i = 0; i < Vector<T>::N; ++i) x[i] = i < count ? x[i] : fill;
  return pack<T>(x);
}

template <typename T>
__device__ __forceinline__ uint4 load_elements(const T* x, int count, float fill) {
  float values[Vector<T>::N];
#pragma unroll
  for (int i = 0; i < Vector<T>::N; ++i) values[i] = i < count ? widen(x[i]) : fill;
  return pack<T>(values);
}

// share: words of one alignment become vectors of another. `after`: the word after the last.
template <int W, bool HALVES, int GROUP, int VECTORS>
__device__ __forceinline__ void realign_by(uint4 (&share)[VECTORS], const uint4& after,
                                           uint32_t bits) {
  const int lane = lane_id() % GROUP, next_lane = lane_id() - lane + (lane + 1) % GROUP;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const uint4& wrapped = v + 1 < VECTORS ? share[v + 1 < VECTORS ? v + 1 : v] : after;
    const uint4 next = words_from<0, W + (HALVES ? 1 : 0)>(lane == 0, wrapped, share[v], next_lane);
    share[v] = shifted_by<W, HALVES>(share[v], next, bits);
  }
}

template <bool HALVES, int GROUP, int VECTORS>
__device__ __forceinline__ void realign(uint4 (&share)[VECTORS], const uint4& after,
                                        uint32_t phase) {
  if constexpr (GROUP == WARP) {  // one phase a warp: one of four ways
    const uint32_t bits = (phase & 3) * 8;
    switch (phase >> 2) {
      case 0:
        return realign_by<0, HALVES, GROUP>(share, after, bits);
      case 1:
        return realign_by<1, HALVES, GROUP>(share, after, bits);
      case 2:
        return realign_by<2, HALVES, GROUP>(share, after, bits);
      default:
        return realign_by<3, HALVES, GROUP>(share, after, bits);
    }
  } else {
    const int lane = lane_id() % GROUP, next_lane = lane_id() - lane + (lane + 1) % GROUP;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const uint4& wrapped = v + 1 < VECTORS ? share[v + 1 < VECTORS ? v + 1 : v] : after;
      const uint4 next = words_from<0, 4>(lane == 0, wrapped, share[v], next_lane);
      share[v] = shifted<HALVES>(share[v], next, phase);
    }
  }
}

// The share of a row, from wherever `word(k)` finds the row's words. All lanes of a warp call this
// together. WHOLE: rows begin on 16-byte boundaries and hold whole vectors.
template <int GROUP, bool WHOLE, typename T, int VECTORS, typename Word>
__device__ __forceinline__ void load_share(const T* row, int64_t first, int64_t last, float fill,
                                           const Readable<VECTORS * GROUP>& readable, Word word,
                                           uint4 (&share)[VECTORS]) {
  constexpr int N = Vector<T>::N, HELD = VECTORS * GROUP;
  const Extent<HELD, N> extent(first, last);
  const int lane = lane_id() % GROUP;
  const uint4 pad = vector_of<T>(fill);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int k = v * GROUP + lane;
    host::count_reads(k < extent.full ? N : k == extent.full ? extent.tail : 0);
  }
  if constexpr (WHOLE) {
    if (extent.full == HELD) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) share[v] = word(v * GROUP + lane);
    } else {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v)
        share[v] = v * GROUP + lane < extent.full ? word(v * GROUP + lane) : pad;
    }
  } else {
    const uint32_t phase = readable.phase;
    const int beyond = phase ? 1 : 0;  // the last vector ends in the word after it
    uint4 after = pad;
    const bool interior = extent.full == HELD && readable.from == 0 && readable.to >= HELD + beyond;
    if (interior) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) share[v] = word(v * GROUP + lane);
      if (phase) after = word(HELD);
    } else {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const int k = v * GROUP + lane;
        share[v] = k >= readable.from && k < readable.to ? word(k) : pad;
      }
      if (HELD < readable.to) after = word(HELD);
    }
    if (GROUP < WARP || phase) realign<sizeof(T) == 2, GROUP>(share, after, phase);
    if (!interior) {
      // The row's end, and what words did not give: the matrix's first and last vectors.
      auto is_given = [&](int k) { return k >= readable.from && k + beyond < readable.to; };
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const int k = v * GROUP + lane;
        if (k == extent.full) share[v] = cut<T>(share[v], extent.tail, fill);
        if (k > extent.full) share[v] = pad;
      }
#pragma unroll 1
      for (int edge = 0; edge < 3; ++edge) {
        const int k = edge == 0 ? 0 : extent.full - 2 + edge;
        const int count = k < extent.full ? N : extent.tail;
        if (k < 0 || k >= HELD || k % GROUP != lane || count == 0 || is_given(k)) continue;
        const uint4 value = load_elements(row + (first + k) * N, count, fill);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) share[v] = select(v == k / GROUP, value, share[v]);
      }
    }
  }
}

// The same from global memory.
template <int GROUP, bool WHOLE, bool STREAM, typename T, int VECTORS>
__device__ __forceinline__ void load_global(const T* row, Span span, int64_t first, int64_t last,
                                            float fill, uint4 (&share)[VECTORS]) {
  const Readable<VECTORS * GROUP> readable(row, span, first, last);
  load_share<GROUP, WHOLE>(
      row, first, last, fill, readable, [&](int k) { return fetch16<STREAM>(readable.words + k); },
      share);
}

// ---- writing

template <typename T>
__device__ __forceinline__ void store_elements(T* y, const uint4& v, int from, int to) {
  float x[Vector<T>::N];
  unpack<T>(v, x);
#pragma unroll
  for (int i = 0; i < Vector<T>::N; ++i)
    if (i >= from && i < to) y[i] = narrow<T>(x[i]);
}

// The aligned word where vector `mine` begins: the end of the vector before, the start of its own.
// `turn_before`: what this lane had in the turn before.
template <bool HALVES, int GROUP>
__device__ __forceinline__ uint4 word_to_write(const uint4& turn_before, const uint4& mine,
                                               uint32_t phase) {
  const int lane = lane_id() % GROUP, lane_before = lane_id() - lane + (lane + GROUP - 1) % GROUP;
  const bool wraps = lane == GROUP - 1;
  const uint32_t bytes = VECTOR_BYTES - phase, bits = (bytes & 3) * 8;
  if constexpr (GROUP == WARP) {
    switch (bytes >> 2) {
      case 0:
        return shifted_by<0, HALVES>(words_from<0, 4>(wraps, turn_before, mine, lane_before), mine,
                                     bits);
      case 1:
        return shifted_by<1, HALVES>(words_from<1, 4>(wraps, turn_before, mine, lane_before), mine,
                                     bits);
      case 2:
        return shifted_by<2, HALVES>(words_from<2, 4>(wraps, turn_before, mine, lane_before), mine,
                                     bits);
      default:
        return shifted_by<3, HALVES>(words_from<3, 4>(wraps, turn_before, mine, lane_before), mine,
                                     bits);
    }
  } else {
    const uint4 before = words_from<0, 4>(wraps, turn_before, mine, lane_before);
    return phase ? shifted<HALVES>(before, mine, bytes) : mine;
  }
}

// Vector k of the share is what `value(v)` gives, packed. All lanes of a warp call this together.
template <int GROUP, bool WHOLE, bool STREAM, int VECTORS, typename T, typename Value>
__device__ __forceinline__ void write_share(T* row, int64_t first, int64_t last, Value value) {
  constexpr int N = Vector<T>::N, HELD = VECTORS * GROUP;
  const Extent<HELD, N> extent(first, last);
  const int lane = lane_id() % GROUP;
  T* y = row + first * N;
  const uint32_t phase = WHOLE ? 0 : phase_of(row);
  uint4* words = reinterpret_cast<uint4*>(reinterpret_cast<char*>(y) - phase) + lane;
  const int head = int(VECTOR_BYTES - phase) / int(sizeof(T));  // elements of a vector in its word
  const bool interior = extent.full == HELD;
  uint4 mine = {}, last_full = {}, partial = {};
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int k = v * GROUP + lane;
    const uint4 turn_before = mine;
    mine = value(v);
    host::count_writes(k < extent.full ? N : k == extent.full ? extent.tail : 0);
    if constexpr (WHOLE) {
      if (k < extent.full) put16<STREAM>(words + v * GROUP, mine);
    } else {
      uint4 word = mine;
      if (GROUP < WARP || phase)
        word = word_to_write<sizeof(T) == 2, GROUP>(turn_before, mine, phase);
      const bool is_shared = phase && k == 0;  // its word also holds what another group writes
      if (k < extent.full && !is_shared) put16<STREAM>(words + v * GROUP, word);
      if (v == 0 && is_shared && extent.full > 0) store_elements(y, mine, 0, head);
      if (!interior) {
        last_full = select(k == extent.full - 1, mine, last_full);
        partial = select(k == extent.full, mine, partial);
      }
    }
  }
  if constexpr (!WHOLE) {
    if (phase && extent.full > 0 && (extent.full - 1) % GROUP == lane)
      store_elements(y + (extent.full - 1) * N, interior ? mine : last_full, head, N);
    if (extent.tail && extent.full % GROUP == lane)
      store_elements(y + extent.full * N, partial, 0, extent.tail);
  }
}
