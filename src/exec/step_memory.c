/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that programs and graphs use one at a time. All users belong to one context, and so to one device; any of them
 * may allocate and free the memory. When a user begins, the work of the previous user is complete or in the same
 * stream.
 */
#include "exec/step_memory.h"

#include "base/base.h"
#include "exec/exec.h"

rfr_status rfr_step_memory_create(rfr_ctx *ctx, int64_t bytes, rfr_step_memory **out) {
  RFI_TRY(RFI_CHECK_OUT(out, "rfr_step_memory *"));
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (bytes < 0 || bytes > INT64_MAX / 2)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_step_memory_create: %lld bytes", (long long)bytes);
  RFI_TRY(RFI_ALLOC(ctx, sizeof **out, out));
  **out = (rfr_step_memory){.ctx = ctx, .least = bytes, .bytes = bytes};
  return RFR_OK;
}

void rfr_step_memory_destroy(rfr_step_memory *s) {
  if (!s) return;
  s->destroyed = true;
  if (s->users == 0) rfi_free(s->ctx, s);
}

int64_t rfr_step_memory_bytes(const rfr_step_memory *s) {
  return rfi_check_handle(s, "rfr_step_memory") == RFR_OK ? s->bytes : -1;
}

rfr_status rfi_step_memory_enter(rfr_step_memory *s, rfi_executor *m) {
  if (!s) return RFR_OK;
  if (s->ctx != m->ctx)
    return rfi_fail(RFI_E_ARGUMENT, "the step memory belongs to another context: create it in this one");
  m->layout.step = s;
  s->users++;
  return RFR_OK;
}

rfr_status rfi_step_memory_reserve(const rfi_executor *m) {
  rfr_step_memory *s = m->layout.step;
  const int64_t bytes = rfi_layout_step_bytes(&m->layout);
  if (!s || bytes <= s->bytes) return RFR_OK;
  if (s->data)
    return rfi_fail(RFI_E_PLAN_OVER_BUDGET,
                    "the plan needs %lld bytes of step memory, but %lld are allocated: create the largest user first, "
                    "or pass the bytes to rfr_step_memory_create",
                    (long long)bytes, (long long)s->bytes);
  s->bytes = bytes;
  return RFR_OK;
}

/* Waits for the fill, because the next user may start on another stream. */
rfr_status rfi_step_memory_allocate(const rfi_executor *m) {
  rfr_step_memory *s = m->layout.step;
  if (!s || s->data) return RFR_OK;
  const size_t bytes = (size_t)(s->bytes + m->backend->guard);
  const rfr_status status = m->backend->alloc(m->device, RFI_MEMORY_STEP, bytes, (void **)&s->data);
  if (status == RFR_NO_MEMORY) rfi_fail_prefix("step memory of %lld bytes: ", (long long)s->bytes);
  RFI_TRY(status);
  RFI_TRY(m->backend->fill(m->device, s->data, RFI_PATTERN, bytes));
  return m->backend->wait(m->device);
}

/* Refuses work that could run concurrently with the holder's. */
static rfr_status check_idle(const rfr_step_memory *s, const rfi_executor *m) {
  const rfi_executor *holder = s->holder;
  bool idle = true;
  if (!holder || holder == m) return RFR_OK;
  if (s->busy)
    return rfi_fail(RFI_E_STEP_MEMORY, "step memory is in use: a step of graphs that share it has begun, or a program "
                                       "runs between its hooks; end or abort that step first");
  if (rfi_executor_stream(holder) != rfi_executor_stream(m)) RFI_TRY(holder->backend->poll(holder->device, &idle));
  if (idle) return RFR_OK;
  return rfi_fail(RFI_E_STEP_MEMORY, "step memory is in use: work of its last user may still run in another stream; "
                                     "wait for it, or use one stream (rfr_graphs_set_stream)");
}

rfr_status rfi_step_memory_take(const rfi_executor *m, bool busy) {
  rfr_step_memory *s = m->layout.step;
  if (!s) return RFR_OK;
  RFI_TRY(check_idle(s, m));
  s->holder = m;
  s->busy = busy;
  return RFR_OK;
}

void rfi_step_memory_release(const rfi_executor *m) {
  if (m->layout.step && m->layout.step->holder == m) m->layout.step->busy = false;
}

bool rfi_step_memory_holds(const rfi_executor *m) { return !m->layout.step || m->layout.step->holder == m; }

bool rfi_step_memory_has(const rfr_step_memory *s, const void *data, int64_t bytes) {
  return s && rfi_overlaps(data, bytes, s->data, s->bytes);
}

void rfi_step_memory_leave(rfi_executor *m) {
  rfr_step_memory *s = m->layout.step;
  if (!s) return;
  m->layout.step = NULL;
  if (s->holder == m) {
    m->backend->wait(m->device); /* its work may still run */
    s->holder = NULL;
  }
  if (--s->users > 0) return;
  m->backend->free(m->device, RFI_MEMORY_STEP, s->data);
  s->data = NULL;
  s->bytes = s->least;
  if (s->destroyed) rfi_free(s->ctx, s);
}
