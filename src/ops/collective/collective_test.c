/* SPDX-License-Identifier: Apache-2.0
 *
 * Collective ops over ranks that are threads: values and gradients, compared bit by bit, eager and replayed; their
 * order tokens when printed and parsed; passes that must not change them; and refusals.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exec/exec.h"
#include "support/context.h"
#include "support/ranks.h"
#include "support/text.h"

enum { D0 = 6, D1 = 5, MOST_RANKS = 3 };

static float data(int rank, int stream, int64_t i) {
  return (float)((i * 29 + rank * 101 + stream * 577) % 211) / 9.0f - 11.0f;
}

/* ---- values and gradients ---- */

typedef struct rank {
  int number, size;
  char error[256]; /* "": no error */
} rank;

static int64_t count(const rfr_tensor *x) { return rfi_count(&x->type); }

static rfr_trace *record(rfr_ctx *own, int size) {
  rfr_trace *t;
  if (rfr_trace_create(own, &t) != RFR_OK) return NULL;
  rfr_value x = rfr_input(t, "x", RFR_ROLE_TRAINABLE, RFR_F32, 2, ((int64_t[]){D0, D1}));
  rfr_value c = rfr_input(t, "c", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){D0 * size, D1}));
  rfr_value d = rfr_input(t, "d", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){D0, D1}));
  rfr_value all = rfr_all_gather(t, x, size);
  rfr_value part = rfr_reduce_scatter(t, rfr_mul(t, all, c), size);
  rfr_value sum = rfr_all_reduce(t, part, size);
  rfr_output(t, "all", all);
  rfr_output(t, "part", part);
  rfr_output(t, "sum", sum);
  rfr_output(t, "dx", rfr_gradient(t, rfr_sum(t, rfr_mul(t, sum, d), -1), x, RFR_F32));
  return t;
}

/* The reference has the data of all ranks. */
static float want_all(int64_t i) { return data((int)(i / (D0 * D1)), 0, i % (D0 * D1)); }
static float want_part(int rank, int size, int64_t i) {
  const int64_t at = rank * D0 * D1 + i;
  float total = want_all(at) * data(0, 1, at);
  for (int r = 1; r < size; r++) total += want_all(at) * data(r, 1, at);
  return total;
}
static float want_sum(int size, int64_t i) {
  float total = want_part(0, size, i);
  for (int r = 1; r < size; r++) total += want_part(r, size, i);
  return total;
}
/* The gradient of the sum of all losses: through all_reduce the sum of all d, through reduce_scatter the d of every
 * rank. */
static float want_dx(int rank, int size, int64_t i) {
  const int64_t at = rank * D0 * D1 + i;
  float dpart = data(0, 2, i), total = 0;
  for (int r = 1; r < size; r++) dpart += data(r, 2, i);
  for (int r = 0; r < size; r++) total = r == 0 ? dpart * data(0, 1, at) : total + dpart * data(r, 1, at);
  return total;
}

static void compare(rank *r, rfr_programs *p, const char *name, const char *how) {
  rfr_tensor y;
  if (r->error[0] || rfr_program_output(p, 0, name, &y) != RFR_OK) return;
  for (int64_t i = 0; i < count(&y); i++) {
    const float want = name[0] == 'a'   ? want_all(i)
                       : name[0] == 'p' ? want_part(r->number, r->size, i)
                       : name[0] == 's' ? want_sum(r->size, i)
                                        : want_dx(r->number, r->size, i);
    const float got = ((const float *)y.data)[i];
    if (memcmp(&got, &want, sizeof got) != 0)
      snprintf(r->error, sizeof r->error, "%s, %s[%lld]: %.9g, want %.9g", how, name, (long long)i, (double)got,
               (double)want);
  }
}

static void fill(rank *r, rfr_programs *p, const char *name, int stream) {
  rfr_tensor x;
  if (rfr_programs_tensor(p, name, &x) != RFR_OK) return;
  for (int64_t i = 0; i < count(&x); i++) ((float *)x.data)[i] = data(r->number, stream, i);
}

static rfr_status work(void *rank_of_test, int number, rfr_comm *comm, rfr_ctx *own) {
  rank *r = rank_of_test;
  r->number = number;
  static const char *const outputs[] = {"all", "part", "sum", "dx"};
  rfr_programs *p = NULL;
  rfr_compile_options o = rfr_compile_options_default();
  o.comm = comm;
  rfr_trace *t = record(own, r->size);
  if (!t) return RFR_NO_MEMORY;
  rfr_status s = rfr_compile(own, 1, (const rfr_trace *const *)&t, NULL, &o, &p);
  rfr_trace_destroy(t);
  if (s != RFR_OK) return s;
  fill(r, p, "x", 0), fill(r, p, "c", 1), fill(r, p, "d", 2);
  s = rfr_program_run(p, 0);
  for (int k = 0; k < 4 && s == RFR_OK; k++) compare(r, p, outputs[k], "eager");
  if (s == RFR_OK) s = rfr_program_capture(p, 0);
  for (int i = 0; i < 3 && s == RFR_OK; i++) s = rfr_program_replay(p, 0, NULL, 0);
  for (int k = 0; k < 4 && s == RFR_OK; k++) compare(r, p, outputs[k], "replay");
  rfr_programs_destroy(p);
  return s;
}

static void test_ranks(void **state) {
  (void)state;
  for (int size = 2; size <= MOST_RANKS; size++) {
    rank ranks[MOST_RANKS];
    for (int i = 0; i < size; i++) ranks[i] = (rank){.size = size};
    rft_run_ranks(size, ranks, sizeof *ranks, work);
    for (int i = 0; i < size; i++)
      if (ranks[i].error[0]) fail_msg("rank %d of %d: %s", i, size, ranks[i].error);
  }
}

/* Each rank sends part r to rank r. A second exchange sends the parts back, and so does the gradient. */
static rfr_status exchange(void *rank_of_test, int number, rfr_comm *comm, rfr_ctx *own) {
  rank *r = rank_of_test;
  rfr_programs *p = NULL;
  rfr_tensor there, back, dx;
  rfr_trace *t;
  rfr_compile_options o = rfr_compile_options_default();
  o.comm = comm;
  RFI_TRY(rfr_trace_create(own, &t));
  const int64_t shape[2] = {(int64_t)D0 * r->size, D1};
  const rfr_value x = rfr_input(t, "x", RFR_ROLE_TRAINABLE, RFR_F32, 2, shape);
  const rfr_value d = rfr_input(t, "d", RFR_ROLE_INPUT, RFR_F32, 2, shape), y = rfr_all_to_all(t, x, r->size);
  rfr_output(t, "there", y);
  rfr_output(t, "back", rfr_all_to_all(t, y, r->size));
  rfr_output(t, "dx", rfr_gradient(t, rfr_sum(t, rfr_mul(t, y, rfr_all_to_all(t, d, r->size)), -1), x, RFR_F32));
  rfr_status s = rfr_compile(own, 1, (const rfr_trace *const *)&t, NULL, &o, &p);
  rfr_trace_destroy(t);
  if (s == RFR_OK) {
    fill(r, p, "x", 0), fill(r, p, "d", 1);
    s = rfr_program_run(p, 0);
  }
  if (s == RFR_OK) s = rfr_program_output(p, 0, "there", &there);
  if (s == RFR_OK) s = rfr_program_output(p, 0, "back", &back);
  if (s == RFR_OK) s = rfr_program_output(p, 0, "dx", &dx);
  for (int64_t i = 0; s == RFR_OK && i < shape[0] * D1; i++) {
    const int from = (int)(i / (D0 * D1));
    if (((float *)there.data)[i] != data(from, 0, (int64_t)number * D0 * D1 + i % (D0 * D1)) ||
        ((float *)back.data)[i] != data(number, 0, i) || ((float *)dx.data)[i] != data(number, 1, i))
      snprintf(r->error, sizeof r->error, "all_to_all differs at element %lld", (long long)i);
  }
  rfr_programs_destroy(p);
  return s;
}

/* The number of rows that rank r sends to rank s; they are in two groups. */
static int32_t rows_to(int r, int s, int group) { return (r * 5 + s * 3 + group) % 4 + (r == 0 && s == 1) * D0; }

static int rows_between(int r, int s) {
  const int rows = rows_to(r, s, 0) + rows_to(r, s, 1);
  return rows < D0 ? rows : D0;
}

/* Parts of different sizes, which are on the device. The second exchange and the gradient send the rows back. */
static rfr_status exchange_rows(void *rank_of_test, int number, rfr_comm *comm, rfr_ctx *own) {
  rank *r = rank_of_test;
  rfr_programs *p = NULL;
  rfr_tensor x, counts, there, back, dx;
  rfr_trace *t;
  rfr_compile_options o = rfr_compile_options_default();
  o.comm = comm;
  RFI_TRY(rfr_trace_create(own, &t));
  const int64_t shape[2] = {(int64_t)D0 * r->size, D1}, groups = 2 * r->size;
  const rfr_value in = rfr_input(t, "x", RFR_ROLE_TRAINABLE, RFR_F32, 2, shape);
  const rfr_value sent = rfr_input(t, "sent", RFR_ROLE_INPUT, RFR_I32, 1, &groups);
  const rfr_value received = rfr_all_to_all(t, sent, r->size);
  const rfr_value y = rfr_all_to_all_rows(t, in, sent, received, r->size);
  rfr_output(t, "there", y);
  rfr_output(t, "back", rfr_all_to_all_rows(t, y, received, sent, r->size));
  rfr_output(t, "dx", rfr_gradient(t, rfr_sum(t, y, -1), in, RFR_F32));
  rfr_status s = rfr_compile(own, 1, (const rfr_trace *const *)&t, NULL, &o, &p);
  rfr_trace_destroy(t);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "x", &x);
  if (s == RFR_OK) s = rfr_programs_tensor(p, "sent", &counts);
  for (int64_t i = 0; s == RFR_OK && i < shape[0] * D1; i++) {
    const int to = (int)(i / (D0 * D1));
    ((float *)x.data)[i] = i % (D0 * D1) / D1 < rows_between(number, to) ? data(number, 0, i) : 0;
  }
  for (int i = 0; s == RFR_OK && i < groups; i++) ((int32_t *)counts.data)[i] = rows_to(number, i / 2, i % 2);
  if (s == RFR_OK) s = rfr_program_capture(p, 0);
  for (int i = 0; i < 2 && s == RFR_OK; i++) s = rfr_program_replay(p, 0, NULL, 0);
  if (s == RFR_OK) s = rfr_program_output(p, 0, "there", &there);
  if (s == RFR_OK) s = rfr_program_output(p, 0, "back", &back);
  if (s == RFR_OK) s = rfr_program_output(p, 0, "dx", &dx);
  for (int64_t i = 0; s == RFR_OK && i < shape[0] * D1; i++) {
    const int peer = (int)(i / (D0 * D1)), row = (int)(i % (D0 * D1) / D1);
    const int64_t theirs = (int64_t)number * D0 * D1 + i % (D0 * D1);
    const float came = row < rows_between(peer, number) ? data(peer, 0, theirs) : 0;
    const bool goes = row < rows_between(number, peer);
    if (((float *)there.data)[i] != came || ((float *)back.data)[i] != (goes ? data(number, 0, i) : 0) ||
        ((float *)dx.data)[i] != (goes ? 1.0f : 0))
      snprintf(r->error, sizeof r->error, "all_to_all_rows differs at element %lld", (long long)i);
  }
  rfr_programs_destroy(p);
  return s;
}

static void run_exchanges(rft_rank_work work_of_rank) {
  for (int size = 2; size <= MOST_RANKS; size++) {
    rank ranks[MOST_RANKS];
    for (int i = 0; i < size; i++) ranks[i] = (rank){.number = i, .size = size};
    rft_run_ranks(size, ranks, sizeof *ranks, work_of_rank);
    for (int i = 0; i < size; i++)
      if (ranks[i].error[0]) fail_msg("rank %d of %d: %s", i, size, ranks[i].error);
  }
}

static void test_exchange(void **state) {
  (void)state;
  run_exchanges(exchange);
  run_exchanges(exchange_rows);
}

/* ---- the trace ---- */

static rft_text text_of(const rfr_trace *t) {
  rft_text s = {0};
  rfr_print_options o = rfr_print_options_default();
  o.flat = 1;
  OK(rfr_trace_print(t, &o, rft_text_add, &s));
  return s;
}

static void test_text(void **state) {
  rfr_trace *t = record(ctx, 2), *back;
  (void)state;
  OK(rfr_trace_finish(t));
  rft_text text = text_of(t);
  assert_non_null(strstr(text.data, "all_gather(%0) ranks=2 phase=forward effects=collective at"));
  assert_non_null(strstr(text.data, "reduce_scatter(%4) ranks=2 phase=forward effects=collective token=0 at"));
  assert_non_null(strstr(text.data, "all_reduce(%5) ranks=2 phase=forward effects=collective token=2 at"));
  OK(rfr_trace_parse(ctx, "text", text.data, text.n, &back));
  assert_int_equal(rfr_trace_equal(t, back), 1);
  rfr_trace_destroy(back);
  char *token = strstr(text.data, "token=2");
  memcpy(token, "token=0", 7);
  assert_int_equal(rfr_trace_parse(ctx, "text", text.data, text.n, &back), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "token"));
  free(text.data);
  rfr_trace_destroy(t);
}

/* Two microbatches read views of one gathered weight. Neither the gathers nor their readers are merged or change
 * microbatch. */
static void test_passes(void **state) {
  rfr_trace *t, *pruned;
  rfi_report report = {.text = {.ctx = ctx}};
  const rfi_pass_options o = {.prune = true, .split_phases = true};
  int gathers = 0, negated = 0;
  (void)state;
  OK(rfr_trace_create(ctx, &t));
  rfr_value w = rfr_input(t, "w", RFR_ROLE_TRAINABLE, RFR_F32, 1, ((int64_t[]){D1}));
  for (int m = 0; m < 2; m++) {
    rfr_microbatch(t, m);
    rfr_output(t, m ? "b" : "a", rfr_scale(t, rfr_all_gather(t, w, 2), -1, RFR_NONE));
    rfr_all_reduce(t, w, 2); /* unused: a token operand does not keep an op alive */
  }
  OK(rfr_trace_finish(t));
  OK(rfi_pass_prune(t, &o, &report, &pruned));
  for (int i = 0; i < pruned->n_ops; i++) {
    const rfi_opr *op = &pruned->ops[i];
    assert_int_equal(op->phase, RFR_PHASE_FORWARD);
    gathers += op->def->code == RFI_OP_all_gather;
    negated += op->def->code == RFI_OP_scale;
  }
  assert_int_equal(gathers, 2);
  assert_int_equal(negated, 2);
  assert_int_equal(pruned->n_ops, 4);
  rfi_string_deinit(&report.text);
  rfr_trace_destroy(pruned);
  rfr_trace_destroy(t);
}

/* ---- what is refused ---- */

static void refused(rfr_status s, rfr_status want, const char *slug, const char *says) {
  assert_int_equal(s, want);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, says)) fail_msg("%s", rfr_last_error()->message);
}

static rfr_status shapes(rfr_dtype dtype, int64_t rows, int ranks, int op) {
  rfr_trace *t;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, dtype, 1, ((int64_t[]){rows}));
  rfr_output(t, "y",
             op == 0   ? rfr_all_gather(t, x, ranks)
             : op == 1 ? rfr_reduce_scatter(t, x, ranks)
                       : rfr_all_reduce(t, x, ranks));
  const rfr_status s = rfr_trace_finish(t);
  rfr_trace_destroy(t);
  return s;
}

static void test_refused(void **state) {
  rfr_programs *p;
  rfr_comm *comm[MOST_RANKS];
  rfr_compile_options o = rfr_compile_options_default();
  rfr_trace *t = record(ctx, 2);
  (void)state;
  OK(shapes(RFR_BF16, 6, 3, 1));
  refused(shapes(RFR_F32, 7, 3, 1), RFR_INVALID, "trace.shape", "x has 7 rows, which 3 ranks");
  refused(shapes(RFR_F32, 7, 0, 0), RFR_INVALID, "trace.shape", "ranks is 0");
  refused(shapes(RFR_I32, 6, 2, 2), RFR_INVALID, "trace.shape", "x");
  refused(shapes(RFR_F64, 6, 2, 1), RFR_INVALID, "trace.shape", "f32, bf16 or f16");
  refused(shapes(RFR_E2M1, 6, 2, 0), RFR_INVALID, "trace.shape", "smaller than a byte");
  refused(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p), RFR_INVALID, "dist.communicator",
          "all_gather over 2 ranks has no communicator");
  OK(rfr_comm_threads_create(ctx, 3, 0, comm));
  o.comm = comm[1];
  refused(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p), RFR_INVALID, "dist.communicator",
          "has a communicator of 3");
  for (int i = 0; i < 3; i++) rfr_comm_destroy(comm[i]);
  /* a rank that has left while a program runs */
  OK(rfr_comm_threads_create(ctx, 2, 0, comm));
  o.comm = comm[0];
  OK(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p));
  rfr_comm_destroy(comm[1]);
  refused(rfr_program_run(p, 0), RFR_IO, "dist.peer", "rank 1 has left");
  rfr_programs_destroy(p);
  rfr_comm_destroy(comm[0]);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(test_ranks),  rft_context_test(test_exchange), rft_context_test(test_text),
      rft_context_test(test_passes), rft_context_test(test_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
