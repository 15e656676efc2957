/* SPDX-License-Identifier: Apache-2.0
 *
 * States of streams of random numbers. Each is a state input of i64 (4), like the step block; draws read its count of
 * attempted steps and its seed.
 */
#include <string.h>

#include "callable/graphed.h"
#include "core/rng.h"

enum { ATTEMPTED = 0, SEED = 2, BLOCK = 4 };

/* Reads the state of a random stream among the inputs of programs or callables. */
static rfr_status read_block(const rfi_executor *m, const char *stream, int64_t block[BLOCK], void **at) {
  char name[sizeof RFI_STREAM_PREFIX + RFI_STREAM_NAME];
  if (stream && strlen(stream) > RFI_STREAM_NAME) return rfi_fail(RFI_E_PROGRAM_NAME, "no stream \"%s\"", stream);
  rfi_snprintf(name, sizeof name, "%s%s", stream ? RFI_STREAM_PREFIX : "", stream ? stream : "step");
  const rfi_named *state = rfi_storage_find(&m->store, name);
  if (!state) return rfi_fail(RFI_E_PROGRAM_NAME, "there is no state \"%s\"", name);
  const rfr_tensor *x = &state->tensor;
  if (x->role != RFR_ROLE_STATE || x->type.dtype != RFR_I64 || x->type.rank != 1 || x->type.shape[0] != BLOCK)
    return rfi_fail(RFI_E_PROGRAM_NAME, "\"%s\" is not the state of a stream of random numbers", name);
  *at = x->data;
  return m->backend->copy(m->device, block, x->data, sizeof *block * BLOCK);
}

static rfr_status get(const rfi_executor *m, const char *stream, rfr_rng *out) {
  int64_t block[BLOCK];
  void *at;
  RFI_TRY(read_block(m, stream, block, &at));
  *out = (rfr_rng){(uint64_t)block[SEED], block[ATTEMPTED]};
  return RFR_OK;
}

/* Keeps the other counters of the step block. */
static rfr_status set(const rfi_executor *m, const char *stream, const rfr_rng *rng) {
  int64_t block[BLOCK];
  void *at;
  RFI_TRY(read_block(m, stream, block, &at));
  block[SEED] = (int64_t)rng->seed;
  block[ATTEMPTED] = rng->step;
  return m->backend->copy(m->device, at, block, sizeof block);
}

rfr_rng rfr_rng_fork(rfr_rng rng, uint64_t number) {
  return (rfr_rng){rfi_stream_key(rng.seed, rfi_stream_key(number, rfi_stream_id("fork"))), rng.step};
}

rfr_status rfr_programs_get_rng(rfr_programs *p, const char *stream, rfr_rng *out) {
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_rng"));
  RFI_TRY(rfi_check_allocated(p, "rfr_programs_get_rng"));
  return get(&p->m, stream, out);
}

rfr_status rfr_programs_set_rng(rfr_programs *p, const char *stream, const rfr_rng *rng) {
  RFI_TRY(rfi_check_handle(rng, "rfr_rng"));
  RFI_TRY(rfi_check_allocated(p, "rfr_programs_set_rng"));
  return set(&p->m, stream, rng);
}

rfr_status rfr_graphs_get_rng(rfr_graphs *g, const char *stream, rfr_rng *out) {
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_rng"));
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  return get(&g->m, stream, out);
}

rfr_status rfr_graphs_set_rng(rfr_graphs *g, const char *stream, const rfr_rng *rng) {
  RFI_TRY(rfi_check_handle(rng, "rfr_rng"));
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  if (g->state != RFI_STEP_NONE)
    return rfi_fail(RFI_E_GRAPHS_ORDER, "the stream \"%s\" is in use by the current step: end or abort the step first",
                    stream ? stream : "step");
  return set(&g->m, stream, rng);
}
