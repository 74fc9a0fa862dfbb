// v4: a fixed grid, a few blocks a multiprocessor, loops over all rows. Blocks are launched once and
// stay; the number of rows no longer shows in the launch. Rows are folded and written as in v2.
#include "../emit.cuh"
#include "../fold.cuh"

template <typename T>
__global__ void __launch_bounds__(MAX_THREADS)
    v4_grid_stride(const T* __restrict__ x,  // (rows, cols) input, rows x_row_stride apart
                   T* __restrict__ y,        // (rows, cols) output, contiguous
                   int64_t rows, int64_t cols, int64_t x_row_stride) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* x_row = x + row * x_row_stride;
    T* y_row = y + row * cols;
    const bool read_whole = is_whole(x_row, cols), write_whole = is_whole(y_row, cols);

    // block_merge's second barrier lets the next row reuse its shared memory.
    const State s = block_merge(thread_fold(x_row, 0, cols, read_whole));
    thread_emit(x_row, y_row, 0, cols, read_whole && write_whole, Softmax{s});
  }
}
