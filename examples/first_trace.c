/* SPDX-License-Identifier: Apache-2.0
 *
 * A first trace: records a program, checks it and prints it. Nothing is computed: a trace
 * is what will be computed, as data.
 */
#include <stdio.h>

#include "refrain/ctx.h"
#include "refrain/ops.h"

static void write_text(const char *text, size_t n, void *user) { fwrite(text, 1, n, (FILE *)user); }

static int failed(void) {
  fprintf(stderr, "%s\n%s\n", rfr_last_error()->message, rfr_last_error()->next);
  return 1;
}

int main(void) {
  rfr_ctx *ctx;
  rfr_trace *t;
  if (rfr_ctx_create(NULL, &ctx) != RFR_OK || rfr_trace_create(ctx, &t) != RFR_OK) return failed();

  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){8, 4}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){3, 4}));
  rfr_output(t, "y", rfr_linear(t, x, w, RFR_NONE));

  if (rfr_trace_finish(t) != RFR_OK || rfr_trace_print(t, NULL, write_text, stdout) != RFR_OK) return failed();
  rfr_trace_destroy(t);
  rfr_ctx_destroy(ctx);
  return 0;
}
