/* SPDX-License-Identifier: Apache-2.0
 *
 * Saves a checkpoint. Rank 0 writes the small files and, if every rank has all tensors, those of the tensors too. If
 * the ranks hold shards, or the tensors of their stages, each rank writes them to its own files; a tensor that several
 * ranks have is written by one of them. So no rank holds more than one shard in addition to its state.
 */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "data/safetensors.h"
#include "dist/agree.h"
#include "model/hf.h"
#include "train/divergence.h"
#include "train/events.h"
#include "train/host.h"
#include "train/load_weights.h"
#include "train/parts.h"
#include "train/state.h"
#include "train/state_adapter.h"
#include "train/state_check.h"
#include "train/state_json.h"

#define SLOW_DISK 16e6 /* minimum speed in bytes per second */

/* A folder stores each expert's weights as separate tensors, in the same order as here. */
static int pieces_of(const rfr_tensor *x, rfi_kind which) {
  return which == RFI_KIND_WEIGHT ? rfi_hf_pieces(x->name, &x->type) : 1;
}

static rfr_status diverged(const rfr_run *run, const rfr_tensor *x, const char *wrong) {
  if (!wrong) return RFR_OK;
  return rfi_fail(RFI_E_RUN_DIVERGED, "step %lld: %s has %s: no checkpoint is written%s%s", (long long)run->step,
                  x->name, wrong, *run->checkpoint ? "; the last good one is " : "", run->checkpoint);
}

rfr_status rfi_state_check_finite(const rfr_run *run, const rfr_tensor *x, const void *host) {
  return diverged(run, x, rfi_state_wrong(run, x, host));
}

static void describe(const rfr_run *run, const rfr_tensor *x, rfi_kind which, int piece, rfi_hf_tensor *name,
                     rfi_safetensors_entry *entry) {
  *entry = (rfi_safetensors_entry){.name = x->name, .dtype = x->type.dtype, .rank = x->type.rank};
  for (int d = 0; d < x->type.rank; d++) entry->shape[d] = x->type.shape[d];
  if (which != RFI_KIND_WEIGHT) return;
  rfi_hf_piece(&run->settings->spec.model, x->name, &x->type, piece, name);
  entry->name = name->name;
  entry->rank = name->rank;
  for (int d = 0; d < name->rank; d++) entry->shape[d] = name->shape[d];
}

/* ---- files written by rank 0 ---- */

static rfr_status save_all(rfr_run *run, rfi_checkpoint_writer *w, const char *name, rfi_kind which) {
  rfr_status s;
  rfi_file *file;
  rfr_tensor x;
  int n = 0, total = 0, pieces = 0;
  rfi_safetensors_entry *entries = NULL;
  rfi_hf_tensor *names = NULL;
  for (; rfi_run_tensor_at(run, total, &x) == RFR_OK; total++)
    if (rfi_kind_of(run, &x) == which) pieces += pieces_of(&x, which);
  RFI_TRY(RFI_ALLOC(run->ctx, ((size_t)pieces + 1) * sizeof *entries, &entries));
  RFI_GOTO(RFI_ALLOC(run->ctx, ((size_t)pieces + 1) * sizeof *names, &names));
  for (int i = 0; i < total; i++) {
    RFI_GOTO(rfi_run_tensor_at(run, i, &x));
    for (int k = 0; rfi_kind_of(run, &x) == which && k < pieces_of(&x, which); k++, n++)
      describe(run, &x, which, k, &names[n], &entries[n]);
  }
  RFI_GOTO(rfi_checkpoint_file(w, name, &file));
  RFI_GOTO(rfi_safetensors_write_header(run->ctx, file, entries, n, NULL, 0, NULL));
  for (int i = 0; i < total; i++) {
    RFI_GOTO(rfi_run_tensor_at(run, i, &x));
    if (rfi_kind_of(run, &x) != which) continue;
    void *host;
    RFI_GOTO(rfi_host_open(run, &x, RFI_HOST_READ, &host));
    s = rfi_state_check_finite(run, &x, host);
    if (s == RFR_OK) s = rfi_file_append(file, host, (size_t)x.bytes);
    RFI_GOTO(rfi_host_close(run, &x, RFI_HOST_READ, host, s));
  }
  s = RFR_OK;
fail:
  rfi_free(run->ctx, entries);
  rfi_free(run->ctx, names);
  return s;
}

/* ---- files written by each rank ---- */

typedef struct part_list {
  rfi_safetensors_part *items;
  rfi_hf_tensor *names;
  int n;
} part_list;

/* The byte ranges of a tensor that this rank writes; *own: the tensor that contains them. */
static rfr_status find_ranges(const rfr_run *run, const rfr_tensor *x, rfr_tensor *own,
                              rfi_part_range range[RFI_PART_RANGES], int *n) {
  if (rfi_is_part(run, x)) return rfi_part_ranges(run, x, own, range, n);
  *own = *x;
  *n = rfi_saves(run, x);
  range[0] = (rfi_part_range){.bytes = x->bytes};
  return RFR_OK;
}

/* Splits a range where a tensor of the folder ends. */
static rfr_status list_parts(const rfr_run *run, const rfr_tensor *x, rfi_kind which, part_list *list) {
  const int64_t size = rfr_dtype_bits(x->type.dtype) / 8, each = x->bytes / pieces_of(x, which);
  rfi_part_range range[RFI_PART_RANGES];
  rfr_tensor own;
  int n;
  RFI_TRY(find_ranges(run, x, &own, range, &n));
  for (int i = 0; i < n; i++) {
    const int64_t end = range[i].at + range[i].bytes + range[i].zeros;
    for (int64_t at = range[i].at, next; at < end; at = next, list->n++) {
      const int64_t piece = at / each;
      rfi_safetensors_part *p = &list->items[list->n];
      next = (piece + 1) * each < end ? (piece + 1) * each : end;
      describe(run, x, which, (int)piece, &list->names[list->n], &p->full);
      p->first = (at - piece * each) / size;
      p->count = (next - at) / size;
    }
  }
  return RFR_OK;
}

static rfr_status append_parts(rfr_run *run, const rfr_tensor *x, rfi_file *file) {
  static const char zeros[RFI_PART_ZEROS];
  rfi_part_range range[RFI_PART_RANGES];
  rfr_tensor own;
  int n;
  char *values;
  RFI_TRY(find_ranges(run, x, &own, range, &n));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)own.bytes + 1, &values));
  rfr_status s = n > 0 ? rfr_programs_read(run->programs, &own, values) : RFR_OK;
  if (s == RFR_OK && n > 0)
    s = diverged(run, x, rfi_is_part(run, x) ? rfi_part_wrong(&own, values) : rfi_state_wrong(run, x, values));
  for (int i = 0; i < n && s == RFR_OK; i++) {
    s = rfi_file_append(file, values + range[i].own, (size_t)range[i].bytes);
    if (s == RFR_OK) s = rfi_file_append(file, zeros, (size_t)range[i].zeros);
  }
  rfi_free(run->ctx, values);
  return s;
}

static rfr_status save_parts(rfr_run *run, rfi_checkpoint_writer *w, const char *name, rfi_kind which) {
  rfr_status s;
  rfi_file *file;
  rfr_tensor x;
  size_t most = 1;
  part_list list = {0};
  for (int i = 0; rfi_run_tensor_at(run, i, &x) == RFR_OK; i++)
    if (rfi_kind_of(run, &x) == which) most += (size_t)pieces_of(&x, which) + RFI_PART_RANGES;
  RFI_TRY(RFI_ALLOC(run->ctx, most * sizeof *list.items, &list.items));
  RFI_GOTO(RFI_ALLOC(run->ctx, most * sizeof *list.names, &list.names));
  for (int i = 0; rfi_run_tensor_at(run, i, &x) == RFR_OK; i++)
    if (rfi_kind_of(run, &x) == which) RFI_GOTO(list_parts(run, &x, which, &list));
  RFI_GOTO(rfi_checkpoint_file(w, name, &file));
  RFI_GOTO(rfi_safetensors_write_parts_header(run->ctx, file, list.items, list.n));
  for (int i = 0; rfi_run_tensor_at(run, i, &x) == RFR_OK; i++)
    if (rfi_kind_of(run, &x) == which) RFI_GOTO(append_parts(run, &x, file));
  s = RFR_OK;
fail:
  rfi_free(run->ctx, list.items);
  rfi_free(run->ctx, list.names);
  return s;
}

/* ---- a checkpoint ---- */

/* Saves tensors of a kind to KIND.safetensors, or to one file per rank. */
static rfr_status save_tensors(rfr_run *run, rfi_checkpoint_writer *w, const char *kind, rfi_kind which) {
  const rfi_parallel *p = &run->settings->parallel;
  const bool pipeline = p->pipeline > 1;
  char name[RFI_PART_FILE];
  if (pipeline && run->settings->spec.rank > 0) return RFR_OK; /* the first data-parallel rank saves these stages */
  if (rfi_ranks_save(run)) {
    rfi_safetensors_part_file(name, kind, pipeline ? run->settings->spec.pipeline.rank : p->rank,
                              pipeline ? p->pipeline : p->ranks);
    return save_parts(run, w, name, which);
  }
  snprintf(name, sizeof name, "%s.safetensors", kind);
  return p->rank == 0 ? save_all(run, w, name, which) : RFR_OK;
}

static rfr_status add_state(rfr_run *run, rfi_checkpoint_writer *w) {
  rfi_state_json state;
  rfi_string text = {.ctx = run->ctx};
  RFI_TRY(rfi_state_describe(run, &state));
  rfr_status s = rfi_state_json_print(&state, &text);
  if (s == RFR_OK) s = rfi_checkpoint_add(w, "state.json", text.data, text.n);
  rfi_string_deinit(&text);
  rfi_state_json_deinit(&state);
  return s;
}

/* The number of parameter elements that a checkpoint stores: of all ranks, or of this one. */
static double count_parameters(const rfr_run *run, bool here) {
  const rfi_step_spec *s = &run->settings->spec;
  double n = 0;
  for (int i = 0; i < rfr_model_parameter_count(&s->model); i++) {
    rfr_parameter p;
    double one = 1;
    if ((here && !rfi_is_here(run, i)) || (run->settings->adapter && rfi_step_rule(s, i).frozen)) continue;
    if (rfr_model_parameter(&s->model, i, &p) != RFR_OK) continue;
    for (int d = 0; d < p.rank; d++) one *= (double)p.shape[d];
    n += one;
  }
  return n;
}

/* A rank of a pipeline knows only its own tensors, so it assumes that the others need as many bytes per element. */
int64_t rfi_state_bytes(const rfr_run *run) {
  int64_t bytes = 0;
  rfr_tensor x;
  for (int i = 0; rfi_run_tensor_at(run, i, &x) == RFR_OK; i++)
    if (rfi_kind_of(run, &x) == RFI_KIND_WEIGHT || rfi_kind_of(run, &x) == RFI_KIND_OPTIMIZER) bytes += x.bytes;
  if (run->settings->parallel.pipeline <= 1) return bytes;
  const double here = count_parameters(run, true);
  return here > 0 ? (int64_t)((double)bytes / here * count_parameters(run, false)) : bytes;
}

static rfr_status write_files(rfr_run *run, rfi_checkpoint_writer *w) {
  const rfi_settings *settings = run->settings;
  const bool leads = settings->parallel.rank == 0;
  if (settings->adapter) {
    RFI_TRY(rfi_adapter_state_save(run, w));
  } else {
    if (leads) RFI_TRY(rfi_hf_save(run->ctx, &settings->spec.model, &settings->notes, w));
    RFI_TRY(save_tensors(run, w, "model", RFI_KIND_WEIGHT));
  }
  RFI_TRY(save_tensors(run, w, "optimizer", RFI_KIND_OPTIMIZER));
  return leads ? add_state(run, w) : RFR_OK;
}

static rfr_status save(rfr_run *run) {
  rfi_checkpoint_writer *w;
  rfr_comm *comm = run->options.comm;
  RFI_TRY(rfi_comm_agree(run->ctx, comm, rfi_state_prepare(run, false)));
  RFI_TRY(rfi_check_same(run));
  const double start = rfi_now();
  const bool leads = run->settings->parallel.rank == 0;
  RFI_TRY(rfi_checkpoint_begin(run->ctx, comm, run->folder, run->step, &w));
  RFI_TRY(rfi_checkpoint_finish(w, write_files(run, w)));
  snprintf(run->checkpoint, sizeof run->checkpoint, "%s/step-%06lld", run->folder, (long long)run->step);
  if (leads)
    rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_CHECKPOINT,
                                   .step = run->step,
                                   .message = run->checkpoint,
                                   .seconds = rfi_now() - start});
  const rfr_status s = leads ? rfi_checkpoint_retain(run->ctx, run->folder, run->settings->keep) : RFR_OK;
  return rfi_comm_agree(run->ctx, comm, s);
}

rfr_status rfi_state_save(rfr_run *run) {
  rfr_comm *comm = rfr_comm_size(run->options.comm) > 1 ? run->options.comm : NULL;
  const double timeout = run->settings->parallel.timeout;
  if (!run->folder) return rfi_fail(RFI_E_ARGUMENT, "the run was opened without a folder");
  if (!run->block.data) return rfi_fail(RFI_E_ARGUMENT, "the run was opened for reading");
  /* Ranks write at different speeds, and without shards one of them writes everything. */
  if (comm) RFI_TRY(rfr_comm_set_timeout(comm, timeout + (double)run->checkpoint_bytes / SLOW_DISK));
  RFI_TRY(save(run));
  return comm ? rfr_comm_set_timeout(comm, timeout) : RFR_OK;
}

rfr_status rfr_run_save(rfr_run *run) {
  RFI_TRY(rfi_check_handle(run, "rfr_run"));
  return rfi_state_save(run);
}
