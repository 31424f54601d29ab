// SPDX-License-Identifier: Apache-2.0
// What the emulated launches tell the stand-in ACL, and tests ask it.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
// Bytes from an address to the end of the device memory it lies in; 0 if it is in none.
size_t standin_bytes_behind(const void* address);
// A kernel was enqueued.
void standin_launched(const char* kernel, const void* stream, uint32_t blocks);
// A kernel failed; aclGetRecentErrMsg gives the text.
void standin_failed(const char* text);
// Launches so far, one per line: kernel, stream and blocks.
const char* standin_launches();
// Copies between host and device so far.
uint64_t standin_transfers();
// How often the host waited for a stream, an event or the device.
uint64_t standin_waits();
}
