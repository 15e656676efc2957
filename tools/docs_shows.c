/* SPDX-License-Identifier: Apache-2.0
 *
 * The generated blocks of the pages in docs/. A line
 *
 *   <!-- shows SOURCE | FROM | TO -->
 *
 * stands before a fenced block. The block is made of the lines of SOURCE from the first that contains FROM to the
 * next that contains TO; an empty FROM is the start, an empty TO the end. Sources:
 *
 *   small PASS                the training step of examples/small.yaml after a pass
 *   small-decode PASS         its program that appends a token to a text
 *   small-report PASS         the decisions of the pass there
 *   small-frontier            its memory against recomputing
 *   small-run                 the files of a run of it
 *   moe PASS, ...             the same of examples/moe.yaml
 *   two-linears PASS ROLE     two linears, the second weight frozen or trainable
 *   two-linears-report PASS ROLE
 *   two-linears-diff PASS     from trainable to frozen
 *   schedule KIND PxMxV       the table of a pipeline schedule: ranks, microbatches, chunks
 *   schedule-order LIST       that of an order list
 *   schedule-figures          bubbles of all kinds
 *   scale MODEL RANKS         `plan --ranks` of a model of docs/scale; RANKS as 1024 or 8-pipeline
 *   scale-figures MODEL       a line for each number of ranks
 *   file PATH                 a file of the source tree, which has a test of its own
 *
 * Plans and traces are made for one thread and the oldest instruction set, so that the pages are the same on every
 * machine.
 */
#include "docs.h"

#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "data/file.h"

static void append(const char *text, size_t n, void *user) { rfi_string_append(user, text, n); }

static rfr_status read_text(const char *root, const char *path, rfi_string *s) {
  char full[1200], piece[4096];
  snprintf(full, sizeof full, "%s/%s", root, path);
  FILE *f = fopen(full, "rb");
  rfr_status status = f ? RFR_OK : RFR_IO;
  if (!f) fprintf(stderr, "docs: %s cannot be opened\n", full);
  for (size_t n; f && status == RFR_OK && (n = fread(piece, 1, sizeof piece, f)) > 0;)
    status = rfi_string_append(s, piece, n);
  if (f) fclose(f);
  return status;
}

static rfr_status open_example(rfr_ctx *ctx, const char *root, const char *path, int programs, rfr_run **out) {
  rfi_string text = {.ctx = ctx};
  rfr_run_options o = rfr_run_options_default();
  o.no_data = 1;
  o.keep_traces = 1;
  o.programs = programs;
  rfr_status s = read_text(root, path, &text);
  if (s == RFR_OK) s = rfr_run_open(ctx, text.data, NULL, &o, out);
  rfi_string_deinit(&text);
  return s;
}

/* The files in the folder of a finished run. */
static rfr_status put_files(rfr_ctx *ctx, const char *folder, rfi_string *s) {
  rfi_paths files = {.ctx = ctx};
  rfr_status status = rfi_glob(folder, "**/*", &files);
  rfi_paths_sort(&files);
  for (int i = 0; i < files.n && status == RFR_OK; i++) status = rfi_string_printf(s, "%s\n", files.items[i]);
  rfi_paths_deinit(&files);
  return status;
}

static rfr_status put_run(rfr_ctx *ctx, const char *root, rfi_string *s) {
  static const char *const sets[] = {"run.checkpoint_every=10"};
  char folder[] = "/tmp/docs-run-XXXXXX", data[1200];
  rfi_string text = {.ctx = ctx};
  rfr_run *run = NULL;
  rfr_run_options o = rfr_run_options_default();
  snprintf(data, sizeof data, "%s/examples", root);
  o.config_folder = data;
  o.overrides = sets, o.n_overrides = 1;
  rfr_status status = read_text(root, "examples/small.yaml", &text);
  if (status == RFR_OK && !mkdtemp(folder)) status = RFR_IO;
  if (status == RFR_OK) status = rfr_run_open(ctx, text.data, folder, &o, &run);
  if (status == RFR_OK) status = rfr_run_train(run);
  rfr_run_close(run);
  if (status == RFR_OK) status = put_files(ctx, folder, s);
  rfi_tree_discard(folder);
  rfi_string_deinit(&text);
  return status;
}

/* The same two layers as in tests/golden/frozen.*, with a GELU between them. */
static rfr_status open_two_linears(rfr_ctx *ctx, bool frozen, rfr_programs **out) {
  rfr_trace *t;
  rfr_compile_options o = rfr_compile_options_default();
  o.keep_traces = 1;
  RFI_TRY(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){24, 32}));
  rfr_value w0 = rfr_input(t, "w0", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){64, 32}));
  rfr_value w1 = rfr_input(t, "w1", frozen ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){16, 64}));
  rfr_value hidden = rfr_gelu(t, rfr_linear(t, x, w0, RFR_NONE), 1);
  rfr_value y = rfr_linear(t, hidden, w1, RFR_NONE), loss = rfr_mean(t, rfr_mul(t, y, y), -1);
  rfr_value_set_name(t, hidden, "hidden");
  rfr_value_set_name(t, y, "y");
  rfr_output(t, "d_w0", rfr_gradient(t, loss, w0, RFR_F32));
  if (!frozen) rfr_output(t, "d_w1", rfr_gradient(t, loss, w1, RFR_F32));
  rfr_status s = rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, out);
  rfr_trace_destroy(t);
  return s;
}

static rfr_status put_frontier(rfr_programs *p, int program, rfi_string *s) {
  enum { MOST = 20 };
  rfr_frontier_point point[MOST];
  int n;
  char *text = NULL;
  size_t size = 0;
  RFI_TRY(rfr_program_frontier(p, program, point, MOST, &n));
  FILE *f = open_memstream(&text, &size);
  if (!f) return RFR_NO_MEMORY;
  cli_frontier_table(p, program, point, n, f);
  rfr_status status = fclose(f) == 0 ? rfi_string_append(s, text, size) : RFR_IO;
  free(text);
  return status;
}

static rfr_status put_trace(const rfr_programs *p, int program, const char *pass, rfi_string *s) {
  const rfr_trace *t = rfr_program_trace(p, program, pass);
  return t ? rfr_trace_print(t, NULL, append, s) : RFR_INVALID;
}

static rfr_status put_report(const rfr_programs *p, int program, const char *pass, rfi_string *s) {
  const char *report = rfr_program_report(p, program, pass);
  return report ? rfi_string_append(s, report, strlen(report)) : RFR_INVALID;
}

/* Returns the full text of a source. */
static rfr_status put_source(rfr_ctx *ctx, const char *root, const char *source, rfi_string *s) {
  char what[40] = "", first[200] = "", second[40] = "";
  sscanf(source, "%39s %199s %39s", what, first, second);
  if (strcmp(what, "file") == 0) return read_text(root, first, s);
  if (strcmp(what, "schedule") == 0) return docs_schedule_table(ctx, first, second, s);
  if (strcmp(what, "schedule-order") == 0) return docs_schedule_order(ctx, first, s);
  if (strcmp(what, "schedule-figures") == 0) return docs_schedule_figures(ctx, s);
  if (strcmp(what, "scale") == 0) return docs_scale_plan(ctx, root, first, second, s);
  if (strcmp(what, "scale-figures") == 0) return docs_scale_figures(ctx, root, first, s);
  if (strcmp(what, "small-run") == 0) return put_run(ctx, root, s);
  const bool moe = strncmp(what, "moe", 3) == 0;
  if (moe || strncmp(what, "small", 5) == 0) {
    rfr_run *run = NULL;
    const char *of = what + (moe ? 3 : 5);
    const bool decode = strcmp(of, "-decode") == 0;
    rfr_status status = open_example(ctx, root, moe ? "examples/moe.yaml" : "examples/small.yaml",
                                     decode ? RFR_RUN_GENERATE : RFR_RUN_TRAIN | RFR_RUN_EVALUATE, &run);
    if (status == RFR_OK) {
      rfr_programs *p = rfr_run_programs(run);
      const int program = rfr_run_program_index(run, decode ? RFR_RUN_DECODE : RFR_RUN_TRAIN);
      status = !*of || decode                 ? put_trace(p, program, first, s)
               : strcmp(of, "-report") == 0   ? put_report(p, program, first, s)
               : strcmp(of, "-frontier") == 0 ? put_frontier(p, program, s)
                                              : RFR_INVALID;
    }
    rfr_run_close(run);
    return status;
  }
  if (strncmp(what, "two-linears", 11) != 0) return RFR_INVALID;
  rfr_programs *p = NULL, *other = NULL;
  rfr_status status = open_two_linears(ctx, strcmp(second, "trainable") != 0, &p);
  if (status == RFR_OK && strcmp(what, "two-linears-diff") == 0) {
    status = open_two_linears(ctx, false, &other);
    if (status == RFR_OK)
      status = rfr_trace_diff(rfr_program_trace(other, 0, first), rfr_program_trace(p, 0, first), append, s);
  } else if (status == RFR_OK) {
    status = strcmp(what, "two-linears") == 0 ? put_trace(p, 0, first, s) : put_report(p, 0, first, s);
  }
  rfr_programs_destroy(p);
  rfr_programs_destroy(other);
  return status;
}

/* Appends the selected lines; long ones are cut. */
static rfr_status put_lines(const char *text, const char *from, const char *to, rfi_string *s) {
  enum { WIDTH = 150 };
  bool on = !*from, done = false;
  while (*text && !done) {
    const size_t n = strcspn(text, "\n");
    char line[4096];
    snprintf(line, sizeof line, "%.*s", (int)(n < sizeof line - 1 ? n : sizeof line - 1), text);
    const bool starts = !on && strstr(line, from);
    on |= starts;
    if (on) {
      RFI_TRY(rfi_string_printf(s, n > WIDTH ? "%.*s ...\n" : "%.*s\n", n > WIDTH ? WIDTH : (int)n, text));
      done = *to && !starts && strstr(line, to);
    }
    text += n + (text[n] == '\n');
  }
  return on && (done || !*to) ? RFR_OK : RFR_INVALID;
}

static void trim(char *s) {
  size_t n = strlen(s), k = strspn(s, " ");
  while (n > k && s[n - 1] == ' ') n--;
  memmove(s, s + k, n - k);
  s[n - k] = '\0';
}

rfr_status docs_renew(rfr_ctx *ctx, const char *root, const char *name, const char *page, rfi_string *s) {
  static const char mark[] = "<!-- shows ";
  while (*page) {
    size_t n = strcspn(page, "\n");
    n += page[n] == '\n';
    RFI_TRY(rfi_string_append(s, page, n));
    const char *line = page;
    page += n;
    if (strncmp(line, mark, sizeof mark - 1) != 0) continue;
    char source[240] = "", from[200] = "", to[200] = "", words[800];
    snprintf(words, sizeof words, "%.*s", (int)(n < 780 ? n : 780), line + sizeof mark - 1);
    if (strstr(words, "-->")) *strstr(words, "-->") = '\0';
    char *bar = strchr(words, '|'), *bar2 = bar ? strchr(bar + 1, '|') : NULL;
    if (bar) *bar = '\0';
    if (bar2) *bar2 = '\0';
    snprintf(source, sizeof source, "%s", words);
    if (bar) snprintf(from, sizeof from, "%s", bar + 1);
    if (bar2) snprintf(to, sizeof to, "%s", bar2 + 1);
    trim(from);
    trim(to);
    /* skip the old block, from its opening fence to the closing one */
    const char *fence = strstr(page, "```"), *close = fence ? strstr(fence + 3, "\n```") : NULL;
    rfi_string whole = {.ctx = ctx};
    rfr_status status = fence == page && close ? RFR_OK : RFR_INVALID;
    const size_t opening = strcspn(page, "\n") + 1;
    if (status == RFR_OK) status = put_source(ctx, root, source, &whole);
    if (status == RFR_OK) status = rfi_string_append(s, page, opening);
    if (status == RFR_OK) status = put_lines(whole.data ? whole.data : "", from, to, s);
    if (status == RFR_OK) status = rfi_string_printf(s, "```\n");
    rfi_string_deinit(&whole);
    if (status != RFR_OK) {
      fprintf(stderr, "%s: cannot show%s from \"%s\" to \"%s\" (%s)\n", name, source, from, to,
              rfr_last_error()->message);
      return status;
    }
    page = close + 4;
    page += *page == '\n';
  }
  return RFR_OK;
}

rfr_status docs_plan(rfr_ctx *ctx, const char *root, rfi_string *s) {
  rfr_run *run = NULL;
  char *text = NULL;
  size_t n = 0;
  FILE *f = open_memstream(&text, &n);
  rfr_status status =
      f ? open_example(ctx, root, "examples/small.yaml", RFR_RUN_TRAIN | RFR_RUN_EVALUATE, &run) : RFR_NO_MEMORY;
  if (status == RFR_OK)
    status = cli_plan_svg(rfr_run_programs(run), rfr_run_program_index(run, RFR_RUN_TRAIN), "examples/small.yaml", f);
  if (f && fclose(f) != 0) status = RFR_IO;
  if (status == RFR_OK) status = rfi_string_append(s, text, n);
  rfr_run_close(run);
  free(text);
  return status;
}
