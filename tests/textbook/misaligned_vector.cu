// The textbook's vector load: a cast to 16 bytes wherever the row starts.
#include "../../src/online_softmax/cuda/fold.cuh"

template <typename T>
__global__ void misaligned_vector(const T* x, T* y, int64_t rows, int64_t cols,
                                  int64_t x_row_stride) {
  const T* x_row = x + blockIdx.x * x_row_stride;
  const int64_t i = threadIdx.x;
  if (i * Vector<T>::N < cols) {
    float values[Vector<T>::N];
    unpack<T>(reinterpret_cast<const uint4*>(x_row)[i], values);
    for (int k = 0; k < Vector<T>::N; ++k)
      if (i * Vector<T>::N + k < cols)
        store(y + blockIdx.x * cols + i * Vector<T>::N + k, values[k]);
  }
}
