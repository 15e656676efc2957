/* SPDX-License-Identifier: Apache-2.0
 *
 * A kernel that traps destroys the CUDA context of its process. A child trains, saves, and runs such a kernel on the
 * same device: from then on every call on the run must return backend.dead, and none may write a checkpoint. The
 * parent, which has its own context, resumes from the child's last checkpoint and continues training. Another child
 * unmaps a program's memory: the op whose kernel then reads it is named, with its layer, in the mode that waits for
 * each op.
 *
 *   trap_check FOLDER    with the repository's root as the working folder
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "refrain/ctx.h"
#include "refrain/ops.h"
#include "refrain/program.h"
#include "refrain/train.h"

static const char config[] =
    "refrain: 1\n"
    "model: {model_type: llama, hidden_size: 64, intermediate_size: 160, num_hidden_layers: 2,\n"
    "        num_attention_heads: 4}\n"
    "data: {train: [\"src/base/*.c\"], validation: 20%, sequence: 64}\n"
    "batch: {tokens: 256, microbatch: 4}\n"
    "optimizer: {lr: 1e-3, clip: 1}\n"
    "run: {steps: 20}\n";

static __global__ void trap() { asm volatile("trap;"); }

static int wrong;

static void expect(const char *what, bool holds) {
  printf("%-48s %s\n", what, holds ? "ok" : "FAILED");
  if (!holds) printf("    %s: %s\n", rfr_last_error()->slug, rfr_last_error()->message);
  fflush(stdout);
  wrong += !holds;
}

static bool is_dead(rfr_status s) { return s == RFR_IO && strcmp(rfr_last_error()->slug, "backend.dead") == 0; }

static rfr_status open_run(const char *folder, rfr_ctx **ctx, rfr_run **run) {
  rfr_ctx_options c = rfr_ctx_options_default();
  rfr_run_options o = rfr_run_options_default();
  *ctx = NULL;
  *run = NULL;
  c.device = "cuda";
  o.config_folder = ".";
  o.resume = 1;
  rfr_status s = rfr_ctx_create(&c, ctx);
  return s == RFR_OK ? rfr_run_open(*ctx, config, folder, &o, run) : s;
}

static int child(const char *folder) {
  rfr_ctx *ctx;
  rfr_run *run;
  rfr_tensor step;
  long long block[4];
  rfr_status s = open_run(folder, &ctx, &run);
  for (int i = 0; i < 3 && s == RFR_OK; i++) s = rfr_run_step(run);
  if (s == RFR_OK) s = rfr_run_save(run);
  expect("child: trains and saves", s == RFR_OK);
  if (s != RFR_OK) return 1;
  rfr_programs *p = rfr_run_programs(run);
  trap<<<1, 1>>>();
  cudaDeviceSynchronize();
  int idle;
  expect("child: a step says that the context is dead", is_dead(rfr_run_step(run)));
  expect("child: a save says so", is_dead(rfr_run_save(run)));
  expect("child: a wait says so", is_dead(rfr_programs_wait(p)));
  expect("child: a poll says so", is_dead(rfr_programs_poll(p, &idle)));
  s = rfr_programs_tensor(p, "step", &step);
  expect("child: a read says so", s == RFR_OK && is_dead(rfr_programs_read(p, &step, block)));
  expect("child: a new context says so", is_dead(open_run(folder, &ctx, &run)));
  return wrong != 0;
}

/* Unmaps the memory of a program with one op in a layer, so that its kernel fails. */
static int child_of_bad_op(void) {
  const int64_t n = 1 << 20;
  rfr_ctx_options c = rfr_ctx_options_default();
  rfr_ctx *ctx;
  rfr_trace *t;
  rfr_programs *p;
  rfr_tensor x;
  rfr_op_time time;
  int ops;
  c.device = "cuda";
  rfr_status s = rfr_ctx_create(&c, &ctx);
  if (s == RFR_OK) s = rfr_trace_create(ctx, &t);
  expect("bad op: a context", s == RFR_OK);
  if (s != RFR_OK) return 1;
  const rfr_value in = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, &n);
  rfr_scope(t, "layer3");
  rfr_output(t, "y", rfr_gelu(t, in, 1));
  s = rfr_trace_finish(t);
  if (s == RFR_OK) s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "x", &x);
  if (s == RFR_OK) s = rfr_program_profile(p, 0, &time, 1, &ops);
  expect("bad op: the program runs", s == RFR_OK);
  if (s != RFR_OK) return 1;
  void *entry = NULL;
  unsigned long long base = 0;
  size_t bytes = 0;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &entry, 12000, cudaEnableDefault, &found);
  const auto range_of = (int (*)(unsigned long long *, size_t *, unsigned long long))entry;
  const bool freed = entry && range_of(&base, &bytes, (unsigned long long)(uintptr_t)x.data) == 0 &&
                     cudaFree((void *)(uintptr_t)base) == cudaSuccess;
  expect("bad op: its memory is gone", freed);
  s = rfr_program_profile(p, 0, &time, 1, &ops);
  expect("bad op: the context is dead", is_dead(s));
  expect("bad op: op and layer are named", strstr(rfr_last_error()->message, "op 0 gelu in layer3 ") != NULL);
  printf("    %s\n", rfr_last_error()->message);
  fflush(stdout);
  return wrong != 0;
}

static bool ends_well(pid_t pid) {
  int status = 0;
  return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(int argc, char **argv) {
  rfr_ctx *ctx;
  rfr_run *run;
  rfr_run_info info;
  if (argc != 2) return 2;
  const pid_t pid = fork(); /* fork before any CUDA call */
  if (pid == 0) _exit(child(argv[1]));
  expect("the child ends by itself", ends_well(pid));
  const pid_t other = fork();
  if (other == 0) _exit(child_of_bad_op());
  expect("so does the one of a bad op", ends_well(other));
  rfr_status s = open_run(argv[1], &ctx, &run);
  expect("the last checkpoint opens in another process", s == RFR_OK);
  if (s != RFR_OK) return 1;
  rfr_run_get_info(run, &info);
  expect("it is the one from before the trap", info.step == 3);
  expect("training continues", rfr_run_step(run) == RFR_OK);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
  return wrong != 0;
}
