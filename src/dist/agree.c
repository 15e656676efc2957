/* SPDX-License-Identifier: Apache-2.0 */
#include "dist/agree.h"

#include <stdio.h>
#include <string.h>

#include "dist/comm.h"

typedef struct verdict {
  int32_t failed;
  char slug[48], message[1280];
} verdict;

static rfr_status find_failure(const verdict *all, int ranks) {
  for (int r = 0; r < ranks; r++)
    if (all[r].failed) return rfi_fail_slug(all[r].slug, "rank %d: %s", r, all[r].message);
  return RFR_OK;
}

rfr_status rfi_comm_agree(rfr_ctx *ctx, rfr_comm *comm, rfr_status s) {
  const int ranks = rfr_comm_size(comm);
  verdict mine = {.failed = s != RFR_OK};
  void *all = NULL;
  if (ranks < 2) return s;
  if (s != RFR_OK) {
    snprintf(mine.slug, sizeof mine.slug, "%s", rfr_last_error()->slug);
    snprintf(mine.message, sizeof mine.message, "%s", rfr_last_error()->message);
  }
  const rfr_status sent = rfi_comm_collect(ctx, comm, &mine, sizeof mine, &all);
  if (sent == RFR_OK) s = find_failure(all, ranks);
  /* this rank's own error takes precedence over a failed exchange */
  else if (mine.failed) s = rfi_fail_slug(mine.slug, "%s", mine.message);
  else s = sent;
  rfi_free(ctx, all);
  return s;
}
