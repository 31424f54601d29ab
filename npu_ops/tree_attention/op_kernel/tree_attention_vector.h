// SPDX-License-Identifier: Apache-2.0
// The vector cores' half of tree_attention: each has one sub-tile of rows, and turns scores into
// weights with a running maximum and sum per row, tile after tile. Tree tiles are masked by the
// packed words as they are.
#pragma once
#include "tree_attention_plan.h"

// Stands for the maximum before there is one: finite, so that -inf minus it is -inf and no NaN.
constexpr float kTreeLowest = -3.0e38f;

template <typename T>
class TreeVector {
 public:
  __aicore__ inline void Init(TPipe& pipe, GM_ADDR scores, GM_ADDR weights, GM_ADDR sums,
                              GM_ADDR parts, GM_ADDR lses, const TreeAttentionTiling& tiling) {
    this->tiling = tiling;
    block = GetBlockIdx() / 2;
    sub = GetSubBlockIdx();
    scoreGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(scores));
    weightGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(weights));
    sumGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(sums));
    partGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(parts));
    outGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(parts));
    lseGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(lses));
    const int32_t dim = tiling.headDim;
    pipe.InitBuffer(scoreBuffer, kTreeSubRows * kTreeColumns * sizeof(float));
    pipe.InitBuffer(weightBuffer, kTreeSubRows * kTreeColumns * sizeof(T));
    pipe.InitBuffer(outBuffer, kTreeSubRows * dim * sizeof(float));
    pipe.InitBuffer(sumBuffer, kTreeSubRows * dim * sizeof(float));
    pipe.InitBuffer(foldBuffer, kTreeSubRows * 64 * sizeof(float));
    pipe.InitBuffer(stateBuffer, 6 * kTreeSubRows * sizeof(float));
    pipe.InitBuffer(spreadBuffer, kTreeSubRows * 32);
    pipe.InitBuffer(maskBuffer, kTreeSubRows * 32);
  }

  __aicore__ inline void Process(TreePlan& plan) {
    for (int32_t task = block; task < plan.NumTasks(); task += GetBlockNum()) {
      plan.Task(task);
      rows = plan.queries[sub] * tiling.group;
      if (rows > 0) Start(plan);
      for (int32_t tile = 0; tile < plan.tiles; ++tile) {
        CrossCoreWaitFlag(kTreeScores);
        if (rows > 0) Weights(plan, tile);
        CrossCoreSetFlag<2, PIPE_MTE3>(kTreeWeights);
        CrossCoreWaitFlag(kTreeSums);
        if (rows > 0) Accumulate();
      }
      if (rows > 0) Store(plan);
    }
  }

 private:
  template <HardEvent event>
  __aicore__ inline void After() {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }

  __aicore__ inline float FloatOf(uint32_t bits) { return *reinterpret_cast<float*>(&bits); }

  // One value a row: 0 maximum, 1 sum, 2 maximum with this tile, 3 of this tile, 4 factor, 5 sum of
  // this tile.
  __aicore__ inline LocalTensor<float> State(int32_t which) {
    return stateBuffer.template GetWithOffset<float>(kTreeSubRows,
                                                     which * kTreeSubRows * sizeof(float));
  }

  // Nothing seen yet; the mask words of each row in 32 bytes of their own.
  __aicore__ inline void Start(const TreePlan& plan) {
    for (int32_t which = 0; which < 6; ++which) {
      Duplicate(State(which), which == 1 ? 0.0f : kTreeLowest, kTreeSubRows);
    }
    Duplicate(outBuffer.template Get<float>(), 0.0f, rows * tiling.headDim);
    PipeBarrier<PIPE_V>();
    After<HardEvent::V_MTE2>();
    const int64_t first =
        (static_cast<int64_t>(plan.request) * tiling.rows + plan.firstQuery[sub]) * tiling.numWords;
    const uint32_t bytes = tiling.numWords * sizeof(int32_t);
    for (int32_t head = 0; head < tiling.group; ++head) {
      DataCopyPad(maskBuffer.template Get<int32_t>()[head * 8], plan.maskGlobal[first],
                  DataCopyExtParams(plan.queries[sub], bytes, 0, tiling.group - 1, 0),
                  DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
    }
    After<HardEvent::MTE2_V>();
  }

  __aicore__ inline void Load(TreePlan& plan, int32_t tile) {
    const int32_t keys = plan.Keys(tile);
    LocalTensor<float> score = scoreBuffer.template Get<float>();
    if (keys < kTreeColumns) Duplicate(score, FloatOf(0xff800000u), rows * kTreeColumns);
    After<HardEvent::V_MTE2>();
    const int64_t slot = (static_cast<int64_t>(block) * 2 + tile % 2) * 2 + sub;
    const uint32_t gap = (kTreeColumns - keys) * sizeof(float);
    const uint8_t tail = (8 - keys % 8) % 8;
    DataCopyPad(score, scoreGlobal[slot * kTreeSubRows * kTreeColumns],
                DataCopyExtParams(rows, keys * sizeof(float), gap, gap / 32, 0),
                DataCopyPadExtParams<float>(true, 0, tail, FloatOf(0xff800000u)));
    After<HardEvent::MTE2_V>();
    Muls(score, score, tiling.scale, rows * kTreeColumns);
    PipeBarrier<PIPE_V>();
    if (!plan.IsTree(tile)) return;
    const int32_t columns = tiling.numWords * 32;
    for (int32_t row = 0; row < rows; ++row) {
      Select(score[row * kTreeColumns], maskBuffer.template Get<uint32_t>()[row * 8],
             score[row * kTreeColumns], FloatOf(0xff800000u), SELMODE::VSEL_TENSOR_SCALAR_MODE,
             static_cast<uint32_t>(columns));
    }
    PipeBarrier<PIPE_V>();
  }

  // fold[row] = f(left half, right half) of a row of 128, as 64 lanes.
  __aicore__ inline BinaryRepeatParams Halves() { return BinaryRepeatParams(1, 1, 1, 8, 16, 16); }

  __aicore__ inline void Spread(int32_t which) {
    Brcb(spreadBuffer.template Get<float>(), State(which), kTreeSubRows / 8,
         BrcbRepeatParams(1, 8));
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void Weights(TreePlan& plan, int32_t tile) {
    Load(plan, tile);
    LocalTensor<float> score = scoreBuffer.template Get<float>(),
                       fold = foldBuffer.template Get<float>();
    LocalTensor<float> spread = spreadBuffer.template Get<float>();
    LocalTensor<T> weight = weightBuffer.template Get<T>();
    const uint8_t repeat = rows;
    Max(fold, score, score[64], 64ull, repeat, Halves());
    PipeBarrier<PIPE_V>();
    WholeReduceMax(State(3), fold, 64, rows, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    PipeBarrier<PIPE_V>();
    Max(State(2), State(0), State(3), rows);
    PipeBarrier<PIPE_V>();
    Sub(State(4), State(0), State(2), rows);
    PipeBarrier<PIPE_V>();
    Exp(State(4), State(4), rows);
    Adds(State(0), State(2), 0.0f, rows);
    PipeBarrier<PIPE_V>();
    Mul(State(1), State(1), State(4), rows);
    Spread(0);
    const BinaryRepeatParams each(1, 1, 0, 16, 16, 1);
    Sub(score, score, spread, 64ull, repeat, each);
    Sub(score[64], score[64], spread, 64ull, repeat, each);
    PipeBarrier<PIPE_V>();
    Exp(score, score, rows * kTreeColumns);
    PipeBarrier<PIPE_V>();
    Add(fold, score, score[64], 64ull, repeat, Halves());
    PipeBarrier<PIPE_V>();
    WholeReduceSum(State(5), fold, 64, rows, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    Add(State(1), State(1), State(5), rows);
    Cast(weight, score, RoundMode::CAST_RINT, static_cast<uint32_t>(rows * kTreeColumns));
    After<HardEvent::V_MTE3>();
    const int64_t slot = static_cast<int64_t>(block) * 2 + sub;
    DataCopy(weightGlobal[slot * kTreeSubRows * kTreeColumns], weight,
             static_cast<uint32_t>(rows * kTreeColumns));
    After<HardEvent::MTE3_V>();
  }

  // out = out * factor + sums of this tile.
  __aicore__ inline void Accumulate() {
    const int32_t dim = tiling.headDim;
    LocalTensor<float> out = outBuffer.template Get<float>(), sum = sumBuffer.template Get<float>();
    After<HardEvent::V_MTE2>();
    DataCopy(sum, sumGlobal[(static_cast<int64_t>(block) * 2 + sub) * kTreeSubRows * dim],
             static_cast<uint32_t>(rows * dim));
    After<HardEvent::MTE2_V>();
    Spread(4);
    Scale(out, false);
    Add(out, out, sum, rows * dim);
    PipeBarrier<PIPE_V>();
  }

  // out times, or divided by, what stands in `spread` for each row.
  __aicore__ inline void Scale(const LocalTensor<float>& out, bool divides) {
    const uint8_t stride = tiling.headDim / 8, repeat = rows;
    const BinaryRepeatParams each(1, 1, 0, stride, stride, 1);
    for (int32_t first = 0; first < tiling.headDim; first += 64) {
      if (divides) {
        Div(out[first], out[first], spreadBuffer.template Get<float>(), 64ull, repeat, each);
      } else {
        Mul(out[first], out[first], spreadBuffer.template Get<float>(), 64ull, repeat, each);
      }
    }
    PipeBarrier<PIPE_V>();
  }

  // This split's out and log-sum-exp; a split that saw nothing has 0 and -inf. With one split they
  // are the results: out in its own type, rows that see nothing blank.
  __aicore__ inline void Store(TreePlan& plan) {
    const int32_t dim = tiling.headDim, group = tiling.group, gaps = tiling.splits - 1;
    LocalTensor<float> out = outBuffer.template Get<float>();
    LocalTensor<T> result = weightBuffer.template Get<T>();
    Ln(State(3), State(1), kTreeSubRows);
    Maxs(State(2), State(1), 1.0e-30f, kTreeSubRows);
    PipeBarrier<PIPE_V>();
    Add(State(3), State(3), State(0), kTreeSubRows);
    Spread(2);
    Scale(out, true);
    Spread(3);
    if (gaps == 0) {
      Blank(plan);
      Cast(result, out, RoundMode::CAST_RINT, static_cast<uint32_t>(rows * dim));
    }
    After<HardEvent::V_MTE3>();
    for (int32_t query = 0; query < plan.queries[sub]; ++query) {
      const int64_t first = OutRow(plan, query) * tiling.splits + plan.split;
      const int32_t row = query * group;
      if (gaps == 0) {
        DataCopyPad(outGlobal[first * dim], result[row * dim],
                    DataCopyExtParams(group, dim * sizeof(T), 0, 0, 0));
      } else {
        DataCopyPad(
            partGlobal[first * dim], out[row * dim],
            DataCopyExtParams(group, dim * sizeof(float), 0, gaps * dim * sizeof(float), 0));
      }
      DataCopyPad(lseGlobal[first], spreadBuffer.template Get<float>()[row * 8],
                  DataCopyExtParams(group, sizeof(float), 0, gaps * sizeof(float), 0));
    }
    After<HardEvent::MTE3_V>();
  }

  // Rows without any bit see not even the prefix.
  __aicore__ inline void Blank(TreePlan& plan) {
    const int32_t group = tiling.group;
    for (int32_t query = 0; query < plan.queries[sub]; ++query) {
      if (plan.HasRow(plan.firstQuery[sub] + query)) continue;
      const int32_t row = query * group, dim = tiling.headDim;
      Duplicate(outBuffer.template Get<float>()[row * dim], 0.0f, group * dim);
      Duplicate(spreadBuffer.template Get<float>()[row * 8], FloatOf(0xff800000u), group * 8);
    }
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline int64_t OutRow(const TreePlan& plan, int32_t query) {
    return (static_cast<int64_t>(plan.request) * tiling.rows + plan.firstQuery[sub] + query) *
               tiling.heads +
           plan.kvHead * tiling.group;
  }

  TBuf<TPosition::VECCALC> scoreBuffer, weightBuffer, outBuffer, sumBuffer, foldBuffer, stateBuffer,
      spreadBuffer, maskBuffer;
  GlobalTensor<T> weightGlobal, outGlobal;
  GlobalTensor<float> scoreGlobal, sumGlobal, partGlobal, lseGlobal;
  TreeAttentionTiling tiling;
  int32_t block, sub, rows;
};
