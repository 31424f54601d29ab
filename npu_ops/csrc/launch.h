// SPDX-License-Identifier: Apache-2.0
// Launches of the kernels, one function each, between binding.cpp, which knows torch and no kernel,
// and launch_*.cpp, which know kernels and no torch.
#pragma once
#include <cstdint>

#include "../markov_topk/op_host/markov_topk_tiling.h"
#include "../pack_tree/op_host/pack_tree_tiling.h"
#include "../tree_attention/op_host/tree_attention_tiling.h"

namespace treespark {

// Tensors in global memory, in the order of the kernel's arguments.
using Addresses = uint8_t* const*;

// All enqueue on a stream and return 0 or an error of ACL. blocks: of one cube and two vector cores
// for markov_topk and tree_attention, else vector cores.
uint32_t LaunchMarkovTopk(uint32_t blocks, void* stream, Addresses at, MarkovTopkTiling tiling);
uint32_t LaunchMarkovTopkMerge(uint32_t blocks, void* stream, Addresses at,
                               MarkovTopkTiling tiling);
uint32_t LaunchPackTree(uint32_t blocks, void* stream, Addresses at, PackTreeTiling tiling);
uint32_t LaunchTreeAttention(uint32_t blocks, void* stream, Addresses at,
                             TreeAttentionTiling tiling);
uint32_t LaunchTreeAttentionCombine(uint32_t blocks, void* stream, Addresses at,
                                    TreeAttentionTiling tiling);

}  // namespace treespark

// Host parts of the operators; see op_host/*_tiling.cpp.
extern "C" {
int32_t markov_topk_tiling(int64_t rows, int64_t baseRows, int64_t vocab, int64_t numTokens,
                           int64_t rank, int64_t k, int32_t baseDtype, int32_t latentDtype,
                           float invTemperature, int64_t blocks, MarkovTopkTiling* tiling,
                           char* error, int32_t errorSize);
int32_t pack_tree_tiling(int64_t numRequests, int64_t numCandidates, int64_t budget,
                         int64_t maxDepth, PackTreeTiling* tiling, char* error, int32_t errorSize);
int32_t tree_attention_tiling(int64_t requests, int64_t rows, int64_t heads, int64_t kvHeads,
                              int64_t headDim, int64_t cacheRows, int64_t blockSize,
                              int64_t maxBlocks, int32_t isHalf, float scale, int64_t blocks,
                              TreeAttentionTiling* tiling, char* error, int32_t errorSize);
}
