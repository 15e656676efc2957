/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading the costs of a layer from JSON.
 */
#ifndef RFI_LAYER_COSTS_H
#define RFI_LAYER_COSTS_H

#include "base/json.h"
#include "refrain/schedule.h"

/* Whether a key at the top of a file is one of those of rfr_layer_costs. */
bool rfi_layer_costs_has_key(const char *key);
rfr_status rfi_layer_costs_read(const char *file, const json_t *root, rfr_layer_costs *out);

#endif
