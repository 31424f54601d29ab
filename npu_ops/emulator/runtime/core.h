// SPDX-License-Identifier: Apache-2.0
// State of a launch: cores with their memories, clocks and flags, and the tensors in global memory.
//
// Instructions take effect in program order, which is one legal order. Whether another order is
// legal too, and gives something else, is decided with vector clocks: each pipe counts its
// instructions and knows, for every other pipe, up to which instruction that one has surely
// finished. Flags, barriers and queues pass this knowledge on. Two accesses that conflict without
// such an order are a race, found on the first run.
#pragma once
#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../include/emulator/entry.h"
#include "../include/emulator/machine.h"

namespace emu {

using Time = uint32_t;  // number of an instruction within its pipe, from 1; 0: never

// Agent: a pipe of a core, core * kNumPipes + pipe.
struct Clock {
  Time own[kNumPipes] = {};
  std::vector<Time> others;  // per agent of the launch; empty: nothing known of other cores
};

// A 32-byte block of a core's memory.
struct Block {
  Time write = 0;
  Time read[kNumPipes] = {};
  uint8_t write_pipe = 0;
};

struct Store {
  std::vector<uint8_t> bytes, defined;
  std::vector<Block> blocks;
};

struct Flag {
  bool set = false;
  bool claimed = false;  // AllocEventID or a queue holds the id
  bool of_queue = false;
  Clock clock;
};

struct Slot {
  enum State { kFree, kAllocated, kQueued, kTaken } state = kFree;
  uint32_t offset = 0;
  uint32_t generation = 0;
  int32_t full_event = -1, free_event = -1;
};

struct Queue {
  AscendC::TPosition position;
  AscendC::HardEvent full, free;
  Memory memory;
  size_t depth;
  uint32_t bytes;
  std::vector<Slot> slots;
  std::deque<int16_t> filled;
  size_t cursor = 0;
};

// A 64-byte line of the scalar data cache.
struct Line {
  uint8_t bytes[64];
  uint64_t dirty = 0;  // bit per byte
  int32_t tensor = -1;
  bool stale = false;  // global memory changed after the line was read
};

struct Core {
  int number = 0;  // among all cores of the launch
  int block = 0, sub = 0;
  bool cube = false;

  Time now[kNumPipes] = {};
  Clock clock[kNumPipes];
  uint64_t joined[kNumPipes] = {};  // version of the scalar pipe's knowledge of other cores
  uint64_t version = 0;
  std::vector<const char*> history[kNumPipes];
  Flag flags[kNumPipes][kNumPipes][8];
  std::deque<Clock> arrived[16];  // counters of CrossCoreWaitFlag

  Store stores[kNumMemories];
  uint32_t top[kNumMemories] = {};
  uint32_t num_buffers = 0;
  bool has_pipe = false;
  std::deque<Queue> queues;
  std::unordered_map<uint64_t, Line> cache;
  uint16_t merged[4] = {};

  const char* instruction = "kernel start";
  pipe_t pipe = PIPE_S;
  uint64_t ordinal = 0;

  enum State { kReady, kWaiting, kDone } state = kReady;
  uint16_t waiting_for = 0;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
};

struct Cell {  // one element of a tensor that a kernel may write
  Time write = 0, read = 0;
  uint16_t writer = 0, reader = 0;
};

struct Tensor {
  TensorArgument argument;
  std::vector<Cell> cells;
  std::unordered_map<uint64_t, std::vector<std::pair<uint16_t, Time>>> more_readers;
};

// The cores that have to set a flag, each with the sets it is ahead of the others.
struct Meeting {
  std::vector<int> setters, receivers;
  std::map<int, std::deque<Clock>> waiting;
};

struct World {
  const Launch* launch;
  Report* report;
  std::vector<std::unique_ptr<Core>> cores;
  std::vector<Tensor> tensors;
  std::map<uint64_t, Meeting> meetings;
  // 64-byte lines that a scalar cache has written back: by whom and when.
  std::unordered_map<uint64_t, std::pair<uint16_t, Time>> scalar_lines;
  Core* running = nullptr;
  bool failed = false;
  ucontext_t scheduler;
  void (*kernel)() = nullptr;
  Invoke invoke = nullptr;
};

extern thread_local World* world;

inline Core& core() { return *world->running; }

constexpr const char* kPipeNames[kNumPipes] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
constexpr const char* kMemoryNames[kNumMemories] = {"UB", "L1", "L0A", "L0B", "L0C", "BT", "FB"};
// 910B: UB 192 KiB less 256 bytes and the 8 KiB that Select and other library calls use; L1 less
// 256 bytes.
constexpr uint32_t kCapacity[kNumMemories] = {188160, 524032, 65536, 65536, 131072, 1024, 2048};

inline pipe_t source_of(AscendC::HardEvent event) {
  return static_cast<pipe_t>(static_cast<int>(event) / 16);
}
inline pipe_t target_of(AscendC::HardEvent event) {
  return static_cast<pipe_t>(static_cast<int>(event) % 16);
}

// Clocks (sync.cpp).
void join(Clock& into, const Clock& from);
Clock snapshot(const Core& c, pipe_t pipe);
void raise_flag(AscendC::HardEvent event, int32_t id, bool of_queue);
void lower_flag(AscendC::HardEvent event, int32_t id);
std::string event_name(AscendC::HardEvent event);
// Reports what a finished core or launch left behind (queue.cpp, sync.cpp, global.cpp).
void check_queues_at_end(const Core& c);
void check_flags_at_end(const Core& c);
void check_cache_at_end(const Core& c);

Store& store_of(Core& c, Memory memory);

}  // namespace emu
