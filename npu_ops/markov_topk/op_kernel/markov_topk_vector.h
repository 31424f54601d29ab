// SPDX-License-Identifier: Apache-2.0
// The vector cores' half of markov_topk: each takes half the rows of a product, adds the base
// logits, and keeps for every row the running maximum, the sum of exponentials and the 32 best
// (value, token) pairs.
#pragma once
#include "markov_topk_cube.h"

// Stands for the maximum before there is one: finite, so that -inf minus it is -inf and no NaN.
constexpr float kMarkovLowest = -3.0e38f;
// The largest float stands for a maximum of +inf: then +inf minus it is +inf and no NaN either.
constexpr float kMarkovHighest = 3.4028235e38f;

template <typename T>
class MarkovVector {
 public:
  __aicore__ inline void Init(TPipe& pipe, GM_ADDR baseLogits, GM_ADDR baseRow, GM_ADDR ring,
                              GM_ADDR lists, GM_ADDR maxima, GM_ADDR sums,
                              const MarkovTopkTiling& tiling) {
    this->tiling = tiling;
    block = GetBlockIdx() / 2;
    baseGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(baseLogits));
    baseRowGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(baseRow));
    ringGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(ring));
    listGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(lists));
    maximaGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(maxima));
    sumGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(sums));
    InitBuffers(pipe);
  }

  __aicore__ inline void Process() {
    const MarkovShare share = MarkovTiles(tiling, block);
    if (share.number == 0) return;
    CreateVecIndex(rampBuffer.template Get<int32_t>(), 0,
                   static_cast<uint32_t>(tiling.tileColumns));
    const int32_t passes = (tiling.rows + tiling.rowTile - 1) / tiling.rowTile;
    const int32_t steps = passes * share.number;
    int32_t step = 0;
    for (int32_t pass = 0; pass < passes; ++pass) {
      Rows(pass);
      Start();
      for (int32_t tile = 0; tile < share.number; ++tile, ++step) {
        CrossCoreWaitFlag(kMarkovReady);
        column = (share.first + tile) * tiling.tileColumns;
        const int32_t left = tiling.numTokens - column;
        columns = left < tiling.tileColumns ? left : tiling.tileColumns;
        if (rows > 0) Load(step);
        if (step + kMarkovSlots < steps) CrossCoreSetFlag<2, PIPE_MTE2>(kMarkovFree);
        if (rows == 0) continue;
        Logits();
        Sums();
        for (int32_t row = 0; row < rows; ++row) Best(row, tile == 0);
        After<HardEvent::V_MTE2>();
      }
      if (rows > 0) Store();
    }
  }

 private:
  __aicore__ inline void InitBuffers(TPipe& pipe) {
    mostRows = (tiling.rowTile + 1) / 2;
    paddedRows = (mostRows + 7) / 8 * 8;
    const int32_t size = mostRows * tiling.tileColumns;
    // In this order Sort32 finds its results at multiples of 256 bytes and its sources at multiples
    // of 128.
    pipe.InitBuffer(pairBuffer, 2 * tiling.tileColumns * 2 * sizeof(float));
    pipe.InitBuffer(logitBuffer, size * sizeof(float));
    pipe.InitBuffer(tokenBuffer, tiling.tileColumns * sizeof(int32_t));
    pipe.InitBuffer(rampBuffer, tiling.tileColumns * sizeof(int32_t));
    pipe.InitBuffer(scratchBuffer, size * sizeof(float));
    pipe.InitBuffer(rawBuffer, size * sizeof(T));
    pipe.InitBuffer(baseBuffer, tiling.tileColumns * sizeof(float));
    pipe.InitBuffer(foldBuffer, mostRows * 64 * sizeof(float));
    pipe.InitBuffer(mergedBuffer, 3 * kMarkovList * 2 * sizeof(float));
    pipe.InitBuffer(listBuffer, mostRows * kMarkovList * 2 * sizeof(float));
    pipe.InitBuffer(spreadBuffer, 2 * paddedRows * 32);
    pipe.InitBuffer(stateBuffer, 6 * paddedRows * sizeof(float));
    pipe.InitBuffer(baseRowBuffer, paddedRows * sizeof(int32_t));
    pipe.InitBuffer(bitBuffer, size / 8);
  }

  template <HardEvent event>
  __aicore__ inline void After() {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }

  __aicore__ inline float FloatOf(uint32_t bits) { return *reinterpret_cast<float*>(&bits); }

  // One value a row: 0 maximum, 1 sum, 2 maximum with this tile, 3 of this tile, 4 factor, 5 sum of
  // this tile.
  __aicore__ inline LocalTensor<float> State(int32_t which) {
    return stateBuffer.template GetWithOffset<float>(paddedRows,
                                                     which * paddedRows * sizeof(float));
  }

  // Which rows of a pass are this core's; their rows of the base logits.
  __aicore__ inline void Rows(int32_t pass) {
    const int32_t passFirst = pass * tiling.rowTile, left = tiling.rows - passFirst;
    const int32_t passRows = left < tiling.rowTile ? left : tiling.rowTile,
                  half = (passRows + 1) / 2;
    const int32_t sub = GetSubBlockIdx();
    slotRow = sub * half;
    firstRow = passFirst + slotRow;
    rows = sub == 0 ? half : passRows - half;
    if (rows == 0) return;
    DataCopyPad(baseRowBuffer.template Get<int32_t>(), baseRowGlobal[firstRow],
                DataCopyExtParams(1, rows * sizeof(int32_t), 0, 0, 0),
                DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
    After<HardEvent::MTE2_S>();
  }

  __aicore__ inline void Start() {
    for (int32_t which = 0; which < 6; ++which) {
      Duplicate(State(which), which == 1 ? 0.0f : kMarkovLowest, paddedRows);
    }
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline int32_t BaseRow(int32_t row) {
    const int32_t given = baseRowBuffer.template Get<int32_t>().GetValue(row);
    return given < 0 ? 0 : given < tiling.baseRows ? given : tiling.baseRows - 1;
  }

  // The products, with -inf behind the vocabulary's end, and each base row once for all rows that
  // share it.
  __aicore__ inline void Load(int32_t step) {
    const int32_t pitch = tiling.tileColumns;
    if (columns < pitch) {
      Duplicate(logitBuffer.template Get<float>(), FloatOf(0xff800000u), rows * pitch);
      After<HardEvent::V_MTE2>();
    }
    const uint64_t slot = static_cast<uint64_t>(block) * kMarkovSlots + step % kMarkovSlots;
    const uint32_t bytes = columns * sizeof(float), gap = (pitch - columns) * sizeof(float);
    const uint8_t tail = (8 - columns % 8) % 8;
    DataCopyPad(logitBuffer.template Get<float>(),
                ringGlobal[(slot * tiling.rowTile + slotRow) * pitch],
                DataCopyExtParams(rows, bytes, gap, gap / 32, 0),
                DataCopyPadExtParams<float>(true, 0, tail, FloatOf(0xff800000u)));
    for (int32_t row = 0; row < rows; ++row) {
      if (row > 0 && BaseRow(row) == BaseRow(row - 1)) continue;
      DataCopyPad(rawBuffer.template Get<T>()[row * pitch],
                  baseGlobal[static_cast<uint64_t>(BaseRow(row)) * tiling.vocab + column],
                  DataCopyExtParams(1, columns * sizeof(T), 0, 0, 0),
                  DataCopyPadExtParams<T>(false, 0, 0, T()));
    }
    After<HardEvent::MTE2_V>();
  }

  // (product + base) / temperature; NaN becomes -inf.
  __aicore__ inline void Logits() {
    LocalTensor<float> logit = logitBuffer.template Get<float>();
    const int32_t pitch = tiling.tileColumns;
    LocalTensor<float> base = baseBuffer.template Get<float>();
    for (int32_t row = 0; row < rows; ++row) {
      if (row == 0 || BaseRow(row) != BaseRow(row - 1)) {
        LocalTensor<T> raw = rawBuffer.template Get<T>()[row * pitch];
        if constexpr (sizeof(T) == 4) {
          base = raw;
        } else {
          Cast(base, raw, RoundMode::CAST_NONE, static_cast<uint32_t>(columns));
          PipeBarrier<PIPE_V>();
        }
      }
      Add(logit[row * pitch], logit[row * pitch], base, columns);
    }
    PipeBarrier<PIPE_V>();
    Muls(logit, logit, tiling.invTemperature, rows * pitch);
    PipeBarrier<PIPE_V>();
    LocalTensor<uint8_t> bits = bitBuffer.template Get<uint8_t>();
    Compare(bits, logit, logit, CMPMODE::EQ, static_cast<uint32_t>(rows * pitch));
    PipeBarrier<PIPE_V>();
    Select(logit, bits, logit, FloatOf(0xff800000u), SELMODE::VSEL_TENSOR_SCALAR_MODE,
           static_cast<uint32_t>(rows * pitch));
    Adds(tokenBuffer.template Get<int32_t>(), rampBuffer.template Get<int32_t>(), column, pitch);
    PipeBarrier<PIPE_V>();
  }

  // sum = sum * exp(maximum - new) + sum of exp(logit - new), for all rows at once.
  __aicore__ inline void Sums() {
    LocalTensor<float> logit = logitBuffer.template Get<float>(),
                       power = scratchBuffer.template Get<float>();
    LocalTensor<float> fold = foldBuffer.template Get<float>(),
                       spread = spreadBuffer.template Get<float>();
    const int32_t pitch = tiling.tileColumns;
    const uint8_t stride = pitch / 8, repeat = rows;
    Max(fold, logit, logit[64], 64ull, repeat, BinaryRepeatParams(1, 1, 1, 8, stride, stride));
    PipeBarrier<PIPE_V>();
    for (int32_t first = 128; first < pitch; first += 64) {
      Max(fold, fold, logit[first], 64ull, repeat, BinaryRepeatParams(1, 1, 1, 8, 8, stride));
      PipeBarrier<PIPE_V>();
    }
    WholeReduceMax(State(3), fold, 64, rows, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    PipeBarrier<PIPE_V>();
    Max(State(2), State(0), State(3), rows);
    PipeBarrier<PIPE_V>();
    Mins(State(2), State(2), kMarkovHighest, rows);
    PipeBarrier<PIPE_V>();
    Sub(State(4), State(0), State(2), rows);
    PipeBarrier<PIPE_V>();
    Exp(State(4), State(4), rows);
    Adds(State(0), State(2), 0.0f, rows);
    PipeBarrier<PIPE_V>();
    Mul(State(1), State(1), State(4), rows);
    Brcb(spread, State(0), paddedRows / 8, BrcbRepeatParams(1, 8));
    PipeBarrier<PIPE_V>();
    for (int32_t first = 0; first < pitch; first += 64) {
      Sub(power[first], logit[first], spread, 64ull, repeat,
          BinaryRepeatParams(1, 1, 0, stride, stride, 1));
    }
    PipeBarrier<PIPE_V>();
    Exp(power, power, rows * pitch);
    PipeBarrier<PIPE_V>();
    Add(fold, power, power[64], 64ull, repeat, BinaryRepeatParams(1, 1, 1, 8, stride, stride));
    PipeBarrier<PIPE_V>();
    for (int32_t first = 128; first < pitch; first += 64) {
      Add(fold, fold, power[first], 64ull, repeat, BinaryRepeatParams(1, 1, 1, 8, 8, stride));
      PipeBarrier<PIPE_V>();
    }
    WholeReduceSum(State(5), fold, 64, rows, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    Add(State(1), State(1), State(5), rows);
    PipeBarrier<PIPE_V>();
  }

  // The 32 best of a row's running list and this tile. The running list comes first, so ties keep
  // token order.
  __aicore__ inline void Best(int32_t row, bool isFirst) {
    const int32_t pitch = tiling.tileColumns, groups = pitch / 128;
    LocalTensor<float> sorted = pairBuffer.template Get<float>(), lists = sorted[pitch * 2];
    LocalTensor<float> running = listBuffer.template Get<float>()[row * kMarkovList * 2];
    LocalTensor<float> merged = mergedBuffer.template Get<float>();
    Sort32(sorted, logitBuffer.template Get<float>()[row * pitch],
           tokenBuffer.template Get<uint32_t>(), pitch / 32);
    PipeBarrier<PIPE_V>();
    MrgSort4Info info;
    for (int32_t i = 0; i < 4; ++i) info.elementLengths[i] = 32;
    info.validBit = 15;
    info.repeatTimes = groups;
    MrgSort(lists, MrgSortSrcList<float>(sorted, sorted[64], sorted[128], sorted[192]), info);
    PipeBarrier<PIPE_V>();
    info.elementLengths[0] = isFirst ? 0 : kMarkovList;
    info.validBit = groups == 1 ? 3 : 7;
    info.repeatTimes = 1;
    const LocalTensor<float> second = groups == 1 ? lists : lists[256];
    MrgSort(merged, MrgSortSrcList<float>(isFirst ? lists : running, lists, second, second), info);
    PipeBarrier<PIPE_V>();
    DataCopy(running, merged, static_cast<uint32_t>(kMarkovList * 2));
    PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void Store() {
    LocalTensor<float> maximum = spreadBuffer.template Get<float>(), sum = maximum[paddedRows * 8];
    Brcb(maximum, State(0), paddedRows / 8, BrcbRepeatParams(1, 8));
    Brcb(sum, State(1), paddedRows / 8, BrcbRepeatParams(1, 8));
    After<HardEvent::V_MTE3>();
    const uint64_t pairs = kMarkovList * 2,
                   row = static_cast<uint64_t>(block) * tiling.rows + firstRow;
    DataCopy(listGlobal[row * pairs], listBuffer.template Get<float>(),
             static_cast<uint32_t>(rows * pairs));
    const uint64_t first = static_cast<uint64_t>(firstRow) * tiling.usedBlocks + block;
    const DataCopyExtParams each(rows, sizeof(float), 0, (tiling.usedBlocks - 1) * sizeof(float),
                                 0);
    DataCopyPad(maximaGlobal[first], maximum, each);
    DataCopyPad(sumGlobal[first], sum, each);
    After<HardEvent::MTE3_V>();
    After<HardEvent::S_MTE2>();
  }

  TBuf<TPosition::VECCALC> logitBuffer, scratchBuffer, rawBuffer, baseBuffer, foldBuffer, bitBuffer,
      rampBuffer, tokenBuffer, pairBuffer, mergedBuffer, listBuffer, stateBuffer, spreadBuffer,
      baseRowBuffer;
  GlobalTensor<T> baseGlobal;
  GlobalTensor<int32_t> baseRowGlobal;
  GlobalTensor<float> ringGlobal, listGlobal, maximaGlobal, sumGlobal;
  MarkovTopkTiling tiling;
  int32_t block, mostRows, paddedRows;
  int32_t rows, firstRow, slotRow;  // of this core in the current pass
  int32_t column, columns;          // of the current tile
};
