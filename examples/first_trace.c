// SPDX-License-Identifier: Apache-2.0
// A first trace: fit y = x w to data by one captured step, replayed. Build with
//   cc first_trace.c $(pkg-config --cflags --libs refrain) -Wl,-rpath,$(pkg-config --variable=libdir refrain)
#include <refrain/refrain.h>
#include <stdio.h>

int main(void) {
  rfr_ctx *ctx;
  rfr_trace *t;
  rfr_programs *p;
  if (rfr_ctx_create(NULL, &ctx) || rfr_trace_create(ctx, &t)) return 1;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){4, 2}));
  rfr_value y = rfr_input(t, "y", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){4, 1}));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){1, 2}));
  rfr_value e = rfr_add(t, rfr_linear(t, x, w, RFR_NONE), rfr_scale(t, y, -1, RFR_NONE));
  rfr_value loss = rfr_mean(t, rfr_mul(t, e, e), -1);
  rfr_value lr = rfr_fill(t, 0.1, RFR_F32, 1, ((int64_t[]){1}));
  rfr_sgd(t, w, rfr_gradient(t, loss, w, RFR_F32), RFR_NONE, RFR_NONE, lr, RFR_NONE, RFR_NONE, 0, 0, 1);
  rfr_output(t, "loss", loss);
  if (rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, NULL, &p)) return puts(rfr_last_error()->message), 1;
  rfr_tensor X, Y, W, L;
  rfr_programs_tensor(p, "x", &X), rfr_programs_tensor(p, "y", &Y), rfr_programs_tensor(p, "w", &W);
  for (int i = 0; i < 8; i++) ((float *)X.data)[i] = (float)(i % 3) - 1;
  for (int i = 0; i < 4; i++) ((float *)Y.data)[i] = 2 * ((float *)X.data)[2 * i] - 3 * ((float *)X.data)[2 * i + 1];
  rfr_program_capture(p, 0);
  for (int i = 0; i < 100; i++) rfr_program_replay(p, 0, NULL, 0);
  rfr_program_output(p, 0, "loss", &L);
  printf("w = %.3f %.3f, loss %.1e\n", ((float *)W.data)[0], ((float *)W.data)[1], *(float *)L.data);
  rfr_programs_destroy(p), rfr_trace_destroy(t), rfr_ctx_destroy(ctx);
}
