// SPDX-License-Identifier: Apache-2.0
// Second kernel of tree_attention, vector cores only: the parts of all splits of a row become its
// result. It follows on the same stream, which is the barrier between all cores.
#pragma once
#include "tree_attention_plan.h"

template <typename T>
class TreeCombine {
 public:
  __aicore__ inline void Init(GM_ADDR parts, GM_ADDR lses, GM_ADDR treeMask, GM_ADDR out,
                              GM_ADDR lse, const TreeAttentionTiling& tiling) {
    this->tiling = tiling;
    partGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(parts));
    lsesGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(lses));
    maskGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(treeMask));
    outGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(out));
    lseGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(lse));
    pipe.InitBuffer(partBuffer, tiling.splits * tiling.headDim * sizeof(float));
    pipe.InitBuffer(weightBuffer, kTreeMaxSplits * sizeof(float));
    pipe.InitBuffer(scratchBuffer, kTreeMaxSplits * sizeof(float));
    pipe.InitBuffer(resultBuffer, 4 * 32);
    pipe.InitBuffer(outBuffer, tiling.headDim * sizeof(T));
  }

  __aicore__ inline void Process() {
    const int32_t rows = tiling.requests * tiling.rows;
    for (int32_t row = GetBlockIdx(); row < rows; row += GetBlockNum()) {
      const bool seen = HasRow(row);
      for (int32_t head = 0; head < tiling.heads; ++head) Row(row * tiling.heads + head, seen);
    }
  }

 private:
  template <HardEvent event>
  __aicore__ inline void After() {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }

  __aicore__ inline float FloatOf(uint32_t bits) { return *reinterpret_cast<float*>(&bits); }

  __aicore__ inline bool HasRow(int32_t row) {
    for (int32_t word = 0; word < tiling.numWords; ++word) {
      if (maskGlobal.GetValue(static_cast<int64_t>(row) * tiling.numWords + word) != 0) return true;
    }
    return false;
  }

  __aicore__ inline void Row(int64_t row, bool seen) {
    const int32_t dim = tiling.headDim;
    LocalTensor<float> lse = resultBuffer.template Get<float>(),
                       part = partBuffer.template Get<float>();
    if (seen) {
      Load(row);
      Merge();
    } else {
      Duplicate(part, 0.0f, dim);
      Duplicate(lse, FloatOf(0xff800000u), 1);
      PipeBarrier<PIPE_V>();
    }
    Cast(outBuffer.template Get<T>(), part, RoundMode::CAST_RINT, static_cast<uint32_t>(dim));
    After<HardEvent::V_MTE3>();
    DataCopyPad(outGlobal[row * dim], outBuffer.template Get<T>(),
                DataCopyExtParams(1, dim * sizeof(T), 0, 0, 0));
    DataCopyPad(lseGlobal[row], lse, DataCopyExtParams(1, sizeof(float), 0, 0, 0));
    After<HardEvent::MTE3_V>();
    After<HardEvent::V_MTE2>();
  }

  __aicore__ inline void Load(int64_t row) {
    const DataCopyPadExtParams<float> none(false, 0, 0, 0.0f);
    DataCopyPad(partBuffer.template Get<float>(), partGlobal[row * tiling.splits * tiling.headDim],
                DataCopyExtParams(1, tiling.splits * tiling.headDim * sizeof(float), 0, 0, 0),
                none);
    DataCopyPad(weightBuffer.template Get<float>(), lsesGlobal[row * tiling.splits],
                DataCopyExtParams(1, tiling.splits * sizeof(float), 0, 0, 0), none);
    After<HardEvent::MTE2_V>();
  }

  // part[0] = sum of part[split] * exp(lse[split] - highest) / sum of the factors.
  __aicore__ inline void Merge() {
    const int32_t splits = tiling.splits, dim = tiling.headDim;
    LocalTensor<float> part = partBuffer.template Get<float>(),
                       weight = weightBuffer.template Get<float>();
    LocalTensor<float> lse = resultBuffer.template Get<float>(), total = lse[8];
    LocalTensor<float> scratch = scratchBuffer.template Get<float>();
    ReduceMax(lse, weight, scratch, splits);
    After<HardEvent::V_S>();
    const float highest = lse.GetValue(0);
    After<HardEvent::S_V>();
    Adds(weight, weight, -highest, splits);
    PipeBarrier<PIPE_V>();
    Exp(weight, weight, splits);
    PipeBarrier<PIPE_V>();
    ReduceSum(total, weight, scratch, splits);
    PipeBarrier<PIPE_V>();
    Ln(lse, total, 1);
    PipeBarrier<PIPE_V>();
    Adds(lse, lse, highest, 1);
    After<HardEvent::V_S>();
    const float all = total.GetValue(0);
    for (int32_t split = 0; split < splits; ++split) {
      const float factor = weight.GetValue(split) / all;
      Muls(part[split * dim], part[split * dim], factor, dim);
      PipeBarrier<PIPE_V>();
      if (split > 0) Add(part, part, part[split * dim], dim);
      PipeBarrier<PIPE_V>();
    }
    After<HardEvent::S_V>();
  }

  TPipe pipe;
  TBuf<TPosition::VECCALC> partBuffer, weightBuffer, scratchBuffer, resultBuffer, outBuffer;
  GlobalTensor<float> partGlobal, lsesGlobal, lseGlobal;
  GlobalTensor<int32_t> maskGlobal;
  GlobalTensor<T> outGlobal;
  TreeAttentionTiling tiling;
};
