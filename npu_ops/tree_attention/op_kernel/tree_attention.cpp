// SPDX-License-Identifier: Apache-2.0
// Entry of tree_attention's first kernel: attention of all tasks. With one split there is nothing to
// combine: `parts` is then the operator's out and `lses` its lse.
#include "compat.h"
#include "tree_attention_cube.h"
#include "tree_attention_vector.h"

template <typename T>
__aicore__ inline void RunTreeCube(GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR seqLens,
                                   GM_ADDR treeMask, GM_ADDR blockTable, GM_ADDR scores,
                                   GM_ADDR weights, GM_ADDR sums,
                                   const TreeAttentionTiling& tiling) {
  TPipe pipe;
  TreePlan plan;
  TreeCube<T> cube;
  plan.Init(seqLens, treeMask, tiling);
  cube.Init(pipe, query, key, value, blockTable, scores, weights, sums, tiling);
  cube.Process(plan);
}

template <typename T>
__aicore__ inline void RunTreeVector(GM_ADDR seqLens, GM_ADDR treeMask, GM_ADDR scores,
                                     GM_ADDR weights, GM_ADDR sums, GM_ADDR parts, GM_ADDR lses,
                                     const TreeAttentionTiling& tiling) {
  TPipe pipe;
  TreePlan plan;
  TreeVector<T> vector;
  plan.Init(seqLens, treeMask, tiling);
  vector.Init(pipe, scores, weights, sums, parts, lses, tiling);
  vector.Process(plan);
}

extern "C" __global__ __aicore__ TREESPARK_MIX_1_2 void tree_attention(
    GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR seqLens, GM_ADDR treeMask,
    GM_ADDR blockTable, GM_ADDR scores, GM_ADDR weights, GM_ADDR sums, GM_ADDR parts, GM_ADDR lses,
    TreeAttentionTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  if ASCEND_IS_AIC {
    if (tiling.isHalf != 0) {
      RunTreeCube<half>(query, key, value, seqLens, treeMask, blockTable, scores, weights, sums,
                        tiling);
    } else {
      RunTreeCube<bfloat16_t>(query, key, value, seqLens, treeMask, blockTable, scores, weights,
                              sums, tiling);
    }
  } else {
    if (tiling.isHalf != 0) {
      RunTreeVector<half>(seqLens, treeMask, scores, weights, sums, parts, lses, tiling);
    } else {
      RunTreeVector<bfloat16_t>(seqLens, treeMask, scores, weights, sums, parts, lses, tiling);
    }
  }
}
