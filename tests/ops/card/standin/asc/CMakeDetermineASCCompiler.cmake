# SPDX-License-Identifier: Apache-2.0
# Where CMake looks for the compiler of a language.
find_program(CMAKE_ASC_COMPILER bisheng NO_DEFAULT_PATH PATHS
  $ENV{ASCEND_HOME_PATH}/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux/ccec_compiler/bin)
# Read by CMake before the file below.
set(CMAKE_ASC_COMPILER_ENV_VAR ASC)
configure_file(${CMAKE_CURRENT_LIST_DIR}/CMakeASCCompiler.cmake.in
  ${CMAKE_PLATFORM_INFO_DIR}/CMakeASCCompiler.cmake @ONLY)
