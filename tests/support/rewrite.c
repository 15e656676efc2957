/* SPDX-License-Identifier: Apache-2.0 */
#include "support/rewrite.h"

#include <stdlib.h>
#include <string.h>

#include "exec/exec.h"

rfr_programs *rft_run_filled(const rfr_trace *t, const rfr_compile_options *o) {
  rfr_programs *p = rft_compile(t, o);
  rft_fill_inputs(p);
  OK(rfr_programs_load(p));
  OK(rfr_program_run(p, 0));
  return p;
}

static void *bytes_of_output(rfr_programs *p, const char *name, int64_t *n) {
  rfr_tensor x;
  OK(rfr_program_output(p, 0, name, &x));
  void *bytes = malloc((size_t)x.bytes + 1);
  assert_non_null(bytes);
  OK(rfr_programs_read(p, &x, bytes));
  *n = x.bytes;
  return bytes;
}

bool rft_same_output(rfr_programs *p, rfr_programs *q, const char *name) {
  int64_t n, m;
  void *a = bytes_of_output(p, name, &n), *b = bytes_of_output(q, name, &m);
  const bool same = n == m && memcmp(a, b, (size_t)n) == 0;
  free(a), free(b);
  return same;
}

int rft_count_ops(const rfr_trace *t, rfi_opcode code, int phase) {
  int n = 0;
  assert_non_null(t);
  for (int i = 0; i < t->n_ops; i++) n += t->ops[i].def->code == code && (phase < 0 || t->ops[i].phase == phase);
  return n;
}

int rft_count_lowered(const rfr_programs *p, rfi_opcode code) {
  return rft_count_ops(rfr_program_trace(p, 0, "lower"), code, -1);
}
