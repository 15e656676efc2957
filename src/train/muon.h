/* SPDX-License-Identifier: Apache-2.0
 *
 * Muon updates matrices of linear layers and experts with their orthogonalized momentum; AdamW updates the rest.
 */
#ifndef RFI_MUON_H
#define RFI_MUON_H

#include "train/step_trace.h"

/* Whether Muon updates parameter i: a matrix of a linear layer or of experts. */
bool rfi_is_muon(const rfi_step_spec *s, int i);
/* The update of parameter i, without the learning rate, from its momentum u. */
rfr_value rfi_muon_direction(rfr_trace *t, const rfi_step_spec *s, int i, rfr_value u);

#endif
