// SPDX-License-Identifier: Apache-2.0
// The operators on an NPU: checks, tiling, results and launches. Schemas, references and gradients
// are npu_ops/registry.py's; here only the dispatch key PrivateUse1 is registered.
//
// Nothing waits for the device and nothing is copied to it: a tiling goes with the launch, by value.
// Results and workspaces come from torch's allocator, and everything is enqueued on the current
// stream, so a captured graph replays as it is.
#include <ATen/ATen.h>
#include <acl/acl_rt.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <tuple>
#include <utility>

#include "checks.h"
#include "launch.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace treespark {
namespace {

// As op_host/*_tiling.cpp have them.
constexpr int64_t kMaxBlocks = 64;
constexpr int32_t kErrorSize = 320;

// Cube or vector cores of the device.
int64_t CoresOf(const at::Device& device, aclDeviceInfo kind) {
  int64_t cores = 0;
  const aclError error =
      aclGetDeviceCapability(static_cast<uint32_t>(device.index()), kind, &cores);
  TORCH_CHECK(error == ACL_SUCCESS && cores > 0, "cannot read the number of cores of ",
              device.str(), ": aclGetDeviceCapability returned ", error);
  return std::min(cores, kMaxBlocks);
}

int64_t CubeCores(const at::Device& device) {
  return CoresOf(device, ACL_DEVICE_INFO_AI_CORE_NUM);
}

int64_t VectorCores(const at::Device& device) {
  return CoresOf(device, ACL_DEVICE_INFO_VECTOR_CORE_NUM);
}

uint8_t* AddressOf(const Tensor& tensor) {
  return static_cast<uint8_t*>(const_cast<void*>(tensor.const_data_ptr()));
}

template <class... Tensors>
std::array<uint8_t*, sizeof...(Tensors)> AddressesOf(const Tensors&... tensors) {
  return {AddressOf(tensors)...};
}

// Enqueues a launch on the current stream. The tensors may be released before it runs: the stream
// uses their memory in order.
template <class Tiling, size_t kCount>
void Enqueue(const char* name, uint32_t (*launch)(uint32_t, void*, Addresses, Tiling),
             int64_t blocks, const std::array<uint8_t*, kCount>& at, const Tiling& tiling) {
  void* stream = c10_npu::getCurrentNPUStream().stream(false);
  at_npu::native::OpCommand::RunOpApi(name, [=]() -> int {
    return static_cast<int>(launch(static_cast<uint32_t>(blocks), stream, at.data(), tiling));
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> PackTree(
    const Tensor& scores, const Tensor& parents, const Tensor& depths, const Tensor& counts,
    const Tensor& depthBias, int64_t n) {
  constexpr const char* kOp = "pack_tree";
  CheckShape(kOp, "scores", scores, {{"B"}, {"C"}});
  const int64_t requests = scores.size(0), candidates = scores.size(1);
  CheckShape(kOp, "parents", parents, {{"B", requests}, {"C", candidates}});
  CheckShape(kOp, "depths", depths, {{"B", requests}, {"C", candidates}});
  CheckShape(kOp, "counts", counts, {{"B", requests}});
  CheckShape(kOp, "depth_bias", depthBias, {{"D+1"}});
  CheckDtype(kOp, "scores", scores, {at::kFloat});
  CheckDtype(kOp, "parents", parents, {at::kInt});
  CheckDtype(kOp, "depths", depths, {at::kInt});
  CheckDtype(kOp, "counts", counts, {at::kInt});
  CheckDtype(kOp, "depth_bias", depthBias, {at::kFloat});
  CheckDevice(kOp, "scores", scores.device(),
              {{"parents", parents},
               {"depths", depths},
               {"counts", counts},
               {"depth_bias", depthBias}});
  CheckRange(kOp, "n", n, 1, kPackTreeMaxBudget);
  CheckRange(kOp, "C", candidates, 0, kPackTreeMaxCandidates);
  CheckRange(kOp, "the deepest depth", depthBias.numel() - 1, 1, kPackTreeMaxDepth);

  const c10::OptionalDeviceGuard guard(scores.device());
  const int64_t words = 2 * ((n + 64) / 64);
  const auto options = scores.options().dtype(at::kInt);
  const Tensor index = at::empty({requests, n}, options);
  const Tensor parent = at::empty({requests, n + 1}, options);
  const Tensor depth = at::empty({requests, n + 1}, options);
  const Tensor position = at::empty({requests, n + 1}, options);
  const Tensor mask = at::empty({requests, n + 1, words}, options);
  const Tensor count = at::empty({requests}, options);
  if (requests > 0) {
    PackTreeTiling tiling;
    char error[kErrorSize];
    const int32_t refused = pack_tree_tiling(requests, candidates, n, depthBias.numel() - 1,
                                             &tiling, error, kErrorSize);
    TORCH_CHECK(!refused, error);
    Enqueue(kOp, LaunchPackTree, std::min(requests, VectorCores(scores.device())),
            AddressesOf(scores.contiguous(), parents.contiguous(), depths.contiguous(),
                        counts.contiguous(), depthBias.contiguous(), index, parent, depth,
                        position, mask, count),
            tiling);
  }
  return {index, parent, depth, position, mask, count};
}

// Kernels of this library are for one architecture, that of Ascend 910B. On another the launch
// functions of CANN would print a line and report success.
std::string RefusalOf(const char* soc) {
  const std::string family = "Ascend910B", name = soc ? soc : "an unknown SOC";
  const bool is910b = name.compare(0, family.size(), family) == 0 &&
                      name.size() > family.size() &&
                      std::isdigit(static_cast<unsigned char>(name[family.size()]));
  return is910b ? "" : "built for " TREESPARK_SOC ", the device is " + name;
}

const std::string& Refusal() {
  static const std::string refusal = RefusalOf(aclrtGetSocName());
  return refusal;
}

}  // namespace
}  // namespace treespark

// Empty, or why this library leaves the operators as they are.
extern "C" __attribute__((visibility("default"))) const char* treespark_ops_refusal() {
  return treespark::Refusal().c_str();
}

TORCH_LIBRARY_IMPL(treespark, PrivateUse1, m) {
  if (!treespark::Refusal().empty()) return;
  m.impl("pack_tree", TORCH_FN(treespark::PackTree));
}
