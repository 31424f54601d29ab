// SPDX-License-Identifier: Apache-2.0
// The whole runtime as one unit: it compiles in half the time of its parts.
#include "global.cpp"
#include "launch.cpp"
#include "memory.cpp"
#include "queue.cpp"
#include "sync.cpp"
