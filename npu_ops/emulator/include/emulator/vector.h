// SPDX-License-Identifier: Apache-2.0
// Elementwise vector instructions, each in count form and in mask-and-repeat form.
#pragma once
#include "lanes.h"

namespace emu {

// Where NaN stands in an order is not documented for the device, so a kernel must not depend on it.
template <class W>
inline void refuse_nan(W value) {
  if (value != value)
    fail("NaN operand: its order is not documented; replace NaN before (Compare EQ, Select)");
}

template <class T>
inline T larger(T a, T b) {
  refuse_nan(widen(a));
  refuse_nan(widen(b));
  return widen(a) < widen(b) ? b : a;
}

template <class T>
inline T smaller(T a, T b) {
  refuse_nan(widen(a));
  refuse_nan(widen(b));
  return widen(b) < widen(a) ? b : a;
}

}  // namespace emu

namespace AscendC {

// clang-format off
#define EMULATOR_BINARY(Name, expression, ...)                                                     \
  namespace detail {                                                                               \
  template <typename T> struct Name##Of {                                                          \
    static_assert(emu::is_one_of<T, __VA_ARGS__>, #Name ": element type not supported on 910B");   \
    T operator()(T x, T y) const { const emu::wide_t<T> a = emu::widen(x), b = emu::widen(y);      \
                                   return emu::narrow<T>(expression); }                            \
  };                                                                                               \
  }                                                                                                \
  template <typename T>                                                                            \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0,                          \
                   const LocalTensor<T>& src1,                                                     \
                   const int32_t& count) {                                                         \
    emu::begin(#Name, PIPE_V, emu::repeats_of(emu::checked_count(count) * sizeof(T)));             \
    emu::on_count(dst, src0, src1, emu::checked_count(count), detail::Name##Of<T>());              \
  }                                                                                                \
  template <typename T, bool isSetMask = true>                                                     \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0,                          \
                   const LocalTensor<T>& src1,                                                     \
                   uint64_t mask, const uint8_t repeatTime,                                        \
                   const BinaryRepeatParams& repeatParams) {                                       \
    emu::begin(#Name, PIPE_V, repeatTime);                                                         \
    emu::on_lanes(dst, src0, src1, emu::first_lanes<T>(mask), repeatTime, repeatParams,            \
                  detail::Name##Of<T>());                                                          \
  }                                                                                                \
  template <typename T, bool isSetMask = true>                                                     \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0,                          \
                   const LocalTensor<T>& src1,                                                     \
                   uint64_t mask[], const uint8_t repeatTime,                                      \
                   const BinaryRepeatParams& repeatParams) {                                       \
    emu::begin(#Name, PIPE_V, repeatTime);                                                         \
    emu::on_lanes(dst, src0, src1, emu::lanes_of<T>(mask), repeatTime, repeatParams,               \
                  detail::Name##Of<T>());                                                          \
  }

EMULATOR_BINARY(Add, a + b, half, int16_t, int32_t, float)
EMULATOR_BINARY(Sub, a - b, half, int16_t, int32_t, float)
EMULATOR_BINARY(Mul, a * b, half, int16_t, int32_t, float)
EMULATOR_BINARY(Div, a / b, half, float)
EMULATOR_BINARY(Max, emu::larger(a, b), half, int16_t, int32_t, float)
EMULATOR_BINARY(Min, emu::smaller(a, b), half, int16_t, int32_t, float)
EMULATOR_BINARY(And, a & b, int16_t, uint16_t)
EMULATOR_BINARY(Or, a | b, int16_t, uint16_t)
#undef EMULATOR_BINARY

// `s`: the scalar operand.
#define EMULATOR_SCALAR(Name, expression, ...)                                                     \
  namespace detail {                                                                               \
  template <typename T> struct Name##Of {                                                          \
    static_assert(emu::is_one_of<T, __VA_ARGS__>, #Name ": element type not supported on 910B");   \
    emu::wide_t<T> s;                                                                              \
    T operator()(T x, T) const { const emu::wide_t<T> a = emu::widen(x);                           \
                                 return emu::narrow<T>(expression); }                              \
  };                                                                                               \
  }                                                                                                \
  template <typename T, bool isSetMask = true>                                                     \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,     \
                   const int32_t& count) {                                                         \
    emu::begin(#Name, PIPE_V, emu::repeats_of(emu::checked_count(count) * sizeof(T)));             \
    emu::on_count(dst, src, src, emu::checked_count(count),                                        \
                  detail::Name##Of<T>{emu::widen(scalarValue)});                                   \
  }                                                                                                \
  template <typename T, bool isSetMask = true>                                                     \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,     \
                   uint64_t mask, const uint8_t repeatTime,                                        \
                   const UnaryRepeatParams& repeatParams) {                                        \
    emu::begin(#Name, PIPE_V, repeatTime);                                                         \
    emu::on_lanes(dst, src, src, emu::first_lanes<T>(mask), repeatTime, emu::both(repeatParams),   \
                  detail::Name##Of<T>{emu::widen(scalarValue)});                                   \
  }

EMULATOR_SCALAR(Adds, a + s, half, int16_t, int32_t, float)
EMULATOR_SCALAR(Muls, a * s, half, int16_t, int32_t, float)
EMULATOR_SCALAR(Maxs, emu::larger(a, s), half, int16_t, int32_t, float)
EMULATOR_SCALAR(Mins, emu::smaller(a, s), half, int16_t, int32_t, float)
EMULATOR_SCALAR(ShiftLeft, a << s, int16_t, uint16_t, int32_t, uint32_t)
EMULATOR_SCALAR(ShiftRight, a >> s, int16_t, uint16_t, int32_t, uint32_t)
#undef EMULATOR_SCALAR

#define EMULATOR_UNARY(Name, expression, ...)                                                      \
  namespace detail {                                                                               \
  template <typename T> struct Name##Of {                                                          \
    static_assert(emu::is_one_of<T, __VA_ARGS__>, #Name ": element type not supported on 910B");   \
    T operator()(T x, T) const { const emu::wide_t<T> a = emu::widen(x);                           \
                                 return emu::narrow<T>(expression); }                              \
  };                                                                                               \
  }                                                                                                \
  template <typename T>                                                                            \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count) {   \
    emu::begin(#Name, PIPE_V, emu::repeats_of(emu::checked_count(count) * sizeof(T)));             \
    emu::on_count(dst, src, src, emu::checked_count(count), detail::Name##Of<T>());                \
  }                                                                                                \
  template <typename T, bool isSetMask = true>                                                     \
  inline void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask,            \
                   const uint8_t repeatTime, const UnaryRepeatParams& repeatParams) {              \
    emu::begin(#Name, PIPE_V, repeatTime);                                                         \
    emu::on_lanes(dst, src, src, emu::first_lanes<T>(mask), repeatTime, emu::both(repeatParams),   \
                  detail::Name##Of<T>());                                                          \
  }

EMULATOR_UNARY(Exp, std::exp(a), half, float)
EMULATOR_UNARY(Ln, std::log(a), half, float)
EMULATOR_UNARY(Abs, std::fabs(a), half, float)
EMULATOR_UNARY(Sqrt, std::sqrt(a), half, float)
EMULATOR_UNARY(Reciprocal, 1.0f / a, half, float)
EMULATOR_UNARY(Not, ~a, int16_t, uint16_t)
#undef EMULATOR_UNARY
// clang-format on

template <typename T>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate: 2-byte and 4-byte elements on 910B");
  const uint64_t number = emu::checked_count(count);
  emu::begin("Duplicate", PIPE_V, emu::repeats_of(number * sizeof(T)));
  emu::require_memory(dst.local, "dst", emu::kUb);
  T* target = emu::span(dst, "dst", number, true);
  for (uint64_t i = 0; i < number; ++i) target[i] = scalarValue;
}

template <typename T, bool isSetMask = true>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask,
                      const uint8_t repeatTime, const uint16_t dstBlockStride,
                      const uint8_t dstRepeatStride) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate: 2-byte and 4-byte elements on 910B");
  emu::begin("Duplicate", PIPE_V, repeatTime);
  emu::require_vector(dst, "dst");
  const emu::Mask lanes = emu::first_lanes<T>(mask);
  for (uint64_t r = 0; r < repeatTime; ++r) {
    for (int b = 0; b < 8; ++b) {
      const uint32_t bits = emu::block_lanes<T>(lanes, b);
      if (!bits) continue;
      const uint64_t block = r * dstRepeatStride + static_cast<uint64_t>(b) * dstBlockStride;
      T* target = emu::lanes(dst, block, bits, true);
      for (uint32_t i = 0; i < 32 / sizeof(T); ++i) {
        if (bits >> i & 1u) target[i] = scalarValue;
      }
    }
  }
}

// firstValue, firstValue + 1, ...
template <typename T>
inline void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count) {
  static_assert(emu::is_one_of<T, half, int16_t, int32_t, float>, "CreateVecIndex: element type");
  emu::begin("CreateVecIndex", PIPE_V, emu::repeats_of(static_cast<uint64_t>(count) * sizeof(T)));
  emu::require_memory(dst.local, "dst", emu::kUb);
  T* target = emu::span(dst, "dst", count, true);
  for (uint32_t i = 0; i < count; ++i) {
    target[i] = emu::narrow<T>(emu::widen(firstValue) + static_cast<emu::wide_t<T>>(i));
  }
}

template <typename T, bool isSetMask = true>
inline void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask,
                 const uint8_t repeatTime, const CopyRepeatParams& repeatParams) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Copy: 2-byte and 4-byte elements on 910B");
  emu::begin("Copy", PIPE_V, repeatTime);
  emu::require_stride(repeatParams.dstRepeatSize, "dstRepeatSize");
  emu::require_stride(repeatParams.srcRepeatSize, "srcRepeatSize");
  const UnaryRepeatParams strides(repeatParams.dstStride, repeatParams.srcStride,
                                  static_cast<uint8_t>(repeatParams.dstRepeatSize),
                                  static_cast<uint8_t>(repeatParams.srcRepeatSize));
  emu::on_lanes(dst, src, src, emu::first_lanes<T>(mask), repeatTime, emu::both(strides),
                [](T x, T) { return x; });
}

}  // namespace AscendC
