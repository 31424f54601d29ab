// SPDX-License-Identifier: Apache-2.0
// One broken rule of buffers, queues and copies a case: see test_rules.py.
#include "kernel_operator.h"

using namespace AscendC;

constexpr uint32_t kFloats = 64;

class RulesKernel {
 public:
  __aicore__ inline RulesKernel(TPipe& pipe, GM_ADDR x, GM_ADDR y) : pipe(pipe) {
    xGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x), kFloats);
    yGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(y), kFloats);
    pipe.InitBuffer(queue, 2, kFloats * sizeof(float));
    pipe.InitBuffer(other, 1, kFloats * sizeof(float));
    pipe.InitBuffer(buffer, kFloats * sizeof(float));
  }

  __aicore__ inline void Process(int32_t which) {
    if (which < 10) {
      Buffers(which);
    } else if (which < 20) {
      Queues(which);
    } else {
      Copies(which);
    }
  }

 private:
  __aicore__ inline void Buffers(int32_t which) {
    TBuf<TPosition::VECCALC> more;
    switch (which) {
      case 0:  // 4 of 64 buffers are taken
        for (int32_t i = 0; i < 61; ++i) pipe.InitBuffer(more, 32);
        return;
      case 1: {
        TPipe second;
        return;
      }
      case 2: {
        TBuf<TPosition::A1> cube;
        pipe.InitBuffer(cube, 512);
        return;
      }
      case 3:
        buffer.Get<float>(kFloats + 1);
        return;
      case 4:
        buffer.Get<float>()[kFloats + 1];
        return;
      case 5:  // never initialised
        return Duplicate(more.Get<float>(), 0.0f, 8);
      case 6:
        return Duplicate(buffer.Get<float>(), 0.0f, static_cast<int32_t>(kFloats) + 1);
      case 7:
        return Duplicate(buffer.Get<float>(), 0.0f, -1);
      case 8: {  // old contents of a buffer that was given back
        Duplicate(buffer.Get<float>(), 0.0f, 8);
        pipe.Reset();
        pipe.InitBuffer(more, 32);
        return Duplicate(more.Get<float>(), 1.0f, 9);
      }
      default:
        pipe.InitBuffer(more, 0);
    }
  }

  __aicore__ inline void Queues(int32_t which) {
    LocalTensor<float> first = queue.AllocTensor<float>();
    switch (which) {
      case 10:  // depth 1, two tensors
        queue.EnQue(first);
        first = queue.AllocTensor<float>();
        queue.EnQue(first);
        return;
      case 11:
        other.EnQue(first);
        return;
      case 12:
        queue.EnQue(first);
        queue.EnQue(first);
        return;
      case 13:
        queue.EnQue(first);
        first = queue.DeQue<float>();
        queue.FreeTensor(first);
        return queue.FreeTensor(first);
      case 14: {  // 9 tensors at one position
        TQue<TPosition::VECIN, 1> many;
        pipe.InitBuffer(many, 9, 32);
        for (int32_t i = 0; i < 8; ++i) many.AllocTensor<float>();
        return;
      }
      case 15: {
        TQue<TPosition::VECIN, 1> none;
        none.AllocTensor<float>();
        return;
      }
      default:  // put in, never taken out
        queue.EnQue(first);
    }
  }

  __aicore__ inline void Copies(int32_t which) {
    LocalTensor<float> tensor = buffer.Get<float>();
    switch (which) {
      case 20:
        return DataCopy(tensor, xGlobal, 7);
      case 21:
        return DataCopy(tensor[1], xGlobal, 8);
      case 22:
        return DataCopy(tensor, xGlobal[60], 8);
      case 23:  // two copies in without a barrier
        DataCopy(tensor, xGlobal, kFloats);
        return DataCopy(tensor[8], xGlobal, 8);
      case 24:  // beyond the argument of the launch, not beyond SetGlobalBuffer
        xGlobal.SetGlobalBuffer(nullptr, kFloats);
        return DataCopy(tensor, xGlobal, 8);
      case 25:
        Duplicate(tensor, 0.0f, static_cast<int32_t>(kFloats));
        PipeBarrier<PIPE_ALL>();
        return DataCopy(xGlobal, tensor, 8);
      case 26:
        return DataCopy(tensor, yGlobal, 8);
      case 27:
        return DataCopy(tensor, xGlobal, DataCopyParams(4096, 1, 0, 0));
      default:  // rows of 2 blocks, a block apart in global memory and next to each other in UB
        DataCopy(tensor, xGlobal, DataCopyParams(2, 2, 1, 0));
        SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
        WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
        DataCopy(yGlobal, tensor, DataCopyParams(2, 2, 0, 1));
    }
  }

  TPipe& pipe;
  TQue<TPosition::VECIN, 1> queue;
  TQue<TPosition::VECOUT, 1> other;
  TBuf<TPosition::VECCALC> buffer;
  GlobalTensor<float> xGlobal, yGlobal;
};

extern "C" __global__ __aicore__ void rules_kernel(GM_ADDR x, GM_ADDR y, int32_t which) {
  TPipe pipe;
  RulesKernel kernel(pipe, x, y);
  kernel.Process(which);
}
