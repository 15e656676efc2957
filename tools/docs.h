/* SPDX-License-Identifier: Apache-2.0
 *
 * The parts of make_docs. Each appends a page, or text for a block of a page. A part that fails prints the reason on
 * standard error.
 */
#ifndef DOCS_H
#define DOCS_H

#include "base/base.h"
#include "refrain/train.h"

/* Writes docs/limits.md; tries every row. */
rfr_status docs_limits(rfr_ctx *ctx, rfi_string *s);
/* Generates `page`: every block after a line <!-- shows ... --> is replaced. `root` is the source tree. */
rfr_status docs_renew(rfr_ctx *ctx, const char *root, const char *name, const char *page, rfi_string *s);
/* Output of `refrain schedule`: with 4 ranks and 8 microbatches; with PxMxV; for an order list; bubbles and slots of
 * all kinds. */
rfr_status docs_schedule_picture(rfr_ctx *ctx, const char *kind, rfi_string *s);
rfr_status docs_schedule_table(rfr_ctx *ctx, const char *kind, const char *size, rfi_string *s);
rfr_status docs_schedule_order(rfr_ctx *ctx, const char *order, rfi_string *s);
rfr_status docs_schedule_figures(rfr_ctx *ctx, rfi_string *s);
/* Output of `refrain plan --ranks` for docs/scale/MODEL.yaml: one line per layout; all output for "8" or
 * "8-pipeline". */
rfr_status docs_scale_figures(rfr_ctx *ctx, const char *root, const char *model, rfi_string *s);
rfr_status docs_scale_plan(rfr_ctx *ctx, const char *root, const char *model, const char *ranks, rfi_string *s);
/* docs/plan.svg, for examples/small.yaml. */
rfr_status docs_plan(rfr_ctx *ctx, const char *root, rfi_string *s);

#endif
