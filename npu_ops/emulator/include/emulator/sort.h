// SPDX-License-Identifier: Apache-2.0
// Sort32 and MrgSort: (score, index) pairs of 8 bytes, scores descending, earlier ones first on
// ties.
#pragma once
#include <algorithm>
#include <vector>

#include "vector.h"

namespace emu {

template <class T>
inline float pair_score(const uint8_t* pair) {
  T score;
  std::memcpy(&score, pair, sizeof(T));
  const float value = static_cast<float>(score);
  refuse_nan(value);
  return value;
}

}  // namespace emu

namespace AscendC {

template <typename T>
inline void Sort32(const LocalTensor<T>& dst, const LocalTensor<T>& src0,
                   const LocalTensor<uint32_t>& src1, const int32_t repeatTime) {
  static_assert(emu::is_one_of<T, half, float>, "Sort32: half and float");
  if (repeatTime < 0 || repeatTime > 255) emu::fail("repeatTime = %d: 0 to 255", repeatTime);
  emu::begin("Sort32", PIPE_V, static_cast<uint64_t>(repeatTime));
  emu::require_memory(dst.local, "dst", emu::kUb);
  emu::require_memory(src0.local, "src0", emu::kUb);
  emu::require_memory(src1.local, "src1", emu::kUb);
  emu::require_aligned(src0.local, "src0", 32 * sizeof(T));
  emu::require_aligned(src1.local, "src1", 128);
  emu::require_aligned(dst.local, "dst", 256);
  const uint64_t count = static_cast<uint64_t>(repeatTime) * 32;
  emu::require_separate(dst.local, count * 8, src0.local, count * sizeof(T));
  emu::require_separate(dst.local, count * 8, src1.local, count * 4);
  const T* score = emu::span(src0, "src0", count, false);
  const uint32_t* index = emu::span(src1, "src1", count, false);
  uint8_t* target = emu::touch(dst.local, 0, count * 8, true);
  for (uint64_t first = 0; first < count; first += 32) {
    uint32_t order[32];
    for (uint32_t i = 0; i < 32; ++i) {
      order[i] = i;
      emu::refuse_nan(static_cast<float>(score[first + i]));
    }
    std::stable_sort(order, order + 32, [&](uint32_t a, uint32_t b) {
      return static_cast<float>(score[first + a]) > static_cast<float>(score[first + b]);
    });
    for (uint32_t i = 0; i < 32; ++i) {
      uint8_t* pair = target + (first + i) * 8;
      std::memset(pair, 0, 8);
      std::memcpy(pair, &score[first + order[i]], sizeof(T));
      std::memcpy(pair + 4, &index[first + order[i]], 4);
    }
  }
}

template <typename T>
struct MrgSortSrcList {
  MrgSortSrcList() = default;
  MrgSortSrcList(const LocalTensor<T>& a, const LocalTensor<T>& b, const LocalTensor<T>& c,
                 const LocalTensor<T>& d)
      : src1(a), src2(b), src3(c), src4(d) {}
  LocalTensor<T> src1, src2, src3, src4;
};

namespace detail {
// Merges sorted queues into `target`; returns how many entries each queue gave.
template <typename T>
inline void merge(const uint8_t* const queues[4], const uint16_t lengths[4],
                  bool stop_when_one_ends, uint8_t* target, uint16_t taken[4]) {
  for (int q = 0; q < 4; ++q) taken[q] = 0;
  for (;;) {
    int best = -1;
    float best_score = 0;
    for (int q = 0; q < 4; ++q) {
      if (taken[q] == lengths[q]) {
        if (stop_when_one_ends && lengths[q]) return;
        continue;
      }
      const float score = emu::pair_score<T>(queues[q] + taken[q] * 8ull);
      if (best < 0 || score > best_score) {
        best = q;
        best_score = score;
      }
    }
    if (best < 0) return;
    std::memcpy(target, queues[best] + taken[best] * 8ull, 8);
    target += 8;
    ++taken[best];
  }
}

template <typename T>
inline void check_sorted(const uint8_t* queue, uint16_t length, int number) {
  for (int i = 1; i < length; ++i) {
    if (emu::pair_score<T>(queue + (i - 1) * 8) < emu::pair_score<T>(queue + i * 8)) {
      emu::fail(
          "queue %d of MrgSort is not sorted at entry %d; sort it with Sort32 or MrgSort before",
          number + 1, i);
    }
  }
}
}  // namespace detail

template <typename T>
inline void MrgSort(const LocalTensor<T>& dst, const MrgSortSrcList<T>& src,
                    const MrgSort4Info& params) {
  static_assert(emu::is_one_of<T, half, float>, "MrgSort: half and float");
  emu::begin("MrgSort", PIPE_V, params.repeatTimes);
  if (params.validBit != 3 && params.validBit != 7 && params.validBit != 15) {
    emu::fail("validBit = %u: 3, 7 or 15 for 2, 3 or 4 queues", params.validBit);
  }
  const int number = params.validBit == 3 ? 2 : params.validBit == 7 ? 3 : 4;
  const LocalTensor<T> tensors[4] = {src.src1, src.src2, src.src3, src.src4};
  uint16_t lengths[4] = {0, 0, 0, 0};
  uint64_t total = 0;
  for (int q = 0; q < number; ++q) {
    lengths[q] = params.elementLengths[q];
    if (lengths[q] > 4095) emu::fail("elementLengths[%d] = %u: at most 4095", q, lengths[q]);
    emu::require_memory(tensors[q].local, "src", emu::kUb);
    emu::require_aligned(tensors[q].local, "src", 8);
    total += lengths[q];
  }
  emu::require_memory(dst.local, "dst", emu::kUb);
  emu::require_aligned(dst.local, "dst", 32);
  const bool repeated = params.repeatTimes > 1;
  if (repeated) {
    bool together = number == 4 && !params.ifExhaustedSuspension;
    for (int q = 1; q < number; ++q) {
      together = together && lengths[q] == lengths[0] &&
                 tensors[q].local.offset == tensors[q - 1].local.offset + lengths[0] * 8u;
    }
    if (!together) {
      emu::fail("repeatTimes = %u needs 4 adjacent queues of one length without suspension",
                params.repeatTimes);
    }
  }
  for (uint64_t r = 0; r < params.repeatTimes; ++r) {
    const uint8_t* queues[4] = {nullptr, nullptr, nullptr, nullptr};
    for (int q = 0; q < number; ++q) {
      emu::Local queue = tensors[q].local;
      const uint64_t bytes = lengths[q] * 8ull;
      // Later repeats lie behind the first queues, beyond the end of the tensors that name them.
      if (repeated) queue.bytes = tensors[0].local.bytes - (queue.offset - tensors[0].local.offset);
      emu::Local target = dst.local;
      emu::require_separate(target, params.repeatTimes * total * 8, queue, bytes);
      queues[q] = emu::touch(queue, r * total * 8, bytes, false);
      detail::check_sorted<T>(queues[q], lengths[q], q);
    }
    uint16_t taken[4];
    std::vector<uint8_t> merged(total * 8);
    detail::merge<T>(queues, lengths, params.ifExhaustedSuspension, merged.data(), taken);
    const uint64_t bytes = (taken[0] + taken[1] + taken[2] + taken[3]) * 8ull;
    std::memcpy(emu::touch(dst.local, r * total * 8, bytes, true), merged.data(), bytes);
    emu::set_merged(taken);
  }
}

inline void GetMrgSortResult(uint16_t& mrgSortList1, uint16_t& mrgSortList2, uint16_t& mrgSortList3,
                             uint16_t& mrgSortList4) {
  emu::begin("GetMrgSortResult", PIPE_S);
  uint16_t counts[4];
  emu::get_merged(counts);
  mrgSortList1 = counts[0];
  mrgSortList2 = counts[1];
  mrgSortList3 = counts[2];
  mrgSortList4 = counts[3];
}

}  // namespace AscendC
