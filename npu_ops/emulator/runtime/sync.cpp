// SPDX-License-Identifier: Apache-2.0
// Flags between pipes, barriers, and flags between cores.
#include <algorithm>

#include "core.h"

namespace emu {

void join(Clock& into, const Clock& from) {
  for (int q = 0; q < kNumPipes; ++q) into.own[q] = std::max(into.own[q], from.own[q]);
  if (from.others.empty()) return;
  if (into.others.empty()) {
    into.others = from.others;
    return;
  }
  for (size_t i = 0; i < from.others.size(); ++i)
    into.others[i] = std::max(into.others[i], from.others[i]);
}

// What has happened when all instructions of `pipe` so far are over.
Clock snapshot(const Core& c, pipe_t pipe) {
  Clock clock = c.clock[pipe];
  clock.own[pipe] = c.now[pipe];
  return clock;
}

std::string event_name(AscendC::HardEvent event) {
  return std::string(kPipeNames[source_of(event)]) + "_" + kPipeNames[target_of(event)];
}

static Flag& flag_of(AscendC::HardEvent event, int32_t id) {
  return core().flags[source_of(event)][target_of(event)][id];
}

static void note(const char* instruction, pipe_t pipe) {
  core().instruction = instruction;
  core().pipe = pipe;
  ++core().ordinal;
}

static void check_event(AscendC::HardEvent event, int32_t id) {
  Core& c = core();
  const pipe_t source = source_of(event), target = target_of(event);
  const auto legal = [&](pipe_t p) {
    if (c.cube)
      return p == PIPE_M || p == PIPE_MTE1 || p == PIPE_MTE2 || p == PIPE_MTE3 || p == PIPE_FIX;
    return p == PIPE_S || p == PIPE_V || p == PIPE_MTE2 || p == PIPE_MTE3;
  };
  if (source == target) {
    fail("HardEvent::%s: within one pipe use PipeBarrier<PIPE_%s>()", event_name(event).c_str(),
         kPipeNames[source]);
  }
  if (!legal(source) || !legal(target)) {
    fail("HardEvent::%s does not exist on %s", event_name(event).c_str(),
         c.cube ? "a cube core: it has M, MTE1, MTE2, MTE3 and FIX"
                : "a vector core: it has S, V, MTE2 and MTE3");
  }
  if (id < 0 || id > 7) fail("event id %d: 0 to 7", id);
  if (id > 5 && !flag_of(event, id).claimed)
    fail("event id %d is reserved; take 0 to 5 or TPipe::AllocEventID", id);
}

void raise_flag(AscendC::HardEvent event, int32_t id, bool of_queue) {
  Flag& flag = flag_of(event, id);
  if (flag.set) {
    fail("SetFlag<HardEvent::%s>(%d) twice without WaitFlag%s", event_name(event).c_str(), id,
         flag.of_queue ? "; a TQue uses this id: take yours from TPipe::AllocEventID"
                       : "; wait for it or take another id");
  }
  flag.set = true;
  flag.of_queue = of_queue;
  flag.clock = snapshot(core(), source_of(event));
}

void lower_flag(AscendC::HardEvent event, int32_t id) {
  Flag& flag = flag_of(event, id);
  if (!flag.set) {
    fail("WaitFlag<HardEvent::%s>(%d) without SetFlag: the core would hang; set the flag before",
         event_name(event).c_str(), id);
  }
  flag.set = false;
  join(core().clock[target_of(event)], flag.clock);
  if (target_of(event) == PIPE_S && !flag.clock.others.empty()) ++core().version;
}

void set_flag(AscendC::HardEvent event, int32_t id) {
  note("SetFlag", source_of(event));
  check_event(event, id);
  raise_flag(event, id, false);
}

void wait_flag(AscendC::HardEvent event, int32_t id) {
  note("WaitFlag", target_of(event));
  check_event(event, id);
  if (flag_of(event, id).of_queue && flag_of(event, id).set) {
    fail("WaitFlag<HardEvent::%s>(%d) takes the flag of a TQue; take another id",
         event_name(event).c_str(), id);
  }
  lower_flag(event, id);
}

int32_t take_event(AscendC::HardEvent event, bool claim) {
  note(claim ? "AllocEventID" : "FetchEventID", source_of(event));
  for (int32_t id = 0; id < 8; ++id) {
    Flag& flag = flag_of(event, id);
    if (flag.claimed || flag.set) continue;
    flag.claimed = claim;
    return id;
  }
  fail("all 8 ids of HardEvent::%s are in use; release some or use fewer buffers",
       event_name(event).c_str());
}

void release_event(AscendC::HardEvent event, int32_t id) {
  note("ReleaseEventID", source_of(event));
  if (id < 0 || id > 7 || !flag_of(event, id).claimed) {
    fail("ReleaseEventID<HardEvent::%s>(%d) without AllocEventID", event_name(event).c_str(), id);
  }
  flag_of(event, id).claimed = false;
}

void barrier(pipe_t pipe) {
  note("PipeBarrier", pipe);
  Core& c = core();
  if (pipe != PIPE_ALL) {
    c.clock[pipe].own[pipe] = c.now[pipe];
    return;
  }
  Clock all;
  for (int p = 0; p < kNumPipes; ++p) join(all, snapshot(c, static_cast<pipe_t>(p)));
  for (int p = 0; p < kNumPipes; ++p) c.clock[p] = all;
  ++c.version;
}

// All that a core knows, in terms of every agent of the launch.
static Clock exported(const Core& c, pipe_t pipe) {
  Clock clock;
  const Clock here = snapshot(c, pipe);
  clock.others = here.others;
  clock.others.resize(world->cores.size() * kNumPipes, 0);
  for (int q = 0; q < kNumPipes; ++q) {
    Time& time = clock.others[static_cast<size_t>(c.number) * kNumPipes + static_cast<size_t>(q)];
    time = std::max(time, here.own[q]);
  }
  return clock;
}

static Meeting& meeting_of(const Core& c, uint8_t mode, uint16_t id) {
  // Modes 1 and 2 meet within a block; both directions of mode 2 are apart.
  const uint64_t key = (static_cast<uint64_t>(mode == 0 ? 0xffff : c.block) << 16) |
                       (static_cast<uint64_t>(mode) << 8) | (c.cube ? 128u : 0u) | id;
  Meeting& meeting = world->meetings[key];
  if (!meeting.setters.empty()) return meeting;
  for (const auto& other : world->cores) {
    const bool near = mode == 0 || other->block == c.block;
    if (near && other->cube == c.cube) meeting.setters.push_back(other->number);
    if (near && (mode == 2 ? other->cube != c.cube : other->cube == c.cube)) {
      meeting.receivers.push_back(other->number);
    }
  }
  return meeting;
}

void cross_set(uint8_t mode, pipe_t pipe, uint16_t id) {
  note("CrossCoreSetFlag", pipe);
  Core& c = core();
  const int kind = world->launch->kind;
  if (kind == KERNEL_TYPE_AIV_ONLY || kind == KERNEL_TYPE_AIC_ONLY) {
    fail("flags between cores need a mixed kernel type, such as KERNEL_TYPE_MIX_AIC_1_2");
  }
  if (mode != 0 && kind != KERNEL_TYPE_MIX_AIC_1_2)
    fail("modes 1 and 2 need KERNEL_TYPE_MIX_AIC_1_2");
  if (mode == 1 && c.cube) fail("mode 1 is between the vector cores of a block");
  if (id > 10) fail("flag id %u: 0 to 10; 11 to 14 belong to SyncAll, 15 is kept free", id);
  Meeting& meeting = meeting_of(c, mode, id);
  meeting.waiting[c.number].push_back(exported(c, pipe));
  for (const int setter : meeting.setters) {
    if (meeting.waiting[setter].empty()) return;
  }
  Clock all;
  for (const int setter : meeting.setters) {
    join(all, meeting.waiting[setter].front());
    meeting.waiting[setter].pop_front();
  }
  for (const int receiver : meeting.receivers) {
    std::deque<Clock>& counter = world->cores[static_cast<size_t>(receiver)]->arrived[id];
    counter.push_back(all);
    if (counter.size() > 15)
      fail("flag %u was set more than 15 times ahead of CrossCoreWaitFlag; wait back", id);
  }
}

void cross_wait(uint16_t id) {
  note("CrossCoreWaitFlag", PIPE_S);
  Core& c = core();
  if (id > 10) fail("flag id %u: 0 to 10", id);
  while (c.arrived[id].empty()) {
    c.state = Core::kWaiting;
    c.waiting_for = id;
    swapcontext(&c.context, &world->scheduler);
  }
  Clock clock = c.arrived[id].front();
  c.arrived[id].pop_front();
  for (int q = 0; q < kNumPipes; ++q) {
    clock.own[q] = clock.others[static_cast<size_t>(c.number) * kNumPipes + static_cast<size_t>(q)];
  }
  join(c.clock[PIPE_S], clock);
  ++c.version;
}

void check_flags_at_end(const Core& c) {
  for (int a = 0; a < kNumPipes; ++a) {
    for (int b = 0; b < kNumPipes; ++b) {
      for (int id = 0; id < 8; ++id) {
        if (c.flags[a][b][id].set && !c.flags[a][b][id].of_queue) {
          fail("SetFlag<HardEvent::%s_%s>(%d) was never waited for; add WaitFlag or drop SetFlag",
               kPipeNames[a], kPipeNames[b], id);
        }
      }
    }
  }
}

}  // namespace emu
