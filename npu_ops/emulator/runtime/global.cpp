// SPDX-License-Identifier: Apache-2.0
// Global memory: bounds per tensor, initialisation, races between cores, and the scalar data cache.
#include <algorithm>
#include <iterator>

#include "core.h"

namespace emu {

enum Role { kIn = 0, kOut, kInOut, kWorkspace };

Global global_of(void* address) {
  Global global;
  global.address = static_cast<uint8_t*>(address);
  for (size_t i = 0; i < world->tensors.size(); ++i) {
    const TensorArgument& a = world->tensors[i].argument;
    if (global.address >= a.data && global.address < a.data + std::max<uint64_t>(a.bytes, 1)) {
      global.tensor = static_cast<int32_t>(i);
    }
  }
  return global;
}

// Where `bytes` at `global` start in their tensor.
static uint64_t locate(const Global& global, uint64_t bytes, bool write) {
  if (global.tensor < 0) {
    fail(
        "the GlobalTensor belongs to no argument of the launch; SetGlobalBuffer a pointer into "
        "one");
  }
  const TensorArgument& a = world->tensors[static_cast<size_t>(global.tensor)].argument;
  const int64_t offset = global.address - a.data;
  if (offset < 0 || static_cast<uint64_t>(offset) + bytes > a.bytes) {
    fail("%s bytes %lld to %lld of %s, which has %llu in global memory; keep the access inside",
         write ? "writes" : "reads", static_cast<long long>(offset),
         static_cast<long long>(offset + static_cast<int64_t>(bytes)), a.name,
         static_cast<unsigned long long>(a.bytes));
  }
  if (write && a.role == kIn) fail("writes to %s, which is an input", a.name);
  return static_cast<uint64_t>(offset);
}

static bool knows(const Core& c, uint16_t agent, Time time) {
  const int owner = agent / kNumPipes, pipe = agent % kNumPipes;
  const Clock& clock = c.clock[c.pipe];
  if (owner == c.number) {
    if (pipe == PIPE_S && c.pipe == PIPE_S) return true;
    return clock.own[pipe] >= time || (pipe == c.pipe && time == c.now[pipe]);
  }
  return !clock.others.empty() && clock.others[agent] >= time;
}

[[noreturn]] static void conflict(const Core& c, const char* hazard, const Tensor& tensor,
                                  uint64_t byte, uint16_t agent, Time time) {
  const Core& other = *world->cores[agent / kNumPipes];
  const int pipe = agent % kNumPipes;
  const char* earlier = other.history[pipe][time - 1];
  if (&other == &c && pipe == c.pipe) {
    fail(
        "%s hazard in global memory at %s+%llu: %s before it on the same pipe may still be busy; "
        "add "
        "PipeBarrier<PIPE_%s>()",
        hazard, tensor.argument.name, static_cast<unsigned long long>(byte), earlier,
        kPipeNames[pipe]);
  }
  if (&other == &c) {
    fail(
        "%s hazard in global memory at %s+%llu: %s on pipe %s may still be busy there; add SetFlag "
        "and "
        "WaitFlag<HardEvent::%s_%s>",
        hazard, tensor.argument.name, static_cast<unsigned long long>(byte), earlier,
        kPipeNames[pipe], kPipeNames[pipe], kPipeNames[c.pipe]);
  }
  fail(
      "%s hazard in global memory at %s+%llu: %s of %s of block %d may still be busy there; add "
      "CrossCoreSetFlag<.., PIPE_%s> there and CrossCoreWaitFlag here, or let the cores work apart",
      hazard, tensor.argument.name, static_cast<unsigned long long>(byte), earlier,
      other.cube ? "the AIC" : "an AIV", other.block, kPipeNames[pipe]);
}

static void check_read(Core& c, Tensor& tensor, uint64_t offset, uint64_t bytes) {
  if (tensor.cells.empty()) return;
  const uint32_t item = tensor.argument.item_bytes;
  const uint16_t me = static_cast<uint16_t>(c.number * kNumPipes + c.pipe);
  const Time now = c.now[c.pipe];
  for (uint64_t i = offset / item; i <= (offset + bytes - 1) / item; ++i) {
    Cell& cell = tensor.cells[i];
    if (cell.write && !knows(c, cell.writer, cell.write))
      conflict(c, "RAW", tensor, i * item, cell.writer, cell.write);
    if (!cell.write && tensor.argument.role != kInOut) {
      fail("reads %s+%llu in global memory, which nothing has written in this launch",
           tensor.argument.name, static_cast<unsigned long long>(i * item));
    }
    if (cell.read && cell.reader != me && !knows(c, cell.reader, cell.read)) {
      tensor.more_readers[i].emplace_back(cell.reader, cell.read);
    }
    cell.reader = me;
    cell.read = now;
  }
}

static void check_write(Core& c, Tensor& tensor, uint64_t offset, uint64_t bytes) {
  const uint32_t item = tensor.argument.item_bytes;
  const uint16_t me = static_cast<uint16_t>(c.number * kNumPipes + c.pipe);
  for (uint64_t i = offset / item; i <= (offset + bytes - 1) / item; ++i) {
    Cell& cell = tensor.cells[i];
    if (cell.write && !knows(c, cell.writer, cell.write))
      conflict(c, "WAW", tensor, i * item, cell.writer, cell.write);
    if (cell.read && cell.reader != me && !knows(c, cell.reader, cell.read)) {
      conflict(c, "WAR", tensor, i * item, cell.reader, cell.read);
    }
    if (!tensor.more_readers.empty()) {
      const auto more = tensor.more_readers.find(i);
      if (more != tensor.more_readers.end()) {
        for (const auto& reader : more->second) {
          if (reader.first != me && !knows(c, reader.first, reader.second)) {
            conflict(c, "WAR", tensor, i * item, reader.first, reader.second);
          }
        }
        tensor.more_readers.erase(more);
      }
    }
    cell.writer = me;
    cell.write = c.now[c.pipe];
    cell.read = 0;
  }
}

// A scalar cache writes whole lines: what another core wrote to the same line meanwhile is gone.
[[noreturn]] static void lost_line(const Core& other) {
  fail(
      "%s core of block %d writes to the same 64-byte line of global memory through a scalar cache "
      "or beside "
      "one; one of the two writes is lost: give each core its own lines",
      other.cube ? "the AIC" : "an AIV", other.block);
}

// The bytes of these lines have just changed in global memory: copies in scalar caches are old.
static void spoil_caches(const Core& writer, const uint8_t* address, uint64_t bytes) {
  const uint64_t first = reinterpret_cast<uint64_t>(address) / 64;
  const uint64_t last = (reinterpret_cast<uint64_t>(address) + bytes - 1) / 64;
  for (uint64_t line = first; line <= last && !world->scalar_lines.empty(); ++line) {
    const auto found = world->scalar_lines.find(line);
    if (found == world->scalar_lines.end()) continue;
    const Core& other = *world->cores[found->second.first / kNumPipes];
    if (&other != &writer && !knows(writer, found->second.first, found->second.second))
      lost_line(other);
  }
  for (const auto& other : world->cores) {
    if (other->cache.empty()) continue;
    for (uint64_t line = first; line <= last; ++line) {
      const auto found = other->cache.find(line);
      if (found == other->cache.end()) continue;
      if (found->second.dirty && other.get() != &writer) lost_line(*other);
      found->second.stale = true;
    }
  }
}

uint8_t* touch_global(const Global& global, uint64_t bytes, bool write) {
  Core& c = core();
  const uint64_t offset = locate(global, bytes, write);
  Tensor& tensor = world->tensors[static_cast<size_t>(global.tensor)];
  if (!bytes) return global.address;
  if (write) {
    check_write(c, tensor, offset, bytes);
    spoil_caches(c, global.address, bytes);
    world->report->written_bytes[global.tensor] += bytes;
  } else {
    check_read(c, tensor, offset, bytes);
    world->report->read_bytes[global.tensor] += bytes;
  }
  return global.address;
}

static Line& line_at(Core& c, const Global& global) {
  const uint64_t number = reinterpret_cast<uint64_t>(global.address) / 64;
  const auto found = c.cache.find(number);
  if (found != c.cache.end()) return found->second;
  Line& line = c.cache[number];
  line.tensor = global.tensor;
  const TensorArgument& a = world->tensors[static_cast<size_t>(global.tensor)].argument;
  uint8_t* start = reinterpret_cast<uint8_t*>(number * 64);
  uint8_t* from = std::max(start, a.data);
  uint8_t* to = std::min(start + 64, a.data + a.bytes);
  std::memcpy(line.bytes + (from - start), from, static_cast<size_t>(to - from));
  world->report->read_bytes[global.tensor] += static_cast<uint64_t>(to - from);
  return line;
}

static void require_in_line(const Global& global, uint32_t bytes) {
  if (reinterpret_cast<uint64_t>(global.address) % bytes) {
    fail("the address is not a multiple of the %u bytes of an element", bytes);
  }
}

void scalar_load(const Global& global, void* value, uint32_t bytes) {
  Core& c = core();
  const uint64_t offset = locate(global, bytes, false);
  require_in_line(global, bytes);
  Tensor& tensor = world->tensors[static_cast<size_t>(global.tensor)];
  Line& line = line_at(c, global);
  const uint64_t at = reinterpret_cast<uint64_t>(global.address) % 64;
  const uint64_t mask = (bytes == 64 ? ~0ull : (1ull << bytes) - 1) << at;
  if ((line.dirty & mask) != mask) {
    check_read(c, tensor, offset, bytes);
    if (line.stale) {
      fail(
          "%s+%llu: the scalar cache holds an old copy of this 64-byte line; call "
          "DataCacheCleanAndInvalid on "
          "it before GetValue",
          tensor.argument.name, static_cast<unsigned long long>(offset));
    }
  }
  std::memcpy(value, line.bytes + at, bytes);
}

void scalar_store(const Global& global, const void* value, uint32_t bytes) {
  Core& c = core();
  locate(global, bytes, true);
  require_in_line(global, bytes);
  const uint64_t number = reinterpret_cast<uint64_t>(global.address) / 64;
  for (const auto& other : world->cores) {
    if (other.get() == &c) continue;
    const auto found = other->cache.find(number);
    if (found != other->cache.end() && found->second.dirty) lost_line(*other);
  }
  Line& line = line_at(c, global);
  const uint64_t at = reinterpret_cast<uint64_t>(global.address) % 64;
  std::memcpy(line.bytes + at, value, bytes);
  line.dirty |= ((1ull << bytes) - 1) << at;
}

// Writes dirty bytes from `first` on back; true if the line is clean afterwards.
static bool write_back(Core& c, uint64_t number, Line& line, unsigned first) {
  uint8_t* start = reinterpret_cast<uint8_t*>(number * 64);
  Tensor& tensor = world->tensors[static_cast<size_t>(line.tensor)];
  if (line.dirty) {
    const int64_t offset = start - tensor.argument.data;
    const int64_t item = tensor.argument.item_bytes;
    for (int64_t at = offset; at < offset + 64; at += item) {
      if (at < 0 || at >= static_cast<int64_t>(tensor.argument.bytes)) continue;
      const Cell& cell = tensor.cells[static_cast<size_t>(at / item)];
      const Core& other = *world->cores[cell.writer / kNumPipes];
      if (cell.write && &other != &c && !knows(c, cell.writer, cell.write)) lost_line(other);
    }
    world->scalar_lines[number] = {static_cast<uint16_t>(c.number * kNumPipes + PIPE_S),
                                   c.now[PIPE_S]};
  }
  for (unsigned i = first; i < 64; ++i) {
    if (!(line.dirty >> i & 1)) continue;
    unsigned last = i;
    while (last + 1 < 64 && (line.dirty >> (last + 1) & 1)) ++last;
    const uint64_t bytes = last + 1 - i;
    check_write(c, tensor, static_cast<uint64_t>(start + i - tensor.argument.data), bytes);
    std::memcpy(start + i, line.bytes + i, bytes);
    world->report->written_bytes[line.tensor] += bytes;
    i = last;
  }
  line.dirty &= first ? (1ull << first) - 1 : 0;
  return !line.dirty;
}

void clean_cache(const Global& global, bool entire) {
  Core& c = core();
  if (!entire && global.tensor < 0) fail("the GlobalTensor belongs to no argument of the launch");
  const uint64_t address = reinterpret_cast<uint64_t>(global.address);
  for (auto it = c.cache.begin(); it != c.cache.end();) {
    if (!entire && it->first != address / 64) {
      ++it;
      continue;
    }
    const bool dirty = it->second.dirty != 0;
    const bool clean =
        write_back(c, it->first, it->second, entire ? 0 : static_cast<unsigned>(address % 64));
    if (dirty) spoil_caches(c, reinterpret_cast<uint8_t*>(it->first * 64), 64);
    it = clean ? c.cache.erase(it) : std::next(it);
  }
}

void check_cache_at_end(const Core& c) {
  for (const auto& entry : c.cache) {
    if (!entry.second.dirty) continue;
    const Tensor& tensor = world->tensors[static_cast<size_t>(entry.second.tensor)];
    const uint64_t at =
        entry.first * 64 + static_cast<uint64_t>(__builtin_ctzll(entry.second.dirty));
    fail(
        "SetValue on %s+%llu stayed in the scalar cache; call DataCacheCleanAndInvalid on the line",
        tensor.argument.name,
        static_cast<unsigned long long>(at - reinterpret_cast<uint64_t>(tensor.argument.data)));
  }
}

}  // namespace emu
