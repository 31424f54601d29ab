// SPDX-License-Identifier: Apache-2.0
// z = x + y over tiles with double buffering, and the same with one mistake each: see test_add.py.
#include "kernel_operator.h"

using namespace AscendC;

constexpr uint32_t kTile = 256;

class AddKernel {
 public:
  __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, GM_ADDR z, uint32_t count, int32_t mistake) {
    this->count = count;
    this->mistake = mistake;
    xGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x), count);
    yGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(y), count);
    zGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(z), count);
    pipe.InitBuffer(xQueue, 2, mistake == 1 ? 96000 : kTile * sizeof(float));
    pipe.InitBuffer(yQueue, 2, kTile * sizeof(float));
    pipe.InitBuffer(zQueue, 2, kTile * sizeof(float));
  }

  __aicore__ inline void Process() {
    const uint32_t tiles = (count + kTile - 1) / kTile;
    for (uint32_t tile = GetBlockIdx(); tile < tiles; tile += GetBlockNum()) {
      const uint32_t first = tile * kTile;
      Tile(first, count - first < kTile ? count - first : kTile);
    }
    if (mistake == 16) SetFlag<HardEvent::V_MTE3>(EVENT_ID3);
  }

 private:
  __aicore__ inline void Load(TQue<TPosition::VECIN, 2>& queue, GlobalTensor<float>& source,
                              uint32_t first, uint32_t number) {
    LocalTensor<float> tensor = queue.AllocTensor<float>();
    const uint32_t bytes = number * sizeof(float);
    DataCopyPad(tensor, source[first], DataCopyExtParams(1, bytes, 0, 0, 0),
                DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
    queue.EnQue(tensor);
  }

  __aicore__ inline void Tile(uint32_t first, uint32_t number) {
    Load(xQueue, xGlobal, mistake == 2 ? first + 1 : first, number);
    Load(yQueue, yGlobal, first, mistake == 3 ? number - 1 : number);
    LocalTensor<float> x = xQueue.DeQue<float>();
    LocalTensor<float> y = yQueue.DeQue<float>();
    LocalTensor<float> z = zQueue.AllocTensor<float>();
    if (mistake == 4) {
      Add(z[1], x[1], y[1], number - 1);
    } else if (mistake == 5) {
      Add(x[8], x, y, number - 8);
    } else {
      Add(z, x, y, number);
    }
    if (mistake == 6) xQueue.FreeTensor(x);
    if (mistake == 6) Add(z, x, y, number);
    if (mistake == 7) z.SetValue(0, 0.0f);
    if (mistake == 8) Adds(z, z, 1.0f, number);
    if (mistake == 9) {
      DataCopyPad(zGlobal[first], z, DataCopyExtParams(1, number * sizeof(float), 0, 0, 0));
    }
    if (mistake == 10) zQueue.FreeTensor(z);
    zQueue.EnQue(z);
    if (mistake == 11) Muls(z, z, 2.0f, number);
    z = zQueue.DeQue<float>();
    if (mistake == 12) z = zQueue.DeQue<float>();
    const uint32_t bytes = (mistake == 13 ? number + 1 : number) * sizeof(float);
    DataCopyPad(zGlobal[first], z, DataCopyExtParams(1, bytes, 0, 0, 0));
    if (mistake == 14) PipeBarrier<PIPE_V>();
    if (mistake == 14) Adds(z, x, 1.0f, number);
    if (mistake != 15) zQueue.FreeTensor(z);
    if (mistake != 6) xQueue.FreeTensor(x);
    yQueue.FreeTensor(y);
    if (mistake == 17) WaitFlag<HardEvent::MTE3_V>(EVENT_ID4);
    if (mistake == 18) SetFlag<HardEvent::MTE1_M>(EVENT_ID0);
    if (mistake == 19) SetFlag<HardEvent::V_S>(EVENT_ID6);
    if (mistake == 20) xGlobal.SetValue(first, 0.0f);
  }

  TPipe pipe;
  TQue<TPosition::VECIN, 2> xQueue, yQueue;
  TQue<TPosition::VECOUT, 2> zQueue;
  GlobalTensor<float> xGlobal, yGlobal, zGlobal;
  uint32_t count;
  int32_t mistake;
};

extern "C" __global__ __aicore__ void add_kernel(GM_ADDR x, GM_ADDR y, GM_ADDR z, uint32_t count,
                                                 int32_t mistake) {
  AddKernel kernel;
  kernel.Init(x, y, z, count, mistake);
  kernel.Process();
}
