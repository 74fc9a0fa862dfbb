// Tensor cores: products of 16 x 16 and 16 x 8 elements of 16 bits, a warp at a time (sm_80 on).
//
// Lane 4 g + c has, as PTX numbers fragments (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   a  of 16 x 16: words a[0], a[2] of row g and a[1], a[3] of row g + 8; columns 2c, 2c + 1 in the
//      first two, 2c + 8, 2c + 9 in the others
//   b  of 16 x 8: column g; rows 2c, 2c + 1 in b0, 2c + 8, 2c + 9 in b1
//   c  of 16 x 8, float32: c[0], c[1] of row g, c[2], c[3] of row g + 8; columns 2c, 2c + 1
#pragma once
#include "fold.cuh"

// c += a b.
template <typename X>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
#ifdef ONLINE_SOFTMAX_HOST
  const int g = lane_id() / 4, pair = lane_id() % 4;
  auto both = [](uint32_t low, uint32_t high) { return low | uint64_t(high) << 32; };
  auto add = [](float sum, uint32_t x, uint32_t y) {
    auto at = [](uint32_t word, int i) {
      return widen(X{static_cast<unsigned short>(word >> (16 * i))});
    };
    return sum + at(x, 0) * at(y, 0) + at(x, 1) * at(y, 1);
  };
  for (int i = 0; i < 4; ++i) {
    const uint64_t upper = __shfl_sync(0xffffffffu, both(a[0], a[2]), 4 * g + i);
    const uint64_t lower = __shfl_sync(0xffffffffu, both(a[1], a[3]), 4 * g + i);
    const uint64_t left = __shfl_sync(0xffffffffu, both(b0, b1), 8 * pair + i);
    const uint64_t right = __shfl_sync(0xffffffffu, both(b0, b1), 8 * pair + 4 + i);
    for (int half = 0; half < 64; half += 32) {
      c[0] = add(c[0], uint32_t(upper >> half), uint32_t(left >> half));
      c[1] = add(c[1], uint32_t(upper >> half), uint32_t(right >> half));
      c[2] = add(c[2], uint32_t(lower >> half), uint32_t(left >> half));
      c[3] = add(c[3], uint32_t(lower >> half), uint32_t(right >> half));
    }
  }
#elif __CUDA_ARCH__ >= 800
  if constexpr (IsBfloat16<X>::value)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// An 8 x 8 matrix of 16-bit elements, of which lane 4 g + c has row g, columns 2c and 2c + 1: turned.
__device__ __forceinline__ uint32_t transposed(uint32_t word) {
#ifdef ONLINE_SOFTMAX_HOST
  const int g = lane_id() / 4, pair = lane_id() % 4, shift = 16 * (g % 2);
  const uint32_t first = __shfl_sync(0xffffffffu, word, 8 * pair + g / 2);
  const uint32_t second = __shfl_sync(0xffffffffu, word, 8 * pair + 4 + g / 2);
  return (first >> shift & 0xffffu) | (second >> shift & 0xffffu) << 16;
#else
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
#endif
}

// The lower halves of two words, and the upper ones, in a word.
__device__ __forceinline__ uint32_t low_halves(uint32_t first, uint32_t second) {
#ifdef ONLINE_SOFTMAX_HOST
  return (first & 0xffffu) | second << 16;
#else
  return __byte_perm(first, second, 0x5410);
#endif
}
__device__ __forceinline__ uint32_t high_halves(uint32_t first, uint32_t second) {
#ifdef ONLINE_SOFTMAX_HOST
  return first >> 16 | (second & 0xffff0000u);
#else
  return __byte_perm(first, second, 0x7632);
#endif
}
