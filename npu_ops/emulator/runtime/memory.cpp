// SPDX-License-Identifier: Apache-2.0
// Accesses to a core's own memory: bounds, life time, initialisation and races.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "core.h"

namespace emu {

thread_local World* world = nullptr;

void fail(const char* format, ...) {
  Core& c = core();
  char* text = world->report->error;
  const size_t size = sizeof(world->report->error);
  const int length = std::snprintf(
      text, size,
      "%s: %s core %lld, pipe %s, %s (instruction %llu of the core): ", world->launch->kernel,
      c.cube ? "AIC" : "AIV", static_cast<long long>(block_index()),
      c.pipe < kNumPipes ? kPipeNames[c.pipe] : "ALL", c.instruction,
      static_cast<unsigned long long>(c.ordinal));
  va_list values;
  va_start(values, format);
  std::vsnprintf(text + length, size - static_cast<size_t>(length), format, values);
  va_end(values);
  world->failed = true;
  // The scheduler never comes back here: what the kernel holds on its stack is given up with the
  // stack.
  swapcontext(&c.context, &world->scheduler);
  std::abort();
}

void begin(const char* instruction, pipe_t pipe, uint64_t repeats) {
  Core& c = core();
  c.instruction = instruction;
  c.pipe = pipe;
  ++c.ordinal;
  if (c.cube && pipe == PIPE_V)
    fail("a cube core has no vector unit; put this under ASCEND_IS_AIV");
  if (!c.cube && (pipe == PIPE_M || pipe == PIPE_MTE1 || pipe == PIPE_FIX)) {
    fail("a vector core has no cube unit; put this under ASCEND_IS_AIC");
  }
  ++c.now[pipe];
  c.history[pipe].push_back(instruction);
  ++world->report->instructions[pipe];
  world->report->vector_repeats += repeats;
  if (pipe == PIPE_S) return;
  // The scalar unit issues every instruction: what it has waited for is over by now. Its own reads
  // and writes of UB are not: those need S_V, S_MTE2 or S_MTE3.
  for (int q = 1; q < kNumPipes; ++q) {
    if (c.clock[pipe].own[q] < c.clock[PIPE_S].own[q])
      c.clock[pipe].own[q] = c.clock[PIPE_S].own[q];
  }
  if (c.joined[pipe] != c.version) {
    Clock known;
    known.others = c.clock[PIPE_S].others;
    join(c.clock[pipe], known);
    c.joined[pipe] = c.version;
  }
}

Store& store_of(Core& c, Memory memory) {
  Store& store = c.stores[memory];
  if (store.bytes.empty()) {
    store.bytes.assign(kCapacity[memory], 0xCD);
    store.defined.assign(kCapacity[memory], 0);
    store.blocks.assign((kCapacity[memory] + 31) / 32, Block());
  }
  return store;
}

// What the compiler adds by default between calls on LocalTensors of a vector core; never on a cube
// core.
static bool compiler_syncs(const Core& c, int a, int b) {
  if (world->launch->strict || c.cube) return false;
  const auto is = [&](int x, int y) { return (a == x && b == y) || (a == y && b == x); };
  return is(PIPE_V, PIPE_V) || is(PIPE_V, PIPE_S) || is(PIPE_MTE2, PIPE_S) || is(PIPE_MTE3, PIPE_S);
}

// `other` did instruction `time` on the block and is not known to have finished it.
static void conflict(Core& c, const char* hazard, Memory memory, uint64_t address, int other,
                     Time time) {
  if (compiler_syncs(c, other, c.pipe)) {
    c.clock[c.pipe].own[other] = time;
    return;
  }
  const char* earlier = c.history[other][time - 1];
  if (other == c.pipe) {
    fail(
        "%s hazard at %s+%llu: the result of %s before it on the same pipe may not be there yet; "
        "add "
        "PipeBarrier<PIPE_%s>() in between",
        hazard, kMemoryNames[memory], static_cast<unsigned long long>(address), earlier,
        kPipeNames[other]);
  }
  fail(
      "%s hazard at %s+%llu: %s on pipe %s may still be busy there; add SetFlag and "
      "WaitFlag<HardEvent::%s_%s> "
      "in between, or hand the tensor over with EnQue and DeQue",
      hazard, kMemoryNames[memory], static_cast<unsigned long long>(address), earlier,
      kPipeNames[other], kPipeNames[other], kPipeNames[c.pipe]);
}

static void track(Core& c, Memory memory, uint64_t at, uint64_t bytes, bool write) {
  Store& store = store_of(c, memory);
  const int pipe = c.pipe;
  const Time now = c.now[pipe];
  const Time* known = c.clock[pipe].own;
  for (uint64_t b = at / 32; b <= (at + bytes - 1) / 32; ++b) {
    Block& block = store.blocks[b];
    if (block.write) {
      if (block.write_pipe != pipe || block.write != now) {
        const bool in_order = pipe == PIPE_S && block.write_pipe == PIPE_S;
        if (!in_order && known[block.write_pipe] < block.write) {
          conflict(c, write ? "WAW" : "RAW", memory, b * 32, block.write_pipe, block.write);
        }
      } else if (!write) {
        fail(
            "reads at %s+%llu what the same instruction wrote; let source and destination be apart",
            kMemoryNames[memory], static_cast<unsigned long long>(b * 32));
      }
    }
    if (!write) {
      block.read[pipe] = now;
      continue;
    }
    for (int q = 0; q < kNumPipes; ++q) {
      if (q != pipe && known[q] < block.read[q])
        conflict(c, "WAR", memory, b * 32, q, block.read[q]);
      block.read[q] = 0;
    }
    block.write = now;
    block.write_pipe = static_cast<uint8_t>(pipe);
  }
}

static void check_life(const Core& c, const Local& t) {
  if (t.position == AscendC::TPosition::GM)
    fail("the tensor was never allocated; InitBuffer its TBuf or TQue");
  if (t.queue < 0) return;
  const Slot& slot = c.queues[static_cast<size_t>(t.queue)].slots[static_cast<size_t>(t.slot)];
  if (slot.state == Slot::kFree || slot.generation != t.generation) {
    fail("uses a tensor of %s+%u after FreeTensor; free it after its last use",
         kMemoryNames[t.memory], t.offset);
  }
  if (slot.state == Slot::kQueued) {
    fail("uses a tensor of %s+%u between EnQue and DeQue; DeQue it first", kMemoryNames[t.memory],
         t.offset);
  }
}

enum Access { kRead, kPeek, kWrite, kSpoil };

static uint8_t* access(const Local& t, uint64_t from, uint64_t bytes, Access kind) {
  const bool write = kind == kWrite || kind == kSpoil;
  Core& c = core();
  check_life(c, t);
  if (from + bytes > t.bytes) {
    fail(
        "%s bytes %llu to %llu of a tensor of %u bytes at %s+%u; shorten the access or allocate "
        "more",
        write ? "writes" : "reads", static_cast<unsigned long long>(from),
        static_cast<unsigned long long>(from + bytes), t.bytes, kMemoryNames[t.memory], t.offset);
  }
  Store& store = store_of(c, t.memory);
  const uint64_t at = t.offset + from;
  if (!bytes) return store.bytes.data() + at;
  track(c, t.memory, at, bytes, write);
  if (write) {
    std::memset(store.defined.data() + at, kind == kWrite ? 1 : 0, bytes);
    if (kind == kSpoil) std::memset(store.bytes.data() + at, 0xCD, bytes);
    return store.bytes.data() + at;
  }
  const void* hole = kind == kRead ? std::memchr(store.defined.data() + at, 0, bytes) : nullptr;
  if (hole) {
    fail("reads %s+%llu, which nothing has written; write it or shorten the count",
         kMemoryNames[t.memory],
         static_cast<unsigned long long>(static_cast<const uint8_t*>(hole) - store.defined.data()));
  }
  return store.bytes.data() + at;
}

uint8_t* touch(const Local& tensor, uint64_t from, uint64_t bytes, bool write) {
  return access(tensor, from, bytes, write ? kWrite : kRead);
}

uint8_t* spoil(const Local& tensor, uint64_t from, uint64_t bytes) {
  return access(tensor, from, bytes, kSpoil);
}

const uint8_t* peek(const Local& tensor, uint64_t from, uint64_t bytes) {
  return access(tensor, from, bytes, kPeek);
}

uint8_t* defined_of(const Local& tensor) {
  return store_of(core(), tensor.memory).defined.data() + tensor.offset;
}

void require_aligned(const Local& tensor, const char* operand, uint32_t alignment) {
  if (tensor.offset % alignment) {
    fail("%s at %s+%u is not aligned to %u bytes; let it start at a multiple", operand,
         kMemoryNames[tensor.memory], tensor.offset, alignment);
  }
}

void require_memory(const Local& tensor, const char* operand, Memory memory) {
  if (tensor.position == AscendC::TPosition::GM) {
    fail("%s was never allocated; InitBuffer its TBuf or TQue", operand);
  }
  if (tensor.memory != memory) {
    fail("%s is in %s; this instruction needs it in %s", operand, kMemoryNames[tensor.memory],
         kMemoryNames[memory]);
  }
}

void keep_own_order() {
  Core& c = core();
  c.clock[c.pipe].own[c.pipe] = c.now[c.pipe] - 1;
}

void count_macs(uint64_t macs) { world->report->macs += macs; }

void set_merged(const uint16_t counts[4]) {
  std::memcpy(core().merged, counts, sizeof(core().merged));
}

void get_merged(uint16_t counts[4]) { std::memcpy(counts, core().merged, sizeof(core().merged)); }

__attribute__((optimize("O3"))) void matmul(float* c, const float* a, const float* b, uint32_t m,
                                            uint32_t n, uint32_t k) {
  for (uint32_t i = 0; i < m; ++i) {
    for (uint32_t l = 0; l < k; ++l) {
      const float x = a[static_cast<size_t>(i) * k + l];
      const float* row = b + static_cast<size_t>(l) * n;
      float* sum = c + static_cast<size_t>(i) * n;
      for (uint32_t j = 0; j < n; ++j) sum[j] += x * row[j];
    }
  }
}

}  // namespace emu
