// SPDX-License-Identifier: Apache-2.0
// Checks the sizes of a pack_tree call and fills its tiling. Plain C++: no CANN, no allocation, no
// device.
#include "pack_tree_tiling.h"

#include <cstdio>

namespace {

bool InRange(const char* name, int64_t value, int64_t lowest, int64_t highest, char* error,
             int32_t errorSize) {
  if (value >= lowest && value <= highest) return true;
  std::snprintf(error, static_cast<size_t>(errorSize),
                "pack_tree: %s must be in %lld..%lld, got %lld", name,
                static_cast<long long>(lowest), static_cast<long long>(highest),
                static_cast<long long>(value));
  return false;
}

}  // namespace

// Returns 0, or 1 with a text in `error` if a size is out of range; nothing may be launched then.
extern "C" int32_t pack_tree_tiling(int64_t numRequests, int64_t numCandidates, int64_t budget,
                                    int64_t maxDepth, PackTreeTiling* tiling, char* error,
                                    int32_t errorSize) {
  // The product of any two sizes fits 32 bits, as the kernel's offsets are.
  const bool fits = InRange("B", numRequests, 1, 65536, error, errorSize) &&
                    InRange("C", numCandidates, 0, kPackTreeMaxCandidates, error, errorSize) &&
                    InRange("n", budget, 1, kPackTreeMaxBudget, error, errorSize) &&
                    InRange("the deepest depth", maxDepth, 1, kPackTreeMaxDepth, error, errorSize);
  if (!fits) return 1;
  tiling->numRequests = static_cast<int32_t>(numRequests);
  tiling->numCandidates = static_cast<int32_t>(numCandidates);
  tiling->budget = static_cast<int32_t>(budget);
  tiling->maxDepth = static_cast<int32_t>(maxDepth);
  tiling->sortLength = numCandidates <= 128 ? 128 : numCandidates <= 512 ? 512 : 1024;
  tiling->numWords = 2 * ((tiling->budget + 1 + 63) / 64);
  return 0;
}
