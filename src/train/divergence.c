/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks whose states have diverged. They make the same updates with the same reduced gradients, so a difference is a
 * fault of a machine or of the program, and a checkpoint would hide it: it has the values of one rank.
 */
#include "train/divergence.h"

#include "base/base.h"
#include "dist/agree.h"
#include "dist/comm.h"
#include "train/host.h"
#include "train/load_weights.h"
#include "train/parts.h"

static rfr_status hash_tensor(rfr_run *run, const rfr_tensor *x, rfi_hash *sum) {
  void *host;
  RFI_TRY(rfi_host_open(run, x, RFI_HOST_READ, &host));
  rfi_hash_add_tensor(sum, x->name, (uint64_t)x->type.dtype, host, (size_t)x->bytes);
  return rfi_host_close(run, x, RFI_HOST_READ, host, RFR_OK);
}

static rfr_status hash_state(rfr_run *run, rfi_hash *sum) {
  rfr_tensor x;
  *sum = (rfi_hash){0};
  RFI_TRY(hash_tensor(run, &run->block, sum));
  for (int i = 0; rfi_run_tensor_at(run, i, &x) == RFR_OK; i++) {
    const rfi_kind kind = rfi_kind_of(run, &x);
    if ((kind == RFI_KIND_WEIGHT || kind == RFI_KIND_OPTIMIZER) && !rfi_is_part(run, &x))
      RFI_TRY(hash_tensor(run, &x, sum));
  }
  return RFR_OK;
}

static int count_equal(const rfi_hash *all, int ranks, int rank) {
  int n = 0;
  for (int r = 0; r < ranks; r++) n += rfi_hash_equal(all[r], all[rank]);
  return n;
}

static rfr_status compare(const rfr_run *run, const rfi_hash *all, int ranks) {
  int most = 0; /* the lowest rank of the largest group */
  for (int r = 1; r < ranks; r++)
    if (count_equal(all, ranks, r) > count_equal(all, ranks, most)) most = r;
  for (int r = 0; r < ranks; r++)
    if (!rfi_hash_equal(all[r], all[most]))
      return rfi_fail(RFI_E_DIST_DIVERGED, "rank %d has other values after step %lld than %d of %d ranks", r,
                      (long long)run->step, count_equal(all, ranks, most), ranks);
  return RFR_OK;
}

rfr_status rfi_check_same(rfr_run *run) {
  rfr_comm *c = run->options.comm;
  const int ranks = rfr_comm_size(c);
  rfi_hash mine;
  void *all;
  if (ranks < 2) return RFR_OK;
  RFI_TRY(rfi_comm_agree(run->ctx, c, hash_state(run, &mine)));
  RFI_TRY(rfi_comm_collect(run->ctx, c, &mine, sizeof mine, &all));
  const rfr_status s = compare(run, all, ranks);
  rfi_free(run->ctx, all);
  return s;
}
