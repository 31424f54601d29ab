// SPDX-License-Identifier: Apache-2.0
// Launches of markov_topk's kernels.
#include "compat.h"
#include "launch.h"
#if TREESPARK_ONE_SOURCE
#include "../markov_topk/op_kernel/markov_topk.cpp"
#include "../markov_topk/op_kernel/markov_topk_merge.cpp"
#else
#include "aclrtlaunch_markov_topk.h"
#include "aclrtlaunch_markov_topk_merge.h"
#endif

uint32_t treespark::LaunchMarkovTopk(uint32_t blocks, void* stream, Addresses at,
                                     MarkovTopkTiling tiling) {
  return TREESPARK_LAUNCH(markov_topk, blocks, stream, at[0], at[1], at[2], at[3], at[4], at[5],
                          at[6], at[7], TREESPARK_BY_VALUE(tiling));
}

uint32_t treespark::LaunchMarkovTopkMerge(uint32_t blocks, void* stream, Addresses at,
                                          MarkovTopkTiling tiling) {
  return TREESPARK_LAUNCH(markov_topk_merge, blocks, stream, at[0], at[1], at[2], at[3], at[4],
                          at[5], TREESPARK_BY_VALUE(tiling));
}
