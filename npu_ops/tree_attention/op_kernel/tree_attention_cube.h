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
    pipe.InitBuffer(keyL1, 2 * kTreeColumns * dim * sizeof(T));
    pipe.InitBuffer(valueL1, 2 * kTreeColumns * dim * sizeof(T));
    pipe.InitBuffer(weightL1, kTreeSubRows * kTreeColumns * sizeof(T));
    pipe.InitBuffer(leftL0, kTreeSubRows * kTreeColumns * sizeof(T));
    pipe.InitBuffer(rightL0, kTreeColumns * kTreeColumns * sizeof(T));
    pipe.InitBuffer(productL0, 2 * kTreeSubRows * kTreeColumns * sizeof(float));
  }

  __aicore__ inline void Process(TreePlan& plan) {
    // Every buffer is free at first. Ids of MTE1_MTE2 and MTE2_MTE1: kKeys and kValues plus the
    // half.
    for (int32_t half = 0; half < 2; ++half) {
      SetFlag<HardEvent::MTE1_MTE2>(kKeys + half);
      SetFlag<HardEvent::MTE1_MTE2>(kValues + half);
      SetFlag<HardEvent::FIX_M>(half);
    }
    SetFlag<HardEvent::MTE1_MTE2>(kWeights);
    SetFlag<HardEvent::M_MTE1>(0);
    for (int32_t task = block; task < plan.NumTasks(); task += GetBlockNum()) {
      plan.Task(task);
      if (plan.tiles > 0) Task(plan);
    }
    for (int32_t half = 0; half < 2; ++half) {
      WaitFlag<HardEvent::MTE1_MTE2>(kKeys + half);
      WaitFlag<HardEvent::MTE1_MTE2>(kValues + half);
      WaitFlag<HardEvent::FIX_M>(half);
    }
    WaitFlag<HardEvent::MTE1_MTE2>(kWeights);
    WaitFlag<HardEvent::M_MTE1>(0);
  }

 private:
  static constexpr int32_t kKeys = 0, kValues = 2, kWeights = 4;  // event ids; 5 is for queries

  // Keys and values of the next tile are on their way while this one is multiplied.
  __aicore__ inline void Task(TreePlan& plan) {
    Queries(plan);
    Load(plan, 0);
    Scores(plan, 0);
    for (int32_t tile = 0; tile < plan.tiles; ++tile) {
      if (tile + 1 < plan.tiles) {
        Load(plan, tile + 1);
        Scores(plan, tile + 1);
      }
      CrossCoreWaitFlag(kTreeWeights);
      Sums(plan, tile);
    }
  }

  __aicore__ inline int32_t Fractals(int32_t size) { return (size + 15) / 16; }

  // Rows query * group + head of both sub-tiles, each with its rows padded to whole fractals.
  __aicore__ inline void Queries(const TreePlan& plan) {
    SetFlag<HardEvent::MTE1_MTE2>(5);
    WaitFlag<HardEvent::MTE1_MTE2>(5);
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

  // Keys and values of a tile into their half of L1.
  __aicore__ inline void Load(TreePlan& plan, int32_t tile) {
    const int32_t half = tile % 2, first = plan.FirstKey(tile), number = plan.Keys(tile);
    const int32_t at = half * kTreeColumns * tiling.headDim;
    WaitFlag<HardEvent::MTE1_MTE2>(kKeys + half);
    CacheRows(keyL1.template Get<T>()[at], keyGlobal, plan, first, number);
    SetFlag<HardEvent::MTE2_MTE1>(kKeys + half);
    WaitFlag<HardEvent::MTE1_MTE2>(kValues + half);
    CacheRows(valueL1.template Get<T>()[at], valueGlobal, plan, first, number);
    SetFlag<HardEvent::MTE2_MTE1>(kValues + half);
  }

  // Rows from L1 into L0A, fractal by fractal.
  __aicore__ inline void Left(const LocalTensor<T>& near, int32_t rows, int32_t depth) {
    const int32_t depthFractals = Fractals(depth), rowFractals = Fractals(rows);
    LocalTensor<T> left = leftL0.template Get<T>();
    for (int32_t i = 0; i < rowFractals; ++i) {
      LoadData(left[i * depthFractals * 256], near,
               LoadData2DParams(i, depthFractals, rowFractals, 0, 0, false, 0));
    }
  }

  // The product of what stands in L0A and L0B, rows by columns, to global memory.
  __aicore__ inline void Multiply(const GlobalTensor<float>& target, int32_t sub, int32_t rows,
                                  int32_t columns, int32_t depth, int32_t pitch) {
    LocalTensor<float> product = productL0.template Get<float>()[sub * kTreeSubRows * kTreeColumns];
    SetFlag<HardEvent::MTE1_M>(0);
    WaitFlag<HardEvent::MTE1_M>(0);
    WaitFlag<HardEvent::FIX_M>(sub);
    // A single row stands twice: with m = 1 Mmad would be a matrix-vector product.
    Mmad(product, leftL0.template Get<T>(), rightL0.template Get<T>(),
         MmadParams(rows == 1 ? 2 : rows, columns, depth, 0, false, true));
    SetFlag<HardEvent::M_MTE1>(0);
    SetFlag<HardEvent::M_FIX>(sub);
    WaitFlag<HardEvent::M_FIX>(sub);
    Fixpipe(target, product, FixpipeParamsV220(columns, rows, Fractals(rows) * 16, pitch, false));
    SetFlag<HardEvent::FIX_M>(sub);
  }

  __aicore__ inline void Scores(TreePlan& plan, int32_t tile) {
    const int32_t dim = tiling.headDim, keys = plan.Keys(tile), half = tile % 2;
    WaitFlag<HardEvent::MTE2_MTE1>(kKeys + half);
    WaitFlag<HardEvent::M_MTE1>(0);
    // Keys by rows are fractal for fractal the right operand.
    LoadData(rightL0.template Get<T>(), keyL1.template Get<T>()[half * kTreeColumns * dim],
             LoadData2DParams(0, Fractals(keys) * dim / 16, 1, 0, 0, false, 0));
    SetFlag<HardEvent::MTE1_MTE2>(kKeys + half);
    for (int32_t sub = 0; sub < 2; ++sub) {
      const int32_t rows = plan.queries[sub] * tiling.group;
      if (rows == 0) continue;
      if (sub > 0) WaitFlag<HardEvent::M_MTE1>(0);
      Left(queryL1.template Get<T>()[sub * kTreeSubRows * dim], rows, dim);
      const int64_t slot = (static_cast<int64_t>(block) * 2 + half) * 2 + sub;
      Multiply(scoreGlobal[slot * kTreeSubRows * kTreeColumns], sub, rows, keys, dim, kTreeColumns);
    }
    CrossCoreSetFlag<2, PIPE_FIX>(kTreeScores);
  }

  __aicore__ inline void Sums(TreePlan& plan, int32_t tile) {
    const int32_t dim = tiling.headDim, keys = plan.Keys(tile), half = tile % 2;
    const int32_t keyFractals = Fractals(keys);
    LocalTensor<T> value = valueL1.template Get<T>()[half * kTreeColumns * dim];
    WaitFlag<HardEvent::MTE2_MTE1>(kValues + half);
    WaitFlag<HardEvent::M_MTE1>(0);
    // Values by rows have to be turned, fractal by fractal, as keys run along the product's depth.
    for (int32_t i = 0; i < keyFractals; ++i) {
      LoadData(rightL0.template Get<T>()[i * dim / 16 * 256], value,
               LoadData2DParams(i, dim / 16, keyFractals, 0, 0, true, 0));
    }
    SetFlag<HardEvent::MTE1_MTE2>(kValues + half);
    for (int32_t sub = 0; sub < 2; ++sub) {
      const int32_t rows = plan.queries[sub] * tiling.group;
      if (rows == 0) continue;
      const int64_t slot = static_cast<int64_t>(block) * 2 + sub;
      Weights(weightGlobal[slot * kTreeSubRows * kTreeColumns], rows, keys);
      if (sub > 0) WaitFlag<HardEvent::M_MTE1>(0);
      Left(weightL1.template Get<T>(), rows, keys);
      SetFlag<HardEvent::MTE1_MTE2>(kWeights);
      Multiply(sumGlobal[slot * kTreeSubRows * dim], sub, rows, dim, keys, dim);
    }
    CrossCoreSetFlag<2, PIPE_FIX>(kTreeSums);
  }

  // Weights of a sub-tile into L1; columns behind the keys of the last fractal become 0.
  __aicore__ inline void Weights(const GlobalTensor<T>& weights, int32_t rows, int32_t keys) {
    LocalTensor<T> near = weightL1.template Get<T>();
    const int32_t padded = Fractals(rows) * 16;
    WaitFlag<HardEvent::MTE1_MTE2>(kWeights);
    DataCopy(near, weights, Nd2NzParams(1, rows, keys, 0, kTreeColumns, padded, 1, 0));
    if (rows == 1) {
      DataCopy(near[16], weights, Nd2NzParams(1, 1, keys, 0, kTreeColumns, padded, 1, 0));
    }
    SetFlag<HardEvent::MTE2_MTE1>(kWeights);
    WaitFlag<HardEvent::MTE2_MTE1>(kWeights);
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
