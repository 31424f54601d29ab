# SPDX-License-Identifier: Apache-2.0
# A stand-in for the CMake package ASC: the language ASC, whose compiler is ../bisheng.py.
list(APPEND CMAKE_MODULE_PATH "${STANDIN}/asc")
