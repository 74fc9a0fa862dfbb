// Passing the processor from one CUDA thread of a team to the next. Who can run stands in the ready
// queue; who waits has left it; an empty queue with threads in the kernel is a deadlock.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "runtime.h"

namespace host {

// ---- switching

// Runs `to`, or the worker itself if null. `gone`: nobody will come back to this stack.
HOST_UNCHECKED inline void hand_over(Thread* from, Thread* to, bool gone) {
  Worker* w = worker;
  w->current = to;
#if defined(HOST_ASAN)
  __sanitizer_start_switch_fiber(gone ? nullptr : &from->fake_stack,
                                 to ? to->stack->low : w->home_low,
                                 to ? STACK_BYTES : w->home_bytes);
#endif
#if defined(HOST_TSAN)
  __tsan_switch_to_fiber(to ? to->tsan : w->tsan, __tsan_switch_to_fiber_no_sync);
#endif
  (void)gone;
  switch_context(from->context, to ? to->context : w->home);
#if defined(HOST_ASAN)
  __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

__attribute__((format(printf, 2, 0))) HOST_UNCHECKED inline void set_error(Launch* launch,
                                                                           const char* format,
                                                                           va_list values) {
  if (__atomic_exchange_n(&launch->failed, 1, __ATOMIC_ACQ_REL)) return;  // the first one counts
  Request* r = launch->request;
  size_t used = 0;
  if (Thread* t = worker->current)
    used = snprintf(r->error, sizeof(r->error), "block %u, thread %u: ", t->block->index, t->index);
  vsnprintf(r->error + used, sizeof(r->error) - used, format, values);
}

// Ends the launch with a message. The stacks of all threads are simply forgotten: device code owns
// nothing that would need a destructor.
__attribute__((format(printf, 1, 2), noinline, noreturn)) HOST_UNCHECKED inline void fail(
    const char* format, ...) {
  va_list values;
  va_start(values, format);
  set_error(worker->launch, format, values);
  va_end(values);
  if (worker->current == nullptr) {  // no memory for a block that has not begun: nowhere to go
    fprintf(stderr, "online-softmax: %s\n", worker->launch->request->error);
    abort();
  }
  hand_over(worker->current, nullptr, true);
  __builtin_unreachable();
}

HOST_UNCHECKED inline const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// Nobody can run: says who waits where.
__attribute__((noinline, noreturn)) HOST_UNCHECKED inline void report_deadlock() {
  Worker* w = worker;
  const unsigned count = w->team_blocks * unsigned(w->launch->request->block);
  char text[700];
  size_t used = 0;
  text[0] = 0;
  for (unsigned i = 0, kinds = 0; i < count && kinds < 5 && used < sizeof(text) - 160; ++i) {
    const Thread& t = w->threads[i];
    if (t.done) continue;
    auto same = [&](const Thread& o) {
      return !o.done && o.op == t.op && o.site.line == t.site.line && o.mask == t.mask;
    };
    unsigned first = 0, alike = 0;
    while (!same(w->threads[first])) ++first;
    if (first != i) continue;  // told already
    for (unsigned j = i; j < count; ++j) alike += same(w->threads[j]);
    used += snprintf(text + used, sizeof(text) - used, "%s%u wait%s in %s at %s:%d",
                     kinds ? "; " : "", alike, alike == 1 ? "s" : "", OP_NAMES[int(t.op)],
                     base_name(t.site.file), t.site.line);
    if (t.mask && used < sizeof(text))
      used += snprintf(text + used, sizeof(text) - used, " with mask 0x%08x", t.mask);
    if (used < sizeof(text))
      used += snprintf(text + used, sizeof(text) - used, " (first: block %u, thread %u)",
                       t.block->index, t.index);
    ++kinds;
  }
  fail("deadlock: no thread can go on. Of %u threads that are still in the kernel, %s", w->alive,
       text);
}

// ---- the ready queue

// `overtake`: before all others. A warp then runs on its own until it meets the block, which keeps
// its stacks in the first-level cache, and parts the warps as far as the kernel allows.
HOST_UNCHECKED inline void wake(Worker* w, Thread* first, Thread* last, bool overtake) {
  w->idle = 0;
  if (w->random) {
    w->random ^= w->random << 13, w->random ^= w->random >> 7, w->random ^= w->random << 17;
    overtake = w->random & 1;
  }
  if (overtake) {
    last->next = w->head;
    w->head = first;
    if (w->tail == nullptr) w->tail = last;
  } else {
    last->next = nullptr;
    if (w->tail)
      w->tail->next = first;
    else
      w->head = first;
    w->tail = last;
  }
}

HOST_UNCHECKED inline Thread* next_ready(Worker* w) {
  Thread* t = w->head;
  if (t == nullptr) return nullptr;
  w->head = t->next;
  if (w->head == nullptr) w->tail = nullptr;
  return t;
}

void thread_main();

HOST_UNCHECKED inline void start(Worker* w, Thread* t) {
  t->started = true;
  if (t->stack) return;  // that of a thread which just ended
  t->stack = w->spare;
  if (t->stack)
    w->spare = t->stack->next;
  else
    t->stack = take_stack(*w->launch->request->stacks);
  if (t->stack == nullptr) fail("no memory for the stack of one more thread");
#if defined(HOST_ASAN)
  // Frames of threads that ended here never returned: what is poisoned around them stays so.
  ASAN_UNPOISON_MEMORY_REGION(t->stack->low, STACK_BYTES);
#endif
  prepare_context(t->context, t->stack, thread_main);
}

// Waits until somebody wakes this thread.
HOST_UNCHECKED inline void suspend(Thread* t) {
  Worker* w = worker;
  Thread* next = next_ready(w);
  if (next == nullptr) report_deadlock();
  if (!next->started) start(w, next);
  hand_over(t, next, false);
}

HOST_UNCHECKED inline void end_stuck(Worker* w) {
  if (w->stuck_ms >= 0) __atomic_fetch_sub(&w->launch->stuck, 1, __ATOMIC_ACQ_REL);
  w->stuck_ms = -1;
}

// Everybody here spins: perhaps for a block of another worker, unless those are stuck as well.
__attribute__((noinline)) HOST_UNCHECKED inline void wait_for_workers(Worker* w) {
  constexpr int ENOUGH_MS = 200;
  Launch* launch = w->launch;
  if (w->stuck_ms < 0) __atomic_fetch_add(&launch->stuck, 1, __ATOMIC_ACQ_REL);
  const bool all = __atomic_load_n(&launch->stuck, __ATOMIC_ACQUIRE) ==
                   __atomic_load_n(&launch->active, __ATOMIC_ACQUIRE);
  w->stuck_ms = all ? w->stuck_ms + 1 : 0;
  if (w->stuck_ms > ENOUGH_MS)
    fail("it spins, and nothing that it could wait for happens any more");
  const timespec millisecond = {0, 1000000};
  nanosleep(&millisecond, nullptr);
}

// Lets all others run. Every loop that waits for another thread's store must come through here.
HOST_UNCHECKED inline void yield() {
  Worker* w = worker;
  Thread* t = w->current;
  if (__atomic_load_n(&w->launch->failed, __ATOMIC_RELAXED)) hand_over(t, nullptr, true);
  if (++w->idle > w->patience)
    wait_for_workers(w);
  else if (w->stuck_ms >= 0)
    end_stuck(w);
  if (w->head == nullptr) return;
  t->op = Op::YIELD;
  t->mask = 0;
  t->next = nullptr;
  w->tail->next = t;
  w->tail = t;
  Thread* next = next_ready(w);
  if (!next->started) start(w, next);
  hand_over(t, next, false);
}

}  // namespace host
