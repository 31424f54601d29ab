// SPDX-License-Identifier: Apache-2.0
// Makes a kernel callable from Python: EMULATOR_ENTRY(name) after the kernel's definition.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace emu {

// Both structures are mirrored in launch.py.
struct TensorArgument {
  uint8_t* data;
  uint64_t bytes;
  uint32_t item_bytes;
  uint32_t role;  // 0 in, 1 out, 2 inout, 3 workspace
  const char* name;
};

struct Launch {
  const char* kernel;
  int32_t kind;  // KernelType
  int32_t blocks;
  int32_t strict;
  int32_t num_tensors;
  const TensorArgument* tensors;
  const void* const* arguments;
  const uint64_t* argument_bytes;
  int32_t num_arguments;
  int32_t backwards;  // last core first
};

struct Report {
  char error[2048];
  uint64_t instructions[8];  // per pipe
  uint64_t peak[8];          // bytes allocated per memory, the largest of all cores
  uint64_t vector_repeats;
  uint64_t macs;
  uint64_t* read_bytes;  // per tensor
  uint64_t* written_bytes;
  uint64_t* unwritten_bytes;
};

using Invoke = void (*)(void (*kernel)(), const void* const* arguments);
int run(void (*kernel)(), Invoke invoke, const uint64_t* sizes, int count, const Launch& launch,
        Report& report);

template <class... Args, size_t... I>
inline void call(void (*kernel)(Args...), const void* const* arguments, std::index_sequence<I...>) {
  kernel(*static_cast<const Args*>(arguments[I])...);
}

template <class... Args>
inline int launch_kernel(void (*kernel)(Args...), const Launch& launch, Report& report) {
  const uint64_t sizes[] = {sizeof(Args)...};
  const Invoke invoke = [](void (*erased)(), const void* const* arguments) {
    call(reinterpret_cast<void (*)(Args...)>(erased), arguments,
         std::index_sequence_for<Args...>());
  };
  return run(reinterpret_cast<void (*)()>(kernel), invoke, sizes, sizeof...(Args), launch, report);
}

}  // namespace emu

#define EMULATOR_ENTRY(name)                                                                      \
  extern "C" __attribute__((visibility("default"))) int emu_run_##name(const emu::Launch* launch, \
                                                                       emu::Report* report) {     \
    return emu::launch_kernel(&name, *launch, *report);                                           \
  }
