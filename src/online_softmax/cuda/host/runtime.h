// The records of a launch. An OS thread (Worker) runs one team of blocks after another: the blocks
// that must be alive together, that is one block, one cluster, or the whole grid of a cooperative
// launch. The team's CUDA threads are fibers.
#pragma once
#include "fibers.h"

namespace host {

// What the caller fills in and gets back: the same layout stands in execute.py.
struct Request {
  int64_t grid, block, cluster, shared_bytes;
  int64_t cooperative;
  int64_t order;  // 0: threads start in order; 1: in reverse; more: the seed of a mixed order
  int64_t workers;
  const uint64_t* slots;  // 8 bytes an argument
  StackPool* stacks;
  uint64_t reads, writes, exps;
  char error[1024];  // empty: the launch succeeded
};

struct Site {  // where a thread waits, for messages
  const char* file;
  int line;
};

enum class Op : unsigned char {
  START,
  SYNCTHREADS,
  SYNCWARP,
  SHFL,
  SHFL_UP,
  SHFL_DOWN,
  SHFL_XOR,
  CLUSTER_SYNC,
  GRID_SYNC,
  YIELD
};
constexpr const char* OP_NAMES[] = {"the start of the kernel",
                                    "__syncthreads()",
                                    "__syncwarp()",
                                    "__shfl_sync()",
                                    "__shfl_up_sync()",
                                    "__shfl_down_sync()",
                                    "__shfl_xor_sync()",
                                    "cluster_sync()",
                                    "grid_sync()",
                                    "a spin"};

struct Block;
struct Warp;

struct Thread {
  Context context;
  Thread* next;  // in the ready queue, or among those that wait at a barrier
  Stack* stack;  // from its first instruction to its last
  Block* block;
  Warp* warp;
  uint64_t in, out;  // of a shuffle
  Site site;
  unsigned index, lane, source, mask;
  Op op;
  bool started, done;
#if defined(HOST_ASAN)
  void* fake_stack;
#endif
#if defined(HOST_TSAN)
  void* tsan;
#endif
};

struct Barrier {
  unsigned expected, waiting;  // threads that have not left the kernel; threads that have arrived
  Thread *first, *last;
};

struct Meeting {  // of the lanes named by a mask
  unsigned mask, arrived;
  Op op;
};

struct Warp {
  unsigned present, gone;  // lanes that were launched; lanes that have left the kernel
  unsigned pending;        // meetings under way, each at the number of its lowest lane
  Meeting meetings[32];
  Thread* threads;
};

struct Shared {  // one __shared__ object of a block
  const void* site;
  const char* name;
  char* data;
  size_t bytes;
};
constexpr int MAX_SHARED = 32;

struct Block {
  unsigned index, rank, alive;
  Barrier barrier;
  Barrier* cluster;
  Block* peers;  // the first block of its cluster
  int shared_count;
  Shared shared[MAX_SHARED];
  Shared* dynamic;
};

struct Launch {
  Request* request;
  void (*kernel)(const uint64_t* slots);
  int64_t teams, next_team;
  int failed;
  int active, stuck;  // workers that still run; those of them in which everybody spins
};

struct Worker {
  Launch* launch;
  Context home;
  Thread* current;
  Thread *head, *tail;  // ready
  uint64_t reads, writes, exps;
  uint64_t idle, patience;  // yields since anything happened; after how many it counts as stuck
  int stuck_ms;             // for how long all workers have been stuck; -1: this one is not
  uint64_t random;          // not 0: the order is mixed
  unsigned alive;           // threads of the team that have not left the kernel
  unsigned team_blocks;
  Barrier grid;
  Block* blocks;
  Barrier* clusters;
  Warp* warps;
  Thread* threads;
  Stack* spare;
#if defined(HOST_ASAN)
  void* fake_stack;
  const void* home_low;
  size_t home_bytes;
#endif
#if defined(HOST_TSAN)
  void* tsan;
#endif
};

static thread_local Worker* worker = nullptr;

// ---- happens-before for the thread sanitizer: only what CUDA promises, so that it finds races

#if defined(HOST_TSAN)
HOST_UNCHECKED inline void publish(void* place) { __tsan_release(place); }
HOST_UNCHECKED inline void observe(void* place) { __tsan_acquire(place); }
#else
HOST_UNCHECKED inline void publish(void*) {}
HOST_UNCHECKED inline void observe(void*) {}
#endif

}  // namespace host
