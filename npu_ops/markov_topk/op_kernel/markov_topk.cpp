// SPDX-License-Identifier: Apache-2.0
// Entry of markov_topk's first kernel: the products with the running lists.
#include "compat.h"
#include "markov_topk_cube.h"
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

extern "C" __global__ __aicore__ TREESPARK_MIX_1_2 void markov_topk(
    GM_ADDR baseLogits, GM_ADDR baseRow, GM_ADDR latent, GM_ADDR w2, GM_ADDR ring, GM_ADDR lists,
    GM_ADDR maxima, GM_ADDR sums, MarkovTopkTiling tiling) {
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
