// Memory: the three element types, one element or 16 bytes at a time, tails and alignment.
// Arithmetic is float.
// Every instruction that only a GPU has stands here, in online.cuh, fold.cuh, words.cuh,
// exchange.cuh or mma.cuh, with its host twin beside it.
#pragma once

#ifdef ONLINE_SOFTMAX_HOST
#include "host/device.h"
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
#else
#ifdef __CUDACC_RTC__  // NVRTC has no <stdint.h>
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif
#define SHARED_ARRAY(T, name, n) __shared__ T name[n]
#define DYNAMIC_SHARED(T, name)                               \
  extern __shared__ __align__(16) unsigned char name##_raw[]; \
  T* name = reinterpret_cast<T*>(name##_raw)
namespace host {  // the host counts the traffic; on the GPU these vanish
__device__ __forceinline__ void count_reads(int) {}
__device__ __forceinline__ void count_writes(int) {}
__device__ __forceinline__ void count_exps(int) {}
__device__ __forceinline__ void require_aligned(const void*, int) {}
}  // namespace host
#endif

constexpr int VECTOR_BYTES = 16;  // the widest load and store a thread has

struct half_t {
  unsigned short bits;
};
struct bfloat16_t {
  unsigned short bits;
};

template <typename T>
struct IsBfloat16 {
  static constexpr bool value = false;
};
template <>
struct IsBfloat16<bfloat16_t> {
  static constexpr bool value = true;
};

template <typename T>
struct Vector {
  static constexpr int N = VECTOR_BYTES / sizeof(T);  // elements in 16 bytes
};

__device__ __forceinline__ float bits_to_float(uint32_t bits) {
#ifdef ONLINE_SOFTMAX_HOST
  return __builtin_bit_cast(float, bits);
#else
  return __uint_as_float(bits);
#endif
}

__device__ __forceinline__ uint32_t float_to_bits(float value) {
#ifdef ONLINE_SOFTMAX_HOST
  return __builtin_bit_cast(uint32_t, value);
#else
  return __float_as_uint(value);
#endif
}

__device__ __forceinline__ float infinity() { return bits_to_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return bits_to_float(0x7fffffffu); }

// ---- widen: any element to float, exactly

__device__ __forceinline__ float widen(float x) { return x; }

__device__ __forceinline__ float widen(bfloat16_t x) {
  return bits_to_float(uint32_t(x.bits) << 16);
}

__device__ __forceinline__ float widen(half_t x) {
#ifdef ONLINE_SOFTMAX_HOST
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u;
  const uint32_t fraction = x.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
    const float magnitude = float(fraction) * bits_to_float(0x33800000u);
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return bits_to_float(sign | (wide << 23) | (fraction << 13));
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#endif
}

// ---- narrow: float to the element type, to nearest, ties to even

template <typename T>
__device__ __forceinline__ T narrow(float x);

template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}

template <>
__device__ __forceinline__ bfloat16_t narrow<bfloat16_t>(float x) {
#if !defined(ONLINE_SOFTMAX_HOST) && __CUDA_ARCH__ >= 800
  bfloat16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else  // sm_75 and the host have no such instruction
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

template <>
__device__ __forceinline__ half_t narrow<half_t>(float x) {
#ifdef ONLINE_SOFTMAX_HOST
  const uint32_t bits = float_to_bits(x), sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u)
    return {static_cast<unsigned short>(sign | 0x7c00u)};  // over 65,519
  if (magnitude <
      0x38800000u) {  // under 2^-14: subnormal, a multiple of 2^-24; adding 0.5 rounds to one
    const uint32_t rounded = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
    return {static_cast<unsigned short>(sign | rounded)};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23);
  return {static_cast<unsigned short>(sign | (rounded >> 13))};
#else
  half_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#endif
}

// ---- 16 bytes of elements to floats and back

template <typename T>
__device__ __forceinline__ void unpack(uint4 words, float (&x)[Vector<T>::N]) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = bits_to_float(word[i]);
    } else {
      x[2 * i] = widen(T{static_cast<unsigned short>(word[i] & 0xffffu)});
      x[2 * i + 1] = widen(T{static_cast<unsigned short>(word[i] >> 16)});
    }
  }
}

template <typename T>  // of 16 bits
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  return narrow<T>(low).bits | uint32_t(narrow<T>(high).bits) << 16;
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&y)[Vector<T>::N]) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4)
      word[i] = float_to_bits(y[i]);
    else
      word[i] = pack_pair<T>(y[2 * i], y[2 * i + 1]);
  }
  return {word[0], word[1], word[2], word[3]};
}

// ---- one element

template <typename T>
__device__ __forceinline__ float load(const T* x) {
  host::count_reads(1);
  return widen(*x);
}

template <typename T>
__device__ __forceinline__ void store(T* y, float value) {
  host::count_writes(1);
  *y = narrow<T>(value);
}

// ---- one vector of 16 bytes

// Whether every vector of a row lies on a 16-byte boundary and wholly inside the row, so that one
// access moves it. The ladder moves other rows element by element: the same elements by the same
// thread, so the bits of a result never depend on where a row starts. (Row kernels: share.cuh.)
template <typename T>
__device__ __forceinline__ bool is_whole(const T* row, int64_t cols) {
  return reinterpret_cast<uint64_t>(row) % VECTOR_BYTES == 0 && cols % Vector<T>::N == 0;
}

// The compiler may cut a vector store into words where it moves the narrowing past the store.
__device__ __forceinline__ void store16(void* address, uint4 words) {
#ifdef ONLINE_SOFTMAX_HOST
  host::require_aligned(address, VECTOR_BYTES);
  *reinterpret_cast<uint4*>(address) = words;
#else
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
#endif
}

// Elements col, col + 1, ... of a row; past its end -inf, which changes no state.
// Index: int where a row's length is known to fit, which saves registers; else int64_t.
template <bool WHOLE, typename T, typename Index>
__device__ __forceinline__ void load_vector(const T* row, Index col, Index cols,
                                            float (&x)[Vector<T>::N]) {
  constexpr int N = Vector<T>::N;
  if (WHOLE) {
    if (col < cols) {
      host::count_reads(N);
      host::require_aligned(row + col, VECTOR_BYTES);
      unpack<T>(*reinterpret_cast<const uint4*>(row + col), x);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = -infinity();
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = col + i < cols ? load(row + col + i) : -infinity();
  }
}

template <bool WHOLE, typename T, typename Index>
__device__ __forceinline__ void store_vector(T* row, Index col, Index cols,
                                             const float (&y)[Vector<T>::N]) {
  constexpr int N = Vector<T>::N;
  if (WHOLE) {
    if (col >= cols) return;
    host::count_writes(N);
    store16(row + col, pack<T>(y));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (col + i < cols) store(row + col + i, y[i]);
  }
}
