/* SPDX-License-Identifier: Apache-2.0
 *
 * embedding and its gradient on the CPU. A token may occur in many rows, so the gradient is split by columns; each
 * thread reads all rows in order. It needs no atomics and no partial tables, and results do not depend on the number of
 * threads.
 */
#include "backend/cpu/cpu.h"
#include "ops/columns.h"

static void gather_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *table = &c->in[0];
  const int32_t *ids = c->in[1].data;
  int64_t rows = table->type.shape[0], bytes = table->type.shape[1] * (rfr_dtype_bits(table->type.dtype) / 8);
  for (int64_t t = begin; t < end; t++) {
    char *y = (char *)c->out[0].data + t * bytes;
    if (ids[t] >= 0 && ids[t] < rows) memcpy(y, (const char *)table->data + ids[t] * bytes, (size_t)bytes);
    else memset(y, 0, (size_t)bytes);
  }
}
static rfr_status run_gather(const rfi_call *c) {
  if (rfi_arg_count(&c->out[0])) rfi_parallel(c, c->out[0].type.shape[0], c->out[0].type.shape[1], gather_part);
  return RFR_OK;
}

static void zero_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  memset((float *)c->out[0].data + begin, 0, (size_t)(end - begin) * sizeof(float));
}
static void add_block(float *sum, const float *x, int64_t n) {
  for (int64_t j = 0; j < n; j++) sum[j] += x[j];
}
static void scatter_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *dy = &c->in[0], *table = &c->out[0];
  const int32_t *ids = c->in[1].data;
  float buffer[RFI_BLOCK];
  int64_t rows = table->type.shape[0], C = table->type.shape[1];
  int64_t first = begin * RFI_COLUMN_UNIT, last = end * RFI_COLUMN_UNIT < C ? end * RFI_COLUMN_UNIT : C;
  for (int64_t t = 0; t < dy->type.shape[0]; t++) {
    if (ids[t] < 0 || ids[t] >= rows) continue;
    for (int64_t j = first, n; j < last; j += n) {
      n = last - j < RFI_BLOCK ? last - j : RFI_BLOCK;
      add_block((float *)table->data + ids[t] * C + j, rfi_read(buffer, dy, t * C + j, 1, n), n);
    }
  }
}
static rfr_status run_scatter(const rfi_call *c) {
  RFI_TRY(rfi_check_floats(c));
  int64_t n = rfi_arg_count(&c->out[0]);
  if (n == 0) return RFR_OK;
  if (!(c->n_in > 2 && c->in[2].data)) rfi_parallel(c, n, 1, zero_part);
  rfi_parallel(c, rfi_column_units(c->out[0].type.shape[1]), c->in[0].type.shape[0] * RFI_COLUMN_UNIT, scatter_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(embedding) = {run_gather, NULL};
const rfi_kernel RFI_CPU(embedding_grad) = {run_scatter, NULL};
