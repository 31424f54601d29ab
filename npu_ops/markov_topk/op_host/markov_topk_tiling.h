// SPDX-License-Identifier: Apache-2.0
// What the host tells the kernels of markov_topk, and the limits of all. See README.md for the
// operator.
#pragma once
#include <cstdint>

constexpr int32_t kMarkovMaxK = 32;
constexpr int32_t kMarkovMaxRank = 512;
constexpr int32_t kMarkovRankStep = 16;  // a fractal
constexpr int32_t kMarkovMaxRows = 4096;
constexpr int32_t kMarkovSlots = 2;  // products between a cube core and its vector cores
constexpr int32_t kMarkovList = 32;  // pairs of a running list, of which k count
constexpr int32_t kMarkovMaxBlocks = 64;

enum MarkovDtype : int32_t { kMarkovFloat = 0, kMarkovHalf = 1, kMarkovBfloat16 = 2 };

// Passed by value. Workspaces in elements:
//   ring    [blocks, kMarkovSlots, rowTile, tileColumns] float
//   lists   [usedBlocks, rows, kMarkovList, 2] float, pairs of value and the bits of a token
//   maxima  [rows, usedBlocks] float; sums the same
struct MarkovTopkTiling {
  int32_t rows;       // R
  int32_t baseRows;   // R0
  int32_t vocab;      // V, length of a row of base_logits
  int32_t numTokens;  // columns that count, at most V
  int32_t rank;       // r
  int32_t k;
  int32_t baseDtype;     // MarkovDtype
  int32_t latentDtype;   // kMarkovHalf or kMarkovBfloat16
  int32_t rowTile;       // rows of a product, at most 128
  int32_t tileColumns;   // columns of a product, 128 or 256
  int32_t sliceColumns;  // columns in half of L0B
  int32_t numTiles;
  int32_t tilesPerBlock;
  int32_t usedBlocks;  // blocks that have tiles
  float invTemperature;
};
