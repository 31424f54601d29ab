// SPDX-License-Identifier: Apache-2.0
// What the host tells the kernel pack_tree, and the limits of both. See README.md for the operator.
#pragma once
#include <cstdint>

constexpr int32_t kPackTreeMaxBudget =
    127;  // n + 1 rows are at most the 128 that tree_attention takes
constexpr int32_t kPackTreeMaxCandidates = 1024;  // three levels of merges over sorted lists of 32
constexpr int32_t kPackTreeMaxDepth = 64;         // one round of the envelope per depth

// B requests, C candidates each, n budget, D deepest depth. Passed by value.
struct PackTreeTiling {
  int32_t numRequests;    // B
  int32_t numCandidates;  // C
  int32_t budget;         // n
  int32_t maxDepth;       // D: depth_bias has D + 1 entries
  int32_t sortLength;     // C rounded up to 128, 512 or 1024
  int32_t numWords;       // W: int32 words of a mask row, 2 * ceil((n + 1) / 64)
};
