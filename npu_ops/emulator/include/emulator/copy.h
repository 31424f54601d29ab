// SPDX-License-Identifier: Apache-2.0
// DataCopy and DataCopyPad between global memory and a core, and the row-major to fractal copy into
// L1.
#pragma once
#include "params.h"
#include "tensor.h"

namespace emu {

// MTE2 fills UB and L1; MTE3 empties them.
inline void require_dma_memory(const Local& tensor) {
  if (tensor.memory != kUb && tensor.memory != kL1) {
    fail("DataCopy reaches UB and L1 only; use LoadData for L0A and L0B, Fixpipe for L0C");
  }
  require_aligned(tensor, "local tensor", 32);
}

inline void require_gap(uint64_t value, uint64_t highest, const char* field) {
  if (value > highest) {
    fail("%s = %llu: at most %llu; split the copy", field, static_cast<unsigned long long>(value),
         static_cast<unsigned long long>(highest));
  }
}

}  // namespace emu

namespace AscendC {

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                     const DataCopyParams& params) {
  emu::begin("DataCopy", PIPE_MTE2);
  emu::require_dma_memory(dst.local);
  emu::require_gap(params.blockCount, 4095, "blockCount");
  for (uint64_t block = 0; block < params.blockCount; ++block) {
    const uint64_t bytes = params.blockLen * 32ull;
    const uint64_t from = block * (params.blockLen + params.srcStride) * 32ull;
    const uint64_t to = block * (params.blockLen + params.dstStride) * 32ull;
    uint8_t* target = emu::touch(dst.local, to, bytes, true);
    std::memcpy(target,
                emu::touch_global(src.at(from / sizeof(T), bytes / sizeof(T)), bytes, false),
                bytes);
  }
}

template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                     const DataCopyParams& params) {
  emu::begin("DataCopy", PIPE_MTE3);
  emu::require_dma_memory(src.local);
  emu::require_gap(params.blockCount, 4095, "blockCount");
  for (uint64_t block = 0; block < params.blockCount; ++block) {
    const uint64_t bytes = params.blockLen * 32ull;
    const uint64_t from = block * (params.blockLen + params.srcStride) * 32ull;
    const uint64_t to = block * (params.blockLen + params.dstStride) * 32ull;
    const uint8_t* source = emu::touch(src.local, from, bytes, false);
    std::memcpy(emu::touch_global(dst.at(to / sizeof(T), bytes / sizeof(T)), bytes, true), source,
                bytes);
  }
}

namespace detail {
template <typename T>
inline DataCopyParams whole_blocks(uint32_t count) {
  const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(T);
  if (bytes % 32) {
    emu::fail("DataCopy of %u elements is %llu bytes, not a multiple of 32; use DataCopyPad", count,
              static_cast<unsigned long long>(bytes));
  }
  emu::require_gap(bytes / 32, 65535, "32-byte blocks of a DataCopy");
  return DataCopyParams(1, static_cast<uint16_t>(bytes / 32), 0, 0);
}
}  // namespace detail

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count) {
  DataCopy(dst, src, detail::whole_blocks<T>(count));
}

template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count) {
  DataCopy(dst, src, detail::whole_blocks<T>(count));
}

// UB to UB: the vector pipe moves it.
template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count) {
  const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(T);
  detail::whole_blocks<T>(count);
  emu::begin("DataCopy", PIPE_V, emu::repeats_of(bytes));
  emu::require_memory(dst.local, "dst", emu::kUb);
  emu::require_memory(src.local, "src", emu::kUb);
  emu::require_no_partial_overlap(dst.local, bytes, src.local, bytes);
  const T* source = emu::span(src, "src", count, false);
  std::memmove(emu::span(dst, "dst", count, true), source, bytes);
}

namespace detail {
template <typename T>
inline void check_pad_copy(const DataCopyExtParams& params) {
  emu::require_gap(params.blockCount, 4095, "blockCount");
  emu::require_gap(params.blockLen, 2097151, "blockLen");
  if (params.blockLen % sizeof(T)) {
    emu::fail("blockLen = %u bytes is not a multiple of the element size %zu", params.blockLen,
              sizeof(T));
  }
}
}  // namespace detail

template <typename T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                        const DataCopyExtParams& dataCopyParams,
                        const DataCopyPadExtParams<T>& padParams) {
  emu::begin("DataCopyPad", PIPE_MTE2);
  emu::require_memory(dst.local, "dst", emu::kUb);
  emu::require_aligned(dst.local, "dst", 32);
  const DataCopyExtParams& p = dataCopyParams;
  detail::check_pad_copy<T>(p);
  emu::require_gap(padParams.leftPadding * sizeof(T), 32, "leftPadding in bytes");
  emu::require_gap(padParams.rightPadding * sizeof(T), 32, "rightPadding in bytes");
  static_assert(sizeof(T) <= 4, "DataCopyPad of 8-byte elements is not part of the subset");
  if (!p.blockLen) return;
  const uint64_t left = padParams.leftPadding * sizeof(T),
                 right = padParams.rightPadding * sizeof(T);
  const uint64_t used = left + p.blockLen + right, step = (used + 31) / 32 * 32;
  for (uint64_t block = 0; block < p.blockCount; ++block) {
    const uint64_t to = block * (step + p.dstStride * 32ull);
    const uint64_t from = block * (static_cast<uint64_t>(p.blockLen) + p.srcStride);
    if (from % sizeof(T))
      emu::fail("srcStride = %u bytes is not a multiple of the element size", p.srcStride);
    const uint8_t* source =
        emu::touch_global(src.at(from / sizeof(T), p.blockLen / sizeof(T)), p.blockLen, false);
    // All 32-byte blocks are written; bytes that no parameter names hold what the device left
    // there.
    uint8_t* target = emu::spoil(dst.local, to, step);
    if (padParams.isPad && (left || right)) {
      emu::touch(dst.local, to, step, true);
      for (uint64_t i = 0; i < step / sizeof(T); ++i) {
        std::memcpy(target + i * sizeof(T), &padParams.paddingValue, sizeof(T));
      }
    }
    emu::touch(dst.local, to + left, p.blockLen, true);
    std::memcpy(target + left, source, p.blockLen);
  }
}

template <typename T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                        const DataCopyExtParams& dataCopyParams) {
  emu::begin("DataCopyPad", PIPE_MTE3);
  emu::require_memory(src.local, "src", emu::kUb);
  emu::require_aligned(src.local, "src", 32);
  const DataCopyExtParams& p = dataCopyParams;
  detail::check_pad_copy<T>(p);
  if (!p.blockLen) return;
  const uint64_t step = (p.blockLen + 31ull) / 32 * 32 + p.srcStride * 32ull;
  for (uint64_t block = 0; block < p.blockCount; ++block) {
    const uint64_t to = block * (static_cast<uint64_t>(p.blockLen) + p.dstStride);
    if (to % sizeof(T))
      emu::fail("dstStride = %u bytes is not a multiple of the element size", p.dstStride);
    const uint8_t* source = emu::touch(src.local, block * step, p.blockLen, false);
    std::memcpy(emu::touch_global(dst.at(to / sizeof(T), p.blockLen / sizeof(T)), p.blockLen, true),
                source, p.blockLen);
  }
}

// Row-major matrices in global memory to column groups of 32 bytes in L1: row i, group j of a
// matrix goes to block j * dstNzC0Stride + i * dstNzNStride. A last group that is not full is
// filled with zeros.
template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                     const Nd2NzParams& params) {
  emu::begin("DataCopy(Nd2Nz)", PIPE_MTE2);
  emu::require_memory(dst.local, "dst", emu::kL1);
  emu::require_aligned(dst.local, "dst", 32);
  constexpr uint64_t kGroup = 32 / sizeof(T);
  emu::require_gap(params.ndNum, 4095, "ndNum");
  emu::require_gap(params.nValue, 16384, "nValue");
  if (!params.dstNzC0Stride || params.dstNzC0Stride > 16384) {
    emu::fail("dstNzC0Stride = %u: 1 to 16384 blocks", params.dstNzC0Stride);
  }
  if (!params.dstNzNStride || params.dstNzNStride > 16384) {
    emu::fail("dstNzNStride = %u: 1 to 16384 blocks", params.dstNzNStride);
  }
  if (params.srcDValue < params.dValue) {
    emu::fail("srcDValue = %u is less than dValue = %u; it is the distance of two rows in elements",
              params.srcDValue, params.dValue);
  }
  for (uint64_t matrix = 0; matrix < params.ndNum; ++matrix) {
    for (uint64_t row = 0; row < params.nValue; ++row) {
      const uint64_t from = matrix * params.srcNdMatrixStride + row * params.srcDValue;
      const uint64_t row_bytes = params.dValue * sizeof(T);
      const uint8_t* source = emu::touch_global(src.at(from, params.dValue), row_bytes, false);
      for (uint64_t first = 0; first < params.dValue; first += kGroup) {
        const uint64_t block = first / kGroup * params.dstNzC0Stride + row * params.dstNzNStride;
        const uint64_t to = matrix * params.dstNzMatrixStride * sizeof(T) + block * 32;
        const uint64_t bytes =
            (params.dValue - first < kGroup ? params.dValue - first : kGroup) * sizeof(T);
        uint8_t* target = emu::touch(dst.local, to, 32, true);
        std::memset(target, 0, 32);
        std::memcpy(target, source + first * sizeof(T), bytes);
      }
    }
  }
}

}  // namespace AscendC
