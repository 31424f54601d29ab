// SPDX-License-Identifier: Apache-2.0
// Roles and sizes of the kernels' tensors, which a launch does not carry: for the emulator's bounds.
// Each is from the comments of the operator's tiling and its README, not from the binding.
#pragma once
#include <string>
#include <vector>

#include "markov_topk/op_host/markov_topk_tiling.h"
#include "pack_tree/op_host/pack_tree_tiling.h"
#include "tree_attention/op_host/tree_attention_tiling.h"

namespace standin {

// As npu_ops/emulator/launch.py numbers them.
enum Role : uint32_t { kIn, kOut, kInOut, kWorkspace };

// count 0: up to the end of the memory that holds the tensor.
struct Extent {
  Role role;
  uint32_t item;
  int64_t count;
};

using Extents = std::vector<Extent>;

inline Extents ExtentsOf(const std::string&, const PackTreeTiling& t, int64_t) {
  const int64_t b = t.numRequests, pool = b * t.numCandidates, rows = b * (t.budget + 1);
  return {{kIn, 4, pool},     {kIn, 4, pool},  {kIn, 4, pool},
          {kIn, 4, b},        {kIn, 4, t.maxDepth + 1},
          {kOut, 4, rows - b}, {kOut, 4, rows}, {kOut, 4, rows},
          {kOut, 4, rows},    {kOut, 4, rows * t.numWords}, {kOut, 4, b}};
}

inline Extents ExtentsOf(const std::string& kernel, const MarkovTopkTiling& t, int64_t blocks) {
  const int64_t rows = t.rows, state = rows * t.usedBlocks, pairs = state * kMarkovList * 2;
  if (kernel == "markov_topk_merge") {
    return {{kIn, 4, pairs},        {kIn, 4, state},        {kIn, 4, state},
            {kOut, 4, rows * t.k}, {kOut, 4, rows * t.k}, {kOut, 4, rows}};
  }
  const uint32_t item = t.baseDtype == kMarkovFloat ? 4 : 2;
  const int64_t ring = blocks * kMarkovSlots * t.rowTile * t.tileColumns;
  return {{kIn, item, int64_t{t.baseRows} * t.vocab},
          {kIn, 4, rows},
          {kIn, 2, rows * t.rank},
          {kIn, 2, int64_t{t.vocab} * t.rank},
          {kWorkspace, 4, ring},
          {kWorkspace, 4, pairs},
          {kWorkspace, 4, state},
          {kWorkspace, 4, state}};
}

inline Extents ExtentsOf(const std::string& kernel, const TreeAttentionTiling& t, int64_t blocks) {
  const int64_t rows = int64_t{t.requests} * t.rows, heads = rows * t.heads, dim = t.headDim;
  const int64_t words = rows * t.numWords, tile = blocks * 2 * kTreeSubRows;
  const Extent out = {kOut, 2, heads * dim}, lse = {kOut, 4, heads};
  if (kernel == "tree_attention_combine") {
    return {{kIn, 4, heads * t.splits * dim}, {kIn, 4, heads * t.splits}, {kIn, 4, words}, out,
            lse};
  }
  const int64_t cache = t.blockSize ? 0 : int64_t{t.requests} * t.cacheRows * t.kvHeads * dim;
  return {{kIn, 2, heads * dim},
          {kIn, 2, cache},
          {kIn, 2, cache},
          {kIn, 4, t.requests},
          {kIn, 4, words},
          {kIn, 4, int64_t{t.requests} * t.maxBlocks},
          {kWorkspace, 4, 2 * tile * kTreeColumns},
          {kWorkspace, 2, tile * kTreeColumns},
          {kWorkspace, 4, tile * dim},
          t.splits == 1 ? out : Extent{kWorkspace, 4, heads * t.splits * dim},
          t.splits == 1 ? lse : Extent{kWorkspace, 4, heads * t.splits}};
}

}  // namespace standin
