// SPDX-License-Identifier: Apache-2.0
// The cube unit: LoadData into L0A and L0B, Mmad, Fixpipe out of L0C.
//
// A fractal is 512 bytes: 16 rows of 16 two-byte elements. Element (i, j) of a matrix stands in
//   L0A (Zz)  fractal i/16 * K/16 + j/16, row i%16, column j%16
//   L0B (Zn)  fractal i/16 * N/16 + j/16, row j%16, column i%16
//   L0C (Nz)  column group j/16 of M rows, row i, column j%16; four-byte elements
#pragma once
#include <vector>

#include "params.h"
#include "tensor.h"

namespace emu {

inline uint32_t fractals(uint32_t size) { return (size + 15) / 16; }

// Reads the first `rows` of 16 rows of a fractal, and of those the first `columns` of 16.
template <class T>
inline const T* fractal_part(const Local& tensor, uint64_t fractal, uint32_t rows,
                             uint32_t columns) {
  if (columns == 16)
    return reinterpret_cast<const T*>(touch(tensor, fractal * 512, rows * 32ull, false));
  for (uint32_t row = 0; row < rows; ++row)
    touch(tensor, fractal * 512 + row * 32ull, columns * 2ull, false);
  return reinterpret_cast<const T*>(peek(tensor, fractal * 512, rows * 32ull));
}

}  // namespace emu

namespace AscendC {

// Undefined bytes, as the rows that pad a matrix to whole fractals, stay undefined.
template <typename T>
inline void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                     const LoadData2DParams& loadDataParams) {
  static_assert(sizeof(T) == 2, "LoadData: half and bfloat16_t");
  emu::begin("LoadData", PIPE_MTE1);
  emu::require_memory(src.local, "src", emu::kL1);
  if (dst.local.memory != emu::kL0a && dst.local.memory != emu::kL0b) {
    emu::fail("dst of LoadData is a tensor of L0A (TPosition::A2) or L0B (TPosition::B2)");
  }
  emu::require_aligned(dst.local, "dst", 512);
  emu::require_aligned(src.local, "src", 32);
  if (loadDataParams.addrMode) emu::fail("addrMode = 1 (descending) is not part of the subset");
  for (uint64_t i = 0; i < loadDataParams.repeatTimes; ++i) {
    const uint64_t from = loadDataParams.startIndex + i * loadDataParams.srcStride;
    const uint64_t to = i * (1ull + loadDataParams.dstGap);
    const T* source = reinterpret_cast<const T*>(emu::peek(src.local, from * 512, 512));
    T* target = reinterpret_cast<T*>(emu::touch(dst.local, to * 512, 512, true));
    const uint8_t* source_defined = emu::defined_of(src.local) + from * 512;
    uint8_t* target_defined = emu::defined_of(dst.local) + to * 512;
    for (int element = 0; element < 256; ++element) {
      const int at = loadDataParams.ifTranspose ? element % 16 * 16 + element / 16 : element;
      target[element] = source[at];
      for (int byte = 0; byte < 2; ++byte)
        target_defined[2 * element + byte] = source_defined[2 * at + byte];
    }
  }
}

// k may end within a fractal: what stands behind it takes no part. Rows and columns past m, n of
// the last fractals are undefined in L0C afterwards.
template <typename T, typename U, typename S>
inline void Mmad(const LocalTensor<T>& dst, const LocalTensor<U>& fm, const LocalTensor<S>& filter,
                 const MmadParams& mmadParams) {
  static_assert(std::is_same<T, float>::value && std::is_same<U, S>::value &&
                    emu::is_one_of<U, half, bfloat16_t>,
                "Mmad: half or bfloat16_t operands, float result");
  emu::begin("Mmad", PIPE_M);
  emu::require_memory(dst.local, "dst", emu::kL0c);
  emu::require_memory(fm.local, "fm", emu::kL0a);
  emu::require_memory(filter.local, "filter", emu::kL0b);
  emu::require_aligned(dst.local, "dst", 1024);
  emu::require_aligned(fm.local, "fm", 512);
  emu::require_aligned(filter.local, "filter", 512);
  const uint32_t m = mmadParams.m, n = mmadParams.n, k = mmadParams.k;
  if (m > 4095 || n > 4095 || k > 4095)
    emu::fail("m, n, k = %u, %u, %u: at most 4095 each", m, n, k);
  if (m == 1) emu::fail("m = 1 switches the cube to GEMV, where A is not in fractals; pad m to 16");
  if (mmadParams.unitFlag) emu::fail("unitFlag is not part of the subset");
  if (mmadParams.cmatrixSource) emu::fail("cmatrixSource (bias table) is not part of the subset");
  if (!m || !n || !k) return;
  const uint32_t m_fractals = emu::fractals(m), n_fractals = emu::fractals(n),
                 k_fractals = emu::fractals(k);
  std::vector<float> a(static_cast<size_t>(m) * k), b(static_cast<size_t>(k) * n);
  for (uint32_t i = 0; i < m_fractals; ++i) {
    const uint32_t rows = m - i * 16 < 16 ? m - i * 16 : 16;
    for (uint32_t j = 0; j < k_fractals; ++j) {
      const uint32_t columns = k - j * 16 < 16 ? k - j * 16 : 16;
      const U* source =
          emu::fractal_part<U>(fm.local, static_cast<uint64_t>(i) * k_fractals + j, rows, columns);
      for (uint32_t row = 0; row < rows; ++row) {
        float* target = &a[static_cast<size_t>(i * 16 + row) * k + j * 16];
        for (uint32_t column = 0; column < columns; ++column)
          target[column] = emu::widen(source[row * 16 + column]);
      }
    }
  }
  for (uint32_t i = 0; i < k_fractals; ++i) {
    const uint32_t columns = k - i * 16 < 16 ? k - i * 16 : 16;
    for (uint32_t j = 0; j < n_fractals; ++j) {
      const uint32_t rows = n - j * 16 < 16 ? n - j * 16 : 16;
      const U* source = emu::fractal_part<U>(
          filter.local, static_cast<uint64_t>(i) * n_fractals + j, rows, columns);
      for (uint32_t row = 0; row < rows; ++row) {
        for (uint32_t column = 0; column < columns; ++column) {
          b[static_cast<size_t>(i * 16 + column) * n + j * 16 + row] =
              emu::widen(source[row * 16 + column]);
        }
      }
    }
  }
  std::vector<float> c(static_cast<size_t>(m) * n, 0.0f);
  const auto at = [&](uint32_t group, uint32_t row) {
    return (static_cast<uint64_t>(group) * m_fractals * 16 + row) * 64;
  };
  // Ten fractals or more take long enough that the next Mmad finds the sums.
  if (m_fractals * n_fractals >= 10) emu::keep_own_order();
  const auto for_groups = [&](auto f) {
    for (uint32_t group = 0; group < n_fractals; ++group) {
      const uint32_t columns = n - group * 16 < 16 ? n - group * 16 : 16;
      for (uint32_t row = 0; row < m; ++row)
        f(group, row, columns, &c[static_cast<size_t>(row) * n + group * 16]);
    }
  };
  if (!mmadParams.cmatrixInitVal) {
    for_groups([&](uint32_t group, uint32_t row, uint32_t columns, float* values) {
      std::memcpy(values, emu::touch(dst.local, at(group, row), columns * 4ull, false),
                  columns * 4ull);
    });
  }
  emu::matmul(c.data(), a.data(), b.data(), m, n, k);
  emu::count_macs(static_cast<uint64_t>(m) * n * k);
  emu::spoil(dst.local, 0, static_cast<uint64_t>(n_fractals) * m_fractals * 1024);
  for_groups([&](uint32_t group, uint32_t row, uint32_t columns, float* values) {
    std::memcpy(emu::touch(dst.local, at(group, row), columns * 4ull, true), values,
                columns * 4ull);
  });
}

namespace detail {
template <typename T>
inline void check_quant(QuantMode_t mode) {
  const QuantMode_t wanted = std::is_same<T, float>::value  ? QuantMode_t::NoQuant
                             : std::is_same<T, half>::value ? QuantMode_t::F322F16
                                                            : QuantMode_t::F322BF16;
  if (mode != wanted) {
    emu::fail(
        "quantPre = %d does not fit the type of dst: NoQuant for float, F322F16 for half, F322BF16 "
        "for "
        "bfloat16_t",
        static_cast<int>(mode));
  }
}
}  // namespace detail

// From column groups in L0C to rows in global memory.
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
inline void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src,
                    const FixpipeParamsV220& intriParams) {
  static_assert(std::is_same<U, float>::value && emu::is_one_of<T, float, half, bfloat16_t>,
                "Fixpipe: float in L0C to float, half or bfloat16_t");
  static_assert(config.format == CO2Layout::ROW_MAJOR, "Fixpipe: CFG_ROW_MAJOR is the subset");
  emu::begin("Fixpipe", PIPE_FIX);
  emu::require_memory(src.local, "src", emu::kL0c);
  emu::require_aligned(src.local, "src", 64);
  const FixpipeParamsV220& p = intriParams;
  detail::check_quant<T>(p.quantPre);
  if (p.nSize < 1 || p.nSize > 4095) emu::fail("nSize = %u: 1 to 4095", p.nSize);
  if (p.mSize < 1 || p.mSize > 8192) emu::fail("mSize = %u: 1 to 8192", p.mSize);
  if (p.ndNum != 1 || p.reluEn || p.unitFlag) {
    emu::fail("ndNum other than 1, reluEn and unitFlag are not part of the subset");
  }
  if (p.dstStride < p.nSize && p.mSize > 1) {
    emu::fail(
        "dstStride = %u is less than nSize = %u: rows would overlap; it is the elements from row "
        "to row",
        p.dstStride, p.nSize);
  }
  if (p.srcStride < p.mSize) {
    emu::fail(
        "srcStride = %u is less than mSize = %u; it is the rows of L0C from column group to column "
        "group, "
        "m rounded up to 16",
        p.srcStride, p.mSize);
  }
  std::vector<T> row(p.nSize);
  for (uint64_t i = 0; i < p.mSize; ++i) {
    for (uint32_t first = 0; first < p.nSize; first += 16) {
      const uint32_t columns = p.nSize - first < 16u ? p.nSize - first : 16u;
      const uint64_t from = (static_cast<uint64_t>(first / 16) * p.srcStride + i) * 64;
      const float* source =
          reinterpret_cast<const float*>(emu::touch(src.local, from, columns * 4ull, false));
      for (uint32_t j = 0; j < columns; ++j) row[first + j] = emu::narrow<T>(source[j]);
    }
    const uint64_t bytes = p.nSize * sizeof(T);
    std::memcpy(emu::touch_global(dst.at(i * p.dstStride, p.nSize), bytes, true), row.data(),
                bytes);
  }
}

}  // namespace AscendC
