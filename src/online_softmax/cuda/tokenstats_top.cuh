// The first `count` elements of a block's part of a row, from registers, in the order of tokenstats.cuh.
//
// The largest elements of small groups bound the count-th from below: of random elements hardly more
// than count reach it. These alone are written down, and each counts the ones before it to find its
// place. Where too many do (equal elements, rows in order), the bound is raised by bisection over codes,
// then over words: 16 and 11 counts of the part at most (float32: 32 and 11), and 5 where all are equal
// (14). A count compares each element once, two at a time in 16 bits, so such a row costs a few times as
// many instructions, never more.
#pragma once
#include "tokenstats.cuh"

constexpr int FIRST_CAPACITY = 512;   // of those written down, well above the largest count
constexpr int MOST_GROUPS = 256;      // one a thread
constexpr uint32_t GROUP_BITS = 255;  // of a code, where the group's number stands instead

struct FirstMemory {
  uint32_t* groups;        // [MOST_GROUPS] the code of a group's largest, its number below
  uint32_t* found;         // [2] how many were found; the bound
  unsigned short* places;  // [FIRST_CAPACITY] their numbers in the part
  uint64_t* keys;          // [FIRST_CAPACITY]
};

// Which elements are written down: codes of at least `sure`, and of at least `tied` in words before
// `word` of the part.
struct Bound {
  uint32_t sure, tied;
  int word;
};

template <typename S>
struct First {
  using X = typename S::Element;
  static constexpr int CODE_SHIFT = sizeof(X) == 2 ? 16 : 0;  // codes begin at the highest bit
  static constexpr int WORDS = S::COUNT * WARP;               // of a warp's share
  const S& share;
  const typename S::At& held;
  const FirstMemory& memory;
  int groups, count;  // groups: of a warp, a power of two

  // Of each warp of a part that has `words`: smaller ones where warps have none, the last part's, so
  // that those with elements are about as many.
  __device__ static __forceinline__ int groups_of(int groups, int words) {
    const int wanted = groups * warp_count(), filled = (words + WORDS - 1) / WORDS;
    while (groups < WARP && groups * filled < wanted) groups *= 2;
    return groups;
  }

  // A group's largest, to be known after a barrier. `top`: the lane's largest; the warp's comes back.
  __device__ __forceinline__ float note_groups(float top) const {
    float group = top;
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
      top = maximum(top, __shfl_xor_sync(0xffffffffu, top, mask));
      if (mask >= groups) group = top;
    }
    if (lane_id() < groups) {
      const int number = warp_id() * groups + lane_id();
      const uint32_t code = Code<X>::of(group) << CODE_SHIFT;
      memory.groups[number] = (code & ~GROUP_BITS) | (GROUP_BITS - uint32_t(number));
    }
    if (threadIdx.x == 0) memory.found[0] = memory.found[1] = 0;
    return top;
  }

  __device__ int all_groups() const { return groups * warp_count(); }

  // After a barrier: a code that `count` elements of the part reach, if it has so many; else the least.
  __device__ __forceinline__ uint32_t bound() const {
    const int all = all_groups();
    if (int(threadIdx.x) < all) {
      const uint32_t mine = memory.groups[threadIdx.x];
      int before = 0;
#pragma unroll 8
      for (int i = 0; i < all; ++i) before += memory.groups[i] > mine ? 1 : 0;
      if (before == count - 1) memory.found[1] = mine;  // numbers differ, so one group is there
    }
    __syncthreads();  // found[1]: written by one thread at most, read by all
    const uint32_t code = (memory.found[1] & ~GROUP_BITS) >> CODE_SHIFT;
    return code > Code<X>::NOTHING_LESS ? code : Code<X>::NOTHING_LESS;
  }

  // Elements of at least `code`; none past the row's end.
  __device__ __forceinline__ Marks<S> reaching(uint32_t code) const {
    Marks<S> marks = mark_above<true>(share, Code<X>::below(code));
    if (held.is_interior()) return marks;
#pragma unroll
    for (int a = 0; a < Marks<S>::COUNT; ++a)
      for (uint32_t rest = marks.bits[a]; rest; rest &= rest - 1) {
        const int bit = lowest_bit(rest);
        if (Marks<S>::place(a, bit) >= held.end) marks.bits[a] &= ~(1u << bit);
      }
    return marks;
  }

  __device__ __forceinline__ Marks<S> within(const Bound& bound) const {
    Marks<S> marks;
    if (bound.sure <= Code<X>::INFINITE + 1)
      marks = reaching(bound.sure);  // there is no larger code
    if (bound.word == 0) return marks;
    const Marks<S> more = reaching(bound.tied);
    const int first = warp_id() * WORDS + lane_id();
#pragma unroll
    for (int v = 0; v < S::COUNT; ++v)
      if (first + v * WARP < bound.word)
        marks.bits[v / Marks<S>::EACH] |= more.bits[v / Marks<S>::EACH] & Marks<S>::of_vector(v);
    return marks;
  }

  __device__ __forceinline__ int total(const Bound& bound) const {
    return int(block_fold<Sum>(float(within(bound).count())));  // exact: under 2^24
  }

  // Between count and FIRST_CAPACITY elements, `low` being reached by more. All threads together.
  __device__ __forceinline__ Bound raise(uint32_t low) const {
    uint32_t high = 0;
    for (int i = 0; i < all_groups(); ++i) high = high > memory.groups[i] ? high : memory.groups[i];
    high = ((high | GROUP_BITS) >> CODE_SHIFT) + 1;  // which no element reaches
    if (high > Code<X>::INFINITE + 2) high = Code<X>::INFINITE + 2;
    uint32_t middle = low + 1;  // first: are there so many because they are equal?
#pragma unroll 1
    while (high - low > 1) {
      const int reached = total({middle, middle, 0});
      if (reached > FIRST_CAPACITY)
        low = middle;
      else if (reached < count)
        high = middle;
      else
        return {middle, middle, 0};
      middle = low + (high - low) / 2;
    }
    // A word has 8 elements at most, far fewer than what lies between the two counts, so one of the
    // words is found before from and to are neighbours.
    int from = 0, to = WORDS * warp_count();
#pragma unroll 1
    while (to - from > 1) {
      const int word = from + (to - from) / 2;
      const int reached = total({high, low, word});
      if (reached > FIRST_CAPACITY)
        to = word;
      else if (reached < count)
        from = word;
      else
        return {high, low, word};
    }
    return {high, low, to};
  }

  __device__ __forceinline__ void write_down(const Marks<S>& marks) const {
    const int mine = marks.count();
    if (mine == 0) return;
    int at = int(atomicAdd(memory.found, unsigned(mine)));
#pragma unroll
    for (int a = 0; a < Marks<S>::COUNT; ++a)
      for (uint32_t rest = marks.bits[a]; rest && at < FIRST_CAPACITY; rest &= rest - 1)
        memory.places[at++] = static_cast<unsigned short>(warp_id() * S::At::CAPACITY +
                                                          Marks<S>::place(a, lowest_bit(rest)));
  }

  // The keys of the first `count`, in order, then 0. note_groups and a barrier went before. x: the part's
  // first element, in column col. lane_top: the lane's largest.
  __device__ __forceinline__ void take(float lane_top, const X* x, int64_t col,
                                       uint64_t* keys) const {
    const uint32_t low = bound();
    if (warp_any(Code<X>::of(lane_top) >= low)) write_down(reaching(low));
    __syncthreads();  // found[0], places: written by all, read by all
    int found = int(memory.found[0]);
    if (found > FIRST_CAPACITY) {
      const Bound raised = raise(low);
      __syncthreads();  // found[0]: read above by all before it is cleared
      if (threadIdx.x == 0) memory.found[0] = 0;
      __syncthreads();  // found[0]: cleared before it is added to
      write_down(within(raised));
      __syncthreads();  // found[0], places: as above
      found = int(memory.found[0]);
    }
    for (int j = int(threadIdx.x); j < found; j += int(blockDim.x)) {
      const int place = memory.places[j];
      memory.keys[j] = key_of(load(x + place), col + place);
    }
    __syncthreads();  // keys: written by some, read by all
    for (int j = int(threadIdx.x); j < found; j += int(blockDim.x)) {
      const uint64_t mine = memory.keys[j];
      int before = 0;
#pragma unroll 4
      for (int i = 0; i < found; ++i) before += memory.keys[i] > mine ? 1 : 0;
      if (before < count) keys[before] = mine;
    }
    for (int j = found + int(threadIdx.x); j < count; j += int(blockDim.x)) keys[j] = 0;
  }
};

// ---- lists of keys in order, the first of each part, merged by a warp

// Number j WARP + lane of the list is keys[j] of the lane.
template <int KEYS>
struct TopList {
  static constexpr int SIZE = KEYS * WARP;
  uint64_t keys[KEYS] = {};

  __device__ static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }
  __device__ static uint64_t smaller(uint64_t a, uint64_t b) { return a > b ? b : a; }

  // The first SIZE of both: of a list and another turned around, the larger of each pair; which rise
  // and fall, and half a bitonic sort puts them in order (K. E. Batcher, Sorting networks, 1968).
  __device__ __forceinline__ void merge(const uint64_t* list, int count) {
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
      const int other = SIZE - 1 - (j * WARP + lane_id());
      keys[j] = larger(keys[j], other < count ? list[other] : 0);
    }
    between_keys<KEYS / 2>();
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
#pragma unroll
      for (int j = 0; j < KEYS; ++j) {
        const uint64_t other = __shfl_xor_sync(0xffffffffu, keys[j], step);
        keys[j] = lane_id() & step ? smaller(keys[j], other) : larger(keys[j], other);
      }
    }
  }
  template <int STEP>  // a constant: keys stay in registers
  __device__ __forceinline__ void between_keys() {
    if constexpr (STEP > 0) {
#pragma unroll
      for (int j = 0; j < KEYS; ++j) {
        if (j & STEP) continue;
        const uint64_t a = keys[j], b = keys[j + STEP];
        keys[j] = larger(a, b);
        keys[j + STEP] = smaller(a, b);
      }
      between_keys<STEP / 2>();
    }
  }
  __device__ __forceinline__ uint64_t at(int place) const {
    uint64_t found = 0;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {  // each key is sent: a choice before would go through memory
      const uint64_t key = __shfl_sync(0xffffffffu, keys[j], place % WARP);
      found = place / WARP == j ? key : found;
    }
    return found;
  }
};
