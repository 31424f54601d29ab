// SPDX-License-Identifier: Apache-2.0
// Matrix products on the cube, alone and feeding vector cores; each with mistakes: see
// test_cube.py.
#include "kernel_operator.h"

using namespace AscendC;

struct CubeCase {
  int32_t m, n, k;
  int32_t transposed;  // b is [k, n] instead of [n, k]
  int32_t tiles;       // mixed kernel: products of consecutive a
  int32_t mistake;
};

class CubeUnit {
 public:
  __aicore__ inline void Init(TPipe& pipe, const CubeCase& c) {
    this->c = c;
    mPad = (c.m + 15) / 16 * 16;
    nPad = (c.n + 15) / 16 * 16;
    pipe.InitBuffer(aL1, mPad * c.k * sizeof(half));
    pipe.InitBuffer(bL1, nPad * c.k * sizeof(half));
    pipe.InitBuffer(aL0, c.mistake == 9 ? 65568 : mPad * c.k * sizeof(half));
    pipe.InitBuffer(bL0, nPad * c.k * sizeof(half));
    pipe.InitBuffer(cL0, mPad * nPad * sizeof(float));
  }

  // target [m, n] = a [m, k] * b.
  __aicore__ inline void Product(const GlobalTensor<half>& a, const GlobalTensor<half>& b,
                                 const GlobalTensor<float>& target) {
    const int32_t bRows = c.transposed ? c.k : c.n, bColumns = c.transposed ? c.n : c.k;
    const int32_t bPad = c.transposed ? c.k : nPad;
    DataCopy(aL1.Get<half>(), a, Nd2NzParams(1, c.m, c.k, 0, c.k, mPad, 1, 0));
    DataCopy(bL1.Get<half>(), b, Nd2NzParams(1, bRows, bColumns, 0, bColumns, bPad, 1, 0));
    if (c.mistake != 1) Order<HardEvent::MTE2_MTE1>();
    LoadA();
    LoadB();
    if (c.mistake != 2) Order<HardEvent::MTE1_M>();
    Multiply();
    if (c.mistake != 3) Order<HardEvent::M_FIX>();
    FixpipeParamsV220 out(c.n, c.m, c.mistake == 6 ? c.m - 1 : mPad, c.n, false);
    if (c.mistake == 7) out.quantPre = QuantMode_t::F322F16;
    Fixpipe(target, cL0.Get<float>(), out);
    // The next product may overwrite everything.
    Order<HardEvent::FIX_M>();
    Order<HardEvent::M_MTE1>();
    Order<HardEvent::MTE1_MTE2>();
  }

 private:
  template <HardEvent event>
  __aicore__ inline void Order() {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }

  __aicore__ inline void LoadA() {
    const int32_t kFractals = c.k / 16;
    LoadData2DParams load(0, kFractals, c.mistake == 4 ? 1 : mPad / 16, 0, 0, false, 0);
    for (int32_t i = 0; i < mPad / 16; ++i) {
      load.startIndex = i;
      LoadData(aL0.Get<half>()[i * kFractals * 256], aL1.Get<half>(), load);
    }
  }

  __aicore__ inline void LoadB() {
    const int32_t kFractals = c.k / 16, nFractals = nPad / 16;
    if (!c.transposed) {
      // [n, k] in L1 is fractal for fractal what L0B wants.
      LoadData(bL0.Get<half>(), bL1.Get<half>(),
               LoadData2DParams(0, kFractals * nFractals, 1, 0, 0, false, 0));
      return;
    }
    LoadData2DParams load(0, nFractals, kFractals, 0, 0, c.mistake != 5, 0);
    for (int32_t i = 0; i < kFractals; ++i) {
      load.startIndex = i;
      LoadData(bL0.Get<half>()[i * nFractals * 256], bL1.Get<half>(), load);
    }
  }

  // Two halves of k, the second added to the first.
  __aicore__ inline void Multiply() {
    MmadParams params(c.mistake == 10 ? 1 : c.m, c.n, c.k, 0, false, c.mistake != 11);
    LocalTensor<float> sums = cL0.Get<float>();
    Mmad(c.mistake == 8 ? sums[64] : sums, aL0.Get<half>(), bL0.Get<half>(), params);
    if (c.mistake == 12 || c.mistake == 13) {
      params.cmatrixInitVal = false;
      if (c.mistake == 13) PipeBarrier<PIPE_M>();
      Mmad(sums, aL0.Get<half>(), bL0.Get<half>(), params);
    }
  }

  CubeCase c;
  int32_t mPad, nPad;
  TBuf<TPosition::A1> aL1, bL1;
  TBuf<TPosition::A2> aL0;
  TBuf<TPosition::B2> bL0;
  TBuf<TPosition::CO1> cL0;
};

extern "C" __global__ __aicore__ void product_kernel(GM_ADDR a, GM_ADDR b, GM_ADDR out,
                                                     CubeCase c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  TPipe pipe;
  GlobalTensor<half> aGlobal, bGlobal;
  GlobalTensor<float> outGlobal;
  aGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(a));
  bGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(b));
  outGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(out));
  CubeUnit unit;
  unit.Init(pipe, c);
  unit.Product(aGlobal, bGlobal, outGlobal);
}

constexpr int32_t kSlots = 2;
constexpr uint16_t kReady = 0, kFree = 1;

// The cube writes products into a ring in global memory; the two vector cores of its block add 1 to
// half the rows each. m is even, m * n of a half fits 32-byte blocks.
class RingKernel {
 public:
  __aicore__ inline void Init(GM_ADDR a, GM_ADDR b, GM_ADDR ring, GM_ADDR out, const CubeCase& c) {
    this->c = c;
    aGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(a));
    bGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(b));
    ringGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(ring));
    outGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(out));
  }

  __aicore__ inline void Cube() {
    CubeUnit unit;
    unit.Init(pipe, c);
    for (int32_t tile = 0; tile < c.tiles; ++tile) {
      if (tile >= kSlots && c.mistake != 21) CrossCoreWaitFlag(kFree);
      const int64_t first = (GetBlockIdx() * c.tiles + tile) * c.m;
      unit.Product(aGlobal[first * c.k], bGlobal, ringGlobal[Slot(GetBlockIdx(), tile)]);
      CrossCoreSetFlag<2, PIPE_FIX>(kReady);
    }
    if (c.mistake == 24) CrossCoreSetFlag<2, PIPE_FIX>(kReady);
  }

  __aicore__ inline void Vector() {
    const int64_t block = GetBlockIdx() / 2, sub = GetSubBlockIdx();
    const uint32_t count = c.m / 2 * c.n;
    pipe.InitBuffer(buffer, count * sizeof(float));
    LocalTensor<float> rows = buffer.Get<float>();
    for (int32_t tile = 0; tile < c.tiles; ++tile) {
      if (c.mistake != 20) CrossCoreWaitFlag(kReady);
      DataCopy(rows, ringGlobal[Slot(block, tile) + sub * count], count);
      const bool last = tile + kSlots >= c.tiles;
      if (!last && c.mistake != 21 && !(c.mistake == 22 && sub == 1))
        CrossCoreSetFlag<2, PIPE_MTE2>(kFree);
      Order<HardEvent::MTE2_V>();
      Adds(rows, rows, 1.0f, static_cast<int32_t>(count));
      Order<HardEvent::V_MTE3>();
      DataCopy(outGlobal[(block * c.tiles + tile) * c.m * c.n + sub * count], rows, count);
      Order<HardEvent::MTE3_MTE2>();
    }
    if (c.mistake == 23) CrossCoreSetFlag<1, PIPE_V>(kFree + 1);
  }

 private:
  template <HardEvent event>
  __aicore__ inline void Order() {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }

  __aicore__ inline int64_t Slot(int64_t block, int32_t tile) {
    return (block * kSlots + tile % kSlots) * c.m * c.n;
  }

  CubeCase c;
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  GlobalTensor<half> aGlobal, bGlobal;
  GlobalTensor<float> ringGlobal, outGlobal;
};

extern "C" __global__ __aicore__ void ring_kernel(GM_ADDR a, GM_ADDR b, GM_ADDR ring, GM_ADDR out,
                                                  CubeCase c) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  RingKernel kernel;
  kernel.Init(a, b, ring, out, c);
  if ASCEND_IS_AIC {
    kernel.Cube();
  } else {
    kernel.Vector();
  }
}
