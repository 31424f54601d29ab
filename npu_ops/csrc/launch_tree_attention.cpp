// SPDX-License-Identifier: Apache-2.0
// Launches of tree_attention's kernels.
#include "compat.h"
#include "launch.h"
#if TREESPARK_ONE_SOURCE
#include "../tree_attention/op_kernel/tree_attention.cpp"
#include "../tree_attention/op_kernel/tree_attention_combine.cpp"
#else
#include "aclrtlaunch_tree_attention.h"
#include "aclrtlaunch_tree_attention_combine.h"
#endif

uint32_t treespark::LaunchTreeAttention(uint32_t blocks, void* stream, Addresses at,
                                        TreeAttentionTiling tiling) {
  return TREESPARK_LAUNCH(tree_attention, blocks, stream, at[0], at[1], at[2], at[3], at[4], at[5],
                          at[6], at[7], at[8], at[9], at[10], TREESPARK_BY_VALUE(tiling));
}

uint32_t treespark::LaunchTreeAttentionCombine(uint32_t blocks, void* stream, Addresses at,
                                               TreeAttentionTiling tiling) {
  return TREESPARK_LAUNCH(tree_attention_combine, blocks, stream, at[0], at[1], at[2], at[3], at[4],
                          TREESPARK_BY_VALUE(tiling));
}
