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
#include <optional>
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

MarkovDtype MarkovDtypeOf(const Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kFloat ? kMarkovFloat : type == at::kHalf ? kMarkovHalf : kMarkovBfloat16;
}

std::tuple<Tensor, Tensor, Tensor> MarkovTopk(const Tensor& baseLogits, const Tensor& baseRow,
                                              const Tensor& latent, const Tensor& w2, int64_t k,
                                              double invTemperature, int64_t vocabSize) {
  constexpr const char* kOp = "markov_topk";
  CheckShape(kOp, "base_logits", baseLogits, {{"R0"}, {"V"}});
  CheckShape(kOp, "base_row", baseRow, {{"R"}});
  const int64_t rows = baseRow.size(0), vocab = baseLogits.size(1);
  CheckShape(kOp, "latent", latent, {{"R", rows}, {"r"}});
  const int64_t rank = latent.size(1);
  CheckShape(kOp, "w2", w2, {{"V", vocab}, {"r", rank}});
  CheckDtype(kOp, "base_logits", baseLogits, {at::kBFloat16, at::kHalf, at::kFloat});
  CheckDtype(kOp, "base_row", baseRow, {at::kInt});
  CheckDtype(kOp, "latent", latent, {at::kBFloat16, at::kHalf});
  CheckDtype(kOp, "w2", w2, {latent.scalar_type()});
  const at::Device device = baseLogits.device();
  CheckDevice(kOp, "base_logits", device,
              {{"base_row", baseRow}, {"latent", latent}, {"w2", w2}});
  CheckContiguous(kOp, "w2", w2);
  const int64_t numTokens = vocabSize == -1 ? vocab : vocabSize;
  CheckRange(kOp, "R", rows, 0, kMarkovMaxRows);
  CheckRange(kOp, "R0", baseLogits.size(0), 1, kMarkovMaxRows);
  CheckRange(kOp, "vocab_size", numTokens, 1, vocab);
  CheckRange(kOp, "r", rank, kMarkovRankStep, kMarkovMaxRank);
  CheckRange(kOp, "k", k, 1, std::min<int64_t>(kMarkovMaxK, numTokens));
  if (rank % kMarkovRankStep) {
    Refuse(kOp, c10::str("r must be a multiple of ", kMarkovRankStep), rank);
  }
  if (!(invTemperature > 0)) Refuse(kOp, "inv_temperature must be positive", invTemperature);

  const c10::OptionalDeviceGuard guard(device);
  const auto floats = latent.options().dtype(at::kFloat);
  const Tensor values = at::empty({rows, k}, floats);
  const Tensor indices = at::empty({rows, k}, floats.dtype(at::kInt));
  const Tensor lse = at::empty({rows}, floats);
  if (rows == 0) return {values, indices, lse};

  const int64_t blocks = CubeCores(device);
  MarkovTopkTiling tiling;
  char error[kErrorSize];
  const int32_t refused = markov_topk_tiling(
      rows, baseLogits.size(0), vocab, numTokens, rank, k, MarkovDtypeOf(baseLogits),
      MarkovDtypeOf(latent), static_cast<float>(invTemperature), blocks, &tiling, error,
      kErrorSize);
  TORCH_CHECK(!refused, error);
  const int64_t used = tiling.usedBlocks;
  const Tensor ring =
      at::empty({blocks, kMarkovSlots, tiling.rowTile, tiling.tileColumns}, floats);
  const Tensor lists = at::empty({used, rows, kMarkovList, 2}, floats);
  const Tensor maxima = at::empty({rows, used}, floats);
  const Tensor sums = at::empty({rows, used}, floats);
  Enqueue(kOp, LaunchMarkovTopk, blocks,
          AddressesOf(baseLogits.contiguous(), baseRow.contiguous(), latent.contiguous(), w2, ring,
                      lists, maxima, sums),
          tiling);
  Enqueue("markov_topk_merge", LaunchMarkovTopkMerge, VectorCores(device),
          AddressesOf(lists, maxima, sums, values, indices, lse), tiling);
  return {values, indices, lse};
}

void CheckTreeAttention(const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& seqLens, const Tensor& treeMask, const Tensor& blockTable,
                        double scale, int64_t blockSize) {
  constexpr const char* kOp = "tree_attention";
  CheckShape(kOp, "query", query, {{"B"}, {"Q"}, {"Hq"}, {"D"}});
  const int64_t requests = query.size(0), rows = query.size(1), dim = query.size(3);
  if (blockSize) {
    CheckShape(kOp, "key", key, {{"P"}, {"block_size", blockSize}, {"Hkv"}, {"D", dim}});
  } else {
    CheckShape(kOp, "key", key, {{"B", requests}, {"S"}, {"Hkv"}, {"D", dim}});
  }
  if (value.sizes() != key.sizes()) {
    Refuse(kOp, c10::str("value must have the shape of key, ", key.sizes()), value.sizes());
  }
  CheckShape(kOp, "seq_lens", seqLens, {{"B", requests}});
  CheckShape(kOp, "tree_mask", treeMask,
             {{"B", requests}, {"Q", rows}, {"W", 2 * ((rows + 63) / 64)}});
  if (blockTable.defined() != (blockSize != 0)) {
    Refuse(kOp, c10::str("block_table must be given if and only if block_size ", blockSize, " > 0"),
           blockTable.defined() ? "one" : "none");
  }
  if (blockTable.defined()) {
    CheckShape(kOp, "block_table", blockTable, {{"B", requests}, {"M"}});
    if (blockSize % kTreeBlockStep || blockSize <= 0 || blockSize > kTreeMaxBlockSize) {
      const std::string limits = c10::str(kTreeBlockStep, "..", kTreeMaxBlockSize);
      Refuse(kOp, c10::str("block_size must be a multiple of ", kTreeBlockStep, " in ", limits),
             blockSize);
    }
  }
  CheckDtype(kOp, "query", query, {at::kBFloat16, at::kHalf});
  CheckDtype(kOp, "key", key, {query.scalar_type()});
  CheckDtype(kOp, "value", value, {query.scalar_type()});
  CheckDtype(kOp, "seq_lens", seqLens, {at::kInt});
  CheckDtype(kOp, "tree_mask", treeMask, {at::kInt});
  if (blockTable.defined()) CheckDtype(kOp, "block_table", blockTable, {at::kInt});
  CheckDevice(kOp, "query", query.device(),
              {{"key", key},
               {"value", value},
               {"seq_lens", seqLens},
               {"tree_mask", treeMask},
               {"block_table", blockTable}});
  if (dim != 64 && dim != 128) Refuse(kOp, "D must be 64 or 128", dim);
  const int64_t heads = query.size(2), kvHeads = key.size(2);
  if (kvHeads == 0 || heads % kvHeads) {
    Refuse(kOp, c10::str("Hq must be a multiple of Hkv=", kvHeads), heads);
  }
  CheckRange(kOp, "Q", rows, 1, kTreeMaxRows);
  if (!(scale >= 0)) Refuse(kOp, "scale must not be negative", scale);
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
