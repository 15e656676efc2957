/* SPDX-License-Identifier: Apache-2.0
 *
 * Moving tokens to experts and back on the CPU. The sort by expert is a counting sort that reads the slots in order, so
 * it is stable. Every row is gathered, never scattered: in both directions one thread owns a row of the result and adds
 * its terms in the order of j.
 */
#include "backend/cpu/cpu.h"
#include "ops/walk.h"

/* ---- moe_sort ---- */

static size_t sort_workspace(const rfi_call *c) { return (size_t)c->attr[0].i * sizeof(int32_t); }

static rfr_status run_sort(const rfi_call *c) {
  const int64_t experts = c->attr[0].i, slots = rfi_count(&c->in[0].type);
  const int32_t *index = c->in[0].data;
  int32_t *splits = c->out[0].data, *order = c->out[1].data, *place = c->out[2].data, *next = c->workspace, at = 0;
  memset(next, 0, (size_t)experts * sizeof *next);
  for (int64_t i = 0; i < slots; i++)
    if (index[i] >= 0 && index[i] < experts) next[index[i]]++;
  if (splits) memcpy(splits, next, (size_t)experts * sizeof *splits);
  for (int64_t e = 0; e < experts; e++) {
    const int32_t n = next[e];
    next[e] = at;
    at += n;
  }
  for (int64_t r = at; order && r < slots; r++) order[r] = -1;
  for (int64_t i = 0; i < slots; i++) {
    const int32_t row = index[i] >= 0 && index[i] < experts ? next[index[i]]++ : -1;
    if (place) place[i] = row;
    if (order && row >= 0) order[row] = (int32_t)i;
  }
  return RFR_OK;
}

/* ---- rows ---- */

static void add_times(float *to, const float *x, float by, int64_t n) {
  for (int64_t j = 0; j < n; j++) to[j] += x[j] * by;
}
static void times(float *to, const float *x, float by, int64_t n) {
  for (int64_t j = 0; j < n; j++) to[j] = x[j] * by;
}

static void permute_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *x = &c->in[0], *weight = &c->in[3], *y = &c->out[0];
  const int32_t *order = c->in[1].data;
  const int64_t k = c->in[2].type.shape[1], slots = rfi_count(&c->in[2].type), columns = x->type.shape[1];
  const int64_t bytes = columns * (rfr_dtype_bits(x->type.dtype) / 8);
  const bool weighted = c->n_in > 3 && weight->data;
  for (int64_t r = begin; r < end; r++) {
    const int64_t slot = order[r], t = slot / k;
    char *to = (char *)y->data + r * bytes;
    if (slot < 0 || slot >= slots) {
      memset(to, 0, (size_t)bytes);
    } else if (!weighted) {
      memcpy(to, (const char *)x->data + t * bytes, (size_t)bytes);
    } else {
      const float w = rfi_read1(weight, slot);
      for (int64_t j = 0, n; j < columns; j += n) {
        float buffer[RFI_BLOCK], block[RFI_BLOCK];
        n = columns - j < RFI_BLOCK ? columns - j : RFI_BLOCK;
        float *out = rfi_target(block, y, r * columns + j);
        times(out, rfi_read(buffer, x, t * columns + j, 1, n), w, n);
        rfi_flush(out, y, r * columns + j, n);
      }
    }
  }
}

static rfr_status run_permute(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  if (rfi_arg_count(&c->out[0])) rfi_parallel(c, c->out[0].type.shape[0], c->out[0].type.shape[1], permute_part);
  return RFR_OK;
}

static void unpermute_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *y = &c->in[0], *weight = &c->in[3], *out = &c->out[0];
  const int32_t *place = c->in[2].data;
  const int64_t k = c->in[2].type.shape[1], rows = y->type.shape[0], columns = y->type.shape[1];
  const bool weighted = c->n_in > 3 && weight->data;
  for (int64_t t = begin; t < end; t++)
    for (int64_t j = 0, n; j < columns; j += n) {
      float buffer[RFI_BLOCK], block[RFI_BLOCK];
      n = columns - j < RFI_BLOCK ? columns - j : RFI_BLOCK;
      float *to = rfi_target(block, out, t * columns + j);
      memset(to, 0, (size_t)n * sizeof *to);
      for (int64_t i = 0; i < k; i++) {
        const int64_t r = place[t * k + i];
        if (r < 0 || r >= rows) continue;
        add_times(to, rfi_read(buffer, y, r * columns + j, 1, n), weighted ? rfi_read1(weight, t * k + i) : 1.0f, n);
      }
      rfi_flush(to, out, t * columns + j, n);
    }
}

static rfr_status run_unpermute(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  if (rfi_arg_count(&c->out[0]))
    rfi_parallel(c, c->out[0].type.shape[0], c->out[0].type.shape[1] * (1 + c->in[2].type.shape[1]), unpermute_part);
  return RFR_OK;
}

static void dweight_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *y = &c->in[0], *dout = &c->in[2];
  const int32_t *place = c->in[1].data;
  const int64_t k = c->in[1].type.shape[1], rows = y->type.shape[0], columns = y->type.shape[1];
  for (int64_t i = begin; i < end; i++) {
    const int64_t r = place[i], t = i / k;
    float buffer[2][RFI_BLOCK];
    double total = 0;
    for (int64_t j = 0, n; r >= 0 && r < rows && j < columns; j += n) {
      n = columns - j < RFI_BLOCK ? columns - j : RFI_BLOCK;
      total +=
          rfi_dot(rfi_read(buffer[0], y, r * columns + j, 1, n), rfi_read(buffer[1], dout, t * columns + j, 1, n), n);
    }
    rfi_write1(&c->out[0], i, (float)total);
  }
}

static rfr_status run_dweight(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  rfi_parallel(c, rfi_arg_count(&c->out[0]), c->in[0].type.shape[1], dweight_part);
  return RFR_OK;
}

/* ---- moe_load ---- */

static rfr_status run_load(const rfi_call *c) {
  const int64_t layers = c->attr[0].i;
  float *by_layer = c->out[2].data;
  double most = 0, least = 0;
  bool any = false;
  int64_t routing = 0;
  for (int64_t l = 0; by_layer && l < layers; l++) by_layer[l] = 0.0f;
  for (int i = 0; i < c->n_in; i++) {
    const int64_t experts = c->in[i].type.shape[c->in[i].type.rank - 1];
    const int32_t *splits = c->in[i].data, *end = splits + rfi_arg_count(&c->in[i]);
    for (; splits < end; splits += experts, routing++) {
      float *layer = by_layer ? &by_layer[routing % layers] : NULL;
      double sum = 0;
      for (int64_t e = 0; e < experts; e++) sum += splits[e];
      for (int64_t e = 0; sum > 0 && e < experts; e++, any = true) {
        const double load = splits[e] * (double)experts / sum;
        if (!any || load > most) most = load;
        if (!any || load < least) least = load;
        if (layer && (float)load > *layer) *layer = (float)load;
      }
    }
  }
  if (c->out[0].data) *(float *)c->out[0].data = (float)most;
  if (c->out[1].data) *(float *)c->out[1].data = (float)least;
  return RFR_OK;
}

const rfi_kernel RFI_CPU(moe_sort) = {run_sort, sort_workspace};
const rfi_kernel RFI_CPU(moe_permute) = {run_permute, NULL};
const rfi_kernel RFI_CPU(moe_unpermute) = {run_unpermute, NULL};
const rfi_kernel RFI_CPU(moe_unpermute_dw) = {run_dweight, NULL};
const rfi_kernel RFI_CPU(moe_load) = {run_load, NULL};
