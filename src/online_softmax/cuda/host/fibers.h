// Fibers: stacks, and the switch from one to another. Knows nothing of blocks and threads.
//
// A switch is a few instructions of assembly on x86-64 and aarch64. Elsewhere it is ucontext, which
// makes a system call each time and is some thirty times slower.
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HOST_ASAN 1
#elif __has_feature(thread_sanitizer)
#define HOST_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define HOST_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define HOST_TSAN 1
#endif

#if defined(HOST_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(HOST_TSAN)
#include <sanitizer/tsan_interface.h>
// The scheduler's own accesses are not the kernel's: only kernels are checked for races.
#define HOST_UNCHECKED __attribute__((no_sanitize("thread")))
// One stack given to two threads would order them, or look like a race: each has a fresh one.
#define HOST_FRESH_STACKS 1
#else
#define HOST_FRESH_STACKS 0
#define HOST_UNCHECKED
#endif

#if !defined(ONLINE_SOFTMAX_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define ONLINE_SOFTMAX_UCONTEXT 1
#endif
#if defined(ONLINE_SOFTMAX_UCONTEXT)
#include <ucontext.h>
#endif

namespace host {

#if defined(HOST_ASAN) || defined(HOST_TSAN)
constexpr size_t STACK_BYTES = 256 << 10;  // red zones and unmerged frames
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr size_t GUARD_BYTES = 64 << 10;  // at least a page, on every machine
// Neighbouring stacks would have their hot ends in the same cache sets; shift each by some lines.
constexpr size_t COLOUR_BYTES = 192, COLOURS = 20;

struct Stack {
  char* low;  // lowest usable byte; GUARD_BYTES lie below
  Stack* next;
  size_t colour;
  bool guarded;  // those bytes are inaccessible
};

// ---- the switch

#if defined(ONLINE_SOFTMAX_UCONTEXT)

struct Context {
  ucontext_t state;
};

HOST_UNCHECKED inline void switch_context(Context& from, Context& to) {
  swapcontext(&from.state, &to.state);
}

HOST_UNCHECKED inline void prepare_context(Context& context, Stack* stack, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack->low;
  context.state.uc_stack.ss_size = STACK_BYTES;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

#else

struct Context {
  void** sp;
};

// Saves the registers that a callee must keep on the stack, stores the stack pointer, and undoes the
// same on the other stack. The floating point control words never change between fibers.
extern "C" void switch_stack(void*** save, void** load) asm("online_softmax_switch_stack");

#if defined(__x86_64__)
constexpr int SAVED_WORDS = 6;
asm(R"(
.text
.p2align 4
online_softmax_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#else
constexpr int SAVED_WORDS = 20;
asm(R"(
.text
.p2align 4
online_softmax_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#endif

HOST_UNCHECKED inline void switch_context(Context& from, Context& to) {
  switch_stack(&from.sp, to.sp);
}

HOST_UNCHECKED inline void prepare_context(Context& context, Stack* stack, void (*entry)()) {
  char* end = stack->low + STACK_BYTES - stack->colour * COLOUR_BYTES;  // 16-byte aligned
  void** top = reinterpret_cast<void**>(end);
#if defined(__x86_64__)
  *--top = nullptr;  // where entry would return to, and the end of every backtrace
  *--top = reinterpret_cast<void*>(entry);
  top -= SAVED_WORDS;
  memset(top, 0, SAVED_WORDS * sizeof(void*));
#else
  top -= SAVED_WORDS;
  memset(top, 0, SAVED_WORDS * sizeof(void*));
  top[11] = reinterpret_cast<void*>(entry);  // x30
#endif
  context.sp = top;
}

#endif

// ---- stacks, kept between launches

// One for the whole process. Every library of kernels has this object, and execute.py hands that of
// the first library to all: a pool for each would take its own share of the mappings.
struct StackPool {
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  Stack* free = nullptr;
  size_t made = 0, guarded = 0;
};
static StackPool stack_pool;

// A guard makes a stack two mappings, and Linux gives a process 65,530 (vm.max_map_count). Past them
// every mmap fails, those of malloc and of Python too. Stacks beyond this number have no guard,
// which lets neighbours be one mapping, and go back to the system after the launch.
constexpr size_t MAX_GUARDED_STACKS = 8192;

HOST_UNCHECKED inline Stack* take_stack(StackPool& pool) {
  pthread_mutex_lock(&pool.lock);
  Stack* stack = pool.free;
  if (stack != nullptr) {
    pool.free = stack->next;
  } else {
    void* memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) {
      const bool guarded =
          pool.guarded < MAX_GUARDED_STACKS && mprotect(memory, GUARD_BYTES, PROT_NONE) == 0;
      stack = new Stack{static_cast<char*>(memory) + GUARD_BYTES, nullptr, pool.made++ % COLOURS,
                        guarded};
      pool.guarded += guarded;
    }
  }
  pthread_mutex_unlock(&pool.lock);
  return stack;
}

HOST_UNCHECKED inline void give_stack(StackPool& pool, Stack* stack) {
  pthread_mutex_lock(&pool.lock);
  // It cuts a mapping in two where neighbours are one, which can fail: then the stack is kept.
  if ((HOST_FRESH_STACKS || !stack->guarded) &&
      munmap(stack->low - GUARD_BYTES, GUARD_BYTES + STACK_BYTES) == 0) {
    pool.guarded -= stack->guarded;
    delete stack;
  } else {
    stack->next = pool.free;
    pool.free = stack;
  }
  pthread_mutex_unlock(&pool.lock);
}

}  // namespace host
