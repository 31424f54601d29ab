// SPDX-License-Identifier: Apache-2.0
// Runs an emulated kernel on the tensors that a launch names, under the emulator's strict rules.
#pragma once
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "emulator/entry.h"
#include "extents.h"
#include "standin.h"

namespace standin {

struct Named {
  const char* name;
  void* data;
};

// As ACL_ERROR_RT_AICORE_EXCEPTION.
constexpr uint32_t kKernelFailed = 507015;

template <class... Args, class Tiling>
uint32_t Launch(const char* kernel, void (*entry)(Args...), int32_t kind, uint32_t blocks,
                void* stream, std::initializer_list<Named> tensors, const Tiling& tiling) {
  standin_launched(kernel, stream, blocks);
  const Extents extents = ExtentsOf(kernel, tiling, blocks);
  std::vector<emu::TensorArgument> described;
  std::vector<const void*> arguments;
  std::vector<uint64_t> sizes;
  for (const Named& tensor : tensors) {
    const Extent& extent = extents[arguments.size()];
    const uint64_t room = standin_bytes_behind(tensor.data);
    const uint64_t bytes = extent.count ? extent.item * extent.count : room;
    if (room < bytes) {
      standin_failed("a tensor of the launch ends behind the device's memory");
      return kKernelFailed;
    }
    if (tensor.data) {
      described.push_back({static_cast<uint8_t*>(tensor.data), bytes, extent.item, extent.role,
                           tensor.name});
    }
    arguments.push_back(&tensor.data);
    sizes.push_back(sizeof(void*));
  }
  arguments.push_back(&tiling);
  sizes.push_back(sizeof(Tiling));

  std::vector<uint64_t> counters(3 * described.size() + 3);
  emu::Report report = {};
  report.read_bytes = counters.data();
  report.written_bytes = report.read_bytes + described.size();
  report.unwritten_bytes = report.written_bytes + described.size();
  const emu::Launch launch = {kernel,
                              kind,
                              static_cast<int32_t>(blocks),
                              1,
                              static_cast<int32_t>(described.size()),
                              described.data(),
                              arguments.data(),
                              sizes.data(),
                              static_cast<int32_t>(arguments.size()),
                              0};
  if (emu::launch_kernel(entry, launch, report) == 0) return 0;
  standin_failed(report.error);
  return kKernelFailed;
}

}  // namespace standin
