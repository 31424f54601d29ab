// SPDX-License-Identifier: Apache-2.0
// One vector instruction between a load and a store: see test_vector.py and test_sort.py.
#include "kernel_operator.h"

using namespace AscendC;

// `which` counts as NAMES in vector_world.py.
struct VectorCase {
  int32_t which;
  uint32_t aBytes, bBytes, outBytes;
  int32_t p[6];
  float f;
};

constexpr uint32_t kBytes = 8192;

class VectorKernel {
 public:
  __aicore__ inline void Init() {
    pipe.InitBuffer(aBuffer, kBytes);
    pipe.InitBuffer(bBuffer, kBytes);
    pipe.InitBuffer(outBuffer, kBytes);
    pipe.InitBuffer(tmpBuffer, kBytes);
  }

  __aicore__ inline void Process(GM_ADDR a, GM_ADDR b, GM_ADDR out, const VectorCase& c) {
    Load(aBuffer, a, c.aBytes);
    Load(bBuffer, b, c.bBytes);
    LocalTensor<float> zero = outBuffer.Get<float>();
    Duplicate(zero, 0.0f, static_cast<int32_t>(kBytes / sizeof(float)));
    PipeBarrier<PIPE_ALL>();
    if (c.which < 10) {
      Elementwise(c);
    } else if (c.which < 20) {
      Choose(c);
    } else {
      Order(c);
    }
    PipeBarrier<PIPE_ALL>();
    GlobalTensor<uint32_t> target;
    target.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(out), c.outBytes / sizeof(uint32_t));
    DataCopy(target, outBuffer.Get<uint32_t>(), c.outBytes / sizeof(uint32_t));
  }

 private:
  __aicore__ inline void Load(TBuf<TPosition::VECCALC>& buffer, GM_ADDR source, uint32_t bytes) {
    if (bytes == 0) return;
    GlobalTensor<uint32_t> global;
    global.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(source), bytes / sizeof(uint32_t));
    DataCopy(buffer.Get<uint32_t>(), global, bytes / sizeof(uint32_t));
  }

  __aicore__ inline void Elementwise(const VectorCase& c) {
    LocalTensor<float> a = aBuffer.Get<float>(), b = bBuffer.Get<float>(),
                       out = outBuffer.Get<float>();
    const int32_t* p = c.p;
    switch (c.which) {
      case 0:
        return Add(outBuffer.Get<half>(), aBuffer.Get<half>(), bBuffer.Get<half>(), p[0]);
      case 1:
        return Add(out, a, b, static_cast<uint64_t>(p[0]), p[1],
                   BinaryRepeatParams(1, 1, 1, p[2], p[3], p[4]));
      case 2:
        return Cast(outBuffer.Get<half>(), a, RoundMode::CAST_RINT, p[0]);
      case 3:
        return Cast(outBuffer.Get<bfloat16_t>(), a, static_cast<RoundMode>(p[1]), p[0]);
      case 4:
        return Cast(out, aBuffer.Get<bfloat16_t>(), RoundMode::CAST_NONE, p[0]);
      case 5:
        return Cast(outBuffer.Get<int32_t>(), a, static_cast<RoundMode>(p[1]), p[0]);
      case 6:
        return Max(out, a, b, p[0]);
      case 7:
        return CreateVecIndex(outBuffer.Get<int32_t>(), p[1], p[0]);
      case 8:
        return Duplicate(out, c.f, static_cast<uint64_t>(p[0]), p[1], p[2], p[3]);
      default:
        return ShiftLeft(outBuffer.Get<int32_t>(), aBuffer.Get<int32_t>(), p[1], p[0]);
    }
  }

  __aicore__ inline void Choose(const VectorCase& c) {
    LocalTensor<float> a = aBuffer.Get<float>(), b = bBuffer.Get<float>(),
                       out = outBuffer.Get<float>();
    const int32_t* p = c.p;
    uint64_t kept = 0;
    switch (c.which) {
      case 10:
        return Compare(outBuffer.Get<uint8_t>(), a, b, static_cast<CMPMODE>(p[1]), p[0]);
      case 11:
        return Select(out, bBuffer.Get<uint8_t>(), a, c.f, SELMODE::VSEL_TENSOR_SCALAR_MODE, p[0]);
      case 12:
        return Gather(out, a, bBuffer.Get<uint32_t>(), p[1], p[0]);
      case 13:
        GatherMask(outBuffer.Get<uint32_t>(), aBuffer.Get<uint32_t>(), static_cast<uint8_t>(p[0]),
                   p[2] > 0, p[2], GatherMaskParams(1, p[1], p[3], 0), kept);
        return outBuffer.Get<uint32_t>().SetValue(p[4], static_cast<uint32_t>(kept));
      case 14:
        return Brcb(outBuffer.Get<half>(), aBuffer.Get<half>(), p[0], BrcbRepeatParams(p[1], p[2]));
      case 15:
        GatherMask(outBuffer.Get<uint32_t>(), aBuffer.Get<uint32_t>(), bBuffer.Get<uint32_t>(),
                   true, p[2], GatherMaskParams(1, p[1], p[3], 0), kept);
        return;
      default:
        return CompareScalar(outBuffer.Get<uint8_t>(), aBuffer.Get<int32_t>(), p[2],
                             static_cast<CMPMODE>(p[1]), p[0]);
    }
  }

  __aicore__ inline void Order(const VectorCase& c) {
    LocalTensor<float> a = aBuffer.Get<float>(), out = outBuffer.Get<float>();
    LocalTensor<float> tmp = tmpBuffer.Get<float>(c.p[5] ? c.p[5] : kBytes / sizeof(float));
    const int32_t* p = c.p;
    switch (c.which) {
      case 20:
        return ReduceMax(out, a, tmp, p[0], p[1] != 0);
      case 21:
        return ReduceSum(out, a, tmp, p[0]);
      case 22:
        return WholeReduceMax(out, a, p[0], p[1], p[2], 1, 8);
      case 23:
        return Sort32(out, a[p[1]], bBuffer.Get<uint32_t>(), p[0]);
      case 24:
        return Merge(c);
      default:
        return WholeReduceSum(out, a, p[0], p[1], p[2], 1, 8);
    }
  }

  __aicore__ inline void Merge(const VectorCase& c) {
    LocalTensor<float> a = aBuffer.Get<float>();
    const uint32_t step = c.p[0] * 2;
    MrgSort4Info info;
    for (int32_t i = 0; i < 4; ++i) info.elementLengths[i] = c.p[0];
    info.validBit = c.p[1];
    info.repeatTimes = c.p[2];
    info.ifExhaustedSuspension = c.p[3] != 0;
    MrgSort(outBuffer.Get<float>(), MrgSortSrcList<float>(a, a[step], a[2 * step], a[3 * step]),
            info);
    if (c.p[4] == 0) return;
    uint16_t taken[4];
    GetMrgSortResult(taken[0], taken[1], taken[2], taken[3]);
    PipeBarrier<PIPE_ALL>();
    for (int32_t i = 0; i < 4; ++i) outBuffer.Get<uint32_t>().SetValue(c.p[4] + i, taken[i]);
  }

  TPipe pipe;
  TBuf<TPosition::VECCALC> aBuffer, bBuffer, outBuffer, tmpBuffer;
};

extern "C" __global__ __aicore__ void vector_case(GM_ADDR a, GM_ADDR b, GM_ADDR out, VectorCase c) {
  VectorKernel kernel;
  kernel.Init();
  kernel.Process(a, b, out, c);
}

struct PadCase {
  uint32_t count, blockCount, blockLen, srcStride, dstStride, isPad, left, right, outBytes;
  float value;
};

// Loads with DataCopyPad and stores all of it.
extern "C" __global__ __aicore__ void pad_case(GM_ADDR a, GM_ADDR out, PadCase c) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, kBytes);
  GlobalTensor<float> source, target;
  source.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a), c.count);
  target.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(out));
  LocalTensor<float> tensor = buffer.Get<float>();
  DataCopyPad(tensor, source,
              DataCopyExtParams(c.blockCount, c.blockLen, c.srcStride, c.dstStride, 0),
              DataCopyPadExtParams<float>(c.isPad != 0, c.left, c.right, c.value));
  SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
  WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
  DataCopyPad(target, tensor, DataCopyExtParams(1, c.outBytes, 0, 0, 0));
}
