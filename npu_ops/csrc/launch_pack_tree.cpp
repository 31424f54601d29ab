// SPDX-License-Identifier: Apache-2.0
// Launch of pack_tree's kernel.
#include "compat.h"
#include "launch.h"
#if TREESPARK_ONE_SOURCE
#include "../pack_tree/op_kernel/pack_tree.cpp"
#else
#include "aclrtlaunch_pack_tree.h"
#endif

uint32_t treespark::LaunchPackTree(uint32_t blocks, void* stream, Addresses at,
                                   PackTreeTiling tiling) {
  return TREESPARK_LAUNCH(pack_tree, blocks, stream, at[0], at[1], at[2], at[3], at[4], at[5],
                          at[6], at[7], at[8], at[9], at[10], TREESPARK_BY_VALUE(tiling));
}
