/* SPDX-License-Identifier: Apache-2.0
 *
 * OpenMP may give a parallel region fewer threads than it asks for: OMP_THREAD_LIMIT, OMP_DYNAMIC, a region inside
 * another one. A forked child has none of its parent's threads. A step then computes what it computes with the
 * context's number of threads, or it fails with a status.
 *
 * OpenMP reads its environment when the process starts. So each case is a separate process: the test starts itself
 * with the name of the case as argument, and compares the output of the processes.
 */
#include "support/run.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/base.h"

enum { STEPS = 6, MANY = 1 << 16 };

static const char *const models[] = {
    "precision: {dtype: f32}\n",
    "precision: {dtype: bf16}\n",
};

static rfr_run *open_run(rfr_ctx *ctx, const char *precision) {
  char config[1024];
  snprintf(config, sizeof config,
           "refrain: 1\nmodel: {model_type: llama, hidden_size: 128, intermediate_size: 320, num_hidden_layers: 2,\n"
           "        num_attention_heads: 4, num_key_value_heads: 2}\n"
           "%sdata: {train: [\"*.txt\"], validation: 30%%, tokenizer: bytes, sequence: 64}\n"
           "batch: {tokens: 512, microbatch: 4}\noptimizer: {name: adamw, lr: 3e-3}\nrun: {steps: 50, seed: 3}\n",
           precision);
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run = NULL;
  o.config_folder = rft_run_root;
  if (rfr_run_open(ctx, config, NULL, &o, &run) != RFR_OK) printf("open: %s\n", rfr_last_error()->message);
  return run;
}

/* Prints a hash of all states after `steps` steps, or the slug of the error. */
static void train(rfr_run *run, int steps) {
  rfr_status s = RFR_OK;
  for (int i = 0; run && s == RFR_OK && i < steps; i++) s = rfr_run_step(run);
  if (s != RFR_OK) printf("%s\n", rfr_last_error()->slug);
  if (!run || s != RFR_OK) return;
  rfr_tensor x;
  uint64_t hash = 0xcbf29ce484222325u;
  for (int i = 0; rfr_programs_tensor_at(rfr_run_programs(run), i, &x) == RFR_OK; i++)
    for (int64_t k = 0; x.role == RFR_ROLE_TRAINABLE && k < x.bytes; k++)
      hash = (hash ^ ((const unsigned char *)x.data)[k]) * 0x100000001b3u;
  printf("%016llx\n", (unsigned long long)hash);
}

static rfr_ctx *make_ctx(int threads) {
  rfr_ctx *ctx = NULL;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = threads;
  if (rfr_ctx_create(&o, &ctx) != RFR_OK) printf("%s\n", rfr_last_error()->message);
  return ctx;
}

/* ---- the cases, each in a separate process ---- */

static void run_models(int threads) {
#ifdef _OPENMP
  const int dynamic = omp_get_dynamic();
#endif
  rfr_ctx *ctx = make_ctx(threads);
  for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
    rfr_run *run = open_run(ctx, models[i]);
    train(run, STEPS);
    rfr_run_close(run);
  }
  printf("threads %d\n", rfi_ctx_threads(ctx));
#ifdef _OPENMP
  if (omp_get_dynamic() != dynamic) printf("the host's OMP_DYNAMIC is changed\n");
#endif
  rfr_ctx_destroy(ctx);
}

static void case_one(void) { run_models(1); }
static void case_two(void) { run_models(2); }

/* The context has two threads, but OpenMP gives one to the region that calls it. */
static void case_nested(void) {
  rfr_ctx *ctx = make_ctx(2);
  rfr_run *run = open_run(ctx, models[0]);
#pragma omp parallel num_threads(2)
#pragma omp single
  train(run, STEPS);
  train(run, STEPS); /* outside: the failed step changed nothing */
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* OpenMP starts no team at all: the step is not inside a region, and gets one thread. */
static void case_levels(void) {
  rfr_ctx *ctx = make_ctx(2);
  rfr_run *run = open_run(ctx, models[0]);
#ifdef _OPENMP
  const int levels = omp_get_max_active_levels();
  omp_set_max_active_levels(0);
  train(run, STEPS);
  omp_set_max_active_levels(levels);
#endif
  train(run, STEPS);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

/* A context that is created inside a region has the number of threads that it can get there. */
static void case_inside(void) {
#pragma omp parallel num_threads(2)
#pragma omp single
  run_models(2);
}

static void case_fork(void) {
  rfr_ctx *ctx = make_ctx(2);
  rfr_run *run = open_run(ctx, models[0]);
  train(run, STEPS);
  fflush(stdout);
  if (fork() == 0) {
    alarm(20);
    train(run, 1);
    /* a team also draws the initial values of a large parameter */
    const rfr_parameter p = {.name = "w", .init = RFR_INIT_NORMAL, .std = 1, .rank = 1, .shape = {MANY}};
    static float w[MANY];
    if (rfr_parameter_fill(&p, 3, RFR_F32, 2, w) != RFR_OK) printf("%s\n", rfr_last_error()->slug);
    fflush(stdout);
    _exit(0);
  }
  wait(NULL);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
}

static const struct {
  const char *name;
  void (*run)(void);
} cases[] = {{"one", case_one},       {"two", case_two},       {"nested", case_nested},
             {"levels", case_levels}, {"inside", case_inside}, {"fork", case_fork}};

/* Runs a case in a separate process with one more environment variable; returns its output. */
static char *output_of(const char *name, const char *variable, const char *value) {
  static char text[8][4096];
  static int next;
  char *out = text[next++ % 8];
  size_t n = 0;
  ssize_t got;
  int ends[2], status;
  assert_int_equal(pipe(ends), 0);
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    dup2(ends[1], 1);
    close(ends[0]);
    if (variable) setenv(variable, value, 1);
    setenv("OPENMP_TEST_ROOT", rft_run_root, 1);
    execl("/proc/self/exe", "openmp_test", name, (char *)NULL);
    _exit(127);
  }
  close(ends[1]);
  while ((got = read(ends[0], out + n, sizeof text[0] - 1 - n)) > 0) n += (size_t)got;
  out[n] = 0;
  close(ends[0]);
  assert_int_equal(waitpid(child, &status, 0), child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fail_msg("case %s ended with %d: %s", name, status, out);
  return out;
}

static void test_thread_limit(void **state) {
  (void)state;
  const char *one = output_of("one", NULL, NULL);
  assert_non_null(strstr(one, "threads 1"));
  assert_string_equal(output_of("two", "OMP_THREAD_LIMIT", "1"), one);
}

static void test_dynamic(void **state) {
  (void)state;
  const char *two = output_of("two", NULL, NULL);
  assert_non_null(strstr(two, "threads 2"));
  assert_string_equal(output_of("two", "OMP_DYNAMIC", "true"), two);
}

static void test_region(void **state) {
  (void)state;
  char expected[256];
  const char *one = output_of("one", NULL, NULL), *two = output_of("two", NULL, NULL);
  snprintf(expected, sizeof expected, "threads.team\n%.16s\n", two);
  assert_string_equal(output_of("nested", NULL, NULL), expected);
  /* here a nested region would get two threads, but a GEMM of oneDNN one */
  assert_string_equal(output_of("nested", "OMP_MAX_ACTIVE_LEVELS", "3"), expected);
  assert_string_equal(output_of("levels", NULL, NULL), expected);
  assert_string_equal(output_of("inside", NULL, NULL), one);
}

static void test_fork(void **state) {
  (void)state;
  char expected[256];
  snprintf(expected, sizeof expected, "%.16s\nthreads.fork\nthreads.fork\n", output_of("two", NULL, NULL));
  assert_string_equal(output_of("fork", NULL, NULL), expected);
}

int main(int argc, char **argv) {
  for (size_t i = 0; argc > 1 && i < sizeof cases / sizeof *cases; i++) {
    if (strcmp(argv[1], cases[i].name) != 0) continue;
    snprintf(rft_run_root, sizeof rft_run_root, "%s", getenv("OPENMP_TEST_ROOT"));
    cases[i].run();
    return 0;
  }
#ifndef _OPENMP
  print_message("built without OpenMP: nothing to test\n");
  return 0;
#endif
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_thread_limit),
      cmocka_unit_test(test_dynamic),
      cmocka_unit_test(test_region),
      cmocka_unit_test(test_fork),
  };
  return cmocka_run_group_tests_name("openmp", tests, rft_run_setup, rft_run_teardown);
}
