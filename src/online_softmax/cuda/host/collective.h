// What CUDA threads do together: barriers, meetings of a warp's lanes, and leaving the kernel.
#pragma once
#include "schedule.h"
#include "shared.h"

namespace host {

// ---- barriers: of a block, a cluster, a grid. Threads that have left the kernel are not waited for.

HOST_UNCHECKED inline void open_barrier(Worker* w, Barrier& barrier) {
  Thread *first = barrier.first, *last = barrier.last;
  barrier.waiting = 0;
  barrier.first = barrier.last = nullptr;
  if (first) wake(w, first, last, false);
}

HOST_UNCHECKED inline void arrive(Barrier& barrier, Op op, Site site) {
  Worker* w = worker;
  Thread* t = w->current;
  t->op = op;
  t->site = site;
  t->mask = 0;
  const Thread* other = barrier.first;
  if (op == Op::SYNCTHREADS && other &&
      (other->site.line != site.line ||
       (other->site.file != site.file && strcmp(other->site.file, site.file) != 0)))
    fail(
        "__syncthreads() at %s:%d, while thread %u of this block waits in the __syncthreads() at "
        "%s:%d: threads of a block must meet at the same one",
        base_name(site.file), site.line, other->index, base_name(other->site.file),
        other->site.line);
  publish(&barrier);
  if (barrier.waiting + 1 == barrier.expected) {
    open_barrier(w, barrier);
  } else {
    t->next = nullptr;
    if (barrier.last)
      barrier.last->next = t;
    else
      barrier.first = t;
    barrier.last = t;
    ++barrier.waiting;
    suspend(t);
  }
  observe(&barrier);
}

HOST_UNCHECKED inline void leave_barrier(Worker* w, Barrier& barrier) {
  --barrier.expected;
  if (barrier.waiting && barrier.waiting == barrier.expected) open_barrier(w, barrier);
}

// ---- meetings: __syncwarp and shuffles

// Everybody named has arrived: hands each lane its partner's value, wakes all but `t`, who runs.
HOST_UNCHECKED inline void close_meeting(Worker* w, Warp& warp, Meeting& meeting, Thread* t) {
  Thread *first = nullptr, *last = nullptr;
  for (unsigned rest = meeting.arrived; rest; rest &= rest - 1) {
    Thread* lane = &warp.threads[__builtin_ctz(rest)];
    lane->out = warp.threads[lane->source].in;
    if (lane == t) continue;
    if (last)
      last->next = lane;
    else
      first = lane;
    last = lane;
  }
  meeting.arrived = 0;
  warp.pending &= ~(1u << __builtin_ctz(meeting.mask));
  if (first) wake(w, first, last, true);
}

HOST_UNCHECKED inline unsigned awaited(const Warp& warp, const Meeting& meeting) {
  // CUDA lets __syncwarp name lanes that have left; a shuffle with them is refused beforehand.
  return meeting.op == Op::SYNCWARP ? meeting.mask & warp.present & ~warp.gone : meeting.mask;
}

__attribute__((noinline, noreturn)) HOST_UNCHECKED inline void refuse_meeting(
    const Warp& warp, const Thread* t, const Meeting& meeting) {
  const unsigned mask = t->mask, absent = mask & ~warp.present, left = mask & warp.gone;
  const char *name = OP_NAMES[int(t->op)], *file = base_name(t->site.file);
  const int line = t->site.line;
  if (!(mask >> t->lane & 1))
    fail("%s at %s:%d: lane %u calls it with mask 0x%08x, which does not name it", name, file, line,
         t->lane, mask);
  if (absent)
    fail(
        "%s at %s:%d: mask 0x%08x names lane %d, but this warp has only %d threads (a block of "
        "%u)",
        name, file, line, mask, __builtin_ctz(absent), 32 - __builtin_clz(warp.present),
        unsigned(worker->launch->request->block));
  if (left)
    fail("%s at %s:%d: mask 0x%08x names lane %d, which has left the kernel", name, file, line,
         mask, __builtin_ctz(left));
  if (!(mask >> t->source & 1))
    fail("%s at %s:%d: lane %u reads lane %u, which mask 0x%08x does not name", name, file, line,
         t->lane, t->source, mask);
  const Thread& other = warp.threads[__builtin_ctz(meeting.arrived)];
  fail(
      "%s at %s:%d with mask 0x%08x, while lane %u waits in %s at %s:%d with mask 0x%08x: lanes "
      "that a mask names must meet in the same call with the same mask",
      name, file, line, mask, other.lane, OP_NAMES[int(meeting.op)], base_name(other.site.file),
      other.site.line, meeting.mask);
}

// Waits for all lanes of the mask; returns what lane `source` brought.
HOST_UNCHECKED inline uint64_t meet(unsigned mask, uint64_t value, unsigned source, Op op,
                                    Site site) {
  Worker* w = worker;
  Thread* t = w->current;
  Warp& warp = *t->warp;
  const unsigned bit = 1u << t->lane;
  Meeting& meeting = warp.meetings[mask ? __builtin_ctz(mask) : 0];
  t->in = value;
  t->source = source;
  t->op = op;
  t->site = site;
  t->mask = mask;
  const bool lanes_fit = op == Op::SYNCWARP || !(mask & (warp.gone | ~warp.present));
  const bool same = !meeting.arrived || (meeting.mask == mask && meeting.op == op);
  if (!(mask & bit) || !lanes_fit || !(mask >> source & 1) || !same)
    refuse_meeting(warp, t, meeting);
  meeting.mask = mask;
  meeting.op = op;
  meeting.arrived |= bit;
  warp.pending |= 1u << __builtin_ctz(mask);
  if (op == Op::SYNCWARP) publish(&meeting);
  if (meeting.arrived == awaited(warp, meeting))
    close_meeting(w, warp, meeting, t);
  else
    suspend(t);
  if (op == Op::SYNCWARP) observe(&meeting);  // a shuffle orders no memory
  return t->out;
}

// ---- the end of a thread

// Returns who runs next; null: the team is done.
HOST_UNCHECKED inline Thread* leave(Worker* w, Thread* t) {
  Warp& warp = *t->warp;
  Block& block = *t->block;
  publish(w->launch);
  t->op = Op::START;
  warp.gone |= 1u << t->lane;
  for (unsigned rest = warp.pending; rest; rest &= rest - 1) {
    Meeting& meeting = warp.meetings[__builtin_ctz(rest)];
    if (!(meeting.mask >> t->lane & 1)) continue;
    const Thread& other = warp.threads[__builtin_ctz(meeting.arrived)];
    if (meeting.op != Op::SYNCWARP)
      fail("lane %u leaves the kernel, but lane %u waits for it in %s at %s:%d with mask 0x%08x",
           t->lane, other.lane, OP_NAMES[int(meeting.op)], base_name(other.site.file),
           other.site.line, meeting.mask);
    if (meeting.arrived == awaited(warp, meeting)) close_meeting(w, warp, meeting, t);
  }
  leave_barrier(w, block.barrier);
  leave_barrier(w, *block.cluster);
  leave_barrier(w, w->grid);
  t->done = true;
  w->idle = 0;
  --w->alive;
  if (--block.alive == 0) end_shared(block);
  Thread* next = next_ready(w);
  if (next == nullptr && w->alive) report_deadlock();
  return next;
}

// The first and last thing on every stack: runs one thread after another. A thread that never waits
// hands its stack on to the next, so a kernel without barriers needs one stack and no switch.
HOST_UNCHECKED inline void thread_main() {
  Worker* w = worker;
#if defined(HOST_ASAN)
  const void* low;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &low, &bytes);
  if (w->home_low == nullptr) w->home_low = low, w->home_bytes = bytes;  // the first to run
#endif
  for (;;) {
    Thread* t = w->current;
    w->launch->kernel(w->launch->request->slots);
    Thread* next = leave(w, t);
    if (HOST_FRESH_STACKS) hand_over(t, next, true);
    Stack* stack = t->stack;
    t->stack = nullptr;
    if (next && !next->started) {
      next->stack = stack;
      start(w, next);
      w->current = next;
      continue;
    }
    stack->next = w->spare;  // still under our feet, but nobody takes it before we are off it
    w->spare = stack;
    hand_over(t, next, true);
  }
}

}  // namespace host
