// The ceilings: kernels that only move memory, timed beside the others as what the card can do.
// One 16-byte vector a thread and a plain grid, which beats a persistent loop on pure streams here.
#include "memory.cuh"

// Reads and writes 16 bytes a thread.
__global__ void copy(const uint4* __restrict__ x,  // (vectors) input
                     uint4* __restrict__ y,        // (vectors) output
                     int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < vectors) store16(y + i, x[i]);
}
