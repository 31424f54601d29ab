// SPDX-License-Identifier: Apache-2.0
// Checks the sizes of a markov_topk call and fills its tiling. Plain C++: no CANN, no allocation,
// no device.
#include "markov_topk_tiling.h"

#include <cstdio>

namespace {

struct MarkovSize {
  const char* name;
  int64_t value, lowest, highest;
};

int64_t MarkovCeil(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

}  // namespace

// Returns 0, or 1 with a text in `error` if a size is out of range; nothing may be launched then.
extern "C" int32_t markov_topk_tiling(int64_t rows, int64_t baseRows, int64_t vocab,
                                      int64_t numTokens, int64_t rank, int64_t k, int32_t baseDtype,
                                      int32_t latentDtype, float invTemperature, int64_t blocks,
                                      MarkovTopkTiling* tiling, char* error, int32_t errorSize) {
  const MarkovSize sizes[] = {
      {"R", rows, 1, kMarkovMaxRows},
      {"R0", baseRows, 1, kMarkovMaxRows},
      {"V", vocab, 1, 1 << 20},
      {"vocab_size", numTokens, 1, vocab},
      {"r", rank, 16, kMarkovMaxRank},
      {"k", k, 1, numTokens < kMarkovMaxK ? numTokens : kMarkovMaxK},
      {"the number of cores", blocks, 1, kMarkovMaxBlocks},
  };
  for (const MarkovSize& size : sizes) {
    if (size.value >= size.lowest && size.value <= size.highest) continue;
    std::snprintf(error, static_cast<size_t>(errorSize),
                  "markov_topk: %s must be in %lld..%lld, got %lld", size.name,
                  static_cast<long long>(size.lowest), static_cast<long long>(size.highest),
                  static_cast<long long>(size.value));
    return 1;
  }
  if (rank % 16 || !(invTemperature > 0)) {
    std::snprintf(
        error, static_cast<size_t>(errorSize),
        "markov_topk: r must be a multiple of 16 and inv_temperature positive, got %lld and %g",
        static_cast<long long>(rank), static_cast<double>(invTemperature));
    return 1;
  }
  MarkovTopkTiling& t = *tiling;
  t.rows = static_cast<int32_t>(rows);
  t.baseRows = static_cast<int32_t>(baseRows);
  t.vocab = static_cast<int32_t>(vocab);
  t.numTokens = static_cast<int32_t>(numTokens);
  t.rank = static_cast<int32_t>(rank);
  t.k = static_cast<int32_t>(k);
  t.baseDtype = baseDtype;
  t.latentDtype = latentDtype;
  t.invTemperature = invTemperature;
  // L0A holds the latents of a row tile: 64 KiB.
  const int32_t mostRows = t.rank <= 256 ? 128 : 64;
  t.rowTile = t.rows < mostRows ? t.rows : mostRows;
  // L0C holds two products, L1 two tiles of w2 of at most 128 KiB each.
  t.tileColumns = t.rowTile <= 64 && t.rank <= 256 ? 256 : 128;
  // Half of L0B, 32 KiB: sliceColumns * r elements of 2 bytes.
  const int32_t slice = 16384 / t.rank / 16 * 16;
  t.sliceColumns = slice < 64 ? slice : 64;
  t.numTiles = static_cast<int32_t>(MarkovCeil(numTokens, t.tileColumns));
  t.tilesPerBlock = static_cast<int32_t>(MarkovCeil(t.numTiles, blocks));
  t.usedBlocks = static_cast<int32_t>(MarkovCeil(t.numTiles, t.tilesPerBlock));
  return 0;
}
