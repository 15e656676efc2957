/* SPDX-License-Identifier: Apache-2.0
 *
 * Configurations for a published model: the one that fine-tunes it on rows, and the one that only opens it. Each is
 * text, so that a run with it is an ordinary run: its folder has the text, and overrides change it.
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "data/file.h"
#include "data/gguf.h"
#include "refrain/train.h"

/* The value of the override KEY=VALUE; NULL: there is none. `key` ends with "=". */
static const char *find_override(const rfr_run_options *o, const char *key) {
  const size_t n = strlen(key);
  const char *value = NULL;
  for (int i = 0; i < o->n_overrides; i++)
    if (strncmp(o->overrides[i], key, n) == 0) value = o->overrides[i] + n;
  return value;
}

/* Appends a string in double quotes, which YAML reads as JSON does. */
static rfr_status put_quoted(rfi_string *s, const char *text) {
  json_t *value = json_string(text);
  char *quoted = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;
  json_decref(value);
  if (!quoted) return rfi_fail(RFI_E_ARGUMENT, "the path \"%.200s\" is not valid UTF-8", text);
  const rfr_status status = rfi_string_append(s, quoted, strlen(quoted));
  free(quoted);
  return status;
}

static rfr_status find_model(const char *model, char *path) {
  return realpath(model, path) ? RFR_OK : rfi_fail(RFI_E_FILE_OPEN, "%s: %s", model, strerror(errno));
}

/* ---- fine-tuning ---- */

typedef struct draft {
  rfr_ctx *ctx;
  const rfr_run_options *options;
  char model[PATH_MAX];
  const char *const *data;
  int n_data;
  /* whether the rows are pairs of answers; whether there are enough rows to hold some out */
  bool preference, holds_out;
} draft;

/* The absolute path of an existing file, with pattern characters escaped; otherwise the operand itself, as a
 * pattern. */
static rfr_status put_data(rfi_string *s, const char *operand) {
  char path[PATH_MAX], escaped[2 * PATH_MAX];
  size_t n = 0;
  if (!realpath(operand, path)) return put_quoted(s, operand);
  for (const char *c = path; *c; c++) {
    if (strchr("*?[\\", *c)) escaped[n++] = '\\';
    escaped[n++] = *c;
  }
  escaped[n] = '\0';
  return put_quoted(s, escaped);
}

static rfr_status write_draft(const draft *d, int64_t sequence, rfi_string *s) {
  rfr_machine m;
  const bool on_gpu = rfr_machine_describe(d->ctx, &m) == RFR_OK && strncmp(m.device, "cuda", 4) == 0;
  RFI_TRY(rfi_string_printf(s, "refrain: 1\nmodel: "));
  RFI_TRY(put_quoted(s, d->model));
  if (!find_override(d->options, "adapter.from=")) /* otherwise the dtype of the folder */
    RFI_TRY(rfi_string_printf(s, "\nadapter: {type: lora}"));
  RFI_TRY(rfi_string_printf(s, "\ndata:\n  train: ["));
  for (int i = 0; i < d->n_data; i++) {
    if (i > 0) RFI_TRY(rfi_string_printf(s, ", "));
    RFI_TRY(put_data(s, d->data[i]));
  }
  RFI_TRY(rfi_string_printf(s, "]\n  validation: %d%%\n  sequence: %lld\n", d->holds_out ? 5 : 0, (long long)sequence));
  if (d->preference) RFI_TRY(rfi_string_printf(s, "  format: preference\n"));
  RFI_TRY(rfi_string_printf(s, "batch: {tokens: %lld, microbatch: %d}\n", (long long)(4 * sequence), on_gpu ? 4 : 1));
  return rfi_string_printf(s,
                           "optimizer: {lr: %s, clip: 1.0}\nschedule: {name: cosine, warmup: 3%%}\nrun: {epochs: %d}\n",
                           d->preference ? "2e-5" : "2e-4", d->preference ? 1 : 3);
}

/* Opens a configuration without its model, to get the numbers of rfr_run_info. */
static rfr_status read_info(rfr_ctx *ctx, const char *text, const rfr_run_options *options, bool data,
                            rfr_run_info *out) {
  rfr_run *run = NULL;
  rfr_run_options o = *options;
  o.programs = 0;
  o.no_data = !data;
  o.on_event = NULL;
  const rfr_status s = rfr_run_open(ctx, text, NULL, &o, &run);
  if (s == RFR_OK) rfr_run_get_info(run, out);
  rfr_run_close(run);
  return s;
}

/* The numbers of the draft with windows of `sequence` tokens. `data`: including those of its rows. */
static rfr_status look_at(const draft *d, int64_t sequence, bool data, rfr_run_info *out) {
  rfi_string text = {.ctx = d->ctx};
  rfr_status s = write_draft(d, sequence, &text);
  if (s == RFR_OK) s = read_info(d->ctx, text.data, d->options, data, out);
  rfi_string_deinit(&text);
  return s;
}

static void warn(const draft *d, const char *line) {
  const rfr_event e = {.size = sizeof e, .kind = RFR_EVENT_WARNING, .message = line};
  if (d->options->on_event) d->options->on_event(&e, d->options->event_user);
}

/* The same with data. Also finds out whether the rows are pairs of answers, and whether there are too few to hold some
 * out. */
static rfr_status look(draft *d, int64_t sequence, rfr_run_info *out) {
  rfr_status s = look_at(d, sequence, true, out);
  if (s != RFR_OK && !d->preference && strcmp(rfr_last_error()->slug, "data.preference") == 0) {
    char pair[1024];
    rfi_snprintf(pair, sizeof pair, "%s", rfr_last_error()->message);
    d->preference = true;
    s = look_at(d, sequence, true, out);
    if (s != RFR_OK && strcmp(rfr_last_error()->slug, "data.row") == 0) {
      char row[1024];
      rfi_snprintf(row, sizeof row, "%s", rfr_last_error()->message);
      s = rfi_fail(RFI_E_DATA_FORMAT, "%s; %s: give only pairs of answers, or rows without pairs", pair, row);
    }
  }
  if (s == RFR_OK || !d->holds_out || find_override(d->options, "data.validation=")) return s;
  if (strcmp(rfr_last_error()->slug, "data.held_out") != 0) return s;
  d->holds_out = false;
  warn(d, "there are too few distinct rows to hold some out: data.validation is 0%, and nothing is evaluated");
  return look_at(d, sequence, true, out);
}

/* The shortest window that cuts at most 1 % of the rows, up to the model's longest sequence and 2048 tokens. The rows
 * are tokenized once; later calls read the cache. */
static rfr_status choose_sequence(draft *d, int64_t *out) {
  enum { SHORTEST = 32 /* a multiple that every recipe accepts */, LEAST = 256, MOST = 2048, SHARE = 100 };
  const char *given = find_override(d->options, "data.sequence=");
  rfr_run_info info = {0};
  const char *format = find_override(d->options, "data.format=");
  d->preference = format && strcmp(format, "preference") == 0;
  *out = given ? strtoll(given, NULL, 10) : 0;
  if (*out > 0) return look(d, *out, &info);
  rfr_status s = look_at(d, SHORTEST, false, &info);
  const int64_t most = info.max_positions < MOST ? info.max_positions : MOST;
  if (s == RFR_OK && most <= LEAST) s = look(d, most, &info); /* the length is given, but the rows decide other keys */
  for (*out = LEAST; s == RFR_OK && *out < most; *out *= 2) {
    s = look(d, *out, &info);
    if (s == RFR_OK && (info.truncated_rows + info.dropped_rows) * SHARE <= info.train_rows + info.dropped_rows) break;
  }
  if (*out > most) *out = most;
  return s;
}

rfr_status rfr_finetune_config(rfr_ctx *ctx, const char *model, const char *const *data, int n_data,
                               const rfr_run_options *options, rfr_write_fn write, void *user) {
  if (!ctx || !model || !data || !write) return rfi_fail(RFI_E_ARGUMENT, "the context, model, data or write is NULL");
  rfr_run_options o = options ? *options : rfr_run_options_default();
  if (!o.config_name) o.config_name = "finetune";
  draft d = {.ctx = ctx, .options = &o, .data = data, .n_data = n_data, .holds_out = true};
  rfi_string text = {.ctx = ctx};
  int64_t sequence;
  rfr_status s = find_model(model, d.model);
  if (s == RFR_OK) s = choose_sequence(&d, &sequence);
  if (s == RFR_OK) s = write_draft(&d, sequence, &text);
  if (s == RFR_OK) write(text.data, text.n, user);
  rfi_string_deinit(&text);
  return s;
}

/* ---- opening a model ---- */

/* Writes a configuration with the keys that the model does not determine. The data file is never used for training; its
 * format only has to match. */
static rfr_status write_reader(rfr_ctx *ctx, const char *path, const char *sequence, rfi_string *s) {
  char train[PATH_MAX + 16];
  bool is_gguf;
  RFI_TRY(rfi_gguf_is(ctx, path, &is_gguf));
  rfi_snprintf(train, sizeof train, is_gguf ? "%s" : "%s/config.json", path);
  RFI_TRY(rfi_string_printf(s, "refrain: 1\nmodel: "));
  RFI_TRY(put_quoted(s, path));
  RFI_TRY(rfi_string_printf(s, "\ndata: {train: ["));
  RFI_TRY(put_quoted(s, train));
  return rfi_string_printf(
      s, "], sequence: %s}\nbatch: {tokens: %s, microbatch: 1}\noptimizer: {lr: 1e-5}\nrun: {steps: 1}\n", sequence,
      sequence);
}

/* The model's maximum sequence length, at most `longest`, as text. */
static rfr_status find_sequence(rfr_ctx *ctx, const char *path, int64_t longest, const char *name, char number[24]) {
  rfi_string text = {.ctx = ctx};
  rfr_run_info info = {0};
  rfr_run_options o = rfr_run_options_default();
  o.plan_only = 1;
  o.config_name = name;
  rfr_status s = write_reader(ctx, path, "1", &text);
  if (s == RFR_OK) s = read_info(ctx, text.data, &o, false, &info);
  if (s == RFR_OK)
    rfi_snprintf(number, 24, "%lld", (long long)(info.max_positions < longest ? info.max_positions : longest));
  rfi_string_deinit(&text);
  return s;
}

rfr_status rfr_model_run_config(rfr_ctx *ctx, const char *model, int64_t longest, const rfr_run_options *options,
                                rfr_write_fn write, void *user) {
  if (!ctx || !model || !write) return rfi_fail(RFI_E_ARGUMENT, "the context, model or write is NULL");
  if (longest < 1) return rfi_fail(RFI_E_ARGUMENT, "longest is %lld, not at least 1", (long long)longest);
  const rfr_run_options o = options ? *options : rfr_run_options_default();
  const char *sequence = find_override(&o, "data.sequence=");
  char path[PATH_MAX], number[24];
  rfi_string text = {.ctx = ctx};
  rfr_status s = find_model(model, path);
  if (s == RFR_OK && !sequence) s = find_sequence(ctx, path, longest, o.config_name ? o.config_name : model, number);
  if (s == RFR_OK) s = write_reader(ctx, path, sequence ? sequence : number, &text);
  if (s == RFR_OK) write(text.data, text.n, user);
  rfi_string_deinit(&text);
  return s;
}
