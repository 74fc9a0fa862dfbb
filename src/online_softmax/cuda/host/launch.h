// A whole launch: teams of blocks spread over OS threads, and the C entry that ctypes or the
// sanitizers' driver calls. A generated file includes a .cu, then this, and lists kernels.
#pragma once
#include "device.h"

namespace host {

// ---- one team

HOST_UNCHECKED inline void set_up_team(Worker* w, int64_t team) {
  const Request& r = *w->launch->request;
  const unsigned block_threads = unsigned(r.block), warps = (block_threads + 31) / 32;
  w->alive = w->team_blocks * block_threads;
  w->grid = {w->alive, 0, nullptr, nullptr};
  w->head = w->tail = nullptr;
  w->idle = 0;
  for (unsigned b = 0; b < w->team_blocks; ++b) {
    Block& block = w->blocks[b];
    block.index = unsigned(team * w->team_blocks + b);
    block.rank = unsigned(b % r.cluster);
    block.peers = &block - block.rank;
    block.alive = block_threads;
    block.barrier = {block_threads, 0, nullptr, nullptr};
    block.cluster = &w->clusters[b / r.cluster];
    *block.cluster = {unsigned(block_threads * r.cluster), 0, nullptr, nullptr};
    begin_shared(block, size_t(r.shared_bytes));
    for (unsigned i = 0; i < warps; ++i) {
      Warp& warp = w->warps[b * warps + i];
      const unsigned lanes = block_threads - i * 32;
      warp.present = lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
      warp.gone = warp.pending = 0;
      warp.threads = &w->threads[b * block_threads + i * 32];
    }
    for (unsigned i = 0; i < block_threads; ++i) {
      Thread& t = w->threads[b * block_threads + i];
      t.block = &block;
      t.warp = &w->warps[b * warps + i / 32];
      t.index = i;
      t.lane = i % 32;
      t.stack = nullptr;
      t.started = t.done = false;
#if defined(HOST_TSAN)
      t.tsan = __tsan_create_fiber(0);  // here, where nothing that another thread did is known
      start(w, &t);
#endif
    }
  }
}

// Any order is right for a correct kernel; a missing barrier shows in one of them.
HOST_UNCHECKED inline void queue_team(Worker* w) {
  const unsigned count = w->alive, order = unsigned(w->launch->request->order);
  if (order > 1) w->random = 0x9e3779b97f4a7c15u * order;
  const unsigned turn = order > 1 ? unsigned(w->random >> 32) % count : 0;
  for (unsigned i = 0; i < count; ++i) {
    const unsigned place = (i + turn) % count;
    Thread* t = &w->threads[order & 1 ? count - 1 - place : place];
    t->next = nullptr;
    if (w->tail)
      w->tail->next = t;
    else
      w->head = t;
    w->tail = t;
  }
}

HOST_UNCHECKED inline void run_team(Worker* w, int64_t team) {
  set_up_team(w, team);
  queue_team(w);
  Thread* first = next_ready(w);
  if (!first->started) start(w, first);
  w->current = first;
#if defined(HOST_ASAN)
  __sanitizer_start_switch_fiber(&w->fake_stack, first->stack->low, STACK_BYTES);
#endif
#if defined(HOST_TSAN)
  __tsan_switch_to_fiber(first->tsan, __tsan_switch_to_fiber_no_sync);
#endif
  switch_context(w->home, first->context);
#if defined(HOST_ASAN)
  __sanitizer_finish_switch_fiber(w->fake_stack, nullptr, nullptr);
#endif
#if defined(HOST_TSAN)
  for (unsigned i = 0; i < w->team_blocks * unsigned(w->launch->request->block); ++i) {
    __tsan_destroy_fiber(w->threads[i].tsan);
    give_stack(*w->launch->request->stacks, w->threads[i].stack);
    w->threads[i].stack = nullptr;
  }
#endif
}

// ---- one OS thread

HOST_UNCHECKED inline void* run_worker(void* argument) {
  Launch* launch = static_cast<Launch*>(argument);
  const Request& r = *launch->request;
  Worker* w = static_cast<Worker*>(calloc(1, sizeof(Worker)));
  Worker* outer = worker;
  worker = w;
  w->launch = launch;
  w->team_blocks = unsigned(r.cooperative ? r.grid : r.cluster);
  const size_t threads = size_t(w->team_blocks) * size_t(r.block);
  w->stuck_ms = -1;
  w->patience = (1 << 16) + 256 * uint64_t(threads);
  w->blocks = static_cast<Block*>(calloc(w->team_blocks, sizeof(Block)));
  w->clusters = static_cast<Barrier*>(calloc(w->team_blocks / size_t(r.cluster), sizeof(Barrier)));
  w->warps = static_cast<Warp*>(calloc(w->team_blocks * size_t((r.block + 31) / 32), sizeof(Warp)));
  w->threads = static_cast<Thread*>(calloc(threads, sizeof(Thread)));
#if defined(HOST_TSAN)
  w->tsan = __tsan_get_current_fiber();
#endif

  while (!__atomic_load_n(&launch->failed, __ATOMIC_ACQUIRE)) {
    const int64_t team = __atomic_fetch_add(&launch->next_team, 1, __ATOMIC_RELAXED);
    if (team >= launch->teams) break;
    run_team(w, r.order & 1 ? launch->teams - 1 - team : team);
    end_stuck(w);
  }

  observe(launch);
  Request* out = launch->request;
  __atomic_fetch_add(&out->reads, w->reads, __ATOMIC_RELAXED);
  __atomic_fetch_add(&out->writes, w->writes, __ATOMIC_RELAXED);
  __atomic_fetch_add(&out->exps, w->exps, __ATOMIC_RELAXED);
  for (unsigned b = 0; b < w->team_blocks; ++b) free_shared(w->blocks[b]);
  for (size_t i = 0; i < threads; ++i)  // stacks of a launch that failed
    if (Stack* stack = w->threads[i].stack) give_stack(*r.stacks, stack);
  for (Stack* stack = w->spare; stack;) {
    Stack* next = stack->next;
    give_stack(*r.stacks, stack);
    stack = next;
  }
  free(w->threads);
  free(w->warps);
  free(w->clusters);
  free(w->blocks);
  free(w);
  worker = outer;
  __atomic_fetch_sub(&launch->active, 1, __ATOMIC_RELEASE);
  return nullptr;
}

// ---- all of them

HOST_UNCHECKED inline void run(Request* request, void (*kernel)(const uint64_t*)) {
  const int64_t teams = request->cooperative ? 1 : request->grid / request->cluster;
  Launch launch = {request, kernel, teams, 0, 0, 1, 0};
  request->reads = request->writes = request->exps = 0;
  request->error[0] = 0;
  constexpr int MAX_WORKERS = 64;
  pthread_t helpers[MAX_WORKERS];
  int count = 0;
  while (count + 1 < request->workers && count + 1 < teams && count < MAX_WORKERS) {
    __atomic_fetch_add(&launch.active, 1, __ATOMIC_RELAXED);
    if (pthread_create(&helpers[count], nullptr, run_worker, &launch) != 0) {
      __atomic_fetch_sub(&launch.active, 1, __ATOMIC_RELAXED);
      break;  // fewer will do
    }
    ++count;
  }
  run_worker(&launch);  // the caller's own thread is the first worker
  for (int i = 0; i < count; ++i) pthread_join(helpers[i], nullptr);
}

// ---- arguments: 8 bytes each, to the kernel's own parameter types

template <typename V, bool IS_CLASS = __is_class(V)>
struct Slot {  // integers
  static constexpr int WORDS = 1;
  static constexpr char kind(int) { return 'i'; }
  static V get(const uint64_t* slot) { return static_cast<V>(static_cast<int64_t>(*slot)); }
};
template <typename V>
struct Slot<V*, false> {
  static constexpr int WORDS = 1;
  static constexpr char kind(int) { return 'p'; }
  static V* get(const uint64_t* slot) { return reinterpret_cast<V*>(*slot); }
};
template <>
struct Slot<float, false> {
  static constexpr int WORDS = 1;
  static constexpr char kind(int) { return 'f'; }
  static float get(const uint64_t* slot) { return __builtin_bit_cast(float, uint32_t(*slot)); }
};
// A kernel's last parameter may be a struct, each field an argument: its KINDS repeat to its end. (The
// driver reads it from where its first word lies, so nothing may follow.)
template <typename V>
struct Slot<V, true> {
  static constexpr int WORDS = int(sizeof(V) / 8);
  static constexpr char kind(int word) { return V::KINDS[word % int(sizeof(V::KINDS) - 1)]; }
  static V get(const uint64_t* slot) {
    V value;
    memcpy(&value, slot, sizeof(V));
    return value;
  }
};

template <int... I>
struct Indices {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
  using Type = Indices<I...>;
};
template <auto KERNEL>
struct Entry;
template <typename... P, void (*KERNEL)(P...)>
struct Entry<KERNEL> {
  struct Kinds {
    char letters[(Slot<P>::WORDS + ... + 1)] = {};
    constexpr Kinds() {
      int at = 0;
      (append<Slot<P>>(at), ...);
    }
    template <typename S>
    constexpr void append(int& at) {
      for (int word = 0; word < S::WORDS; ++word) letters[at++] = S::kind(word);
    }
  };
  static constexpr Kinds KINDS = {};
  template <int... I>
  static void unpack(const uint64_t* slots, Indices<I...>) {
    (void)slots;
    KERNEL(Slot<P>::get(slots + I)...);
  }
  static void call(const uint64_t* slots) {
    unpack(slots, typename Count<int(sizeof...(P))>::Type());
  }
};

struct Kernel {
  const char* kinds;  // of its parameters: p pointer, i integer, f float
  void (*call)(const uint64_t* slots);
};

}  // namespace host

// The list that the generated file ends with: HOST_KERNELS(HOST_KERNEL(a<float>), HOST_KERNEL(b))
#define HOST_KERNEL(...) {host::Entry<&__VA_ARGS__>::KINDS.letters, host::Entry<&__VA_ARGS__>::call}
#define HOST_KERNELS(...)                                                                         \
  static const host::Kernel host_kernels[] = {__VA_ARGS__};                                       \
  extern "C" __attribute__((visibility("default"))) const char* online_softmax_kinds(int64_t i) { \
    return host_kernels[i].kinds;                                                                 \
  }                                                                                               \
  extern "C" __attribute__((visibility("default"))) void* online_softmax_stacks() {               \
    return &host::stack_pool;                                                                     \
  }                                                                                               \
  extern "C" __attribute__((visibility("default"))) void online_softmax_run(                      \
      int64_t i, host::Request* request) {                                                        \
    host::run(request, host_kernels[i].call);                                                     \
  }
