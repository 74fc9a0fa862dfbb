// What stands around the kernels of cross-entropy: the losses of all rows in one, over what the rows
// that count weigh; and a gradient that was made before its upstream was known, multiplied by it. Sums
// are in double precision, in an order that the number of rows alone decides.
#include "fold.cuh"

// Every thread ends with the block's sum.
__device__ __forceinline__ double block_sum(double value) {
  SHARED_ARRAY(double, partial, MAX_WARPS);
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  if (lane_id() == 0) partial[warp_id()] = value;
  __syncthreads();  // partial: written by each warp's lane 0, read by all
  value = lane_id() < warp_count() ? partial[lane_id()] : 0.0;
  __syncthreads();  // partial: read here before the next sum writes it
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

// 0 / 0 is NaN: a mean of no row.
template <typename Y>
__device__ __forceinline__ void answer(double sum, double total, Y* result, float* divisor,
                                       bool has_loss, bool inverts) {
  if (has_loss) store(result, float(sum / total));
  store(divisor, float(inverts ? 1.0 / total : total));
}

// What the rows weigh needs no loss, and is added while the kernel of the rows still runs.
// One block: the answer. Several: the sums of each block's rows, for cross_entropy_reduce_parts.
template <typename Y>
__global__ void __launch_bounds__(MAX_THREADS)
    cross_entropy_reduce(const float* loss,       // (rows), with has_loss
                         const int64_t* targets,  // (rows), with has_total
                         const float* weights,    // (cols), with has_weights
                         double* parts,           // (blocks, 2) output, of several blocks
                         Y* result,       // of the losses' sum over the total, with has_loss
                         float* divisor,  // the total, 1 without has_total; its inverse
                         int64_t rows, int64_t cols, int64_t ignore_index, int64_t has_loss,
                         int64_t has_total, int64_t has_weights, int64_t inverts) {
  constexpr int AT_ONCE = 4;  // rows whose values are on their way together
  const int64_t each = (rows + gridDim.x - 1) / gridDim.x, begin = each * blockIdx.x;
  const int64_t end = begin + each < rows ? begin + each : rows;
  double sum = 0.0, total = 0.0;
  for (int64_t first = begin + threadIdx.x; first < end; first += AT_ONCE * blockDim.x) {
    int64_t target[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int64_t row = first + int64_t(i) * blockDim.x;
      target[i] = has_total && row < end ? targets[row] : ignore_index;
    }
    float weight[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const bool counts = target[i] != ignore_index && target[i] >= 0 && target[i] < cols;
      weight[i] = !counts ? 0.0f : has_weights ? load(weights + target[i]) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) total += weight[i];
  }
  total = block_sum(total);
  wait_for_previous_kernel();  // loss: written by the kernel of the rows
  const int64_t last = has_loss ? end : begin;
#pragma unroll 1  // more would not fit sm_100's registers beside a division
  for (int64_t first = begin + threadIdx.x; first < last; first += AT_ONCE * blockDim.x) {
    float of_row[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int64_t row = first + int64_t(i) * blockDim.x;
      of_row[i] = row < last ? load(loss + row) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sum += of_row[i];
  }
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) {
    answer(sum, has_total ? total : 1.0, result, divisor, has_loss != 0, inverts != 0);
  } else {
    parts[2 * blockIdx.x] = sum;
    parts[2 * blockIdx.x + 1] = total;
  }
}

// One block.
template <typename Y>
__global__ void __launch_bounds__(MAX_THREADS)
    cross_entropy_reduce_parts(const double* parts,  // (count, 2)
                               Y* result, float* divisor, int64_t count, int64_t has_loss,
                               int64_t has_total, int64_t inverts) {
  wait_for_previous_kernel();  // parts: written by cross_entropy_reduce
  double sum = 0.0, total = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    sum += parts[2 * i];
    total += parts[2 * i + 1];
  }
  sum = block_sum(sum);
  total = block_sum(total);
  if (threadIdx.x == 0)
    answer(sum, has_total ? total : 1.0, result, divisor, has_loss != 0, inverts != 0);
}

// A gradient by the logits times what arrives from above. Rows that do not count have a gradient of 0,
// which stays, whatever arrives. Over itself one that arrives as 1 costs nothing. Blocks take shares of
// rows in turn: one read, one write.
template <typename X, typename G, bool WHOLE>
__global__ void __launch_bounds__(256)
    cross_entropy_rescale(const X* made,           // (rows, cols), rows made_row_stride apart
                          const G* upstream,       // (rows), upstream_stride apart
                          const float* total,      // divides what arrives, with has_total
                          const int64_t* targets,  // (rows)
                          X* out,  // (rows, cols), rows out_row_stride apart; or made
                          int64_t rows, int64_t cols, int64_t made_row_stride,
                          int64_t out_row_stride, int64_t upstream_stride, int64_t ignore_index,
                          int64_t has_total) {
  constexpr int N = Vector<X>::N, VECTORS = 4;
  const float divisor = has_total ? load(total) : 1.0f;
  const bool is_in_place = made == out;
  if (is_in_place && upstream_stride == 0 && load(upstream) / divisor == 1.0f) return;
  const int64_t share = int64_t(blockDim.x) * N * VECTORS, shares = (cols + share - 1) / share;
  for (int64_t item = blockIdx.x; item < rows * shares; item += gridDim.x) {
    const int64_t row = item / shares, first = item % shares * share;
    const int64_t target = targets[row];
    const bool counts = target != ignore_index && target >= 0 && target < cols;
    const float ratio = counts ? load(upstream + row * upstream_stride) / divisor : 1.0f;
    if (is_in_place && ratio == 1.0f) continue;
    const X* from = made + row * made_row_stride;
    X* to = out + row * out_row_stride;
    if constexpr (WHOLE) {
      const int64_t start = first + threadIdx.x * N, step = int64_t(blockDim.x) * N;
      float x[VECTORS][N];
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) load_vector<true>(from, start + v * step, cols, x[v]);
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[v][i] *= ratio;
        store_vector<true>(to, start + v * step, cols, x[v]);
      }
    } else {  // neighbouring elements by neighbouring threads
      for (int64_t start = first + threadIdx.x; start < cols && start < first + share;
           start += int64_t(blockDim.x) * N) {
        float x[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const int64_t col = start + int64_t(i) * blockDim.x;
          x[i] = col < cols ? load(from + col) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const int64_t col = start + int64_t(i) * blockDim.x;
          if (col < cols) store(to + col, x[i] * ratio);
        }
      }
    }
  }
}
