// SPDX-License-Identifier: Apache-2.0
// Reductions over a tensor, over a repeat of 256 bytes and over a block of 32 bytes.
#pragma once
#include <algorithm>
#include <vector>

#include "vector.h"

namespace emu {

// Sum in pairs: another order than a serial sum, as on the device.
template <class T>
inline T pair_sum(const T* values, uint32_t count) {
  if (count == 0) return T(0.0f);
  if (count == 1) return values[0];
  const uint32_t half_count = (count + 1) / 2;
  return narrow<T>(widen(pair_sum(values, half_count)) +
                   widen(pair_sum(values + half_count, count - half_count)));
}

// Index of the largest (sign 1) or smallest (sign -1) value, the first of equal ones.
template <class T>
inline uint32_t best_of(const T* values, uint32_t count, int sign) {
  uint32_t best = 0;
  for (uint32_t i = 0; i < count; ++i) {
    refuse_nan(widen(values[i]));
    const float a = sign * static_cast<float>(widen(values[i]));
    if (a > sign * static_cast<float>(widen(values[best]))) best = i;
  }
  return best;
}

// The index is stored as the bits of an element.
template <class T>
inline T index_bits(uint32_t index) {
  if constexpr (sizeof(T) == 4) {
    return bit_cast<T>(index);
  } else {
    if (index > 65535) fail("index %u does not fit a half; at most 65535", index);
    return bit_cast<T>(static_cast<uint16_t>(index));
  }
}

inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Elements of sharedTmpBuffer that a count-form ReduceMax or ReduceMin needs.
template <class T>
inline uint64_t extreme_workspace(uint64_t count, bool index) {
  constexpr uint64_t kBlock = 32 / sizeof(T), kRepeat = 256 / sizeof(T);
  const uint64_t first = round_up((count + kRepeat - 1) / kRepeat * 2, kBlock);
  if (!index) return first;
  const uint64_t second_count = (first + kRepeat - 1) / kRepeat * 2;
  const uint64_t second = round_up(second_count, kBlock);
  const uint64_t third = round_up((second_count + kRepeat - 1) / kRepeat * 2, kBlock);
  return first + second + third;
}

template <class T>
inline void reduce_extreme(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
                           const AscendC::LocalTensor<T>& tmp, int32_t count, bool with_index,
                           int sign) {
  static_assert(is_one_of<T, half, float>, "ReduceMax and ReduceMin: half and float on 910B");
  require_memory(dst.local, "dst", kUb);
  require_memory(src.local, "src", kUb);
  require_memory(tmp.local, "sharedTmpBuffer", kUb);
  const uint64_t number = checked_count(count);
  if (!number) return;
  const T* values = span(src, "src", number, false);
  const uint32_t best = best_of(values, static_cast<uint32_t>(number), sign);
  const T result = values[best];
  require_aligned(tmp.local, "sharedTmpBuffer", 32);
  spoil(tmp.local, 0, extreme_workspace<T>(number, with_index) * sizeof(T));
  T* target = span(dst, "dst", with_index ? 2 : 1, true);
  target[0] = result;
  if (with_index) target[1] = index_bits<T>(best);
}

// One result of each repeat. f(values, count, target): writes `width` elements.
template <class T, class F>
inline void each_repeat(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
                        int32_t mask, int32_t repeat, int32_t dst_stride, int32_t src_block,
                        int32_t src_stride, uint32_t width, F f) {
  static_assert(is_one_of<T, half, float>, "WholeReduce: half and float on 910B");
  require_vector(src, "src");
  require_memory(dst.local, "dst", kUb);
  if (repeat < 0 || repeat > 255) fail("repeatTime = %d: 0 to 255", repeat);
  if (dst.local.offset % sizeof(T)) fail("dst is not aligned to its element size");
  const Mask lane_mask = first_lanes<T>(static_cast<uint64_t>(mask));
  constexpr uint32_t kBlock = 32 / sizeof(T);
  for (int32_t r = 0; r < repeat; ++r) {
    T values[256 / sizeof(T)];
    uint32_t number = 0;
    for (int b = 0; b < 8; ++b) {
      const uint32_t bits = block_lanes<T>(lane_mask, b);
      if (!bits) continue;
      const T* source =
          lanes(src, static_cast<uint64_t>(r) * src_stride + b * src_block, bits, false);
      for (uint32_t i = 0; i < kBlock; ++i) {
        if (bits >> i & 1u) values[number++] = source[i];
      }
    }
    const uint64_t at = static_cast<uint64_t>(r) * dst_stride * width * sizeof(T);
    f(values, number, reinterpret_cast<T*>(touch(dst.local, at, width * sizeof(T), true)));
  }
}

}  // namespace emu

namespace AscendC {

template <typename T, bool isSetMask = true>
inline void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const LocalTensor<T>& sharedTmpBuffer, const int32_t count,
                      bool calIndex = false) {
  emu::begin("ReduceMax", PIPE_V, emu::repeats_of(emu::checked_count(count) * sizeof(T)));
  emu::reduce_extreme(dst, src, sharedTmpBuffer, count, calIndex, 1);
}

template <typename T, bool isSetMask = true>
inline void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const LocalTensor<T>& sharedTmpBuffer, const int32_t count,
                      bool calIndex = false) {
  emu::begin("ReduceMin", PIPE_V, emu::repeats_of(emu::checked_count(count) * sizeof(T)));
  emu::reduce_extreme(dst, src, sharedTmpBuffer, count, calIndex, -1);
}

template <typename T, bool isSetMask = true>
inline void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const LocalTensor<T>& sharedTmpBuffer, const int32_t count) {
  static_assert(emu::is_one_of<T, half, float>, "ReduceSum: half and float on 910B");
  const uint64_t number = emu::checked_count(count);
  emu::begin("ReduceSum", PIPE_V, emu::repeats_of(number * sizeof(T)));
  emu::require_memory(dst.local, "dst", emu::kUb);
  emu::require_memory(src.local, "src", emu::kUb);
  emu::require_memory(sharedTmpBuffer.local, "sharedTmpBuffer", emu::kUb);
  if (!number) return;
  constexpr uint64_t kRepeat = 256 / sizeof(T), kBlock = 32 / sizeof(T);
  const T* values = emu::span(src, "src", number, false);
  std::vector<T> sums;
  for (uint64_t first = 0; first < number; first += kRepeat) {
    sums.push_back(
        emu::pair_sum(values + first, static_cast<uint32_t>(std::min(kRepeat, number - first))));
  }
  emu::require_aligned(sharedTmpBuffer.local, "sharedTmpBuffer", 32);
  emu::spoil(sharedTmpBuffer.local, 0, emu::round_up(sums.size(), kBlock) * sizeof(T));
  emu::span(dst, "dst", 1, true)[0] =
      emu::pair_sum(sums.data(), static_cast<uint32_t>(sums.size()));
}

// dstRepStride counts results: pairs of value and index, or values alone.
template <typename T, bool isSetMask = true>
inline void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,
                           const int32_t repeatTime, const int32_t dstRepStride,
                           const int32_t srcBlkStride, const int32_t srcRepStride,
                           ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX) {
  emu::begin("WholeReduceMax", PIPE_V, static_cast<uint64_t>(repeatTime < 0 ? 0 : repeatTime));
  if (order != ReduceOrder::ORDER_VALUE_INDEX && order != ReduceOrder::ORDER_ONLY_VALUE) {
    emu::fail("WholeReduceMax: this emulator has ORDER_VALUE_INDEX and ORDER_ONLY_VALUE");
  }
  const bool index = order == ReduceOrder::ORDER_VALUE_INDEX;
  emu::each_repeat(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride,
                   index ? 2 : 1, [index](const T* values, uint32_t number, T* target) {
                     const uint32_t best = emu::best_of(values, number, 1);
                     target[0] = values[best];
                     if (index) target[1] = emu::index_bits<T>(best);
                   });
}

template <typename T, bool isSetMask = true>
inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,
                           const int32_t repeatTime, const int32_t dstRepStride,
                           const int32_t srcBlkStride, const int32_t srcRepStride) {
  emu::begin("WholeReduceSum", PIPE_V, static_cast<uint64_t>(repeatTime < 0 ? 0 : repeatTime));
  emu::each_repeat(
      dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, 1,
      [](const T* values, uint32_t number, T* target) { *target = emu::pair_sum(values, number); });
}

}  // namespace AscendC
