/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain sweep: runs of a grid, each by a child process `refrain train`, so that a run that crashes takes no other
 * with it. The first SIGINT or SIGTERM asks the runs to end with a checkpoint, the second ends them.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli.h"
#include "refrain/sweep.h"

enum { MOST_JOBS = 64 };

static volatile sig_atomic_t asked; /* the number of stop requests so far */

static void on_signal(int number) {
  (void)number;
  asked++;
}

typedef struct job {
  pid_t pid; /* 0: no process */
  int run;
} job;

typedef struct sweep {
  cli *c;
  rfr_sweep *sweep;
  const char *folder;
  char self[PATH_MAX];
  job jobs[MOST_JOBS];
  int n_jobs, running;
} sweep;

static void say(const sweep *s, const rfr_sweep_run *r, const char *what) {
  if (s->c->quiet || s->c->json) return;
  fprintf(stderr, "%s  %s", r->name, what);
  if (r->state == RFR_SWEEP_DONE && isfinite(r->loss)) fprintf(stderr, ", loss %.4f", r->loss);
  if (r->state == RFR_SWEEP_DONE && isfinite(r->bits_per_byte)) fprintf(stderr, ", %.3f bits/byte", r->bits_per_byte);
  if (r->state == RFR_SWEEP_FAILED) fprintf(stderr, ": %s", r->error);
  if (r->state == RFR_SWEEP_RUNNING)
    for (int i = r->n_common; i < r->n_overrides; i++) fprintf(stderr, "  %s", r->overrides[i]);
  fputc('\n', stderr);
}

/* ---- a run ---- */

/* FOLDER/run-001.log has what the run prints: its result, and an error as one JSON object. */
static void log_path(const rfr_sweep_run *r, char out[PATH_MAX]) { snprintf(out, PATH_MAX, "%s.log", r->folder); }

/* The message of the last error in the log of a run, or the reason why it ended. */
static void find_error(const rfr_sweep_run *r, int status, char *out, size_t size) {
  static char text[1 << 16];
  char path[PATH_MAX];
  if (WIFSIGNALED(status)) snprintf(out, size, "killed by signal %d", WTERMSIG(status));
  else snprintf(out, size, "ended with exit code %d", WEXITSTATUS(status));
  log_path(r, path);
  FILE *f = fopen(path, "rb");
  if (!f) return;
  if (fseek(f, 0, SEEK_END) == 0 && ftell(f) > (long)sizeof text - 1) fseek(f, 1 - (long)sizeof text, SEEK_END);
  else rewind(f);
  const size_t n = fread(text, 1, sizeof text - 1, f);
  fclose(f);
  text[n] = 0;
  static const char key[] = "\"message\": \"";
  char *found = NULL;
  if (WIFSIGNALED(status) || !strstr(text, "\"slug\"")) return;
  for (char *at = text; (at = strstr(at, key)); at++) found = at + sizeof key - 1;
  if (!found) return;
  size_t k = 0;
  for (; *found && *found != '"' && k + 1 < size; found++) {
    if (*found == '\\' && found[1]) found++;
    out[k++] = *found;
  }
  out[k] = 0;
}

/* Starts the run in its own process group, so that the terminal's Ctrl-C reaches only this process. */
static pid_t spawn(const sweep *s, char *const argv[], const char *log) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  const int out = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666), in = open("/dev/null", O_RDONLY);
  if (out < 0 || dup2(out, STDOUT_FILENO) < 0 || dup2(out, STDERR_FILENO) < 0) _exit(127);
  if (in >= 0) dup2(in, STDIN_FILENO);
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  execv(s->self, argv);
  dprintf(STDERR_FILENO, "%s: %s\n", s->self, strerror(errno));
  _exit(127);
}

static rfr_status start(sweep *s, int run, job *j) {
  rfr_sweep_run r;
  char log[PATH_MAX], threads[24];
  rfr_status status = rfr_sweep_set(s->sweep, run, RFR_SWEEP_RUNNING, NULL);
  if (status == RFR_OK) status = rfr_sweep_get(s->sweep, run, &r);
  if (status != RFR_OK) return status;
  const char **argv = calloc((size_t)(2 * r.n_overrides + 16), sizeof *argv);
  int n = 0;
  if (!argv) return cli_fail(RFR_NO_MEMORY, "free some memory", "out of memory");
  argv[n++] = s->self;
  argv[n++] = "train";
  argv[n++] = "--json";
  if (s->c->device) argv[n++] = "--device", argv[n++] = s->c->device;
  if (s->c->threads >= 0) {
    snprintf(threads, sizeof threads, "%lld", (long long)s->c->threads);
    argv[n++] = "--threads", argv[n++] = threads;
  }
  for (int i = 0; i < r.n_overrides && !r.started; i++) argv[n++] = "--set", argv[n++] = r.overrides[i];
  if (r.started) argv[n++] = "--resume";
  else argv[n++] = "--out", argv[n++] = r.folder;
  argv[n++] = "--";
  argv[n++] = r.started ? r.folder : rfr_sweep_config(s->sweep);
  log_path(&r, log);
  say(s, &r, r.started ? "continues" : "starts");
  fflush(NULL);
  const pid_t pid = spawn(s, (char *const *)argv, log);
  free(argv);
  if (pid < 0) return cli_fail(RFR_IO, "end other processes", "fork: %s", strerror(errno));
  *j = (job){.pid = pid, .run = run};
  s->running++;
  return RFR_OK;
}

/* Exit code 5 means that a run was stopped with a checkpoint. */
static rfr_status finish(sweep *s, job *j, int status) {
  enum { STOPPED = 5 };
  rfr_sweep_run r;
  char error[1024] = "";
  rfr_sweep_state state = RFR_SWEEP_DONE;
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) state = RFR_SWEEP_FAILED;
  if (asked > 0 && ((WIFEXITED(status) && WEXITSTATUS(status) == STOPPED) || WIFSIGNALED(status)))
    state = RFR_SWEEP_STOPPED;
  rfr_status result = rfr_sweep_get(s->sweep, j->run, &r);
  if (state == RFR_SWEEP_FAILED) find_error(&r, status, error, sizeof error);
  if (result == RFR_OK) result = rfr_sweep_set(s->sweep, j->run, state, error);
  if (result == RFR_OK) result = rfr_sweep_get(s->sweep, j->run, &r);
  if (result == RFR_OK)
    say(s, &r, state == RFR_SWEEP_DONE ? "done" : state == RFR_SWEEP_STOPPED ? "stopped" : "failed");
  j->pid = 0;
  s->running--;
  return result;
}

static void send(const sweep *s, int number) {
  for (int i = 0; i < s->n_jobs; i++)
    if (s->jobs[i].pid > 0) kill(s->jobs[i].pid, number);
}

/* The next run that is waiting, was stopped or failed; -1: none is left. */
static int next_run(const sweep *s, int from) {
  rfr_sweep_run r;
  for (int i = from; i < rfr_sweep_count(s->sweep); i++)
    if (rfr_sweep_get(s->sweep, i, &r) == RFR_OK && r.state != RFR_SWEEP_DONE) return i;
  return -1;
}

static rfr_status train_all(sweep *s) {
  int next = next_run(s, 0), passed = 0;
  rfr_status result = RFR_OK;
  while (s->running > 0 || (next >= 0 && asked == 0 && result == RFR_OK)) {
    for (int i = 0; i < s->n_jobs && next >= 0 && asked == 0 && result == RFR_OK; i++) {
      if (s->jobs[i].pid != 0) continue;
      result = start(s, next, &s->jobs[i]);
      next = next_run(s, next + 1);
    }
    if (result != RFR_OK && passed == 0) send(s, SIGTERM), passed = 1; /* sweep.json cannot be written */
    if (asked > passed) send(s, passed == 0 ? SIGTERM : SIGKILL), passed++;
    bool ended = false;
    for (int i = 0; i < s->n_jobs; i++) {
      int status;
      if (s->jobs[i].pid <= 0 || waitpid(s->jobs[i].pid, &status, WNOHANG) <= 0) continue;
      const rfr_status one = finish(s, &s->jobs[i], status);
      if (result == RFR_OK) result = one;
      ended = true;
    }
    if (!ended) usleep(20000);
  }
  return result;
}

/* ---- the result ---- */

typedef struct counts {
  int of[RFR_SWEEP_DONE + 1];
} counts;

static counts count(const sweep *s) {
  counts n = {0};
  rfr_sweep_run r;
  for (int i = 0; i < rfr_sweep_count(s->sweep); i++)
    if (rfr_sweep_get(s->sweep, i, &r) == RFR_OK) n.of[r.state]++;
  return n;
}

static void json_number(json *j, const char *key, double x) {
  if (isfinite(x)) json_double(j, key, x);
  else json_raw(j, key, "null");
}

static const char *state_name(rfr_sweep_state state) {
  static const char *const names[] = {"waiting", "running", "stopped", "failed", "done"};
  return names[state];
}

static void print_json(const sweep *s, const int *best, int n_best) {
  json j = {.f = stdout};
  rfr_sweep_run r;
  json_begin(&j, NULL, '{');
  json_text(&j, "folder", s->folder);
  json_begin(&j, "best", '[');
  for (int i = 0; i < n_best; i++)
    if (rfr_sweep_get(s->sweep, best[i], &r) == RFR_OK) json_text(&j, NULL, r.name);
  json_end(&j, ']');
  json_begin(&j, "runs", '[');
  for (int i = 0; i < rfr_sweep_count(s->sweep); i++) {
    if (rfr_sweep_get(s->sweep, i, &r) != RFR_OK) continue;
    json_begin(&j, NULL, '{');
    json_text(&j, "name", r.name);
    json_text(&j, "state", state_name(r.state));
    json_begin(&j, "set", '[');
    for (int k = 0; k < r.n_overrides; k++) json_text(&j, NULL, r.overrides[k]);
    json_end(&j, ']');
    json_number(&j, "loss", r.loss);
    json_number(&j, "bits_per_byte", r.bits_per_byte);
    json_int(&j, "step", r.step);
    json_double(&j, "seconds", r.seconds);
    if (*r.error) json_text(&j, "error", r.error);
    json_end(&j, '}');
  }
  json_end(&j, ']');
  json_end(&j, '}');
  putchar('\n');
}

static void print_row(const rfr_sweep_run *r, int rank) {
  char text[32] = "";
  if (rank > 0) snprintf(text, sizeof text, "%d", rank);
  printf("%4s  %-8s  %-7s", text, r->name, state_name(r->state));
  if (isfinite(r->loss)) printf("  %8.4f", r->loss);
  else printf("  %8s", "-");
  if (isfinite(r->bits_per_byte)) printf("  %9.4f", r->bits_per_byte);
  else printf("  %9s", "-");
  printf("  %7lld  %8.1f ", (long long)r->step, r->seconds);
  for (int i = r->n_common; i < r->n_overrides; i++) printf(" %s", r->overrides[i]);
  putchar('\n');
}

static void print_table(const sweep *s, const int *best, int n_best) {
  rfr_sweep_run r;
  puts("rank  run       state        loss  bits/byte     step   seconds  values");
  for (int i = 0; i < n_best; i++)
    if (rfr_sweep_get(s->sweep, best[i], &r) == RFR_OK) print_row(&r, i + 1);
  for (int i = 0; i < rfr_sweep_count(s->sweep); i++) {
    bool ranked = false;
    for (int k = 0; k < n_best; k++) ranked |= best[k] == i;
    if (!ranked && rfr_sweep_get(s->sweep, i, &r) == RFR_OK) print_row(&r, 0);
  }
  if (n_best < 2) return;
  printf("\nto compare: refrain report");
  for (int i = 0; i < n_best && i < 5; i++)
    if (rfr_sweep_get(s->sweep, best[i], &r) == RFR_OK) putchar(' '), cli_put_word(stdout, r.folder);
  putchar('\n');
}

static rfr_status write_report(const sweep *s, const int *best, int n_best) {
  const char *folders[RFR_REPORT_RUNS];
  rfr_report *report;
  rfr_sweep_run r;
  int n = 0;
  for (; n < n_best && n < RFR_REPORT_RUNS && rfr_sweep_get(s->sweep, best[n], &r) == RFR_OK; n++)
    folders[n] = r.folder;
  if (n == 0)
    return cli_fail(RFR_INVALID, "see the errors of the runs", "--report: no run is done, so there is no page");
  rfr_status status = rfr_report_open(s->c->ctx, folders, n, &report);
  if (status != RFR_OK) return status;
  status = cli_write_page(report, s->c->report);
  rfr_report_close(report);
  return status;
}

/* The command that continues the sweep, from malloc; NULL: out of memory. The other options do not belong to a run. */
static char *resume_help(const sweep *s) {
  char *text = NULL;
  size_t n = 0;
  FILE *f = open_memstream(&text, &n);
  if (!f) return NULL;
  fputs("to continue: refrain sweep ", f);
  cli_put_word(f, s->c->operand);
  fputs(" --out ", f);
  cli_put_word(f, s->folder);
  fputs(" --resume", f);
  for (int i = 0; i < s->c->sets.n; i++) fputs(" --set ", f), cli_put_word(f, s->c->sets.items[i]);
  if (s->c->device) fputs(" --device ", f), cli_put_word(f, s->c->device);
  if (fclose(f) == 0) return text;
  free(text);
  return NULL;
}

static rfr_status print_result(sweep *s) {
  int *best = calloc((size_t)rfr_sweep_count(s->sweep) + 1, sizeof *best);
  if (!best) return cli_fail(RFR_NO_MEMORY, "free some memory", "out of memory");
  const int n = rfr_sweep_rank(s->sweep, best);
  const counts all = count(s);
  if (s->c->json) print_json(s, best, n);
  else if (!s->c->quiet) print_table(s, best, n);
  rfr_status status = RFR_OK;
  if (asked > 0) {
    char *help = resume_help(s);
    status = cli_fail(RFR_STOPPED, help ? help : "add --resume", "stopped: %d of %d runs are done",
                      all.of[RFR_SWEEP_DONE], rfr_sweep_count(s->sweep));
    free(help);
  } else if (s->c->report) {
    status = write_report(s, best, n);
  }
  if (status == RFR_OK && all.of[RFR_SWEEP_FAILED] > 0) s->c->code = 1;
  free(best);
  return status;
}

/* ---- the command ---- */

/* The runs share the cores, unless the user has set their threads. */
static void share_cores(const cli *c) {
  cpu_set_t set;
  char text[24];
  int cores = 1;
  if (c->threads >= 0 || getenv("REFRAIN_THREADS") || c->jobs < 2) return;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  snprintf(text, sizeof text, "%d", cores / (int)c->jobs > 0 ? cores / (int)c->jobs : 1);
  setenv("REFRAIN_THREADS", text, 1);
}

rfr_status cli_sweep(cli *c) {
  char folder[4200];
  sweep s = {.c = c, .folder = c->out ? c->out : folder};
  const char *device = c->device ? c->device : getenv("REFRAIN_DEVICE");
  rfr_sweep_options o = rfr_sweep_options_default();
  cli_default_folder("sweeps", c->operand, folder, sizeof folder);
  if (c->jobs < 1 || c->jobs > MOST_JOBS)
    return cli_usage("give the number of runs at a time", "--jobs %lld; it is 1 to %d", (long long)c->jobs, MOST_JOBS);
  if (c->jobs > 1 && device && strncmp(device, "cuda", 4) == 0)
    return cli_usage("omit --jobs", "--jobs %lld with --device %s: the runs would share one GPU", (long long)c->jobs,
                     device);
  const ssize_t n = readlink("/proc/self/exe", s.self, sizeof s.self - 1);
  if (n < 0) return cli_fail(RFR_IO, "mount /proc", "/proc/self/exe: %s", strerror(errno));
  o.overrides = c->sets.items;
  o.n_overrides = c->sets.n;
  o.resume = c->resume;
  s.n_jobs = (int)c->jobs;
  rfr_status status = rfr_sweep_open(c->ctx, c->operand, s.folder, &o, &s.sweep);
  if (status == RFR_OK) {
    share_cores(c);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    status = train_all(&s);
  }
  if (status == RFR_OK) status = print_result(&s);
  rfr_sweep_close(s.sweep);
  return status;
}
