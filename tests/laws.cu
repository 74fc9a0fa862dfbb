// The functions of online.cuh on arrays, for languages.py: one thread an element. `in` and `out`
// are matrices with a column for each element and a row for each argument or result.
#include "online.cuh"

struct Element {
  const float* in;
  float* out;
  int64_t n, i;

  __device__ bool exists() const { return i < n; }
  __device__ float get(int row) const { return load(in + row * n + i); }
  __device__ State state(int row) const { return {get(row), get(row + 1)}; }
  __device__ void put(int row, float value) const { store(out + row * n + i, value); }
  __device__ void put(State s) const { put(0, s.m), put(1, s.d); }
  __device__ void block(int row, float (&x)[4]) const {
    for (int k = 0; k < 4; ++k) x[k] = get(row + k);
  }
};

__device__ Element element(const float* in, float* out, int64_t n) {
  return {in, out, n, int64_t(blockIdx.x) * blockDim.x + threadIdx.x};
}

__global__ void law_empty(const float* in, float* out, int64_t n) {
  const Element e = element(in, out, n);
  if (e.exists()) e.put(empty());
}

__global__ void law_lift(const float* in, float* out, int64_t n) {
  const Element e = element(in, out, n);
  if (e.exists()) e.put(lift(e.get(0)));
}

__global__ void law_join(const float* in, float* out, int64_t n) {
  const Element e = element(in, out, n);
  if (!e.exists()) return;
  const Joined j = join(e.get(0), e.get(1));
  e.put(0, j.m), e.put(1, j.w_a), e.put(2, j.w_b);
}

__global__ void law_merge(const float* in, float* out, int64_t n) {
  const Element e = element(in, out, n);
  if (e.exists()) e.put(merge(e.state(0), e.state(2)));
}

__global__ void law_of(const float* in, float* out, int64_t n) {
  const Element e = element(in, out, n);
  if (!e.exists()) return;
  float x[4];
  e.block(0, x);
  e.put(of(x));
}

__global__ void law_absorb(const float* in, float* out, int64_t n) {
  const Element e = element(in, out, n);
  if (!e.exists()) return;
  float x[4];
  e.block(2, x);
  e.put(absorb(e.state(0), x));
}

__global__ void law_prob(const float* in, float* out, int64_t n) {
  const Element e = element(in, out, n);
  if (e.exists()) e.put(0, prob(e.get(0), e.state(1)));
}

__global__ void law_log_prob(const float* in, float* out, int64_t n) {
  const Element e = element(in, out, n);
  if (e.exists()) e.put(0, log_prob(e.get(0), e.state(1)));
}

__global__ void law_lse(const float* in, float* out, int64_t n) {
  const Element e = element(in, out, n);
  if (e.exists()) e.put(0, lse(e.state(0)));
}
