/* SPDX-License-Identifier: Apache-2.0
 *
 * Files of a run's folder that describe it for `refrain report`. Only a resume reads them back, to keep the sources of
 * run.json.
 */
#ifndef RFI_DESCRIBE_H
#define RFI_DESCRIBE_H

#include "train/run.h"

/* Writes run.json: machine, model and the source of each key; and plan.json: every buffer of a training step.
 * `config_path`: the path of config.yaml in the folder. */
rfr_status rfi_run_write_description(rfr_run *run, const char *config_path);

#endif
