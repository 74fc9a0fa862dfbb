// v0: the online recurrence, one thread a row. Maximum and sum in one pass: two reads instead of three.
// Neighbouring threads touch elements a whole row apart, so a warp's one instruction needs 32
// sectors of 32 bytes where neighbours would share 4; and rows threads are few for a whole GPU.
#include "../fold.cuh"

constexpr int PART = 256;  // elements summed in one go

template <typename T>
__global__ void v0_thread(const T* __restrict__ x,  // (rows, cols) input, rows x_row_stride apart
                          T* __restrict__ y,        // (rows, cols) output, contiguous
                          int64_t rows, int64_t cols, int64_t x_row_stride) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;  // no barrier and no shuffle below: leaving early is safe
  const T* x_row = x + row * x_row_stride;
  T* y_row = y + row * cols;

  // One float sum over a long row loses digits (rounding grows with its length): sum PART elements,
  // then merge. Which merges where is free, since merge is associative.
  State s = empty();
  for (int64_t first = 0; first < cols; first += PART) {
    const int64_t last = first + PART < cols ? first + PART : cols;
    State part = empty();
    for (int64_t col = first; col < last; ++col) part = merge(part, lift(load(x_row + col)));
    s = merge(s, part);  // every merge: 2 exponentials
  }

  for (int64_t col = 0; col < cols; ++col) store(y_row + col, prob(load(x_row + col), s));
}
