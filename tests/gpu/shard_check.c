/* SPDX-License-Identifier: Apache-2.0
 *
 * A Llama over two ranks, threads of this program, with each rfr_shard: shard_check MODEL STEPS [DEVICE [GB [MODE]]]
 *
 * MODEL is `small` or `1b` (Llama 3.2 1B without tied embeddings, 4 documents of 4,096 tokens per rank). Loss and norm
 * of all modes must be bitwise equal. Prints for each the planned bytes, the milliseconds of a replay, and how many
 * times the tokens per second of one rank alone. Each rank is measured alone first, both at the same time: a GPU at its
 * power limit has a different speed, and two ranks together have that of the slower one. DEVICE is `cuda` or, for a
 * test without GPUs, `cpu`. GB is the budget of a rank with two, in 1e9 bytes; 0: none. MODE runs one mode alone.
 *
 * bench/timeline.c records when kernels and copies run, and bench/timeline.py prints how much of them is hidden.
 */
#include <pthread.h>
#include <refrain/refrain.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RANKS = 2, TABLE = 65521 };
static const char *const modes[] = {"none", "optimizer", "full"};

static rfr_model_config config;
static int64_t tokens, longest;
static int steps;
static int64_t budget; /* budget of a rank, if there are several; 0: none */
static bool on_cpu;
static unsigned char id[RFR_NCCL_ID_BYTES];

typedef struct rank {
  int number, ranks;
  rfr_shard shard;
  rfr_ctx *ctx;
  rfr_comm *comm;
  rfr_programs *programs;
  float loss, norm;
  int64_t total;
  double seconds; /* of a replay */
  bool failed;
} rank;

#define TRY(call)                                                                               \
  do {                                                                                          \
    if ((call) != RFR_OK) {                                                                     \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, rfr_last_error()->message); \
      return RFR_INTERNAL;                                                                      \
    }                                                                                           \
  } while (0)

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void choose(const char *model) {
  const bool big = strcmp(model, "1b") == 0;
  config = rfr_model_config_default(RFR_MODEL_LLAMA);
  config.vocab_size = big ? 128256 : 512;
  config.hidden_size = big ? 2048 : 128;
  config.intermediate_size = big ? 8192 : 384;
  config.layers = big ? 16 : 3;
  config.heads = big ? 32 : 4;
  config.kv_heads = big ? 8 : 2;
  config.head_dim = config.hidden_size / config.heads;
  config.max_positions = config.longest = longest = big ? 4096 : 64;
  config.dtype = RFR_BF16;
  tokens = 4 * longest;
}

/* ---- the step ---- */

static rfr_value state(rfr_trace *t, const rfr_parameter *p, const char *suffix) {
  char name[128];
  snprintf(name, sizeof name, "%s.%s", p->name, suffix);
  return rfr_input(t, name, RFR_ROLE_STATE, RFR_F32, p->rank, p->shape);
}

static void update(rfr_trace *t, rfr_value loss, const rfr_value *w, rfr_value *g, int n, int ranks) {
  rfr_value skip, step = rfr_step_block(t);
  for (int i = 0; i < n; i++) g[i] = rfr_gradient(t, loss, w[i], RFR_F32);
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_scope(t, "optimizer");
  for (int i = 0; i < n && ranks > 1; i++) g[i] = rfr_all_reduce(t, g[i], ranks);
  const rfr_value lr = rfr_fill(t, 1e-3, RFR_F32, 1, ((int64_t[]){1}));
  const rfr_value norm = rfr_grad_norm(t, n, g, &skip), clip = rfr_clip_scale(t, norm, 1);
  for (int i = 0; i < n; i++) {
    rfr_parameter p;
    if (rfr_model_parameter(&config, i, &p) != RFR_OK) continue;
    rfr_adamw(t, w[i], g[i], state(t, &p, "m"), state(t, &p, "v"), state(t, &p, "master"), lr, clip, skip, step, NULL);
  }
  rfr_step_end(t, step, skip);
  rfr_output(t, "loss", ranks > 1 ? rfr_all_reduce(t, loss, ranks) : loss);
  rfr_output(t, "norm", norm);
}

static rfr_status record(rfr_ctx *ctx, int ranks, rfr_trace **out) {
  const int n = rfr_model_parameter_count(&config);
  const int64_t offsets = tokens + 1;
  rfr_value *w = calloc(2 * (size_t)n, sizeof *w);
  rfr_trace *t;
  if (!w) return RFR_NO_MEMORY;
  TRY(rfr_trace_create(ctx, &t));
  rfr_model_declare(t, &config, NULL, 0, w);
  const rfr_value x = rfr_input(t, "tokens", RFR_ROLE_INPUT, RFR_I32, 1, &tokens);
  const rfr_value y = rfr_input(t, "targets", RFR_ROLE_INPUT, RFR_I32, 1, &tokens);
  const rfr_value o = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, &offsets);
  const rfr_value h = rfr_model_forward(t, &config, w, x, o, RFR_NONE);
  const rfr_value logits = rfr_model_logits(t, &config, w, h, RFR_F32);
  rfr_scope(t, "head");
  const rfr_value inverse = rfr_fill(t, 1.0 / (double)(tokens * ranks), RFR_F32, 1, ((int64_t[]){1}));
  update(t, rfr_cross_entropy(t, logits, y, inverse, -100), w, w + n, n, ranks);
  free(w);
  TRY(rfr_trace_finish(t));
  *out = t;
  return RFR_OK;
}

/* ---- values ---- */

static float table[TABLE]; /* random values, filled before the ranks start */

static void fill_table(void) {
  for (int64_t k = 0; k < TABLE; k++)
    table[k] = 0.02f * ((float)(k * 48271 % 2147483647 * 16807 % TABLE) / (TABLE / 2) - 1.0f) + 1e-6f;
}

static float noise(int64_t i) { return table[i % TABLE]; }

static uint16_t bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Writes this rank's part of parameter i, or of its master weight. */
static rfr_status write_parameter(rank *r, int i, bool master) {
  rfr_parameter p;
  rfr_tensor x;
  char name[128];
  int64_t all = 1, n = 1;
  TRY(rfr_model_parameter(&config, i, &p));
  snprintf(name, sizeof name, "%s%s", p.name, master ? ".master" : "");
  TRY(rfr_programs_tensor(r->programs, name, &x));
  for (int d = 0; d < p.rank; d++) all *= p.shape[d];
  for (int d = 0; d < x.type.rank; d++) n *= x.type.shape[d];
  const int64_t first = x.type.rank == p.rank && n == all ? 0 : n * r->number;
  char *data = calloc((size_t)n, master ? 4 : 2);
  if (!data) return RFR_NO_MEMORY;
  for (int64_t k = 0; k < n && first + k < all; k++) {
    const float value = p.rank == 1 ? 1.0f : noise(first + k + 7919 * i);
    if (master) ((float *)data)[k] = value;
    else ((uint16_t *)data)[k] = bf16(value);
  }
  TRY(rfr_programs_write(r->programs, &x, data));
  free(data);
  return RFR_OK;
}

static rfr_status write_inputs(rank *r) {
  int32_t *data = calloc((size_t)tokens + 1, sizeof *data);
  rfr_tensor x;
  if (!data) return RFR_NO_MEMORY;
  for (int64_t i = 0; i < tokens; i++) data[i] = (int32_t)((i * 7 + i / 13 + r->number * 101) % config.vocab_size);
  TRY(rfr_programs_tensor(r->programs, "tokens", &x));
  TRY(rfr_programs_write(r->programs, &x, data));
  for (int64_t i = 0; i < tokens; i++) data[i] = (int32_t)((i * 5 + r->number * 17) % config.vocab_size);
  TRY(rfr_programs_tensor(r->programs, "targets", &x));
  TRY(rfr_programs_write(r->programs, &x, data));
  for (int64_t i = 0; i <= tokens; i++) data[i] = (int32_t)(i * longest < tokens ? i * longest : tokens);
  TRY(rfr_programs_tensor(r->programs, "offsets", &x));
  TRY(rfr_programs_write(r->programs, &x, data));
  free(data);
  for (int i = 0; i < rfr_model_parameter_count(&config); i++)
    for (int master = 0; master < 2; master++) TRY(write_parameter(r, i, master));
  return RFR_OK;
}

/* ---- a rank ---- */

static rfr_status train(rank *r) {
  rfr_compile_options o = rfr_compile_options_default();
  rfr_memory memory;
  rfr_tensor x;
  rfr_trace *t;
  o.comm = r->comm;
  o.shard = r->shard;
  o.keep_traces = 0;
  if (budget > 0 && r->ranks > 1) o.budget = budget, o.recompute = RFR_RECOMPUTE_AUTO;
  TRY(record(r->ctx, r->ranks, &t));
  TRY(rfr_compile(r->ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &r->programs));
  rfr_trace_destroy(t);
  TRY(rfr_programs_memory(r->programs, &memory));
  r->total = memory.total;
  TRY(write_inputs(r));
  TRY(rfr_program_run(r->programs, 0));
  TRY(rfr_program_capture(r->programs, 0));
  TRY(rfr_program_replay(r->programs, 0, NULL, 0));
  TRY(rfr_programs_wait(r->programs));
  const double start = now();
  for (int i = 0; i < steps; i++) TRY(rfr_program_replay(r->programs, 0, NULL, 0));
  TRY(rfr_programs_wait(r->programs));
  r->seconds = (now() - start) / steps;
  TRY(rfr_program_output(r->programs, 0, "loss", &x));
  TRY(rfr_programs_read(r->programs, &x, &r->loss));
  TRY(rfr_program_output(r->programs, 0, "norm", &x));
  TRY(rfr_programs_read(r->programs, &x, &r->norm));
  return RFR_OK;
}

static void *run(void *arg) {
  rank *r = arg;
  char device[16];
  rfr_ctx_options o = rfr_ctx_options_default();
  snprintf(device, sizeof device, "cuda:%d", r->number);
  if (!on_cpu) o.device = device;
  r->failed = rfr_ctx_create(&o, &r->ctx) != RFR_OK;
  if (!r->failed && r->ranks > 1 && !on_cpu)
    r->failed = rfr_comm_nccl_create(r->ctx, id, r->ranks, r->number, 60, &r->comm) != RFR_OK;
  if (r->failed) fprintf(stderr, "rank %d: %s\n", r->number, rfr_last_error()->message);
  r->failed = r->failed || train(r) != RFR_OK;
  if (r->failed) rfr_comm_abort(r->comm);
  rfr_programs_destroy(r->programs);
  if (!on_cpu) rfr_comm_destroy(r->comm);
  rfr_ctx_destroy(r->ctx);
  return NULL;
}

/* `together`: over a communicator; otherwise each rank trains alone. */
static bool run_ranks(rank *ranks, int n, bool together, rfr_shard shard) {
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  rfr_comm *comm[RANKS] = {NULL};
  pthread_t thread[RANKS];
  bool failed = false;
  if (!on_cpu) o.device = "cuda:0";
  if (rfr_ctx_create(&o, &ctx) != RFR_OK) return false;
  if (together) failed = (on_cpu ? rfr_comm_threads_create(ctx, n, 60, comm) : rfr_comm_nccl_id(ctx, id)) != RFR_OK;
  for (int i = 0; i < n && !failed; i++) {
    ranks[i] = (rank){.number = i, .ranks = together ? n : 1, .shard = shard, .comm = comm[i]};
    pthread_create(&thread[i], NULL, run, &ranks[i]);
  }
  for (int i = 0; i < n && !failed; i++) pthread_join(thread[i], NULL);
  for (int i = 0; i < n; i++) failed = failed || ranks[i].failed;
  for (int i = 0; i < n; i++) rfr_comm_destroy(comm[i]);
  rfr_ctx_destroy(ctx);
  return !failed;
}

int main(int argc, char **argv) {
  rank alone[RANKS], many[RANKS], first = {0};
  int bad = 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  choose(argc > 1 ? argv[1] : "small");
  fill_table();
  steps = argc > 2 ? atoi(argv[2]) : 4;
  on_cpu = argc > 3 && strcmp(argv[3], "cpu") == 0;
  budget = (int64_t)(argc > 4 ? 1e9 * atof(argv[4]) : 0);
  if (!run_ranks(alone, RANKS, false, RFR_SHARD_NONE)) return 1;
  for (int i = 0; i < RANKS; i++)
    printf("%-8s %d %8.2f GB %9.2f ms  loss %.9g norm %.9g\n", "alone", i, 1e-9 * (double)alone[i].total,
           1e3 * alone[i].seconds, (double)alone[i].loss, (double)alone[i].norm);
  const rank *slower = alone[1].seconds > alone[0].seconds ? &alone[1] : &alone[0];
  for (int mode = RFR_SHARD_NONE; mode <= RFR_SHARD_FULL; mode++) {
    if (argc > 5 && strcmp(argv[5], modes[mode]) != 0) continue;
    if (!run_ranks(many, RANKS, true, (rfr_shard)mode)) {
      printf("%-10s failed\n", modes[mode]);
      bad++;
      continue;
    }
    if (first.ranks == 0) first = many[0];
    const bool same = memcmp(&first.loss, &many[0].loss, sizeof first.loss) == 0 &&
                      memcmp(&first.norm, &many[0].norm, sizeof first.norm) == 0;
    printf("%-10s %8.2f GB %9.2f ms  %.3f x the slower rank  loss %.9g norm %.9g%s\n", modes[mode],
           1e-9 * (double)many[0].total, 1e3 * many[0].seconds, RANKS * slower->seconds / many[0].seconds,
           (double)many[0].loss, (double)many[0].norm, same ? "" : "  BITS DIFFER");
    fflush(stdout);
    bad += !same;
  }
  return bad > 0;
}
