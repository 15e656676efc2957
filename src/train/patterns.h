/* SPDX-License-Identifier: Apache-2.0
 *
 * What the patterns of optimizer.frozen and optimizer.groups match: a parameter by its own name, or by the names of all
 * the tensors that a folder of the model has of it. One that matches a part of them, as of one expert in a layer, does
 * not: a parameter has one role and one update.
 */
#ifndef RFI_PATTERNS_H
#define RFI_PATTERNS_H

#include <stdbool.h>
#include <stddef.h>

#include "refrain/nn.h"

bool rfi_pattern_matches(const rfr_model_config *c, const char *glob, const rfr_parameter *p);
/* Of one that matches no parameter of the model: a half sentence that says what is the nearest to it. */
void rfi_pattern_miss(const rfr_model_config *c, const char *glob, char *out, size_t size);

#endif
