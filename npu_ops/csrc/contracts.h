// SPDX-License-Identifier: Apache-2.0
// The operators' contracts as far as shapes, dtypes and numbers say: the checks of contract.py of
// each operator, in the same order and the same words. Only the dtypes are fewer, those of the
// kernels.
#pragma once
#include <algorithm>
#include <string>

#include "checks.h"
#include "launch.h"

namespace treespark {

// Returns the size of the vocabulary.
inline int64_t CheckMarkovTopk(const Tensor& baseLogits, const Tensor& baseRow,
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
  CheckDevice(kOp, "base_logits", baseLogits.device(),
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
  if (!(invTemperature > 0)) {
    Refuse(kOp, "inv_temperature must be positive", Printed(invTemperature));
  }
  return numTokens;
}

inline void CheckPackTree(const Tensor& scores, const Tensor& parents, const Tensor& depths,
                          const Tensor& counts, const Tensor& depthBias, int64_t n) {
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
}

inline void CheckTreeAttention(const Tensor& query, const Tensor& key, const Tensor& value,
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
  if (!(scale >= 0)) Refuse(kOp, "scale must not be negative", Printed(scale));
}

}  // namespace treespark
