// SPDX-License-Identifier: Apache-2.0
// Qualifiers, number types and enumerations of the AscendC subset.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t*

// Order of the table of pipes in runtime/core.h.
enum pipe_t : uint8_t {
  PIPE_S = 0,
  PIPE_V,
  PIPE_M,
  PIPE_MTE1,
  PIPE_MTE2,
  PIPE_MTE3,
  PIPE_FIX,
  PIPE_ALL,
};

enum event_t : int32_t {
  EVENT_ID0 = 0,
  EVENT_ID1,
  EVENT_ID2,
  EVENT_ID3,
  EVENT_ID4,
  EVENT_ID5,
  EVENT_ID6,
  EVENT_ID7,
};

namespace emu {

constexpr int kNumPipes = 7;

constexpr uint8_t pipe_pair(pipe_t source, pipe_t target) {
  return static_cast<uint8_t>(source * 16 + target);
}

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// IEEE binary16, round to nearest even.
inline uint16_t float_to_half(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: multiples of 2^-24
    const float steps = bit_cast<float>(magnitude) * 16777216.0f;
    return sign | static_cast<uint16_t>(std::nearbyint(steps));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

inline float half_to_float(uint16_t half_bits) {
  const uint32_t sign = static_cast<uint32_t>(half_bits & 0x8000u) << 16;
  const uint32_t exponent = (half_bits >> 10) & 31u, mantissa = half_bits & 1023u;
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) / 16777216.0f;
    return sign ? -value : value;
  }
  const uint32_t high = exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23;
  return bit_cast<float>(sign | high | (mantissa << 13));
}

inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace emu

struct half {
  uint16_t bits;
  half() = default;
  half(float value) : bits(emu::float_to_half(value)) {}
  operator float() const { return emu::half_to_float(bits); }
};

// As on the device, a bfloat16 scalar converts through ToFloat and ToBfloat16 only.
struct bfloat16_t {
  uint16_t bits;
};

namespace emu {

template <class T>
struct Wide {
  using Type = T;
};
template <>
struct Wide<half> {
  using Type = float;
};
template <>
struct Wide<bfloat16_t> {
  using Type = float;
};
template <class T>
using wide_t = typename Wide<T>::Type;

template <class T>
inline wide_t<T> widen(T value) {
  return value;
}
template <>
inline float widen<bfloat16_t>(bfloat16_t value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

template <class T>
inline T narrow(wide_t<T> value) {
  return static_cast<T>(value);
}
template <>
inline bfloat16_t narrow<bfloat16_t>(float value) {
  return bfloat16_t{float_to_bfloat16(value)};
}

template <class T, class... Allowed>
constexpr bool is_one_of = (std::is_same<T, Allowed>::value || ...);

}  // namespace emu

namespace AscendC {

enum class TPosition : uint8_t {
  GM,
  A1,
  A2,
  B1,
  B2,
  C1,
  C2,
  CO1,
  CO2,
  VECIN,
  VECOUT,
  VECCALC,
  TSCM,
};
using QuePosition = TPosition;

enum class HardEvent : uint8_t {
  MTE2_MTE1 = emu::pipe_pair(PIPE_MTE2, PIPE_MTE1),
  MTE1_MTE2 = emu::pipe_pair(PIPE_MTE1, PIPE_MTE2),
  MTE1_M = emu::pipe_pair(PIPE_MTE1, PIPE_M),
  M_MTE1 = emu::pipe_pair(PIPE_M, PIPE_MTE1),
  MTE2_V = emu::pipe_pair(PIPE_MTE2, PIPE_V),
  V_MTE2 = emu::pipe_pair(PIPE_V, PIPE_MTE2),
  MTE3_V = emu::pipe_pair(PIPE_MTE3, PIPE_V),
  V_MTE3 = emu::pipe_pair(PIPE_V, PIPE_MTE3),
  V_V = emu::pipe_pair(PIPE_V, PIPE_V),
  M_V = emu::pipe_pair(PIPE_M, PIPE_V),
  MTE3_MTE1 = emu::pipe_pair(PIPE_MTE3, PIPE_MTE1),
  MTE1_MTE3 = emu::pipe_pair(PIPE_MTE1, PIPE_MTE3),
  MTE2_M = emu::pipe_pair(PIPE_MTE2, PIPE_M),
  M_MTE2 = emu::pipe_pair(PIPE_M, PIPE_MTE2),
  M_FIX = emu::pipe_pair(PIPE_M, PIPE_FIX),
  FIX_M = emu::pipe_pair(PIPE_FIX, PIPE_M),
  MTE3_MTE2 = emu::pipe_pair(PIPE_MTE3, PIPE_MTE2),
  MTE2_MTE3 = emu::pipe_pair(PIPE_MTE2, PIPE_MTE3),
  S_V = emu::pipe_pair(PIPE_S, PIPE_V),
  V_S = emu::pipe_pair(PIPE_V, PIPE_S),
  S_MTE2 = emu::pipe_pair(PIPE_S, PIPE_MTE2),
  MTE2_S = emu::pipe_pair(PIPE_MTE2, PIPE_S),
  S_MTE3 = emu::pipe_pair(PIPE_S, PIPE_MTE3),
  MTE3_S = emu::pipe_pair(PIPE_MTE3, PIPE_S),
  MTE2_FIX = emu::pipe_pair(PIPE_MTE2, PIPE_FIX),
  FIX_MTE2 = emu::pipe_pair(PIPE_FIX, PIPE_MTE2),
  FIX_S = emu::pipe_pair(PIPE_FIX, PIPE_S),
  M_S = emu::pipe_pair(PIPE_M, PIPE_S),
  FIX_MTE3 = emu::pipe_pair(PIPE_FIX, PIPE_MTE3),
  MTE1_FIX = emu::pipe_pair(PIPE_MTE1, PIPE_FIX),
  FIX_MTE1 = emu::pipe_pair(PIPE_FIX, PIPE_MTE1),
};

enum class RoundMode : uint8_t {
  CAST_NONE = 0,
  CAST_RINT,
  CAST_FLOOR,
  CAST_CEIL,
  CAST_ROUND,
  CAST_TRUNC,
  CAST_ODD,
};
enum class CMPMODE : uint8_t { LT = 0, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t {
  VSEL_CMPMASK_SPR = 0,
  VSEL_TENSOR_SCALAR_MODE,
  VSEL_TENSOR_TENSOR_MODE,
};
enum class ReduceOrder : uint8_t {
  ORDER_VALUE_INDEX = 0,
  ORDER_INDEX_VALUE,
  ORDER_ONLY_VALUE,
  ORDER_ONLY_INDEX,
};
enum class CacheLine : uint8_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst : uint8_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

inline float ToFloat(const bfloat16_t& value) { return emu::widen(value); }
inline bfloat16_t ToBfloat16(const float& value) { return emu::narrow<bfloat16_t>(value); }

}  // namespace AscendC

// How the cores of a launch are made up. Mixed kernels have one cube core and two vector cores a
// block.
enum KernelType : int32_t {
  KERNEL_TYPE_AIV_ONLY = 0,
  KERNEL_TYPE_AIC_ONLY = 1,
  KERNEL_TYPE_MIX_AIV_1_0 = 2,
  KERNEL_TYPE_MIX_AIC_1_2 = 3,
};

enum QuantMode_t : uint8_t { NoQuant = 0, F322F16 = 1, F322BF16 = 16 };
