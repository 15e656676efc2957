/* SPDX-License-Identifier: Apache-2.0
 *
 * States of streams of random numbers. Each is a state input of i64 (4), like the step block; draws read its count of
 * attempted steps and its seed.
 */
#include <string.h>

#include "callable/graphed.h"
#include "core/rng.h"

enum { ATTEMPTED = 0, SEED = 2, BLOCK = 4 };

/* The name of a stream's state among the inputs. */
typedef struct input_name {
  char text[sizeof RFI_STREAM_PREFIX + RFI_STREAM_NAME];
} input_name;

static rfr_status name_of(const char *stream, input_name *out) {
  if (stream && strlen(stream) > RFI_STREAM_NAME) return rfi_fail(RFI_E_PROGRAM_NAME, "no stream \"%s\"", stream);
  rfi_snprintf(out->text, sizeof out->text, "%s%s", stream ? RFI_STREAM_PREFIX : "", stream ? stream : "step");
  return RFR_OK;
}

static rfr_status check_block(const rfr_tensor *x) {
  if (x->role == RFR_ROLE_STATE && x->type.dtype == RFR_I64 && x->type.rank == 1 && x->type.shape[0] == BLOCK)
    return RFR_OK;
  return rfi_fail(RFI_E_PROGRAM_NAME, "\"%s\" is not the state of a stream of random numbers", x->name);
}

static rfr_rng read_block(const int64_t *block) { return (rfr_rng){(uint64_t)block[SEED], block[ATTEMPTED]}; }
static void write_block(int64_t *block, const rfr_rng *rng) {
  block[SEED] = (int64_t)rng->seed;
  block[ATTEMPTED] = rng->step;
}

rfr_rng rfr_rng_fork(rfr_rng rng, uint64_t number) {
  return (rfr_rng){rfi_stream_key(rng.seed, rfi_stream_key(number, rfi_stream_id("fork"))), rng.step};
}

/* ---- of programs ---- */

static rfr_status find_in_programs(rfr_programs *p, const char *stream, rfr_tensor *x, int64_t *block) {
  input_name name;
  RFI_TRY(name_of(stream, &name));
  RFI_TRY(rfr_programs_tensor(p, name.text, x));
  RFI_TRY(check_block(x));
  return rfr_programs_read(p, x, block);
}

rfr_status rfr_programs_get_rng(rfr_programs *p, const char *stream, rfr_rng *out) {
  int64_t block[BLOCK] = {0};
  rfr_tensor x;
  RFI_TRY(rfi_check_handle(out, "rfr_rng"));
  *out = (rfr_rng){0};
  RFI_TRY(find_in_programs(p, stream, &x, block));
  *out = read_block(block);
  return RFR_OK;
}

rfr_status rfr_programs_set_rng(rfr_programs *p, const char *stream, const rfr_rng *rng) {
  int64_t block[BLOCK];
  rfr_tensor x;
  RFI_TRY(rfi_check_handle(rng, "rfr_rng"));
  RFI_TRY(find_in_programs(p, stream, &x, block));
  write_block(block, rng);
  return rfr_programs_write(p, &x, block);
}

/* ---- of callables ---- */

static rfr_status find_in_graphs(rfr_graphs *g, const char *stream, rfr_tensor *x, int64_t *block) {
  input_name name;
  RFI_TRY(name_of(stream, &name));
  RFI_TRY(rfr_graphs_tensor(g, name.text, x));
  RFI_TRY(check_block(x));
  return rfr_graphs_read(g, x, block);
}

rfr_status rfr_graphs_get_rng(rfr_graphs *g, const char *stream, rfr_rng *out) {
  int64_t block[BLOCK] = {0};
  rfr_tensor x;
  RFI_TRY(rfi_check_handle(out, "rfr_rng"));
  *out = (rfr_rng){0};
  RFI_TRY(find_in_graphs(g, stream, &x, block));
  *out = read_block(block);
  return RFR_OK;
}

rfr_status rfr_graphs_set_rng(rfr_graphs *g, const char *stream, const rfr_rng *rng) {
  int64_t block[BLOCK];
  rfr_tensor x;
  RFI_TRY(rfi_check_handle(rng, "rfr_rng"));
  RFI_TRY(find_in_graphs(g, stream, &x, block));
  if (g->state != RFI_STEP_NONE)
    return rfi_fail(RFI_E_GRAPHS_ORDER, "\"%s\" is in use by the current step: end or abort the step first", x.name);
  write_block(block, rng);
  return rfr_graphs_write(g, &x, block);
}
