/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain finetune: writes a configuration with defaults for adapters and trains it as `refrain train` does.
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* The value of --set KEY=VALUE, NULL: not given. `key` ends with "=". */
static const char *find_set(const cli *c, const char *key) {
  const size_t n = strlen(key);
  const char *value = NULL;
  for (int i = 0; i < c->sets.n; i++)
    if (strncmp(c->sets.items[i], key, n) == 0) value = c->sets.items[i] + n;
  return value;
}

/* The absolute path of an existing file, with the characters of patterns escaped; else the operand, as a pattern. */
static void put_data(json *j, const char *operand) {
  char path[PATH_MAX], escaped[2 * PATH_MAX];
  size_t n = 0;
  if (!realpath(operand, path)) {
    json_text(j, NULL, operand);
    return;
  }
  for (const char *s = path; *s; s++) {
    if (strchr("*?[\\", *s)) escaped[n++] = '\\';
    escaped[n++] = *s;
  }
  escaped[n] = '\0';
  json_text(j, NULL, escaped);
}

/* Needs of the rows. */
typedef struct rows {
  bool preference, holds_out; /* pairs of answers; enough rows to hold some out */
} rows;

static rfr_status write_config(const cli *c, const char *model, int64_t sequence, const rows *rows, char **out) {
  size_t n = 0;
  rfr_machine m;
  const bool on_gpu = rfr_machine_describe(c->ctx, &m) == RFR_OK && strncmp(m.device, "cuda", 4) == 0;
  FILE *f = open_memstream(out, &n);
  if (!f) return RFR_NO_MEMORY;
  json j = {.f = f};
  fputs("refrain: 1\nmodel: ", f);
  json_text(&j, NULL, model);
  if (!find_set(c, "adapter.from=")) fputs("\nadapter: {type: lora}", f); /* else the folder's type */
  fputs("\ndata:\n  train: ", f);
  j.comma = false;
  json_begin(&j, NULL, '[');
  for (int i = 1; i < c->n_operands; i++) put_data(&j, c->operands[i]);
  json_end(&j, ']');
  fprintf(f, "\n  validation: %d%%\n  sequence: %lld\n", rows->holds_out ? 5 : 0, (long long)sequence);
  if (rows->preference) fputs("  format: preference\n", f);
  fprintf(f, "batch: {tokens: %lld, microbatch: %d}\n", (long long)(4 * sequence), on_gpu ? 4 : 1);
  fprintf(f, "optimizer: {lr: %s, clip: 1.0}\nschedule: {name: cosine, warmup: 3%%}\nrun: {epochs: %d}\n",
          rows->preference ? "2e-5" : "2e-4", rows->preference ? 1 : 3);
  return fclose(f) == 0 ? RFR_OK : RFR_NO_MEMORY;
}

/* Opens the data of a configuration for its numbers; no model is loaded. */
static rfr_status read_info(cli *c, const char *text, bool data, rfr_run_info *out) {
  rfr_run *run = NULL;
  rfr_run_options o = cli_run_options(c);
  o.programs = 0;
  o.no_data = !data;
  const rfr_status s = rfr_run_open(c->ctx, text, NULL, &o, &run);
  if (s == RFR_OK) rfr_run_get_info(run, out);
  rfr_run_close(run);
  return s;
}

/* Numbers of the configuration for windows of `sequence` tokens. `data`: and of its rows. */
static rfr_status look_at(cli *c, const char *model, int64_t sequence, bool data, const rows *rows, rfr_run_info *out) {
  char *text = NULL;
  rfr_status s = write_config(c, model, sequence, rows, &text);
  if (s == RFR_OK) s = read_info(c, text, data, out);
  free(text);
  return s;
}

/* The same with data. Finds out whether the rows are pairs of answers, and too few to hold some out. */
static rfr_status look(cli *c, const char *model, int64_t sequence, rows *rows, rfr_run_info *out) {
  rfr_status s = look_at(c, model, sequence, true, rows, out);
  if (s != RFR_OK && !rows->preference && strcmp(rfr_last_error()->slug, "data.preference") == 0) {
    char pair[1024];
    snprintf(pair, sizeof pair, "%s", rfr_last_error()->message);
    rows->preference = true;
    s = look_at(c, model, sequence, true, rows, out);
    if (s != RFR_OK && strcmp(rfr_last_error()->slug, "data.row") == 0)
      s = cli_fail(RFR_INVALID, "give pairs of answers alone, or rows without pairs", "%s; %s", pair,
                   rfr_last_error()->message);
  }
  if (s == RFR_OK || !rows->holds_out || find_set(c, "data.validation=")) return s;
  if (strcmp(rfr_last_error()->slug, "data.held_out") != 0) return s;
  rows->holds_out = false;
  cli_warn(c, "the rows are too few or too equal to hold some out: data.validation is 0%, and nothing is evaluated");
  return look_at(c, model, sequence, true, rows, out);
}

/* The shortest window that cuts at most 1 % of the rows, up to the model's longest sequence and 2048 tokens. The rows
 * are tokenized once; later calls read the cache. */
static rfr_status choose_sequence(cli *c, const char *model, rows *rows, int64_t *out) {
  enum { SHORTEST = 32 /* a multiple that every recipe accepts */, LEAST = 256, MOST = 2048, SHARE = 100 };
  const char *given = find_set(c, "data.sequence=");
  rfr_run_info info = {0};
  const char *format = find_set(c, "data.format=");
  rows->preference = format && strcmp(format, "preference") == 0;
  *out = given ? strtoll(given, NULL, 10) : 0;
  if (*out > 0) return look(c, model, *out, rows, &info);
  rfr_status s = look_at(c, model, SHORTEST, false, rows, &info);
  const int64_t most = info.max_positions < MOST ? info.max_positions : MOST;
  for (*out = LEAST; s == RFR_OK && *out < most; *out *= 2) {
    s = look(c, model, *out, rows, &info);
    if (s == RFR_OK && (info.truncated_rows + info.dropped_rows) * SHARE <= info.train_rows + info.dropped_rows) break;
  }
  if (*out > most) *out = most;
  return s;
}

rfr_status cli_finetune_config(cli *c, char **out) {
  char model[PATH_MAX];
  int64_t sequence;
  rows rows = {.holds_out = true};
  *out = NULL;
  if (!realpath(c->operand, model)) return cli_fail(RFR_IO, "check the path", "%s: %s", c->operand, strerror(errno));
  snprintf(c->config, sizeof c->config, "finetune");
  rfr_status s = choose_sequence(c, model, &rows, &sequence);
  return s == RFR_OK ? write_config(c, model, sequence, &rows, out) : s;
}

/* The commands that take the run. */
static void print_next(const cli *c, const char *folder, bool adapter) {
  static const char *const uses[][3] = {{"chat with it", "chat", ""},
                                        {"evaluate it", "eval", ""},
                                        {"export the adapter for PEFT", "export", "peft"},
                                        {"merge it into the model", "export", "hf"},
                                        {"merge it into one file", "export", "gguf"}};
  char out[4300];
  const char *device = c->device ? c->device : "";
  puts("next:");
  for (size_t i = 0; i < sizeof uses / sizeof uses[0]; i++) {
    const char *to = uses[i][2];
    if (strcmp(to, "peft") == 0 && !adapter) continue;
    if (strcmp(uses[i][1], "eval") == 0 && !c->evaluated) continue; /* nothing is held out */
    printf("  refrain %s ", uses[i][1]);
    cli_put_word(stdout, folder);
    snprintf(out, sizeof out, strcmp(to, "gguf") == 0 ? "%s.gguf" : "%s-%s", folder, to);
    if (*to) printf(" --to %s --out ", to), cli_put_word(stdout, out);
    else if (*device) printf(" --device "), cli_put_word(stdout, device);
    printf("  # %s\n", !adapter && *to ? "export it" : uses[i][0]);
  }
}

rfr_status cli_finetune(cli *c) {
  char *text = NULL, folder[4200];
  if (c->out) snprintf(folder, sizeof folder, "%s", c->out);
  else cli_default_folder(c->operands[1], folder, sizeof folder);
  rfr_status s = cli_finetune_config(c, &text);
  if (s == RFR_OK) s = cli_train_config(c, text, folder);
  const char *type = find_set(c, "adapter.type=");
  if (s == RFR_OK && !c->quiet && !c->json) print_next(c, folder, !type || strcmp(type, "none") != 0);
  free(text);
  return s;
}
