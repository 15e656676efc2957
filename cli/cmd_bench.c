/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain bench: the time of a training step of a built-in configuration, on random
 * tokens (zeros would flatter), replayed. The median of many steps is what is reported:
 * a shared machine makes means meaningless.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static const struct {
  const char *name, *what, *config;
} cases[] = {
    {"demo", "the byte model of the demo",
     "refrain: 1\n"
     "model: {model_type: llama, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4,\n"
     "        num_attention_heads: 4}\n"
     "data: {train: [random], sequence: 256}\n"
     "batch: {tokens: 4096, microbatch: 16}\n"
     "optimizer: {lr: 1e-3}\n"
     "run: {steps: 1000}\n"},
    {"gpt2-124m", "GPT-2 124M, B 4 x T 64",
     "refrain: 1\n"
     "model: {model_type: gpt2, vocab_size: 50257, hidden_size: 768, num_hidden_layers: 12,\n"
     "        num_attention_heads: 12, max_position_embeddings: 1024}\n"
     "data: {train: [random], sequence: 64}\n"
     "batch: {tokens: 256, microbatch: 4}\n"
     "optimizer: {lr: 1e-3}\n"
     "run: {steps: 1000}\n"},
};
enum { N_CASES = sizeof cases / sizeof cases[0], MOST_STEPS = 4096 };

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static rfr_status time_steps(rfr_run *run, int64_t steps, double *median, int *n) {
  double *seconds = malloc(MOST_STEPS * sizeof *seconds);
  if (!seconds) return RFR_NO_MEMORY;
  rfr_status s = RFR_OK;
  const double warm = cli_now();
  do s = rfr_run_step(run);
  while (s == RFR_OK && cli_now() - warm < 1.0);
  const double start = cli_now();
  for (*n = 0; s == RFR_OK && *n < MOST_STEPS;) {
    const double before = cli_now();
    s = rfr_run_step(run);
    seconds[(*n)++] = cli_now() - before;
    if (steps > 0 ? *n >= steps : cli_now() - start >= 5.0 && *n >= 5) break;
  }
  if (s == RFR_OK) {
    qsort(seconds, (size_t)*n, sizeof *seconds, ascending);
    *median = seconds[*n / 2];
  }
  free(seconds);
  return s;
}

static void print_result(cli *c, rfr_run *run, int which, double seconds, int n) {
  char device[160], a[32];
  rfr_run_info info;
  rfr_plan_summary sum = {0};
  rfr_programs *p = rfr_run_programs(run);
  rfr_run_get_info(run, &info);
  rfr_program_plan(p, rfr_run_program_index(run, RFR_RUN_TRAIN), &sum);
  const double rate = (double)info.tokens_per_step / seconds;
  if (c->json) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_string(&j, "name", cases[which].name);
    json_string(&j, "device", cli_device(c, device));
    json_string(&j, "dtype", rfr_dtype_name(info.dtype));
    json_double(&j, "ms_per_step", 1e3 * seconds);
    json_double(&j, "tokens_per_second", rate);
    json_double(&j, "flops_per_step", info.flops_per_step);
    json_int(&j, "steps", n);
    json_int(&j, "planned_bytes", sum.planned_bytes);
    json_int(&j, "touched_bytes", rfr_programs_touched_bytes(p));
    json_int(&j, "transient_planned_bytes", sum.transient_planned_bytes);
    json_int(&j, "transient_lower_bound_bytes", sum.transient_lower_bound_bytes);
    json_end(&j, '}');
    putchar('\n');
    return;
  }
  printf("%s (%s), %s, %s\n", cases[which].name, cases[which].what, rfr_dtype_name(info.dtype), cli_device(c, device));
  printf("  %.2f ms per step (median of %d), %.0f tokens/s, %.1f GFLOP/s, %s planned\n", 1e3 * seconds, n, rate,
         1e-9 * info.flops_per_step / seconds, cli_bytes(a, sum.planned_bytes));
  fflush(stdout);
}

static rfr_status bench(cli *c, int which) {
  rfr_run *run = NULL;
  double seconds = 0.0;
  int n = 0;
  rfr_run_options o = cli_run_options(c);
  o.config_name = cases[which].name;
  o.no_data = 1;
  o.programs = RFR_RUN_TRAIN;
  rfr_status s = rfr_run_open(c->ctx, cases[which].config, NULL, &o, &run);
  if (s == RFR_OK) s = time_steps(run, c->steps, &seconds, &n);
  if (s == RFR_OK) print_result(c, run, which, seconds, n);
  rfr_run_close(run);
  return s;
}

rfr_status cli_bench(cli *c) {
  if (!c->operand && c->json)
    return cli_usage("refrain bench NAME --json", "--json prints one object: name a benchmark");
  rfr_status s = RFR_OK;
  bool found = false;
  for (int i = 0; s == RFR_OK && i < N_CASES; i++) {
    if (c->operand && strcmp(c->operand, cases[i].name) != 0) continue;
    found = true;
    s = bench(c, i);
  }
  if (found) return s;
  fputs("benchmarks:", stderr);
  for (int i = 0; i < N_CASES; i++) fprintf(stderr, " %s", cases[i].name);
  fputc('\n', stderr);
  return cli_usage("name one of them", "there is no benchmark %s", c->operand);
}
