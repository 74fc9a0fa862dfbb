// Rows at any address: aligned 16-byte words, shifted into place, on the way in and on the way out.
#pragma once
#include "exchange.cuh"

// ---- 16 bytes from any address: two aligned words, shifted right by `phase` bytes

__device__ __forceinline__ uint32_t shift_pair(uint32_t low, uint32_t high, uint32_t bits) {
#ifdef ONLINE_SOFTMAX_HOST
  return bits ? (low >> bits) | (high << (32 - bits)) : low;
#else
  return __funnelshift_r(low, high, bits);
#endif
}

// The 16 bytes that start `phase` bytes (0 to 15, the same for a row) into the 32 of low, high.
__device__ __forceinline__ uint4 shifted(uint4 low, uint4 high, uint32_t phase) {
  uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (phase & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
  if (phase & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  }
  const uint32_t bits = (phase & 3) * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = shift_pair(w[i], w[i + 1], bits);
  return {w[0], w[1], w[2], w[3]};
}

template <typename T>
__device__ __forceinline__ uint32_t phase_of(const T* row) {
  return uint32_t(reinterpret_cast<uint64_t>(row) % VECTOR_BYTES);
}

// Vector `col`, .. of a row at any address. Only words that lie wholly inside the row are read:
// the first and the last full vector of a misaligned row go element by element.
// WHOLE: every vector lies on a 16-byte boundary, wholly inside the row or outside.
template <bool WHOLE, typename T>
__device__ __forceinline__ void load_any(const T* row, int64_t col, int64_t cols, uint32_t phase,
                                         float fill, float (&x)[Vector<T>::N]) {
  constexpr int N = Vector<T>::N;
  if constexpr (WHOLE) {
    if (col < cols) {
      host::count_reads(N);
      unpack<T>(*reinterpret_cast<const uint4*>(row + col), x);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = fill;
    }
    return;
  }
  const bool inside = col + N <= cols;
  if (phase == 0 && inside) {
    host::count_reads(N);
    unpack<T>(*reinterpret_cast<const uint4*>(row + col), x);
  } else if (inside && col >= N && col + 2 * N <= cols) {
    host::count_reads(N);
    const uint4* word =
        reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(row + col) - phase);
    unpack<T>(shifted(word[0], word[1], phase), x);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = col + i < cols ? load(row + col + i) : fill;
  }
}

template <typename T>
__device__ __forceinline__ void store_elements(T* row, int64_t col, int from, int to,
                                               const float (&y)[Vector<T>::N]) {
#pragma unroll
  for (int i = 0; i < Vector<T>::N; ++i)
    if (i >= from && i < to) store(row + col + i, y[i]);
}

// A warp's share of a row, vector v of lane l at first + v * GROUP + l, written at any alignment.
// `values(v, out)` gives the floats of a lane's vector v. All lanes of the warp call this together.
template <bool WHOLE, int GROUP, typename Y, typename Values>
__device__ __forceinline__ void write_share(Y* y_row, int64_t first, int vectors, int64_t last,
                                            Values values) {
  constexpr int N = Vector<Y>::N;
  const int lane = lane_id() % GROUP;
  const uint32_t phase = phase_of(y_row);
  uint4 before = {};  // the words of the vector before lane 0's: lane 31's of the turn before
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    const int64_t j = first + v * GROUP + lane, col = j * N;
    float out[N];
    values(v, out);
    const int left_in_row = int(last - col < 0 ? 0 : last - col < N ? last - col : N);
    const bool inside = left_in_row == N;
    if constexpr (WHOLE) {
      if (inside) {
        host::count_writes(N);
        store16(y_row + col, pack<Y>(out));
      }
      continue;
    }
    // A lane writes the aligned word that its vector begins in: the end of the vector before and
    // the start of its own.
    const uint4 mine = pack<Y>(out);
    const int source = lane_id() - lane + (lane + GROUP - 1) % GROUP;
    const uint4 given = lane == GROUP - 1 ? before : mine;
    uint4 left;
    left.x = __shfl_sync(0xffffffffu, given.x, source);
    left.y = __shfl_sync(0xffffffffu, given.y, source);
    left.z = __shfl_sync(0xffffffffu, given.z, source);
    left.w = __shfl_sync(0xffffffffu, given.w, source);
    before = mine;
    const int head = int(VECTOR_BYTES - phase) / int(sizeof(Y));  // own elements in that word
    if (inside && j > first) {
      host::count_writes(N);
      store16(reinterpret_cast<char*>(y_row + col) - phase,
              phase ? shifted(left, mine, VECTOR_BYTES - phase) : mine);
    } else if (inside) {
      store_elements(y_row, col, 0, head, out);
    } else {
      store_elements(y_row, col, 0, left_in_row, out);
    }
    // The rest of the vector is in the next one's word: written there if the next is this warp's
    // and whole.
    const bool next_writes = j + 1 < first + vectors * GROUP && col + 2 * N <= last;
    if (inside && !next_writes) store_elements(y_row, col, head, N, out);
  }
}

template <int LANES, typename Monoid>
__device__ __forceinline__ float lanes_fold(float value) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2)
    value = Monoid::combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
}

// Which row a warp works on, and where in it: a row belongs to LANES threads (LANES > 0), or to a
// block or cluster.
template <int VECTORS, int LANES>
struct Place {
  int64_t row, first;  // first: the vector that lane 0 holds first
  __device__ Place() {
    if (LANES) {
      row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / (LANES ? LANES : 1);
      first = 0;
    } else {
      row = blockIdx.x / cluster_size();
      first = (int64_t(cluster_rank()) * warp_count() + warp_id()) * VECTORS * WARP;
    }
  }
};
