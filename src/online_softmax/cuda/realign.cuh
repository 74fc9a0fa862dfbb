// A group's words, moved to another alignment.
#pragma once
#include "words.cuh"

// Words of one alignment become words of another, `bytes` further on. `next`: the word after the
// last.
template <int W, bool HALVES, int GROUP, int VECTORS>
__device__ __forceinline__ void realign_by(uint4 (&words)[VECTORS], const uint4& next,
                                           uint32_t bits) {
  const int lane = lane_id() % GROUP, next_lane = lane_id() - lane + (lane + 1) % GROUP;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const uint4& wrapped = v + 1 < VECTORS ? words[v + 1 < VECTORS ? v + 1 : v] : next;
    const uint4 high = words_from<0, W + (HALVES ? 1 : 0)>(lane == 0, wrapped, words[v], next_lane);
    words[v] = shifted_by<W, HALVES>(words[v], high, bits);
  }
}

template <bool HALVES, int GROUP, int VECTORS>
__device__ __forceinline__ void realign(uint4 (&words)[VECTORS], const uint4& next,
                                        uint32_t bytes) {
  if constexpr (GROUP == WARP) {  // one shift a warp: one of four ways
    const uint32_t bits = (bytes & 3) * 8;
    switch (bytes >> 2) {
      case 0:
        return realign_by<0, HALVES, GROUP>(words, next, bits);
      case 1:
        return realign_by<1, HALVES, GROUP>(words, next, bits);
      case 2:
        return realign_by<2, HALVES, GROUP>(words, next, bits);
      default:
        return realign_by<3, HALVES, GROUP>(words, next, bits);
    }
  } else {
    const int lane = lane_id() % GROUP, next_lane = lane_id() - lane + (lane + 1) % GROUP;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const uint4& wrapped = v + 1 < VECTORS ? words[v + 1 < VECTORS ? v + 1 : v] : next;
      const uint4 high = words_from<0, 4>(lane == 0, wrapped, words[v], next_lane);
      words[v] = shifted<HALVES>(words[v], high, bytes);
    }
  }
}
