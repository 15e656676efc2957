/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain diff: the differences of two runs. Its exit codes are those of diff: 0 equal, 1 different, 2 an error.
 */
#include "cli.h"
#include "refrain/report.h"

rfr_status cli_diff(cli *c) {
  enum { MOST_TENSORS = 20 };
  int different = 0;
  rfr_status s = cli_run_folders(c);
  if (s == RFR_OK)
    s = rfr_report_diff(c->ctx, c->operands[0], c->operands[1], c->json, c->all ? INT64_MAX : MOST_TENSORS, cli_write,
                        NULL, &different);
  if (s == RFR_OK) c->code = different;
  return s;
}
