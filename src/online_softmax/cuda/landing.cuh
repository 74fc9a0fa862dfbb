// A warp's part of a row on its way through shared memory: fetched by a bulk copy (sm_90 on), taken as
// a share. What the kernels that land rows have in common.
#pragma once
#include "rows.cuh"

// A warp's part of a tensor's rows: lands as words, leaves as a share.
template <typename X, int VECTORS, int LIES>
struct Landing {
  using Part = Share<X, VECTORS, WARP, LIES>;
  using At = typename Part::At;
  // A row that lies otherwise than the one that is written begins in any of the first two words.
  static constexpr int WORDS = At::WORDS + (At::WHOLE ? 0 : 2);
  uint4* words;
  uint64_t* landed;

  __device__ __forceinline__ void fetch(const X* row, Span span, int64_t first, const At& at) {
    if (lane_id() != 0) return;
    Source<At, X> source(row, span, first, at);
    if (!source.is_given) source.find_ends(span);
    const int count = source.to > source.from ? source.to - source.from : 0;
    bulk_copy(words + source.from, source.words + source.from, count, landed);
  }

  // k counts rows. The words may be overwritten afterwards.
  __device__ __forceinline__ void take(uint32_t k, const X* row, Span span, int64_t first,
                                       const At& at, float fill, Part& share) {
    barrier_wait(landed, k & 1);
    Source<At, X> source(row, span, first, at);
    const X* elements = reinterpret_cast<const X*>(words) + source.shift;
    const auto fetched = fetch_share<true>(
        share, at, source, span, fill,
        [&](int i) { return source.shift ? gather16(elements + i * At::N) : words[i]; },
        [&](int j) {
          const int i = At::CAPACITY + j;
          const bool is_here = i + source.shift < source.to * At::N;  // else past the last copied
          return is_here ? elements[i] : source.share[i - at.begin];
        });
    settle_share<true>(share, at, fetched, row, span, first, fill);
    __syncwarp();  // words: read by all lanes before the next row lands on them
  }
};
