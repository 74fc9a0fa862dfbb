// What a kernel sees when an ordinary C++17 compiler builds it: CUDA's keywords, indices, barriers,
// shuffles, shared memory, clusters and atomics, with CUDA's meaning. See runtime.h for how.
#pragma once
#include "collective.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

// ---- indices

namespace host {
struct Index3 {
  unsigned x, y, z;
};
HOST_UNCHECKED inline Index3 thread_index() { return {worker->current->index, 0, 0}; }
HOST_UNCHECKED inline Index3 block_index() { return {worker->current->block->index, 0, 0}; }
HOST_UNCHECKED inline Index3 block_size() {
  return {unsigned(worker->launch->request->block), 1, 1};
}
HOST_UNCHECKED inline Index3 grid_size() { return {unsigned(worker->launch->request->grid), 1, 1}; }
}  // namespace host
#define threadIdx (::host::thread_index())
#define blockIdx (::host::block_index())
#define blockDim (::host::block_size())
#define gridDim (::host::grid_size())
constexpr int warpSize = 32;

// ---- barriers. A call's file and line are for messages.

#define HOST_SITE int line = __builtin_LINE(), const char *file = __builtin_FILE()

HOST_UNCHECKED inline void __syncthreads(HOST_SITE) {
  host::arrive(host::worker->current->block->barrier, host::Op::SYNCTHREADS, {file, line});
}
HOST_UNCHECKED inline void __syncwarp(unsigned mask = 0xffffffffu, HOST_SITE) {
  host::meet(mask, 0, host::worker->current->lane, host::Op::SYNCWARP, {file, line});
}

// ---- shuffles of 4 and 8 bytes

namespace host {
template <typename V>
HOST_UNCHECKED inline V shuffle(unsigned mask, V value, unsigned source, Op op, Site site) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8, "a shuffle moves 4 or 8 bytes");
  static_assert(__is_trivially_copyable(V), "a shuffle moves plain values");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(V));
  bits = meet(mask, bits, source, op, site);
  memcpy(&value, &bits, sizeof(V));
  return value;
}
HOST_UNCHECKED inline unsigned lane() { return worker->current->lane; }
}  // namespace host

// `width` cuts the warp into groups; who would read past a group's end gets its own value.
template <typename V>
HOST_UNCHECKED inline V __shfl_sync(unsigned mask, V value, int from, int width = 32, HOST_SITE) {
  const unsigned lane = host::lane(), low = lane & ~(width - 1u);
  return host::shuffle(mask, value, low | (from & (width - 1u)), host::Op::SHFL, {file, line});
}
template <typename V>
HOST_UNCHECKED inline V __shfl_xor_sync(unsigned mask, V value, int lanes, int width = 32,
                                        HOST_SITE) {
  const unsigned lane = host::lane(), source = lane ^ unsigned(lanes);
  const bool inside = source < (lane & ~(width - 1u)) + width;
  return host::shuffle(mask, value, inside ? source : lane, host::Op::SHFL_XOR, {file, line});
}
template <typename V>
HOST_UNCHECKED inline V __shfl_down_sync(unsigned mask, V value, unsigned by, int width = 32,
                                         HOST_SITE) {
  const unsigned lane = host::lane();
  const bool inside = (lane & (width - 1u)) + by < unsigned(width);
  return host::shuffle(mask, value, inside ? lane + by : lane, host::Op::SHFL_DOWN, {file, line});
}
template <typename V>
HOST_UNCHECKED inline V __shfl_up_sync(unsigned mask, V value, unsigned by, int width = 32,
                                       HOST_SITE) {
  const unsigned lane = host::lane();
  const bool inside = (lane & (width - 1u)) >= by;
  return host::shuffle(mask, value, inside ? lane - by : lane, host::Op::SHFL_UP, {file, line});
}

// ---- shared memory: one object a block for each declaration (and template instance)

#define SHARED_ARRAY(T, name, n)                                                                 \
  static char name##_site;                                                                       \
  T(&name)                                                                                       \
  [n] = *reinterpret_cast<T(*)[n]>(                                                              \
      ::host::find_shared(*::host::worker->current->block, &name##_site, #name, sizeof(T) * (n)) \
          ->data)
#define DYNAMIC_SHARED(T, name) \
  T* name = reinterpret_cast<T*>(::host::worker->current->block->dynamic->data)

// ---- clusters and whole grids

HOST_UNCHECKED inline unsigned cluster_rank() { return host::worker->current->block->rank; }
HOST_UNCHECKED inline unsigned cluster_size() {
  return unsigned(host::worker->launch->request->cluster);
}

HOST_UNCHECKED inline void cluster_sync(HOST_SITE) {
  host::arrive(*host::worker->current->block->cluster, host::Op::CLUSTER_SYNC, {file, line});
}
// The address of the same shared object in another block of the cluster.
template <typename T>
HOST_UNCHECKED inline T* cluster_map(T* shared, unsigned rank) {
  return static_cast<T*>(host::map_shared(shared, rank));
}
HOST_UNCHECKED inline void grid_sync(HOST_SITE) {
  if (!host::worker->launch->request->cooperative)
    host::fail("grid_sync() at %s:%d needs a cooperative launch", host::base_name(file), line);
  host::arrive(host::worker->grid, host::Op::GRID_SYNC, {file, line});
}

// ---- atomics on global or shared memory. Each lets other threads run, so a spin on one may wait
// for a thread of this worker.

HOST_UNCHECKED inline void atomic_pause(bool changes) {
  if (changes) host::worker->idle = 0;
  host::yield();
}
// Adds, and returns what was there. Earlier stores of this thread are visible to who acquires it.
inline unsigned atomic_add_release(unsigned* place, unsigned value) {
  const unsigned before = __atomic_fetch_add(place, value, __ATOMIC_ACQ_REL);
  atomic_pause(value != 0);
  return before;
}
inline unsigned load_acquire(const unsigned* place) {
  const unsigned value = __atomic_load_n(place, __ATOMIC_ACQUIRE);
  atomic_pause(false);
  return value;
}
inline void store_release(unsigned* place, unsigned value) {
  __atomic_store_n(place, value, __ATOMIC_RELEASE);
  atomic_pause(true);
}
namespace host {
template <typename V>
struct Same {  // keeps a parameter out of deduction, so that it converts as CUDA's overloads do
  using Type = V;
};
}  // namespace host
template <typename V>  // an integer type
inline V atomicAdd(V* place, typename host::Same<V>::Type value) {
  const V before = __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
  atomic_pause(value != 0);
  return before;
}
inline float atomicAdd(float* place, float value) {
  float before, after;
  __atomic_load(place, &before, __ATOMIC_RELAXED);
  do after = before + value;
  while (
      !__atomic_compare_exchange(place, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  atomic_pause(true);
  return before;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- counts, and checks that a GPU makes by itself

namespace host {
HOST_UNCHECKED inline void count_reads(uint64_t elements) { worker->reads += elements; }
HOST_UNCHECKED inline void count_writes(uint64_t elements) { worker->writes += elements; }
HOST_UNCHECKED inline void count_exps(uint64_t evaluations) { worker->exps += evaluations; }

// A GPU refuses an access of 2, 4, 8 or 16 bytes at an address that is no multiple of it.
HOST_UNCHECKED inline void require_aligned(const void* address, size_t bytes, HOST_SITE) {
  if (reinterpret_cast<uintptr_t>(address) % bytes)
    fail("misaligned address: %zu bytes at %p, %s:%d", bytes, address, base_name(file), line);
}
}  // namespace host
