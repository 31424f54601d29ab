// SPDX-License-Identifier: Apache-2.0
// LocalTensor and GlobalTensor: typed views of a core's memory and of global memory.
#pragma once
#include "machine.h"

namespace AscendC {

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;

  LocalTensor() = default;
  explicit LocalTensor(const emu::Local& where) : local(where) {}

  LocalTensor operator[](const uint32_t offset) const {
    const uint64_t bytes = static_cast<uint64_t>(offset) * sizeof(T);
    if (bytes > local.bytes) {
      emu::fail("LocalTensor[%u]: the tensor has %u elements; keep the offset inside it", offset,
                GetSize());
    }
    LocalTensor part(*this);
    part.local.offset += static_cast<uint32_t>(bytes);
    part.local.bytes -= static_cast<uint32_t>(bytes);
    return part;
  }

  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(local);
  }

  uint32_t GetSize() const { return local.bytes / sizeof(T); }

  T GetValue(const uint32_t index) const {
    emu::begin("LocalTensor.GetValue", PIPE_S);
    emu::require_memory(local, "tensor", emu::kUb);
    T value;
    std::memcpy(&value,
                emu::touch(local, static_cast<uint64_t>(index) * sizeof(T), sizeof(T), false),
                sizeof(T));
    return value;
  }

  template <typename U>
  void SetValue(const uint32_t index, const U value) const {
    emu::begin("LocalTensor.SetValue", PIPE_S);
    emu::require_memory(local, "tensor", emu::kUb);
    const T stored = static_cast<T>(value);
    std::memcpy(emu::touch(local, static_cast<uint64_t>(index) * sizeof(T), sizeof(T), true),
                &stored, sizeof(T));
  }

  emu::Local local;
};

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;

  GlobalTensor() = default;

  void SetGlobalBuffer(__gm__ T* buffer, uint64_t bufferSize) {
    global = emu::global_of(buffer);
    size = bufferSize;
  }
  void SetGlobalBuffer(__gm__ T* buffer) { SetGlobalBuffer(buffer, UINT64_MAX / sizeof(T)); }

  GlobalTensor operator[](const uint64_t offset) const {
    if (offset > size) {
      emu::fail("GlobalTensor[%llu]: SetGlobalBuffer gave it %llu elements; keep the offset inside",
                static_cast<unsigned long long>(offset), static_cast<unsigned long long>(size));
    }
    GlobalTensor part(*this);
    part.global.address += offset * sizeof(T);
    part.size -= offset;
    return part;
  }

  uint64_t GetSize() const { return size; }

  T GetValue(const uint64_t offset) const {
    emu::begin("GlobalTensor.GetValue", PIPE_S);
    T value;
    emu::scalar_load(at(offset, 1), &value, sizeof(T));
    return value;
  }

  void SetValue(const uint64_t offset, T value) const {
    emu::begin("GlobalTensor.SetValue", PIPE_S);
    emu::scalar_store(at(offset, 1), &value, sizeof(T));
  }

  // Where `count` elements from `offset` stand, inside the size that SetGlobalBuffer named.
  emu::Global at(uint64_t offset, uint64_t count) const {
    if (offset + count > size) {
      emu::fail("elements %llu to %llu of a GlobalTensor of %llu elements; keep the access inside",
                static_cast<unsigned long long>(offset),
                static_cast<unsigned long long>(offset + count),
                static_cast<unsigned long long>(size));
    }
    emu::Global where = global;
    where.address += offset * sizeof(T);
    return where;
  }

  emu::Global global;
  uint64_t size = 0;
};

template <typename T, CacheLine entireType, DcciDst dcciDst>
inline void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst) {
  static_assert(dcciDst == DcciDst::CACHELINE_OUT || dcciDst == DcciDst::CACHELINE_ALL,
                "global memory is reached with DcciDst::CACHELINE_OUT");
  emu::begin("DataCacheCleanAndInvalid", PIPE_S);
  emu::clean_cache(dst.global, entireType == CacheLine::ENTIRE_DATA_CACHE);
}

}  // namespace AscendC

namespace emu {

// The elements of a count-form operand, checked; `operand` names it in errors.
template <class T>
inline T* span(const AscendC::LocalTensor<T>& tensor, const char* operand, uint64_t count,
               bool write) {
  require_aligned(tensor.local, operand, 32);
  return reinterpret_cast<T*>(touch(tensor.local, 0, count * sizeof(T), write));
}

// Operands that overlap must be the same bytes: what an instruction reads of its own result is
// undefined.
inline void require_no_partial_overlap(const Local& a, uint64_t a_bytes, const Local& b,
                                       uint64_t b_bytes) {
  if (a.memory != b.memory || !a_bytes || !b_bytes) return;
  if (a.offset == b.offset && a_bytes == b_bytes) return;
  if (a.offset < b.offset + b_bytes && b.offset < a.offset + a_bytes) {
    fail(
        "destination [%u, %llu) and source [%u, %llu) overlap in part; use the same tensor or "
        "separate ones",
        a.offset, static_cast<unsigned long long>(a.offset + a_bytes), b.offset,
        static_cast<unsigned long long>(b.offset + b_bytes));
  }
}

inline void require_separate(const Local& a, uint64_t a_bytes, const Local& b, uint64_t b_bytes) {
  if (a.memory == b.memory && a.offset == b.offset && a_bytes == b_bytes && a_bytes) {
    fail("destination and source are the same bytes at %u; this instruction needs separate tensors",
         a.offset);
  }
  require_no_partial_overlap(a, a_bytes, b, b_bytes);
}

inline uint64_t repeats_of(uint64_t bytes) { return (bytes + 255) / 256; }

}  // namespace emu
