// What ships along a dimension that is not the last: x viewed as (outer, cols, inner), inner contiguous.
// A thread owns WIDTH neighbouring inner positions (16 bytes, or one element where rows are not
// whole vectors) and every TY-th of the cols; threads of one inner position merge their states in
// shared memory. HELD > 0: the thread's share stays in registers, one read and one write, cols up
// to TY x HELD. HELD 0: two reads, any cols.
#include "emit.cuh"
#include "fold.cuh"

constexpr int STEP = 4;  // cols absorbed at once where nothing is held

template <int WIDTH, typename T>
__device__ __forceinline__ void load_width(const T* x, float (&values)[WIDTH]) {
  if constexpr (WIDTH == 1) {
    values[0] = load(x);
  } else {
    host::count_reads(WIDTH);
    host::require_aligned(x, VECTOR_BYTES);
    unpack<T>(*reinterpret_cast<const uint4*>(x), values);
  }
}

template <int WIDTH, typename T>
__device__ __forceinline__ void store_width(T* y, const float (&values)[WIDTH]) {
  if constexpr (WIDTH == 1) {
    store(y, values[0]);
  } else {
    host::count_writes(WIDTH);
    store16(y, pack<T>(values));
  }
}

// Merges the states of the thread rows above into row 0, halving their number; all then read row 0.
template <int WIDTH>
__device__ __forceinline__ void merge_thread_rows(State* shared, State (&s)[WIDTH], int iy,
                                                  int ty) {
  // [w][thread]: neighbouring threads, neighbouring words
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) shared[w * blockDim.x + threadIdx.x] = s[w];
  const int lx = int(blockDim.x) / ty;
  for (int half = ty / 2; half > 0; half /= 2) {
    __syncthreads();  // shared: rows below 2 half written before they are read here
    if (iy < half) {
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) {
        const int at = w * blockDim.x + threadIdx.x;
        shared[at] = merge(shared[at], shared[at + half * lx]);
      }
    }
  }
  __syncthreads();  // shared: row 0 merged before all read it
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) s[w] = shared[w * blockDim.x + int(threadIdx.x) % lx];
}

template <typename X, int WIDTH, int HELD, typename Emit>
__global__ void __launch_bounds__(512)
    outer_rows(const X* __restrict__ x,  // (outer, cols, inner), contiguous
               X* __restrict__ y,        // the same
               int64_t cols, int64_t inner, float scale, int64_t zero_empty,
               int64_t tiles,  // blocks along inner
               int64_t ty) {   // thread rows, a power of two; blockDim.x / ty threads along inner
  DYNAMIC_SHARED(State, shared);
  const int lx = int(blockDim.x / ty), ix = int(threadIdx.x) % lx, iy = int(threadIdx.x) / lx;
  const int64_t position = ((blockIdx.x % tiles) * lx + ix) * WIDTH;
  const bool is_inside = position < inner;  // threads past the end bring `empty` and meet barriers
  const int64_t start = (blockIdx.x / tiles) * cols * inner + position;
  const int64_t last = is_inside ? cols : 0;

  State s[WIDTH];
  float held[HELD > 0 ? HELD : 1][WIDTH];
  if constexpr (HELD > 0) {
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      const int64_t col = iy + k * ty;
      if (col < last) {
        load_width<WIDTH>(x + start + col * inner, held[k]);
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) held[k][w] = product(held[k][w], scale);
      } else {
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) held[k][w] = -infinity();
      }
    }
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
      float column[HELD];
#pragma unroll
      for (int k = 0; k < HELD; ++k) column[k] = held[k][w];
      s[w] = of(column);
    }
  } else {
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) s[w] = empty();
    for (int64_t first = iy; first < last; first += STEP * ty) {
      float step[STEP][WIDTH];
#pragma unroll
      for (int k = 0; k < STEP; ++k) {
        const int64_t col = first + k * ty;
        if (col < last) {
          load_width<WIDTH>(x + start + col * inner, step[k]);
        } else {
#pragma unroll
          for (int w = 0; w < WIDTH; ++w) step[k][w] = -infinity();
        }
      }
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) {
        float column[STEP];
#pragma unroll
        for (int k = 0; k < STEP; ++k)
          column[k] = first + k * ty < last ? product(step[k][w], scale) : -infinity();
        s[w] = absorb(s[w], column);
      }
    }
  }
  merge_thread_rows(shared, s, iy, int(ty));

  auto emit = [&](float x, const State& state) {
    const float m = is_finite(state.m) ? state.m : 0.0f;
    return Emit(state, 1.0f, 1.0f, zero_empty != 0)(Emit::FROM_TERM ? exponential(x - m) : x);
  };
  if constexpr (HELD > 0) {
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      const int64_t col = iy + k * ty;
      if (col >= last) continue;
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) held[k][w] = emit(held[k][w], s[w]);
      store_width<WIDTH>(y + start + col * inner, held[k]);
    }
  } else {
#pragma unroll 4
    for (int64_t col = iy; col < last; col += ty) {
      float values[WIDTH];
      load_width<WIDTH>(x + start + col * inner, values);
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) values[w] = emit(product(values[w], scale), s[w]);
      store_width<WIDTH>(y + start + col * inner, values);
    }
  }
}
