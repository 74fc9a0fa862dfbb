// What ships along a dimension that is not the last: x viewed as (outer, cols, inner), inner contiguous.
// A thread owns WIDTH neighbouring positions (16 bytes of the narrowest type, or one element where
// inner rows are not whole vectors) and every TY-th of the cols; threads of one position merge what
// they have in shared memory. HELD > 0: the thread's share stays in registers, one read and one write,
// cols up to TY x HELD. HELD 0: two reads, any cols. The order of a sum follows from cols alone.
#include "emit.cuh"
#include "words.cuh"

constexpr int STEP = 4;  // cols under way at once where nothing is held

// Which part of the dimension is a thread's: positions are counted through outer and inner, so that
// short inner rows share a block.
template <int WIDTH>
struct Place {
  int lx, iy;      // threads along the positions; the thread's row of threads
  int64_t start;   // the element of col 0
  bool is_inside;  // threads past the end bring nothing and meet barriers
  __device__ __forceinline__ Place(int64_t positions, int64_t cols, int64_t inner, int64_t ty)
      : lx(int(blockDim.x / ty)), iy(int(threadIdx.x) / lx) {
    const int64_t position = (int64_t(blockIdx.x) * lx + int(threadIdx.x) % lx) * WIDTH;
    const int64_t outer = position / inner;
    start = outer * cols * inner + (position - outer * inner);
    is_inside = position < positions;
  }
};

// WIDTH elements as they lie in memory.
template <int WIDTH, typename T>
struct Raw {
  static constexpr int N = Vector<T>::N, WORDS = WIDTH / N;
  static_assert(WIDTH % N == 0, "whole words");
  uint4 words[WORDS];
  __device__ __forceinline__ void fetch(const T* x) {
    host::count_reads(WIDTH);
    host::require_aligned(x, VECTOR_BYTES);
#pragma unroll
    for (int v = 0; v < WORDS; ++v) words[v] = reinterpret_cast<const uint4*>(x)[v];
  }
  __device__ __forceinline__ void widen_to(float (&values)[WIDTH]) const {
#pragma unroll
    for (int v = 0; v < WORDS; ++v) {
      float part[N];
      unpack<T>(words[v], part);
#pragma unroll
      for (int i = 0; i < N; ++i) values[v * N + i] = part[i];
    }
  }
};

template <typename T>
struct Raw<1, T> {
  float value;
  __device__ __forceinline__ void fetch(const T* x) { value = load(x); }
  __device__ __forceinline__ void widen_to(float (&values)[1]) const { values[0] = value; }
};

template <int WIDTH, typename T>
__device__ __forceinline__ void load_width(const T* x, float (&values)[WIDTH]) {
  Raw<WIDTH, T> raw;
  raw.fetch(x);
  raw.widen_to(values);
}

template <int WIDTH, typename T>
__device__ __forceinline__ void store_width(T* y, const float (&values)[WIDTH]) {
  if constexpr (WIDTH == 1) {
    store(y, values[0]);
  } else {
    constexpr int N = Vector<T>::N;
    host::count_writes(WIDTH);
#pragma unroll
    for (int v = 0; v < WIDTH / N; ++v) {
      float part[N];
#pragma unroll
      for (int i = 0; i < N; ++i) part[i] = values[v * N + i];
      store16(y + v * N, pack<T>(part));
    }
  }
}

struct MergeStates {
  __device__ __forceinline__ State operator()(State a, State b) const { return merge(a, b); }
};

// Of a backward: m is the largest y, d the sum of the terms.
struct MergeSums {
  __device__ __forceinline__ State operator()(State a, State b) const {
    return {maximum(a.m, b.m), a.d + b.d};
  }
};

// Merges what the thread rows have into row 0, halving their number; all then read row 0.
template <typename Merge, int WIDTH>
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
        shared[at] = Merge()(shared[at], shared[at + half * lx]);
      }
    }
  }
  __syncthreads();  // shared: row 0 merged before all read it
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) s[w] = shared[w * blockDim.x + int(threadIdx.x) % lx];
}

template <typename X, typename Y, int WIDTH, int HELD, typename Emit>
__global__ void __launch_bounds__(512, HELD > 0 && WIDTH == 1 ? 2 : 0) outer_rows(
    const X* __restrict__ x,  // (outer, cols, inner), contiguous
    Y* __restrict__ y,        // the same; or x itself: only who wrote an element had to read it
    int64_t positions,        // outer x inner
    int64_t cols, int64_t inner, float scale, int64_t zero_empty,
    int64_t ty) {  // thread rows, a power of two; blockDim.x / ty threads along positions
  DYNAMIC_SHARED(State, shared);
  const Place<WIDTH> place(positions, cols, inner, ty);
  const int iy = place.iy;
  const int64_t start = place.start, last = place.is_inside ? cols : 0;

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
  merge_thread_rows<MergeStates>(shared, s, iy, int(ty));

  auto emit = [&](float x, const State& state) {
    const float m = is_finite(state.m) ? state.m : 0.0f;
    return Emit(state, 1.0f, 1.0f, zero_empty != 0)(Emit::FROM_TERM ? exponential(x - m) : x);
  };
  if constexpr (HELD > 0) {
    const int again = int(unseen_xor(iy, 0));  // addresses made again, not kept in registers
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      const int64_t col = again + k * ty;
      if (col >= last) continue;
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) held[k][w] = emit(held[k][w], s[w]);
      store_width<WIDTH>(y + start + col * inner, held[k]);
    }
  } else {
#pragma unroll 4
    for (int64_t col = iy, at = start + iy * inner; col < last; col += ty, at += ty * inner) {
      float values[WIDTH];
      load_width<WIDTH>(x + at, values);
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) values[w] = emit(product(values[w], scale), s[w]);
      store_width<WIDTH>(y + at, values);
    }
  }
}

template <typename DY, typename Y, typename X, int WIDTH, int HELD, typename Backward>
__global__ void __launch_bounds__(512, 1) outer_rows_backward(
    const DY* __restrict__ dy,  // (outer, cols, inner) gradient of y, contiguous
    const Y* __restrict__ y,    // the same
    X* __restrict__ dx,         // the same: gradient of x
    int64_t positions, int64_t cols, int64_t inner, float scale, int64_t zero_empty, int64_t ty) {
  DYNAMIC_SHARED(State, shared);
  constexpr int COUNT = HELD > 0 ? HELD : STEP;
  const Place<WIDTH> place(positions, cols, inner, ty);
  const int iy = place.iy;
  const int64_t start = place.start, last = place.is_inside ? cols : 0;

  Raw<WIDTH, DY> held_dy[COUNT];
  Raw<WIDTH, Y> held_y[COUNT];
  auto fetch = [&](int64_t first) {
    int64_t at = start + first * inner;
#pragma unroll
    for (int k = 0; k < COUNT; ++k, at += ty * inner) {
      if (first + k * ty >= last) continue;
      held_dy[k].fetch(dy + at);
      held_y[k].fetch(y + at);
    }
  };
  auto fold = [&](int64_t first, State(&s)[WIDTH]) {
    float sum[WIDTH];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) sum[w] = 0.0f;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      if (first + k * ty >= last) continue;
      float g[WIDTH], o[WIDTH];
      held_dy[k].widen_to(g);
      held_y[k].widen_to(o);
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) {
        sum[w] += Backward::term(g[w], o[w]);
        s[w].m = maximum(s[w].m, o[w]);
      }
    }
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) s[w].d += sum[w];
  };
  State s[WIDTH];
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) s[w] = empty();
  if constexpr (HELD > 0) {
    fetch(iy);
    fold(iy, s);
  } else {
    for (int64_t first = iy; first < last; first += STEP * ty) {
      fetch(first);
      fold(first, s);
    }
  }
  merge_thread_rows<MergeSums>(shared, s, iy, int(ty));

  auto emit = [&](int64_t first) {
    int64_t at = start + first * inner;
#pragma unroll
    for (int k = 0; k < COUNT; ++k, at += ty * inner) {
      if (first + k * ty >= last) continue;
      float g[WIDTH], o[WIDTH];
      held_dy[k].widen_to(g);
      held_y[k].widen_to(o);
#pragma unroll
      for (int w = 0; w < WIDTH; ++w)
        g[w] = Backward(s[w].d, s[w].m, scale, zero_empty != 0)(g[w], o[w]);
      store_width<WIDTH>(dx + at, g);
    }
  };
  if constexpr (HELD > 0) {
    emit(int(unseen_xor(iy, 0)));  // addresses made again, not kept in registers meanwhile
  } else {
    for (int64_t first = iy; first < last; first += STEP * ty) {
      fetch(first);
      emit(first);
    }
  }
}
