// SPDX-License-Identifier: Apache-2.0
// Entry of tree_attention's second kernel: the combination of splits.
#include "compat.h"
#include "tree_attention_combine.h"

template <typename T>
__aicore__ inline void RunTreeCombine(GM_ADDR parts, GM_ADDR lses, GM_ADDR treeMask, GM_ADDR out,
                                      GM_ADDR lse, const TreeAttentionTiling& tiling) {
  TreeCombine<T> combine;
  combine.Init(parts, lses, treeMask, out, lse, tiling);
  combine.Process();
}

extern "C" __global__ __aicore__ TREESPARK_VECTOR void tree_attention_combine(
    GM_ADDR parts, GM_ADDR lses, GM_ADDR treeMask, GM_ADDR out, GM_ADDR lse,
    TreeAttentionTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  if (tiling.isHalf != 0) {
    RunTreeCombine<half>(parts, lses, treeMask, out, lse, tiling);
  } else {
    RunTreeCombine<bfloat16_t>(parts, lses, treeMask, out, lse, tiling);
  }
}
