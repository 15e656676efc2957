/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads weights: reads each byte of the files once, on all threads, to where the tensor is.
 *
 * A block of RFI_HASH_BLOCK bytes is the unit of work: a thread reads it, checks that it is finite and hashes it while
 * it is in the cache. On the CPU the blocks are read into the tensor. On a GPU they are read into pinned memory of
 * STAGE bytes, which is then copied, so that the host never holds a copy of the model. Only a tensor that is stored or
 * held in another layout (GGUF, FP8 with scales, a quantized base) takes host memory of its size, one at a time.
 *
 * The hash of a base is the sum of the hashes of its blocks, of the values before quantization.
 */
#include "train/load_weights.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "dist/agree.h"
#include "dist/comm.h"
#include "exec/exec.h"
#include "model/weights.h"
#include "nn/adapter.h"
#include "pass/watch_values.h"
#include "train/events.h"
#include "train/host.h"
#include "train/parts.h"
#include "train/state_adapter.h"

enum { STAGE = 64 << 20 };

/* Tensors that are not saved: the rings of metrics and watched values, and texts with their caches. */
static bool is_transient(const char *name) {
  return strcmp(name, RFI_NAME_METRICS) == 0 || strcmp(name, RFI_WATCH_NAME) == 0 || strcmp(name, RFI_NAME_TEXT) == 0 ||
         strcmp(name, RFI_NAME_CURSOR) == 0 || strncmp(name, "cache.", 6) == 0;
}

rfi_kind rfi_kind_of(const rfr_run *run, const rfr_tensor *x) {
  const bool is_weight = rfi_is_parameter(x->role);
  if (rfi_is_average(x)) return RFI_KIND_OPTIMIZER;
  if (run->settings->adapter && rfi_adapter_state_stores(run, x)) return RFI_KIND_WEIGHT;
  if (is_weight && run->settings->adapter) return rfi_adapter_has_name(x->name) ? RFI_KIND_OTHER : RFI_KIND_BASE;
  if (is_weight) return RFI_KIND_WEIGHT;
  if (x->role != RFR_ROLE_STATE || strcmp(x->name, "step") == 0 || is_transient(x->name)) return RFI_KIND_OTHER;
  return RFI_KIND_OPTIMIZER;
}

/* A float whose exponent bits are all set is NaN or infinite. */
bool rfi_values_finite(rfr_dtype dtype, const void *values, int64_t bytes) {
  bool finite = true;
  if (dtype == RFR_F32) {
    for (int64_t i = 0; i < bytes / 4; i++) finite &= (((const uint32_t *)values)[i] & 0x7F800000u) != 0x7F800000u;
  } else if (dtype == RFR_BF16 || dtype == RFR_F16) {
    const uint16_t exponent = dtype == RFR_BF16 ? 0x7F80 : 0x7C00;
    for (int64_t i = 0; i < bytes / 2; i++) finite &= (((const uint16_t *)values)[i] & exponent) != exponent;
  }
  return finite;
}

/* ---- blocks ---- */

/* A tensor that is being loaded. */
typedef struct loading {
  const char *model;            /* name for errors; NULL: first values */
  rfr_tensor x;                 /* with the type and size of the values */
  const rfi_weight_range *from; /* NULL: the values are already in memory */
  int64_t first;                /* the element of `from` at which the values begin */
  bool hashes;                  /* compute hashes; only for a base */
} loading;

/* Reads one block into `data`: n bytes of the tensor from byte `at`. */
static rfr_status take_block(const loading *l, int64_t at, int64_t n, void *data, rfi_hash *sum) {
  const rfr_dtype dtype = l->x.type.dtype;
  const int64_t size = rfr_dtype_bits(dtype) / 8;
  if (l->from) RFI_TRY(rfi_weight_range_read(l->from, dtype, data, l->first + at / size, n / size));
  if (l->model && !rfi_values_finite(dtype, data, n))
    return rfi_fail_at(RFI_E_MODEL_NONFINITE, l->model, 0, "%s has elements that are NaN or infinite", l->x.name);
  if (l->hashes) rfi_hash_add(sum, rfi_hash_block(l->x.name, (uint64_t)dtype, at / RFI_HASH_BLOCK, data, (size_t)n));
  return RFR_OK;
}

/* Reads the blocks of n bytes from byte `begin`, a multiple of a block. If a thread fails, this thread reads all blocks
 * again, because errors are thread-local. */
static rfr_status take_blocks(rfr_run *run, const loading *l, int64_t begin, int64_t n, char *data, int threads) {
  const int64_t blocks = (n + RFI_HASH_BLOCK - 1) / RFI_HASH_BLOCK;
  uint64_t high = 0, low = 0;
  bool failed = false;
  rfr_status s = RFR_OK;
  if (threads > blocks) threads = (int)blocks;
  if (threads > 1) RFI_TRY(rfi_check_fork(threads));
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(+ : high, low) \
    reduction(|| : failed) if (threads > 1)
  for (int64_t i = 0; i < blocks; i++) {
    const int64_t at = i * RFI_HASH_BLOCK, some = n - at < RFI_HASH_BLOCK ? n - at : RFI_HASH_BLOCK;
    rfi_hash sum = {0};
    if (failed) continue;
    failed = take_block(l, begin + at, some, data + at, &sum) != RFR_OK;
    high += sum.high;
    low += sum.low;
  }
  if (failed && threads > 1) return take_blocks(run, l, begin, n, data, 1);
  if (failed) return rfr_last_error()->status;
  rfi_hash_add(&run->base, (rfi_hash){high, low});
  return s;
}

/* ---- tensors ---- */

/* Memory that is reused for all tensors. */
typedef struct buffers {
  char *values; /* the values of one tensor, if they cannot be read directly to their destination */
  int64_t values_size;
  void *stage; /* STAGE bytes */
} buffers;

static void free_buffers(rfr_run *run, buffers *b) {
  rfi_free(run->ctx, b->values);
  rfi_programs_unstage(run->programs, b->stage);
}

static rfr_status need_values(rfr_run *run, buffers *b, int64_t bytes) {
  if (bytes <= b->values_size) return RFR_OK;
  rfi_free(run->ctx, b->values);
  *b = (buffers){.stage = b->stage};
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)bytes, &b->values));
  b->values_size = bytes;
  return RFR_OK;
}

static rfr_status find_parameter(const rfr_model_config *c, const char *name, rfr_parameter *p) {
  const int n = rfr_model_parameter_count(c);
  for (int i = 0; i < n; i++) {
    RFI_TRY(rfr_model_parameter(c, i, p));
    if (strcmp(p->name, name) == 0) return RFR_OK;
  }
  return rfi_fail(RFI_E_INTERNAL, "%s is not a parameter", name);
}

/* In a pipeline each rank hashes the tensors that it would save; otherwise each rank hashes all. */
static bool hashes(const rfr_run *run, const rfr_tensor *x) {
  return run->settings->parallel.pipeline <= 1 || rfi_saves(run, x);
}

/* *format: the quantized format in which the run stores the tensor; l->x gets the type of the unquantized values. */
static rfr_status begin(const rfr_run *run, const rfr_tensor *x, loading *l, rfr_quant *format) {
  const rfr_model_config *c = &run->settings->spec.model;
  rfr_parameter p;
  *format = RFR_QUANT_NONE;
  *l = (loading){.x = *x, .hashes = rfi_kind_of(run, x) == RFI_KIND_BASE && hashes(run, x)};
  if (x->type.dtype != RFR_U8) return RFR_OK;
  RFI_TRY(find_parameter(c, x->name, &p));
  *format = p.format;
  l->x.type = (rfr_type){.dtype = c->dtype, .rank = p.rank};
  l->x.bytes = rfr_dtype_bits(c->dtype) / 8;
  for (int d = 0; d < p.rank; d++) l->x.bytes *= l->x.type.shape[d] = p.shape[d];
  return RFR_OK;
}

/* Writes l->x.data, the values, to the tensor on the device, or quantizes them first. */
static rfr_status put_values(rfr_run *run, const loading *l, rfr_quant format, const rfr_tensor *x) {
  void *host;
  if (format == RFR_QUANT_NONE) return rfi_parts_write(run, x, l->x.data);
  RFI_TRY(rfi_host_open(run, x, RFI_HOST_WRITE, &host));
  const rfr_status s = rfr_quant_encode(run->ctx, format, l->x.type.rank, l->x.type.shape, l->x.type.dtype, l->x.data,
                                        rfi_ctx_threads(run->ctx), host);
  return rfi_host_close(run, x, RFI_HOST_WRITE, host, s);
}

/* Loads a tensor to a device through a staging buffer. */
static rfr_status load_staged(rfr_run *run, const loading *l, buffers *b, const rfr_tensor *x) {
  if (!b->stage) RFI_TRY(rfi_programs_stage(run->programs, STAGE, &b->stage));
  for (int64_t at = 0; at < x->bytes; at += STAGE) {
    rfr_tensor part = *x;
    part.data = (char *)x->data + at;
    part.bytes = x->bytes - at < STAGE ? x->bytes - at : STAGE;
    RFI_TRY(take_blocks(run, l, at, part.bytes, b->stage, rfi_ctx_threads(run->ctx)));
    RFI_TRY(rfr_programs_write(run->programs, &part, b->stage));
  }
  return RFR_OK;
}

/* Reads only the bytes of this rank's part. */
static rfr_status load_part(rfr_run *run, loading *l, buffers *b, const rfr_tensor *x) {
  rfi_part_range range[RFI_PART_RANGES];
  rfr_tensor own;
  int n;
  RFI_TRY(rfi_part_ranges(run, x, &own, range, &n));
  RFI_TRY(need_values(run, b, own.bytes));
  RFI_TRY(rfi_part_clear(run, &own, b->values));
  for (int i = 0; i < n; i++) {
    l->first = range[i].at / (rfr_dtype_bits(l->x.type.dtype) / 8);
    RFI_TRY(take_blocks(run, l, 0, range[i].bytes, b->values + range[i].own, rfi_ctx_threads(run->ctx)));
  }
  return rfr_programs_write(run->programs, &own, b->values);
}

static rfr_status load_range(rfr_run *run, rfi_weights *w, loading *l, rfr_quant format, buffers *b,
                             const rfr_tensor *x) {
  const bool in_place = x->host && format == RFR_QUANT_NONE;
  const bool is_part = rfi_is_part(run, x);
  if (l->from && is_part && !l->hashes && format == RFR_QUANT_NONE) return load_part(run, l, b, x);
  if (l->from && !x->host && format == RFR_QUANT_NONE && !is_part) return load_staged(run, l, b, x);
  if (!in_place) {
    RFI_TRY(need_values(run, b, l->x.bytes));
    l->x.data = b->values;
  }
  if (!l->from) RFI_TRY(rfi_weights_read(w, &run->settings->spec.model, &l->x));
  RFI_TRY(take_blocks(run, l, 0, l->x.bytes, l->x.data, rfi_ctx_threads(run->ctx)));
  return in_place ? RFR_OK : put_values(run, l, format, x);
}

static rfr_status load_tensor(rfr_run *run, const char *model, rfi_weights *w, buffers *b, const rfr_tensor *x) {
  loading l;
  rfr_quant format;
  rfi_weight_range range;
  RFI_TRY(begin(run, x, &l, &format));
  l.model = model;
  RFI_TRY(rfi_weights_find_range(w, &run->settings->spec.model, &l.x, &range));
  if (range.n > 0) l.from = &range;
  const rfr_status s = load_range(run, w, &l, format, b, x);
  rfi_free(run->ctx, range.pieces);
  return s;
}

static rfr_status load_model(rfr_run *run, const char *model) {
  rfi_weights *w = NULL;
  rfr_tensor x;
  buffers b = {0};
  const char *name = NULL;
  RFI_TRY(rfi_weights_open(run->ctx, model, &w));
  rfr_status s = RFR_OK;
  const rfi_kind which = run->settings->adapter ? RFI_KIND_BASE : RFI_KIND_WEIGHT;
  for (int i = 0; s == RFR_OK && rfi_run_tensor_at(run, i, &x) == RFR_OK; i++)
    if (rfi_kind_of(run, &x) == which) s = load_tensor(run, model, w, &b, &x);
  const int64_t left = s == RFR_OK && !run->stages ? rfi_weights_left(w, &run->settings->spec.model, &name) : 0;
  if (left > 0)
    rfi_run_warn(run, "%.200s: %lld tensors do not belong to the model and are ignored, as %.100s", model,
                 (long long)left, name);
  free_buffers(run, &b);
  rfi_weights_close(w);
  return s;
}

/* ---- first values ---- */

static rfr_status fill(rfr_run *run, const rfr_parameter *p, buffers *b, const rfr_tensor *x) {
  const int threads = rfi_ctx_threads(run->ctx);
  loading l;
  rfr_quant format;
  RFI_TRY(begin(run, x, &l, &format));
  const bool in_place = x->host && format == RFR_QUANT_NONE;
  if (!in_place) {
    RFI_TRY(need_values(run, b, l.x.bytes));
    l.x.data = b->values;
  }
  RFI_TRY(rfr_parameter_fill(p, run->settings->seed, l.x.type.dtype, threads, l.x.data));
  if (l.hashes) RFI_TRY(take_blocks(run, &l, 0, l.x.bytes, l.x.data, threads));
  return in_place ? RFR_OK : put_values(run, &l, format, x);
}

rfr_status rfi_fill_weight(rfr_run *run, const rfr_parameter *p, const rfr_tensor *x) {
  buffers b = {0};
  const rfr_status s = fill(run, p, &b, x);
  free_buffers(run, &b);
  return s;
}

static rfr_status start_weights(rfr_run *run) {
  const rfr_model_config *c = &run->settings->spec.model;
  const int n = c->adapter ? c->adapter->base_count : rfr_model_parameter_count(c);
  for (int i = 0; i < n; i++) {
    rfr_parameter p;
    rfr_tensor w;
    if (!rfi_is_here(run, i)) continue;
    RFI_TRY(rfr_model_parameter(c, i, &p));
    RFI_TRY(rfi_run_tensor(run, p.name, &w));
    RFI_TRY(rfi_fill_weight(run, &p, &w));
  }
  return RFR_OK;
}

/* In a pipeline the hash of a base combines those of all ranks. */
static rfr_status add_hashes(rfr_run *run, rfr_status s) {
  rfr_comm *c = run->options.comm;
  rfi_hash *all;
  if (run->settings->parallel.pipeline <= 1) return s;
  RFI_TRY(rfi_comm_agree(run->ctx, c, s));
  RFI_TRY(rfi_comm_collect(run->ctx, c, &run->base, sizeof run->base, (void **)&all));
  run->base = (rfi_hash){0};
  for (int r = 0; r < rfr_comm_size(c); r++) rfi_hash_add(&run->base, all[r]);
  rfi_free(run->ctx, all);
  return RFR_OK;
}

rfr_status rfi_load_weights(rfr_run *run, const char *model) {
  run->base = (rfi_hash){0};
  return add_hashes(run, model ? load_model(run, model) : start_weights(run));
}
