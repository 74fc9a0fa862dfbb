// v5: several blocks a row, for few rows with many columns, where one block a row leaves most of the
// machine idle. Kernel one folds each part of a row to a state; kernel two merges the states of its
// row and writes its own part. The parts depend on cols alone, so rows keep their bits in any batch.
#include "../emit.cuh"
#include "../fold.cuh"

// Reads part_cols elements a block, writes one state.
template <typename T>
__global__ void v5_fold_part(
    const T* __restrict__ x,     // (rows, cols) input, rows x_row_stride apart
    State* __restrict__ states,  // (rows, parts) output
    int64_t cols, int64_t x_row_stride, int64_t parts, int64_t part_cols) {
  allow_next_kernel();  // the second kernel may be launched now; it waits before it reads states
  const int64_t row = blockIdx.x / parts, part = blockIdx.x % parts;
  const T* x_row = x + row * x_row_stride;
  const int64_t first = part * part_cols,
                last = first + part_cols < cols ? first + part_cols : cols;
  const State s = block_merge(thread_fold(x_row, first, last, is_whole(x_row, cols)));
  if (threadIdx.x == 0) states[blockIdx.x] = s;
}

// Reads the row's states and part_cols elements again (from L2 if the input fits there), writes them.
template <typename T>
__global__ void v5_emit_part(
    const T* __restrict__ x,  // (rows, cols) input, rows x_row_stride apart
    T* __restrict__ y,        // (rows, cols) output, contiguous
    const State* states,      // (rows, parts) input
    int64_t cols, int64_t x_row_stride, int64_t parts, int64_t part_cols) {
  wait_for_previous_kernel();  // states: written by v5_fold_part, read below
  const int64_t row = blockIdx.x / parts, part = blockIdx.x % parts;
  const T* x_row = x + row * x_row_stride;
  T* y_row = y + row * cols;
  const int64_t first = part * part_cols,
                last = first + part_cols < cols ? first + part_cols : cols;

  State s = empty();
  for (int64_t i = threadIdx.x; i < parts; i += blockDim.x) s = merge(s, states[row * parts + i]);
  s = block_merge(s);

  const bool whole = is_whole(x_row, cols) && is_whole(y_row, cols);
  thread_emit(x_row, y_row, first, last, whole, Softmax{s});
}
