/* SPDX-License-Identifier: Apache-2.0
 *
 * `train --ranks N`: on CPUs this process runs mpirun, on GPUs it starts one process for each GPU. Either way it waits,
 * and passes SIGINT and SIGTERM on: the first asks the ranks to stop after a step with a checkpoint, the second kills
 * them. Under a launcher (mpirun, srun, torchrun) the process is a rank itself.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rank_death.h"

enum { MOST_LOCAL = 1024, GRACE_SECONDS = 15, PERIOD_SECONDS = 1 };
#define JOIN_SECONDS 60

/* ---- children ---- */

static volatile sig_atomic_t asked; /* the number of stop requests so far */

static void on_signal(int number) {
  (void)number;
  asked++;
}

typedef struct child {
  pid_t pid; /* 0: the process has ended */
} child;

static void send(const child *children, int n, int number) {
  for (int i = 0; i < n; i++)
    if (children[i].pid > 0) kill(children[i].pid, number);
}

/* ---- ranks and mpirun that would never end ---- */

/* The name of a process from joining to leaving the other ranks, where they wait for it with a deadline. */
#define RANK_NAME "refrain #"

typedef struct process {
  pid_t pid;
  bool stopped, joined;
} process;

typedef struct lookout {
  pid_t parent; /* parent of the ranks: this process or mpirun */
  int ranks;
  double next, moved_at; /* time of the next check; time at which nothing was last seen to be stuck */
  bool started, hung;    /* ranks were seen; mpirun was killed, because it did not end after its ranks */
} lookout;

/* Reads /proc/PID/stat: process, (name), state, parent. False: it is not a process of that parent, or has ended. */
static bool read_stat(const char *pid, pid_t parent, process *p) {
  char path[300], text[512], state;
  int of;
  snprintf(path, sizeof path, "/proc/%s/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  text[n > 0 ? n : 0] = 0;
  const char *name = strchr(text, '('), *end = strrchr(text, ')'); /* the name may contain any characters */
  if (!name || !end || sscanf(end + 1, " %c %d", &state, &of) != 2 || of != parent || state == 'Z') return false;
  *p = (process){(pid_t)strtol(pid, NULL, 10), state == 'T', strncmp(name + 1, RANK_NAME, strlen(RANK_NAME)) == 0};
  return true;
}

/* Lists the ranks that run or are stopped. */
static int find_ranks(const lookout *l, process ranks[MOST_LOCAL]) {
  int n = 0;
  DIR *d = opendir("/proc");
  for (struct dirent *e; d && n < l->ranks && (e = readdir(d));)
    n += e->d_name[0] >= '1' && e->d_name[0] <= '9' && read_stat(e->d_name, l->parent, &ranks[n]);
  if (d) closedir(d);
  return n;
}

/* The rank number that a launcher has given to a process; -1: none. */
static int rank_of(pid_t pid) {
  static const char *const names[] = {"OMPI_COMM_WORLD_RANK=", "RANK="};
  static char text[1 << 17]; /* variables, each with a NUL at its end */
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/environ", (int)pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ssize_t n, all = 0;
  while ((n = read(fd, text + all, sizeof text - 1 - (size_t)all)) > 0) all += n;
  close(fd);
  text[all] = 0;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    for (const char *at = text; at < text + all; at += strlen(at) + 1)
      if (strncmp(at, names[i], strlen(names[i])) == 0) return (int)strtol(at + strlen(names[i]), NULL, 10);
  return -1;
}

/* Keeps the ranks that are stuck: stopped while they start or end, or after the others have ended. Otherwise the other
 * ranks report a stopped one. If all are stopped, the user has suspended the run. */
static int keep_stuck(process *ranks, int n, int all) {
  int stopped = 0, stuck = 0;
  for (int i = 0; i < n; i++) stopped += ranks[i].stopped;
  for (int i = 0; i < n && stopped < all; i++)
    if (ranks[i].stopped && (!ranks[i].joined || stopped == n)) ranks[stuck++] = ranks[i];
  return stuck;
}

/* After GRACE_SECONDS kills ranks that are stuck, and mpirun, which may wait for ever for ranks that ended while it
 * started them. mpirun may name another rank. */
static void kill_stuck(lookout *l, rank_death *death) {
  static process ranks[MOST_LOCAL];
  if (cli_now() < l->next) return;
  l->next = cli_now() + PERIOD_SECONDS;
  const int n = find_ranks(l, ranks), stuck = keep_stuck(ranks, n, l->ranks);
  l->started = l->started || n > 0;
  const bool none = n == 0 && l->parent != getpid() && (l->started || asked);
  if (stuck == 0 && !none) l->moved_at = cli_now();
  if (cli_now() - l->moved_at < GRACE_SECONDS) return;
  if (none) kill(l->parent, SIGKILL), l->hung = true;
  if (stuck > 0 && death->rank < 0)
    death->rank = rank_of(ranks[0].pid), death->signal = SIGKILL, death->was_stopped = true;
  for (int i = 0; i < stuck; i++) kill(ranks[i].pid, SIGKILL);
}

/* Passes a request on to the ranks themselves: mpirun drops a signal if it has not started them yet, and crashes if it
 * gets one while it ends. A rank that does not train yet is killed by SIGUSR1. */
static void signal_ranks(const lookout *l, int number) {
  static process ranks[MOST_LOCAL];
  const int n = find_ranks(l, ranks);
  for (int i = 0; i < n; i++) kill(ranks[i].pid, number);
}

/* Waits until all have ended; returns the first exit code that is not 0. After a failure the others have GRACE_SECONDS
 * to end by themselves, because they report what they saw. */
static int wait_for(child *children, int n, lookout *l, rank_death *death) {
  int left = n, code = 0, passed = 0, sent = 0;
  double failed_at = 0, next = 0;
  while (left > 0) {
    int status;
    const pid_t pid = waitpid(-1, &status, WNOHANG);
    if (asked > passed || (asked > 0 && cli_now() > next)) {
      signal_ranks(l, asked == 1 ? SIGUSR1 : SIGKILL);
      if (asked > 2) send(children, n, SIGKILL);
      passed = asked, next = cli_now() + PERIOD_SECONDS; /* repeated for ranks that start later */
    }
    if (code != 0 && sent < 2 && cli_now() - failed_at > GRACE_SECONDS + 5 * sent)
      send(children, n, sent++ == 0 ? SIGTERM : SIGKILL);
    rank_death_read(death);
    if (pid <= 0) {
      kill_stuck(l, death);
      usleep(20000);
      continue;
    }
    for (int i = 0; i < n; i++) {
      if (children[i].pid != pid || !(WIFEXITED(status) || WIFSIGNALED(status))) continue;
      children[i].pid = 0;
      left--;
      const int own = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      if (own != 0 && code == 0 && death->from < 0 && death->rank < 0 && WIFSIGNALED(status))
        death->rank = i, death->signal = WTERMSIG(status);
      if (own != 0 && code == 0) code = own, failed_at = cli_now();
    }
  }
  rank_death_read(death);
  return code;
}

static void set_number(const char *name, int64_t x) {
  char text[24];
  snprintf(text, sizeof text, "%lld", (long long)x);
  setenv(name, text, 1);
}

/* Starts it in its own process group, so that the terminal's Ctrl-C reaches only this process. */
static pid_t start(char *const argv[], const cli *c, int rank, int port, int messages) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  if (messages >= 0) dup2(messages, STDERR_FILENO);
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  signal(SIGTTOU, SIG_IGN); /* with `stty tostop` a terminal stops processes of other groups that write to it */
  if (rank >= 0) {
    set_number("WORLD_SIZE", c->ranks);
    set_number("RANK", rank);
    set_number("LOCAL_RANK", rank);
    set_number("MASTER_PORT", port);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
  }
  execvp(argv[0], argv);
  fprintf(stderr, "%s: %s\n", argv[0], strerror(errno));
  _exit(127);
}

/* ---- starting ---- */

/* The number of cores per rank, unless the user has set the threads. */
static void share_cores(const cli *c) {
  cpu_set_t set;
  int cores = 1;
  if (c->threads >= 0 || getenv("REFRAIN_THREADS")) return;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  set_number("REFRAIN_THREADS", cores / c->ranks > 0 ? cores / c->ranks : 1);
}

static bool in_path(const char *name) {
  char path[PATH_MAX];
  const char *at = getenv("PATH");
  for (; at && *at; at += strcspn(at, ":"), at += *at == ':') {
    snprintf(path, sizeof path, "%.*s/%s", (int)strcspn(at, ":"), at, name);
    if (access(path, X_OK) == 0) return true;
  }
  return false;
}

/* mpirun's messages come through a pipe, because only they name a rank that was killed. */
static rfr_status start_mpirun(const cli *c, char *self, char **argv, child *children, rank_death *death) {
  static char *const head[] = {"mpirun", "--oversubscribe", "--bind-to", "none", "-n"};
  enum { HEAD = sizeof head / sizeof *head };
  char number[24];
  int n = 0, ends[2];
  if (!in_path("mpirun"))
    return cli_fail(RFR_UNSUPPORTED, "install Open MPI (Debian: openmpi-bin), or train on GPUs with --device cuda",
                    "--ranks %lld on CPUs needs mpirun, which is not in PATH", (long long)c->ranks);
  while (argv[n]) n++;
  char **all = calloc((size_t)(n + HEAD + 3), sizeof *all);
  if (!all) return RFR_NO_MEMORY;
  snprintf(number, sizeof number, "%lld", (long long)c->ranks);
  memcpy(all, head, sizeof head);
  all[HEAD] = number;
  all[HEAD + 1] = self;
  for (int i = 1; i < n; i++) all[HEAD + 1 + i] = argv[i];
  /* All ranks are on this machine. With its other interfaces Open MPI 5 may print that it cannot reach them. It refuses
   * both variables at once. */
  if (!getenv("OMPI_MCA_btl_tcp_if_exclude")) setenv("OMPI_MCA_btl_tcp_if_include", "lo", 0);
  if (geteuid() == 0) { /* Open MPI refuses root otherwise */
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  }
  if (pipe2(ends, O_CLOEXEC) != 0) {
    free(all);
    return cli_fail(RFR_IO, "close other files", "mpirun: %s", strerror(errno));
  }
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  death->from = ends[0];
  children[0].pid = start(all, c, -1, 0, ends[1]);
  close(ends[1]);
  free(all);
  return children[0].pid > 0 ? RFR_OK : cli_fail(RFR_IO, "end other processes", "mpirun: %s", strerror(errno));
}

static rfr_status start_ranks(const cli *c, char *self, char **argv, child *children) {
  const int port = 20000 + (int)(getpid() % 20000);
  argv[0] = self;
  for (int r = 0; r < c->ranks; r++) {
    children[r].pid = start(argv, c, r, port, -1);
    if (children[r].pid > 0) continue;
    const int error = errno;
    send(children, r, SIGKILL);
    return cli_fail(RFR_IO, "end other processes", "rank %d: %s", r, strerror(error));
  }
  return RFR_OK;
}

rfr_status cli_start_ranks(cli *c, const char *device, char **argv, bool *done, int *code) {
  static child children[MOST_LOCAL];
  static char self[PATH_MAX]; /* static, because argv points to it */
  *done = false;
  rfr_status s = rfr_launch_read(&c->launch);
  if (s != RFR_OK) return s;
  if (cli_has_ranks(c)) cli_set_rank(c->launch.rank);
  if (c->ranks == 0) return RFR_OK;
  if (c->ranks < 1 || c->ranks > MOST_LOCAL)
    return cli_usage("give the number of processes", "--ranks %lld; it is 1 to %d", (long long)c->ranks, MOST_LOCAL);
  /* A shell in a step of one task, such as `srun --pty`, starts its own ranks. */
  const bool is_step = c->launch.ranks == 1 && strcmp(c->launch.launcher, "Slurm") == 0;
  if (*c->launch.launcher && !is_step && c->launch.ranks != c->ranks)
    return cli_usage("omit --ranks under a launcher", "--ranks %lld, but %s has started %d ranks", (long long)c->ranks,
                     c->launch.launcher, c->launch.ranks);
  if ((*c->launch.launcher && !is_step) || c->ranks == 1) return RFR_OK;
  if (access(c->operand, R_OK) != 0) /* only one rank prints it */
    return cli_fail(RFR_IO, "check the path", "%s: %s", c->operand, strerror(errno));
  const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  if (n < 0) return cli_fail(RFR_IO, "mount /proc", "/proc/self/exe: %s", strerror(errno));
  self[n] = 0;
  const bool gpu = device && strncmp(device, "cuda", 4) == 0;
  if (gpu && device[4]) return cli_usage("give --device cuda: rank r takes GPU r", "--ranks with --device %s", device);
  fflush(NULL);
  share_cores(c);
  struct sigaction action = {.sa_handler = on_signal};
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  rank_death death = {.rank = -1, .from = -1};
  s = gpu ? start_ranks(c, self, argv, children) : start_mpirun(c, self, argv, children, &death);
  if (s != RFR_OK) return s;
  *done = true;
  lookout l = {.parent = gpu ? getpid() : children[0].pid, .ranks = (int)c->ranks, .moved_at = cli_now()};
  *code = wait_for(children, gpu ? (int)c->ranks : 1, &l, &death);
  /* mpirun may end without naming a rank */
  const bool killed = asked > 0 && (death.rank >= 0 ? asked > 1 || death.signal == SIGUSR1 : *code > 128);
  if (killed) death.rank = -1;
  rank_death_report(c, &death);
  if (killed)
    return cli_fail(RFR_STOPPED, "--resume continues from the newest checkpoint, if there is one",
                    "stopped without a checkpoint of the last step");
  if (l.hung) return cli_fail(RFR_IO, "start the command again", "mpirun did not end after its ranks, and was killed");
  return RFR_OK;
}

/* ---- a rank ---- */

rfr_status cli_join_ranks(cli *c) {
  char name[32]; /* prctl keeps 15 characters: six digits */
  if (!cli_has_ranks(c)) return RFR_OK;
  const rfr_status s = rfr_launch_join(c->ctx, &c->launch, JOIN_SECONDS, &c->comm);
  snprintf(name, sizeof name, RANK_NAME "%d", c->launch.rank);
  if (s == RFR_OK) prctl(PR_SET_NAME, name);
  return s;
}

rfr_status cli_leave_ranks(cli *c) {
  if (cli_has_ranks(c)) prctl(PR_SET_NAME, "refrain");
  const rfr_status s = rfr_launch_leave(c->ctx, c->comm);
  c->comm = NULL;
  if (s != RFR_OK && c->command == CLI_INDEX_train)
    rank_failure_append(c, c->ctx, c->launch.rank, c->launch.ranks, rfr_last_error()->slug, rfr_last_error()->message);
  return s;
}
