/* SPDX-License-Identifier: Apache-2.0
 *
 * The times of a pipeline's stages, compared with the simulator's.
 */
#ifndef PROFILE_STAGES_H
#define PROFILE_STAGES_H

#include "cli.h"

/* All ranks call it together; rank 0 prints, and writes --write-costs. */
rfr_status cli_profile_stages(cli *c, rfr_run *run);

#endif
