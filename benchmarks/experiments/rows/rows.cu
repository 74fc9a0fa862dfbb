// Row kernels under trial: softmax and log_softmax of rows held in registers (one read, one write, one
// exponential an element), their backward, and logsumexp. A row belongs to LANES threads of a warp
// (LANES <= 32), or to a block or a cluster of blocks (LANES 0). Any alignment at full width.
#include "access.cuh"

// ---- what is written; `kept` is exp(x - shift) for softmax, x for log_softmax

struct EmitSoftmax {
  static constexpr bool KEEPS_EXP = true;
  float factor;
  __device__ EmitSoftmax(State s, float shift_m, bool zero_empty)
      : factor(is_finite(s.m) ? weight(shift_m, s.m) / s.d
                              : (zero_empty && s.m == -infinity() ? 0.0f : not_a_number())) {}
  __device__ float operator()(float kept) const { return kept * factor; }
};

struct EmitLogSoftmax {
  static constexpr bool KEEPS_EXP = false;
  float m, log_d;
  __device__ EmitLogSoftmax(State s, float, bool zero_empty)
      : m(s.m), log_d(is_finite(s.m) ? natural_log(s.d) : not_a_number()) {
    if (zero_empty && s.m == -infinity()) m = log_d = 0.0f;  // x is -inf: -inf comes out
  }
  __device__ float operator()(float kept) const { return (kept - m) - log_d; }
};

template <typename X, typename Y, int VECTORS, int LANES, bool WHOLE, typename Emit>
__global__ void __launch_bounds__(VECTORS* Vector<X>::N > 16 ? 512 : 1024)
    rows_in_registers(const X* __restrict__ x,  // (rows, cols) input, rows x_row_stride apart
                      Y* __restrict__ y,        // (rows, cols) output, contiguous
                      int64_t rows, int64_t cols, int64_t x_row_stride, float scale,
                      int64_t zero_empty) {
  constexpr int N = Vector<X>::N, GROUP = LANES ? LANES : WARP;
  constexpr bool SPANS_WARPS = LANES == 0;
  SHARED_ARRAY(State, slots, MAX_CLUSTER * MAX_WARPS);
  SHARED_ARRAY(uint64_t, arrived, 1);
  ClusterExchange<MAX_WARPS> exchange = {slots, arrived};
  const bool clustered = SPANS_WARPS && cluster_size() > 1;
  if (clustered) exchange.open();

  const int lane = lane_id() % GROUP;
  const Place<VECTORS, LANES> at;
  const bool has_row = at.row < rows;
  const int64_t row = has_row ? at.row : 0, first = at.first;
  const X* x_row = x + row * x_row_stride;
  const int64_t last = has_row ? cols : 0;  // lanes without a row load nothing and still shuffle
  const uint32_t x_phase = phase_of(x_row);

  float share[VECTORS * N];
  auto vector = [&](int v) -> float (&)[N] {
    return *reinterpret_cast<float (*)[N]>(&share[v * N]);
  };
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
    load_any<WHOLE>(x_row, (first + v * GROUP + lane) * N, last, x_phase, -infinity(), vector(v));

  float top = -infinity();
#pragma unroll
  for (int i = 0; i < VECTORS * N; ++i) {
    share[i] *= scale;
    top = maximum(top, share[i]);
  }
  top = lanes_fold<GROUP, Maximum>(top);
  const float shift = top == -infinity() ? 0.0f : top;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS * N; ++i) {
    const float e = exponential(share[i] - shift);
    if (Emit::KEEPS_EXP) share[i] = e;
    sum += e;
  }
  State s = {top, lanes_fold<GROUP, Sum>(sum)};
  if (clustered) {
    exchange.send(s);
    s = exchange.receive();
  } else if (SPANS_WARPS && warp_count() > 1) {
    if (lane_id() == 0) slots[warp_id()] = s;
    __syncthreads();  // slots: written by each warp's lane 0, read by all
    s = warp_merge(lane_id() < warp_count() ? slots[lane_id()] : empty());
  }

  const Emit emit(s, top, zero_empty != 0);
#pragma unroll
  for (int i = 0; i < VECTORS * N; ++i) share[i] = emit(share[i]);
  Y* y_row = y + row * cols;
  write_share<WHOLE, GROUP>(y_row, first, VECTORS, last, [&](int v, float (&out)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = share[v * N + i];
  });
}

// ---- backward: dx = scale y (dy - sum(dy y)) for softmax, scale (dy - exp(y) sum(dy)) for
// log_softmax. Two reads, one write.

struct BackwardSoftmax {
  __device__ static float term(float dy, float y) { return dy * y; }
  __device__ static float value(float dy, float y, float sum) { return y * (dy - sum); }
};

struct BackwardLogSoftmax {
  __device__ static float term(float dy, float) { return dy; }
  __device__ static float value(float dy, float y, float sum) { return dy - exponential(y) * sum; }
};

template <typename X, int VECTORS, int LANES, bool WHOLE, typename Backward>
__global__ void __launch_bounds__(VECTORS* Vector<X>::N > 8 ? 512 : 1024)
    rows_backward(const X* __restrict__ dy,  // (rows, cols) gradient of the output
                  const X* __restrict__ y,   // (rows, cols) the output, contiguous
                  X* __restrict__ dx,        // (rows, cols) gradient of the input, contiguous
                  int64_t rows, int64_t cols, int64_t dy_row_stride, float scale) {
  constexpr int N = Vector<X>::N, GROUP = LANES ? LANES : WARP;
  constexpr bool SPANS_WARPS = LANES == 0;
  SHARED_ARRAY(State, slots, MAX_CLUSTER * MAX_WARPS);
  SHARED_ARRAY(uint64_t, arrived, 1);
  ClusterExchange<MAX_WARPS> exchange = {slots, arrived};
  const bool clustered = SPANS_WARPS && cluster_size() > 1;
  if (clustered) exchange.open();

  const int lane = lane_id() % GROUP;
  const Place<VECTORS, LANES> at;
  const bool has_row = at.row < rows;
  const int64_t row = has_row ? at.row : 0, first = at.first, last = has_row ? cols : 0;
  const X *dy_row = dy + row * dy_row_stride, *y_row = y + row * cols;

  float dy_share[VECTORS * N], y_share[VECTORS * N];
  auto dy_vector = [&](int v) -> float (&)[N] {
    return *reinterpret_cast<float (*)[N]>(&dy_share[v * N]);
  };
  auto y_vector = [&](int v) -> float (&)[N] {
    return *reinterpret_cast<float (*)[N]>(&y_share[v * N]);
  };
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int64_t col = (first + v * GROUP + lane) * N;
    load_any<WHOLE>(dy_row, col, last, phase_of(dy_row), 0.0f, dy_vector(v));
    load_any<WHOLE>(y_row, col, last, phase_of(y_row), 0.0f, y_vector(v));
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS * N; ++i) sum += Backward::term(dy_share[i], y_share[i]);
  sum = lanes_fold<GROUP, Sum>(sum);
  if (clustered) {
    exchange.send({0.0f, sum});
    sum = exchange.receive_sum();
  } else if (SPANS_WARPS && warp_count() > 1) {
    if (lane_id() == 0) slots[warp_id()] = {0.0f, sum};
    __syncthreads();  // slots: written by each warp's lane 0, read by all
    sum = warp_fold<Sum>(lane_id() < warp_count() ? slots[lane_id()].d : 0.0f);
  }
#pragma unroll
  for (int i = 0; i < VECTORS * N; ++i)
    dy_share[i] = scale * Backward::value(dy_share[i], y_share[i], sum);
  write_share<WHOLE, GROUP>(dx + row * cols, first, VECTORS, last, [&](int v, float (&out)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = dy_share[v * N + i];
  });
}

// ---- logsumexp: nothing is kept. One block a row; TILE vectors a thread are loaded before any is
// absorbed, so TILE loads are under way at once.

template <typename X, int TILE, bool WHOLE>
__global__ void rows_lse(const X* __restrict__ x,  // (rows, cols) input, rows x_row_stride apart
                         float* __restrict__ out,  // (rows)
                         int64_t rows, int64_t cols, int64_t x_row_stride, float scale) {
  constexpr int N = Vector<X>::N;
  const int64_t row = blockIdx.x;
  const X* x_row = x + row * x_row_stride;
  const uint32_t phase = phase_of(x_row);
  State s = empty();
  for (int64_t tile = 0; tile < cols; tile += int64_t(TILE) * N * blockDim.x) {
    float values[TILE * N];
#pragma unroll
    for (int v = 0; v < TILE; ++v) {
      const int64_t col = tile + (int64_t(v) * blockDim.x + threadIdx.x) * N;
      load_any<WHOLE>(x_row, col, cols, phase, -infinity(),
                      *reinterpret_cast<float (*)[N]>(&values[v * N]));
    }
#pragma unroll
    for (int i = 0; i < TILE * N; ++i) values[i] *= scale;
    s = absorb(s, values);
  }
  s = block_merge(s);
  if (threadIdx.x == 0) {
    host::count_writes(1);
    out[row] = lse(s);
  }
}

// ---- rows past the registers: a block's part of the row waits in shared memory, copied there by
// cp.async, folded once and written from there. One read, one write, two exponentials an element.

__device__ __forceinline__ void async_copy16(uint4* shared, const uint4* global) {
#ifdef ONLINE_SOFTMAX_HOST
  host::require_aligned(global, 16);
  *shared = *global;
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
#endif
}

__device__ __forceinline__ void async_wait_all() {
#ifndef ONLINE_SOFTMAX_HOST
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

template <typename X, bool WHOLE, typename Emit>
__global__ void __launch_bounds__(512)
    rows_in_shared(const X* __restrict__ x,  // (rows, cols) input, rows x_row_stride apart
                   X* __restrict__ y,        // (rows, cols) output, contiguous
                   int64_t rows, int64_t cols, int64_t x_row_stride, float scale,
                   int64_t zero_empty,
                   int64_t warp_vectors) {  // vectors a warp owns, a multiple of 32
  constexpr int N = Vector<X>::N;
  DYNAMIC_SHARED(uint4, words);  // one more than the block's vectors
  SHARED_ARRAY(State, slots, MAX_CLUSTER * MAX_WARPS);
  SHARED_ARRAY(uint64_t, arrived, 1);
  ClusterExchange<MAX_WARPS> exchange = {slots, arrived};
  const bool clustered = cluster_size() > 1;
  if (clustered) exchange.open();

  const int64_t row = blockIdx.x / cluster_size();
  const int64_t block_first = int64_t(cluster_rank()) * warp_count() * warp_vectors;
  const int64_t first = block_first + warp_id() * warp_vectors;
  const X* x_row = x + row * x_row_stride;
  const uint32_t phase = phase_of(x_row);
  const int offset = int(warp_id() * warp_vectors);  // of this warp's words in shared memory

  // Word j holds the bytes 16 j - phase .. of the row; only words wholly inside it are copied.
  const uint4* row_words =
      reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(x_row) - phase);
  const int64_t word_end = (cols * int64_t(sizeof(X)) + phase) / VECTOR_BYTES;
  const int64_t word_first = phase ? 1 : 0;
  const int64_t block_words = warp_count() * warp_vectors + (WHOLE ? 0 : 1);
  for (int64_t k = threadIdx.x; k < block_words; k += blockDim.x) {
    const int64_t j = block_first + k;
    if (j >= word_first && j < word_end) async_copy16(words + k, row_words + j);
  }
  async_wait_all();
  __syncthreads();  // words: copied by all threads, read below by others

  auto vector = [&](int v, float (&out)[N]) {
    const int64_t j = first + v * WARP + lane_id(), col = j * N;
    const int k = offset + v * WARP + lane_id();
    if (WHOLE ? col < cols : (phase == 0 && col + N <= cols)) {
      unpack<X>(words[k], out);
    } else if (!WHOLE && phase && j >= 1 && j + 1 < word_end) {
      unpack<X>(shifted(words[k], words[k + 1], phase), out);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = col + i < cols ? widen(x_row[col + i]) : -infinity();
    }
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] *= scale;
  };

  State s = empty();
  const int vectors = int(warp_vectors / WARP);
#pragma unroll 2
  for (int v = 0; v < vectors; ++v) {
    float values[N];
    vector(v, values);
    s = absorb(s, values);
  }
  s = warp_merge(s);
  if (clustered) {
    exchange.send(s);
    s = exchange.receive();
  } else {
    if (lane_id() == 0) slots[warp_id()] = s;
    __syncthreads();  // slots: written by each warp's lane 0, read by all
    s = warp_merge(lane_id() < warp_count() ? slots[lane_id()] : empty());
  }

  // `kept` is x or exp(x - m): from shared memory the exponential is computed again.
  const float m = is_finite(s.m) ? s.m : 0.0f;
  const Emit emit(s, s.m, zero_empty != 0);
  write_share<WHOLE, WARP>(y + row * cols, first, vectors, cols, [&](int v, float (&out)[N]) {
    vector(v, out);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = emit(Emit::KEEPS_EXP ? exponential(out[i] - m) : out[i]);
  });
}
