// SPDX-License-Identifier: Apache-2.0
// What the instructions ask of the emulated core: the border between the templates here, compiled
// with each kernel, and the runtime, compiled once. All of it acts on the core that is running.
#pragma once
#include "types.h"

namespace emu {

enum Memory : uint8_t { kUb, kL1, kL0a, kL0b, kL0c, kBt, kFb, kNumMemories };

// A piece of a core's own memory. `queue` >= 0: it belongs to a TQue and lives until FreeTensor.
struct Local {
  uint32_t offset = 0;
  uint32_t bytes = 0;
  uint32_t generation = 0;
  int16_t queue = -1;
  int16_t slot = -1;
  Memory memory = kUb;
  AscendC::TPosition position = AscendC::TPosition::GM;  // GM: never allocated
};

// A piece of global memory; `tensor` is the argument of the launch it was made from, -1 for none.
struct Global {
  uint8_t* address = nullptr;
  int32_t tensor = -1;
};

// Ends the kernel with an error that names kernel, core, pipe and instruction before this text.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// One instruction enters a pipe. `repeats`: 256-byte repeats of a vector instruction, 0 for others.
void begin(const char* instruction, pipe_t pipe, uint64_t repeats = 0);

// Checks bounds, life time, races and, for a read, initialisation; returns the bytes.
uint8_t* touch(const Local& tensor, uint64_t from, uint64_t bytes, bool write);
// Like a read, but of bytes that may be undefined; `defined_of` says which are, one byte for each.
const uint8_t* peek(const Local& tensor, uint64_t from, uint64_t bytes);
uint8_t* defined_of(const Local& tensor);
// Like a write, but leaves what stands there undefined.
uint8_t* spoil(const Local& tensor, uint64_t from, uint64_t bytes);
void require_aligned(const Local& tensor, const char* operand, uint32_t alignment);
void require_memory(const Local& tensor, const char* operand, Memory memory);

Global global_of(void* address);
uint8_t* touch_global(const Global& global, uint64_t bytes, bool write);
void scalar_load(const Global& global, void* value, uint32_t bytes);
void scalar_store(const Global& global, const void* value, uint32_t bytes);
void clean_cache(const Global& global, bool entire);

bool is_cube();
int64_t block_index();
int64_t block_number();
int64_t sub_block_index();
void declare_kernel_type(KernelType type);

void set_flag(AscendC::HardEvent event, int32_t id);
void wait_flag(AscendC::HardEvent event, int32_t id);
int32_t take_event(AscendC::HardEvent event, bool claim);
void release_event(AscendC::HardEvent event, int32_t id);
void barrier(pipe_t pipe);
void cross_set(uint8_t mode, pipe_t pipe, uint16_t id);
void cross_wait(uint16_t id);

// TPipe and its queues. A queue is known by its number.
void pipe_open();
void pipe_close();
void pipe_reset();
int16_t queue_init(AscendC::TPosition source, AscendC::TPosition target, int32_t depth,
                   uint8_t buffers, uint32_t bytes);
Local buffer_init(AscendC::TPosition position, uint32_t bytes);
Local queue_alloc(int16_t queue);
void queue_enque(int16_t queue, const Local& tensor);
Local queue_deque(int16_t queue);
void queue_free(int16_t queue, const Local& tensor);
bool queue_has_tensor(int16_t queue);
bool queue_has_idle_buffer(int16_t queue);

void count_macs(uint64_t macs);
// Two results of one pipe do not race in the next access: the hardware keeps their order.
void keep_own_order();
// c [m, n] += a [m, k] * b [k, n], row-major.
void matmul(float* c, const float* a, const float* b, uint32_t m, uint32_t n, uint32_t k);
// Result of the last MrgSort: entries taken of each queue.
void set_merged(const uint16_t counts[4]);
void get_merged(uint16_t counts[4]);

}  // namespace emu
