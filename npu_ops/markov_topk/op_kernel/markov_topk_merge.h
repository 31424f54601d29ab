// SPDX-License-Identifier: Apache-2.0
// Second kernel of markov_topk, vector cores only: per row, the lists of all blocks become one, and
// their maxima and sums the log-sum-exp. It follows on the same stream, which is the barrier
// between all cores.
#pragma once
#include "../op_host/markov_topk_tiling.h"
#include "kernel_operator.h"

using namespace AscendC;

class MarkovMerge {
 public:
  __aicore__ inline void Init(GM_ADDR lists, GM_ADDR maxima, GM_ADDR sums, GM_ADDR values,
                              GM_ADDR indices, GM_ADDR lse, const MarkovTopkTiling& tiling) {
    this->tiling = tiling;
    listGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(lists));
    maximaGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(maxima));
    sumGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(sums));
    valueGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(values));
    indexGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(indices));
    lseGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(lse));
    pipe.InitBuffer(listBuffer, tiling.usedBlocks * kPairs * sizeof(float));
    pipe.InitBuffer(mergedBuffer, 2 * 4 * kPairs * sizeof(float));
    pipe.InitBuffer(maximumBuffer, kMarkovMaxBlocks * sizeof(float));
    pipe.InitBuffer(sumBuffer, kMarkovMaxBlocks * sizeof(float));
    pipe.InitBuffer(scratchBuffer, 2 * kMarkovMaxBlocks * sizeof(float));
    pipe.InitBuffer(resultBuffer, 2 * kMarkovList * sizeof(float));
    pipe.InitBuffer(lseBuffer, 32);
  }

  __aicore__ inline void Process() {
    for (int32_t row = GetBlockIdx(); row < tiling.rows; row += GetBlockNum()) {
      Load(row);
      Merge();
      LogSumExp();
      Store(row);
    }
  }

 private:
  static constexpr int32_t kPairs = kMarkovList * 2;  // floats of a list

  template <HardEvent event>
  __aicore__ inline void After() {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }

  __aicore__ inline void Load(int32_t row) {
    const uint32_t bytes = kPairs * sizeof(float);
    DataCopyPad(listBuffer.Get<float>(), listGlobal[static_cast<uint64_t>(row) * kPairs],
                DataCopyExtParams(tiling.usedBlocks, bytes, (tiling.rows - 1) * bytes, 0, 0),
                DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
    const uint64_t first = static_cast<uint64_t>(row) * tiling.usedBlocks;
    const DataCopyExtParams each(1, tiling.usedBlocks * sizeof(float), 0, 0, 0);
    const DataCopyPadExtParams<float> none(false, 0, 0, 0.0f);
    DataCopyPad(maximumBuffer.Get<float>(), maximaGlobal[first], each, none);
    DataCopyPad(sumBuffer.Get<float>(), sumGlobal[first], each, none);
    After<HardEvent::MTE2_V>();
  }

  // Three more lists at a time behind the best so far: in the order of the vocabulary, so ties keep
  // it too.
  __aicore__ inline void Merge() {
    LocalTensor<float> lists = listBuffer.Get<float>(), merged = mergedBuffer.Get<float>();
    best = lists;
    MrgSort4Info info;
    for (int32_t i = 0; i < 4; ++i) info.elementLengths[i] = kMarkovList;
    info.repeatTimes = 1;
    int32_t turn = 0;
    for (int32_t block = 1; block < tiling.usedBlocks; block += 3, ++turn) {
      const int32_t left = tiling.usedBlocks - block;
      info.validBit = left == 1 ? 3 : left == 2 ? 7 : 15;
      const LocalTensor<float> next = lists[block * kPairs];
      const LocalTensor<float> third = left > 1 ? next[kPairs] : next,
                               fourth = left > 2 ? next[2 * kPairs] : next;
      const LocalTensor<float> target = merged[turn % 2 * 4 * kPairs];
      MrgSort(target, MrgSortSrcList<float>(best, next, third, fourth), info);
      PipeBarrier<PIPE_V>();
      best = target;
    }
    uint64_t number = 0;
    const GatherMaskParams once(1, 1, 8, 0);
    LocalTensor<uint32_t> result = resultBuffer.Get<uint32_t>(),
                          pairs = best.ReinterpretCast<uint32_t>();
    GatherMask(result, pairs, static_cast<uint8_t>(1), false, 0u, once, number);
    GatherMask(result[kMarkovList], pairs, static_cast<uint8_t>(2), false, 0u, once, number);
  }

  __aicore__ inline void LogSumExp() {
    LocalTensor<float> maximum = maximumBuffer.Get<float>(), sum = sumBuffer.Get<float>();
    LocalTensor<float> scratch = scratchBuffer.Get<float>(), lse = lseBuffer.Get<float>();
    const int32_t blocks = tiling.usedBlocks;
    ReduceMax(lse, maximum, scratch, blocks);
    After<HardEvent::V_S>();
    const float highest = lse.GetValue(0);
    After<HardEvent::S_V>();
    Adds(maximum, maximum, -highest, blocks);
    PipeBarrier<PIPE_V>();
    Exp(maximum, maximum, blocks);
    PipeBarrier<PIPE_V>();
    Mul(maximum, maximum, sum, blocks);
    PipeBarrier<PIPE_V>();
    ReduceSum(lse, maximum, scratch, blocks);
    PipeBarrier<PIPE_V>();
    Ln(lse, lse, 1);
    PipeBarrier<PIPE_V>();
    Adds(lse, lse, highest, 1);
  }

  __aicore__ inline void Store(int32_t row) {
    After<HardEvent::V_MTE3>();
    const LocalTensor<uint32_t> result = resultBuffer.Get<uint32_t>();
    const DataCopyExtParams each(1, tiling.k * sizeof(uint32_t), 0, 0, 0);
    DataCopyPad(valueGlobal[static_cast<uint64_t>(row) * tiling.k], result, each);
    DataCopyPad(indexGlobal[static_cast<uint64_t>(row) * tiling.k], result[kMarkovList], each);
    DataCopyPad(lseGlobal[row], lseBuffer.Get<float>(),
                DataCopyExtParams(1, sizeof(float), 0, 0, 0));
    After<HardEvent::MTE3_V>();
    After<HardEvent::V_MTE2>();
  }

  TPipe pipe;
  TBuf<TPosition::VECCALC> listBuffer, mergedBuffer, maximumBuffer, sumBuffer, scratchBuffer,
      resultBuffer, lseBuffer;
  GlobalTensor<float> listGlobal, maximaGlobal, sumGlobal, lseGlobal;
  GlobalTensor<uint32_t> valueGlobal, indexGlobal;
  LocalTensor<float> best;
  MarkovTopkTiling tiling;
};
