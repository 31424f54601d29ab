// SPDX-License-Identifier: Apache-2.0
// Entry of pack_tree: vector cores only, arguments in the order of the operator's schema.
#include "compat.h"
#include "pack_tree_kernel.h"

template <int32_t kLength>
__aicore__ inline void RunPackTree(const PackTreeAddresses& at, const PackTreeTiling& tiling) {
  PackTreeKernel<kLength> kernel;
  kernel.Init(at, tiling);
  kernel.Process();
}

extern "C" __global__ __aicore__ TREESPARK_VECTOR void pack_tree(
    GM_ADDR scores, GM_ADDR parents, GM_ADDR depths, GM_ADDR counts, GM_ADDR depthBias,
    GM_ADDR index, GM_ADDR parent, GM_ADDR depth, GM_ADDR position, GM_ADDR mask, GM_ADDR count,
    PackTreeTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const PackTreeAddresses at = {scores, parents, depths,   counts, depthBias, index,
                                parent, depth,   position, mask,   count};
  if (tiling.sortLength == 128) {
    RunPackTree<128>(at, tiling);
  } else if (tiling.sortLength == 512) {
    RunPackTree<512>(at, tiling);
  } else {
    RunPackTree<1024>(at, tiling);
  }
}
