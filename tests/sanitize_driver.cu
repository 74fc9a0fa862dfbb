// A driver without torch for compute-sanitizer: every rung, three dtypes, small awkward shapes, with
// exactly sized allocations, checked against double on the CPU.
//   nvcc -std=c++17 -lineinfo -gencode arch=compute_90a,code=sm_90a tests/sanitize_driver.cu -o driver
//   compute-sanitizer --tool memcheck ./driver && compute-sanitizer --tool racecheck ./driver
#include <functional>

#include "../src/online_softmax/cuda/ladder/safe.cu"
#include "../src/online_softmax/cuda/ladder/v0_thread.cu"
#include "../src/online_softmax/cuda/ladder/v1_warp_shuffle.cu"
#include "../src/online_softmax/cuda/ladder/v2_vectorized.cu"
#include "../src/online_softmax/cuda/ladder/v3_register_cache.cu"
#include "../src/online_softmax/cuda/ladder/v4_grid_stride.cu"
#include "../src/online_softmax/cuda/ladder/v5_split_row.cu"
#include "sanitize_kit.cuh"

template <typename T>
int check(const char* type, int64_t rows, int64_t cols, int64_t pad, double tolerance) {
  const int64_t stride = cols + pad, size = rows * stride - pad;  // nothing behind the last row
  std::vector<float> values(size), result(rows * cols);
  for (auto& v : values) v = float(std::rand()) / float(RAND_MAX) * 20.0f - 10.0f;
  if (cols > 2) values[1] = -INFINITY;
  T *x, *y;
  State* states;
  float *wide_x, *wide_y;
  const int64_t part_cols = 64 * Vector<T>::N, parts = (cols + part_cols - 1) / part_cols;
  CHECK(cudaMalloc(&x, size * sizeof(T)));
  CHECK(cudaMalloc(&y, rows * cols * sizeof(T)));
  CHECK(cudaMalloc(&states, rows * parts * sizeof(State)));
  CHECK(cudaMalloc(&wide_x, size * sizeof(float)));
  CHECK(cudaMalloc(&wide_y, rows * cols * sizeof(float)));
  CHECK(cudaMemcpy(wide_x, values.data(), size * sizeof(float), cudaMemcpyHostToDevice));
  to_type<<<1, 256>>>(wide_x, x, size);
  to_float<<<1, 256>>>(x, wide_x, size);
  CHECK(cudaMemcpy(values.data(), wide_x, size * sizeof(float), cudaMemcpyDeviceToHost));

  constexpr int MOST = 32 / Vector<T>::N;
  const std::vector<std::pair<const char*, std::function<bool()>>> rungs = {
      {"safe", [&] { return safe<T><<<rows, 128>>>(x, y, rows, cols, stride), true; }},
      {"v0",
       [&] { return v0_thread<T><<<(rows + 31) / 32, 32>>>(x, y, rows, cols, stride), true; }},
      {"v1", [&] { return v1_warp_shuffle<T><<<rows, 96>>>(x, y, rows, cols, stride), true; }},
      {"v2", [&] { return v2_vectorized<T><<<rows, 128>>>(x, y, rows, cols, stride), true; }},
      {"v3",
       [&] {
         if (cols > 256 * 32) return false;
         return v3_register_cache<T, MOST><<<rows, 256>>>(x, y, rows, cols, stride), true;
       }},
      {"v4", [&] { return v4_grid_stride<T><<<2, 64>>>(x, y, rows, cols, stride), true; }},
      {"v5",
       [&] {
         v5_fold_part<T><<<rows * parts, 64>>>(x, states, cols, stride, parts, part_cols);
         v5_emit_part<T><<<rows * parts, 64>>>(x, y, states, cols, stride, parts, part_cols);
         return true;
       }},
  };
  int wrong = 0;
  for (const auto& [name, launch] : rungs) {
    CHECK(cudaMemset(y, 0xff, rows * cols * sizeof(T)));
    if (!launch()) continue;
    CHECK(cudaGetLastError());
    to_float<<<1, 256>>>(y, wide_y, rows * cols);
    CHECK(cudaMemcpy(result.data(), wide_y, result.size() * sizeof(float), cudaMemcpyDeviceToHost));
    double worst = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const float* v = values.data() + row * stride;
      double m = -INFINITY, d = 0;
      for (int64_t i = 0; i < cols; ++i) m = std::fmax(m, double(v[i]));
      for (int64_t i = 0; i < cols; ++i) d += std::exp(v[i] - m);
      for (int64_t i = 0; i < cols; ++i) {
        const double error = std::fabs(result[row * cols + i] - std::exp(v[i] - m) / d);
        worst = error <= worst ? worst : error;  // NaN counts as worst
      }
    }
    const bool ok = worst <= tolerance;
    wrong += !ok;
    std::printf("%-4s %-9s %3lld x %-6lld pad %lld: error %.1e %s\n", name, type, (long long)rows,
                (long long)cols, (long long)pad, worst, ok ? "ok" : "WRONG");
  }
  for (void* p : {(void*)x, (void*)y, (void*)states, (void*)wide_x, (void*)wide_y})
    CHECK(cudaFree(p));
  return wrong;
}

int main() {
  int wrong = 0;
  for (int64_t cols : {1, 31, 33, 257, 1000, 1024, 4099})
    for (int64_t pad : {0, 3}) {
      wrong += check<float>("float", 3, cols, pad, 1e-6);
      wrong += check<half_t>("half", 3, cols, pad, 1e-3);
      wrong += check<bfloat16_t>("bfloat16", 3, cols, pad, 4e-3);
    }
  CHECK(cudaDeviceSynchronize());
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
