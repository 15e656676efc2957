/* SPDX-License-Identifier: Apache-2.0
 *
 * A part is flat: the elements [rank P, (rank + 1) P) of a tensor, P elements in each part, zero-padded at the end
 * (src/pass/shard.c); or the experts of a rank, which are adjacent, without padding. A part of a moment of 8
 * bits has the codes of its elements, then the scales of its blocks.
 */
#include "train/parts.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "dist/comm.h"
#include "nn/nn.h"
#include "ops/quant/formats.h"
#include "trace/trace.h"
#include "train/step_trace.h"

static const rfi_value *find_input(int n, const rfr_trace *const *traces, const char *name) {
  for (int t = 0; t < n; t++)
    for (int i = 0; i < traces[t]->n_inputs; i++) {
      const rfi_value *x = &traces[t]->values[traces[t]->inputs[i]];
      if (strcmp(x->name, name) == 0) return x;
    }
  return NULL; /* an input that a pass has added */
}

rfr_status rfi_parts_keep(rfr_run *run, int n, const rfr_trace *const *traces) {
  rfr_tensor x;
  int count = 0;
  const rfi_parallel *p = &run->settings->parallel;
  if (p->ranks == 1 || (p->shard == RFR_SHARD_NONE && p->expert <= 1)) return RFR_OK;
  while (rfr_programs_tensor_at(run->programs, count, &x) == RFR_OK) count++;
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)(count + 1) * sizeof *run->full, &run->full));
  for (int i = 0; i < count; i++) {
    RFI_TRY(rfr_programs_tensor_at(run->programs, i, &x));
    const rfi_value *recorded = find_input(n, traces, x.name);
    run->full[i] = recorded ? recorded->type : x.type;
    if (p->expert > 1 && rfi_is_of_experts(x.name)) run->full[i].shape[0] *= p->expert;
  }
  return RFR_OK;
}

bool rfi_is_here(const rfr_run *run, int i) {
  const rfi_settings *s = run->settings;
  return s->parallel.pipeline <= 1 || rfi_pipeline_owns(&s->spec, s->spec.pipeline.rank, i);
}

bool rfi_is_average(const rfr_tensor *x) {
  return x->role == RFR_ROLE_TRAINABLE && rfi_ends_in(x->name, RFI_SUFFIX_EMA);
}

bool rfi_of_parameter(const rfr_tensor *x) {
  static const char *const states[] = {RFI_SUFFIX_M, RFI_SUFFIX_V, RFI_SUFFIX_MOMENTUM, RFI_SUFFIX_MASTER};
  for (size_t i = 0; x->role == RFR_ROLE_STATE && i < sizeof states / sizeof *states; i++)
    if (rfi_ends_in(x->name, states[i])) return true;
  return rfi_is_parameter(x->role);
}

/* Must decide as the pass does: the type of a part may equal that of the full tensor. */
bool rfi_is_part(const rfr_run *run, const rfr_tensor *x) {
  if (!run->full) return false;
  if (run->settings->parallel.expert > 1 && rfi_is_of_experts(x->name)) return true;
  if (x->role == RFR_ROLE_FROZEN) return run->settings->parallel.shard == RFR_SHARD_FULL;
  return run->settings->parallel.shard != RFR_SHARD_NONE && rfi_of_parameter(x);
}

bool rfi_ranks_save(const rfr_run *run) { return run->full || run->settings->parallel.pipeline > 1; }

bool rfi_saves(const rfr_run *run, const rfr_tensor *x) {
  const rfi_settings *s = run->settings;
  const rfi_pipeline_part *p = &s->spec.pipeline;
  rfr_parameter tied;
  if (s->parallel.pipeline <= 1) return s->parallel.rank == 0;
  if (s->spec.rank > 0) return false;
  if (!rfi_of_parameter(x)) return p->rank == 0;
  /* The ranks of the first and the last stage both have a tied embedding. */
  if (!s->spec.model.tie_embeddings || p->rank == rfi_pipeline_rank(p, 0)) return true;
  const int i = rfi_parameter_index(&s->spec.model, RFI_PARAM_TOKENS, 0);
  return rfr_model_parameter(&s->spec.model, i, &tied) != RFR_OK || strncmp(x->name, tied.name, strlen(tied.name)) != 0;
}

rfr_status rfi_run_tensor_at(const rfr_run *run, int i, rfr_tensor *out) {
  RFI_TRY(rfr_programs_tensor_at(run->programs, i, out));
  if (!rfi_is_part(run, out)) return RFR_OK;
  out->type = run->full[i];
  out->bytes = rfi_count(&out->type) * rfr_dtype_bits(out->type.dtype) / 8;
  out->host = 0;
  return RFR_OK;
}

rfr_status rfi_run_tensor(const rfr_run *run, const char *name, rfr_tensor *out) {
  rfr_tensor x;
  RFI_TRY(rfr_programs_tensor(run->programs, name, out));
  for (int i = 0; run->full && rfr_programs_tensor_at(run->programs, i, &x) == RFR_OK; i++)
    if (strcmp(x.name, name) == 0) return rfi_run_tensor_at(run, i, out);
  return RFR_OK;
}

/* ---- sections: byte ranges that are sharded in the same way ---- */

typedef struct section {
  int64_t at, bytes, each; /* range in the full tensor; size of one rank's part */
  int64_t gap;             /* bytes before the next section */
} section;

typedef struct parts {
  rfr_tensor own;
  section section[2]; /* values; scales of an 8-bit moment, or empty */
} parts;

static rfr_status find_moment(const rfr_run *run, const rfr_tensor *x, parts *p) {
  const int ranks = run->settings->parallel.ranks;
  char name[128];
  rfr_tensor w;
  const char *suffix = rfi_ends_in(x->name, RFI_SUFFIX_V) ? RFI_SUFFIX_V : RFI_SUFFIX_M;
  snprintf(name, sizeof name, "%.*s", (int)(strlen(x->name) - strlen(suffix)), x->name);
  /* the weight's part has as many elements as the moment's part */
  RFI_TRY(rfr_programs_tensor(run->programs, name, &w));
  const int64_t each = w.type.shape[0];
  RFI_TRY(rfi_run_tensor(run, name, &w));
  const rfi_quant_layout full = rfi_quant_layout_for(RFR_QUANT_DYNAMIC8, w.type.rank, w.type.shape),
                         own = rfi_quant_layout_for(RFR_QUANT_DYNAMIC8, 1, &each);
  p->section[0] = (section){0, full.n, each, full.scales_at - full.n};
  p->section[1] = (section){full.scales_at, 4 * full.scales, 4 * own.scales, 0};
  if (own.scales_at == own.n && p->own.bytes == own.bytes) return RFR_OK;
  return rfi_fail(RFI_E_INTERNAL, "%s is a part of %lld bytes for %d ranks", x->name, (long long)p->own.bytes, ranks);
}

static rfr_status find_parts(const rfr_run *run, const rfr_tensor *x, parts *p) {
  *p = (parts){0};
  RFI_TRY(rfr_programs_tensor(run->programs, x->name, &p->own));
  if (x->role == RFR_ROLE_STATE && x->type.dtype == RFR_U8) return find_moment(run, x, p);
  p->section[0] = (section){0, x->bytes, p->own.bytes, 0};
  return RFR_OK;
}

rfr_status rfi_part_ranges(const rfr_run *run, const rfr_tensor *x, rfr_tensor *own,
                           rfi_part_range ranges[RFI_PART_RANGES], int *n) {
  parts p;
  int64_t offset = 0;
  *n = 0;
  RFI_TRY(find_parts(run, x, &p));
  *own = p.own;
  for (int i = 0; i < RFI_PART_RANGES; i++) {
    const section *s = &p.section[i];
    const int64_t first = run->settings->parallel.rank * s->each, left = s->bytes - first;
    if (left > 0)
      ranges[(*n)++] = (rfi_part_range){.at = s->at + first,
                                        .bytes = left < s->each ? left : s->each,
                                        .own = offset,
                                        .zeros = left <= s->each ? s->gap : 0};
    offset += s->each;
  }
  return RFR_OK;
}

/* Finds the code of 0 in an 8-bit moment. It depends on the map and is not code 0. */
static rfr_status find_zero(const rfr_run *run, const char *name, uint8_t *code) {
  static const float values[] = {1, 0};
  const int64_t two = 2;
  const rfr_quant format = rfi_ends_in(name, RFI_SUFFIX_V) ? RFR_QUANT_DYNAMIC8U : RFR_QUANT_DYNAMIC8;
  const rfi_quant_layout l = rfi_quant_layout_for(format, 1, &two);
  uint8_t *bytes;
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)l.bytes, &bytes));
  const rfr_status s = rfr_quant_encode(run->ctx, format, 1, &two, RFR_F32, values, 1, bytes);
  *code = bytes[1];
  rfi_free(run->ctx, bytes);
  return s;
}

rfr_status rfi_part_clear(const rfr_run *run, const rfr_tensor *own, void *part) {
  uint8_t code;
  memset(part, 0, (size_t)own->bytes);
  if (own->role != RFR_ROLE_STATE || own->type.dtype != RFR_U8) return RFR_OK;
  RFI_TRY(find_zero(run, own->name, &code));
  memset(part, code, (size_t)(own->bytes / (RFI_DYNAMIC_BLOCK + 4) * RFI_DYNAMIC_BLOCK)); /* the codes */
  return RFR_OK;
}

/* Copies rank r's part to the full tensor, or from it. */
static void copy_part(const parts *p, int r, char *full, char *part, bool to_full) {
  for (int i = 0; i < 2; i++) {
    const section *s = &p->section[i];
    const int64_t first = r * s->each, left = s->bytes - first, n = left < s->each ? left : s->each;
    if (n > 0 && to_full) memcpy(full + s->at + first, part, (size_t)n);
    else if (n > 0) memcpy(part, full + s->at + first, (size_t)n);
    part += s->each;
  }
}

/* Gathers `bytes` bytes of host memory from every rank; NCCL uses its exchange. */
static rfr_status gather(rfr_comm *c, const char *mine, int64_t bytes, char *all) {
  const int ranks = rfr_comm_size(c);
  char block[RFI_EXCHANGE_BYTES * 16];
  if (c->table->host) return rfr_comm_all_gather(c, mine, all, bytes, RFR_U8);
  const int64_t most =
      (int64_t)sizeof block / ranks < RFI_EXCHANGE_BYTES ? (int64_t)sizeof block / ranks : RFI_EXCHANGE_BYTES;
  for (int64_t at = 0; at < bytes; at += most) {
    const int64_t n = bytes - at < most ? bytes - at : most;
    RFI_TRY(rfi_comm_exchange(c, mine + at, n, block));
    for (int r = 0; r < ranks; r++) memcpy(all + r * bytes + at, block + r * n, (size_t)n);
  }
  return RFR_OK;
}

rfr_status rfi_parts_read(rfr_run *run, const rfr_tensor *x, void *to) {
  const int ranks = run->settings->parallel.ranks;
  rfr_status s;
  parts p;
  char *own = NULL, *all = NULL;
  RFI_TRY(find_parts(run, x, &p));
  RFI_GOTO(rfi_alloc(run->ctx, (size_t)p.own.bytes, (void **)&own));
  RFI_GOTO(rfi_alloc(run->ctx, (size_t)(p.own.bytes * ranks), (void **)&all));
  RFI_GOTO(rfr_programs_read(run->programs, &p.own, own));
  RFI_GOTO(gather(run->options.comm, own, p.own.bytes, all));
  memset(to, 0, (size_t)x->bytes); /* also zeroes the gaps between sections */
  for (int r = 0; r < ranks; r++) copy_part(&p, r, to, all + r * p.own.bytes, true);
  s = RFR_OK;
fail:
  rfi_free(run->ctx, own);
  rfi_free(run->ctx, all);
  return s;
}

rfr_status rfi_parts_write(rfr_run *run, const rfr_tensor *x, const void *from) {
  rfr_status s;
  parts p;
  char *own;
  if (!rfi_is_part(run, x)) return rfr_programs_write(run->programs, x, from);
  RFI_TRY(find_parts(run, x, &p));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)p.own.bytes, &own));
  RFI_GOTO(rfi_part_clear(run, &p.own, own));
  copy_part(&p, run->settings->parallel.rank, (char *)from, own, false);
  s = rfr_programs_write(run->programs, &p.own, own);
fail:
  rfi_free(run->ctx, own);
  return s;
}
