// Folding states: over a thread's columns, over a warp, over a block; and the order of two kernels.
#pragma once
#include "online.cuh"

constexpr int WARP = 32;
constexpr int MAX_THREADS = 1024;  // a block; a rung near 64 registers tells the compiler so
constexpr int MAX_WARPS = MAX_THREADS / WARP;

__device__ __forceinline__ int lane_id() { return int(threadIdx.x % unsigned(WARP)); }
__device__ __forceinline__ int warp_id() { return int(threadIdx.x / unsigned(WARP)); }
__device__ __forceinline__ int warp_count() { return int(blockDim.x / unsigned(WARP)); }

// ---- monoids: an operation with its identity

struct Maximum {
  __device__ static float identity() { return -infinity(); }
  __device__ static float combine(float a, float b) { return maximum(a, b); }
};

struct Sum {
  __device__ static float identity() { return 0.0f; }
  __device__ static float combine(float a, float b) { return a + b; }
};

// ---- warp: every lane ends with the result, in the same bits (both partners add the same two numbers)

template <int LANES, typename Monoid>  // groups of LANES lanes, a power of two
__device__ __forceinline__ float lanes_fold(float value) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2)
    value = Monoid::combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
}

template <typename Monoid>
__device__ __forceinline__ float warp_fold(float value) {
  return lanes_fold<WARP, Monoid>(value);
}

__device__ __forceinline__ bool warp_any(bool flag) {
#ifdef ONLINE_SOFTMAX_HOST
  return warp_fold<Maximum>(flag ? 1.0f : 0.0f) > 0.0f;
#else
  return __any_sync(0xffffffffu, flag);
#endif
}

// merge of 32 states at once: the common maximum first, then each d rescaled once (one exponential
// a lane where five pairwise merges need ten).
__device__ __forceinline__ State warp_merge(State s) {
  const float m = warp_fold<Maximum>(s.m);
  return {m, warp_fold<Sum>(product(s.d, weight(s.m, m)))};
}

// ---- block: every thread ends with the result. Whole warps only (blockDim.x a multiple of 32).

// Of what all lanes of a warp have already.
template <typename Monoid>
__device__ __forceinline__ float block_fold_of_warps(float value) {
  SHARED_ARRAY(float, partial, MAX_WARPS);
  if (lane_id() == 0) partial[warp_id()] = value;
  __syncthreads();  // partial: written by each warp's lane 0, read by all
  value = lane_id() < warp_count() ? partial[lane_id()] : Monoid::identity();
  __syncthreads();  // partial: read here before the next fold writes it
  return warp_fold<Monoid>(value);
}

template <typename Monoid>
__device__ __forceinline__ float block_fold(float value) {
  return block_fold_of_warps<Monoid>(warp_fold<Monoid>(value));
}

// Lanes without a warp bring `empty`, so merges of two empty states happen all the time: join's
// guard is what keeps them from becoming NaN.
__device__ __forceinline__ State block_merge_of_warps(State s) {
  SHARED_ARRAY(State, partial, MAX_WARPS);
  if (lane_id() == 0) partial[warp_id()] = s;
  __syncthreads();  // partial: written by each warp's lane 0, read by all
  s = lane_id() < warp_count() ? partial[lane_id()] : empty();
  __syncthreads();  // partial: read here before the next merge writes it
  return warp_merge(s);
}

__device__ __forceinline__ State block_merge(State s) {
  return block_merge_of_warps(warp_merge(s));
}

// ---- thread: the vectors of columns [first, last) that belong to this thread, which their column
// alone decides. Reads (last - first) sizeof(T) bytes a block.

template <bool WHOLE, typename T>
__device__ __forceinline__ State fold_vectors(const T* row, int64_t first, int64_t last) {
  constexpr int N = Vector<T>::N;
  State s = empty();
#pragma unroll 4  // each vector is still absorbed before the next is loaded
  for (int64_t col = first + threadIdx.x * N; col < last; col += blockDim.x * N) {
    float x[N];
    load_vector<WHOLE>(row, col, last, x);
    s = absorb(s, x);
  }
  return s;
}

template <typename T>
__device__ __forceinline__ State thread_fold(const T* row, int64_t first, int64_t last,
                                             bool whole) {
  return whole ? fold_vectors<true>(row, first, last) : fold_vectors<false>(row, first, last);
}

// ---- two kernels, one after the other (programmatic dependent launch, sm_90 on; elsewhere the
// second simply starts later)

// The next kernel may start: what it needs before its own wait has been written or is of no concern.
__device__ __forceinline__ void allow_next_kernel() {
#if !defined(ONLINE_SOFTMAX_HOST) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Everything that the previous kernel wrote is visible from here on.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if !defined(ONLINE_SOFTMAX_HOST) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
