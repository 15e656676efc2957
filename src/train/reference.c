/* SPDX-License-Identifier: Apache-2.0
 *
 * The reference of training on preferences: how much the model of step 0 prefers the chosen answer of each pair.
 *
 * A new adapter changes nothing, so with one the reference is the base model. The weights of step 0 can be loaded at
 * any time, so the numbers are a cache: a file in the folder of the cached tokens, named by a hash of the model, the
 * rows, the precision, the machine and the batch. A resumed run reads it, or computes the same numbers before it loads
 * its checkpoint. No second model is in memory. If a rank has no cache, all ranks compute the numbers together.
 */
#include "train/reference.h"

#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "data/file.h"
#include "dist/comm.h"
#include "dist/watch.h"
#include "model/hf.h"
#include "model/peft.h"
#include "nn/adapter.h"
#include "text/row_dataset.h"
#include "train/evaluate.h"
#include "train/events.h"
#include "train/host.h"
#include "train/parts.h"

#define SPLITS 2

/* ---- the key ---- */

static void hash_text(rfi_hasher *h, const char *text) { rfi_hasher_add(h, text, strlen(text) + 1); }

/* Initial values of an adapter are not part of the key, because they do not change the model. */
static bool is_in_key(const rfr_run *run, const rfr_tensor *x) {
  if (rfi_is_average(x)) return false; /* an average begins as its weight */
  if (x->role != RFR_ROLE_TRAINABLE && x->role != RFR_ROLE_FROZEN) return false;
  return !run->settings->adapter || run->settings->adapter_from || !rfi_adapter_has_name(x->name);
}

static rfr_status hash_weights(rfr_run *run, rfi_hasher *h) {
  rfr_tensor x;
  for (int i = 0; rfi_run_tensor_at(run, i, &x) == RFR_OK; i++) {
    void *host;
    if (!is_in_key(run, &x)) continue;
    RFI_TRY(rfi_host_open(run, &x, RFI_HOST_READ, &host));
    hash_text(h, x.name);
    rfi_hasher_add_u64(h, (uint64_t)x.type.dtype);
    rfi_hasher_add(h, host, (size_t)x.bytes);
    RFI_TRY(rfi_host_close(run, &x, RFI_HOST_READ, host, RFR_OK));
  }
  return RFR_OK;
}

static rfr_status hash_json(rfr_run *run, rfi_hasher *h, json_t *o) {
  rfi_string text = {.ctx = run->ctx};
  rfr_status s = o ? rfi_json_print_compact(o, &text) : rfi_fail(RFI_E_NO_MEMORY, "describing the model");
  if (s == RFR_OK) rfi_hasher_add(h, text.data, text.n + 1);
  json_decref(o);
  rfi_string_deinit(&text);
  return s;
}

/* Hashes what determines the function of the weights: equal weights with other heads, norms, windows or adapter scales
 * are another model. A new adapter equals the base model exactly, except DoRA, which has rounding errors that depend on
 * its targets. */
static rfr_status hash_model(rfr_run *run, rfi_hasher *h) {
  const rfr_model_config *m = &run->settings->spec.model;
  rfi_hasher_add_u64(h, m->router_narrow);
  RFI_TRY(hash_json(run, h, rfi_hf_config(m)));
  const bool adapts = run->settings->adapter_from || (m->adapter && m->adapter->dora);
  return adapts ? hash_json(run, h, rfi_peft_config(m, "")) : RFR_OK;
}

/* Hashes what determines the rounding of an evaluation: the machine and the batch. The hash of the data includes the
 * packing. */
static void hash_machine(const rfr_run *run, rfi_hasher *h) {
  const rfi_settings *s = run->settings;
  hash_text(h, rfi_ctx_backend(run->ctx));
  hash_text(h, rfi_ctx_isa(run->ctx));
  hash_text(h, run->machine.matmul);
  rfi_hasher_add_u64(h, (uint64_t)rfi_ctx_threads(run->ctx));
  rfi_hasher_add_u64(h, (uint64_t)s->sequence);
  rfi_hasher_add_u64(h, (uint64_t)s->eval_rows);
}

static rfr_status find_key(rfr_run *run, rfi_hash *key) {
  enum { VERSION = 3 };
  const rfi_hash data = rfi_dataset_get_stats(run->data)->hash;
  rfi_hasher *h;
  RFI_TRY(rfi_hasher_create(run->ctx, &h));
  rfi_hasher_add(h, "reference", 9);
  rfi_hasher_add_u64(h, VERSION);
  rfi_hasher_add_u64(h, data.high);
  rfi_hasher_add_u64(h, data.low);
  hash_machine(run, h);
  rfr_status s = hash_model(run, h);
  if (s == RFR_OK) s = hash_weights(run, h);
  *key = rfi_hasher_result(h);
  rfi_hasher_destroy(h);
  return s;
}

/* ---- the cache ---- */

/* The cache file of a key, next to the first data file or in the folder data.cache; NULL: no cache. Free with
 * rfi_free. */
static rfr_status cache_path(const rfr_run *run, rfi_hash key, char **folder, char **path) {
  const rfi_config *c = run->settings->config;
  char name[64], digits[33], *file = NULL;
  *folder = *path = NULL;
  if (strcmp(c->data_cache, "none") == 0) return RFR_OK;
  const rfi_dataset_stats *stats = rfi_dataset_get_stats(run->data);
  const rfi_split split = stats->files[RFI_TRAIN] > 0 ? RFI_TRAIN : RFI_VALIDATION;
  rfi_snprintf(name, sizeof name, "%s.reference", rfi_hash_format(digits, key));
  rfr_status s = RFR_OK;
  if (strcmp(c->data_cache, "auto") == 0) {
    RFI_TRY(rfi_path_join(run->ctx, c->data_root, rfi_dataset_file(run->data, split, 0, NULL), &file));
    char *slash = strrchr(file, '/');
    if (slash) slash[1] = 0;
    s = rfi_path_join(run->ctx, slash ? file : "", ".refrain", folder);
    rfi_free(run->ctx, file);
  } else {
    s = rfi_path_join(run->ctx, "", c->data_cache, folder);
  }
  return s == RFR_OK ? rfi_path_join(run->ctx, *folder, name, path) : s;
}

static int64_t pairs_of(const rfr_run *run, int split) { return rfi_dataset_get_stats(run->data)->documents[split]; }

/* The values of both splits, then their hash. */
typedef struct stored {
  float *x;
  int64_t n;
  size_t bytes;
} stored;

static rfr_status read_cache(rfr_run *run, const char *path, const stored *all, bool *found) {
  char *data = NULL, kind;
  size_t n;
  rfi_hash hash;
  *found = false;
  rfr_status s = rfi_path_kind(path, &kind);
  if (s == RFR_OK && kind == 'f') s = rfi_file_read(run->ctx, path, &data, &n);
  if (s == RFR_NO_MEMORY || !data) return s == RFR_NO_MEMORY ? s : RFR_OK;
  if (n == all->bytes + sizeof hash) {
    memcpy(&hash, data + all->bytes, sizeof hash);
    *found = rfi_hash_equal(hash, rfi_hash_bytes(data, all->bytes));
  }
  if (*found) memcpy(all->x, data, all->bytes);
  rfi_free(run->ctx, data);
  return RFR_OK;
}

/* A cache that cannot be written is a warning: a resume computes the numbers again. */
static rfr_status write_cache(rfr_run *run, const char *folder, const char *path, const stored *all) {
  char *data;
  const rfi_hash hash = rfi_hash_bytes(all->x, all->bytes);
  RFI_TRY(RFI_ALLOC(run->ctx, all->bytes + sizeof hash, &data));
  memcpy(data, all->x, all->bytes);
  memcpy(data + all->bytes, &hash, sizeof hash);
  rfr_status s = rfi_dir_create(folder);
  if (s == RFR_OK && strcmp(run->settings->config->data_cache, "auto") == 0) s = rfi_token_cache_hide(run->ctx, folder);
  if (s == RFR_OK) s = rfi_file_write(run->ctx, path, data, all->bytes + sizeof hash);
  rfi_free(run->ctx, data);
  if (s == RFR_OK || s == RFR_NO_MEMORY) return s;
  rfi_run_warn(run, "the reference of the pairs is not cached: %.400s", rfr_last_error()->message);
  return RFR_OK;
}

/* ---- the values ---- */

/* Whether any rank has `mine` set. Ranks run the evaluation programs together, so either all compute or none, and all
 * stop together. */
static rfr_status any_rank(rfr_run *run, bool mine, bool *any) {
  const int ranks = run->settings->parallel.ranks;
  const int64_t own = mine;
  int64_t *all;
  *any = mine;
  if (ranks == 1) return RFR_OK;
  RFI_TRY(rfi_comm_collect(run->ctx, run->options.comm, &own, sizeof own, (void **)&all));
  for (int r = 0; r < ranks; r++) *any = *any || all[r] != 0;
  rfi_free(run->ctx, all);
  return RFR_OK;
}

static rfr_status compute_split(rfr_run *run, rfi_split split, int32_t *pairs, float *losses) {
  const rfi_settings *settings = run->settings;
  int64_t windows, predicted = 0;
  RFI_TRY(rfi_row_dataset_windows_once(run->data, split, &windows));
  for (int64_t w = 0; w < windows; w += settings->eval_rows) {
    bool stops;
    RFI_TRY(any_rank(run, rfi_stop_requested_here(run), &stops));
    if (stops) return rfi_fail(RFI_E_STOPPED, "stopped before the first step");
    RFI_TRY(rfi_evaluate_pairs(run, split, w, pairs, losses, &predicted));
    for (int64_t p = 0; p < rfi_most_pairs(settings->spec.eval_tokens); p++)
      if (pairs[p] >= 0) run->reference[split][pairs[p]] = losses[2 * p + 1] - losses[2 * p];
  }
  return RFR_OK;
}

static rfr_status compute(rfr_run *run) {
  const size_t most = (size_t)rfi_most_pairs(run->settings->spec.eval_tokens);
  const double start = rfi_now();
  char message[128];
  int32_t *pairs = NULL;
  float *losses = NULL;
  rfr_status s;
  RFI_GOTO(RFI_ALLOC(run->ctx, most * sizeof *pairs, &pairs));
  RFI_GOTO(RFI_ALLOC(run->ctx, 2 * most * sizeof *losses, &losses));
  for (int split = 0; split < SPLITS; split++) RFI_GOTO(compute_split(run, (rfi_split)split, pairs, losses));
  rfi_snprintf(message, sizeof message, "computed the reference of %lld pairs",
               (long long)(pairs_of(run, RFI_TRAIN) + pairs_of(run, RFI_VALIDATION)));
  rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_COMPILE, .message = message, .seconds = rfi_now() - start});
fail:
  rfi_free(run->ctx, pairs);
  rfi_free(run->ctx, losses);
  return s;
}

/* No program with collectives runs while ranks are watched (dist/watch.h). */
static rfr_status compute_together(rfr_run *run) {
  rfr_comm *comm = run->options.comm;
  const bool watched = comm && comm->watch;
  RFI_TRY(rfi_comm_unwatch(comm));
  RFI_TRY(compute(run));
  return watched ? rfi_comm_watch(run->ctx, comm) : RFR_OK;
}

rfr_status rfi_reference_prepare(rfr_run *run) {
  char *folder = NULL, *path = NULL;
  bool found = false, computes;
  rfi_hash key;
  rfr_status s;
  if (!run->settings->spec.preference || !run->data || run->reference[RFI_TRAIN]) return RFR_OK;
  stored all = {.n = pairs_of(run, RFI_TRAIN) + pairs_of(run, RFI_VALIDATION)};
  all.bytes = (size_t)all.n * sizeof *all.x;
  RFI_TRY(RFI_ALLOC(run->ctx, all.bytes + 1, &all.x));
  run->reference[RFI_TRAIN] = all.x;
  run->reference[RFI_VALIDATION] = all.x + pairs_of(run, RFI_TRAIN);
  RFI_TRY(find_key(run, &key));
  RFI_GOTO(cache_path(run, key, &folder, &path));
  if (path) RFI_GOTO(read_cache(run, path, &all, &found));
  RFI_GOTO(any_rank(run, !found, &computes));
  if (computes) RFI_GOTO(compute_together(run));
  if (!found && path) RFI_GOTO(write_cache(run, folder, path, &all));
fail:
  rfi_free(run->ctx, folder);
  rfi_free(run->ctx, path);
  return s;
}
