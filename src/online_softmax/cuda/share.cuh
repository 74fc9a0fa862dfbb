// A group of lanes' share of a row in registers, loaded and written as aligned 16-byte words whatever
// the row's alignment.
//
// The group owns N * WORDS consecutive elements. Word k of lane l is number k = v * GROUP + l of the
// words that hold them; element e is number `begin` + e of these words' elements. In a row that starts
// on a 16-byte boundary `begin` is 0. In any other the first word also holds the end of the share
// before, which is masked, and this share ends `begin` elements past its last word: those come one by
// one, a lane each. Sums are taken by an element's number in the share (group_sum), so their bits never
// depend on an address. Nothing is ever read outside the matrix.
#pragma once
#include "realign.cuh"

// How the rows of a launch's tensors lie. WHOLE_WORDS: on 16-byte boundaries, and their ends as well.
// ALIKE: row by row at the same place of a 16-byte word. APART: as they like, so that words read must be
// shifted to become words written.
constexpr int APART = 0, WHOLE_WORDS = 1, ALIKE = 2;

template <typename T>
__device__ __forceinline__ int position_of(const T* row) {  // in its 16-byte word, in elements
  return int(reinterpret_cast<uint64_t>(row) % VECTOR_BYTES / sizeof(T));
}

template <int LIES, typename T>
__device__ __forceinline__ int begin_of(const T* row) {
  return LIES == WHOLE_WORDS ? 0 : position_of(row);
}

// Where shares of a row begin in their words: as the row written wants it, so that writing needs no
// shifting; nor does reading then, unless the two rows lie differently.
template <int LIES, typename Emit, typename X, typename Y>
__device__ __forceinline__ int begin_for(const X* x_row, const Y* y_row) {
  if (LIES != APART || !Emit::WRITES_ROW) return begin_of<LIES>(x_row);
  const int of_x = position_of(x_row), of_y = position_of(y_row);
  return of_x % Vector<Y>::N == of_y ? of_x : of_y;
}

// Which elements of a row a group holds, and how they lie in its words: numbers [begin, end).
template <typename T, int VECTORS, int GROUP, int LIES>
struct Held {
  static constexpr bool WHOLE = LIES == WHOLE_WORDS, SHIFTS = LIES == APART;
  static constexpr int N = Vector<T>::N, WORDS = VECTORS * GROUP, CAPACITY = WORDS * N;
  int begin, end;
  __device__ Held(int64_t first, int64_t last, int begin_) : begin(WHOLE ? 0 : begin_) {
    const int64_t left = last - first * N;
    end = begin + (left <= 0 ? 0 : left < CAPACITY ? int(left) : CAPACITY);
  }
  __device__ int count() const { return end - begin; }
  __device__ bool is_interior() const { return count() == CAPACITY; }
  __device__ int past_words() const { return WHOLE || end < CAPACITY ? 0 : end - CAPACITY; }
  // The elements of word k are [from(k), to(k)) of it; all N of them where it is full.
  __device__ int from(int k) const { return k == 0 ? begin : 0; }
  __device__ int to(int k) const { return end - k * N < N ? end - k * N : N; }
  __device__ bool is_full(int k) const { return (k + 1) * N <= end && (WHOLE || k > 0 || !begin); }
  __device__ int in_word(int k) const { return to(k) > from(k) ? to(k) - from(k) : 0; }
};

// `words` as they lie in memory. `after`: what lies past them, element j of it in lane j % GROUP.
template <typename T, int VECTORS, int GROUP_, int LIES>
struct Share {
  using Element = T;
  using At = Held<T, VECTORS, GROUP_, LIES>;
  static constexpr int GROUP = GROUP_, N = At::N, COUNT = VECTORS;
  static constexpr bool WHOLE = At::WHOLE, SHIFTS = At::SHIFTS;
  static constexpr int AFTER = WHOLE ? 0 : (N - 2) / GROUP + 1;  // elements a lane
  static constexpr int KEPT = AFTER ? AFTER : 1;
  uint4 words[VECTORS];
  float after[KEPT];
  __device__ static int lane() { return int(threadIdx.x % unsigned(GROUP)); }
  __device__ static At of(int64_t first, int64_t last, int begin) { return {first, last, begin}; }
};

// A matrix's bytes, which may be read as words though they lie between rows.
struct Span {
  uint64_t begin, end;
  template <typename T>
  __device__ Span(const T* x, int64_t rows, int64_t cols, int64_t row_stride)
      : begin(reinterpret_cast<uint64_t>(x)),
        end(reinterpret_cast<uint64_t>(x + (rows - 1) * row_stride + cols)) {}
};

// Where a share comes from. Element e is number offset + e of the words; offset - begin, `shift`, is 0
// unless the row lies otherwise than the one that is written.
template <typename At, typename T>
struct Source {
  static constexpr int N = Vector<T>::N;
  const T* share;  // the first element
  const uint4* words;
  int offset, shift, from, to;
  bool is_given;  // words [from, to), all that the share needs, may be read
  __device__ Source(const T* row, Span span, int64_t first, const At& at) : share(row + first * N) {
    offset = at.begin;
    if (At::SHIFTS) {
      offset = position_of(row);
      if (offset < at.begin) offset += N;
    }
    shift = offset - at.begin;
    words = reinterpret_cast<const uint4*>(share - offset);
    from = 0;
    to = at.count() ? int(unsigned(at.count() + offset + N - 1) / N) : 0;
    is_given = reinterpret_cast<uint64_t>(words) >= span.begin &&
               reinterpret_cast<uint64_t>(words + to) <= span.end;
  }
  __device__ void find_ends(Span span) {
    const int64_t before = int64_t(span.begin - reinterpret_cast<uint64_t>(words));
    const int64_t readable = int64_t(span.end - reinterpret_cast<uint64_t>(words)) / VECTOR_BYTES;
    from = before > 0 ? int((before + VECTOR_BYTES - 1) / VECTOR_BYTES) : 0;
    to = readable < to ? int(readable) : to;
  }
};

// What is still to be put right of a share on its way.
template <typename S>
struct Fetched {
  typename S::Element past[S::KEPT];  // `after` as it came: nothing may wait for it yet
  uint4 next;                         // the source's word after the last, for a shift
  int shift;                          // the source's
  bool is_given;                      // the source's
};

// ---- loading

// What words did not give: elements at the ends of a matrix. At its beginning these may be in two words,
// where the row lies nearer to a boundary than the one that is written: source word 1 cannot be read
// then, and gives to both.
template <typename S, typename From>
__device__ __forceinline__ void mend_ends(S& share, const typename S::At& at, const From& source,
                                          float fill) {
  constexpr int N = S::N, GROUP = S::GROUP;
  const int lane = S::lane(), last = at.end / N, beyond = source.shift ? 1 : 0;
#pragma unroll 1
  for (int edge = 0; edge < 4; ++edge) {
    const int k = edge < 2 ? edge : last - 3 + edge;
    const bool is_given = k >= source.from && k + beyond < source.to;
    if (k < 0 || k >= S::At::WORDS || k % GROUP != lane || !at.in_word(k) || is_given) continue;
    const uint4 word = load_elements(source.share + k * N - at.begin, at.from(k), at.to(k), fill);
#pragma unroll
    for (int v = 0; v < S::COUNT; ++v)
      share.words[v] = select(v == k / GROUP, word, share.words[v]);
  }
}

// A share comes in two steps, so that several loads are on their way at once: fetch_share starts them,
// settle_share waits and puts right what words alone do not give. All lanes of a warp call both
// together. `word(k)` finds the source's words and `past(j)` the elements past the share's last word;
// BY_WORD: `word` shifts by itself where the source wants it.
template <bool BY_WORD, typename S, typename From, typename Word, typename Past>
__device__ __forceinline__ Fetched<S> fetch_share(S& share, const typename S::At& at, From& source,
                                                  Span span, float fill, Word word, Past past) {
  constexpr int GROUP = S::GROUP, WORDS = S::At::WORDS;
  Fetched<S> fetched = {};
  const int lane = S::lane();
  const uint4 pad = vector_of<typename S::Element>(fill);
#pragma unroll
  for (int v = 0; v < S::COUNT; ++v) host::count_reads(at.in_word(v * GROUP + lane));
  if constexpr (S::WHOLE) {
    if (at.is_interior()) {
#pragma unroll
      for (int v = 0; v < S::COUNT; ++v) share.words[v] = word(v * GROUP + lane);
    } else {
#pragma unroll
      for (int v = 0; v < S::COUNT; ++v)
        share.words[v] = at.is_full(v * GROUP + lane) ? word(v * GROUP + lane) : pad;
    }
  } else {
    if (!source.is_given) source.find_ends(span);
#pragma unroll
    for (int a = 0; a < S::AFTER; ++a) {
      const int j = a * GROUP + lane;
      if (j < at.past_words()) fetched.past[a] = past(j);
      host::count_reads(j < at.past_words() ? 1 : 0);
    }
    if (at.is_interior() && source.is_given) {
#pragma unroll
      for (int v = 0; v < S::COUNT; ++v) share.words[v] = word(v * GROUP + lane);
    } else {
#pragma unroll
      for (int v = 0; v < S::COUNT; ++v) {
        const int k = v * GROUP + lane;
        share.words[v] = k >= source.from && k < source.to ? word(k) : pad;
      }
    }
    // A shifted share's last word ends in the source's next.
    const bool has_next = source.shift && WORDS >= source.from && WORDS < source.to;
    fetched.next = !BY_WORD && has_next ? word(WORDS) : pad;
    fetched.shift = source.shift;
    fetched.is_given = source.is_given;
  }
  return fetched;
}

// The second step; row, span and first as for the source. What most shares are spared is behind one
// branch, and the source is found again there: no register holds it meanwhile.
template <bool BY_WORD, typename S, typename T>
__device__ __forceinline__ void settle_share(S& share, const typename S::At& at,
                                             const Fetched<S>& fetched, const T* row, Span span,
                                             int64_t first, float fill) {
  if constexpr (!S::WHOLE) {
    constexpr int N = S::N, GROUP = S::GROUP;
    const int lane = S::lane();
    const uint4 pad = vector_of<T>(fill);
    const int shift = BY_WORD || !S::SHIFTS ? 0 : fetched.shift;
    const bool is_plain = at.is_interior() && fetched.is_given && shift == 0;
    if (GROUP == WARP ? !is_plain : warp_any(!is_plain)) {
      if (S::SHIFTS && !BY_WORD && (GROUP == WARP ? shift != 0 : warp_any(shift != 0)))
        realign<sizeof(T) == 2, GROUP>(share.words, fetched.next, uint32_t(shift * sizeof(T)));
      if (!fetched.is_given) {
        Source<typename S::At, T> source(unseen(row), span, first, at);
        source.find_ends(span);
        mend_ends(share, at, source, fill);
      }
#pragma unroll
      for (int v = 0; v < S::COUNT; ++v) {  // the row may end here: `fill` behind it
        const int to = at.to(v * GROUP + lane);
        if (to < N) share.words[v] = joined<T>(share.words[v], pad, to);
      }
    }
    share.words[0] = joined<T>(pad, share.words[0], lane == 0 ? at.begin : 0);
#pragma unroll
    for (int a = 0; a < S::AFTER; ++a)
      share.after[a] = a * GROUP + lane < at.past_words() ? widen(fetched.past[a]) : fill;
  }
}

// The first step from global memory; returns what the second, settle_share<false>, needs.
template <bool STREAM, typename S, typename T>
__device__ __forceinline__ Fetched<S> fetch_global(S& share, const typename S::At& at, const T* row,
                                                   Span span, int64_t first, float fill) {
  Source<typename S::At, T> source(row, span, first, at);
  return fetch_share<false>(
      share, at, source, span, fill, [&](int k) { return fetch16<STREAM>(source.words + k); },
      [&](int j) { return source.share[S::At::CAPACITY - at.begin + j]; });
}
