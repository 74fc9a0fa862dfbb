// The states of a row's warps, merged: in one block through shared memory, in a cluster of blocks
// through distributed shared memory. Every thread ends with the row's state, in the same bits.
#pragma once
#include "../../../src/online_softmax/cuda/fold.cuh"

constexpr int MAX_CLUSTER = 16;

#ifndef ONLINE_SOFTMAX_HOST
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
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
#endif

// One exchange a kernel: `open` first thing (peers must run before their memory is written), `send`
// when a warp's state is known, `receive` for all. States arrive in slots by (block, warp), so the
// merge is in the order of the columns, whoever came first.
template <int WARPS>  // warps a block, at most
struct ClusterExchange {
  State* slots;       // [cluster_size][WARPS]
  uint64_t* arrived;  // an mbarrier

  __device__ __forceinline__ void open() {
#ifndef ONLINE_SOFTMAX_HOST
    if (threadIdx.x == 0) {
      const uint32_t bar = shared_address(arrived);
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      const uint32_t bytes = cluster_size() * warp_count() * sizeof(State);
      asm volatile("mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                   "r"(bytes)
                   : "memory");
    }
    __syncthreads();  // arrived: initialised by thread 0 before any thread says that it runs
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }

  __device__ __forceinline__ void send(State s) {
    const uint32_t rank = cluster_rank(), size = cluster_size();
    State* slot = slots + rank * WARPS + warp_id();
#ifdef ONLINE_SOFTMAX_HOST
    if (uint32_t(lane_id()) < size) *cluster_map(slot, uint32_t(lane_id())) = s;
    cluster_sync();
#else
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (uint32_t(lane_id()) < size) {
      uint32_t remote_slot, remote_bar;
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(remote_slot)
          : "r"(shared_address(slot)), "r"(lane_id()));
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(remote_bar)
          : "r"(shared_address(arrived)), "r"(lane_id()));
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
              "r"(remote_slot),
          "f"(s.m), "f"(s.d), "r"(remote_bar)
          : "memory");
    }
#endif
  }

  __device__ __forceinline__ void wait() {
#ifndef ONLINE_SOFTMAX_HOST
    const uint32_t bar = shared_address(arrived);
    uint32_t done = 0;
    while (!done)
      asm volatile(
          "{ .reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
          "selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(bar)
          : "memory");
#endif
  }

  // The same for sums, which travel as d.
  __device__ __forceinline__ float receive_sum() {
    wait();
    float sum = 0.0f;
    const int count = int(cluster_size()) * warp_count();
    for (int i = lane_id(); i < count; i += WARP)
      sum += slots[(i / warp_count()) * WARPS + i % warp_count()].d;
    return warp_fold<Sum>(sum);
  }

  __device__ __forceinline__ State receive() {
    wait();
    State s = empty();
    const int count = int(cluster_size()) * warp_count();
    for (int i = lane_id(); i < count; i += WARP)
      s = merge(s, slots[(i / warp_count()) * WARPS + i % warp_count()]);
    return warp_merge(s);
  }
};
