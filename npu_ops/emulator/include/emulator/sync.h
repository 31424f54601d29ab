// SPDX-License-Identifier: Apache-2.0
// Where a core stands in the launch, flags between its pipes, barriers, and flags between cores.
#pragma once
#include "machine.h"

// Written as in AscendC: `if ASCEND_IS_AIV { ... }`.
#define ASCEND_IS_AIC (emu::is_cube())
#define ASCEND_IS_AIV (!emu::is_cube())
#define KERNEL_TASK_TYPE_DEFAULT(type) emu::declare_kernel_type(type)

namespace AscendC {

using TEventID = int8_t;

// Mixed kernels, one cube core and two vector cores a block: cube cores count 0..n-1, vector cores
// 0..2n-1.
inline int64_t GetBlockIdx() { return emu::block_index(); }
inline int64_t GetBlockNum() { return emu::block_number(); }
inline int64_t GetSubBlockIdx() { return emu::sub_block_index(); }

template <HardEvent event>
inline void SetFlag(int32_t eventID) {
  emu::set_flag(event, eventID);
}

template <HardEvent event>
inline void WaitFlag(int32_t eventID) {
  emu::wait_flag(event, eventID);
}

template <pipe_t pipe>
inline void PipeBarrier() {
  emu::barrier(pipe);
}

template <uint8_t modeId, pipe_t pipe>
inline void CrossCoreSetFlag(uint16_t flagId) {
  static_assert(pipe != PIPE_ALL && pipe != PIPE_S,
                "CrossCoreSetFlag: PIPE_ALL and PIPE_S are not allowed");
  static_assert(modeId <= 2, "CrossCoreSetFlag: 910B has modes 0, 1 and 2");
  emu::cross_set(modeId, pipe, flagId);
}

template <uint8_t modeId = 0, pipe_t pipe = PIPE_S>
inline void CrossCoreWaitFlag(uint16_t flagId) {
  emu::cross_wait(flagId);
}

}  // namespace AscendC
