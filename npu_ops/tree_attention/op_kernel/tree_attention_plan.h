// SPDX-License-Identifier: Apache-2.0
// Which rows and keys a task of tree_attention covers. Cube and vector cores of a block go through
// the same tasks and tiles, each from what stands in global memory: lengths and masks never pass
// through the host.
#pragma once
#include "../op_host/tree_attention_tiling.h"
#include "kernel_operator.h"

using namespace AscendC;

// Flags between a cube core and its two vector cores.
constexpr uint16_t kTreeScores = 0;   // scores of a tile are in their slot
constexpr uint16_t kTreeWeights = 1;  // both vector cores have written the weights of a tile
constexpr uint16_t kTreeSums = 2;     // weights times values are there

class TreePlan {
 public:
  __aicore__ inline void Init(GM_ADDR seqLens, GM_ADDR treeMask,
                              const TreeAttentionTiling& tiling) {
    this->tiling = tiling;
    lengthGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(seqLens));
    maskGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(treeMask));
  }

  __aicore__ inline int32_t NumTasks() {
    return tiling.requests * tiling.kvHeads * tiling.passes * tiling.splits;
  }

  // Sets everything below for a task.
  __aicore__ inline void Task(int32_t task) {
    split = task % tiling.splits;
    const int32_t pass = task / tiling.splits % tiling.passes;
    kvHead = task / (tiling.splits * tiling.passes) % tiling.kvHeads;
    request = task / (tiling.splits * tiling.passes * tiling.kvHeads);
    prefix = lengthGlobal.GetValue(request);
    treeRows = TreeRows();
    const int32_t first = pass * 2 * tiling.subQueries;
    for (int32_t sub = 0; sub < 2; ++sub) {
      firstQuery[sub] = first + sub * tiling.subQueries;
      const int32_t left = tiling.rows - firstQuery[sub];
      queries[sub] = left < 0 ? 0 : left < tiling.subQueries ? left : tiling.subQueries;
    }
    const int32_t all = (prefix + kTreeColumns - 1) / kTreeColumns;
    const int32_t each = (all + tiling.splits - 1) / tiling.splits;
    firstTile = split * each < all ? split * each : all;
    const int32_t left = all - firstTile;
    prefixTiles = left < each ? left : each;
    // The tree's own keys go to the last split, as a tile of their own.
    const bool hasTree = split == tiling.splits - 1 && treeRows > 0;
    tiles = treeRows == 0 ? 0 : prefixTiles + (hasTree ? 1 : 0);
  }

  __aicore__ inline bool IsTree(int32_t tile) { return tile == prefixTiles; }

  // First key of a tile and how many it has.
  __aicore__ inline int32_t FirstKey(int32_t tile) {
    return IsTree(tile) ? prefix : (firstTile + tile) * kTreeColumns;
  }

  __aicore__ inline int32_t Keys(int32_t tile) {
    if (IsTree(tile)) return treeRows;
    const int32_t left = prefix - FirstKey(tile);
    return left < kTreeColumns ? left : kTreeColumns;
  }

  // Row of a query head in the outputs [B, Q, Hq].
  __aicore__ inline int64_t OutRow(int32_t query) {
    return (static_cast<int64_t>(request) * tiling.rows + query) * tiling.heads +
           kvHead * tiling.group;
  }

  __aicore__ inline bool HasRow(int32_t query) {
    const int64_t first = (static_cast<int64_t>(request) * tiling.rows + query) * tiling.numWords;
    for (int32_t word = 0; word < tiling.numWords; ++word) {
      if (maskGlobal.GetValue(first + word) != 0) return true;
    }
    return false;
  }

  GlobalTensor<int32_t> maskGlobal;
  int32_t request, kvHead, split, prefix, treeRows, firstTile, prefixTiles, tiles;
  int32_t firstQuery[2], queries[2];

 private:
  // Rows up to the last one that sees anything: the cache may end behind them.
  __aicore__ inline int32_t TreeRows() {
    int32_t rows = tiling.rows;
    while (rows > 0 && !HasRow(rows - 1)) --rows;
    return rows;
  }

  GlobalTensor<int32_t> lengthGlobal;
  TreeAttentionTiling tiling;
};
