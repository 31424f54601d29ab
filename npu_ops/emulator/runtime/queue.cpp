// SPDX-License-Identifier: Apache-2.0
// TPipe, TQue and TBuf: allocation in a core's memories and the hand-over of tensors between pipes.
#include <algorithm>

#include "core.h"

namespace emu {

using AscendC::HardEvent;
using AscendC::TPosition;

static void note(const char* instruction) {
  core().instruction = instruction;
  core().pipe = PIPE_S;
  ++core().ordinal;
}

static Memory memory_of(TPosition position) {
  switch (position) {
    case TPosition::VECIN:
    case TPosition::VECOUT:
    case TPosition::VECCALC:
      return kUb;
    case TPosition::A1:
    case TPosition::B1:
    case TPosition::C1:
    case TPosition::TSCM:
      return kL1;
    case TPosition::A2:
      return kL0a;
    case TPosition::B2:
      return kL0b;
    case TPosition::CO1:
      return kL0c;
    case TPosition::C2:
      return kBt;
    default:
      fail("TPosition::GM and CO2 are global memory; a buffer needs a position on the core");
  }
}

// Events of a queue: filled, and emptied again.
static std::pair<HardEvent, HardEvent> events_of(TPosition source, TPosition target) {
  switch (source) {
    case TPosition::VECIN:
      if (target == TPosition::VECCALC) return {HardEvent::MTE2_V, HardEvent::V_MTE2};
      if (target == TPosition::VECOUT) return {HardEvent::MTE2_MTE3, HardEvent::MTE3_MTE2};
      break;
    case TPosition::VECOUT:
      return {HardEvent::V_MTE3, HardEvent::MTE3_V};
    case TPosition::A1:
    case TPosition::B1:
      return {HardEvent::MTE2_MTE1, HardEvent::MTE1_MTE2};
    case TPosition::A2:
    case TPosition::B2:
      return {HardEvent::MTE1_M, HardEvent::M_MTE1};
    case TPosition::CO1:
      return {HardEvent::M_FIX, HardEvent::FIX_M};
    default:
      break;
  }
  fail("a TQue goes from VECIN, VECOUT, A1, B1, A2, B2 or CO1; use a TBuf for VECCALC");
}

void pipe_open() {
  note("TPipe");
  Core& c = core();
  if (c.has_pipe) fail("a kernel has one TPipe at a time; pass it on by pointer");
  c.has_pipe = true;
  pipe_reset();
}

void pipe_close() { core().has_pipe = false; }

void pipe_reset() {
  note("TPipe::Reset");
  Core& c = core();
  check_queues_at_end(c);
  for (Queue& queue : c.queues) {
    for (Slot& slot : queue.slots) {
      ++slot.generation;
      if (slot.free_event < 0) continue;
      lower_flag(queue.free, slot.free_event);
      c.flags[source_of(queue.free)][target_of(queue.free)][slot.free_event].claimed = false;
      slot.free_event = -1;
    }
  }
  std::fill(c.top, c.top + kNumMemories, 0);
  c.num_buffers = 0;
}

static uint32_t reserve(TPosition position, uint32_t bytes, uint32_t buffers) {
  Core& c = core();
  const Memory memory = memory_of(position);
  if (!c.has_pipe) fail("InitBuffer needs a TPipe that is alive");
  if (c.cube != (memory != kUb)) {
    fail("%s is not on %s", kMemoryNames[memory], c.cube ? "a cube core" : "a vector core");
  }
  if (!bytes || !buffers)
    fail("a buffer of %u times %u bytes; give at least 1 of 32", buffers, bytes);
  c.num_buffers += buffers;
  if (c.num_buffers > 64) fail("%u buffers; a TPipe has at most 64", c.num_buffers);
  const uint64_t size = (static_cast<uint64_t>(bytes) + 31) / 32 * 32 * buffers;
  const uint32_t offset = c.top[memory];
  if (offset + size > kCapacity[memory]) {
    fail(
        "%s overflow: %u bytes in use and %llu more are above %u; shrink the tiles or the number "
        "of buffers",
        kMemoryNames[memory], offset, static_cast<unsigned long long>(size), kCapacity[memory]);
  }
  c.top[memory] += static_cast<uint32_t>(size);
  uint64_t& peak = world->report->peak[memory];
  peak = std::max<uint64_t>(peak, c.top[memory]);
  return offset;
}

int16_t queue_init(TPosition source, TPosition target, int32_t depth, uint8_t buffers,
                   uint32_t bytes) {
  note("InitBuffer(TQue)");
  Core& c = core();
  const auto events = events_of(source, target);
  Queue queue;
  queue.position = source;
  queue.full = events.first;
  queue.free = events.second;
  queue.memory = memory_of(source);
  queue.depth = static_cast<size_t>(depth);
  queue.bytes = (bytes + 31) / 32 * 32;
  const uint32_t offset = reserve(source, bytes, buffers);
  for (uint32_t i = 0; i < buffers; ++i) {
    Slot slot;
    slot.offset = offset + i * queue.bytes;
    queue.slots.push_back(slot);
  }
  c.queues.push_back(queue);
  return static_cast<int16_t>(c.queues.size() - 1);
}

Local buffer_init(TPosition position, uint32_t bytes) {
  note("InitBuffer(TBuf)");
  Local local;
  local.memory = memory_of(position);
  local.position = position;
  local.bytes = (bytes + 31) / 32 * 32;
  local.offset = reserve(position, bytes, 1);
  return local;
}

static Queue& queue_of(int16_t number) {
  if (number < 0) fail("the TQue was not initialised; call TPipe::InitBuffer");
  return core().queues[static_cast<size_t>(number)];
}

static Local tensor_of(int16_t number, int16_t slot) {
  const Queue& queue = core().queues[static_cast<size_t>(number)];
  Local local;
  local.memory = queue.memory;
  local.position = queue.position;
  local.bytes = queue.bytes;
  local.queue = number;
  local.slot = slot;
  local.offset = queue.slots[static_cast<size_t>(slot)].offset;
  local.generation = queue.slots[static_cast<size_t>(slot)].generation;
  return local;
}

static bool& claimed(HardEvent event, int32_t id) {
  return core().flags[source_of(event)][target_of(event)][id].claimed;
}

static int32_t hand_over(HardEvent event) {
  const char* instruction = core().instruction;
  const int32_t id = take_event(event, true);
  core().instruction = instruction;
  raise_flag(event, id, true);
  return id;
}

static void take_over(HardEvent event, int32_t& id) {
  lower_flag(event, id);
  claimed(event, id) = false;
  id = -1;
}

Local queue_alloc(int16_t number) {
  note("AllocTensor");
  Core& c = core();
  Queue& queue = queue_of(number);
  size_t used = 0;
  for (const Queue& other : c.queues) {
    if (other.position != queue.position) continue;
    for (const Slot& slot : other.slots) used += slot.state != Slot::kFree;
  }
  if (used >= 8)
    fail("8 tensors of this TPosition are allocated already; free some or join their buffers");
  for (size_t tried = 0; tried < queue.slots.size(); ++tried) {
    const size_t at = (queue.cursor + tried) % queue.slots.size();
    Slot& slot = queue.slots[at];
    if (slot.state != Slot::kFree) continue;
    queue.cursor = (at + 1) % queue.slots.size();
    if (slot.free_event >= 0) take_over(queue.free, slot.free_event);
    slot.state = Slot::kAllocated;
    ++slot.generation;
    Store& store = store_of(c, queue.memory);
    std::memset(store.bytes.data() + slot.offset, 0xCD, queue.bytes);
    std::memset(store.defined.data() + slot.offset, 0, queue.bytes);
    return tensor_of(number, static_cast<int16_t>(at));
  }
  fail(
      "all %zu buffers of the TQue are in use: the core would hang; FreeTensor one or give "
      "InitBuffer more",
      queue.slots.size());
}

static Slot& slot_of(Queue& queue, int16_t number, const Local& tensor) {
  if (tensor.queue != number)
    fail("the tensor does not come from this TQue; each queue takes its own tensors");
  Slot& slot = queue.slots[static_cast<size_t>(tensor.slot)];
  if (slot.generation != tensor.generation || slot.state == Slot::kFree) {
    fail("the tensor was freed already; each AllocTensor has one FreeTensor");
  }
  return slot;
}

void queue_enque(int16_t number, const Local& tensor) {
  note("EnQue");
  Queue& queue = queue_of(number);
  Slot& slot = slot_of(queue, number, tensor);
  if (slot.state != Slot::kAllocated) {
    fail("the tensor is %s; EnQue follows AllocTensor",
         slot.state == Slot::kQueued ? "in the queue already" : "out of the queue again");
  }
  if (queue.filled.size() >= queue.depth) {
    fail("the queue of depth %zu is full; DeQue before or give the TQue a larger depth",
         queue.depth);
  }
  slot.state = Slot::kQueued;
  slot.full_event = hand_over(queue.full);
  queue.filled.push_back(tensor.slot);
}

Local queue_deque(int16_t number) {
  note("DeQue");
  Queue& queue = queue_of(number);
  if (queue.filled.empty()) fail("the queue is empty: the core would hang; EnQue before");
  const int16_t at = queue.filled.front();
  queue.filled.pop_front();
  Slot& slot = queue.slots[static_cast<size_t>(at)];
  take_over(queue.full, slot.full_event);
  slot.state = Slot::kTaken;
  return tensor_of(number, at);
}

void queue_free(int16_t number, const Local& tensor) {
  note("FreeTensor");
  Queue& queue = queue_of(number);
  Slot& slot = slot_of(queue, number, tensor);
  if (slot.state != Slot::kTaken) {
    fail("the tensor %s; EnQue and DeQue it before FreeTensor, or use a TBuf",
         slot.state == Slot::kQueued ? "is still in the queue" : "was never put into the queue");
  }
  slot.state = Slot::kFree;
  ++slot.generation;
  slot.free_event = hand_over(queue.free);
}

bool queue_has_tensor(int16_t number) { return !queue_of(number).filled.empty(); }

bool queue_has_idle_buffer(int16_t number) {
  for (const Slot& slot : queue_of(number).slots) {
    if (slot.state == Slot::kFree) return true;
  }
  return false;
}

void check_queues_at_end(const Core& c) {
  for (const Queue& queue : c.queues) {
    for (const Slot& slot : queue.slots) {
      if (slot.state == Slot::kQueued)
        fail("a tensor was put into a TQue and never taken; add DeQue and FreeTensor");
      if (slot.state != Slot::kFree) {
        fail("a tensor at %s+%u was never freed; add FreeTensor", kMemoryNames[queue.memory],
             slot.offset);
      }
    }
  }
}

}  // namespace emu
