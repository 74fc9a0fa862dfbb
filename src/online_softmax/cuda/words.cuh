// 16-byte words: fetched, put, and shifted together out of two, in one lane or over neighbours.
#pragma once
#include "fold.cuh"

// ---- 16 bytes at an aligned address. STREAM: used once, so the first to leave the caches.

template <bool STREAM>
__device__ __forceinline__ uint4 fetch16(const uint4* address) {
#ifndef ONLINE_SOFTMAX_HOST
  uint4 v;
  if constexpr (STREAM)
    asm("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(address));
  else
    asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(address));
  return v;
#else
  host::require_aligned(address, VECTOR_BYTES);
  return *address;
#endif
}

template <bool STREAM>
__device__ __forceinline__ void put16(void* address, uint4 words) {
#ifndef ONLINE_SOFTMAX_HOST
  if constexpr (STREAM) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
    return;
  }
#endif
  store16(address, words);
}

// Read again soon, and written again by the next call: the last to leave the L2, to which a stream of
// reads would else send each of them back to memory.
__device__ __forceinline__ void put16_kept(void* address, uint4 words) {
#if !defined(ONLINE_SOFTMAX_HOST) && __CUDA_ARCH__ >= 800
  asm volatile(
      "{ .reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, policy; }" ::"l"(address),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
#else
  store16(address, words);
#endif
}

template <bool STREAM>
__device__ __forceinline__ void put8(void* address, uint32_t low, uint32_t high) {
#ifdef ONLINE_SOFTMAX_HOST
  host::require_aligned(address, 8);
  static_cast<uint32_t*>(address)[0] = low;
  static_cast<uint32_t*>(address)[1] = high;
#else
  if constexpr (STREAM)
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(low), "r"(high)
                 : "memory");
  else
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(low), "r"(high) : "memory");
#endif
}

// 16 bytes that begin at any element.
__device__ __forceinline__ uint4 gather16(const float* x) {
  return {float_to_bits(x[0]), float_to_bits(x[1]), float_to_bits(x[2]), float_to_bits(x[3])};
}

template <typename T>
__device__ __forceinline__ uint4 gather16(const T* x) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = x[2 * i].bits | uint32_t(x[2 * i + 1].bits) << 16;
  return {word[0], word[1], word[2], word[3]};
}

// a ^ b, which the compiler does not simplify.
__device__ __forceinline__ uint32_t unseen_xor(uint32_t a, uint32_t b) {
#ifdef ONLINE_SOFTMAX_HOST
  return a ^ b;
#else
  uint32_t c;
  asm("xor.b32 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
#endif
}

// The same address, which the compiler takes for another.
template <typename T>
__device__ __forceinline__ const T* unseen(const T* address) {
#ifdef ONLINE_SOFTMAX_HOST
  return address;
#else
  const T* again;
  asm("mov.b64 %0, %1;" : "=l"(again) : "l"(address));
  return again;
#endif
}

// ---- shifting: 16 bytes out of 32, from byte `bytes` on (0 to 15)

__device__ __forceinline__ uint32_t shift_pair(uint32_t low, uint32_t high, uint32_t bits) {
#ifdef ONLINE_SOFTMAX_HOST
  return bits ? (low >> bits) | (high << (32 - bits)) : low;
#else
  return __funnelshift_r(low, high, bits);
#endif
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// W: bytes / 4, a constant, so that words are only renamed.
template <int W, bool HALVES>
__device__ __forceinline__ uint4 shifted_by(const uint4& low, const uint4& high, uint32_t bits) {
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int a = W + i, b = W + i + 1;
    const uint32_t here = a < 4 ? word_of(low, a) : word_of(high, a - 4);
    if constexpr (HALVES) {
      const uint32_t there = b < 4 ? word_of(low, b) : word_of(high, b < 8 ? b - 4 : 3);
      out[i] = shift_pair(here, there, bits);
    } else {
      out[i] = here;
    }
  }
  return {out[0], out[1], out[2], out[3]};
}

template <bool HALVES>
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, uint32_t bytes) {
  const uint32_t bits = (bytes & 3) * 8;
  switch (bytes >> 2) {
    case 0:
      return shifted_by<0, HALVES>(low, high, bits);
    case 1:
      return shifted_by<1, HALVES>(low, high, bits);
    case 2:
      return shifted_by<2, HALVES>(low, high, bits);
    default:
      return shifted_by<3, HALVES>(low, high, bits);
  }
}

// Words [FROM, TO) of what the lane at `source` gives: a if it is `first`, else b.
template <int FROM, int TO>
__device__ __forceinline__ uint4 words_from(bool first, const uint4& a, const uint4& b,
                                            int source) {
  uint4 got = {};
  if constexpr (FROM <= 0 && TO > 0) got.x = __shfl_sync(0xffffffffu, first ? a.x : b.x, source);
  if constexpr (FROM <= 1 && TO > 1) got.y = __shfl_sync(0xffffffffu, first ? a.y : b.y, source);
  if constexpr (FROM <= 2 && TO > 2) got.z = __shfl_sync(0xffffffffu, first ? a.z : b.z, source);
  if constexpr (FROM <= 3 && TO > 3) got.w = __shfl_sync(0xffffffffu, first ? a.w : b.w, source);
  return got;
}

__device__ __forceinline__ uint4 select(bool first, const uint4& a, const uint4& b) {
  return {first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}

// words[v]; by choosing among all where only the run knows v.
template <int VECTORS>
__device__ __forceinline__ uint4 pick(const uint4 (&words)[VECTORS], int v) {
  uint4 word = words[0];
#pragma unroll
  for (int i = 1; i < VECTORS; ++i) word = select(i == v, words[i], word);
  return word;
}

// ---- words out of elements

template <typename T>
__device__ __forceinline__ uint4 vector_of(float value) {
  float x[Vector<T>::N];
#pragma unroll
  for (int i = 0; i < Vector<T>::N; ++i) x[i] = value;
  return pack<T>(x);
}

// All bits from bit `bits` on, of 32; none from 32 on, all from 0 down.
__device__ __forceinline__ uint32_t bits_from(int bits) {
  const int count = bits < 0 ? 0 : bits;
#ifdef ONLINE_SOFTMAX_HOST
  return count < 32 ? 0xffffffffu << count : 0u;
#else
  uint32_t mask;
  asm("shl.b32 %0, %1, %2;" : "=r"(mask) : "r"(0xffffffffu), "r"(count));  // clamps at 32
  return mask;
#endif
}

// Elements [count, N) of `high`, and the first `count` of `low`.
template <typename T>
__device__ __forceinline__ uint4 joined(const uint4& low, const uint4& high, int count) {
  const uint32_t a[4] = {low.x, low.y, low.z, low.w}, b[4] = {high.x, high.y, high.z, high.w};
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t mask = bits_from(count * int(sizeof(T) * 8) - 32 * i);
    out[i] = (a[i] & ~mask) | (b[i] & mask);
  }
  return {out[0], out[1], out[2], out[3]};
}

// Element `index` of those that share 4 bytes.
template <typename T>
__device__ __forceinline__ T element_in(uint32_t word, int index) {
  if constexpr (sizeof(T) == 4)
    return bits_to_float(word);
  else
    return T{static_cast<unsigned short>(index ? word >> 16 : word & 0xffffu)};
}

template <typename T>
__device__ __forceinline__ uint4 load_elements(const T* x, int from, int to, float fill) {
  float values[Vector<T>::N];
#pragma unroll
  for (int i = 0; i < Vector<T>::N; ++i) values[i] = i >= from && i < to ? widen(x[i]) : fill;
  return pack<T>(values);
}

// ---- comparing elements: a bit each

__device__ __forceinline__ int count_bits(uint32_t bits) {
#ifdef ONLINE_SOFTMAX_HOST
  return __builtin_popcount(bits);
#else
  return __popc(bits);
#endif
}

// The number of the lowest bit that is set; there is one.
__device__ __forceinline__ int lowest_bit(uint32_t bits) {
#ifdef ONLINE_SOFTMAX_HOST
  return __builtin_ctz(bits);
#else
  return __ffs(int(bits)) - 1;
#endif
}

template <bool OR_UNORDERED>
__device__ __forceinline__ bool is_above(float a, float b) {
  return OR_UNORDERED ? !(a <= b) : a > b;
}

// Of two 16-bit floats in a word: all bits of a half where that of a is above that of b, or, with
// OR_UNORDERED, where one of them is NaN.
template <typename X, bool OR_UNORDERED>
__device__ __forceinline__ uint32_t above_pair(uint32_t a, uint32_t b) {
#ifndef ONLINE_SOFTMAX_HOST
  uint32_t y;
  if constexpr (!IsBfloat16<X>::value) {
    if constexpr (OR_UNORDERED)
      asm("set.gtu.u32.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    else
      asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (IsBfloat16<X>::value) {
    if constexpr (OR_UNORDERED)
      asm("set.gtu.u32.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    else
      asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
#endif
#endif
  const bool low = is_above<OR_UNORDERED>(widen(X{static_cast<unsigned short>(a & 0xffffu)}),
                                          widen(X{static_cast<unsigned short>(b & 0xffffu)}));
  const bool high = is_above<OR_UNORDERED>(widen(X{static_cast<unsigned short>(a >> 16)}),
                                           widen(X{static_cast<unsigned short>(b >> 16)}));
  return (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u);
}
