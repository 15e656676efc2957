/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain report --follow: serves the page of a report over HTTP on the loopback address.
 *
 * It answers GET of "/" and "/data.json" alone. A page of another site could send requests here through the reader's
 * browser under a foreign name that resolves to this machine, so requests must name the loopback address as their
 * host. One connection is served at a time, each for a few seconds at most.
 */
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "report_server.h"

enum { REQUEST_BYTES = 8192, WAIT_SECONDS = 2 };

static volatile sig_atomic_t ended;
static void on_signal(int number) {
  (void)number;
  ended = 1;
}

typedef struct answer {
  char *text;
  size_t n, capacity;
  bool failed;
} answer;

static void collect(const char *text, size_t n, void *user) {
  answer *a = user;
  if (a->failed) return;
  if (a->n + n > a->capacity) {
    const size_t capacity = 2 * (a->n + n);
    char *more = realloc(a->text, capacity);
    a->failed = !more;
    if (!more) return;
    a->text = more;
    a->capacity = capacity;
  }
  memcpy(a->text + a->n, text, n);
  a->n += n;
}

/* ---- one connection ---- */

/* A client that reads slowly must not keep others waiting, nor one that sends slowly. */
static void send_all(int fd, const char *text, size_t n) {
  const double until = cli_now() + WAIT_SECONDS;
  while (n > 0 && cli_now() < until) {
    const ssize_t sent = send(fd, text, n, MSG_NOSIGNAL);
    if (sent <= 0) return; /* the browser has closed the connection */
    text += sent;
    n -= (size_t)sent;
  }
}

static void send_answer(int fd, const char *status, const char *type, const char *text, size_t n) {
  char head[512];
  const int length = snprintf(head, sizeof head,
                              "HTTP/1.1 %s\r\nContent-Type: %s; charset=utf-8\r\nContent-Length: %zu\r\n"
                              "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
                              "X-Frame-Options: DENY\r\nConnection: close\r\n\r\n",
                              status, type, n);
  send_all(fd, head, (size_t)length);
  send_all(fd, text, n);
}

/* Reads the request up to its empty line; false: it did not arrive. */
static bool read_request(int fd, char request[REQUEST_BYTES]) {
  const double until = cli_now() + WAIT_SECONDS;
  size_t n = 0;
  while (n < REQUEST_BYTES - 1 && cli_now() < until) {
    const ssize_t got = recv(fd, request + n, REQUEST_BYTES - 1 - n, 0);
    if (got <= 0) return false;
    n += (size_t)got;
    request[n] = '\0';
    if (strstr(request, "\r\n\r\n")) return true;
  }
  return false;
}

static bool names_loopback(const char *request, int port) {
  char want[2][64];
  const char *host = strcasestr(request, "\r\nhost:");
  if (!host) return false;
  host += strlen("\r\nhost:");
  host += strspn(host, " \t");
  const size_t n = strcspn(host, " \t\r");
  snprintf(want[0], sizeof want[0], "127.0.0.1:%d", port);
  snprintf(want[1], sizeof want[1], "localhost:%d", port);
  for (int i = 0; i < 2; i++)
    if (strlen(want[i]) == n && strncasecmp(host, want[i], n) == 0) return true;
  return false;
}

static rfr_status answer_get(int fd, rfr_report *r, const char *path) {
  static const char data[] = "/data.json";
  answer a = {0};
  int changed;
  const bool page = strncmp(path, "/ ", 2) == 0, more = strncmp(path, data, sizeof data - 1) == 0;
  if (!page && !more) {
    send_answer(fd, "404 Not Found", "text/plain", "", 0);
    return RFR_OK;
  }
  rfr_status s = rfr_report_read(r, &changed);
  const char *has = path + sizeof data - 1; /* "?N" */
  if (s == RFR_OK && more && *has == '?' && strtoll(has + 1, NULL, 10) == rfr_report_bytes(r)) {
    send_answer(fd, "204 No Content", "application/json", "", 0);
    return RFR_OK;
  }
  if (s == RFR_OK) s = page ? rfr_report_page(r, 1, collect, &a) : rfr_report_data(r, collect, &a);
  if (s == RFR_OK && a.failed) s = cli_fail(RFR_NO_MEMORY, "close other programs", "out of memory");
  if (s == RFR_OK) send_answer(fd, "200 OK", page ? "text/html" : "application/json", a.text, a.n);
  else send_answer(fd, "500 Internal Server Error", "text/plain", "", 0);
  free(a.text);
  return s;
}

static rfr_status answer_one(int fd, rfr_report *r, int port) {
  char request[REQUEST_BYTES];
  const struct timeval wait = {.tv_sec = WAIT_SECONDS};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait);
  if (!read_request(fd, request)) return RFR_OK;
  if (!names_loopback(request, port)) send_answer(fd, "403 Forbidden", "text/plain", "", 0);
  else if (strncmp(request, "GET ", 4) != 0) send_answer(fd, "405 Method Not Allowed", "text/plain", "", 0);
  else return answer_get(fd, r, request + 4);
  return RFR_OK;
}

/* ---- the server ---- */

static rfr_status listen_at(int64_t want, int *fd, int *port) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)want)};
  socklen_t n = sizeof at;
  const int one = 1;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (*fd >= 0) setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (*fd >= 0 && bind(*fd, (const struct sockaddr *)&at, n) == 0 && listen(*fd, 16) == 0 &&
      getsockname(*fd, (struct sockaddr *)&at, &n) == 0) {
    *port = ntohs(at.sin_port);
    return RFR_OK;
  }
  const rfr_status s = cli_fail(RFR_IO, "choose another --port, or omit it", "127.0.0.1:%lld cannot be used: %s",
                                (long long)want, strerror(errno));
  if (*fd >= 0) close(*fd);
  return s;
}

rfr_status report_serve(rfr_report *r, int64_t want) {
  int fd, port;
  if (want < 0 || want > 65535) return cli_usage("give 0 to 65535", "--port %lld", (long long)want);
  rfr_status s = listen_at(want, &fd, &port);
  if (s != RFR_OK) return s;
  struct sigaction action = {.sa_handler = on_signal};
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  printf("http://127.0.0.1:%d/\n", port);
  fflush(stdout);
  while (s == RFR_OK && !ended) {
    struct pollfd waits = {.fd = fd, .events = POLLIN};
    if (poll(&waits, 1, 1000) <= 0) continue;
    const int client = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
    if (client < 0) continue;
    s = answer_one(client, r, port);
    close(client);
  }
  close(fd);
  return s;
}
