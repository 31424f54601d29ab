// SPDX-License-Identifier: Apache-2.0
// Entries of markov_topk: the products with the running lists, and the merge over blocks.
#include "markov_topk_cube.h"
#include "markov_topk_merge.h"
#include "markov_topk_vector.h"

template <typename T>
__aicore__ inline void RunMarkovCube(GM_ADDR latent, GM_ADDR w2, GM_ADDR ring,
                                     const MarkovTopkTiling& tiling) {
  TPipe pipe;
  MarkovCube<T> cube;
  cube.Init(pipe, latent, w2, ring, tiling);
  cube.Process();
}

template <typename T>
__aicore__ inline void RunMarkovVector(GM_ADDR baseLogits, GM_ADDR baseRow, GM_ADDR ring,
                                       GM_ADDR lists, GM_ADDR maxima, GM_ADDR sums,
                                       const MarkovTopkTiling& tiling) {
  TPipe pipe;
  MarkovVector<T> vector;
  vector.Init(pipe, baseLogits, baseRow, ring, lists, maxima, sums, tiling);
  vector.Process();
}

extern "C" __global__ __aicore__ void markov_topk(GM_ADDR baseLogits, GM_ADDR baseRow,
                                                  GM_ADDR latent, GM_ADDR w2, GM_ADDR ring,
                                                  GM_ADDR lists, GM_ADDR maxima, GM_ADDR sums,
                                                  MarkovTopkTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  if ASCEND_IS_AIC {
    if (tiling.latentDtype == kMarkovHalf) {
      RunMarkovCube<half>(latent, w2, ring, tiling);
    } else {
      RunMarkovCube<bfloat16_t>(latent, w2, ring, tiling);
    }
  } else {
    if (tiling.baseDtype == kMarkovFloat) {
      RunMarkovVector<float>(baseLogits, baseRow, ring, lists, maxima, sums, tiling);
    } else if (tiling.baseDtype == kMarkovHalf) {
      RunMarkovVector<half>(baseLogits, baseRow, ring, lists, maxima, sums, tiling);
    } else {
      RunMarkovVector<bfloat16_t>(baseLogits, baseRow, ring, lists, maxima, sums, tiling);
    }
  }
}

extern "C" __global__ __aicore__ void markov_topk_merge(GM_ADDR lists, GM_ADDR maxima, GM_ADDR sums,
                                                        GM_ADDR values, GM_ADDR indices,
                                                        GM_ADDR lse, MarkovTopkTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  MarkovMerge kernel;
  kernel.Init(lists, maxima, sums, values, indices, lse, tiling);
  kernel.Process();
}
