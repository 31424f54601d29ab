// SPDX-License-Identifier: Apache-2.0
// Instructions that compare, choose, collect and spread elements.
#pragma once
#include <vector>

#include "lanes.h"

namespace emu {

template <class W>
inline bool compare(W a, W b, AscendC::CMPMODE mode) {
  switch (mode) {
    case AscendC::CMPMODE::LT:
      return a < b;
    case AscendC::CMPMODE::GT:
      return a > b;
    case AscendC::CMPMODE::EQ:
      return a == b;
    case AscendC::CMPMODE::LE:
      return a <= b;
    case AscendC::CMPMODE::GE:
      return a >= b;
    default:
      return a != b;
  }
}

// Bit i of byte j: element 8 * j + i.
template <class U, class T, class F>
inline void compare_count(const AscendC::LocalTensor<U>& dst, const AscendC::LocalTensor<T>& src0,
                          AscendC::CMPMODE mode, uint32_t count, F other) {
  static_assert(is_one_of<U, uint8_t, int8_t>,
                "Compare: the result holds bits in uint8_t or int8_t");
  static_assert(is_one_of<T, half, float, int32_t>, "Compare: half, float and int32_t on 910B");
  require_memory(dst.local, "dst", kUb);
  require_memory(src0.local, "src0", kUb);
  if (std::is_same<T, int32_t>::value && mode != AscendC::CMPMODE::EQ) {
    fail("Compare of int32_t: 910B has CMPMODE::EQ only; compare as float");
  }
  if (count * sizeof(T) % 256) {
    fail("count = %u elements are %zu bytes; Compare needs a multiple of 256 bytes", count,
         count * sizeof(T));
  }
  require_no_partial_overlap(dst.local, count / 8, src0.local, count * sizeof(T));
  const T* x = span(src0, "src0", count, false);
  U* z = span(dst, "dst", count / 8, true);
  for (uint32_t first = 0; first < count; first += 8) {
    unsigned bits = 0;
    for (uint32_t i = 0; i < 8; ++i) {
      if (compare(widen(x[first + i]), other(first + i), mode)) bits |= 1u << i;
    }
    z[first / 8] = static_cast<U>(bits);
  }
}

}  // namespace emu

namespace AscendC {

template <typename T, typename U>
inline void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0,
                    const LocalTensor<T>& src1, CMPMODE cmpMode, uint32_t count) {
  emu::begin("Compare", PIPE_V, emu::repeats_of(count * sizeof(T)));
  emu::require_memory(src1.local, "src1", emu::kUb);
  const T* y = emu::span(src1, "src1", count, false);
  emu::compare_count(dst, src0, cmpMode, count, [y](uint32_t i) { return emu::widen(y[i]); });
}

template <typename T, typename U>
inline void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar,
                          CMPMODE cmpMode, uint32_t count) {
  emu::begin("CompareScalar", PIPE_V, emu::repeats_of(count * sizeof(T)));
  emu::compare_count(dst, src0, cmpMode, count,
                     [src1Scalar](uint32_t) { return emu::widen(src1Scalar); });
}

namespace detail {
// Every repeat of 256 bytes takes its own bits of selMask, lowest bit first.
template <typename T, typename U, typename F>
inline void select_count(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                         const LocalTensor<T>& src0, uint32_t count, F other) {
  static_assert(emu::is_one_of<T, half, float>, "Select: half and float on 910B");
  static_assert(std::is_unsigned<U>::value, "Select: selMask is of an unsigned type");
  emu::require_memory(dst.local, "dst", emu::kUb);
  emu::require_memory(selMask.local, "selMask", emu::kUb);
  emu::require_memory(src0.local, "src0", emu::kUb);
  emu::require_aligned(selMask.local, "selMask", 32);
  emu::require_no_partial_overlap(dst.local, count * sizeof(T), src0.local, count * sizeof(T));
  emu::require_separate(dst.local, count * sizeof(T), selMask.local, (count + 7) / 8);
  const uint8_t* bits = emu::touch(selMask.local, 0, (count + 7) / 8, false);
  const T* x = emu::span(src0, "src0", count, false);
  T* z = emu::span(dst, "dst", count, true);
  for (uint32_t i = 0; i < count; ++i) z[i] = (bits[i / 8] >> (i % 8) & 1) ? x[i] : other(i);
}
}  // namespace detail

template <typename T, typename U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                   const LocalTensor<T>& src0, T src1, SELMODE selMode, uint32_t count) {
  emu::begin("Select", PIPE_V, emu::repeats_of(count * sizeof(T)));
  if (selMode != SELMODE::VSEL_TENSOR_SCALAR_MODE) {
    emu::fail("Select with a scalar needs SELMODE::VSEL_TENSOR_SCALAR_MODE");
  }
  detail::select_count(dst, selMask, src0, count, [src1](uint32_t) { return src1; });
}

template <typename T, typename U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                   const LocalTensor<T>& src0, const LocalTensor<T>& src1, SELMODE selMode,
                   uint32_t count) {
  emu::begin("Select", PIPE_V, emu::repeats_of(count * sizeof(T)));
  if (selMode != SELMODE::VSEL_TENSOR_TENSOR_MODE) {
    emu::fail("Select of two tensors: this emulator has SELMODE::VSEL_TENSOR_TENSOR_MODE");
  }
  emu::require_memory(src1.local, "src1", emu::kUb);
  emu::require_no_partial_overlap(dst.local, count * sizeof(T), src1.local, count * sizeof(T));
  const T* y = emu::span(src1, "src1", count, false);
  detail::select_count(dst, selMask, src0, count, [y](uint32_t i) { return y[i]; });
}

// dst[i] = the element of src at byte srcBaseOffset + srcOffset[i].
template <typename T>
inline void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                   const LocalTensor<uint32_t>& srcOffset, const uint32_t srcBaseOffset,
                   const uint32_t count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Gather: 2-byte and 4-byte elements on 910B");
  emu::begin("Gather", PIPE_V, emu::repeats_of(count * sizeof(T)));
  emu::require_vector(src, "src");
  emu::require_memory(dst.local, "dst", emu::kUb);
  emu::require_memory(srcOffset.local, "srcOffset", emu::kUb);
  emu::require_separate(dst.local, count * sizeof(T), src.local, src.local.bytes);
  emu::require_separate(dst.local, count * sizeof(T), srcOffset.local, count * 4ull);
  const uint32_t* offset = emu::span(srcOffset, "srcOffset", count, false);
  T* target = emu::span(dst, "dst", count, true);
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t byte = static_cast<uint64_t>(srcBaseOffset) + offset[i];
    if (byte % sizeof(T)) {
      emu::fail("srcOffset[%u] gives byte %llu, not a multiple of %zu; offsets are in bytes", i,
                static_cast<unsigned long long>(byte), sizeof(T));
    }
    std::memcpy(&target[i], emu::touch(src.local, byte, sizeof(T), false), sizeof(T));
  }
}

namespace detail {
// Lane i of repeat r is taken if `taken(r, i)`.
template <typename T, typename F>
inline void gather_mask(const LocalTensor<T>& dst, const LocalTensor<T>& src0,
                        const bool reduceMode, const uint32_t mask, const GatherMaskParams& p,
                        uint64_t& rsvdCnt, F taken) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "GatherMask: 2-byte and 4-byte elements");
  emu::require_vector(dst, "dst");
  emu::require_vector(src0, "src0");
  if (reduceMode && !mask)
    emu::fail("mask = 0: in counter mode it is the number of elements of a repeat");
  constexpr uint32_t kBlock = 32 / sizeof(T);
  const uint32_t lanes = reduceMode ? mask : 256 / sizeof(T);
  std::vector<T> kept;
  for (uint32_t r = 0; r < p.repeatTimes; ++r) {
    for (uint32_t i = 0; i < lanes; ++i) {
      if (!taken(r, i)) continue;
      const uint64_t block =
          static_cast<uint64_t>(r) * p.src0RepeatStride + i / kBlock * p.src0BlockStride;
      T value;
      std::memcpy(&value,
                  emu::touch(src0.local, block * 32 + i % kBlock * sizeof(T), sizeof(T), false),
                  sizeof(T));
      kept.push_back(value);
    }
  }
  rsvdCnt = kept.size();
  T* target = emu::span(dst, "dst", kept.size(), true);
  for (size_t i = 0; i < kept.size(); ++i) target[i] = kept[i];
}
}  // namespace detail

template <typename T>
inline void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0,
                       const uint8_t src1Pattern, const bool reduceMode, const uint32_t mask,
                       const GatherMaskParams& gatherMaskParams, uint64_t& rsvdCnt) {
  emu::begin("GatherMask", PIPE_V, gatherMaskParams.repeatTimes);
  if (src1Pattern < 1 || src1Pattern > 7) emu::fail("src1Pattern = %u: 1 to 7", src1Pattern);
  // Bit i % 4: element i is taken.
  static const uint8_t kPatterns[8] = {0, 0b0101, 0b1010, 0b0001, 0b0010, 0b0100, 0b1000, 0b1111};
  const uint8_t pattern = kPatterns[src1Pattern];
  detail::gather_mask(dst, src0, reduceMode, mask, gatherMaskParams, rsvdCnt,
                      [pattern](uint32_t, uint32_t i) { return pattern >> (i % 4) & 1; });
}

template <typename T, typename U>
inline void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0,
                       const LocalTensor<U>& src1Pattern, const bool reduceMode,
                       const uint32_t mask, const GatherMaskParams& gatherMaskParams,
                       uint64_t& rsvdCnt) {
  static_assert(std::is_unsigned<U>::value && sizeof(U) == sizeof(T), "GatherMask: pattern type");
  emu::begin("GatherMask", PIPE_V, gatherMaskParams.repeatTimes);
  emu::require_vector(src1Pattern, "src1Pattern");
  const uint64_t stride = gatherMaskParams.src1RepeatStride * 32ull;
  detail::gather_mask(
      dst, src0, reduceMode, mask, gatherMaskParams, rsvdCnt, [&](uint32_t r, uint32_t i) {
        return *emu::touch(src1Pattern.local, r * stride + i / 8, 1, false) >> (i % 8) & 1;
      });
}

// Each of 8 elements a repeat fills one 32-byte block.
template <typename T>
inline void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint8_t repeatTime,
                 const BrcbRepeatParams& repeatParams) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Brcb: 2-byte and 4-byte elements");
  emu::begin("Brcb", PIPE_V, repeatTime);
  emu::require_vector(dst, "dst");
  emu::require_memory(src.local, "src", emu::kUb);
  if (!repeatParams.dstBlkStride) emu::fail("dstBlkStride = 0 is undefined; use 1");
  const uint64_t count = repeatTime * 8ull;
  emu::require_separate(dst.local, count * 32, src.local, count * sizeof(T));
  const T* source = emu::span(src, "src", count, false);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t block = i / 8 * repeatParams.dstRepStride + i % 8 * repeatParams.dstBlkStride;
    T* target = reinterpret_cast<T*>(emu::touch(dst.local, block * 32, 32, true));
    for (uint32_t j = 0; j < 32 / sizeof(T); ++j) target[j] = source[i];
  }
}

}  // namespace AscendC
