// SPDX-License-Identifier: Apache-2.0
// The cube's half of tree_attention: scores = queries x keys^T for a tile ahead, then sums =
// weights x values.
#pragma once
#include "tree_attention_plan.h"

template <typename T>
class TreeCube {
 public:
  __aicore__ inline void Init(TPipe& pipe, GM_ADDR query, GM_ADDR key, GM_ADDR value,
                              GM_ADDR blockTable, GM_ADDR scores, GM_ADDR weights, GM_ADDR sums,
                              const TreeAttentionTiling& tiling) {
    this->tiling = tiling;
    block = GetBlockIdx();
    queryGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(query));
    keyGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(key));
    valueGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(value));
    tableGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(blockTable));
    scoreGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(scores));
    weightGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(weights));
    sumGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(sums));
    const int32_t dim = tiling.headDim;
    pipe.InitBuffer(queryL1, 2 * kTreeSubRows * dim * sizeof(T));
    pipe.InitBuffer(keyL1, kTreeColumns * dim * sizeof(T));
    pipe.InitBuffer(valueL1, kTreeColumns * dim * sizeof(T));
    pipe.InitBuffer(weightL1, kTreeSubRows * kTreeColumns * sizeof(T));
    pipe.InitBuffer(leftL0, kTreeSubRows * kTreeColumns * sizeof(T));
    pipe.InitBuffer(rightL0, kTreeColumns * kTreeColumns * sizeof(T));
    pipe.InitBuffer(productL0, kTreeSubRows * kTreeColumns * sizeof(float));
  }

  __aicore__ inline void Process(TreePlan& plan) {
    for (int32_t task = block; task < plan.NumTasks(); task += GetBlockNum()) {
      plan.Task(task);
      if (plan.tiles == 0) continue;
      Queries(plan);
      Scores(plan, 0);
      for (int32_t tile = 0; tile < plan.tiles; ++tile) {
        if (tile + 1 < plan.tiles) Scores(plan, tile + 1);
        CrossCoreWaitFlag(kTreeWeights);
        Sums(plan, tile);
      }
    }
  }

 private:
  template <HardEvent event>
  __aicore__ inline void After() {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }

  __aicore__ inline int32_t Fractals(int32_t size) { return (size + 15) / 16; }

  // Everything of the cube is over: the next step may overwrite L1, L0A, L0B and L0C.
  __aicore__ inline void Drain() {
    After<HardEvent::FIX_M>();
    After<HardEvent::M_MTE1>();
    After<HardEvent::MTE1_MTE2>();
  }

  // Rows query * group + head of both sub-tiles, each with its rows padded to whole fractals.
  __aicore__ inline void Queries(const TreePlan& plan) {
    const int32_t dim = tiling.headDim, group = tiling.group;
    for (int32_t sub = 0; sub < 2; ++sub) {
      const int32_t queries = plan.queries[sub], rows = queries * group;
      if (rows == 0) continue;
      const int64_t first =
          ((static_cast<int64_t>(plan.request) * tiling.rows + plan.firstQuery[sub]) *
               tiling.heads +
           plan.kvHead * group) *
          dim;
      const int32_t padded = Fractals(rows) * 16;
      LocalTensor<T> near = queryL1.template Get<T>()[sub * kTreeSubRows * dim];
      DataCopy(near, queryGlobal[first],
               Nd2NzParams(queries, group, dim, tiling.heads * dim, dim, padded, 1, group * 16));
      // A single row stands twice: with m = 1 Mmad would be a matrix-vector product.
      if (rows == 1)
        DataCopy(near[16], queryGlobal[first], Nd2NzParams(1, 1, dim, 0, dim, padded, 1, 0));
    }
  }

  // Rows [first, first + number) of keys or values of one head, from one or several blocks of the
  // cache.
  __aicore__ inline void CacheRows(const LocalTensor<T>& near, const GlobalTensor<T>& cache,
                                   const TreePlan& plan, int32_t first, int32_t number) {
    const int32_t dim = tiling.headDim, pitch = tiling.kvHeads * dim,
                  padded = Fractals(number) * 16;
    for (int32_t done = 0; done < number;) {
      int32_t part = number - done;
      int64_t row = static_cast<int64_t>(plan.request) * tiling.cacheRows + first + done;
      if (tiling.blockSize > 0) {
        const int32_t position = first + done, inside = position % tiling.blockSize;
        const int32_t page = tableGlobal.GetValue(
            static_cast<int64_t>(plan.request) * tiling.maxBlocks + position / tiling.blockSize);
        row = static_cast<int64_t>(page) * tiling.blockSize + inside;
        part = part < tiling.blockSize - inside ? part : tiling.blockSize - inside;
      }
      DataCopy(near[done * 16], cache[row * pitch + plan.kvHead * dim],
               Nd2NzParams(1, part, dim, 0, pitch, padded, 1, 0));
      done += part;
    }
  }

  // Rows from L1 into L0A. pitch: rows of a column group in L1.
  __aicore__ inline void Left(const LocalTensor<T>& near, int32_t rows, int32_t depth) {
    const int32_t depthFractals = Fractals(depth), rowFractals = Fractals(rows);
    LocalTensor<T> left = leftL0.template Get<T>();
    for (int32_t i = 0; i < rowFractals; ++i) {
      LoadData(left[i * depthFractals * 256], near,
               LoadData2DParams(i, depthFractals, rowFractals, 0, 0, false, 0));
    }
  }

  __aicore__ inline void Multiply(int32_t rows, int32_t columns, int32_t depth) {
    After<HardEvent::MTE1_M>();
    Mmad(productL0.template Get<float>(), leftL0.template Get<T>(), rightL0.template Get<T>(),
         MmadParams(rows == 1 ? 2 : rows, columns, depth, 0, false, true));
    After<HardEvent::M_FIX>();
  }

  __aicore__ inline void Scores(TreePlan& plan, int32_t tile) {
    const int32_t dim = tiling.headDim, keys = plan.Keys(tile);
    Drain();
    CacheRows(keyL1.template Get<T>(), keyGlobal, plan, plan.FirstKey(tile), keys);
    After<HardEvent::MTE2_MTE1>();
    // Keys by rows are fractal for fractal the right operand.
    LoadData(rightL0.template Get<T>(), keyL1.template Get<T>(),
             LoadData2DParams(0, Fractals(keys) * dim / 16, 1, 0, 0, false, 0));
    for (int32_t sub = 0; sub < 2; ++sub) {
      const int32_t rows = plan.queries[sub] * tiling.group;
      if (rows == 0) continue;
      Left(queryL1.template Get<T>()[sub * kTreeSubRows * dim], rows, dim);
      Multiply(rows, keys, dim);
      const int64_t slot = (static_cast<int64_t>(block) * 2 + tile % 2) * 2 + sub;
      Fixpipe(scoreGlobal[slot * kTreeSubRows * kTreeColumns], productL0.template Get<float>(),
              FixpipeParamsV220(keys, rows, Fractals(rows) * 16, kTreeColumns, false));
      After<HardEvent::FIX_M>();
      After<HardEvent::M_MTE1>();
    }
    CrossCoreSetFlag<2, PIPE_FIX>(kTreeScores);
  }

  __aicore__ inline void Sums(TreePlan& plan, int32_t tile) {
    const int32_t dim = tiling.headDim, keys = plan.Keys(tile), keyFractals = Fractals(keys);
    Drain();
    CacheRows(valueL1.template Get<T>(), valueGlobal, plan, plan.FirstKey(tile), keys);
    After<HardEvent::MTE2_MTE1>();
    // Values by rows have to be turned, fractal by fractal, as keys run along the product's depth.
    for (int32_t i = 0; i < keyFractals; ++i) {
      LoadData(rightL0.template Get<T>()[i * dim / 16 * 256], valueL1.template Get<T>(),
               LoadData2DParams(i, dim / 16, keyFractals, 0, 0, true, 0));
    }
    for (int32_t sub = 0; sub < 2; ++sub) {
      const int32_t rows = plan.queries[sub] * tiling.group;
      if (rows == 0) continue;
      const int64_t slot = static_cast<int64_t>(block) * 2 + sub;
      LocalTensor<T> near = weightL1.template Get<T>();
      const int32_t padded = Fractals(rows) * 16;
      const GlobalTensor<T> weights = weightGlobal[slot * kTreeSubRows * kTreeColumns];
      DataCopy(near, weights, Nd2NzParams(1, rows, keys, 0, kTreeColumns, padded, 1, 0));
      if (rows == 1)
        DataCopy(near[16], weights, Nd2NzParams(1, 1, keys, 0, kTreeColumns, padded, 1, 0));
      After<HardEvent::MTE2_MTE1>();
      Left(near, rows, keys);
      Multiply(rows, dim, keys);
      Fixpipe(sumGlobal[slot * kTreeSubRows * dim], productL0.template Get<float>(),
              FixpipeParamsV220(dim, rows, padded, dim, false));
      Drain();
    }
    CrossCoreSetFlag<2, PIPE_FIX>(kTreeSums);
  }

  TBuf<TPosition::A1> queryL1, weightL1;
  TBuf<TPosition::B1> keyL1, valueL1;
  TBuf<TPosition::A2> leftL0;
  TBuf<TPosition::B2> rightL0;
  TBuf<TPosition::CO1> productL0;
  GlobalTensor<T> queryGlobal, keyGlobal, valueGlobal, weightGlobal;
  GlobalTensor<int32_t> tableGlobal;
  GlobalTensor<float> scoreGlobal, sumGlobal;
  TreeAttentionTiling tiling;
  int32_t block;
};
