// Merging what several parts give of each row: states (m, d, o), or pairs (out, lse) of attention over
// parts of the keys, where o is divided by d already. One read of each part, one write.
//
// LANES neighbouring lanes own a row: each has vectors of o, at any alignment the same elements, and all
// of them the maxima and sums, which are few. A part whose m is -inf counts for nothing, whatever its d and o hold. The order of all sums
// follows from the number of parts and dim.
#include "fold.cuh"

constexpr float LN_2 = 1.0f / LOG2_E;
constexpr int STATES = 0, PAIRS = 1, PAIRS_BASE_2 = 2;  // KIND; the base is that of lse

template <typename X>
struct Part {
  const X* o;      // (rows, dim), rows o_row_stride apart; dim may be 0
  const float* m;  // (rows); lse of a pair
  const float* d;  // (rows); of a pair not read
  int64_t o_row_stride;
};

// Last of a kernel's parameters, a word for each field: the host lays it out flat.
template <typename X, int MOST>
struct Parts {
  static constexpr char KINDS[] = "pppi";  // of the fields of each part, for host execution
  Part<X> part[MOST];
};

template <int KIND>
__device__ __forceinline__ float weight_of(float part, float m) {
  return KIND == PAIRS_BASE_2 ? exponential2(fall(part, m)) : weight(part, m);
}

// The state of all parts of a row, m in the base of the parts'.
template <int KIND, typename X, int MOST>
__device__ __forceinline__ State fold_parts(const Parts<X, MOST>& parts, int count, int64_t row) {
  State s = empty();
  for (int i = 0; i < count; ++i) s.m = maximum(s.m, load(parts.part[i].m + row));
  for (int i = 0; i < count; ++i) {
    const float m = load(parts.part[i].m + row);
    if (m == -infinity()) continue;
    const float w = weight_of<KIND>(m, s.m);
    s.d += KIND == STATES ? product(load(parts.part[i].d + row), w) : w;
  }
  return s;
}

constexpr int AT_ONCE = 4;  // parts whose vectors are on their way together

template <bool WHOLE, typename X, int MOST>
__device__ __forceinline__ void fetch(const Parts<X, MOST>& parts, int first, int count,
                                      int64_t row, int64_t col, int64_t dim,
                                      float (&x)[AT_ONCE][Vector<X>::N]) {
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) {
    if (i >= MOST || first + i >= count) break;
    const Part<X>& part = parts.part[first + i];
    load_vector<WHOLE>(part.o + row * part.o_row_stride, col, dim, x[i]);
  }
}

template <typename X, int KIND, int LANES, bool WHOLE, int MOST>
__global__ void __launch_bounds__(256)
    merge_forward(X* o,      // (rows, dim) output; out of pairs, 0 where no part has a key
                  float* m,  // (rows) output; lse of pairs
                  float* d,  // (rows) output; of pairs not written
                  int64_t rows, int64_t dim, int64_t count,
                  const __grid_constant__ Parts<X, MOST> parts) {
  constexpr int N = Vector<X>::N;
  const int lane = int(threadIdx.x) % LANES, parts_here = int(count);
  const int64_t begin = lane * N, step = LANES * N;
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / LANES) + threadIdx.x / LANES;
  if (row >= rows) return;
  float x[AT_ONCE][N];
  fetch<WHOLE>(parts, 0, parts_here, row, begin, dim, x);  // beside the maxima
  const State s = fold_parts<KIND>(parts, parts_here, row);
  float factor = 1.0f;
  if (KIND != STATES)
    factor = s.m == -infinity() ? 0.0f : is_finite(s.m) ? 1.0f / s.d : not_a_number();
  for (int64_t col = begin; col < dim; col += step) {
    float total[N] = {};
    for (int some = 0; some < parts_here; some += AT_ONCE) {
      if (some > 0 || col > begin) fetch<WHOLE>(parts, some, parts_here, row, col, dim, x);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (i >= MOST || some + i >= parts_here) break;
        const float m_part = load(parts.part[some + i].m + row);
        if (m_part == -infinity()) continue;
        const float w = weight_of<KIND>(m_part, s.m);
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] += product(x[i][j], w);
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) total[j] *= factor;
    store_vector<WHOLE>(o + row * dim, col, dim, total);
  }
  if (lane != 0) return;
  if (KIND == STATES) store(d + row, s.d);
  if (KIND == PAIRS_BASE_2)
    store(m + row, is_finite(s.m) ? s.m + natural_log(s.d) * LOG2_E : s.m);
  else
    store(m + row, KIND == PAIRS ? lse(s) : s.m);
}

// The gradients by all parts. With t_i = o_i do of part i, w_i its weight, b the base:
//   states  do_i = w_i do, dd_i = w_i dd, dm_i = u_i + (its share of the maximum) (dm - sum u),
//           u_i = w_i (d_i dd + t_i)
//   pairs   p_i = w_i / d, do_i = p_i do, dlse_i = log(b) (u_i - p_i sum u) + p_i dlse, u_i = p_i t_i
// Parts that are equal to the maximum have equal shares of it. NaN in a row of pairs whose lse is
// +inf or NaN; 0 for parts without a key.
template <typename X, int KIND, int LANES, bool WHOLE, int MOST>
__global__ void __launch_bounds__(256)
    merge_backward(const X* by_o,      // (rows, dim) do
                   const float* by_m,  // (rows) dm, dlse of pairs; with has_m
                   const float* by_d,  // (rows) dd; with has_d
                   X* to_o,            // (count, rows, dim) output
                   float* to_m,        // (count, rows) output
                   float* to_d,        // (count, rows) output; of pairs not written
                   int64_t rows, int64_t dim, int64_t count, int64_t has_m, int64_t has_d,
                   const __grid_constant__ Parts<X, MOST> parts) {
  constexpr int N = Vector<X>::N;
  constexpr float LOG_BASE = KIND == PAIRS_BASE_2 ? LN_2 : 1.0f;
  const int lane = int(threadIdx.x) % LANES, parts_here = int(count);
  const int64_t begin = lane * N, step = LANES * N;
  const int64_t place = int64_t(blockIdx.x) * (blockDim.x / LANES) + threadIdx.x / LANES;
  const bool has_row = place < rows;
  const int64_t row = has_row ? place : rows - 1;  // all lanes meet in the sums below
  const State s = fold_parts<KIND>(parts, parts_here, row);
  float factor = 1.0f;
  if (KIND != STATES) factor = is_finite(s.m) ? 1.0f / s.d : not_a_number();
  const float g_m = has_m ? load(by_m + row) : 0.0f, g_d = has_d ? load(by_d + row) : 0.0f;
  float u_of_all = 0.0f;
  int largest = 0;  // parts that are equal to the maximum
  for (int i = 0; i < parts_here; ++i) {
    const Part<X>& part = parts.part[i];
    const float m_part = load(part.m + row);
    const bool is_there = m_part != -infinity();
    const float w = is_there ? weight_of<KIND>(m_part, s.m) * factor : 0.0f;
    const X* o_row = part.o + row * part.o_row_stride;
    float t = 0.0f;
    for (int64_t col = begin; col < dim; col += step) {
      float x[N], g[N];
      load_vector<WHOLE>(o_row, col, dim, x);
      load_vector<WHOLE>(by_o + row * dim, col, dim, g);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (WHOLE || col + j < dim) t = fused(x[j], g[j], t);
        g[j] = is_there ? g[j] * w : 0.0f;
      }
      if (has_row) store_vector<WHOLE>(to_o + (i * rows + row) * dim, col, dim, g);
    }
    t = lanes_fold<LANES, Sum>(t);
    const float more = KIND == STATES ? load(part.d + row) * g_d : 0.0f;
    const float u = is_there ? w * (t + more) : 0.0f;
    u_of_all += u;
    largest += is_there && m_part == s.m;
    if (has_row && lane == i % LANES) {  // who reads it below
      store(to_m + i * rows + row, u);
      if (KIND == STATES) store(to_d + i * rows + row, is_there ? w * g_d : 0.0f);
    }
  }
  for (int i = lane; has_row && i < parts_here; i += LANES) {
    const float m_part = load(parts.part[i].m + row), u = load(to_m + i * rows + row);
    float by_part = 0.0f;
    if (m_part != -infinity()) {
      if (KIND == STATES) {
        by_part = m_part == s.m ? u + (g_m - u_of_all) / float(largest) : u;
      } else {
        const float p = weight_of<KIND>(m_part, s.m) * factor;
        by_part = LOG_BASE * (u - p * u_of_all) + p * g_m;
      }
    }
    store(to_m + i * rows + row, by_part);
  }
}
