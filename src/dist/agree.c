/* SPDX-License-Identifier: Apache-2.0
 *
 * One verdict of all ranks. They run one build, so an error is sent as its row of the table.
 */
#include "dist/agree.h"

#include <stdio.h>
#include <string.h>

#include "dist/comm.h"

typedef struct verdict {
  int32_t row;
  char message[1024]; /* with file and line */
} verdict;

static int32_t find_row(const char *slug) {
  rfr_error row;
  for (int i = 0; rfr_error_row(i, &row); i++)
    if (strcmp(row.slug, slug) == 0) return i;
  return RFI_E_INTERNAL;
}

static void describe(rfr_status s, verdict *v) {
  const rfr_error *e = rfr_last_error();
  *v = (verdict){0};
  if (s == RFR_OK) return;
  v->row = find_row(e->slug);
  snprintf(v->message, sizeof v->message, "%s", e->message);
}


rfr_status rfi_comm_agree(rfr_ctx *ctx, rfr_comm *comm, rfr_status s) {
  const int ranks = rfr_comm_size(comm), own = rfr_comm_rank(comm);
  int first = 0;
  verdict mine, *all = NULL;
  bool *failed;
  if (ranks < 2) return s;
  describe(s, &mine);
  RFI_TRY(RFI_ALLOC(ctx, (size_t)ranks * sizeof *failed, &failed));
  const bool flag = s != RFR_OK;
  rfr_status sent = rfi_comm_exchange(comm, &flag, sizeof flag, failed);
  while (sent == RFR_OK && first < ranks && !failed[first]) first++;
  rfi_free(ctx, failed);
  if (sent == RFR_OK && first == ranks) return RFR_OK;
  if (sent == RFR_OK) sent = RFI_ALLOC(ctx, (size_t)ranks * sizeof *all, &all);
  if (sent == RFR_OK) sent = rfi_comm_exchange(comm, &mine, sizeof mine, all);
  if (sent == RFR_OK && first != own) s = rfi_fail((rfi_error)all[first].row, "rank %d: %s", first, all[first].message);
  rfi_free(ctx, all);
  if (sent == RFR_OK || s == RFR_OK) return sent == RFR_OK ? s : sent;
  return rfi_fail((rfi_error)mine.row, "%s", mine.message); /* it comes before that of the exchange */
}
