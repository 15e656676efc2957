// SPDX-License-Identifier: Apache-2.0
// Complete training of a GPT-2 on bytes: the file to read first. Build and run with
//   cc train_gpt2.c $(pkg-config --cflags --libs refrain) -lm -Wl,-rpath,$(pkg-config --variable=libdir refrain)
//   ./a.out                                            on a built-in text, two seconds
//   ./a.out FILE [steps [hidden_size [layers [sequence]]]]
//
// A step is recorded once, as a program (a trace): forward, backward, clipping, optimizer, learning rate.
// Compiling it plans all memory to the byte; capturing it fixes the list of kernels; after that training is
// refilling the inputs and replaying. All values that change from step to step are in inputs and in the step
// block, which the program itself advances: nothing is recorded or allocated again.
#include <math.h>
#include <refrain/refrain.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MICROBATCHES = 2, ROWS = 4 }; // a step sees MICROBATCHES * ROWS sequences, ROWS at a time
enum { TRAIN, GENERATE, PROGRAMS };  // two programs over the same weights, in one arena

typedef struct {
  rfr_model_config model;
  int64_t steps, sequence;
  unsigned char *text;
  int64_t n_text;
} Setup;

// Every call that can fail returns a status; rfr_last_error() has its text.
static void check(rfr_status status) {
  if (status != RFR_OK) fprintf(stderr, "%s: %s\n", rfr_last_error()->message, rfr_last_error()->next), exit(1);
}
static void *checked(void *p) {
  if (!p) fprintf(stderr, "out of memory\n"), exit(1);
  return p;
}

// ---- 1. the data: a file, or a song ----

static void read_text(Setup *s, const char *path) {
  FILE *f = path ? fopen(path, "rb") : tmpfile();
  if (!f) perror(path ? path : "tmpfile"), exit(1);
  for (int i = 0; !path && i < 500; i++) fprintf(f, "%d green bottles hanging on the wall\n", 9 - i % 10);
  fseek(f, 0, SEEK_END), s->n_text = ftell(f), rewind(f);
  s->text = checked(malloc((size_t)s->n_text + 1));
  if (s->n_text <= s->sequence || fread(s->text, 1, (size_t)s->n_text, f) != (size_t)s->n_text)
    fprintf(stderr, "the text is shorter than a sequence, or cannot be read\n"), exit(1);
  fclose(f);
}

static uint32_t draw(uint64_t *state) { // splitmix64, upper half
  uint64_t z = *state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return (uint32_t)(z >> 32);
}

// A batch: random windows of the text, and as targets the same windows one byte later.
static void fill_batch(const Setup *s, uint64_t *random, int32_t *tokens, int32_t *targets) {
  const int64_t T = s->sequence;
  for (int64_t r = 0; r < MICROBATCHES * ROWS; r++) {
    const unsigned char *from = s->text + draw(random) % (uint64_t)(s->n_text - T);
    for (int64_t i = 0; i < T; i++) tokens[r * T + i] = from[i], targets[r * T + i] = from[i + 1];
  }
}

// ---- 2. the training step, recorded ----

// Microbatch m of an input (MICROBATCHES, width): a view, which costs nothing.
static rfr_value microbatch(rfr_trace *t, rfr_value x, int m) {
  int64_t width = rfr_value_type(t, x).shape[1];
  return rfr_reshape(t, rfr_slice(t, x, 0, m, 1), 1, &width);
}

static rfr_value moment(rfr_trace *t, const char *of, const char *suffix, rfr_type like) {
  char name[128];
  snprintf(name, sizeof name, "%s%s", of, suffix);
  return rfr_input(t, name, RFR_ROLE_STATE, RFR_F32, like.rank, like.shape);
}

// AdamW on every parameter, with the schedule and the clipping as ops of the program. A gradient that is not
// finite sets `skip`, and then the step changes nothing but its count of skipped steps.
static void record_optimizer(rfr_trace *t, const Setup *s, const rfr_value *w, rfr_value loss, rfr_value step) {
  const int n = rfr_model_parameter_count(&s->model);
  rfr_value *g = checked(malloc((size_t)n * sizeof *g)), skip;
  for (int i = 0; i < n; i++) g[i] = rfr_gradient(t, loss, w[i], RFR_F32); // the backward: autodiff writes it
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_lr_options schedule = rfr_lr_options_default();
  schedule.kind = RFR_LR_COSINE;
  schedule.base = 3e-3, schedule.min = 3e-4;
  schedule.warmup = s->steps / 20 + 1, schedule.total = s->steps;
  rfr_value lr = rfr_lr_schedule(t, step, &schedule);
  rfr_value norm = rfr_grad_norm(t, n, g, &skip), clip = rfr_clip_scale(t, norm, 1.0);
  for (int i = 0; i < n; i++) {
    rfr_type type = rfr_value_type(t, w[i]);
    const char *name = rfr_value_name(t, w[i]);
    rfr_adamw_options o = rfr_adamw_options_default();
    o.decay = type.rank == 2 ? 0.1 : 0; // matrices decay, biases and norms do not
    rfr_value m = moment(t, name, ".m", type), v = moment(t, name, ".v", type);
    rfr_adamw(t, w[i], g[i], m, v, RFR_NONE, lr, clip, skip, step, &o);
  }
  rfr_step_end(t, step, skip);
  rfr_output(t, "norm", norm), rfr_output(t, "lr", lr);
  free(g);
}

static void record_train(rfr_trace *t, const Setup *s, rfr_value *w) {
  const int64_t shape[2] = {MICROBATCHES, ROWS * s->sequence}, boundaries = ROWS + 1;
  rfr_model_declare(t, &s->model, NULL, 0, w); // every parameter an input, all of them trainable
  rfr_value step = rfr_step_block(t);          // counts of steps and the seed, on the device
  rfr_value all_tokens = rfr_input(t, "tokens", RFR_ROLE_INPUT, RFR_I32, 2, shape);
  rfr_value all_targets = rfr_input(t, "targets", RFR_ROLE_INPUT, RFR_I32, 2, shape);
  // Sequences are packed one after the other; attention stays between an offset and the next.
  rfr_value offsets = rfr_input(t, "offsets", RFR_ROLE_INPUT, RFR_I32, 1, &boundaries);
  rfr_value targets[MICROBATCHES], loss = RFR_NONE;
  for (int m = 0; m < MICROBATCHES; m++) targets[m] = microbatch(t, all_targets, m);
  // The loss is a sum divided by the valid targets of the step, so microbatches give the result of one batch.
  rfr_value inverse = rfr_token_count(t, MICROBATCHES, targets, -100, NULL);
  for (int m = 0; m < MICROBATCHES; m++) {
    rfr_microbatch(t, m);
    rfr_value h = rfr_model_forward(t, &s->model, w, microbatch(t, all_tokens, m), offsets, step); // (T,C)
    rfr_value logits =
        rfr_model_logits(t, &s->model, w, h, RFR_F32); // (T,V); fused into the loss, never stored in full
    rfr_value part = rfr_cross_entropy(t, logits, targets[m], inverse, -100);
    rfr_microbatch(t, -1);
    loss = m ? rfr_add(t, loss, part) : part;
  }
  record_optimizer(t, s, w, loss, step);
  rfr_output(t, "loss", loss);
}

// ---- 3. generation: the same model on one window, without a backward ----

static void record_generate(rfr_trace *t, const Setup *s, rfr_value *w) {
  const int64_t boundaries = 2;
  rfr_model_declare(t, &s->model, NULL, 0, w);
  rfr_value tokens = rfr_input(t, "window", RFR_ROLE_INPUT, RFR_I32, 1, &s->sequence);
  rfr_value offsets = rfr_input(t, "window.offsets", RFR_ROLE_INPUT, RFR_I32, 1, &boundaries);
  rfr_value h = rfr_model_forward(t, &s->model, w, tokens, offsets, RFR_NONE);
  rfr_output(t, "logits", rfr_model_logits(t, &s->model, w, h, RFR_F32));
}

// ---- 4. compile: the passes, the plan, one arena ----

// Recording calls return values, never errors: the first one is kept, and finish returns it.
static rfr_trace *record(rfr_ctx *ctx, const Setup *s, void (*with)(rfr_trace *, const Setup *, rfr_value *)) {
  rfr_trace *t;
  rfr_value *w = checked(malloc((size_t)rfr_model_parameter_count(&s->model) * sizeof *w));
  check(rfr_trace_create(ctx, &t));
  with(t, s, w);
  check(rfr_trace_finish(t));
  free(w);
  return t;
}

static rfr_programs *compile(rfr_ctx *ctx, const Setup *s) {
  rfr_programs *p;
  rfr_trace *t[PROGRAMS] = {record(ctx, s, record_train), record(ctx, s, record_generate)};
  const rfr_trace *const traces[PROGRAMS] = {t[TRAIN], t[GENERATE]};
  const char *const names[PROGRAMS] = {"train", "generate"};
  check(rfr_compile(ctx, PROGRAMS, traces, names, NULL, &p));
  for (int i = 0; i < PROGRAMS; i++) rfr_trace_destroy(t[i]);
  return p;
}

static void *input(rfr_programs *p, const char *name) { // its memory, where the program will look for it
  rfr_tensor x;
  check(rfr_programs_tensor(p, name, &x));
  return x.data;
}
static float *output(rfr_programs *p, int program, const char *name) {
  rfr_tensor x;
  check(rfr_program_output(p, program, name, &x));
  return x.data;
}

static void fill_state(rfr_programs *p, const Setup *s) {
  rfr_parameter w;
  rfr_tensor x;
  for (int i = 0; rfr_programs_tensor_at(p, i, &x) == RFR_OK; i++) memset(x.data, 0, (size_t)x.bytes);
  for (int i = 0; rfr_model_parameter(&s->model, i, &w) == RFR_OK; i++)
    check(rfr_parameter_fill(&w, 1, s->model.dtype, 1, input(p, w.name)));
  for (int i = 0; i <= ROWS; i++) ((int32_t *)input(p, "offsets"))[i] = (int32_t)(i * s->sequence);
  check(rfr_programs_load(p)); // what depends on frozen inputs alone is computed here, once
}

// ---- 5. replay ----

static float train(rfr_programs *p, const Setup *s) {
  int32_t *tokens = input(p, "tokens"), *targets = input(p, "targets");
  const float *loss = output(p, TRAIN, "loss"), *norm = output(p, TRAIN, "norm"), *lr = output(p, TRAIN, "lr");
  uint64_t random = 1;
  check(rfr_program_capture(p, TRAIN));
  for (int64_t step = 1; step <= s->steps; step++) {
    fill_batch(s, &random, tokens, targets);
    check(rfr_program_replay(p, TRAIN, NULL, 0));
    if (step == 1 || step % (s->steps / 10 + 1) == 0 || step == s->steps)
      printf("step %4lld  loss %.3f  %.3f bits per byte  norm %.2f  lr %.1e\n", (long long)step, *loss,
             *loss / log(2.0), *norm, *lr);
  }
  return *loss;
}

// Appends the most probable byte, repeatedly; the window has the last bytes of the text.
static void generate(rfr_programs *p, const Setup *s, int bytes) {
  int32_t *window = input(p, "window");
  const float *logits = output(p, GENERATE, "logits");
  const int64_t T = s->sequence, V = s->model.vocab_size;
  ((int32_t *)input(p, "window.offsets"))[1] = (int32_t)T;
  for (int64_t i = 0; i < T; i++) window[i] = s->text[i];
  check(rfr_program_capture(p, GENERATE));
  for (int i = 0; i < bytes; i++) {
    check(rfr_program_replay(p, GENERATE, NULL, 0));
    const float *last = logits + (T - 1) * V;
    int32_t best = 0;
    for (int32_t v = 1; v < V; v++)
      if (last[v] > last[best]) best = v;
    memmove(window, window + 1, (size_t)(T - 1) * sizeof *window);
    putchar(window[T - 1] = best);
  }
  putchar('\n');
}

static int64_t argument(int argc, char **argv, int i, int64_t otherwise) {
  int64_t x = i < argc ? strtoll(argv[i], NULL, 10) : otherwise;
  if (x < 1) fprintf(stderr, "%s FILE [steps [hidden_size [layers [sequence]]]]\n", argv[0]), exit(2);
  return x;
}

int main(int argc, char **argv) {
  Setup s = {.model = rfr_model_config_default(RFR_MODEL_GPT2)}; // vocabulary: the 256 bytes
  s.steps = argument(argc, argv, 2, 200);
  s.model.hidden_size = argument(argc, argv, 3, 64);
  s.model.layers = argument(argc, argv, 4, 2);
  s.model.max_positions = s.sequence = argument(argc, argv, 5, 64);
  s.model.heads = s.model.kv_heads = s.model.hidden_size > 64 ? s.model.hidden_size / 64 : 2;
  s.model.head_dim = s.model.hidden_size / s.model.heads;
  s.model.intermediate_size = 4 * s.model.hidden_size;
  check(rfr_model_config_check(&s.model));
  read_text(&s, argc > 1 ? argv[1] : NULL);
  rfr_ctx *ctx; // allocator, threads, log: no globals
  check(rfr_ctx_create(NULL, &ctx));
  rfr_programs *p = compile(ctx, &s);
  rfr_plan_summary plan; // known before anything runs
  check(rfr_program_plan(p, TRAIN, &plan));
  printf("%.1f MiB planned, all there is: %.1f weights and state, %.1f for the step\n", plan.planned_bytes / 1048576.0,
         plan.persistent_bytes / 1048576.0, plan.transient_planned_bytes / 1048576.0);
  fill_state(p, &s);
  float loss = train(p, &s);
  generate(p, &s, 60);
  rfr_programs_destroy(p), rfr_ctx_destroy(ctx), free(s.text);
  return isfinite(loss) && (argc > 1 || loss < 1) ? 0 : 1; // its own text is learned in the time
}
