// A warp's part of a row on its way through shared memory: fetched by a bulk copy (sm_90 on), taken as
// a share. What the kernels that land rows have in common.
#pragma once
#include "rows.cuh"

// A warp's part of a tensor's rows: lands as words, leaves as a share.
template <typename X, int VECTORS, bool WHOLE>
struct Landing {
  using Part = Share<X, VECTORS, WARP, WHOLE>;
  using At = typename Part::At;
  // A row that lies otherwise than the one that is written begins in any of the first two words.
  static constexpr int WORDS = At::WORDS + (WHOLE ? 0 : 2);
  uint4* words;
  uint64_t* landed;

  __device__ __forceinline__ void fetch(const X* row, Span span, int64_t first, const At& at) {
    if (lane_id() != 0) return;
    const Source<At, X> source(row, span, first, at);
    const int from = source.from(span), count = source.to(span) - from;
    bulk_copy(words + from, source.words + from, count > 0 ? count : 0, landed);
  }

  // k counts rows. The words may be overwritten afterwards.
  __device__ __forceinline__ void take(uint32_t k, const X* row, Span span, int64_t first,
                                       const At& at, float fill, Part& share) {
    barrier_wait(landed, k & 1);
    const Source<At, X> source(row, span, first, at);
    const X* elements = reinterpret_cast<const X*>(words) + source.shift;
    load_share<true>(
        share, at, source, span, fill,
        [&](int i) { return source.shift ? gather16(elements + i * At::N) : words[i]; },
        [&](int j) {
          const int i = At::CAPACITY + j;
          return (i + source.shift) / At::N < source.to(span) ? widen(elements[i])
                                                        : widen(source.share[i - at.begin]);
        });
    __syncwarp();  // words: read by all lanes before the next row lands on them
  }
};
