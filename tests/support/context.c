/* SPDX-License-Identifier: Apache-2.0
 *
 * The context of a test; context.h has the rest.
 */
#include "support/context.h"

#include "core/rng.h"

rfr_ctx *ctx;

int rft_context_setup(void **state) {
  (void)state;
  return rfr_ctx_create(NULL, &ctx) == RFR_OK ? 0 : -1;
}

int rft_context_teardown(void **state) {
  (void)state;
  const int live = (int)rfr_ctx_get_stats(ctx).live_blocks;
  rfr_ctx_destroy(ctx);
  ctx = NULL;
  return live;
}

void rft_expect_ok(rfr_status s, const char *call, const char *file, int line) {
  if (s == RFR_OK) return;
  print_error("%s: %s\n", call, rfr_last_error()->message);
  _fail(file, line);
}

rfr_programs *rft_compile(const rfr_trace *t, const rfr_compile_options *o) {
  rfr_programs *p;
  OK(rfr_compile(ctx, 1, &t, NULL, o, &p));
  return p;
}

void rft_fill(const rfr_tensor *x, uint64_t seed) {
  float *to = x->data;
  for (int64_t i = 0; i < x->bytes / 4; i++)
    to[i] = (float)(rfi_draw4(rfi_stream_key(seed, 0), (uint64_t)i, 0, 0, 0).v[0] >> 8) / 8388608.0f - 1.0f;
}

void rft_fill_inputs(rfr_programs *p) {
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++)
    if (x.type.dtype == RFR_F32) rft_fill(&x, 17 + (uint64_t)i);
}

rfr_ctx *rft_one_thread(void) {
  rfr_ctx *made;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = 1;
  o.use_onednn = 0;
  assert_int_equal(rfr_ctx_create(&o, &made), RFR_OK);
  return made;
}
