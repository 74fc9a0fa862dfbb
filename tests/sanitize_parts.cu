// A second driver without torch for compute-sanitizer: decodes, whose keys are in parts, and merges of
// parts; small awkward shapes, exactly sized allocations, checked against double on the CPU.
//   nvcc -std=c++17 -lineinfo -arch=native tests/sanitize_parts.cu -o build/sanitize_parts
#include "../src/online_softmax/cuda/decode.cu"
#include "../src/online_softmax/cuda/merge.cu"
#include "sanitize_kit.cuh"

using Floats = std::vector<float>;

// So many numbers of -1 to 1 on the GPU, as T, and what they are then.
template <typename T>
T* numbers(int64_t n, Floats& values) {
  values.resize(n);
  for (auto& v : values) v = float(std::rand()) / float(RAND_MAX) * 2.0f - 1.0f;
  float* wide;
  T* made;
  CHECK(cudaMalloc(&wide, n * sizeof(float)));
  CHECK(cudaMalloc(&made, n * sizeof(T)));
  CHECK(cudaMemcpy(wide, values.data(), n * sizeof(float), cudaMemcpyHostToDevice));
  to_type<<<1, 256>>>(wide, made, n);
  to_float<<<1, 256>>>(made, wide, n);
  CHECK(cudaMemcpy(values.data(), wide, n * sizeof(float), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(wide));
  return made;
}

template <typename T>
Floats taken(const T* made, int64_t n) {
  Floats values(n);
  float* wide;
  CHECK(cudaMalloc(&wide, n * sizeof(float)));
  to_float<<<1, 256>>>(made, wide, n);
  CHECK(cudaMemcpy(values.data(), wide, n * sizeof(float), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(wide));
  return values;
}

int verdict(const char* what, double worst, double tolerance) {
  const bool ok = worst <= tolerance;  // NaN is not
  std::printf("%s: error %.1e %s\n", what, worst, ok ? "ok" : "WRONG");
  return !ok;
}

constexpr int64_t BATCH = 2, HEADS = 2, GROUP = 2;

// Causal, bottom right; SCALE is 4 / sqrt(dim), so that weights differ.
template <typename T, int DIM, int TILES, int WARPS, int RESIDENT, bool IS_PLAIN>
int decode(int64_t q_len, int64_t k_len, int64_t part_keys, int64_t blocks, double tolerance) {
  const int64_t rows = BATCH * HEADS * GROUP * q_len, parts = (k_len + part_keys - 1) / part_keys;
  Floats q, k, v;
  T* q_made = numbers<T>(rows * DIM, q);
  T* k_made = numbers<T>(BATCH * HEADS * k_len * DIM, k);
  T* v_made = numbers<T>(BATCH * HEADS * k_len * DIM, v);
  float *states, *lse;
  T* out;
  CHECK(cudaMalloc(&states, parts * rows * (DIM + 2) * sizeof(float)));
  CHECK(cudaMalloc(&out, rows * DIM * sizeof(T)));
  CHECK(cudaMalloc(&lse, rows * sizeof(float)));
  const float scale = 4.0f / std::sqrt(float(DIM));
  const int64_t of_q = q_len * DIM, of_k = k_len * DIM, diagonal = k_len - q_len;
  const Shape s = {
      BATCH,  HEADS,   GROUP,        q_len, k_len, parts,        part_keys, HEADS * GROUP * of_q,
      of_q,   DIM,     HEADS * of_k, of_k,  DIM,   HEADS * of_k, of_k,      DIM,
      -q_len, diagonal};
  decode_parts<T, DIM, TILES, WARPS, RESIDENT, IS_PLAIN>
      <<<blocks, WARPS * 32>>>(q_made, k_made, v_made, states, scale * LOG2_E, 0.0f, s);
  CHECK(cudaGetLastError());
  decode_merge<T, DIM, 32, 256><<<rows*(DIM / 32), 256>>>(
      states, nullptr, out, lse, nullptr, nullptr, rows, HEADS * GROUP, q_len, parts, 0, 0, 0);
  CHECK(cudaGetLastError());
  const Floats got = taken(out, rows * DIM);
  double worst = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t seen = row % q_len + diagonal + 1, head = row / q_len / GROUP;
    const float *q_row = &q[row * DIM], *ks = &k[head * of_k], *vs = &v[head * of_k];
    std::vector<double> z(seen);
    double m = -INFINITY, d = 0;
    for (int64_t i = 0; i < seen; ++i) {
      double sum = 0;
      for (int j = 0; j < DIM; ++j) sum += double(q_row[j]) * ks[i * DIM + j];
      m = std::fmax(m, z[i] = sum * scale);
    }
    for (auto& each : z) d += each = std::exp(each - m);
    for (int j = 0; j < DIM; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < seen; ++i) sum += z[i] / d * vs[i * DIM + j];
      const double error = std::fabs(got[row * DIM + j] - sum);
      worst = error <= worst ? worst : error;
    }
  }
  for (void* p :
       {(void*)q_made, (void*)k_made, (void*)v_made, (void*)states, (void*)lse, (void*)out})
    CHECK(cudaFree(p));
  char what[100];
  std::snprintf(what, sizeof what, "decode dim %d, %d products, q %d, k %d, parts of %d", DIM,
                TILES, int(q_len), int(k_len), int(part_keys));
  return verdict(what, worst, tolerance);
}

// Pairs (out, lse), natural.
template <typename T, int LANES, bool WHOLE, int MOST, int ROWS>
int merge_pairs(int64_t rows, int64_t dim, int64_t count, double tolerance) {
  std::vector<Floats> os(count), ms(count);
  Parts<T, MOST> parts;
  for (int64_t i = 0; i < MOST; ++i) {
    if (i < count) parts.part[i] = {numbers<T>(rows * dim, os[i]), numbers<float>(rows, ms[i])};
    if (i < count) parts.part[i].o_row_stride = dim;
    if (i >= count) parts.part[i] = parts.part[0];
    parts.part[i].d = parts.part[i].m;
  }
  T* o;
  float* lse;
  CHECK(cudaMalloc(&o, rows * dim * sizeof(T)));
  CHECK(cudaMalloc(&lse, rows * sizeof(float)));
  const int64_t at_once = 256 / LANES * ROWS;
  merge_forward<T, PAIRS, LANES, WHOLE, MOST, ROWS>
      <<<(rows + at_once - 1) / at_once, 256>>>(o, lse, lse, rows, dim, count, parts);
  CHECK(cudaGetLastError());
  const Floats got = taken(o, rows * dim);
  double worst = 0;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t j = 0; j < dim; ++j) {
      double sum = 0, all = 0;
      for (int64_t i = 0; i < count; ++i) all += std::exp(double(ms[i][row]));
      for (int64_t i = 0; i < count; ++i)
        sum += std::exp(double(ms[i][row])) / all * os[i][row * dim + j];
      const double error = std::fabs(got[row * dim + j] - sum);
      worst = error <= worst ? worst : error;
    }
  for (int64_t i = 0; i < count; ++i) {
    CHECK(cudaFree((void*)parts.part[i].o));
    CHECK(cudaFree((void*)parts.part[i].m));
  }
  CHECK(cudaFree(o));
  CHECK(cudaFree(lse));
  char what[100];
  std::snprintf(what, sizeof what, "merge %d x %d of %d pairs", int(rows), int(dim), int(count));
  return verdict(what, worst, tolerance);
}

int main() {
  int wrong = 0;
  for (int64_t k_len : {49, 128, 201}) {
    wrong += decode<half_t, 64, 1, 4, 4, true>(1, k_len, 64, 3, 4e-3);
    wrong += decode<half_t, 64, 2, 4, 3, false>(7, k_len, 48, 16, 4e-3);
    wrong += decode<bfloat16_t, 128, 1, 4, 3, true>(3, k_len, 64, 1, 3e-2);
    wrong += decode<bfloat16_t, 128, 1, 6, 2, true>(1, k_len, 96, 5, 3e-2);
    wrong += decode<bfloat16_t, 128, 2, 4, 2, true>(8, k_len, 32, 2, 3e-2);
    wrong += decode<bfloat16_t, 256, 1, 4, 2, false>(4, k_len, 64, 2, 3e-2);
  }
  wrong += merge_pairs<float, 16, true, 2, 1>(37, 64, 2, 1e-6);
  wrong += merge_pairs<bfloat16_t, 8, true, 4, 1>(37, 40, 3, 2e-2);
  wrong += merge_pairs<half_t, 8, false, 8, 2>(5, 43, 7, 3e-3);
  wrong += merge_pairs<bfloat16_t, 1, true, 16, 1>(300, 8, 16, 2e-2);
  CHECK(cudaDeviceSynchronize());
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
