/* SPDX-License-Identifier: Apache-2.0
 *
 * Operands, guards and references of a case; see op_run.h.
 */
#include "support/op_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

enum { GUARD = 256 };

static void *must(void *memory) {
  if (memory) return memory;
  fputs("out of memory\n", stderr);
  exit(1);
}

/* ---- guarded memory ---- */

static void buffer_init(rft_buffer *b, size_t bytes, unsigned char garbage) {
  size_t padded = (bytes + 63) / 64 * 64;
  b->bytes = bytes;
  b->block = must(aligned_alloc(64, padded + 2 * GUARD));
  b->data = b->block + GUARD;
  memset(b->block, garbage, padded + 2 * GUARD);
}
static bool buffer_intact(const rft_buffer *b, unsigned char garbage) {
  if (!b->block) return true;
  size_t padded = (b->bytes + 63) / 64 * 64;
  for (size_t i = 0; i < GUARD; i++)
    if (b->block[i] != garbage) return false;
  for (size_t i = GUARD + b->bytes; i < padded + 2 * GUARD; i++)
    if (b->block[i] != garbage) return false;
  return true;
}

/* ---- layouts ---- */

/* Fills strides; returns the number of elements from the first to the last. */
static int64_t lay_out(const rfr_type *t, rft_layout layout, int64_t *stride) {
  int r = t->rank, order[RFR_MAX_RANK];
  for (int d = 0; d < r; d++) order[d] = d;
  if (layout == RFT_TRANSPOSED && r >= 2) order[r - 1] = r - 2, order[r - 2] = r - 1;
  if (layout == RFT_REVERSED)
    for (int d = 0; d < r; d++) order[d] = r - 1 - d;
  int64_t step = layout == RFT_EVERY2 ? 2 : 1, extent = 1;
  for (int k = r - 1; k >= 0; k--) {
    int d = order[k];
    bool broadcast = layout == RFT_ONE_VALUE || (layout == RFT_REPEATED && d == 0);
    stride[d] = broadcast ? 0 : step;
    if (!broadcast && t->shape[d] > 0) step *= t->shape[d];
    if (layout == RFT_GAPS) step += 3 + k; /* rows, and groups of rows, have gaps between them */
  }
  for (int d = 0; d < r; d++) extent += t->shape[d] > 0 ? (t->shape[d] - 1) * stride[d] : 0;
  return rfi_count(t) ? extent : 0;
}

int64_t rft_offset(const rfi_arg *a, int64_t i) {
  int64_t offset = 0, dense = 1;
  int d = a->type.rank - 1;
  for (; d >= 0 && a->stride[d] == dense; d--) dense *= a->type.shape[d];
  if (d < 0) return i; /* avoids a division in the most frequent case */
  for (int d = a->type.rank - 1; d >= 0; d--) {
    offset += i % a->type.shape[d] * a->stride[d];
    i /= a->type.shape[d];
  }
  return offset;
}

double rft_get(const rfi_arg *a, int64_t i) {
  int64_t at = rft_offset(a, i);
  switch (a->type.dtype) {
    case RFR_F64: return ((const double *)a->data)[at];
    case RFR_F32: return ((const float *)a->data)[at];
    case RFR_I64: return (double)((const int64_t *)a->data)[at];
    case RFR_E4M3:
    case RFR_E5M2:
    case RFR_E8M0: return rfr_float_from_bits(a->type.dtype, ((const uint8_t *)a->data)[at]);
    case RFR_I32: return ((const int32_t *)a->data)[at];
    case RFR_U8: return ((const uint8_t *)a->data)[at];
    default: return rfr_float_from_bits(a->type.dtype, ((const uint16_t *)a->data)[at]);
  }
}

void rft_set(const rfi_arg *a, int64_t i, double x) {
  int64_t at = rft_offset(a, i);
  switch (a->type.dtype) {
    case RFR_F64: ((double *)a->data)[at] = x; break;
    case RFR_F32: ((float *)a->data)[at] = (float)x; break;
    case RFR_I64: ((int64_t *)a->data)[at] = (int64_t)x; break;
    case RFR_I32: ((int32_t *)a->data)[at] = (int32_t)x; break;
    case RFR_U8: ((uint8_t *)a->data)[at] = (uint8_t)x; break;
    case RFR_E4M3:
    case RFR_E5M2:
    case RFR_E8M0: ((uint8_t *)a->data)[at] = (uint8_t)rfr_float_to_bits(a->type.dtype, (float)x); break;
    default: ((uint16_t *)a->data)[at] = (uint16_t)rfr_float_to_bits(a->type.dtype, (float)x);
  }
}

/* ---- values ---- */

/* splitmix64 of an address */
static uint32_t draw(const rft_case *c, int stream, int64_t i) {
  uint64_t z = c->key + (uint64_t)stream * 0xD1B54A32D192ED03u + (uint64_t)(i + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (uint32_t)((z ^ (z >> 31)) >> 32);
}

double rft_random(const rft_case *c, int stream, int64_t i) { return draw(c, stream, i) / 1073741824.0 - 2; }

double rft_case_value(const rft_case *c, int operand, int64_t i) {
  const rft_operand *o = &c->in[operand];
  if (o->has_row && i / (rfi_count(&o->type) / o->type.shape[0]) == o->row) return o->row_value;
  if (o->constant) return o->value;
  if (o->n_list) return o->list[o->n_list == 1 ? 0 : i];
  uint32_t u = draw(c, operand, i);
  if (o->below) return (double)(u % (uint64_t)o->below);
  double x = u / 4294967296.0;
  return o->positive ? 0.1 + 2 * x : 4 * x - 2;
}

/* ---- runs ---- */

const rft_layout_row rft_layout_rows[RFT_LAYOUTS] = {
    {RFT_DENSE, 0, ""},
    {RFT_GAPS, RFI_ROWS | RFI_ANY, ", rows with gaps"},
    {RFT_REPEATED, RFI_ROWS | RFI_ANY, ", one row repeated"},
    {RFT_TRANSPOSED, RFI_ANY, ", transposed"},
    {RFT_REVERSED, RFI_ANY, ", reversed"},
    {RFT_EVERY2, RFI_ANY, ", every second"},
    {RFT_ONE_VALUE, RFI_ANY, ", one value repeated"},
};

static bool takes(const rft_case *c, int i, rft_layout layout) {
  const rft_operand *o = &c->in[i];
  for (int j = 0; j < c->def->n_results; j++)
    if (c->def->alias[j] == i) return false; /* a result's storage is dense */
  if (o->layout != RFT_DENSE || rfi_count(&o->type) < 2) return false;
  if (layout == RFT_ONE_VALUE && !rfr_dtype_is_float(o->type.dtype)) return false; /* offsets must ascend */
  return o->type.rank >= (layout == RFT_EVERY2 || layout == RFT_ONE_VALUE ? 1 : 2);
}

static void *ref_storage(rfi_arg *a, const rfr_type *type, rfr_dtype real);

/* Changes the random operands with the op's RFT_OPERANDS. */
static void agree(rft_run *run) {
  const rft_case *c = run->c;
  const rft_ref_fn rule = rft_op_get(c->def->code).operands;
  rfi_arg in[RFT_MAX_IN] = {0};
  if (!rule) return;
  for (int i = 0; i < c->n_in; i++) {
    const rfi_arg *from = &run->in_arg[i];
    if (from->data) ref_storage(&in[i], &from->type, RFR_F64);
    for (int64_t k = 0; from->data && k < rfi_count(&from->type); k++) rft_set(&in[i], k, rft_get(from, k));
  }
  rule(&(rfi_call){.n_in = c->n_in, .in = in, .attr = c->attr});
  for (int i = 0; i < c->n_in; i++) {
    for (int64_t k = in[i].data ? rfi_count(&in[i].type) - 1 : -1; k >= 0; k--)
      rft_set(&run->in_arg[i], k, rft_get(&in[i], k));
    free(in[i].data);
  }
}

rft_layout rft_operand_layout(const rft_case *c, int i, rft_layout layout) {
  return layout != RFT_DENSE && takes(c, i, layout) ? layout : c->in[i].layout;
}

bool rft_layout_applies(const rft_case *c, const rft_layout_row *row) {
  if (row->flags && !(c->def->flags & row->flags)) return false;
  bool applies = row->layout == RFT_DENSE;
  for (int i = 0; i < c->n_in; i++)
    applies |= c->in[i].type.rank >= 0 && row->layout != RFT_DENSE && takes(c, i, row->layout);
  return applies;
}

/* ---- runs ---- */

void rft_run_init(rft_run *run, const rft_case *c, rft_layout layout, unsigned char garbage, unsigned dead) {
  *run = (rft_run){.c = c, .garbage = garbage};
  for (int i = 0; i < c->n_in; i++) {
    rfi_arg *a = &run->in_arg[i];
    a->type = c->in[i].type;
    if (a->type.rank < 0) continue;
    rft_layout own = rft_operand_layout(c, i, layout);
    size_t size = (size_t)rfr_dtype_bits(a->type.dtype) / 8;
    buffer_init(&run->in[i], (size_t)lay_out(&a->type, own, a->stride) * size, garbage);
    a->data = run->in[i].data;
    for (int64_t k = rfi_count(&a->type) - 1; k >= 0; k--) rft_set(a, k, rft_case_value(c, i, k));
  }
  agree(run);
  for (int j = 0; j < c->def->n_results; j++) {
    rfi_arg *y = &run->out_arg[j];
    int alias = c->def->alias[j];
    bool given = alias >= 0 && alias < c->n_in && run->in_arg[alias].data;
    if ((dead & 1u << j) || (alias >= 0 && !given && (c->def->flags & RFI_STATE || c->def->only_onto[j]))) {
      y->type = c->out[j];
    } else if (given) {
      *y = run->in_arg[alias];
    } else {
      y->type = c->out[j];
      size_t size = (size_t)rfr_dtype_bits(y->type.dtype) / 8;
      buffer_init(&run->out[j], (size_t)lay_out(&y->type, RFT_DENSE, y->stride) * size, garbage);
      y->data = run->out[j].data;
    }
  }
  run->call = (rfi_call){.n_in = c->n_in,
                         .n_out = c->def->n_results,
                         .in = run->in_arg,
                         .out = run->out_arg,
                         .attr = c->attr,
                         .microbatch = c->microbatch};
}

void rft_run_deinit(rft_run *run) {
  for (int i = 0; i < RFT_MAX_IN; i++) free(run->in[i].block);
  for (int j = 0; j < RFI_MAX_NAMES; j++) free(run->out[j].block);
  free(run->workspace.block);
}

static bool is_result(const rft_run *run, int operand) {
  for (int j = 0; j < run->c->def->n_results; j++)
    if (run->out_arg[j].data && run->out_arg[j].data == run->in_arg[operand].data) return true;
  return false;
}

const char *rft_run_kernel(rft_run *run, const rfi_kernel *kernel, int threads) {
  static char message[200];
  unsigned char *before[RFT_MAX_IN] = {0};
  const char *wrong = NULL;
  for (int i = 0; i < run->c->n_in; i++)
    if (run->in[i].block && !is_result(run, i)) {
      before[i] = must(malloc(run->in[i].bytes + 1));
      memcpy(before[i], run->in[i].data, run->in[i].bytes);
    }
  run->call.threads = threads;
  if (kernel->workspace) {
    buffer_init(&run->workspace, kernel->workspace(&run->call), run->garbage);
    run->call.workspace = run->workspace.data;
  }
  if (kernel->run(&run->call) != RFR_OK) {
    snprintf(message, sizeof message, "the kernel returned: %s", rfr_last_error()->message);
    wrong = message;
  }
  if (!buffer_intact(&run->workspace, run->garbage)) wrong = "wrote outside its workspace";
  for (int j = 0; j < run->c->def->n_results; j++)
    if (!buffer_intact(&run->out[j], run->garbage)) wrong = "wrote outside its results";
  for (int i = 0; i < run->c->n_in; i++) {
    if (!buffer_intact(&run->in[i], run->garbage)) wrong = "wrote around an operand";
    if (before[i] && memcmp(before[i], run->in[i].data, run->in[i].bytes) != 0) wrong = "changed an operand";
    free(before[i]);
  }
  return wrong;
}

/* ---- references ---- */

static rfr_dtype first_result = RFR_F32; /* type of the op's first result */

double rft_round(double x) { return rfr_float_from_bits(first_result, rfr_float_to_bits(first_result, (float)x)); }

static void *ref_storage(rfi_arg *a, const rfr_type *type, rfr_dtype real) {
  a->type = *type;
  if (rfr_dtype_is_float(type->dtype)) a->type.dtype = real;
  size_t bytes = (size_t)lay_out(type, RFT_DENSE, a->stride) * (size_t)rfr_dtype_bits(a->type.dtype) / 8;
  a->data = must(malloc(bytes + 8));
  memset(a->data, 0xFF, bytes); /* NaN, so that elements that a reference does not write are noticed */
  return a->data;
}

void rft_reference_init(rft_reference *ref, const rft_run *run, rft_ref_fn fn, rfr_dtype real, double own,
                        double common) {
  const rft_case *c = run->c;
  *ref = (rft_reference){.n_in = c->n_in, .n_out = c->def->n_results};
  first_result = c->out[0].dtype;
  for (int i = 0; i < c->n_in; i++) {
    const rfi_arg *from = &run->in_arg[i];
    rfi_arg *to = &ref->in_arg[i];
    to->type = from->type;
    if (!from->data) continue;
    ref->in[i] = ref_storage(to, &from->type, real);
    for (int64_t k = 0; k < rfi_count(&from->type); k++) {
      double x = rft_get(from, k);
      if (to->type.dtype == real)
        x *= 1 + own * (draw(c, 100 + i, k) / 2147483648.0 - 1) + (draw(c, 140 + i, 0) & 1 ? common : -common);
      if (to->type.dtype == RFR_I64) ((int64_t *)to->data)[k] = ((const int64_t *)from->data)[rft_offset(from, k)];
      else rft_set(to, k, x);
    }
  }
  for (int j = 0; j < c->def->n_results; j++) {
    int alias = c->def->alias[j];
    if (alias >= 0 && alias < c->n_in && ref->in_arg[alias].data) ref->out_arg[j] = ref->in_arg[alias];
    else if (run->out_arg[j].data) ref->out[j] = ref_storage(&ref->out_arg[j], &c->out[j], real);
    else ref->out_arg[j].type = c->out[j];
  }
  rfi_call call = run->call;
  call.in = ref->in_arg;
  call.out = ref->out_arg;
  fn(&call);
}

void rft_reference_deinit(rft_reference *ref) {
  for (int i = 0; i < ref->n_in; i++) free(ref->in[i]);
  for (int j = 0; j < ref->n_out; j++) free(ref->out[j]);
}
