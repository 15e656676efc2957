/* SPDX-License-Identifier: Apache-2.0
 *
 * There are two cursors: that of the windows, which runs ahead of the steps, and that of the counts. A cursor that has
 * to go back starts again at 0.
 */
#include "data/mixture.h"

#include <math.h>
#include <string.h>

#include "base/base.h"
#include "core/rng.h"

enum { SOURCE_STREAM = 0x6d697800, CREDIT_STREAM = 0x63726564, UNIT_BITS = 40 };

typedef struct part {
  rfi_dataset *data;
  int64_t unit;  /* credit per window; the sum over all sources is 2^UNIT_BITS */
  double epochs; /* INFINITY: no limit */
  int64_t most;  /* the number of windows in `epochs` */
} part;

typedef struct cursor {
  int64_t next;    /* the next window to draw */
  int64_t *credit; /* (n) */
  int64_t *counts; /* (n): windows per source before `next` */
} cursor;

typedef struct mixture {
  rfi_dataset base; /* first */
  rfr_ctx *ctx;
  part *parts;
  int n;
  bool held_out; /* by name, so the first source has all held-out windows */
  bool seeded;
  uint64_t seed; /* the seed for which `most` and the cursors were computed */
  cursor windows, counted;
} mixture;

static uint64_t seed_of(uint64_t seed, int part) { return rfi_stream_key(seed, SOURCE_STREAM + (uint64_t)part); }

static void rewind_cursor(const mixture *m, cursor *c) {
  c->next = 0;
  for (int i = 0; i < m->n; i++) {
    const rfi_u32x4 r = rfi_draw4(rfi_stream_key(m->seed, CREDIT_STREAM), (uint64_t)i, 0, 0, 0);
    c->credit[i] = (int64_t)(((uint64_t)r.v[1] << 32 | r.v[0]) % (uint64_t)m->parts[i].unit);
    c->counts[i] = 0;
  }
}

static rfr_status set_seed(mixture *m, uint64_t seed) {
  if (m->seeded && m->seed == seed) return RFR_OK;
  m->seeded = false;
  for (int i = 0; i < m->n; i++) {
    part *p = &m->parts[i];
    p->most = INT64_MAX;
    if (isfinite(p->epochs)) RFI_TRY(rfi_dataset_windows(p->data, seed_of(seed, i), p->epochs, &p->most));
  }
  m->seed = seed;
  m->seeded = true;
  rewind_cursor(m, &m->windows);
  rewind_cursor(m, &m->counted);
  return RFR_OK;
}

/* Draws window c->next. Returns its source; -1: all sources are used up. */
static int draw_source(const mixture *m, cursor *c) {
  int64_t sum = 0;
  int best = -1;
  for (int i = 0; i < m->n; i++) {
    if (c->counts[i] >= m->parts[i].most) continue;
    c->credit[i] += m->parts[i].unit;
    sum += m->parts[i].unit;
    if (best < 0 || c->credit[i] > c->credit[best]) best = i;
  }
  if (best < 0) return -1;
  c->credit[best] -= sum;
  c->counts[best]++;
  c->next++;
  return best;
}

static rfr_status mixture_window(rfi_dataset *base, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                                 int32_t *targets, int32_t *doc_offsets, int *n_docs) {
  mixture *m = (mixture *)base;
  int s = -1;
  if (split == RFI_VALIDATION) {
    int i = 0;
    while (i < m->n - 1 && !m->held_out && sample >= m->parts[i].data->stats.windows[split])
      sample -= m->parts[i++].data->stats.windows[split];
    return rfi_dataset_window(m->parts[i].data, split, seed, sample, tokens, targets, doc_offsets, n_docs);
  }
  RFI_TRY(set_seed(m, seed));
  cursor *c = &m->windows;
  if (c->next > sample) rewind_cursor(m, c);
  while (c->next <= sample)
    if ((s = draw_source(m, c)) < 0)
      return rfi_fail(RFI_E_DATA_EMPTY, "data.max_epochs: the sources have %lld windows, but window %lld is needed",
                      (long long)c->next, (long long)sample);
  return rfi_dataset_window(m->parts[s].data, split, seed_of(seed, s), c->counts[s] - 1, tokens, targets, doc_offsets,
                            n_docs);
}

/* The sources have epochs; a mixture has none. */
static rfr_status mixture_windows(rfi_dataset *base, uint64_t seed, int64_t epochs, int64_t *out) {
  (void)base, (void)seed, (void)epochs;
  *out = 0;
  return rfi_fail(RFI_E_UNSUPPORTED, "run.epochs: a mixture (data.shares) has no epochs; set run.steps");
}

static int64_t mixture_window_bytes(const rfi_dataset *base, int64_t sample) {
  const mixture *m = (const mixture *)base;
  int i = 0;
  while (i < m->n - 1 && !m->held_out && sample >= m->parts[i].data->stats.windows[RFI_VALIDATION])
    sample -= m->parts[i++].data->stats.windows[RFI_VALIDATION];
  return rfi_dataset_window_bytes(m->parts[i].data, sample);
}

static const char *mixture_file(const rfi_dataset *base, rfi_split split, int i, int64_t *bytes) {
  const mixture *m = (const mixture *)base;
  int k = 0;
  while (k < m->n - 1 && i >= m->parts[k].data->stats.files[split]) i -= m->parts[k++].data->stats.files[split];
  return rfi_dataset_file(m->parts[k].data, split, i, bytes);
}

static void close_mixture(rfi_dataset *base) {
  mixture *m = (mixture *)base;
  for (int i = 0; i < m->n && m->parts; i++) rfi_dataset_close(m->parts[i].data);
  rfi_free(m->ctx, m->parts);
  rfi_free(m->ctx, m->windows.credit);
  rfi_free(m->ctx, m->windows.counts);
  rfi_free(m->ctx, m->counted.credit);
  rfi_free(m->ctx, m->counted.counts);
  rfi_free(m->ctx, m);
}

static const rfi_dataset_calls mixture_calls = {
    close_mixture, mixture_file, mixture_window, mixture_windows, mixture_window_bytes, NULL, NULL};

int rfi_mixture_sources(const rfi_dataset *ds) {
  return ds && ds->calls == &mixture_calls ? ((const mixture *)ds)->n : 0;
}

const rfi_dataset *rfi_mixture_document(const rfi_dataset *ds, int64_t *document) {
  const int n = rfi_mixture_sources(ds);
  const mixture *m = (const mixture *)ds;
  if (n == 0) return ds;
  int i = 0;
  while (i < n - 1 && *document >= m->parts[i].data->stats.documents[RFI_TRAIN])
    *document -= m->parts[i++].data->stats.documents[RFI_TRAIN];
  return m->parts[i].data;
}

rfr_status rfi_mixture_counts(rfi_dataset *ds, uint64_t seed, int64_t windows, int64_t *counts, int64_t *total) {
  mixture *m = (mixture *)ds;
  RFI_TRY(set_seed(m, seed));
  cursor *c = &m->counted;
  if (c->next > windows) rewind_cursor(m, c);
  while (c->next < windows && draw_source(m, c) >= 0) continue;
  memcpy(counts, c->counts, (size_t)m->n * sizeof *counts);
  *total = c->next;
  return RFR_OK;
}

/* ---- opening ---- */

static void add_split(rfi_dataset_stats *sum, const rfi_dataset_stats *s, int split) {
  sum->files[split] += s->files[split];
  sum->documents[split] += s->documents[split];
  sum->bytes[split] += s->bytes[split];
  sum->tokens[split] += s->tokens[split];
  sum->trained[split] += s->trained[split];
  sum->trained_bytes[split] += s->trained_bytes[split];
  sum->windows[split] += s->windows[split];
}

static rfr_status add_stats(mixture *m) {
  rfi_dataset_stats *sum = &m->base.stats;
  rfi_hasher *hasher;
  RFI_TRY(rfi_hasher_create(m->ctx, &hasher));
  for (int i = 0; i < m->n; i++) {
    const rfi_dataset_stats *s = &m->parts[i].data->stats;
    add_split(sum, s, RFI_TRAIN);
    if (i == 0 || !m->held_out) {
      add_split(sum, s, RFI_VALIDATION);
      sum->validation_predicted += s->validation_predicted;
    }
    sum->truncated += s->truncated;
    sum->cut += s->cut;
    sum->dropped += s->dropped;
    sum->untrained += s->untrained;
    sum->equal += s->equal;
    sum->cached += s->cached;
    sum->duplicates += s->duplicates;
    sum->empty += s->empty;
    sum->blocks += s->blocks;
    sum->held_out_blocks += s->held_out_blocks;
    sum->rows |= s->rows;
    sum->token_files |= s->token_files;
    rfi_hasher_add_u64(hasher, s->hash.high);
    rfi_hasher_add_u64(hasher, s->hash.low);
    rfi_hasher_add_u64(hasher, (uint64_t)m->parts[i].unit);
  }
  sum->hash = rfi_hasher_result(hasher);
  rfi_hasher_destroy(hasher);
  return RFR_OK;
}

static rfr_status create_cursor(const mixture *m, cursor *c) {
  RFI_TRY(RFI_ALLOC(m->ctx, (size_t)m->n * sizeof *c->credit, &c->credit));
  return RFI_ALLOC(m->ctx, (size_t)m->n * sizeof *c->counts, &c->counts);
}

static rfr_status fill_mixture(mixture *m, const rfi_mixture_source *sources, int n) {
  double sum = 0;
  for (int i = 0; i < n; i++) {
    if (!(sources[i].share > 0 && isfinite(sources[i].share)) || !(sources[i].epochs > 0))
      return rfi_fail(RFI_E_ARGUMENT, "source %d: share %g and epochs %g; both must be greater than 0", i,
                      sources[i].share, sources[i].epochs);
    sum += sources[i].share;
  }
  for (int i = 0; i < n; i++) {
    const double unit = sources[i].share / sum * (double)((int64_t)1 << UNIT_BITS);
    m->parts[i].unit = unit < 1 ? 1 : (int64_t)unit;
    m->parts[i].epochs = sources[i].epochs;
  }
  RFI_TRY(create_cursor(m, &m->windows));
  RFI_TRY(create_cursor(m, &m->counted));
  return add_stats(m);
}

rfr_status rfi_mixture_open(rfr_ctx *ctx, const rfi_mixture_source *sources, int n, bool held_out, rfi_dataset **out) {
  mixture *m = NULL;
  part *parts = NULL;
  *out = NULL;
  rfr_status s = RFI_ALLOC(ctx, sizeof *m, &m);
  if (s == RFR_OK) s = RFI_ALLOC(ctx, (size_t)n * sizeof *parts, &parts);
  if (s != RFR_OK) {
    for (int i = 0; i < n; i++) rfi_dataset_close(sources[i].data);
    rfi_free(ctx, m);
    return s;
  }
  m->base.calls = &mixture_calls;
  m->ctx = ctx;
  m->parts = parts;
  m->n = n;
  m->held_out = held_out;
  for (int i = 0; i < n; i++) parts[i].data = sources[i].data;
  s = fill_mixture(m, sources, n);
  if (s == RFR_OK) *out = &m->base;
  else close_mixture(&m->base);
  return s;
}
