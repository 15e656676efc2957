/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that a launcher has started: which one this process is, from the environment, and its communicator.
 *
 * NCCL needs an id of 128 bytes on all ranks. If the launcher gives an address, rank 0 sends the id over TCP, once to
 * each rank: a request has a magic number, the number of ranks and the rank; the answer is the id. Tensors are never
 * sent over this connection. Without an address, the launcher is one of MPI, and the id is sent over MPI.
 */
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/base.h"
#include "dist/agree.h"
#include "dist/comm.h"

enum { MOST_RANKS = 1 << 20, MAGIC = 0x52465249, PAUSE_US = 50000 };

/* ---- the environment ---- */

/* Environment variables of launchers; the first row whose world size is set is used. */
static const struct variables {
  const char *launcher, *ranks, *rank, *local;
} rows[] = {
    {"Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"},
    {"PMI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"},
    {"Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"},
};

static rfr_status read_number(const char *name, long least, long most, int *out) {
  const char *text = getenv(name);
  char *end = NULL;
  const long x = text ? strtol(text, &end, 10) : 0;
  if (!text || end == text || *end || x < least || x > most)
    return rfi_fail(RFI_E_DIST_LAUNCH, "%s is %.40s; it must be a number from %ld to %ld", name,
                    text ? text : "not set", least, most);
  *out = (int)x;
  return RFR_OK;
}

rfr_status rfr_launch_read(rfr_launch *out) {
  RFI_TRY(rfi_check_handle(out, "rfr_launch"));
  *out = (rfr_launch){.size = sizeof *out, .launcher = "", .ranks = 1};
  const struct variables *v = NULL;
  for (size_t i = 0; !v && i < sizeof rows / sizeof *rows; i++)
    if (getenv(rows[i].ranks)) v = &rows[i];
  if (!v) return RFR_OK;
  RFI_TRY(read_number(v->ranks, 1, MOST_RANKS, &out->ranks));
  RFI_TRY(read_number(v->rank, 0, out->ranks - 1, &out->rank));
  out->local_rank = out->rank;
  if (getenv(v->local)) RFI_TRY(read_number(v->local, 0, out->ranks - 1, &out->local_rank));
  out->launcher = v->launcher;
  const char *address = getenv("MASTER_ADDR");
  if (!address || !*address) return RFR_OK;
  if (strlen(address) >= sizeof out->address)
    return rfi_fail(RFI_E_DIST_LAUNCH, "MASTER_ADDR has more than %zu characters", sizeof out->address - 1);
  snprintf(out->address, sizeof out->address, "%s", address);
  return read_number("MASTER_PORT", 1, 65534, &out->port);
}

/* ---- the id over TCP ---- */

static bool ready(int fd, short events, double until) {
  const double left = until - rfi_now();
  struct pollfd p = {.fd = fd, .events = events};
  return left > 0 && poll(&p, 1, left > 1e6 ? 1000000000 : (int)(1000 * left) + 1) == 1;
}

/* Sends or receives all n bytes. */
static bool transfer(int fd, void *data, size_t n, bool send_them, double until) {
  for (size_t done = 0; done < n;) {
    if (!ready(fd, send_them ? POLLOUT : POLLIN, until)) return false;
    char *at = (char *)data + done;
    const ssize_t k =
        send_them ? send(fd, at, n - done, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, at, n - done, MSG_DONTWAIT);
    if (k < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (k <= 0) return false;
    done += (size_t)k;
  }
  return true;
}

/* Returns a socket that listens at the address or is connected to it; -1: see errno. */
static int open_socket(const struct addrinfo *a, bool listens) {
  const int one = 1, fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
  if (fd < 0) return -1;
  if (listens) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (listens ? bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 64) == 0
              : connect(fd, a->ai_addr, a->ai_addrlen) == 0)
    return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

typedef struct request {
  int32_t magic, ranks, rank;
} request;

/* Rank 0 sends the id to every other rank. */
static rfr_status serve(const rfr_launch *l, int listener, void *id, double until) {
  for (int served = 1; served < l->ranks;) {
    request r = {0};
    if (!ready(listener, POLLIN, until))
      return rfi_fail(RFI_E_DIST_LAUNCH, "only %d of %d ranks asked rank 0 for the communicator's id in time",
                      served - 1, l->ranks - 1);
    const int fd = accept(listener, NULL, NULL);
    if (fd < 0) continue;
    const bool ours = transfer(fd, &r, sizeof r, false, rfi_now() + 5) && r.magic == MAGIC;
    const bool agrees = ours && r.ranks == l->ranks;
    if (agrees && transfer(fd, id, RFR_NCCL_ID_BYTES, true, rfi_now() + 5)) served++;
    close(fd);
    if (ours && !agrees)
      return rfi_fail(RFI_E_DIST_LAUNCH, "rank %d was started as one of %d ranks, rank 0 as one of %d", (int)r.rank,
                      (int)r.ranks, l->ranks);
  }
  return RFR_OK;
}

static rfr_status ask(const rfr_launch *l, const struct addrinfo *a, void *id, double until) {
  request r = {MAGIC, l->ranks, l->rank};
  for (; rfi_now() < until; usleep(PAUSE_US)) { /* rank 0 may not be listening yet */
    const int fd = open_socket(a, false);
    if (fd < 0) continue;
    const bool got = transfer(fd, &r, sizeof r, true, until) && transfer(fd, id, RFR_NCCL_ID_BYTES, false, until);
    close(fd);
    if (got) return RFR_OK;
    return rfi_fail(RFI_E_DIST_LAUNCH, "rank 0 at %s refused rank %d of %d", l->address, l->rank, l->ranks);
  }
  return rfi_fail(RFI_E_DIST_LAUNCH, "rank %d cannot reach rank 0 at %s, port %d: %s", l->rank, l->address, l->port + 1,
                  strerrordesc_np(errno));
}

rfr_status rfi_launch_share(const rfr_launch *l, void *id, double timeout) {
  char port[16];
  const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
  struct addrinfo *a;
  const double until = rfi_now() + (timeout > 0 ? timeout : 1e9);
  snprintf(port, sizeof port, "%d", l->port + 1);
  const int wrong = getaddrinfo(l->address, port, &hints, &a);
  if (wrong) return rfi_fail(RFI_E_DIST_LAUNCH, "MASTER_ADDR %s: %s", l->address, gai_strerror(wrong));
  rfr_status s;
  if (l->rank > 0) {
    s = ask(l, a, id, until);
  } else {
    const int fd = open_socket(a, true);
    s = fd >= 0 ? serve(l, fd, id, until)
                : rfi_fail(RFI_E_DIST_LAUNCH, "rank 0 cannot listen at %s, port %s: %s", l->address, port,
                           strerrordesc_np(errno));
    if (fd >= 0) close(fd);
  }
  freeaddrinfo(a);
  return s;
}

/* ---- joining ---- */

static rfr_status join_mpi(rfr_ctx *ctx, const rfr_launch *l, double timeout, rfr_comm **out) {
  RFI_TRY(rfr_comm_mpi_create(ctx, timeout, out));
  if (rfr_comm_size(*out) == l->ranks && rfr_comm_rank(*out) == l->rank) return RFR_OK;
  const int rank = rfr_comm_rank(*out), ranks = rfr_comm_size(*out);
  rfr_comm_destroy(*out);
  *out = NULL;
  return rfi_fail(RFI_E_DIST_LAUNCH, "%s has started rank %d of %d, but MPI says %d of %d: on CPUs ranks need mpirun",
                  l->launcher, l->rank, l->ranks, rank, ranks);
}

static rfr_status share_over_mpi(rfr_ctx *ctx, const rfr_launch *l, void *id, double timeout) {
  rfr_comm *c;
  void *all = NULL;
  RFI_TRY(join_mpi(ctx, l, timeout, &c));
  const rfr_status s = rfi_comm_collect(ctx, c, id, RFR_NCCL_ID_BYTES, &all);
  if (s == RFR_OK) memcpy(id, all, RFR_NCCL_ID_BYTES);
  rfi_free(ctx, all);
  rfr_comm_destroy(c);
  return s;
}

rfr_status rfr_launch_join(rfr_ctx *ctx, const rfr_launch *l, double timeout, rfr_comm **out) {
  unsigned char id[RFR_NCCL_ID_BYTES] = {0};
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!l || !out || l->size != sizeof *l) return rfi_fail(RFI_E_ARGUMENT, "rfr_launch: start from rfr_launch_read");
  *out = NULL;
  if (strcmp(rfi_ctx_backend(ctx), "cpu") == 0) return join_mpi(ctx, l, timeout, out);
  if (l->rank == 0) RFI_TRY(rfr_comm_nccl_id(ctx, id));
  RFI_TRY(*l->address ? rfi_launch_share(l, id, timeout) : share_over_mpi(ctx, l, id, timeout));
  return rfr_comm_nccl_create(ctx, id, l->ranks, l->rank, timeout, out);
}

rfr_status rfr_launch_leave(rfr_ctx *ctx, rfr_comm *comm) {
  rfr_status s = rfi_check_handle(ctx, "rfr_ctx");
  if (s == RFR_OK) s = rfi_comm_agree(ctx, comm, RFR_OK);
  rfr_comm_destroy(comm);
  return s;
}
