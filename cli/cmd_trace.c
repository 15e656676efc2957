/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain trace: the decisions of a pass as comments, then the program after it; with --diff, what the pass changed.
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

static void warn(const rfr_event *e, void *user) {
  if (e->kind == RFR_EVENT_WARNING) cli_warn(user, e->message);
}

static int find(const char *word, const char *const *list, int n) { /* the option table allows no other word */
  int i = 0;
  while (i < n - 1 && strcmp(list[i], word) != 0) i++;
  return i;
}

/* The decisions as comments, so that the output is still a trace. */
static void print_report(const char *report) {
  while (report && *report) {
    size_t n = strcspn(report, "\n");
    printf("; %.*s\n", (int)n, report);
    report += n + (report[n] == '\n');
  }
}

static void write_file(const char *text, size_t n, void *user) { fwrite(text, 1, n, user); }

static rfr_status put_program(const cli *c, const rfr_trace *before, const rfr_trace *t, int phase, FILE *f) {
  if (c->diff) return rfr_trace_diff(before, t, write_file, f);
  rfr_print_options o = rfr_print_options_default();
  o.flat = c->flat;
  o.phase = phase;
  return rfr_trace_print(t, &o, write_file, f);
}

/* The same as one object: the report's lines, and the text of the trace or of the difference. */
static rfr_status print_json(const cli *c, const char *pass, const char *report, const rfr_trace *before,
                             const rfr_trace *t, int phase) {
  char *text = NULL;
  size_t n = 0;
  FILE *f = open_memstream(&text, &n);
  if (!f) return RFR_NO_MEMORY;
  rfr_status s = put_program(c, before, t, phase, f);
  if (fclose(f) != 0 && s == RFR_OK) s = RFR_NO_MEMORY;
  if (s == RFR_OK) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_text(&j, "program", c->program ? c->program : "train");
    json_text(&j, "after", pass);
    json_begin(&j, "report", '[');
    while (report && *report) {
      const size_t length = strcspn(report, "\n");
      char *line = strndup(report, length);
      json_text(&j, NULL, line ? line : "");
      free(line);
      report += length + (report[length] == '\n');
    }
    json_end(&j, ']');
    json_text(&j, c->diff ? "diff" : "trace", text);
    json_end(&j, '}');
    putchar('\n');
  }
  free(text);
  return s;
}

static rfr_status print_trace(const cli *c, const rfr_programs *p, int program, int pass, int phase) {
  const rfr_trace *t = rfr_program_trace(p, program, passes[pass]);
  if (!t) return cli_usage("try another pass", "the program has no trace after %s", passes[pass]);
  const rfr_trace *before = c->diff && pass > 0 ? rfr_program_trace(p, program, passes[pass - 1]) : NULL;
  if (c->diff && !before)
    return cli_usage("give --after with a later pass", "no trace comes before the pass %s", passes[pass]);
  const char *report = rfr_program_report(p, program, passes[pass]);
  if (c->json) return print_json(c, passes[pass], report, before, t, phase);
  if (!c->flat) print_report(report);
  return put_program(c, before, t, phase, stdout);
}

rfr_status cli_trace(cli *c) {
  char *text = NULL;
  rfr_run *run = NULL;
  int which = RFR_RUN_TRAIN;
  const int pass = find(c->after ? c->after : "lower", passes, N_PASSES);
  const int phase = c->phase ? find(c->phase, phases, N_PHASES) : -1;
  if (c->diff && (c->flat || c->phase))
    return cli_usage("omit one of them", "--diff prints what the pass changed; --flat and --phase print the program");
  rfr_status s = cli_program(c, &which);
  if (s == RFR_OK) s = cli_read_config(c, &text);
  if (s == RFR_OK) s = cli_open_config(c, text, which, true, warn, &run);
  if (s == RFR_OK) s = print_trace(c, rfr_run_programs(run), rfr_run_program_index(run, which), pass, phase);
  rfr_run_close(run);
  free(text);
  return s;
}
