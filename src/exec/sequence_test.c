/* SPDX-License-Identifier: Apache-2.0
 *
 * If the programs or callables of two ranks have different collectives, or the same ones in another order, every rank
 * gets an error before anything runs. The communicator stays usable.
 */
#include <stdio.h>
#include <string.h>

#include "exec/exec.h"
#include "refrain/graphs.h"
#include "refrain/ops.h"
#include "support/context.h"
#include "support/ranks.h"
#include "trace/trace.h"

enum { RANKS = 3, ODD = 1, MOST = 80 };

/* How the programs of rank ODD differ from the others. */
typedef enum difference { SAME, ORDER, FEWER, SIZE, TYPE, LATE, PROGRAM } difference;

typedef struct rank {
  difference how;
  bool eager, debug, at_once; /* compare without running */
  const char *says;           /* NULL: no error */
} rank;

static rfr_value operand(rfr_trace *t, const char *name, int64_t n, rfr_dtype dtype) {
  return rfr_input(t, name, RFR_ROLE_INPUT, dtype, 1, &n);
}

/* Counts its executions in the state "step". */
static rfr_trace *record(rfr_ctx *own, difference how, bool odd, int program) {
  char name[16];
  rfr_trace *t;
  if (rfr_trace_create(own, &t) != RFR_OK) return NULL;
  const rfr_value x = operand(t, "x", odd && how == SIZE ? 6 : 5, odd && how == TYPE ? RFR_BF16 : RFR_F32),
                  y = operand(t, "y", 7, RFR_F32);
  const bool swapped = odd && how == ORDER;
  for (int k = 0; k < 2; k++) {
    if ((k == 0) != swapped) rfr_output(t, "sum", rfr_all_reduce(t, x, RANKS));
    else if (!odd || how != FEWER) rfr_output(t, "all", rfr_all_gather(t, y, RANKS));
  }
  for (int i = 0; i < MOST && how == LATE; i++) {
    snprintf(name, sizeof name, "late%d", i);
    rfr_output(t, name, rfr_all_gather(t, odd && i == MOST - 1 ? x : y, RANKS));
  }
  if (program == 1) rfr_output(t, "again", rfr_all_reduce(t, y, RANKS));
  rfr_step_end(t, rfr_step_block(t), rfr_fill(t, 0, RFR_I32, 1, ((int64_t[]){1})));
  return rfr_trace_finish(t) == RFR_OK ? t : NULL;
}

static rfr_status expect(rfr_status s, const char *says) {
  if (!says) return s;
  if (s == RFR_MISMATCH && strcmp(rfr_last_error()->slug, "dist.mismatch") == 0 &&
      strstr(rfr_last_error()->message, says))
    return RFR_OK;
  return rfi_fail(RFI_E_INTERNAL, "expected \"%s\": %s", says, s == RFR_OK ? "no error" : rfr_last_error()->message);
}

static rfr_status start(rfr_programs *p, const rank *r, int program) {
  if (r->at_once) return rfi_programs_agree(p);
  if (r->eager) return rfr_program_run(p, program);
  RFI_TRY(rfr_program_capture(p, program));
  return rfr_program_replay(p, program, NULL, 0);
}

static rfr_status work(void *rank_of_test, int number, rfr_comm *comm, rfr_ctx *own) {
  const rank *r = rank_of_test;
  const bool odd = number == ODD;
  const int program = odd && r->how == PROGRAM ? 1 : 0;
  rfr_trace *t[2] = {record(own, r->how, odd, 0), record(own, r->how, odd, 1)};
  rfr_compile_options o = rfr_compile_options_default();
  rfr_programs *p = NULL;
  rfr_tensor step;
  float sum[RANKS], one = 1;
  o.comm = comm;
  o.debug = r->debug;
  rfr_status s = t[0] && t[1] ? rfr_compile(own, 2, (const rfr_trace *const *)t, NULL, &o, &p) : RFR_NO_MEMORY;
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  if (s == RFR_OK) s = expect(start(p, r, program), r->says);
  if (s == RFR_OK && !r->says) s = start(p, r, program);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "step", &step);
  if (s == RFR_OK && ((int64_t *)step.data)[0] != (r->says || r->at_once ? 0 : 2))
    s = rfi_fail(RFI_E_INTERNAL, "%lld steps ran", (long long)((int64_t *)step.data)[0]);
  rfr_programs_destroy(p);
  return s == RFR_OK ? rfr_comm_all_gather(comm, &one, sum, 1, RFR_F32) : s;
}

static void programs(void **state) {
  static const char *const says[] = {
      [SAME] = NULL,
      [ORDER] = "collective 0 is all_reduce of 5 f32 on rank 0 and all_gather of 7 f32 on rank 1",
      [FEWER] = "collective 1 is all_gather of 7 f32 on rank 0 and none on rank 1",
      [SIZE] = "collective 0 is all_reduce of 5 f32 on rank 0 and all_reduce of 6 f32 on rank 1",
      [TYPE] = "collective 0 is all_reduce of 5 f32 on rank 0 and all_reduce of 5 bf16 on rank 1",
      [LATE] = "the collectives of ranks 0 and 1 differ after the first 62",
      [PROGRAM] = "collective 2 is none on rank 0 and all_reduce of 7 f32 on rank 1"};
  (void)state;
  for (int how = SAME; how <= PROGRAM; how++)
    for (int way = 0; way < 4; way++) {
      rank ranks[RANKS];
      if (how == PROGRAM && way == 3) continue; /* all ranks have the same programs */
      for (int r = 0; r < RANKS; r++)
        ranks[r] = (rank){(difference)how, way == 1 || way == 2, way == 2, way == 3, says[how]};
      rft_run_ranks(RANKS, ranks, sizeof *ranks, work);
    }
}

/* ---- callables ---- */

/* Two sharded layers; rank ODD has them in the other order. */
static rfr_trace *record_layer(rfr_ctx *own, int64_t rows) {
  rfr_trace *t;
  if (rfr_trace_create(own, &t) != RFR_OK) return NULL;
  const rfr_value w = rfr_input(t, rows == 4 ? "w4" : "w6", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){rows, 5})),
                  x = rfr_input(t, "x", RFR_ROLE_INPUT_GRAD, RFR_F32, 2, ((int64_t[]){3, 5}));
  rfr_output(t, "y", rfr_linear(t, x, w, RFR_NONE));
  return rfr_trace_finish(t) == RFR_OK ? t : NULL;
}

static rfr_status work_callables(void *rank_of_test, int number, rfr_comm *comm, rfr_ctx *own) {
  const rank *r = rank_of_test;
  const bool swapped = r->says && number == ODD;
  rfr_trace *t[2] = {record_layer(own, swapped ? 600 : 4), record_layer(own, swapped ? 4 : 600)};
  rfr_callable c[2] = {rfr_callable_default(), rfr_callable_default()};
  rfr_graphs_options o = rfr_graphs_options_default();
  rfr_graphs *g = NULL;
  rfr_tensor y;
  const float x[15] = {0};
  const rfr_binding in = {"x", {.dtype = RFR_F32, .rank = 2, .shape = {3, 5}}, x};
  for (int i = 0; i < 2; i++) c[i].trace = t[i], c[i].sharded = 1;
  o.comm = comm;
  rfr_status s = t[0] && t[1] ? rfr_graphs_create(own, c, 2, &o, &g) : RFR_NO_MEMORY;
  for (int i = 0; i < 2; i++) rfr_trace_destroy(t[i]);
  if (s == RFR_OK) s = rfr_graphs_begin_step(g, NULL, 0);
  if (s == RFR_OK) s = expect(rfr_graphs_forward(g, 0, 0, &in, 1, &y, 1), r->says);
  if (s == RFR_OK) s = rfr_graphs_abort_step(g);
  rfr_graphs_destroy(g);
  return s;
}

static void callables(void **state) {
  (void)state;
  for (int same = 0; same < 2; same++) {
    rank ranks[RANKS];
    for (int r = 0; r < RANKS; r++) ranks[r] = (rank){.says = same ? NULL : "\"0\": collective 0 is all_gather of "};
    rft_run_ranks(RANKS, ranks, sizeof *ranks, work_callables);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(programs), rft_context_test(callables)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
