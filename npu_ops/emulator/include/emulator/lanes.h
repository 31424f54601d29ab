// SPDX-License-Identifier: Apache-2.0
// The lanes of a vector instruction: masks, and repeats of eight 32-byte blocks with strides.
#pragma once
#include "params.h"
#include "tensor.h"

namespace emu {

// Bit i: lane i of a repeat takes part.
struct Mask {
  uint64_t low = 0, high = 0;
};

template <class T>
inline Mask first_lanes(uint64_t count) {
  constexpr uint64_t kLanes = 256 / sizeof(T) > 128 ? 128 : 256 / sizeof(T);
  if (count < 1 || count > kLanes) {
    fail("mask = %llu: 1 to %llu for elements of %zu bytes", static_cast<unsigned long long>(count),
         static_cast<unsigned long long>(kLanes), sizeof(T));
  }
  const auto ones = [](uint64_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; };
  return Mask{ones(count), count > 64 ? ones(count - 64) : 0};
}

template <class T>
inline Mask lanes_of(const uint64_t bits[]) {
  const Mask mask{bits[0], sizeof(T) == 2 ? bits[1] : 0};
  if (!mask.low && !mask.high) fail("mask has no bit set");
  return mask;
}

// Lanes of one block of a repeat, lowest bit first.
template <class T>
inline uint32_t block_lanes(const Mask& mask, int block) {
  constexpr int kPerBlock = 32 / sizeof(T);
  const int first = block * kPerBlock;
  const uint64_t word = first < 64 ? mask.low >> first : mask.high >> (first - 64);
  return static_cast<uint32_t>(word & ((1ull << kPerBlock) - 1));
}

// Checks the lanes of a block and returns where the block starts.
template <class T>
inline T* lanes(const AscendC::LocalTensor<T>& tensor, uint64_t block, uint32_t bits, bool write) {
  constexpr uint32_t kPerBlock = 32 / sizeof(T);
  uint8_t* start = nullptr;
  for (uint32_t first = 0; first < kPerBlock;) {
    if (!(bits >> first & 1u)) {
      ++first;
      continue;
    }
    uint32_t last = first;
    while (last + 1 < kPerBlock && (bits >> (last + 1) & 1u)) ++last;
    const uint64_t from = block * 32 + first * sizeof(T);
    start = touch(tensor.local, from, (last + 1 - first) * sizeof(T), write) - first * sizeof(T);
    first = last + 1;
  }
  return reinterpret_cast<T*>(start);
}

template <class T>
inline void require_vector(const AscendC::LocalTensor<T>& tensor, const char* operand) {
  require_memory(tensor.local, operand, kUb);
  require_aligned(tensor.local, operand, 32);
}

// dst = f(src0, src1) on the lanes of `mask` in each of `repeat` repeats.
template <class D, class A, class B, class F>
inline void on_lanes(const AscendC::LocalTensor<D>& dst, const AscendC::LocalTensor<A>& src0,
                     const AscendC::LocalTensor<B>& src1, const Mask& mask, uint8_t repeat,
                     const AscendC::BinaryRepeatParams& p, F f) {
  require_vector(dst, "dst");
  require_vector(src0, "src0");
  require_vector(src1, "src1");
  const bool dense = p.dstBlkStride == 1 && p.dstRepStride == 8;
  const uint64_t bytes = repeat * 256ull;
  if (dense && p.src0BlkStride == 1 && p.src0RepStride == 8) {
    require_no_partial_overlap(dst.local, bytes, src0.local, bytes);
  }
  if (dense && p.src1BlkStride == 1 && p.src1RepStride == 8) {
    require_no_partial_overlap(dst.local, bytes, src1.local, bytes);
  }
  for (uint64_t r = 0; r < repeat; ++r) {
    for (int b = 0; b < 8; ++b) {
      const uint32_t bits = block_lanes<D>(mask, b);
      if (!bits) continue;
      const A* x = lanes(src0, r * p.src0RepStride + b * p.src0BlkStride, bits, false);
      const B* y = lanes(src1, r * p.src1RepStride + b * p.src1BlkStride, bits, false);
      D* z = lanes(dst, r * p.dstRepStride + b * p.dstBlkStride, bits, true);
      for (uint32_t i = 0; i < 32 / sizeof(D); ++i) {
        if (bits >> i & 1u) z[i] = f(x[i], y[i]);
      }
    }
  }
}

inline void require_stride(uint32_t stride, const char* field) {
  if (stride > 255) fail("%s = %u: this emulator takes at most 255 blocks", field, stride);
}

inline AscendC::BinaryRepeatParams both(const AscendC::UnaryRepeatParams& p) {
  require_stride(p.dstBlkStride, "dstBlkStride");
  require_stride(p.srcBlkStride, "srcBlkStride");
  return AscendC::BinaryRepeatParams(
      static_cast<uint8_t>(p.dstBlkStride), static_cast<uint8_t>(p.srcBlkStride),
      static_cast<uint8_t>(p.srcBlkStride), p.dstRepStride, p.srcRepStride, p.srcRepStride);
}

inline uint64_t checked_count(int64_t count) {
  if (count < 0) fail("count = %lld: must not be negative", static_cast<long long>(count));
  return static_cast<uint64_t>(count);
}

// dst[i] = f(src0[i], src1[i]) for the first `count` elements.
template <class T, class F>
inline void on_count(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src0,
                     const AscendC::LocalTensor<T>& src1, uint64_t count, F f) {
  require_memory(dst.local, "dst", kUb);
  require_memory(src0.local, "src0", kUb);
  require_memory(src1.local, "src1", kUb);
  require_no_partial_overlap(dst.local, count * sizeof(T), src0.local, count * sizeof(T));
  require_no_partial_overlap(dst.local, count * sizeof(T), src1.local, count * sizeof(T));
  const T* x = span(src0, "src0", count, false);
  const T* y = span(src1, "src1", count, false);
  T* z = span(dst, "dst", count, true);
  for (uint64_t i = 0; i < count; ++i) z[i] = f(x[i], y[i]);
}

}  // namespace emu
