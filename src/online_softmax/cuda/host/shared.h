// Shared memory: an allocation for each object of each block, full of NaN when the block starts.
// Reads past the end are for the address sanitizer; without it, writes past an end are noticed when
// the block ends.
#pragma once
#include "schedule.h"

namespace host {

constexpr size_t SHARED_ALIGNMENT = 128;  // what bulk copies ask for
constexpr int POISON = 0xff;              // NaN as float, double, half and bfloat16
#if defined(HOST_ASAN) || defined(HOST_TSAN)
constexpr size_t MARGIN_BYTES = 0;  // the sanitizer's red zones do better
constexpr bool KEEPS_SHARED = false;
#else
constexpr size_t MARGIN_BYTES = SHARED_ALIGNMENT;
constexpr bool KEEPS_SHARED = true;  // for the next block
#endif

HOST_UNCHECKED inline Shared* add_shared(Block& block, const void* site, const char* name,
                                         size_t bytes) {
  if (block.shared_count == MAX_SHARED) fail("more than %d shared objects in a block", MAX_SHARED);
  Shared* shared = &block.shared[block.shared_count++];
  void* memory = nullptr;
  const size_t total = bytes + 2 * MARGIN_BYTES;
  if (posix_memalign(&memory, SHARED_ALIGNMENT, total ? total : 1) != 0)
    fail("no memory for %zu bytes of shared memory", bytes);
  memset(memory, POISON, total);
  *shared = {site, name, static_cast<char*>(memory) + MARGIN_BYTES, bytes};
  publish(shared);
  return shared;
}

// The block's object of this declaration, made when the first thread comes by.
HOST_UNCHECKED inline Shared* find_shared(Block& block, const void* site, const char* name,
                                          size_t bytes) {
  for (int i = 0; i < block.shared_count; ++i)
    if (block.shared[i].site == site) {
      observe(&block.shared[i]);
      return &block.shared[i];
    }
  return add_shared(block, site, name, bytes);
}

HOST_UNCHECKED inline void free_shared(Block& block) {
  for (int i = 0; i < block.shared_count; ++i) free(block.shared[i].data - MARGIN_BYTES);
  block.shared_count = 0;
}

// The last thread has left: checks the margins and poisons the objects for the next block, or for
// the peers in a cluster that look at them too late.
HOST_UNCHECKED inline void end_shared(Block& block) {
  for (int i = 0; i < block.shared_count; ++i) {
    const Shared& s = block.shared[i];
    for (size_t k = 0; k < MARGIN_BYTES; ++k)
      if (static_cast<unsigned char>(s.data[s.bytes + k]) != POISON ||
          static_cast<unsigned char>(s.data[-1 - int64_t(k)]) != POISON)
        fail("the kernel wrote outside the shared array '%s' of %zu bytes", s.name, s.bytes);
    if (KEEPS_SHARED) memset(s.data, POISON, s.bytes);
  }
#if defined(HOST_ASAN)
  free_shared(block);
#elif defined(HOST_TSAN)
  block.shared_count = 0;  // never freed: freeing would need an order between blocks
#endif
}

HOST_UNCHECKED inline void begin_shared(Block& block, size_t dynamic_bytes) {
  block.dynamic = find_shared(block, nullptr, "dynamic shared memory", dynamic_bytes);
}

// The same object in the block with this rank of the cluster.
HOST_UNCHECKED inline void* map_shared(const void* address, unsigned rank) {
  Worker* w = worker;
  Block& mine = *w->current->block;
  if (rank >= w->launch->request->cluster)
    fail("cluster_map(): rank %u in a cluster of %d blocks", rank,
         int(w->launch->request->cluster));
  Block& theirs = mine.peers[rank];
  for (int i = 0; i < mine.shared_count; ++i) {
    const Shared& s = mine.shared[i];
    const size_t offset = static_cast<const char*>(address) - s.data;
    if (static_cast<const char*>(address) < s.data || offset >= s.bytes) continue;
    if (theirs.alive == 0)
      fail("cluster_map(): block %u of this cluster has left the kernel, its shared memory is gone",
           rank);
    return find_shared(theirs, s.site, s.name, s.bytes)->data + offset;
  }
  fail("cluster_map(): the address is in no shared object of this block");
}

}  // namespace host
