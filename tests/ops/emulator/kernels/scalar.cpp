// SPDX-License-Identifier: Apache-2.0
// Scalar access to global memory and to UB, atop hazards in global memory: see test_scalar.py.
#include "kernel_operator.h"

using namespace AscendC;

constexpr uint32_t kLine = 16;  // 4-byte elements of a cache line

class ScalarKernel {
 public:
  __aicore__ inline void Init(GM_ADDR x, GM_ADDR y) {
    xGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(x));
    yGlobal.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(y));
    pipe.InitBuffer(buffer, kLine * sizeof(int32_t));
  }

  __aicore__ inline void Process(int32_t which) {
    const int64_t block = GetBlockIdx();
    LocalTensor<int32_t> line = buffer.Get<int32_t>();
    GlobalTensor<int32_t> mine = yGlobal[block * kLine];
    switch (which) {
      case 0:  // each core its own line
        for (uint32_t i = 0; i < kLine; ++i)
          mine.SetValue(i, xGlobal.GetValue(i) + static_cast<int32_t>(block));
        return Clean(mine);
      case 1:  // never written back
        return mine.SetValue(3, 1);
      case 2:  // two cores in one line
        yGlobal.SetValue(block, 1);
        return Clean(yGlobal);
      case 3:  // an old copy: the line was read, then changed by the core's own copy
      case 4:
        Fill(mine, line, 5);
        mine.GetValue(0);
        Fill(mine, line, 6);
        if (which == 4) Clean(mine);
        return mine.SetValue(1, mine.GetValue(0) + 1), Clean(mine);
      case 5:  // the copy out is not waited for
        Duplicate(line, 7, static_cast<int32_t>(kLine));
        Order<HardEvent::V_MTE3>();
        DataCopy(mine, line, kLine);
        return mine.SetValue(0, mine.GetValue(0));
      case 6:  // two cores copy to one place
        Duplicate(line, 8, static_cast<int32_t>(kLine));
        Order<HardEvent::V_MTE3>();
        return DataCopy(yGlobal, line, kLine);
      case 7:  // GetValue before the copy in is there
        DataCopy(line, xGlobal, kLine);
        return line.SetValue(0, line.GetValue(1));
      case 8:  // SetValue goes out before it is there
        Duplicate(line, 0, static_cast<int32_t>(kLine));
        Order<HardEvent::V_S>();
        line.SetValue(0, 9);
        Order<HardEvent::V_MTE3>();
        return DataCopy(mine, line, kLine);
      case 9:  // ids from the pipe
        return Ids();
      default:  // flags between cores in a kernel without a cube
        return CrossCoreSetFlag<0, PIPE_MTE3>(0);
    }
  }

 private:
  template <HardEvent event>
  __aicore__ inline void Order() {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }

  __aicore__ inline void Clean(const GlobalTensor<int32_t>& line) {
    DataCacheCleanAndInvalid<int32_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(line);
  }

  __aicore__ inline void Fill(const GlobalTensor<int32_t>& target, const LocalTensor<int32_t>& line,
                              int32_t value) {
    Duplicate(line, value, static_cast<int32_t>(kLine));
    Order<HardEvent::V_MTE3>();
    Order<HardEvent::S_MTE3>();
    DataCopy(target, line, kLine);
    Order<HardEvent::MTE3_V>();
    Order<HardEvent::MTE3_S>();
  }

  __aicore__ inline void Ids() {
    const TEventID first = pipe.AllocEventID<HardEvent::V_S>();
    const TEventID second = pipe.AllocEventID<HardEvent::V_S>();
    SetFlag<HardEvent::V_S>(first);
    WaitFlag<HardEvent::V_S>(first);
    pipe.ReleaseEventID<HardEvent::V_S>(first);
    const TEventID third = pipe.FetchEventID(HardEvent::V_S);
    yGlobal.SetValue(0, first * 100 + second * 10 + third);
    Clean(yGlobal);
  }

  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  GlobalTensor<int32_t> xGlobal, yGlobal;
};

extern "C" __global__ __aicore__ void scalar_kernel(GM_ADDR x, GM_ADDR y, int32_t which) {
  ScalarKernel kernel;
  kernel.Init(x, y);
  kernel.Process(which);
}
