// SPDX-License-Identifier: Apache-2.0
// TPipe, TQue and TBuf: who owns which piece of a core's memory, and the flags that hand it over.
#pragma once
#include "sync.h"
#include "tensor.h"

namespace AscendC {

template <TPosition source, TPosition target, int32_t depth>
class TQueBind {
  static_assert(depth >= 1, "queues of depth 0 (in-place) are not part of the subset");

 public:
  template <typename T>
  LocalTensor<T> AllocTensor() {
    return LocalTensor<T>(emu::queue_alloc(number));
  }

  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor) {
    emu::queue_enque(number, tensor.local);
    return true;
  }

  template <typename T>
  LocalTensor<T> DeQue() {
    return LocalTensor<T>(emu::queue_deque(number));
  }

  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor) {
    emu::queue_free(number, tensor.local);
  }

  bool HasTensorInQue() { return emu::queue_has_tensor(number); }
  bool HasIdleBuffer() { return emu::queue_has_idle_buffer(number); }

  int16_t number = -1;  // given by TPipe::InitBuffer
};

// Where the data of a queue goes next, by its position.
constexpr TPosition queue_target(TPosition position) {
  switch (position) {
    case TPosition::VECIN:
      return TPosition::VECCALC;
    case TPosition::VECOUT:
      return TPosition::GM;
    case TPosition::A1:
      return TPosition::A2;
    case TPosition::B1:
      return TPosition::B2;
    case TPosition::CO1:
      return TPosition::CO2;
    default:
      return TPosition::CO1;  // A2 and B2 feed the cube
  }
}

template <TPosition position, int32_t depth>
using TQue = TQueBind<position, queue_target(position), depth>;

template <TPosition position = TPosition::VECCALC>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() {
    return LocalTensor<T>(local);
  }

  template <typename T>
  LocalTensor<T> Get(uint32_t len) {
    return GetWithOffset<T>(len, 0);
  }

  // `size` in elements, `bufOffset` in bytes.
  template <typename T>
  LocalTensor<T> GetWithOffset(uint32_t size, uint32_t bufOffset) {
    const uint64_t bytes = static_cast<uint64_t>(size) * sizeof(T);
    if (bufOffset + bytes > local.bytes) {
      emu::fail("TBuf of %u bytes: [%u, %llu) is not inside; give InitBuffer more bytes",
                local.bytes, bufOffset, static_cast<unsigned long long>(bufOffset + bytes));
    }
    emu::Local part = local;
    part.offset += bufOffset;
    part.bytes = static_cast<uint32_t>(bytes);
    return LocalTensor<T>(part);
  }

  emu::Local local;
};

class TPipe {
 public:
  TPipe() { emu::pipe_open(); }
  ~TPipe() { emu::pipe_close(); }
  TPipe(const TPipe&) = delete;
  TPipe& operator=(const TPipe&) = delete;

  template <TPosition source, TPosition target, int32_t depth>
  bool InitBuffer(TQueBind<source, target, depth>& queue, uint8_t num, uint32_t len) {
    queue.number = emu::queue_init(source, target, depth, num, len);
    return true;
  }

  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, uint32_t len) {
    buffer.local = emu::buffer_init(position, len);
    return true;
  }

  void Reset() { emu::pipe_reset(); }

  template <HardEvent event>
  TEventID AllocEventID() {
    return static_cast<TEventID>(emu::take_event(event, true));
  }

  template <HardEvent event>
  void ReleaseEventID(TEventID id) {
    emu::release_event(event, id);
  }

  // An id that is free at the moment; it stays free until SetFlag.
  TEventID FetchEventID(HardEvent event) {
    return static_cast<TEventID>(emu::take_event(event, false));
  }
};

}  // namespace AscendC
