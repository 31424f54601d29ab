// SPDX-License-Identifier: Apache-2.0
// The AscendC names that our kernels may use, for g++ on a CPU. Own code, written from the
// documented behaviour for Ascend 910B (architecture 2201); what is not here is not part of the
// subset.
#pragma once
#include "emulator/cast.h"
#include "emulator/copy.h"
#include "emulator/cube.h"
#include "emulator/machine.h"
#include "emulator/params.h"
#include "emulator/pipe.h"
#include "emulator/reduce.h"
#include "emulator/select.h"
#include "emulator/sort.h"
#include "emulator/sync.h"
#include "emulator/tensor.h"
#include "emulator/types.h"
#include "emulator/vector.h"
