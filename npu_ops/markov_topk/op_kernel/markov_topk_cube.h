// SPDX-License-Identifier: Apache-2.0
// The cube's half of markov_topk: products latent @ w2^T, tile after tile of the vocabulary, into a
// ring of two slots in global memory. The whole [R, V] never exists.
#pragma once
#include "../op_host/markov_topk_tiling.h"
#include "kernel_operator.h"

using namespace AscendC;

// Flags between a cube core and its two vector cores.
constexpr uint16_t kMarkovReady = 0;  // a product is in its slot
constexpr uint16_t kMarkovFree = 1;   // both vector cores have read a slot

// Tiles of one block, [first, first + number).
struct MarkovShare {
  int32_t first, number;
};

__aicore__ inline MarkovShare MarkovTiles(const MarkovTopkTiling& tiling, int32_t block) {
  const int32_t first = block * tiling.tilesPerBlock;
  const int32_t left = tiling.numTiles - first;
  return {first, left < 0 ? 0 : left < tiling.tilesPerBlock ? left : tiling.tilesPerBlock};
}

__aicore__ inline int32_t MarkovFractals(int32_t size) { return (size + 15) / 16; }

template <typename T>
class MarkovCube {
 public:
  __aicore__ inline void Init(TPipe& pipe, GM_ADDR latent, GM_ADDR w2, GM_ADDR ring,
                              const MarkovTopkTiling& tiling) {
    this->tiling = tiling;
    block = GetBlockIdx();
    latentGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(latent));
    w2Global.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(w2));
    ringGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(ring));
    // m = 1 would make Mmad a matrix-vector product, so there are at least two rows.
    mostRows = MarkovFractals(tiling.rowTile) * 16;
    const int32_t rank = tiling.rank;
    pipe.InitBuffer(latentL1, mostRows * rank * sizeof(T));
    pipe.InitBuffer(latentL0, mostRows * rank * sizeof(T));
    pipe.InitBuffer(weightL1, 2 * tiling.tileColumns * rank * sizeof(T));
    pipe.InitBuffer(weightL0, 2 * tiling.sliceColumns * rank * sizeof(T));
    pipe.InitBuffer(productL0, 2 * mostRows * tiling.tileColumns * sizeof(float));
  }

  __aicore__ inline void Process() {
    const MarkovShare share = MarkovTiles(tiling, block);
    if (share.number == 0) return;
    for (int32_t half = 0; half < 2; ++half) {
      SetFlag<HardEvent::MTE1_MTE2>(half);
      SetFlag<HardEvent::M_MTE1>(half);
      SetFlag<HardEvent::FIX_M>(half);
    }
    int32_t step = 0;
    for (int32_t first = 0; first < tiling.rows; first += tiling.rowTile) {
      const int32_t left = tiling.rows - first;
      const int32_t rows = left < tiling.rowTile ? left : tiling.rowTile;
      Latents(first, rows);
      for (int32_t tile = 0; tile < share.number; ++tile, ++step)
        Tile(rows, share.first + tile, step);
    }
    for (int32_t half = 0; half < 2; ++half) {
      WaitFlag<HardEvent::MTE1_MTE2>(half);
      WaitFlag<HardEvent::M_MTE1>(half);
      WaitFlag<HardEvent::FIX_M>(half);
    }
  }

 private:
  // Rows of latent into L0A: fractal by fractal, rows of fractals one after the other.
  __aicore__ inline void Latents(int32_t first, int32_t rows) {
    SetFlag<HardEvent::M_MTE1>(2);
    WaitFlag<HardEvent::M_MTE1>(2);
    SetFlag<HardEvent::MTE1_MTE2>(2);
    WaitFlag<HardEvent::MTE1_MTE2>(2);
    const int32_t rank = tiling.rank, rowFractals = MarkovFractals(rows), rankFractals = rank / 16;
    LocalTensor<T> near = latentL1.template Get<T>(), operand = latentL0.template Get<T>();
    DataCopy(near, latentGlobal[static_cast<uint64_t>(first) * rank],
             Nd2NzParams(1, rows, rank, 0, rank, rowFractals * 16, 1, 0));
    // A single row stands twice: Mmad needs two.
    if (rows == 1) {
      DataCopy(near[16], latentGlobal[static_cast<uint64_t>(first) * rank],
               Nd2NzParams(1, 1, rank, 0, rank, rowFractals * 16, 1, 0));
    }
    SetFlag<HardEvent::MTE2_MTE1>(2);
    WaitFlag<HardEvent::MTE2_MTE1>(2);
    for (int32_t i = 0; i < rowFractals; ++i) {
      LoadData(operand[i * rankFractals * 256], near,
               LoadData2DParams(i, rankFractals, rowFractals, 0, 0, false, 0));
    }
  }

  __aicore__ inline void Tile(int32_t rows, int32_t tile, int32_t step) {
    const int32_t half = step % 2, column = tile * tiling.tileColumns, rank = tiling.rank;
    const int32_t left = tiling.numTokens - column;
    const int32_t columns = left < tiling.tileColumns ? left : tiling.tileColumns;
    const int32_t columnFractals = MarkovFractals(columns), paddedRows = MarkovFractals(rows) * 16;
    LocalTensor<T> weight = weightL1.template Get<T>()[half * tiling.tileColumns * rank];
    LocalTensor<float> product =
        productL0.template Get<float>()[half * mostRows * tiling.tileColumns];
    WaitFlag<HardEvent::MTE1_MTE2>(half);
    DataCopy(weight, w2Global[static_cast<uint64_t>(column) * rank],
             Nd2NzParams(1, columns, rank, 0, rank, columnFractals * 16, 1, 0));
    SetFlag<HardEvent::MTE2_MTE1>(half);
    WaitFlag<HardEvent::MTE2_MTE1>(half);
    WaitFlag<HardEvent::FIX_M>(half);
    for (int32_t first = 0; first < columns; first += tiling.sliceColumns) {
      const int32_t rest = columns - first;
      Slice(product[first * paddedRows], weight, rows, first,
            rest < tiling.sliceColumns ? rest : tiling.sliceColumns, columnFractals);
    }
    SetFlag<HardEvent::MTE1_MTE2>(half);
    SetFlag<HardEvent::M_FIX>(half);
    WaitFlag<HardEvent::M_FIX>(half);
    if (step >= kMarkovSlots) CrossCoreWaitFlag(kMarkovFree);
    const uint64_t slot = static_cast<uint64_t>(block) * kMarkovSlots + step % kMarkovSlots;
    Fixpipe(ringGlobal[slot * tiling.rowTile * tiling.tileColumns], product,
            FixpipeParamsV220(columns, rows, paddedRows, tiling.tileColumns, false));
    SetFlag<HardEvent::FIX_M>(half);
    CrossCoreSetFlag<2, PIPE_FIX>(kMarkovReady);
  }

  // Columns [first, first + columns) of a tile: w2's rows are the operand's columns as they stand
  // in L1.
  __aicore__ inline void Slice(const LocalTensor<float>& product, const LocalTensor<T>& weight,
                               int32_t rows, int32_t first, int32_t columns,
                               int32_t columnFractals) {
    const int32_t part = slices++ % 2, fractals = MarkovFractals(columns);
    LocalTensor<T> operand = weightL0.template Get<T>()[part * tiling.sliceColumns * tiling.rank];
    WaitFlag<HardEvent::M_MTE1>(part);
    for (int32_t i = 0; i < fractals; ++i) {
      LoadData(operand[i * 256], weight,
               LoadData2DParams(first / 16 + i, tiling.rank / 16, columnFractals, 0, fractals - 1,
                                false, 0));
    }
    SetFlag<HardEvent::MTE1_M>(part);
    WaitFlag<HardEvent::MTE1_M>(part);
    Mmad(product, latentL0.template Get<T>(), operand,
         MmadParams(rows == 1 ? 2 : rows, columns, tiling.rank, 0, false, true));
    SetFlag<HardEvent::M_MTE1>(part);
  }

  TBuf<TPosition::A1> latentL1;
  TBuf<TPosition::B1> weightL1;
  TBuf<TPosition::A2> latentL0;
  TBuf<TPosition::B2> weightL0;
  TBuf<TPosition::CO1> productL0;
  GlobalTensor<T> latentGlobal, w2Global;
  GlobalTensor<float> ringGlobal;
  MarkovTopkTiling tiling;
  int32_t block, mostRows;
  int32_t slices = 0;
};
