/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain bench compile: the time of compiling a step. It must grow linearly with the trace, so a deep model is
 * compared with a shallow one, with and without recomputation. The fastest of several compilations counts.
 */
#include <inttypes.h>

#include "compile_time.h"

compile_time compile_time_of(rfr_run *run) {
  rfr_plan_summary sum = {0};
  rfr_programs *p = rfr_run_programs(run);
  const int i = rfr_run_program_index(run, RFR_RUN_TRAIN);
  rfr_program_plan(p, i, &sum);
  compile_time t = {.ms = 1e3 * sum.compile_seconds, .ops = rfr_trace_op_count(rfr_program_trace(p, i, "lower"))};
  t.us_per_op = t.ops > 0 ? 1e3 * t.ms / t.ops : 0.0;
  return t;
}

void compile_time_json(json *j, const compile_time *t) {
  json_double(j, "compile_ms", t->ms);
  json_int(j, "ops", t->ops);
  json_double(j, "compile_us_per_op", t->us_per_op);
}

enum { CASES = 4, USUAL_TIMES = 7 };
static const struct {
  int layers;
  const char *recompute;
} cases[CASES] = {{16, "none"}, {128, "none"}, {16, "all"}, {128, "all"}};

static rfr_status compile(cli *c, int i, compile_time *t) {
  char text[512];
  rfr_run *run;
  snprintf(text, sizeof text,
           "refrain: 1\n"
           "model: {model_type: llama, hidden_size: 64, intermediate_size: 176, num_hidden_layers: %d,\n"
           "        num_attention_heads: 4}\n"
           "data: {train: [random], sequence: 64}\n"
           "batch: {tokens: 512, microbatch: 8}\n"
           "optimizer: {lr: 1e-3}\n"
           "memory: {recompute: %s}\n"
           "run: {steps: 1000}\n",
           cases[i].layers, cases[i].recompute);
  rfr_status s = cli_open_timed(c, &(cli_builtin){.name = "compile", .config = text}, &run);
  if (s == RFR_OK) *t = compile_time_of(run);
  rfr_run_close(run);
  return s;
}

static void print_json(cli *c, const compile_time *best) {
  char device[160];
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_text(&j, "name", "compile");
  json_text(&j, "device", cli_device(c, device));
  json_begin(&j, "cases", '[');
  for (int i = 0; i < CASES; i++) {
    json_begin(&j, NULL, '{');
    json_int(&j, "layers", cases[i].layers);
    json_text(&j, "recompute", cases[i].recompute);
    compile_time_json(&j, &best[i]);
    json_end(&j, '}');
  }
  json_end(&j, ']');
  json_end(&j, '}');
  putchar('\n');
}

rfr_status bench_compile(cli *c) {
  compile_time best[CASES], t;
  char device[160];
  const int64_t times = c->steps > 0 ? c->steps : USUAL_TIMES;
  for (int64_t k = 0; k < times; k++)
    for (int i = 0; i < CASES; i++) {
      rfr_status s = compile(c, i, &t);
      if (s != RFR_OK) return s;
      if (k == 0 || t.ms < best[i].ms) best[i] = t;
    }
  if (c->json) {
    print_json(c, best);
    return RFR_OK;
  }
  printf("compile (a training step of a Llama, fastest of %" PRId64 "), %s\n", times, cli_device(c, device));
  for (int i = 0; i < CASES; i++)
    printf("  %3d layers, recompute %-4s %8.1f ms, %5d ops, %.1f us each\n", cases[i].layers, cases[i].recompute,
           best[i].ms, best[i].ops, best[i].us_per_op);
  fflush(stdout);
  return RFR_OK;
}
