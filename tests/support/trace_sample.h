/* SPDX-License-Identifier: Apache-2.0
 *
 * A trace with every construct of the text format, and its text.
 */
#ifndef RFT_TRACE_SAMPLE_H
#define RFT_TRACE_SAMPLE_H

#include "support/context.h"
#include "support/text.h"

/* Two microbatches of a tied embedding model with an optimizer: views, versions, effects, tokens, names that need
 * quoting, absent operands, dead results. */
rfr_trace *rft_trace_sample(void);
/* Replaces the text by the printed trace. */
void rft_trace_print(const rfr_trace *t, int flat, rft_text *out);

#endif
