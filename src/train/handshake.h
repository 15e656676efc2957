/* SPDX-License-Identifier: Apache-2.0
 *
 * Agreement of the ranks of a run. With one rank it returns `so_far`.
 */
#ifndef RFI_HANDSHAKE_H
#define RFI_HANDSHAKE_H

#include "train/run.h"

/* Every rank calls this once while it opens a run, even if opening has failed: after compiling, and before the folder
 * is changed. `checkpoint`: the step from which the rank continues, -1: none. All ranks get the error of the lowest
 * rank that failed. Errors: dist.run, which names the rank and the difference. */
rfr_status rfi_handshake(rfr_run *run, int64_t checkpoint, rfr_status so_far);

#endif
