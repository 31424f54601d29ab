// SPDX-License-Identifier: Apache-2.0
// pack_tree on vector cores, one request at a time per core. See ../README.md for what is computed.
//
// A candidate's value is the smallest score + bias on its path. Values are sorted down, lower
// column first on ties, and the first n are put back into column order, so that parents come before
// children. Then a scalar loop over at most 127 nodes gives each its row, its parent's row, and the
// mask words of its parent with one more bit.
#pragma once
#include "../op_host/pack_tree_tiling.h"
#include "kernel_operator.h"

using namespace AscendC;

// Elements: where a value's parent stands is an offset into `values`, and the columns start there
// behind 32 sentinels of +inf, the last of which is the parent of the root's children. 32 floats
// keep Sort32 aligned.
constexpr int32_t kSentinels = 32;
constexpr int32_t kNodes = 128;  // selected candidates, rounded up for Sort32 and Compare
constexpr int32_t kMaxRows = kPackTreeMaxBudget + 1;
constexpr int32_t kMaxWords = 4;

// Addresses in global memory, as the entry gets them.
struct PackTreeAddresses {
  GM_ADDR scores;
  GM_ADDR parents;
  GM_ADDR depths;
  GM_ADDR counts;
  GM_ADDR depthBias;
  GM_ADDR index;
  GM_ADDR parent;
  GM_ADDR depth;
  GM_ADDR position;
  GM_ADDR mask;
  GM_ADDR count;
};

// kLength: candidates rounded up, 128, 512 or 1024.
template <int32_t kLength>
class PackTreeKernel {
 public:
  __aicore__ inline void Init(const PackTreeAddresses& at, const PackTreeTiling& tiling) {
    this->tiling = tiling;
    scoresGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at.scores));
    biasGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(at.depthBias));
    parentsGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at.parents));
    depthsGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at.depths));
    countsGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at.counts));
    indexGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at.index));
    parentGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at.parent));
    depthGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at.depth));
    positionGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at.position));
    maskGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at.mask));
    countGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(at.count));
    InitBuffers();
  }

  __aicore__ inline void Process() {
    if (GetBlockIdx() >= tiling.numRequests) return;
    Constants();
    for (int32_t request = GetBlockIdx(); request < tiling.numRequests; request += GetBlockNum()) {
      Load(request);
      Values();
      Envelope();
      const int32_t kept = count < tiling.budget ? count : tiling.budget;
      SortDown();
      SortUp(kept);
      Rows(kept);
      Store(request);
    }
  }

 private:
  // In this order Sort32 finds its results at multiples of 256 bytes and its sources at multiples
  // of 128.
  __aicore__ inline void InitBuffers() {
    pipe.InitBuffer(pairBufferA, kLength * 2 * sizeof(float));
    pipe.InitBuffer(pairBufferB, kLength * 2 * sizeof(float));
    pipe.InitBuffer(valueBuffer, (kSentinels + kLength) * sizeof(float));
    pipe.InitBuffer(columnBuffer, kLength * sizeof(int32_t));
    pipe.InitBuffer(keyBuffer, kNodes * sizeof(float));
    pipe.InitBuffer(chosenBuffer, kNodes * sizeof(int32_t));
    pipe.InitBuffer(parentBuffer, kLength * sizeof(int32_t));
    pipe.InitBuffer(depthBuffer, kLength * sizeof(int32_t));
    pipe.InitBuffer(offsetBuffer, kLength * sizeof(int32_t));
    pipe.InitBuffer(scratchBuffer, kLength * sizeof(float));
    pipe.InitBuffer(rampBuffer, kLength * sizeof(float));
    pipe.InitBuffer(rowBuffer, kLength * sizeof(int32_t));
    pipe.InitBuffer(indexBuffer, kNodes * sizeof(int32_t));
    pipe.InitBuffer(upBuffer, kMaxRows * sizeof(int32_t));
    pipe.InitBuffer(levelBuffer, kMaxRows * sizeof(int32_t));
    pipe.InitBuffer(maskBuffer, kMaxRows * kMaxWords * sizeof(int32_t));
    pipe.InitBuffer(bitBuffer, kLength / 8);
    pipe.InitBuffer(biasBuffer, (kPackTreeMaxDepth + 1) * sizeof(float));
    pipe.InitBuffer(countBuffer, 2 * 32);
  }

  __aicore__ inline float FloatOf(uint32_t bits) { return *reinterpret_cast<float*>(&bits); }

  template <HardEvent event>
  __aicore__ inline void After() {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }

  __aicore__ inline LocalTensor<float> Value() {
    return valueBuffer.template Get<float>()[kSentinels];
  }

  // What stays the same for all requests of this core.
  __aicore__ inline void Constants() {
    Duplicate(valueBuffer.template Get<float>(), FloatOf(0x7f800000u), kSentinels);
    CreateVecIndex(columnBuffer.template Get<int32_t>(), 0, static_cast<uint32_t>(kLength));
    CreateVecIndex(rampBuffer.template Get<float>(), 0.0f, static_cast<uint32_t>(kLength));
    const uint32_t bytes = (tiling.maxDepth + 1) * sizeof(float);
    DataCopyPad(biasBuffer.template Get<float>(), biasGlobal, DataCopyExtParams(1, bytes, 0, 0, 0),
                DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
    PipeBarrier<PIPE_V>();
  }

  // One row of the inputs, behind values that stand for absent candidates.
  __aicore__ inline void Load(int32_t request) {
    Duplicate(Value(), FloatOf(0xff800000u), kLength);
    Duplicate(parentBuffer.template Get<int32_t>(), -1, kLength);
    Duplicate(depthBuffer.template Get<int32_t>(), 0, kLength);
    After<HardEvent::V_MTE2>();
    const int32_t candidates = tiling.numCandidates;
    const uint32_t first = request * candidates;
    const uint8_t tail = (8 - candidates % 8) % 8;
    const DataCopyExtParams row(1, candidates * sizeof(float), 0, 0, 0);
    DataCopyPad(Value(), scoresGlobal[first], row,
                DataCopyPadExtParams<float>(true, 0, tail, FloatOf(0xff800000u)));
    DataCopyPad(parentBuffer.template Get<int32_t>(), parentsGlobal[first], row,
                DataCopyPadExtParams<int32_t>(true, 0, tail, -1));
    DataCopyPad(depthBuffer.template Get<int32_t>(), depthsGlobal[first], row,
                DataCopyPadExtParams<int32_t>(true, 0, tail, 0));
    DataCopyPad(countBuffer.template Get<int32_t>(), countsGlobal[request],
                DataCopyExtParams(1, sizeof(int32_t), 0, 0, 0),
                DataCopyPadExtParams<int32_t>(false, 0, 0, 0));
    // The scalar unit issues V's instructions, so they wait with it.
    After<HardEvent::MTE2_S>();
    const int32_t given = countBuffer.template Get<int32_t>().GetValue(0);
    count = given < 0 ? 0 : given < candidates ? given : candidates;
  }

  // score + bias of the depth, and -inf for NaN and absent candidates.
  __aicore__ inline void Values() {
    LocalTensor<int32_t> depth = depthBuffer.template Get<int32_t>();
    LocalTensor<int32_t> offset = offsetBuffer.template Get<int32_t>();
    LocalTensor<float> bias = scratchBuffer.template Get<float>();
    LocalTensor<float> value = Value();
    Maxs(depth, depth, 0, kLength);
    PipeBarrier<PIPE_V>();
    Mins(depth, depth, tiling.maxDepth, kLength);
    PipeBarrier<PIPE_V>();
    Muls(offset, depth, static_cast<int32_t>(sizeof(float)), kLength);
    PipeBarrier<PIPE_V>();
    Gather(bias, biasBuffer.template Get<float>(), offset.template ReinterpretCast<uint32_t>(), 0u,
           static_cast<uint32_t>(kLength));
    PipeBarrier<PIPE_V>();
    Add(value, value, bias, kLength);
    PipeBarrier<PIPE_V>();
    LocalTensor<uint8_t> bits = bitBuffer.template Get<uint8_t>();
    Compare(bits, value, value, CMPMODE::EQ, static_cast<uint32_t>(kLength));
    Keep(value, bits, kLength);
    CompareScalar(bits, rampBuffer.template Get<float>(), static_cast<float>(count), CMPMODE::LT,
                  static_cast<uint32_t>(kLength));
    Keep(value, bits, kLength);
  }

  // Entries whose bit is 0 become -inf.
  __aicore__ inline void Keep(const LocalTensor<float>& value, const LocalTensor<uint8_t>& bits,
                              uint32_t number) {
    PipeBarrier<PIPE_V>();
    Select(value, bits, value, FloatOf(0xff800000u), SELMODE::VSEL_TENSOR_SCALAR_MODE, number);
    PipeBarrier<PIPE_V>();
  }

  // The smallest value on each path: after round r it covers r + 1 nodes, and a path has at most
  // maxDepth.
  __aicore__ inline void Envelope() {
    LocalTensor<int32_t> parent = parentBuffer.template Get<int32_t>();
    LocalTensor<int32_t> offset = offsetBuffer.template Get<int32_t>();
    LocalTensor<float> above = scratchBuffer.template Get<float>();
    Maxs(parent, parent, -1, kLength);
    PipeBarrier<PIPE_V>();
    Mins(parent, parent, kLength - 1, kLength);
    PipeBarrier<PIPE_V>();
    Adds(offset, parent, kSentinels, kLength);
    PipeBarrier<PIPE_V>();
    Muls(offset, offset, static_cast<int32_t>(sizeof(float)), kLength);
    PipeBarrier<PIPE_V>();
    for (int32_t round = 1; round < tiling.maxDepth; ++round) {
      Gather(above, valueBuffer.template Get<float>(), offset.template ReinterpretCast<uint32_t>(),
             0u, static_cast<uint32_t>(kLength));
      PipeBarrier<PIPE_V>();
      Min(Value(), Value(), above, kLength);
      PipeBarrier<PIPE_V>();
    }
  }

  // Merges groups of `ways` neighbouring lists of `length` pairs each.
  __aicore__ inline void Merge(const LocalTensor<float>& target, const LocalTensor<float>& source,
                               int32_t length, int32_t ways, int32_t groups) {
    MrgSort4Info info;
    for (int32_t i = 0; i < 4; ++i) info.elementLengths[i] = length;
    info.ifExhaustedSuspension = false;
    info.validBit = ways == 4 ? 15 : 3;
    info.repeatTimes = groups;
    const int32_t step = length * 2;
    const int32_t third = ways == 4 ? 2 * step : 0, fourth = ways == 4 ? 3 * step : 0;
    MrgSort(target, MrgSortSrcList<float>(source, source[step], source[third], source[fourth]),
            info);
    PipeBarrier<PIPE_V>();
  }

  // (value, column) pairs of all candidates, best first, into pairBufferB; the columns of the first
  // 128 chosen.
  __aicore__ inline void SortDown() {
    LocalTensor<float> a = pairBufferA.template Get<float>(), b = pairBufferB.template Get<float>();
    if constexpr (kLength == 512) {
      LocalTensor<float> swapped = a;
      a = b;
      b = swapped;
    }
    Sort32(a, Value(), columnBuffer.template Get<uint32_t>(), kLength / 32);
    PipeBarrier<PIPE_V>();
    Merge(b, a, 32, 4, kLength / 128);
    if constexpr (kLength == 512) Merge(a, b, 128, 4, 1);
    if constexpr (kLength == 1024) {
      Merge(a, b, 128, 4, 2);
      Merge(b, a, 512, 2, 1);
    }
    Columns(chosenBuffer.template Get<uint32_t>(), pairBufferB.template Get<uint32_t>());
  }

  // The second words of the first 128 pairs.
  __aicore__ inline void Columns(const LocalTensor<uint32_t>& target,
                                 const LocalTensor<uint32_t>& pairs) {
    uint64_t number = 0;
    constexpr uint8_t kOdd = 2;
    GatherMask(target, pairs, kOdd, false, 0u, GatherMaskParams(1, kNodes * 2 / 64, 8, 0), number);
    PipeBarrier<PIPE_V>();
  }

  // The first `kept` chosen columns in ascending order, into indexBuffer.
  __aicore__ inline void SortUp(int32_t kept) {
    LocalTensor<float> key = keyBuffer.template Get<float>();
    LocalTensor<uint8_t> bits = bitBuffer.template Get<uint8_t>();
    Cast(key, chosenBuffer.template Get<int32_t>(), RoundMode::CAST_RINT,
         static_cast<uint32_t>(kNodes));
    PipeBarrier<PIPE_V>();
    Muls(key, key, -1.0f, kNodes);
    CompareScalar(bits, rampBuffer.template Get<float>(), static_cast<float>(kept), CMPMODE::LT,
                  static_cast<uint32_t>(kNodes));
    Keep(key, bits, kNodes);
    LocalTensor<float> a = pairBufferA.template Get<float>(), b = pairBufferB.template Get<float>();
    Sort32(a, key, chosenBuffer.template Get<uint32_t>(), kNodes / 32);
    PipeBarrier<PIPE_V>();
    Merge(b, a, 32, 4, 1);
    Columns(indexBuffer.template Get<uint32_t>(), pairBufferB.template Get<uint32_t>());
  }

  // Padding first, then the root and one row for each kept candidate.
  __aicore__ inline void Rows(int32_t kept) {
    LocalTensor<int32_t> up = upBuffer.template Get<int32_t>(),
                         level = levelBuffer.template Get<int32_t>();
    LocalTensor<int32_t> mask = maskBuffer.template Get<int32_t>(),
                         row = rowBuffer.template Get<int32_t>();
    LocalTensor<int32_t> index = indexBuffer.template Get<int32_t>();
    LocalTensor<int32_t> parent = parentBuffer.template Get<int32_t>(),
                         depth = depthBuffer.template Get<int32_t>();
    Duplicate(up, -1, kMaxRows);
    Duplicate(level, 0, kMaxRows);
    Duplicate(mask, 0, kMaxRows * kMaxWords);
    Duplicate(row, 0, kLength);
    After<HardEvent::V_S>();
    mask.SetValue(0, 1);
    for (int32_t node = 0; node < kept; ++node) {
      const int32_t column = index.GetValue(node), current = node + 1;
      const int32_t above = parent.GetValue(column);
      const int32_t parentRow = above < 0 ? 0 : row.GetValue(above);
      row.SetValue(column, current);
      up.SetValue(current, parentRow);
      level.SetValue(current, depth.GetValue(column));
      for (int32_t word = 0; word < tiling.numWords; ++word) {
        uint32_t bits = mask.GetValue(parentRow * tiling.numWords + word);
        if (word == current / 32) bits |= 1u << (current % 32);
        mask.SetValue(current * tiling.numWords + word, static_cast<int32_t>(bits));
      }
    }
    for (int32_t node = kept; node < tiling.budget; ++node) index.SetValue(node, -1);
    countBuffer.template Get<int32_t>().SetValue(8, kept);
  }

  __aicore__ inline void Put(const GlobalTensor<int32_t>& target,
                             const LocalTensor<int32_t>& source, int32_t request, int32_t number) {
    DataCopyPad(target[request * number], source,
                DataCopyExtParams(1, number * sizeof(int32_t), 0, 0, 0));
  }

  __aicore__ inline void Store(int32_t request) {
    // The scalar unit has waited for V, so this covers what V wrote too.
    After<HardEvent::S_MTE3>();
    const int32_t rows = tiling.budget + 1;
    Put(indexGlobal, indexBuffer.template Get<int32_t>(), request, tiling.budget);
    Put(parentGlobal, upBuffer.template Get<int32_t>(), request, rows);
    Put(depthGlobal, levelBuffer.template Get<int32_t>(), request, rows);
    Put(positionGlobal, levelBuffer.template Get<int32_t>(), request, rows);
    Put(maskGlobal, maskBuffer.template Get<int32_t>(), request, rows * tiling.numWords);
    Put(countGlobal, countBuffer.template Get<int32_t>()[8], request, 1);
    // The next request overwrites these buffers, V first: it waits for MTE3, which has waited for
    // S.
    After<HardEvent::MTE3_V>();
  }

  TPipe pipe;
  TBuf<TPosition::VECCALC> valueBuffer, parentBuffer, depthBuffer, offsetBuffer, scratchBuffer,
      columnBuffer, rampBuffer, rowBuffer, pairBufferA, pairBufferB, bitBuffer, biasBuffer,
      countBuffer, keyBuffer, chosenBuffer, indexBuffer, upBuffer, levelBuffer, maskBuffer;
  GlobalTensor<float> scoresGlobal, biasGlobal;
  GlobalTensor<int32_t> parentsGlobal, depthsGlobal, countsGlobal, indexGlobal, parentGlobal,
      depthGlobal, positionGlobal, maskGlobal, countGlobal;
  PackTreeTiling tiling;
  int32_t count;  // candidates of the current request
};
