/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan against the device. A small model trains 50 steps. The device memory used since the context was created must
 * be the arena, the measured rows of the plan, and a remainder that is small and does not grow. The arena begins as a
 * pattern: after 3 steps every planned byte of a value must have been written, and no byte after the arena; nothing may
 * be allocated after compile.
 *
 *   memory_check    with the repository's root as the working folder; no other process on the GPU
 *
 * NVML counts free bytes without a context of its own; the runtime's own count would include one.
 */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>

#include "refrain/ctx.h"
#include "refrain/program.h"
#include "refrain/train.h"

enum { SHOWN = 3, STEPS = 50, MIB = 1 << 20, REMAINDER = 16 * MIB, GRANULE = 2 * MIB };

static const char config[] =
    "refrain: 1\n"
    "model: {model_type: llama, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4,\n"
    "        num_attention_heads: 4, num_key_value_heads: 2}\n"
    "data: {train: [\"src/**/*.c\"], sequence: 256}\n"
    "batch: {tokens: 8192, microbatch: 16}\n"
    "optimizer: {lr: 1e-3, clip: 1}\n"
    "precision: {dtype: bf16}\n"
    "run: {steps: 50}\n";

static int wrong;

static void expect(const char *what, bool holds) {
  printf("%-60s %s\n", what, holds ? "ok" : "FAILED");
  fflush(stdout);
  wrong += !holds;
}

static int fail(const char *what, const char *why) {
  fprintf(stderr, "error: %s: %s\n", what, why);
  return 1;
}

/* ---- NVML, without its header ---- */

struct nvml_memory {
  unsigned long long total, free, used;
};
static void *nvml_device;
static int (*nvml_memory_info)(void *device, struct nvml_memory *out);

static bool open_nvml() {
  char bus[32];
  void *object = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (!object || cudaDeviceGetPCIBusId(bus, sizeof bus, 0) != cudaSuccess) return false;
  int (*init)() = (int (*)())dlsym(object, "nvmlInit_v2");
  int (*find)(const char *, void **) =
      (int (*)(const char *, void **))dlsym(object, "nvmlDeviceGetHandleByPciBusId_v2");
  nvml_memory_info = (int (*)(void *, struct nvml_memory *))dlsym(object, "nvmlDeviceGetMemoryInfo");
  return init && find && nvml_memory_info && init() == 0 && find(bus, &nvml_device) == 0;
}

static long long free_bytes() {
  struct nvml_memory m;
  return nvml_memory_info(nvml_device, &m) == 0 ? (long long)m.free : 0;
}

/* ---- the table ---- */

struct reading {
  rfr_memory_use use;
  long long taken, remainder;
};

static struct reading read_device(rfr_programs *p, long long before, long long context) {
  struct reading r = {};
  if (rfr_programs_wait(p) != RFR_OK || rfr_programs_memory_use(p, &r.use) != RFR_OK) wrong++;
  r.taken = before - free_bytes();
  r.remainder = r.taken - context - r.use.libraries - r.use.arena - r.use.kernels - r.use.graphs;
  return r;
}

static void print_row(const char *name, long long a, long long b) { printf("%-12s %14lld %14lld\n", name, a, b); }

static void check_run(rfr_run *run, rfr_ctx *ctx, long long before, long long context) {
  rfr_programs *p = rfr_run_programs(run);
  const int train = rfr_run_program_index(run, RFR_RUN_TRAIN);
  rfr_plan_summary plan;
  struct reading at[2];
  rfr_status s = rfr_program_plan(p, train, &plan);
  const int64_t calls = rfr_ctx_get_stats(ctx).alloc_calls;
  int i = 0;
  for (; i < SHOWN && s == RFR_OK; i++) s = rfr_run_step(run);
  at[0] = read_device(p, before, context);
  for (; i < STEPS && s == RFR_OK; i++) s = rfr_run_step(run);
  at[1] = read_device(p, before, context);
  const int64_t calls_after = rfr_ctx_get_stats(ctx).alloc_calls;
  expect("50 steps", s == RFR_OK);
  if (s != RFR_OK) printf("    %s\n", rfr_last_error()->message);
  printf("%-12s %14s %14s\n", "bytes", "after step 3", "after step 50");
  print_row("context", context, context);
  print_row("libraries", at[0].use.libraries, at[1].use.libraries);
  print_row("arena", at[0].use.arena, at[1].use.arena);
  print_row("kernels", at[0].use.kernels, at[1].use.kernels);
  print_row("graphs", at[0].use.graphs, at[1].use.graphs);
  print_row("remainder", at[0].remainder, at[1].remainder);
  print_row("in all", at[0].taken, at[1].taken);
  printf("planned: %lld\n", (long long)plan.planned_bytes);
  const long long rounded = at[1].use.arena - plan.planned_bytes - 2 * MIB; /* its guard */
  expect("the arena is what was planned, rounded up by at most 2 MiB", rounded >= -GRANULE && rounded <= GRANULE);
  expect("the remainder is at most 16 MiB", at[1].remainder <= REMAINDER && at[1].remainder >= -REMAINDER);
  expect("and does not grow", at[1].remainder <= at[0].remainder);
  expect("nothing was allocated after compile", calls_after == calls);
  expect("nothing after the arena was written", rfr_programs_check(p) == RFR_OK);
}

/* After the first steps: planned memory must be used well before step 50. */
static void check_written(rfr_ctx *ctx) {
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = ".";
  o.programs = RFR_RUN_TRAIN;
  rfr_status s = rfr_run_open(ctx, config, NULL, &o, &run);
  for (int i = 0; i < SHOWN && s == RFR_OK; i++) s = rfr_run_step(run);
  expect("every planned byte of a value is written after 3 steps",
         s == RFR_OK && rfr_program_unwritten_bytes(rfr_run_programs(run), 0) == 0);
  expect("nothing after the arena was written by then",
         s == RFR_OK && rfr_programs_check(rfr_run_programs(run)) == RFR_OK);
  rfr_run_close(run);
}

int main() {
  rfr_ctx *ctx;
  rfr_run *run;
  rfr_ctx_options c = rfr_ctx_options_default();
  rfr_run_options o = rfr_run_options_default();
  if (!open_nvml()) return fail("libnvidia-ml.so.1", "not there, or there is no GPU");
  const long long before = free_bytes();
  if (cudaFree(0) != cudaSuccess) return fail("the context", "cannot be made");
  const long long context = before - free_bytes();
  c.device = "cuda";
  o.config_folder = ".";
  o.programs = RFR_RUN_TRAIN;
  if (rfr_ctx_create(&c, &ctx) != RFR_OK) return fail("the library's context", rfr_last_error()->message);
  if (rfr_run_open(ctx, config, NULL, &o, &run) != RFR_OK) return fail("the run", rfr_last_error()->message);
  check_run(run, ctx, before, context);
  rfr_run_close(run);
  check_written(ctx);
  rfr_ctx_destroy(ctx);
  printf("%s\n", wrong ? "FAILED" : "ok");
  return wrong != 0;
}
