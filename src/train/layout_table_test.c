/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of docs/distributed.md, "What works together": each row is opened in each of its columns, as a
 * plan, and opens or is refused as its cell says. Pairs of rows open too, or are refused by name.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "support/context.h"
#include "support/run.h"

enum { MOST_SETS = 4, CASES = 3, COLUMNS = 5 };

static const char *const shards[] = {"none", "optimizer", "full"};
/* The columns: the modes of parallel.shard, parallel.expert in each mode, and a pipeline of 2 with data-parallel
 * ranks. */
enum { EXPERT = 3, PIPELINE = 4 };

static const struct row {
  const char *name; /* its first cell */
  const char *sets[CASES][MOST_SETS];
} rows[] = {
    {"AdamW, SGD, moments of 16 bits, frozen parameters",
     {{"optimizer.state_dtype=bf16"},
      {"optimizer.name=sgd", "optimizer.momentum=0.9"},
      {"optimizer.frozen=[\"*q_proj*\"]"}}},
    {"8-bit moments", {{"optimizer.state_dtype=u8"}}},
    {"Muon", {{"optimizer.name=muon"}}},
    {"mixture of experts", {{"model.model_type=qwen3_moe", "model.num_experts=4", "model.moe_intermediate_size=32"}}},
    {"LoRA, DoRA, quantized bases",
     {{"adapter.type=lora", "adapter.rank=4"},
      {"adapter.type=dora", "adapter.rank=4"},
      {"adapter.type=lora", "adapter.rank=4", "adapter.base=nf4"}}},
    {"f16 with a loss scale", {{"precision.dtype=f16"}}},
    {"FP8, MXFP8 and NVFP4 recipes",
     {{"precision.recipe=fp8_delayed"}, {"precision.recipe=mxfp8"}, {"precision.recipe=nvfp4"}}},
    {"`memory.recompute`, `memory.budget`",
     {{"memory.recompute=all"}, {"memory.recompute=auto", "memory.budget=1GiB"}}},
    {"`data.format: preference`", {{"data.train=[\"pairs.jsonl\"]", "data.format=preference", "data.sequence=64"}}},
    {"`run.time`, `run.tune`, data of the program", {{"run.time=5s"}, {"run.tune=true"}}},
};
enum { ROWS = sizeof rows / sizeof *rows };

#define CONFIG(model)                                                                                    \
  "refrain: 1\nmodel: {" model ", hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4}\n" DATA \
  "batch: {tokens: 512, microbatch: 2}\nschedule: {name: constant}\noptimizer: {lr: 1e-3}\n"
static const char dense[] = CONFIG("model_type: llama") "run: {steps: 2}\n",
                  experts[] =
                      CONFIG("model_type: qwen3_moe, num_experts: 4, moe_intermediate_size: 32") "run: {steps: 2}\n";

/* ---- opening ---- */

/* Opens a plan of the first of four ranks; rfr_last_error has the error. */
static rfr_status open_plan(rfr_comm *comm, int column, int variant, const char *const *a, const char *const *b) {
  static const char *const schedules[] = {"1f1b", "zb-v", "interleaved"};
  char shard[64], expert[64], pipeline[64], schedule[64];
  const char *sets[4 + 2 * MOST_SETS] = {shard, expert, pipeline, schedule};
  rfr_run *run;
  rfr_run_options o = rfr_run_options_default();
  snprintf(shard, sizeof shard, "parallel.shard=%s", shards[column < EXPERT ? column : column == EXPERT ? variant : 0]);
  snprintf(expert, sizeof expert, "parallel.expert=%d", column == EXPERT ? 4 : 1);
  snprintf(pipeline, sizeof pipeline, "parallel.pipeline=%d", column == PIPELINE ? 2 : 1);
  snprintf(schedule, sizeof schedule, "parallel.schedule=%s", schedules[variant]);
  o.config_folder = rft_run_root;
  o.overrides = sets, o.n_overrides = 4;
  for (int k = 0; k < MOST_SETS && a[k]; k++) sets[o.n_overrides++] = a[k];
  for (int k = 0; b && k < MOST_SETS && b[k]; k++) sets[o.n_overrides++] = b[k];
  o.comm = comm;
  o.plan_only = 1; /* a plan does not connect to other ranks */
  const rfr_status s = rfr_run_open(ctx, column == EXPERT ? experts : dense, NULL, &o, &run);
  rfr_run_close(run);
  return s;
}

static void expect_refusal(const char *what) {
  static const char *const slugs[] = {"unsupported", "config.value", "argument", "recipe", "model.config"};
  size_t i = 0;
  while (i < sizeof slugs / sizeof *slugs && strcmp(rfr_last_error()->slug, slugs[i]) != 0) i++;
  if (i == sizeof slugs / sizeof *slugs || !rfr_last_error()->message[0])
    fail_msg("%s: %s: %s", what, rfr_last_error()->slug, rfr_last_error()->message);
}

static int variants(int column) { return column == EXPERT || column == PIPELINE ? 3 : 1; }

/* ---- the table ---- */

/* Splits a line of a table into cells without surrounding blanks; false: the line is not part of a table. */
static bool read_cells(char *line, char *cell[COLUMNS + 1]) {
  int n = 0;
  if (line[0] != '|') return false;
  for (char *at = line + 1, *bar; n <= COLUMNS && (bar = strchr(at, '|')); at = bar + 1) {
    *bar = 0;
    while (*at == ' ') at++;
    for (char *end = at + strlen(at); end > at && end[-1] == ' ';) *--end = 0;
    cell[n++] = at;
  }
  return n == COLUMNS + 1;
}

static void check_row(rfr_comm *comm, const struct row *row, char *cell[COLUMNS + 1]) {
  char what[200];
  for (int column = 0; column < COLUMNS; column++) {
    const bool works = strcmp(cell[column + 1], "yes") == 0;
    if (!works && strcmp(cell[column + 1], "✗") != 0) fail_msg("%s: cell \"%s\"", row->name, cell[column + 1]);
    for (int variant = 0; variant < variants(column); variant++)
      for (int k = 0; k < CASES && row->sets[k][0]; k++) {
        const rfr_status s = open_plan(comm, column, variant, row->sets[k], NULL);
        snprintf(what, sizeof what, "%s (%s), column %d, variant %d", row->name, row->sets[k][0], column, variant);
        if (works && s != RFR_OK) fail_msg("%s: %s: %s", what, rfr_last_error()->slug, rfr_last_error()->message);
        if (!works && s == RFR_OK) fail_msg("%s: it opens", what);
        if (!works) expect_refusal(what);
      }
  }
}

static void table(void **state) {
  char *text, *cell[COLUMNS + 1];
  size_t n;
  int found = 0;
  rfr_comm *comm[4];
  (void)state;
  OK(rfr_comm_threads_create(ctx, 4, 1, comm));
  OK(rfi_file_read(ctx, RFT_SOURCE_DIR "/docs/distributed.md", &text, &n));
  char *line = strstr(text, "\n| | `none` |");
  assert_non_null(line);
  line = strstr(line, "|---|");
  for (char *next; line && *line == '|'; line = next) {
    if ((next = strchr(line, '\n'))) *next++ = 0;
    if (strncmp(line, "|---|", 5) == 0) continue;
    if (!read_cells(line, cell)) fail_msg("not a row of %d columns: %s", COLUMNS + 1, line);
    int i = 0;
    while (i < ROWS && strcmp(rows[i].name, cell[0]) != 0) i++;
    if (i < ROWS) check_row(comm[0], &rows[i], cell);
    else if (strncmp(cell[0], "GPUs", 4) != 0 && strncmp(cell[0], "evaluation", 10) != 0)
      fail_msg("no case for the row \"%s\"", cell[0]);
    found += i < ROWS;
  }
  assert_int_equal(found, ROWS);
  rfi_free(ctx, text);
  for (int r = 0; r < 4; r++) rfr_comm_destroy(comm[r]);
}

static void pairs(void **state) {
  char what[300];
  rfr_comm *comm[4];
  (void)state;
  OK(rfr_comm_threads_create(ctx, 4, 1, comm));
  for (int column = 2; column < COLUMNS; column++)
    for (int i = 0; i < ROWS; i++)
      for (int k = 0; k < i; k++) {
        snprintf(what, sizeof what, "%s with %s, column %d", rows[i].name, rows[k].name, column);
        if (open_plan(comm[0], column, (i + k) % variants(column), rows[i].sets[0], rows[k].sets[0]) != RFR_OK)
          expect_refusal(what);
      }
  for (int r = 0; r < 4; r++) rfr_comm_destroy(comm[r]);
}

static int setup(void **state) {
  const int failed = rft_run_setup(state);
  rft_write_text("pairs.jsonl", "{\"prompt\": \"a?\", \"chosen\": \"xx\", \"rejected\": \"y\"}\n"
                                "{\"prompt\": \"b?\", \"chosen\": \"xxx\", \"rejected\": \"yy\"}\n"
                                "{\"prompt\": \"c?\", \"chosen\": \"xxxx\", \"rejected\": \"yyy\"}\n");
  return failed;
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(table), rft_context_test(pairs)};
  return cmocka_run_group_tests(tests, setup, rft_run_teardown);
}
