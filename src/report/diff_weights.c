/* SPDX-License-Identifier: Apache-2.0
 *
 * Differences of the weights in the newest checkpoints of two runs. Tensors are read in pieces as f64, which has the
 * values of all float types; other types are compared as bytes. Tensors of equal bytes and type are equal.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "data/checkpoint.h"
#include "data/safetensors.h"
#include "report/diff.h"

typedef struct tensors { /* folder of a checkpoint */
  int64_t step;          /* -1: no checkpoint */
  rfi_safetensors *files[2];
} tensors;

typedef struct difference {
  const rfi_stored *stored[2];
  /* NaN: a value is not a number in one of them, or they have another shape or integer type */
  double max_abs, relative;
  bool equal;
} difference;

/* ---- files ---- */

/* Opens KIND.safetensors of a checkpoint, or those of its ranks; NULL: none. */
static rfr_status open_kind(rfr_ctx *ctx, const rfi_checkpoint *c, const char *kind, rfi_safetensors **out) {
  char name[64], *path;
  bool one = false;
  rfi_snprintf(name, sizeof name, "%s.safetensors", kind);
  for (int i = 0; i < c->files.n; i++) one |= strcmp(c->files.items[i], name) == 0;
  if (!one) return rfi_safetensors_open_parts(ctx, c->folder, kind, out);
  RFI_TRY(rfi_checkpoint_path(c, name, &path));
  const rfr_status s = rfi_safetensors_open(ctx, path, out);
  rfi_free(ctx, path);
  return s;
}

static rfr_status open_tensors(rfr_ctx *ctx, const char *folder, tensors *out) {
  rfi_checkpoint *c;
  *out = (tensors){.step = -1};
  RFI_TRY(rfi_checkpoint_latest(ctx, NULL, folder, &c, NULL));
  if (!c) return RFR_OK;
  out->step = c->step;
  rfr_status s = open_kind(ctx, c, "model", &out->files[0]);
  if (s == RFR_OK) s = open_kind(ctx, c, "adapter_model", &out->files[1]);
  if (s == RFR_OK && !out->files[0] && !out->files[1])
    s = rfi_fail_at(RFI_E_CHECKPOINT, c->folder, 0, "the checkpoint has no weights");
  rfi_checkpoint_close(c);
  return s;
}

static const rfi_stored *find(const tensors *t, const char *name, rfi_safetensors **file) {
  for (int i = 0; i < 2; i++) {
    const rfi_stored *stored = t->files[i] ? rfi_safetensors_find(t->files[i], name) : NULL;
    if (!stored) continue;
    *file = t->files[i];
    return stored;
  }
  return NULL;
}

/* ---- two tensors ---- */

enum { PIECE = 1 << 16 }; /* elements */

static bool same_shape(const rfi_stored *a, const rfi_stored *b) {
  return a->rank == b->rank && memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) == 0;
}

static bool reads_as_numbers(const rfi_stored *t) {
  return t->dtype != RFR_DTYPE_COUNT && rfr_dtype_is_float(t->dtype) && rfr_dtype_bits(t->dtype) % 8 == 0;
}

static rfr_status compare_numbers(rfr_ctx *ctx, rfi_safetensors *const files[2], difference *d) {
  double *x, sum = 0, norm = 0, most = 0;
  const int64_t n = d->stored[0]->elements;
  RFI_TRY(RFI_ALLOC(ctx, 2 * PIECE * sizeof *x, &x));
  rfr_status s = RFR_OK;
  d->equal = d->stored[0]->dtype == d->stored[1]->dtype;
  for (int64_t at = 0, some; at < n && s == RFR_OK; at += some) {
    some = n - at < PIECE ? n - at : PIECE;
    for (int i = 0; i < 2 && s == RFR_OK; i++)
      s = rfi_safetensors_read_range(files[i], d->stored[i], RFR_F64, x + i * PIECE, at, some);
    if (s != RFR_OK || memcmp(x, x + PIECE, (size_t)some * sizeof *x) == 0) {
      for (int64_t k = 0; k < some; k++) norm += x[k] * x[k];
      continue;
    }
    d->equal = false;
    for (int64_t k = 0; k < some; k++) {
      norm += x[k] * x[k];
      if (memcmp(&x[k], &x[PIECE + k], sizeof *x) == 0) continue; /* also equal NaNs */
      const double e = x[k] - x[PIECE + k];
      sum += e * e;
      if (!(fabs(e) <= most)) most = isnan(most) ? most : fabs(e); /* NaN stays */
    }
  }
  d->max_abs = most;
  d->relative = sum == 0 ? 0 : sqrt(sum / norm);
  rfi_free(ctx, x);
  return s;
}

static rfr_status compare_bytes(rfr_ctx *ctx, rfi_safetensors *const files[2], difference *d) {
  const size_t n = (size_t)d->stored[0]->bytes;
  char *x;
  d->max_abs = d->relative = NAN;
  if (strcmp(d->stored[0]->dtype_name, d->stored[1]->dtype_name) != 0 || d->stored[1]->bytes != d->stored[0]->bytes)
    return RFR_OK;
  RFI_TRY(RFI_ALLOC(ctx, 2 * n, &x));
  rfr_status s = RFR_OK;
  for (int i = 0; i < 2 && s == RFR_OK; i++) s = rfi_safetensors_read(files[i], d->stored[i], x + (size_t)i * n, n);
  d->equal = s == RFR_OK && memcmp(x, x + n, n) == 0;
  rfi_free(ctx, x);
  return s;
}

static rfr_status compare(rfr_ctx *ctx, rfi_safetensors *const files[2], difference *d) {
  d->max_abs = d->relative = NAN;
  if (!same_shape(d->stored[0], d->stored[1])) return RFR_OK;
  const bool numbers = reads_as_numbers(d->stored[0]) && reads_as_numbers(d->stored[1]);
  return (numbers ? compare_numbers : compare_bytes)(ctx, files, d);
}

/* ---- all tensors ---- */

/* Sorts tensors without a number first, then by descending relative difference, then by name. */
static int by_size(const void *x, const void *y) {
  const difference *a = x, *b = y;
  if (isnan(a->relative) != isnan(b->relative)) return isnan(a->relative) ? -1 : 1;
  if (a->relative > b->relative || a->relative < b->relative) return a->relative > b->relative ? -1 : 1;
  return strcmp(a->stored[0]->name, b->stored[0]->name);
}

static json_t *shape_of(const rfi_stored *t) {
  json_t *shape = json_array();
  for (int i = 0; i < t->rank; i++)
    if (json_array_append_new(shape, json_integer(t->shape[i])) != 0) {
      json_decref(shape);
      return NULL;
    }
  return shape;
}

static rfr_status put_difference(const difference *d, json_t *list) {
  json_t *o = json_object();
  const rfi_stored *a = d->stored[0], *b = d->stored[1];
  rfr_status s = rfi_json_set(o, "name", json_string(a->name));
  if (s == RFR_OK) s = rfi_diff_set_pair(o, "dtypes", json_string(a->dtype_name), json_string(b->dtype_name));
  if (s == RFR_OK) s = rfi_diff_set_pair(o, "shapes", shape_of(a), shape_of(b));
  if (s == RFR_OK) s = rfi_json_set(o, "max_abs", rfi_diff_real(d->max_abs));
  if (s == RFR_OK) s = rfi_json_set(o, "relative", rfi_diff_real(d->relative));
  if (s == RFR_OK && json_array_append(list, o) != 0)
    s = rfi_fail(RFI_E_NO_MEMORY, "out of memory while comparing two runs");
  json_decref(o);
  return s;
}

/* Names of `a` that `b` lacks. */
static rfr_status put_missing(const tensors *a, const tensors *b, const char *key, json_t *out) {
  json_t *list = json_array();
  rfi_safetensors *file;
  RFI_TRY(rfi_json_set(out, key, list));
  for (int f = 0; f < 2; f++)
    for (int i = 0; a->files[f] && i < rfi_safetensors_count(a->files[f]); i++) {
      const char *name = rfi_safetensors_at(a->files[f], i)->name;
      if (!find(b, name, &file) && json_array_append_new(list, json_string(name)) != 0)
        return rfi_fail(RFI_E_NO_MEMORY, "out of memory while comparing two runs");
    }
  return RFR_OK;
}

static int64_t count(const tensors *t) {
  int64_t n = 0;
  for (int f = 0; f < 2; f++) n += t->files[f] ? rfi_safetensors_count(t->files[f]) : 0;
  return n;
}

static rfr_status compare_all(rfr_ctx *ctx, const tensors t[2], difference *all, json_t *out, bool *different) {
  int64_t n = 0, equal = 0;
  json_t *list = json_array();
  RFI_TRY(rfi_json_set(out, "different", list));
  for (int f = 0; f < 2; f++)
    for (int i = 0; t[0].files[f] && i < rfi_safetensors_count(t[0].files[f]); i++) {
      difference d = {.stored = {rfi_safetensors_at(t[0].files[f], i)}};
      rfi_safetensors *files[2] = {t[0].files[f], NULL};
      d.stored[1] = find(&t[1], d.stored[0]->name, &files[1]);
      if (!d.stored[1]) continue;
      RFI_TRY(compare(ctx, files, &d));
      if (d.equal) equal++;
      else all[n++] = d;
    }
  qsort(all, (size_t)n, sizeof *all, by_size);
  for (int64_t i = 0; i < n; i++) RFI_TRY(put_difference(&all[i], list));
  *different |= n > 0;
  return rfi_json_set(out, "equal", json_integer(equal));
}

static rfr_status diff_tensors(rfr_ctx *ctx, const tensors t[2], json_t *out, bool *different) {
  difference *all;
  const int64_t n[2] = {count(&t[0]), count(&t[1])};
  RFI_TRY(rfi_diff_set_pair(out, "steps", t[0].step < 0 ? NULL : json_integer(t[0].step),
                            t[1].step < 0 ? NULL : json_integer(t[1].step)));
  RFI_TRY(rfi_diff_set_pair(out, "tensors", json_integer(n[0]), json_integer(n[1])));
  RFI_TRY(RFI_ALLOC(ctx, (size_t)n[0] * sizeof *all, &all));
  rfr_status s = compare_all(ctx, t, all, out, different);
  rfi_free(ctx, all);
  RFI_TRY(s);
  RFI_TRY(put_missing(&t[0], &t[1], "missing", out));
  RFI_TRY(put_missing(&t[1], &t[0], "extra", out));
  *different |= t[0].step != t[1].step || json_array_size(json_object_get(out, "missing")) > 0 ||
                json_array_size(json_object_get(out, "extra")) > 0;
  return RFR_OK;
}

rfr_status rfi_diff_weights(rfr_ctx *ctx, const char *const folders[2], json_t *out, bool *different) {
  tensors t[2] = {{.step = -1}, {.step = -1}};
  rfr_status s = open_tensors(ctx, folders[0], &t[0]);
  if (s == RFR_OK) s = open_tensors(ctx, folders[1], &t[1]);
  const bool any = t[0].step >= 0 || t[1].step >= 0;
  json_t *weights = any ? json_object() : json_null();
  if (s == RFR_OK) s = rfi_json_set(out, "weights", json_incref(weights));
  if (s == RFR_OK && any) s = diff_tensors(ctx, t, weights, different);
  json_decref(weights);
  for (int i = 0; i < 4; i++) rfi_safetensors_close(t[i / 2].files[i % 2]);
  return s;
}
