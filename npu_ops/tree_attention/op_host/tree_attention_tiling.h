// SPDX-License-Identifier: Apache-2.0
// What the host tells the kernels of tree_attention, and the limits of all. See README.md for the
// operator.
#pragma once
#include <cstdint>

constexpr int32_t kTreeMaxRows = 128;  // Q: four mask words
constexpr int32_t kTreeMaxGroup = 80;  // query heads of a key/value head
constexpr int32_t kTreeSubRows = 80;   // rows of a sub-tile, one for each vector core of a block
constexpr int32_t kTreeColumns = 128;  // keys of a tile
constexpr int32_t kTreeMaxSplits = 64;
constexpr int32_t kTreeMaxBlockSize = 256;  // rows of a block of a paged cache,
constexpr int32_t kTreeBlockStep = 16;      // a multiple of these
constexpr int32_t kTreeMaxWords = 4;

// Passed by value. Workspaces in elements:
//   scores  [blocks, 2, 2, kTreeSubRows, kTreeColumns] float: slot, sub-tile
//   weights [blocks, 2, kTreeSubRows, kTreeColumns] of the query's type
//   sums    [blocks, 2, kTreeSubRows, D] float
//   parts   [B * Q * Hq, splits, D] float; lses [B * Q * Hq, splits] float; none with one split,
//           where the first kernel writes the results
struct TreeAttentionTiling {
  int32_t requests;    // B
  int32_t rows;        // Q
  int32_t heads;       // Hq
  int32_t kvHeads;     // Hkv
  int32_t headDim;     // D
  int32_t numWords;    // W
  int32_t cacheRows;   // S of a contiguous cache
  int32_t blockSize;   // 0: contiguous
  int32_t maxBlocks;   // columns of block_table
  int32_t isHalf;      // 1: half, 0: bfloat16
  int32_t group;       // Hq / Hkv
  int32_t subQueries;  // tree rows of a sub-tile: kTreeSubRows / group
  int32_t passes;      // tasks that the tree rows of a request are cut into
  int32_t splits;      // tasks that the keys of a request are cut into
  float scale;
};
