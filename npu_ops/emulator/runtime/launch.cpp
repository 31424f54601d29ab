// SPDX-License-Identifier: Apache-2.0
// One launch: a fiber per core, run one after the other until each ends or waits for another core.
#include <cstdio>
#include <cstdlib>

#include "core.h"

namespace emu {

bool is_cube() { return core().cube; }

int64_t block_index() {
  const Core& c = core();
  return c.cube || world->launch->kind != KERNEL_TYPE_MIX_AIC_1_2 ? c.block : c.block * 2 + c.sub;
}

int64_t block_number() { return world->launch->blocks; }

int64_t sub_block_index() { return core().sub; }

void declare_kernel_type(KernelType type) {
  if (type != world->launch->kind) {
    fail("KERNEL_TASK_TYPE_DEFAULT names kernel type %d, the launch %d", static_cast<int>(type),
         world->launch->kind);
  }
}

static void core_main() {
  Core& c = core();
  world->invoke(world->kernel, world->launch->arguments);
  c.instruction = "kernel end";
  c.pipe = PIPE_S;
  check_queues_at_end(c);
  check_flags_at_end(c);
  check_cache_at_end(c);
  c.state = Core::kDone;
  for (Store& store : c.stores) store = Store();
  swapcontext(&c.context, &world->scheduler);
  std::abort();
}

static void add_core(World& w, int block, int sub, bool cube) {
  auto c = std::make_unique<Core>();
  c->number = static_cast<int>(w.cores.size());
  c->block = block;
  c->sub = sub;
  c->cube = cube;
  w.cores.push_back(std::move(c));
}

static void add_cores(World& w) {
  for (int block = 0; block < w.launch->blocks; ++block) {
    const int kind = w.launch->kind;
    if (kind == KERNEL_TYPE_AIC_ONLY || kind == KERNEL_TYPE_MIX_AIC_1_2)
      add_core(w, block, 0, true);
    if (kind == KERNEL_TYPE_AIC_ONLY) continue;
    add_core(w, block, 0, false);
    if (kind == KERNEL_TYPE_MIX_AIC_1_2) add_core(w, block, 1, false);
  }
}

static void add_tensors(World& w) {
  for (int i = 0; i < w.launch->num_tensors; ++i) {
    Tensor tensor;
    tensor.argument = w.launch->tensors[i];
    if (tensor.argument.role != 0) {
      tensor.cells.resize((tensor.argument.bytes + tensor.argument.item_bytes - 1) /
                          tensor.argument.item_bytes);
    }
    w.tensors.push_back(std::move(tensor));
  }
}

// Deep enough for kernels with some local arrays, each page used only if touched.
constexpr size_t kStackBytes = 256 * 1024;

static void resume(World& w, Core& c) {
  w.running = &c;
  if (!c.stack) {
    c.stack.reset(new char[kStackBytes]);
    getcontext(&c.context);
    c.context.uc_stack.ss_sp = c.stack.get();
    c.context.uc_stack.ss_size = kStackBytes;
    c.context.uc_link = nullptr;
    makecontext(&c.context, core_main, 0);
  }
  c.state = Core::kReady;
  swapcontext(&w.scheduler, &c.context);
  if (c.state == Core::kDone) c.stack.reset();
}

static bool ready(const Core& c) {
  if (c.state == Core::kWaiting) return !c.arrived[c.waiting_for].empty();
  return c.state == Core::kReady;
}

// Runs one round over all cores; false when none could go on.
static bool advance(World& w) {
  bool moved = false;
  const size_t count = w.cores.size();
  for (size_t i = 0; i < count && !w.failed; ++i) {
    Core& c = *w.cores[w.launch->backwards ? count - 1 - i : i];
    if (!ready(c)) continue;
    resume(w, c);
    moved = true;
  }
  return moved;
}

static bool report_deadlock(World& w) {
  std::string waiting;
  for (const auto& c : w.cores) {
    if (c->state != Core::kWaiting || waiting.size() > 400) continue;
    waiting += std::string(waiting.empty() ? "" : ", ") + (c->cube ? "AIC" : "AIV") + " " +
               std::to_string(c->sub) + " of block " + std::to_string(c->block) + " for flag " +
               std::to_string(c->waiting_for);
  }
  if (waiting.empty()) return false;
  std::snprintf(w.report->error, sizeof(w.report->error),
                "%s: deadlock in CrossCoreWaitFlag: %s; match every wait with a CrossCoreSetFlag",
                w.launch->kernel, waiting.c_str());
  return true;
}

static bool report_unmatched(World& w) {
  for (const auto& c : w.cores) {
    for (int id = 0; id < 16; ++id) {
      if (c->arrived[id].empty()) continue;
      std::snprintf(w.report->error, sizeof(w.report->error),
                    "%s: %s %d of block %d ends with CrossCore flag %d set %zu times more than "
                    "waited for; match "
                    "every set with a wait",
                    w.launch->kernel, c->cube ? "AIC" : "AIV", c->sub, c->block, id,
                    c->arrived[id].size());
      return true;
    }
  }
  for (const auto& entry : w.meetings) {
    for (const auto& waiting : entry.second.waiting) {
      if (waiting.second.empty()) continue;
      std::snprintf(w.report->error, sizeof(w.report->error),
                    "%s: CrossCoreSetFlag(%d) was called by some cores of a group and not by all",
                    w.launch->kernel, static_cast<int>(entry.first & 15));
      return true;
    }
  }
  return false;
}

static bool check_arguments(const uint64_t* sizes, int count, const Launch& launch,
                            Report& report) {
  if (count != launch.num_arguments) {
    std::snprintf(report.error, sizeof(report.error), "%s takes %d arguments, the launch gives %d",
                  launch.kernel, count, launch.num_arguments);
    return false;
  }
  for (int i = 0; i < count; ++i) {
    if (sizes[i] == launch.argument_bytes[i]) continue;
    std::snprintf(report.error, sizeof(report.error),
                  "%s: argument %d has %llu bytes, the launch gives %llu", launch.kernel, i,
                  static_cast<unsigned long long>(sizes[i]),
                  static_cast<unsigned long long>(launch.argument_bytes[i]));
    return false;
  }
  return true;
}

int run(void (*kernel)(), Invoke invoke, const uint64_t* sizes, int count, const Launch& launch,
        Report& report) {
  report.error[0] = 0;
  if (!check_arguments(sizes, count, launch, report)) return 1;
  auto w = std::make_unique<World>();
  w->launch = &launch;
  w->report = &report;
  w->kernel = kernel;
  w->invoke = invoke;
  add_cores(*w);
  add_tensors(*w);
  world = w.get();
  while (advance(*w)) {
  }
  const bool failed = w->failed || report_deadlock(*w) || report_unmatched(*w);
  for (size_t i = 0; i < w->tensors.size(); ++i) {
    const Tensor& tensor = w->tensors[i];
    uint64_t unwritten = 0;
    for (const Cell& cell : tensor.cells) unwritten += !cell.write;
    report.unwritten_bytes[i] = unwritten * tensor.argument.item_bytes;
  }
  world = nullptr;
  return failed ? 1 : 0;
}

}  // namespace emu
