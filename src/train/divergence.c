/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks whose states have diverged. They make the same updates with the same reduced gradients, so a difference is a
 * fault of a machine or of the program. A checkpoint would hide it, because it has the values of one rank. Pipeline
 * ranks have different parameters, so only ranks with the same stages are compared.
 */
#include "train/divergence.h"

#include <string.h>

#include "base/base.h"
#include "dist/agree.h"
#include "dist/comm.h"
#include "nn/nn.h"
#include "train/host.h"
#include "train/load_weights.h"
#include "train/parts.h"

static rfr_status hash_tensor(rfr_run *run, const rfr_tensor *x, rfi_hash *sum) {
  void *host;
  RFI_TRY(rfi_host_open(run, x, RFI_HOST_READ, &host));
  rfi_hash_add_tensor(sum, x->name, (uint64_t)x->type.dtype, host, (size_t)x->bytes);
  return rfi_host_close(run, x, RFI_HOST_READ, host, RFR_OK);
}

/* Hashes of the tensors that several ranks have in full. */
typedef struct held {
  rfi_hash common; /* common to all ranks */
  rfi_hash own;    /* common to ranks with the same stages of a pipeline */
  rfi_hash tied;   /* the tied embedding, common to the ranks of the first and the last stage */
} held;

static rfr_status hash_state(rfr_run *run, held *h) {
  const bool pipeline = run->settings->parallel.pipeline > 1;
  const rfi_step_spec *s = &run->settings->spec;
  rfr_parameter tied = {.name = ""};
  rfr_tensor x;
  *h = (held){{0}, {0}, {0}};
  RFI_TRY(hash_tensor(run, &run->block, &h->common));
  if (pipeline && s->model.tie_embeddings)
    RFI_TRY(rfr_model_parameter(&s->model, rfi_parameter_index(&s->model, RFI_PARAM_TOKENS, 0), &tied));
  for (int i = 0; rfi_run_tensor_at(run, i, &x) == RFR_OK; i++) {
    const rfi_kind kind = rfi_kind_of(run, &x);
    if ((kind == RFI_KIND_WEIGHT || kind == RFI_KIND_OPTIMIZER) && !rfi_is_part(run, &x))
      RFI_TRY(hash_tensor(run, &x, pipeline && rfi_of_parameter(&x) ? &h->own : &h->common));
    if (tied.name[0] && strcmp(x.name, tied.name) == 0) RFI_TRY(hash_tensor(run, &x, &h->tied));
  }
  return RFR_OK;
}

/* Whether two ranks agree in all tensors that both have. */
static bool agree(const rfr_run *run, const held *all, int a, int b) {
  static const rfi_hash none = {0};
  const rfi_settings *s = run->settings;
  const int data = s->parallel.data;
  if (!rfi_hash_equal(all[a].common, all[b].common)) return false;
  if (s->parallel.pipeline <= 1) return true;
  if (a / data == b / data && !rfi_hash_equal(all[a].own, all[b].own)) return false;
  return rfi_hash_equal(all[a].tied, none) || rfi_hash_equal(all[b].tied, none) ||
         rfi_hash_equal(all[a].tied, all[b].tied);
}

static int count_equal(const rfr_run *run, const held *all, int ranks, int rank) {
  int n = 0;
  for (int r = 0; r < ranks; r++) n += agree(run, all, r, rank);
  return n;
}

/* Whether rank r is at fault: of two ranks that disagree, the one that agrees with fewer other ranks; if equal, the
 * second. */
static bool at_fault(const rfr_run *run, const held *all, int ranks, int r, int other) {
  if (agree(run, all, r, other)) return false;
  const int mine = count_equal(run, all, ranks, r), theirs = count_equal(run, all, ranks, other);
  return theirs > mine || (theirs == mine && other < r);
}

static rfr_status compare(const rfr_run *run, const held *all, int ranks) {
  for (int r = 0; r < ranks; r++)
    for (int other = 0; other < ranks; other++)
      if (at_fault(run, all, ranks, r, other))
        return rfi_fail(RFI_E_DIST_DIVERGED, "rank %d differs after step %lld from %d of %d ranks", r,
                        (long long)run->step, count_equal(run, all, ranks, other), ranks);
  return RFR_OK;
}

rfr_status rfi_check_same(rfr_run *run) {
  rfr_comm *c = run->options.comm;
  const int ranks = rfr_comm_size(c);
  held mine;
  void *all;
  if (ranks < 2) return RFR_OK;
  RFI_TRY(rfi_comm_agree(run->ctx, c, hash_state(run, &mine)));
  RFI_TRY(rfi_comm_collect(run->ctx, c, &mine, sizeof mine, &all));
  const rfr_status s = compare(run, all, ranks);
  rfi_free(run->ctx, all);
  return s;
}
