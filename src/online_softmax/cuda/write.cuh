// A share written: whole words by their lanes, and what it does not have alone of a word element by
// element.
#pragma once
#include "share.cuh"

// Of what the first lane of a group holds, element l for lane l < N.
template <int GROUP, typename Y, int N>
__device__ __forceinline__ Y element_of_first_lane(const float (&x)[N]) {
  constexpr int IN_WORD = 4 / sizeof(Y);  // elements of 4 bytes
  const int lane = lane_id() % GROUP, first = lane_id() - lane;
  uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < N / IN_WORD; ++i) {
    uint32_t packed;
    if constexpr (IN_WORD == 1)
      packed = float_to_bits(x[i]);
    else
      packed = pack_pair<Y>(x[2 * i], x[2 * i + 1]);
    const uint32_t word = __shfl_sync(0xffffffffu, packed, first);
    mine = lane / IN_WORD == i ? word : mine;
  }
  return element_in<Y>(mine, lane % IN_WORD);
}

// y: where the share's words go, word 0 first. `values(v, x)` gives what shall stand for word v of this
// lane, `past(a)` what shall stand for after[a].
template <bool STREAM, typename S, typename Y, typename Values, typename Past>
__device__ __forceinline__ void write_share(const typename S::At& at, Y* y, Values values,
                                            Past past) {
  constexpr int N = S::N, GROUP = S::GROUP, M = Vector<Y>::N;
  const int lane = S::lane();
  float x[N];
  if constexpr (!S::WHOLE) {  // first what is not the share's alone
    auto write_part = [&](int k) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (i >= at.from(k) && i < at.to(k)) y[k * N + i] = narrow<Y>(x[i]);
    };
#pragma unroll
    for (int a = 0; a < S::AFTER; ++a) {
      const int j = a * GROUP + lane;
      if (j < at.past_words()) y[S::At::CAPACITY + j] = narrow<Y>(past(a));
      host::count_writes(j < at.past_words() ? 1 : 0);
    }
    if (!at.is_interior()) {
      const int last = at.end / N;
      if (last >= GROUP && last < S::At::WORDS && last % GROUP == lane && at.in_word(last)) {
        values(last / GROUP, x);
        write_part(last);
      }
    }
    values(0, x);
    if constexpr (GROUP >= N) {
      if (GROUP == WARP ? !at.is_full(0) : warp_any(!at.is_full(0))) {
        const Y mine = element_of_first_lane<GROUP, Y>(x);
        if (!at.is_full(0) && lane >= at.from(0) && lane < at.to(0)) y[lane] = mine;
      }
      if (lane > 0 && !at.is_full(lane) && at.in_word(lane)) write_part(lane);
    } else if (!at.is_full(lane) && at.in_word(lane)) {
      write_part(lane);
    }
  }
#pragma unroll
  for (int v = 0; v < S::COUNT; ++v) {
    const int k = v * GROUP + lane;
    if (S::WHOLE || v > 0) values(v, x);
    host::count_writes(at.in_word(k));
    if (!at.is_full(k)) continue;
    if constexpr (M > N) {  // of a type half as wide
      put8<STREAM>(y + k * N, pack_pair<Y>(x[0], x[1]), pack_pair<Y>(x[2], x[3]));
    } else {
#pragma unroll
      for (int part = 0; part < N / M; ++part)
        put16<STREAM>(y + k * N + part * M,
                      pack<Y>(*reinterpret_cast<const float (*)[M]>(x + part * M)));
    }
  }
}
