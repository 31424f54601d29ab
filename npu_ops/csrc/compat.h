// SPDX-License-Identifier: Apache-2.0
// What depends on the version of CANN; nothing else in the C++ sources does. TREESPARK_CANN is its
// major version, set by CMakeLists.txt. Without it, under the emulator, it is as before version 9.
#pragma once

#if defined(TREESPARK_CANN) && TREESPARK_CANN >= 9
// A kernel and its launch are one source for one compiler. The cores a kernel runs on are part of
// its declaration, and a structure goes to it as it is.
#define TREESPARK_ONE_SOURCE 1
#define TREESPARK_VECTOR __vector__
#define TREESPARK_MIX_1_2 __mix__(1, 2)
#define TREESPARK_LAUNCH(kernel, blocks, stream, ...) \
  (kernel<<<blocks, nullptr, stream>>>(__VA_ARGS__), 0u)
#define TREESPARK_BY_VALUE(structure) (structure)
#else
#define TREESPARK_ONE_SOURCE 0
// ascendc_library finds the cores a kernel runs on in KERNEL_TASK_TYPE_DEFAULT, once per source:
// kernels of different kinds are in different files. Its launch functions take a structure that a
// kernel gets by value by its address on the host, and copy it before they return.
#define TREESPARK_VECTOR
#define TREESPARK_MIX_1_2
#define TREESPARK_LAUNCH(kernel, blocks, stream, ...) \
  ACLRT_LAUNCH_KERNEL(kernel)(blocks, stream, __VA_ARGS__)
#define TREESPARK_BY_VALUE(structure) (&(structure))
#endif
