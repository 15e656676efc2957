/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain trace: a program as it stands after a pass, behind what the pass decided; or,
 * with --diff, only what the pass changed.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define PASS_NAME(name) , #name
static const char *const passes[] = {"record" RFR_PASSES(PASS_NAME)};
#undef PASS_NAME
enum { N_PASSES = sizeof passes / sizeof passes[0] };

static const char *const phases[] = {
#define PHASE_NAME(e, name) name,
    RFR_PHASES(PHASE_NAME)
#undef PHASE_NAME
};
enum { N_PHASES = sizeof phases / sizeof phases[0] };

static rfr_status find(const char *what, const char *word, const char *const *list, int n, int *out) {
  for (int i = 0; i < n; i++) {
    if (strcmp(list[i], word) != 0) continue;
    *out = i;
    return RFR_OK;
  }
  return cli_usage("refrain trace --help lists them", "there is no %s %s", what, word);
}

/* The reasons as comments, so that the whole output is still a trace. */
static void print_report(const char *report) {
  while (report && *report) {
    size_t n = strcspn(report, "\n");
    printf("; %.*s\n", (int)n, report);
    report += n + (report[n] == '\n');
  }
}

static rfr_status print_trace(const cli *c, const rfr_programs *p, int program, int pass, int phase) {
  const rfr_trace *t = rfr_program_trace(p, program, passes[pass]);
  if (!t) return cli_usage("try another pass", "the program has no trace after %s", passes[pass]);
  if (!c->flat) print_report(rfr_program_report(p, program, passes[pass]));
  if (c->diff) {
    const rfr_trace *before = pass > 0 ? rfr_program_trace(p, program, passes[pass - 1]) : NULL;
    if (!before)
      return cli_usage("give --after autodiff, prune, fuse, recompute or lower", "nothing comes before %s",
                       passes[pass]);
    return rfr_trace_diff(before, t, cli_write, NULL);
  }
  rfr_print_options o = rfr_print_options_default();
  o.flat = c->flat;
  o.phase = phase;
  return rfr_trace_print(t, &o, cli_write, NULL);
}

rfr_status cli_trace(cli *c) {
  char *text = NULL;
  rfr_run *run = NULL;
  int pass = 0, phase = -1, which = RFR_RUN_TRAIN;
  if (c->diff && (c->flat || c->phase))
    return cli_usage("leave one of them away",
                     "--diff shows what the pass changed: --flat and --phase are for the program");
  rfr_status s = find("pass", c->after ? c->after : "lower", passes, N_PASSES, &pass);
  if (s == RFR_OK && c->phase) s = find("phase", c->phase, phases, N_PHASES, &phase);
  if (s == RFR_OK) s = cli_program(c, &which);
  if (s == RFR_OK) s = cli_read_file(c->operand, &text);
  if (s == RFR_OK) s = cli_open_config(c, c->operand, text, which, true, &run);
  if (s == RFR_OK) s = print_trace(c, rfr_run_programs(run), rfr_run_program_index(run, which), pass, phase);
  rfr_run_close(run);
  free(text);
  return s;
}
