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

/* Windows of `sequence` tokens; `preference`: the rows are pairs of answers. */
static rfr_status write_config(const cli *c, const char *model, int64_t sequence, bool preference, char **out) {
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
  fprintf(f, "\n  validation: 5%%\n  sequence: %lld\n", (long long)sequence);
  if (preference) fputs("  format: preference\n", f);
  fprintf(f, "batch: {tokens: %lld, microbatch: %d}\n", (long long)(4 * sequence), on_gpu ? 4 : 1);
  fprintf(f, "optimizer: {lr: %s, clip: 1.0}\nschedule: {name: cosine, warmup: 3%%}\nrun: {epochs: %d}\n",
          preference ? "2e-5" : "2e-4", preference ? 1 : 3);
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
static rfr_status look(cli *c, const char *model, int64_t sequence, bool preference, bool data, rfr_run_info *out) {
  char *text = NULL;
  rfr_status s = write_config(c, model, sequence, preference, &text);
  if (s == RFR_OK) s = read_info(c, text, data, out);
  free(text);
  return s;
}

/* As look with data, and finds out whether the rows are pairs of answers. */
static rfr_status look_at_rows(cli *c, const char *model, int64_t sequence, bool *preference, rfr_run_info *out) {
  const rfr_status s = look(c, model, sequence, *preference, true, out);
  if (s == RFR_OK || *preference || strcmp(rfr_last_error()->slug, "data.preference") != 0) return s;
  *preference = true;
  return look(c, model, sequence, true, true, out);
}

/* The shortest window that cuts at most 1 % of the rows, up to the model's longest sequence and 2048 tokens. The rows
 * are tokenized once; later calls read the cache. */
static rfr_status choose_sequence(cli *c, const char *model, int64_t *out, bool *preference) {
  enum { SHORTEST = 4, LEAST = 256, MOST = 2048, SHARE = 100 };
  const char *given = find_set(c, "data.sequence=");
  rfr_run_info info = {0};
  const char *format = find_set(c, "data.format=");
  *preference = format && strcmp(format, "preference") == 0;
  *out = given ? strtoll(given, NULL, 10) : 0;
  if (*out > 0) return format ? RFR_OK : look_at_rows(c, model, *out, preference, &info);
  rfr_status s = look(c, model, SHORTEST, *preference, false, &info);
  const int64_t most = info.max_positions < MOST ? info.max_positions : MOST;
  for (*out = LEAST; s == RFR_OK && *out < most; *out *= 2) {
    s = look_at_rows(c, model, *out, preference, &info);
    if (s == RFR_OK && (info.truncated_rows + info.dropped_rows) * SHARE <= info.train_rows + info.dropped_rows) break;
  }
  if (*out > most) *out = most;
  return s;
}

rfr_status cli_finetune_config(cli *c, char **out) {
  char model[PATH_MAX];
  int64_t sequence;
  bool preference;
  *out = NULL;
  if (!realpath(c->operand, model)) return cli_fail(RFR_IO, "check the path", "%s: %s", c->operand, strerror(errno));
  snprintf(c->config, sizeof c->config, "finetune");
  rfr_status s = choose_sequence(c, model, &sequence, &preference);
  return s == RFR_OK ? write_config(c, model, sequence, preference, out) : s;
}

rfr_status cli_finetune(cli *c) {
  char *text = NULL, folder[4200];
  if (c->out) snprintf(folder, sizeof folder, "%s", c->out);
  else cli_default_folder(c->operands[1], folder, sizeof folder);
  rfr_status s = cli_finetune_config(c, &text);
  if (s == RFR_OK) s = cli_train_config(c, text, folder);
  if (s == RFR_OK && !c->quiet && !c->json) printf("to chat with it: refrain chat %s\n", folder);
  free(text);
  return s;
}
