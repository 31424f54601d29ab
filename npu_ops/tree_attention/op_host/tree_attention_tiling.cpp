// SPDX-License-Identifier: Apache-2.0
// Checks the sizes of a tree_attention call and fills its tiling. Plain C++: no CANN, no
// allocation, no device.
#include "tree_attention_tiling.h"

#include <cmath>
#include <cstdio>

namespace {

struct TreeSize {
  const char* name;
  int64_t value, lowest, highest;
};

}  // namespace

// Returns 0, or 1 with a text in `error` if a size is out of range; nothing may be launched then.
// longest: rows of the cache that a request can have, which bounds the splits.
extern "C" int32_t tree_attention_tiling(int64_t requests, int64_t rows, int64_t heads,
                                         int64_t kvHeads, int64_t headDim, int64_t cacheRows,
                                         int64_t blockSize, int64_t maxBlocks, int32_t isHalf,
                                         float scale, int64_t blocks, TreeAttentionTiling* tiling,
                                         char* error, int32_t errorSize) {
  const int64_t group = kvHeads > 0 ? heads / kvHeads : 0;
  const TreeSize sizes[] = {
      {"B", requests, 1, 4096},
      {"Q", rows, 1, kTreeMaxRows},
      {"Hkv", kvHeads, 1, 65535 / 128},
      {"Hq / Hkv", group, 1, kTreeMaxGroup},
      {"Hq", heads, 1, 65535 / 128},
      {"block_size", blockSize, 0, kTreeMaxBlockSize},
      {"the number of cores", blocks, 1, 64},
  };
  for (const TreeSize& size : sizes) {
    if (size.value >= size.lowest && size.value <= size.highest) continue;
    std::snprintf(error, static_cast<size_t>(errorSize),
                  "tree_attention: %s must be in %lld..%lld, got %lld", size.name,
                  static_cast<long long>(size.lowest), static_cast<long long>(size.highest),
                  static_cast<long long>(size.value));
    return 1;
  }
  if (heads % kvHeads || (headDim != 64 && headDim != 128) || blockSize % 16 || !(scale >= 0)) {
    std::snprintf(error, static_cast<size_t>(errorSize),
                  "tree_attention: Hq must be a multiple of Hkv, D 64 or 128, block_size a "
                  "multiple of 16 and scale "
                  "not negative, got %lld, %lld, %lld, %lld and %g",
                  static_cast<long long>(heads), static_cast<long long>(kvHeads),
                  static_cast<long long>(headDim), static_cast<long long>(blockSize),
                  static_cast<double>(scale));
    return 1;
  }
  TreeAttentionTiling& t = *tiling;
  t.requests = static_cast<int32_t>(requests);
  t.rows = static_cast<int32_t>(rows);
  t.heads = static_cast<int32_t>(heads);
  t.kvHeads = static_cast<int32_t>(kvHeads);
  t.headDim = static_cast<int32_t>(headDim);
  t.numWords = 2 * ((t.rows + 63) / 64);
  t.cacheRows = static_cast<int32_t>(cacheRows);
  t.blockSize = static_cast<int32_t>(blockSize);
  t.maxBlocks = static_cast<int32_t>(maxBlocks);
  t.isHalf = isHalf;
  t.group = static_cast<int32_t>(group);
  t.subQueries = kTreeSubRows / t.group;
  t.passes = (t.rows + 2 * t.subQueries - 1) / (2 * t.subQueries);
  // As many as fill the cores, but at least 512 keys each, of the longest request there can be.
  const int64_t tasks = requests * kvHeads * t.passes;
  const int64_t longest = blockSize ? blockSize * maxBlocks : cacheRows;
  const int64_t wanted = (blocks + tasks - 1) / tasks, most = longest / 512 > 1 ? longest / 512 : 1;
  const int64_t splits = wanted < most ? wanted : most;
  t.splits = static_cast<int32_t>(splits < kTreeMaxSplits ? splits : kTreeMaxSplits);
  t.scale = scale > 0 ? scale : 1.0f / std::sqrt(static_cast<float>(headDim));
  return 0;
}
