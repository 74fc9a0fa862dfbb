// Small kernels for test_host.py: what CUDA promises, and what it does not. Those under "faults" are
// wrong on purpose.
#include "memory.cuh"

constexpr unsigned FULL = 0xffffffffu;

// ---- right

template <int BLOCK>
__global__ void row_sum(const float* __restrict__ x, float* __restrict__ y, int64_t cols) {
  SHARED_ARRAY(float, partial, BLOCK / 32);
  float sum = 0.0f;
  for (int64_t col = threadIdx.x; col < cols; col += blockDim.x)
    sum += load(x + blockIdx.x * cols + col);
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(FULL, sum, lanes);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();  // partial: written by each warp, read by thread 0
  if (threadIdx.x != 0) return;
  for (int i = 1; i < BLOCK / 32; ++i) sum += partial[i];
  store(y + blockIdx.x, sum);
}

__global__ void visit(int* y) {
  host::count_writes(1);
  __syncthreads();
  atomicAdd(y + blockIdx.x, 1);
}

__global__ void arguments(double* y, int64_t whole, float fraction, int64_t large) {
  y[0] = double(whole), y[1] = double(fraction), y[2] = double(large);
}

__global__ void shuffles(int64_t* y, int64_t width) {
  const int64_t mine = threadIdx.x * int64_t(10000000000);
  const int w = int(width);
  y[threadIdx.x] = __shfl_sync(FULL, mine, 3, w);
  y[64 + threadIdx.x] = __shfl_down_sync(FULL, mine, 2, w);
  y[128 + threadIdx.x] = __shfl_up_sync(FULL, mine, 2, w);
  y[192 + threadIdx.x] = __shfl_xor_sync(FULL, mine, 5, w);
}

__global__ void tiles(int* y) {  // the halves of a warp on their own, one with more to do
  const bool low = threadIdx.x < 16;
  const unsigned mask = low ? 0xffffu : 0xffff0000u;
  int sum = threadIdx.x;
  for (int lanes = 8; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(mask, sum, lanes);
  for (int i = 0; low && i < 3; ++i) __syncwarp(mask);
  y[threadIdx.x] = sum;
}

__global__ void lane_sum(float* y, int64_t mask) {
  float sum = threadIdx.x;
  for (int by = 16; by > 0; by /= 2) {
    const bool inside = threadIdx.x + by < blockDim.x;
    const float other = __shfl_sync(unsigned(mask), sum, inside ? threadIdx.x + by : threadIdx.x);
    if (inside) sum += other;
  }
  if (threadIdx.x == 0) y[0] = sum;
}

__global__ void leavers(float* y) {  // some have left when the others meet
  SHARED_ARRAY(float, box, 1);
  if (threadIdx.x < 40) return;
  __syncwarp();
  if (threadIdx.x == 63) box[0] = 63.0f;
  __syncthreads();
  y[threadIdx.x] = box[0];
}

__global__ void poison(float* y) {
  SHARED_ARRAY(float, fixed, 2);
  DYNAMIC_SHARED(float, given);
  float* row = y + blockIdx.x * 4;
  row[0] = fixed[0], row[1] = fixed[1], row[2] = given[0], row[3] = given[3];
  fixed[0] = fixed[1] = given[0] = given[3] = 1.0f;
}

__global__ void reverse(float* y) {
  DYNAMIC_SHARED(float, box);
  box[threadIdx.x] = float(threadIdx.x);
  __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = box[blockDim.x - 1 - threadIdx.x];
}

template <bool RIGHT>
__global__ void broadcast(float* y) {
  SHARED_ARRAY(float, box, 1);
  if (threadIdx.x == 0) box[0] = 7.0f;
  if (RIGHT) __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] = box[0];
}

template <bool RIGHT>
__global__ void exchange(float* y) {  // each block reads two objects of its neighbour
  SHARED_ARRAY(float, fixed, 64);
  DYNAMIC_SHARED(float, given);
  fixed[threadIdx.x] = float(blockIdx.x * 1000 + threadIdx.x);
  given[threadIdx.x] = float(threadIdx.x);
  cluster_sync();
  const unsigned neighbour = (cluster_rank() + 1) % cluster_size();
  if (!RIGHT && cluster_rank() == 1) return;
  if (!RIGHT) __syncthreads();
  const float* theirs = cluster_map(&fixed[threadIdx.x], neighbour);
  y[blockIdx.x * blockDim.x + threadIdx.x] = *theirs + cluster_map(given, neighbour)[threadIdx.x];
  if (RIGHT) cluster_sync();
}

__global__ void spin_on_all(float* y, unsigned* counter) {
  y[blockIdx.x] = float(blockIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) {
    atomic_add_release(counter, 1);
    while (load_acquire(counter) < gridDim.x) {
    }
  }
  __syncthreads();
  float sum = 0.0f;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += y[i];
  grid_sync();
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

__global__ void grid_barrier(float* y) {
  for (unsigned i = 0; i <= gridDim.x; ++i) {
    if (threadIdx.x == 0) y[(blockIdx.x + i) % gridDim.x] += 1.0f;
    grid_sync();
  }
}

__global__ void last_block(float* total, unsigned* done, int* last) {
  SHARED_ARRAY(unsigned, before, 1);
  atomicAdd(total, 1.0f);
  __syncthreads();
  if (threadIdx.x == 0) before[0] = atomic_add_release(done, 1);
  __syncthreads();
  if (threadIdx.x == 0 && before[0] == gridDim.x - 1) atomicAdd(last, *total == gridDim.x * 32.0f);
}

// ---- faults

__global__ void two_barriers() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}

__global__ void barrier_and_shuffle() {
  if (threadIdx.x % 2)
    __syncthreads();
  else
    __shfl_sync(FULL, 1.0f, 0);
}

__global__ void half_a_warp(int64_t mask) {
  if (threadIdx.x < 16) __shfl_xor_sync(unsigned(mask), 1.0f, 1);
}

__global__ void lane_left(int64_t mask) {
  if (threadIdx.x == 3) return;
  __syncwarp();
  __shfl_xor_sync(unsigned(mask), 1.0f, 1);
}

__global__ void two_masks() {
  const unsigned mask = threadIdx.x < 8 ? FULL : 0x0fffffffu;
  __shfl_xor_sync(threadIdx.x < 28 ? mask : FULL, 1.0f, 0);
}

__global__ void source_outside() {
  if (threadIdx.x < 8) __shfl_sync(0xffu, 1.0f, 9);
}

__global__ void wild_spin(float* y) {
  if (threadIdx.x == 0)
    while (load_acquire(reinterpret_cast<unsigned*>(y)) == 0) {
    }
}

__global__ void misaligned(float* y) { host::require_aligned(y + 1, 16); }

__global__ void past_the_margin(float* y) {
  SHARED_ARRAY(float, few, 8);
  float* end = few;
  end[threadIdx.x / 3] = 1.0f;
}

__global__ void shared_overrun(float* y) {
  SHARED_ARRAY(float, few, 8);
  y[threadIdx.x] = few[threadIdx.x / 3];
}

__global__ void shared_pointer_overrun(float* y) {
  SHARED_ARRAY(float, few, 8);
  const float* end = few;
  y[threadIdx.x] = end[threadIdx.x / 3];
}

__global__ void output_overrun(float* y) { y[blockIdx.x * blockDim.x + threadIdx.x + 1] = 1.0f; }

__global__ void stack_overrun(float* y) {
  float registers[9] = {};
  for (unsigned i = 0; i < 9; ++i) registers[i + (threadIdx.x == 31)] = y[i];
  y[threadIdx.x] = registers[threadIdx.x % 9];
}

__global__ void misaligned_load(float* y) {
  y[0] = bits_to_float(reinterpret_cast<const uint4*>(y + 1 + blockIdx.x)->x);
}
