// SPDX-License-Identifier: Apache-2.0
// The operators on an NPU: checks, tiling, results and launches. Schemas, references and gradients
// are npu_ops/registry.py's; here only the dispatch key PrivateUse1 is registered.
//
// Nothing waits for the device and nothing is copied to it: tilings go with the launches, by value.
// Results and workspaces come from torch's allocator, and everything is enqueued on the current
// stream, so a captured graph replays as it is.
#include <ATen/ATen.h>
#include <acl/acl_rt.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "contracts.h"
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
  if (!tensor.defined()) return nullptr;
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
  CheckPackTree(scores, parents, depths, counts, depthBias, n);
  const c10::OptionalDeviceGuard guard(scores.device());
  const int64_t requests = scores.size(0), maxDepth = depthBias.numel() - 1;
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
    const int32_t refused =
        pack_tree_tiling(requests, scores.size(1), n, maxDepth, &tiling, error, kErrorSize);
    TORCH_CHECK(!refused, error);
    Enqueue("pack_tree", LaunchPackTree, std::min(requests, VectorCores(scores.device())),
            AddressesOf(scores.contiguous(), parents.contiguous(), depths.contiguous(),
                        counts.contiguous(), depthBias.contiguous(), index, parent, depth,
                        position, mask, count),
            tiling);
  }
  return {index, parent, depth, position, mask, count};
}

MarkovDtype MarkovDtypeOf(const Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kFloat ? kMarkovFloat : type == at::kHalf ? kMarkovHalf : kMarkovBfloat16;
}

std::tuple<Tensor, Tensor, Tensor> MarkovTopk(const Tensor& baseLogits, const Tensor& baseRow,
                                              const Tensor& latent, const Tensor& w2, int64_t k,
                                              double invTemperature, int64_t vocabSize) {
  const int64_t numTokens =
      CheckMarkovTopk(baseLogits, baseRow, latent, w2, k, invTemperature, vocabSize);
  const at::Device device = baseLogits.device();
  const c10::OptionalDeviceGuard guard(device);
  const auto floats = latent.options().dtype(at::kFloat);
  const int64_t rows = latent.size(0);
  const Tensor values = at::empty({rows, k}, floats);
  const Tensor indices = at::empty({rows, k}, floats.dtype(at::kInt));
  const Tensor lse = at::empty({rows}, floats);
  if (rows == 0) return {values, indices, lse};

  const int64_t blocks = CubeCores(device);
  MarkovTopkTiling tiling;
  char error[kErrorSize];
  const int32_t refused = markov_topk_tiling(
      rows, baseLogits.size(0), baseLogits.size(1), numTokens, latent.size(1), k,
      MarkovDtypeOf(baseLogits), MarkovDtypeOf(latent), static_cast<float>(invTemperature), blocks,
      &tiling, error, kErrorSize);
  TORCH_CHECK(!refused, error);
  const int64_t used = tiling.usedBlocks;
  const Tensor ring =
      at::empty({blocks, kMarkovSlots, tiling.rowTile, tiling.tileColumns}, floats);
  const Tensor lists = at::empty({used, rows, kMarkovList, 2}, floats);
  const Tensor maxima = at::empty({rows, used}, floats);
  const Tensor sums = at::empty({rows, used}, floats);
  Enqueue("markov_topk", LaunchMarkovTopk, blocks,
          AddressesOf(baseLogits.contiguous(), baseRow.contiguous(), latent.contiguous(), w2, ring,
                      lists, maxima, sums),
          tiling);
  Enqueue("markov_topk_merge", LaunchMarkovTopkMerge, VectorCores(device),
          AddressesOf(lists, maxima, sums, values, indices, lse), tiling);
  return {values, indices, lse};
}

std::tuple<Tensor, Tensor> TreeAttention(const Tensor& query, const Tensor& key,
                                         const Tensor& value, const Tensor& seqLens,
                                         const Tensor& treeMask,
                                         const std::optional<Tensor>& blockTable, double scale,
                                         int64_t blockSize) {
  const Tensor table = blockTable.value_or(Tensor());
  CheckTreeAttention(query, key, value, seqLens, treeMask, table, scale, blockSize);
  const at::Device device = query.device();
  const c10::OptionalDeviceGuard guard(device);
  const int64_t requests = query.size(0), rows = query.size(1), heads = query.size(2);
  const int64_t dim = query.size(3);
  const auto halves = query.options(), floats = halves.dtype(at::kFloat);
  const Tensor out = at::empty({requests, rows, heads, dim}, halves);
  const Tensor lse = at::empty({requests, rows, heads}, floats);
  if (requests == 0) return {out, lse};

  const int64_t blocks = CubeCores(device);
  TreeAttentionTiling tiling;
  char error[kErrorSize];
  const int32_t refused = tree_attention_tiling(
      requests, rows, heads, key.size(2), dim, key.size(1), blockSize,
      table.defined() ? table.size(1) : 0, query.scalar_type() == at::kHalf,
      static_cast<float>(scale), blocks, &tiling, error, kErrorSize);
  TORCH_CHECK(!refused, error);
  const int64_t splits = tiling.splits, outRows = requests * rows * heads;
  const Tensor scores = at::empty({blocks, 2, 2, kTreeSubRows, kTreeColumns}, floats);
  const Tensor weights = at::empty({blocks, 2, kTreeSubRows, kTreeColumns}, halves);
  const Tensor sums = at::empty({blocks, 2, kTreeSubRows, dim}, floats);
  // With one split the first kernel writes the results.
  const Tensor parts = splits == 1 ? out : at::empty({outRows, splits, dim}, floats);
  const Tensor lses = splits == 1 ? lse : at::empty({outRows, splits}, floats);
  const Tensor mask = treeMask.contiguous();
  Enqueue("tree_attention", LaunchTreeAttention, blocks,
          AddressesOf(query.contiguous(), key.contiguous(), value.contiguous(),
                      seqLens.contiguous(), mask, table.defined() ? table.contiguous() : table,
                      scores, weights, sums, parts, lses),
          tiling);
  if (splits > 1) {
    Enqueue("tree_attention_combine", LaunchTreeAttentionCombine, VectorCores(device),
            AddressesOf(parts, lses, mask, out, lse), tiling);
  }
  return {out, lse};
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
  m.impl("markov_topk", TORCH_FN(treespark::MarkovTopk));
  m.impl("pack_tree", TORCH_FN(treespark::PackTree));
  m.impl("tree_attention", TORCH_FN(treespark::TreeAttention));
}
