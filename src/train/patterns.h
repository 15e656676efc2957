/* SPDX-License-Identifier: Apache-2.0
 *
 * The patterns of optimizer.frozen and optimizer.groups. A pattern matches a parameter by its own name, or if it
 * matches all tensors that a model folder stores for the parameter. A pattern that matches only some of them, as one
 * expert of a layer, does not match: a parameter has one role and one update.
 */
#ifndef RFI_PATTERNS_H
#define RFI_PATTERNS_H

#include <stdbool.h>
#include <stddef.h>

#include "refrain/nn.h"

bool rfi_pattern_matches(const rfr_model_config *c, const char *glob, const rfr_parameter *p);
/* For a pattern that matches no parameter: writes the nearest name, or why a name is excluded, as a clause. */
void rfi_pattern_miss(const rfr_model_config *c, const char *glob, char *out, size_t size);

#endif
