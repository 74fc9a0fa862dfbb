// The states of a row's warps, merged: in one block through shared memory, in a cluster of blocks
// through distributed shared memory (sm_90 on). Every thread ends with the row's state, in the same
// bits: states stand by (block, warp), so they are merged in the order of the columns, whoever came
// first.
#pragma once
#include "fold.cuh"

#ifndef ONLINE_SOFTMAX_HOST
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
#endif

#if !defined(ONLINE_SOFTMAX_HOST)
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
__device__ __forceinline__ uint32_t cluster_id() {  // of clusters along the grid
  uint32_t id;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}
#else
__device__ __forceinline__ uint32_t cluster_rank() { return 0; }
__device__ __forceinline__ uint32_t cluster_size() { return 1; }
__device__ __forceinline__ uint32_t cluster_id() { return blockIdx.x; }
#endif
#else
inline uint32_t cluster_id() { return blockIdx.x / cluster_size(); }
#endif

// ---- mbarriers: a count of arrivals and of bytes, which a copy by other hardware completes

__device__ __forceinline__ void barrier_init(uint64_t* bar) {
#if !defined(ONLINE_SOFTMAX_HOST) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(bar)) : "memory");
#endif
}

// What barrier_init wrote is seen by the cluster and by bulk copies.
__device__ __forceinline__ void barrier_init_fence() {
#if !defined(ONLINE_SOFTMAX_HOST) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The one arrival of a phase, and the bytes that complete it.
__device__ __forceinline__ void barrier_expect(uint64_t* bar, uint32_t bytes) {
#if !defined(ONLINE_SOFTMAX_HOST) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
               "r"(bytes)
               : "memory");
#endif
}

__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
#ifdef ONLINE_SOFTMAX_HOST
  __syncwarp();  // what completes it was done by a lane of this warp
#elif __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(bar)), "r"(parity)
        : "memory");
#endif
}

// ---- bulk copies, by one lane: `count` 16-byte words, counted by `bar`

__device__ __forceinline__ void bulk_copy(uint4* shared, const uint4* global, int count,
                                          uint64_t* bar) {
#ifdef ONLINE_SOFTMAX_HOST
  for (int i = 0; i < count; ++i) shared[i] = global[i];
#else
  const uint32_t bytes = uint32_t(count) * VECTOR_BYTES;
  barrier_expect(bar, bytes);
#if __CUDA_ARCH__ >= 900
  if (count > 0)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(bar))
        : "memory");
#endif
#endif
}

// ---- the exchange of one row after another. Two sets of slots take turns: a block sends for row
// k + 2 only after it has received row k + 1 from every warp, each of which had read row k by then.

struct Exchange {
  State* slots;       // [2][blocks of the cluster][warps of a block]
  uint64_t* arrived;  // [2]

  // Early, and before anything is swapped: a peer's memory may be written only once the peer runs.
  __device__ __forceinline__ void open() {
#if !defined(ONLINE_SOFTMAX_HOST) && __CUDA_ARCH__ >= 900
    if (cluster_size() == 1) return;
    if (threadIdx.x == 0) {
      barrier_init(arrived);
      barrier_init(arrived + 1);
      barrier_init_fence();
      expect(0);
      expect(1);
    }
    __syncthreads();  // arrived: initialised by thread 0 before any thread says that it runs
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }

  // Every warp's state of row k goes to every block; returns where they stand. k counts rows.
  __device__ __forceinline__ const State* swap(State s, uint32_t k) {
    const uint32_t rank = cluster_rank(), size = cluster_size(), turn = k & 1;
    State* here = slots + turn * size * warp_count();
    State* slot = here + rank * warp_count() + warp_id();
    if (size == 1) {
      if (lane_id() == 0) *slot = s;
      __syncthreads();  // slots: written by each warp's lane 0, read by all; two rows take turns
      return here;
    }
#ifdef ONLINE_SOFTMAX_HOST
    if (uint32_t(lane_id()) < size) *cluster_map(slot, uint32_t(lane_id())) = s;
    cluster_sync();
#elif __CUDA_ARCH__ >= 900
    if (k == 0) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (uint32_t(lane_id()) < size) {
      uint32_t remote_slot, remote_bar;
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(remote_slot)
          : "r"(shared_address(slot)), "r"(lane_id()));
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(remote_bar)
          : "r"(shared_address(arrived + turn)), "r"(lane_id()));
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
              "r"(remote_slot),
          "f"(s.m), "f"(s.d), "r"(remote_bar)
          : "memory");
    }
    barrier_wait(arrived + turn, (k >> 1) & 1);
    if (threadIdx.x == 0) expect(turn);  // for row k + 2, sent after this block's row k + 1
#endif
    return here;
  }

  __device__ __forceinline__ State merge(State s, uint32_t k) {
    const State* here = swap(s, k);
    const int count = int(cluster_size()) * warp_count();
    State t = lane_id() < count ? here[lane_id()] : empty();
    for (int i = lane_id() + WARP; i < count; i += WARP) t = ::merge(t, here[i]);
    return warp_merge(t);
  }

  // The same for a maximum and a sum that do not belong together.
  __device__ __forceinline__ State add(State s, uint32_t k) {
    const State* here = swap(s, k);
    const int count = int(cluster_size()) * warp_count();
    State t = {-infinity(), 0.0f};
    for (int i = lane_id(); i < count; i += WARP) t = {maximum(t.m, here[i].m), t.d + here[i].d};
    return {warp_fold<Maximum>(t.m), warp_fold<Sum>(t.d)};
  }

 private:
  __device__ __forceinline__ void expect(uint32_t turn) {
    barrier_expect(arrived + turn, cluster_size() * warp_count() * uint32_t(sizeof(State)));
  }
};

// ---- the states of a row's parts, each of a block of its own, in global memory. One word says both
// that a state is there and what it is, so no other access needs an order: 0 is a state still to come.

__device__ __forceinline__ void post(uint64_t* place, State s) {
  // NaN of one pattern, which is not all ones: no state becomes 0.
  const uint32_t m = float_to_bits(s.m == s.m ? s.m : not_a_number());
  const uint64_t word = ~(uint64_t(float_to_bits(s.d)) << 32 | m);
#ifdef ONLINE_SOFTMAX_HOST
  __atomic_store_n(place, word, __ATOMIC_RELAXED);
  atomic_pause(true);
#elif __CUDA_ARCH__ >= 700
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(place), "l"(word) : "memory");
#endif
}

// The word as it is by now, past the L1 cache, which is not told of other blocks' writes.
__device__ __forceinline__ uint64_t peek(const uint64_t* place) {
  uint64_t word = 0;
#ifdef ONLINE_SOFTMAX_HOST
  word = __atomic_load_n(place, __ATOMIC_RELAXED);
  atomic_pause(false);
#elif __CUDA_ARCH__ >= 700
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(place) : "memory");
#endif
  return word;
}

// `word`: what an earlier look has found.
__device__ __forceinline__ State wait_for_state(const uint64_t* place, uint64_t word) {
  while (word == 0) word = peek(place);
  return {bits_to_float(uint32_t(~word)), bits_to_float(uint32_t(~word >> 32))};
}

// What a warp makes of its threads' states, read(i) for part i of a row; the block's warps together
// then have all. The order follows from the number of parts and of threads alone.
template <typename Read>
__device__ __forceinline__ State merge_parts(int64_t parts, Read read) {
  State s = empty();
  for (int64_t i = threadIdx.x; i < parts; i += blockDim.x) s = merge(s, read(i));
  return warp_merge(s);
}

// The same for a maximum and a sum that do not belong together.
template <typename Read>
__device__ __forceinline__ State add_parts(int64_t parts, Read read) {
  State s = {-infinity(), 0.0f};
  for (int64_t i = threadIdx.x; i < parts; i += blockDim.x) {
    const State part = read(i);
    s = {maximum(s.m, part.m), s.d + part.d};
  }
  return {warp_fold<Maximum>(s.m), warp_fold<Sum>(s.d)};
}
