// SPDX-License-Identifier: Apache-2.0
// Entry of markov_topk's second kernel: the merge over blocks.
#include "compat.h"
#include "markov_topk_merge.h"

extern "C" __global__ __aicore__ TREESPARK_VECTOR void markov_topk_merge(
    GM_ADDR lists, GM_ADDR maxima, GM_ADDR sums, GM_ADDR values, GM_ADDR indices, GM_ADDR lse,
    MarkovTopkTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  MarkovMerge kernel;
  kernel.Init(lists, maxima, sums, values, indices, lse, tiling);
  kernel.Process();
}
