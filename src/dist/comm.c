/* SPDX-License-Identifier: Apache-2.0
 *
 * The public functions of communicators: arguments are checked here, for every kind of communicator.
 */
#include "dist/comm.h"

#include "base/base.h"
#include "dist/watch.h"

int rfr_comm_size(const rfr_comm *c) { return c ? c->size : 0; }
int rfr_comm_rank(const rfr_comm *c) { return c ? c->rank : -1; }

void rfr_comm_abort(rfr_comm *c) {
  if (c) c->table->abort(c);
}

void rfr_comm_destroy(rfr_comm *c) {
  if (c) c->table->destroy(c);
}

rfr_status rfr_comm_set_timeout(rfr_comm *c, double timeout) {
  RFI_TRY(rfi_check_handle(c, "rfr_comm"));
  if (!(timeout >= 0) || timeout > 1e9)
    return rfi_fail(RFI_E_ARGUMENT, "the timeout is %g seconds; it must be 0 to 1e9", timeout);
  rfi_watch_set_timeout(c->watch, c, timeout);
  return RFR_OK;
}

static bool is_sum(rfi_collective_kind kind) { return kind == RFI_REDUCE_SCATTER || kind == RFI_ALL_REDUCE; }

static rfr_status call(rfr_comm *c, rfi_collective_kind kind, const void *from, void *to, int64_t n, rfr_dtype dtype) {
  const rfi_collective what = {.kind = kind, .dtype = dtype, .n = n, .from = from, .to = to};
  int64_t bytes;
  RFI_TRY(rfi_check_handle(c, "rfr_comm"));
  const bool known = (unsigned)dtype < RFR_DTYPE_COUNT;
  if (!known || rfr_dtype_bits(dtype) % 8 != 0 || (is_sum(kind) && !rfi_collective_sums(dtype)))
    return rfi_fail(RFI_E_ARGUMENT, "%s does not support %s", rfi_collective_name(kind),
                    known ? rfr_dtype_name(dtype) : "this type");
  if (n < 0 || (n > 0 && (!from || !to)))
    return rfi_fail(RFI_E_ARGUMENT, "%s of %lld elements: the number is negative, or a pointer is NULL",
                    rfi_collective_name(kind), (long long)n);
  if (__builtin_mul_overflow(n, (int64_t)c->size * rfr_dtype_bits(dtype), &bytes))
    return rfi_fail(RFI_E_OVERFLOW, "%s of %lld elements: the bytes of all ranks do not fit in 63 bits",
                    rfi_collective_name(kind), (long long)n);
  RFI_TRY(rfi_watch_enter(c->watch));
  const rfr_status s = c->table->run(c, &what, NULL);
  rfi_watch_leave(c->watch);
  return s;
}

rfr_status rfr_comm_all_gather(rfr_comm *c, const void *from, void *to, int64_t n, rfr_dtype dtype) {
  return call(c, RFI_ALL_GATHER, from, to, n, dtype);
}

rfr_status rfr_comm_reduce_scatter(rfr_comm *c, const void *from, void *to, int64_t n, rfr_dtype dtype) {
  return call(c, RFI_REDUCE_SCATTER, from, to, n, dtype);
}

rfr_status rfr_comm_all_reduce(rfr_comm *c, const void *from, void *to, int64_t n, rfr_dtype dtype) {
  return call(c, RFI_ALL_REDUCE, from, to, n, dtype);
}

rfr_status rfr_comm_all_to_all(rfr_comm *c, const void *from, void *to, int64_t n, rfr_dtype dtype) {
  return call(c, RFI_ALL_TO_ALL, from, to, n, dtype);
}

rfr_status rfi_comm_exchange(rfr_comm *c, const void *mine, int64_t bytes, void *all) {
  if (!c->table->exchange) return call(c, RFI_ALL_GATHER, mine, all, bytes, RFR_U8);
  RFI_TRY(rfi_watch_enter(c->watch));
  const rfr_status s = c->table->exchange(c, mine, bytes, all);
  rfi_watch_leave(c->watch);
  return s;
}

rfr_status rfi_comm_collect(rfr_ctx *ctx, rfr_comm *c, const void *mine, int64_t bytes, void **all) {
  RFI_TRY(rfi_alloc(ctx, (size_t)(bytes * c->size), all));
  const rfr_status s = rfi_comm_exchange(c, mine, bytes, *all);
  if (s == RFR_OK) return RFR_OK;
  rfi_free(ctx, *all);
  *all = NULL;
  return s;
}

static rfr_status check_message(const rfr_comm *c, int peer, int64_t bytes) {
  if (peer < 0 || peer >= c->size || peer == c->rank || bytes < 1)
    return rfi_fail(RFI_E_ARGUMENT, "a message of %lld bytes between ranks %d and %d of %d", (long long)bytes, c->rank,
                    peer, c->size);
  return RFR_OK;
}

rfr_status rfi_comm_send(rfr_comm *c, int to, const void *data, int64_t bytes, void *stream) {
  RFI_TRY(check_message(c, to, bytes));
  return c->table->send(c, to, data, bytes, stream);
}

rfr_status rfi_comm_receive(rfr_comm *c, int from, void *data, int64_t bytes, void *stream) {
  RFI_TRY(check_message(c, from, bytes));
  return c->table->receive(c, from, data, bytes, stream);
}

int64_t rfi_comm_sent(const rfr_comm *c, int to) { return c->table->sent ? c->table->sent(c, to) : 0; }

rfr_status rfi_comm_wait_sent(rfr_comm *c, int to, int64_t number, void *stream) {
  return c->table->wait_sent ? c->table->wait_sent(c, to, number, stream) : RFR_OK;
}

rfr_status rfi_comm_connect(rfr_comm *c, const int *peers, int n) {
  if (n > RFI_MOST_PEERS)
    return rfi_fail(RFI_E_UNSUPPORTED, "this rank needs messages with %d ranks; at most %d are possible", n,
                    RFI_MOST_PEERS);
  if (!c->table->connect) return RFR_OK;
  RFI_TRY(rfi_watch_enter(c->watch));
  const rfr_status s = c->table->connect(c, peers, n);
  rfi_watch_leave(c->watch);
  return s;
}
