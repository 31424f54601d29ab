// SPDX-License-Identifier: Apache-2.0
// Cast between number types, with the pairs and rounding modes that 910B has.
#pragma once
#include "lanes.h"

namespace emu {

template <class To, class From>
struct CastPair {
  static constexpr bool widening =
      (std::is_same<From, half>::value && std::is_same<To, float>::value) ||
      (std::is_same<From, bfloat16_t>::value && std::is_same<To, float>::value);
  static constexpr bool to_small_float =
      std::is_same<From, float>::value && is_one_of<To, half, bfloat16_t>;
  static constexpr bool float_to_int =
      std::is_same<From, float>::value && is_one_of<To, int32_t, int16_t>;
  static constexpr bool int_to_float =
      is_one_of<From, int32_t, int16_t> && std::is_same<To, float>::value;
  static constexpr bool supported = widening || to_small_float || float_to_int || int_to_float;
};

inline double round_as(double value, AscendC::RoundMode mode) {
  switch (mode) {
    case AscendC::RoundMode::CAST_RINT:
      return std::nearbyint(value);
    case AscendC::RoundMode::CAST_FLOOR:
      return std::floor(value);
    case AscendC::RoundMode::CAST_CEIL:
      return std::ceil(value);
    case AscendC::RoundMode::CAST_ROUND:
      return std::round(value);
    case AscendC::RoundMode::CAST_TRUNC:
      return std::trunc(value);
    default:
      fail("Cast: this rounding mode is not part of the subset");
  }
}

template <class To, class From>
inline To cast_one(From value, AscendC::RoundMode mode) {
  using Pair = CastPair<To, From>;
  if constexpr (Pair::widening) {
    return widen(value);
  } else if constexpr (Pair::to_small_float) {
    return narrow<To>(value);
  } else if constexpr (Pair::float_to_int) {
    const double rounded = round_as(value, mode);
    constexpr double kHighest = sizeof(To) == 2 ? 32767.0 : 2147483647.0;
    // Out of range saturates, NaN gives 0.
    if (rounded != rounded) return 0;
    return static_cast<To>(rounded > kHighest        ? kHighest
                           : rounded < -kHighest - 1 ? -kHighest - 1
                                                     : rounded);
  } else {
    return static_cast<To>(value);
  }
}

}  // namespace emu

namespace AscendC {

template <typename T, typename U>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode,
                 const uint32_t count) {
  using Pair = emu::CastPair<T, U>;
  static_assert(Pair::supported, "Cast: this pair of types is not part of the subset");
  constexpr uint64_t kWidest = sizeof(T) > sizeof(U) ? sizeof(T) : sizeof(U);
  emu::begin("Cast", PIPE_V, emu::repeats_of(count * kWidest));
  emu::require_memory(dst.local, "dst", emu::kUb);
  emu::require_memory(src.local, "src", emu::kUb);
  if (Pair::widening && roundMode != RoundMode::CAST_NONE) {
    emu::fail("Cast to a wider type is exact: use RoundMode::CAST_NONE");
  }
  if (Pair::to_small_float && roundMode != RoundMode::CAST_RINT &&
      roundMode != RoundMode::CAST_NONE) {
    emu::fail("Cast from float to 2 bytes: this emulator has RoundMode::CAST_RINT");
  }
  if (std::is_same<T, bfloat16_t>::value && roundMode == RoundMode::CAST_NONE) {
    emu::fail("Cast from float to bfloat16_t rounds: name the mode, RoundMode::CAST_RINT");
  }
  if (Pair::float_to_int && roundMode == RoundMode::CAST_NONE) {
    emu::fail(
        "Cast from float to an integer rounds: name the mode, RoundMode::CAST_RINT for whole "
        "numbers");
  }
  if (sizeof(T) != sizeof(U)) {
    emu::require_separate(dst.local, count * sizeof(T), src.local, count * sizeof(U));
  } else {
    emu::require_no_partial_overlap(dst.local, count * sizeof(T), src.local, count * sizeof(U));
  }
  const U* source = emu::span(src, "src", count, false);
  T* target = emu::span(dst, "dst", count, true);
  for (uint32_t i = 0; i < count; ++i) target[i] = emu::cast_one<T, U>(source[i], roundMode);
}

}  // namespace AscendC
