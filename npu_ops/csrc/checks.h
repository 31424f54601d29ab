// SPDX-License-Identifier: Apache-2.0
// What every operator demands of its tensors, in the words of npu_ops/checks.py.
#pragma once
#include <ATen/ATen.h>

#include <charconv>
#include <initializer_list>
#include <string>

namespace treespark {

using at::Tensor;

// Raises `op: demand, got value`.
template <class Got>
[[noreturn]] void Refuse(const char* op, const std::string& demand, const Got& got) {
  TORCH_CHECK(false, op, ": ", demand, ", got ", got);
}

// A number as Python prints it.
inline std::string Printed(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  const std::string digits(text, end);
  return digits.find_first_not_of("-0123456789") == std::string::npos ? digits + ".0" : digits;
}

// A dimension by its letter, with its size if that is known: -1 where it is not.
struct Dimension {
  const char* letter;
  int64_t size = -1;
};

inline void CheckShape(const char* op, const char* name, const Tensor& tensor,
                       std::initializer_list<Dimension> dimensions) {
  bool fits = static_cast<size_t>(tensor.dim()) == dimensions.size();
  std::string wanted;
  int64_t axis = 0;
  for (const Dimension& dimension : dimensions) {
    fits = fits && (dimension.size < 0 || tensor.size(axis) == dimension.size);
    wanted += (axis++ ? ", " : "") + std::string(dimension.letter);
    if (dimension.size >= 0) wanted += "=" + std::to_string(dimension.size);
  }
  if (!fits) Refuse(op, std::string(name) + " must be [" + wanted + "]", tensor.sizes());
}

inline std::string NameOf(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kByte:
      return "uint8";
    case at::kChar:
      return "int8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(type);
  }
}

inline void CheckDtype(const char* op, const char* name, const Tensor& tensor,
                       std::initializer_list<at::ScalarType> allowed) {
  std::string names;
  for (const at::ScalarType type : allowed) {
    if (tensor.scalar_type() == type) return;
    names += (names.empty() ? "" : " or ") + NameOf(type);
  }
  Refuse(op, std::string(name) + " must be " + names, NameOf(tensor.scalar_type()));
}

struct Named {
  const char* name;
  const Tensor& tensor;
};

// All others are where the argument `first` is. A tensor that is not defined was not given.
inline void CheckDevice(const char* op, const char* first, const at::Device& device,
                        std::initializer_list<Named> others) {
  for (const Named& other : others) {
    if (!other.tensor.defined() || other.tensor.device() == device) continue;
    const std::string demand = std::string(other.name) + " must be on " + device.str();
    Refuse(op, demand + " as " + first + " is", other.tensor.device());
  }
}

inline void CheckContiguous(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.is_contiguous()) return;
  Refuse(op, std::string(name) + " must be contiguous", c10::str("strides ", tensor.strides()));
}

inline void CheckRange(const char* op, const char* name, int64_t value, int64_t lowest,
                       int64_t highest) {
  if (value >= lowest && value <= highest) return;
  Refuse(op, c10::str(name, " must be in ", lowest, "..", highest), value);
}

}  // namespace treespark
