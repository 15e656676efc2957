/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain train: opens a run, trains, says what it cost. The first SIGINT or SIGTERM
 * ends after the step in flight with a checkpoint; a second one kills at once.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static _Atomic(rfr_run *) running;

static void on_signal(int number) {
  rfr_run *run = atomic_load(&running);
  signal(number, SIG_DFL); /* the second one finds the default */
  if (run) rfr_run_request_stop(run);
  else raise(number);
}

/* runs/NAME for path/NAME.yaml */
static char *default_folder(const char *config) {
  const char *base = strrchr(config, '/');
  base = base ? base + 1 : config;
  const char *dot = strrchr(base, '.');
  size_t n = dot && dot != base ? (size_t)(dot - base) : strlen(base);
  char *folder = malloc(n + sizeof "runs/");
  if (folder) snprintf(folder, n + sizeof "runs/", "runs/%.*s", (int)n, base);
  return folder;
}

static void print_result(cli *c, rfr_run *run, const progress *p, const char *folder, double seconds) {
  rfr_run_info info;
  rfr_run_get_info(run, &info);
  rfr_plan_summary plan = {0};
  rfr_program_plan(rfr_run_programs(run), rfr_run_program_index(run, RFR_RUN_TRAIN), &plan);
  const int64_t touched = rfr_programs_touched_bytes(rfr_run_programs(run));
  const double rate = p->rate > 0.0 ? (double)info.tokens_per_step / p->rate : 0.0;
  if (c->json) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_text(&j, "folder", folder);
    json_text(&j, "checkpoint", info.checkpoint);
    json_int(&j, "step", info.step);
    json_int(&j, "steps", info.steps);
    json_int(&j, "skipped", info.skipped);
    json_double(&j, "seconds", seconds);
    json_double(&j, "tokens_per_second", rate);
    if (p->bits > 0.0) json_double(&j, "validation_bits_per_byte", p->bits);
    json_int(&j, "planned_bytes", plan.planned_bytes);
    json_int(&j, "touched_bytes", touched);
    json_end(&j, '}');
    putchar('\n');
    return;
  }
  if (c->quiet) return;
  char a[32];
  printf("%lld of %lld steps in %.1f s, %s\n", (long long)info.step, (long long)info.steps, seconds, info.checkpoint);
  printf("memory: %lld bytes planned (%s), %lld touched\n", (long long)plan.planned_bytes,
         cli_bytes(a, plan.planned_bytes), (long long)touched);
  if (p->bits > 0.0) printf("validation: %.3f bits per byte\n", p->bits);
}

rfr_status cli_train(cli *c) {
  char *text = NULL, *folder = NULL;
  rfr_run *run = NULL;
  progress p;
  progress_init(&p, c);
  if (c->strict && !c->resume) return cli_usage("add --resume, or leave it away", "--strict is for --resume");
  rfr_status s = cli_read_file(c->operand, &text);
  if (s != RFR_OK) return s;
  folder = c->out ? strdup(c->out) : default_folder(c->operand);
  if (!folder) {
    free(text);
    return RFR_NO_MEMORY;
  }
  rfr_run_options o = cli_run_options(c);
  o.on_event = progress_event;
  o.event_user = &p;
  s = rfr_run_open(c->ctx, text, folder, &o, &run);
  if (s == RFR_OK) {
    rfr_run_info info;
    rfr_run_get_info(run, &info);
    p.tokens = info.tokens_per_step;
    p.flops = info.flops_per_step;
    if (!c->quiet) cli_peak(c->ctx, info.dtype, &p.peak); /* unknown: progress goes without it */
    atomic_store(&running, run);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    const double start = cli_now();
    s = rfr_run_train(run);
    progress_close_line(&p);
    if (s == RFR_OK || s == RFR_STOPPED) print_result(c, run, &p, folder, cli_now() - start);
    atomic_store(&running, NULL);
  }
  rfr_run_close(run);
  free(folder);
  free(text);
  return s;
}
