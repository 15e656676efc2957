/* SPDX-License-Identifier: Apache-2.0
 *
 * Training runs: a run reads a configuration, trains, reports events, and writes checkpoints into a folder. The program
 * `refrain` uses these calls.
 *
 * A run compiles its programs (train, evaluate, and prefill and decode for text) over one state and one arena, captures
 * them, and then replays them. It installs no signal handlers, writes to no standard stream and never exits. Only one
 * thread at a time may call functions of one run, except rfr_run_request_stop.
 *
 *   rfr_run *run;
 *   rfr_run_options o = rfr_run_options_default();
 *   o.on_event = print_event;
 *   rfr_status s = rfr_run_open(ctx, yaml_text, "runs/first", &o, &run);
 *   if (s == RFR_OK) s = rfr_run_train(run);   // RFR_STOPPED: saved, resumable
 *   rfr_run_close(run);
 *
 * The configuration's keys are in docs/config.md.
 */
#ifndef REFRAIN_TRAIN_H
#define REFRAIN_TRAIN_H

#include "refrain/chat.h"
#include "refrain/nn.h"
#include "refrain/program.h"
#include "refrain/schedule.h"
#include "refrain/text.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_run rfr_run;

#define RFR_EVENTS(X)                                                                                                 \
  X(RFR_EVENT_COMPILE, "compile")       /* message: the compile step that ended */                                    \
  X(RFR_EVENT_START, "start")           /* the run is open; step: steps done by earlier sessions */                   \
  X(RFR_EVENT_METRICS, "metrics")       /* numbers of one step */                                                     \
  X(RFR_EVENT_EVALUATION, "evaluation") /* loss, bits_per_byte and tokens over held-out data */                       \
  X(RFR_EVENT_CHECKPOINT, "checkpoint") /* message: the folder written */                                             \
  X(RFR_EVENT_WARNING, "warning")       /* message: one line; show it even where progress is not shown */             \
  X(RFR_EVENT_END, "end")               /* message: "done", "stopped" or the error's slug */                          \
  X(RFR_EVENT_PROGRESS, "progress")     /* evaluated windows so far, of windows_planned; not logged */                \
  X(RFR_EVENT_SCHEDULE, "schedule") /* run.time set the decay or the last step, or a ramp's phase begins; one line */ \
  X(RFR_EVENT_WATCH, "watch")       /* statistics of the values of run.watch in one step; in watch.jsonl */
typedef enum rfr_event_kind {
#define RFR_EVENT_ENUM(e, name) e,
  RFR_EVENTS(RFR_EVENT_ENUM)
#undef RFR_EVENT_ENUM
} rfr_event_kind;
RFR_API const char *rfr_event_name(rfr_event_kind kind);

/* Fields that an event does not carry are 0; strings are never NULL. */
typedef struct rfr_event {
  size_t size;
  rfr_event_kind kind;
  const char *message;
  int64_t step;             /* steps attempted so far; metrics: the step's own number, from 1 */
  int64_t steps;            /* steps of the run; an estimate while rfr_run_info.steps_estimated is 1 */
  double loss;              /* nats per token; with preferences the DPO loss per pair */
  double bits_per_byte;     /* loss in bits per byte of text */
  double grad_norm;         /* before clipping */
  double lr;                /* learning rate of the step */
  int64_t tokens;           /* valid targets of the step, or of the evaluation; schedule: tokens of a step of a ramp */
  int skipped;              /* 1: no weight was updated: non-finite gradients, or invalid or too many rows of experts */
  double seconds;           /* duration of the step, the evaluation or the checkpoint */
  double most_load;         /* metrics, with experts: rows of the most loaded expert of all layers, over the mean */
  double least_load;        /* the same for the least loaded expert */
  double seconds_left;      /* metrics: estimate of the time to the end of the run, 0 at the first step */
  int64_t windows;          /* progress, evaluation: windows evaluated */
  int64_t windows_planned;  /* windows of this evaluation */
  int64_t windows_held_out; /* all held-out windows; more than windows_planned if run.evaluate_windows limits it */
  double margin;            /* metrics, evaluation, with preferences: mean reward margin of the pairs */
  double accuracy;          /* the same: fraction of the pairs with a positive margin */
  const double *layer_loads;  /* metrics, with experts: most_load of each layer with experts */
  int64_t layers;             /* number of these layers */
  int rank;                   /* the rank that sends the event; 0 without rfr_run_options.comm */
  const rfr_watched *watched; /* watch: statistics over this rank's shard and microbatches */
  int64_t values;             /* number of watched values */
} rfr_event;
/* Called on the thread that uses the run. The event is borrowed and valid until the function returns. */
typedef void (*rfr_event_fn)(const rfr_event *event, void *user);

/* The programs that a run compiles, as bits. Prefill reads a prompt, decode appends a token. Generation needs both;
 * only they have a KV cache. */
#define RFR_RUN_PROGRAMS(X) X(TRAIN, train) X(EVALUATE, evaluate) X(PREFILL, prefill) X(DECODE, decode)
enum {
  RFR_RUN_TRAIN = 1,
  RFR_RUN_EVALUATE = 2,
  RFR_RUN_PREFILL = 4,
  RFR_RUN_DECODE = 8,
  RFR_RUN_GENERATE = RFR_RUN_PREFILL | RFR_RUN_DECODE,
  RFR_RUN_ALL = 15
};

/* One window of a program's own data: `sequence` tokens (data.sequence), to be filled by an rfr_window_fn. */
enum { RFR_NO_TARGET = -100 };
typedef struct rfr_window {
  size_t size;
  int validation; /* 0: training; 1: held out */
  int64_t index; /* training: 0, 1, 2, ... over the run, continued by a resume; held out: 0 to validation_windows - 1 */
  int64_t sequence;
  int32_t *tokens;     /* (sequence); zeros before the call */
  int32_t *targets;    /* (sequence): the token to predict at each position, usually the next one; RFR_NO_TARGET, the
                          value before the call, means no loss at this position */
  int32_t *documents;  /* (sequence): positions at which documents begin, ascending from 0; attention stays within a
                          document */
  int64_t n_documents; /* 1 before the call */
  int64_t position;    /* in: the value that the call for the previous window left, 0 for the first window; out: the
                          value for the next call. A checkpoint stores the position of its step, and a resume continues
                          with it. For held-out data it is 0 at window 0 and is not stored */
  char message[256];   /* text of the error, if the call fails */
} rfr_window;
/* Fills a window. A result other than 0 fails the call of the run with data.source; if the step is repeated, the same
 * window is requested again. Called by rfr_run_step, rfr_run_train, rfr_run_profile and rfr_run_evaluate on their
 * thread, once per window, in the order of their indices, up to four steps ahead of the step that trains on it; never
 * during a capture. It must not call functions of the run. Results are reproducible if windows of the same index are
 * the same: fill them only from `index` or `position`. */
typedef int (*rfr_window_fn)(rfr_window *window, void *user);

/* Data that the caller supplies instead of files. */
typedef struct rfr_data_source {
  size_t size;
  rfr_window_fn fill; /* it and `user` are used until the run is closed */
  void *user;
  const char *name;           /* name of the data, or NULL; a resume with another name warns, as with other files */
  int64_t train_windows;      /* windows of an epoch, for run.epochs; the next epoch continues the index. 0: unknown */
  int64_t validation_windows; /* held out; 0: none */
} rfr_data_source;
RFR_API rfr_data_source rfr_data_source_default(void);

typedef struct rfr_run_options {
  size_t size;
  const char *config_name;      /* name of the configuration in errors; NULL: "config" */
  const char *config_folder;    /* relative folders in the configuration start here; NULL: the working folder */
  const char *const *overrides; /* "batch.microbatch=4"; the last one of a key counts */
  int n_overrides;
  int programs;          /* RFR_RUN_TRAIN | RFR_RUN_EVALUATE; without RFR_RUN_TRAIN an existing run is opened for
                            reading */
  int resume;            /* 1: continue from the folder's newest checkpoint, or start if it has none */
  int strict;            /* 1: resume under another machine, library or thread count is an error */
  int debug;             /* 1: guards around buffers, dead buffers filled with NaN, a NaN check after every op; slow */
  int eager;             /* 1: launch kernel by kernel instead of replay; bitwise equal */
  int keep_traces;       /* 1: rfr_program_trace has the trace after every pass */
  int no_data;           /* 1: read no data and no weights: for plans, traces and timing (random tokens) */
  rfr_event_fn on_event; /* NULL: none */
  void *event_user;
  int plan_only;               /* 1: as no_data, and the programs get no memory: rfr_compile_options.plan_only */
  const rfr_data_source *data; /* NULL: files; otherwise data.train is [], and no tokenizer is needed. Copied */
  int64_t texts;  /* texts that rfr_run_generate_batch continues at once, 1 to 64; 0: 1. Each has its own KV cache */
  rfr_comm *comm; /* this rank's handle; outlives the run. All ranks open the same run, and call the same functions in
                     the same order; only rank 0 writes the folder. NULL: one rank */
  int ema; /* 1: for reading: the averaged weights of the checkpoint (optimizer.ema) instead of the trained ones */
} rfr_run_options;
RFR_API rfr_run_options rfr_run_options_default(void);

/* Opens a run: reads configuration and data, compiles, and fills the weights or loads a checkpoint. The options decide
 * what is opened:
 *   with RFR_RUN_TRAIN               a new run. `folder` is created; NULL: nothing is ever written
 *   with RFR_RUN_TRAIN and resume    the run in `folder`, at its newest checkpoint; a new run if there is none.
 *                                    `config_text` NULL: the folder's config.yaml, whose folders are absolute, with the
 *                                    overrides
 *   without RFR_RUN_TRAIN            the newest checkpoint of the run in `folder`, for reading, or with `config_text`
 *                                    NULL the checkpoint RUN/step-N that `folder` is; `config_text` as above.
 *                                    `folder` NULL: the weights of the folder that the configuration's `model` names
 *   with no_data                     programs without data and weights; nothing is read or written
 * The folder stays locked while a run that writes into it is open.
 * Errors: config.*, data.*, model.*, plan.over_budget; run.exists: the folder holds a run or checkpoints and resume was
 * not asked for; run.busy: another process trains in it; run.folder: without a text, the folder is that of a model,
 * an adapter, or, for training, a checkpoint; file.space: less is free than checkpoints need; file.write: the folder
 * cannot be written;
 * resume.mismatch; checkpoint; run.ema: there are no averaged weights to read. */
RFR_API rfr_status rfr_run_open(rfr_ctx *ctx, const char *config_text, const char *folder,
                                const rfr_run_options *options, rfr_run **out);
/* Frees everything; writes nothing. Accepts NULL. */
RFR_API void rfr_run_close(rfr_run *run);

/* One step: a replay, then its metrics as an event. Errors: run.diverged or run.capacity (20 skipped steps in a
 * row), io. Ignores stop requests. */
RFR_API rfr_status rfr_run_step(rfr_run *run);
/* One step as rfr_run_step, op by op, timing each op: see rfr_program_profile. */
RFR_API rfr_status rfr_run_profile(rfr_run *run, rfr_op_time *times, int max, int *n);
/* Steps until the configured number or time, with evaluations and checkpoints as configured and a last checkpoint.
 * RFR_STOPPED after a stop request: a checkpoint is written, and the error names its folder. run.diverged or
 * run.capacity: 20 steps in a row, or the last step, were skipped. run.diverged: weights are not finite. Older
 * checkpoints stay. */
RFR_API rfr_status rfr_run_train(rfr_run *run);
/* Asks rfr_run_train to end after the step or the evaluation batch in flight, and rfr_run_generate and rfr_run_evaluate
 * to end. May be called from any thread or signal handler while the run is open. */
RFR_API void rfr_run_request_stop(rfr_run *run);

typedef struct rfr_evaluation {
  double loss; /* mean over tokens, nats */
  double bits_per_byte;
  int64_t tokens; /* predicted tokens */
  int64_t bytes;  /* bytes of text that these tokens stand for */
  double seconds;
  int64_t windows, windows_held_out; /* evaluated windows; all held-out windows. Equal unless run.evaluate_windows
                                        limits the evaluations during training */
  int64_t pairs;                     /* with preferences; `loss` is the mean DPO loss of the pairs */
  double margin, accuracy;           /* see rfr_event */
} rfr_evaluation;
/* Evaluates all held-out data, with progress events. Errors: data.held_out: nothing is held out; run.stopped. */
RFR_API rfr_status rfr_run_evaluate(rfr_run *run, rfr_evaluation *out);

typedef struct rfr_generate_options {
  size_t size;
  int64_t tokens;     /* maximum number of tokens to append; default 256 */
  double temperature; /* 0: the most probable token; default 0.8 */
  int64_t top_k;      /* sample from the k most probable; 0: all */
  double top_p;       /* sample from the smallest set of most probable tokens that sums to top_p; 1: all */
  uint64_t seed;
  double min_p; /* sample from tokens with at least min_p times the probability of the most probable one; 0: all */
  double repetition_penalty; /* for tokens in the text, prompt included: see rfr_text_append_at; default 1: none */
  const int32_t *stop;       /* n_stop tokens, each of which ends the text; borrowed until the call returns */
  int64_t n_stop;
} rfr_generate_options;
RFR_API rfr_generate_options rfr_generate_options_default(void);

/* Called with each token as soon as it is sampled, on the caller's thread; a result other than 0 ends the text. */
typedef int (*rfr_token_fn)(int32_t token, void *user);
/* Continues the `n` tokens of `prompt`, at least one. A stop token ends the text and is not passed to `take`. The same
 * seed, weights and machine give the same text. A run that trains with optimizer.ema continues texts with the averages,
 * which it also evaluates. A stop request ends it.
 * The KV cache holds data.sequence tokens. A longer text or prompt continues from its last data.sequence / 2 tokens,
 * which are prefilled again from position 0: the model does not see the text before them. Errors: argument, also when
 * the run was opened without RFR_RUN_GENERATE, or for a token that is not in the vocabulary. */
RFR_API rfr_status rfr_run_generate_tokens(rfr_run *run, const int32_t *prompt, int64_t n,
                                           const rfr_generate_options *options, rfr_token_fn take, void *user);
/* One text of a batch: its prompt, the seed of its draws, and where its tokens go. */
typedef struct rfr_prompt {
  const int32_t *tokens; /* n, at least one; borrowed until the call returns */
  int64_t n;
  uint64_t seed;
  rfr_token_fn take;
  void *user;
} rfr_prompt;
/* Continues n prompts, rfr_run_options.texts at a time; a prompt starts as soon as an earlier text has ended. Each text
 * is that of rfr_run_generate_tokens with the prompt's seed: exactly with the portable GEMM, whose rows do not depend
 * on the number of rows, otherwise within rounding, which may change a token. `options->seed` is not used. Errors: as
 * above. */
RFR_API rfr_status rfr_run_generate_batch(rfr_run *run, const rfr_prompt *prompts, int64_t n,
                                          const rfr_generate_options *options);
/* The same for a byte model: continues `n` bytes and passes each byte to `write`. Errors: as above; unsupported if the
 * model samples a token that is not a byte. */
RFR_API rfr_status rfr_run_generate(rfr_run *run, const char *prompt, size_t n, const rfr_generate_options *options,
                                    rfr_write_fn write, void *user);
/* Computes the logits after each of n given tokens: `logits` gets f32 (n,V); row i predicts the token after
 * tokens[0..i]. n is at most data.sequence. Launches the decode program once per token. Errors: argument, as above. */
RFR_API rfr_status rfr_run_score(rfr_run *run, const int32_t *tokens, int64_t n, float *logits);

/* Writes a checkpoint now: a Hugging Face folder "step-N" in the run's folder, visible only when it is complete.
 * Errors: file.write: older checkpoints still load; run.diverged: weights are not finite, nothing is written. */
RFR_API rfr_status rfr_run_save(rfr_run *run);

/* A line of failures.jsonl in the run's folder: training ended with an error. rfr_run_train writes it itself; a
 * launcher writes it for a rank that was killed by a signal. */
typedef struct rfr_failure {
  size_t size;
  int rank, ranks;             /* default 0 of 1 */
  int64_t step;                /* steps attempted; -1: not known */
  const char *error, *message; /* the error's slug or "launcher", and its text; borrowed until the call returns */
  const char *checkpoint;      /* the newest one's folder; NULL: not known */
} rfr_failure;
RFR_API rfr_failure rfr_failure_default(void);
/* Appends the line, with the time; lines of several processes do not mix. Errors: argument; file.write. */
RFR_API rfr_status rfr_failure_append(rfr_ctx *ctx, const char *folder, const rfr_failure *failure);

typedef struct rfr_run_info {
  size_t size;
  int64_t step, steps; /* steps attempted so far; steps of the run */
  int64_t skipped;     /* attempted steps that updated no weight */
  int64_t tokens_per_step;
  int64_t parameters;           /* elements of the model, without those of an adapter */
  int64_t adapter_parameters;   /* elements of the adapter; 0: none */
  int64_t trainable_parameters; /* trained elements of both */
  int64_t train_files, train_bytes, validation_files, validation_bytes;
  int64_t experts, expert_rows;            /* experts of a layer, 0: none; rows of a microbatch over all experts */
  int64_t expert_layers;                   /* layers with experts */
  int64_t expert_bytes;                    /* bytes of the expert weights of one layer */
  double flops_per_step;                   /* from the model's formulas: a multiply-add counts as two */
  rfr_dtype dtype;                         /* type of weights and activations */
  int byte_tokens;                         /* 1: bits_per_byte is defined: tokens are bytes, or the data is text */
  const char *data_hash;                   /* hash of the data, hexadecimal; borrowed */
  const char *checkpoint;                  /* folder of the checkpoint last written or loaded, or ""; borrowed */
  int64_t train_tokens, validation_tokens; /* 0 without data */
  double epochs;                           /* passes over the data in all steps; an estimate if steps is one */
  int64_t duplicate_files, empty_files;    /* files that were left out: equal to another file; empty */
  int64_t checkpoint_bytes;                /* bytes of a checkpoint's tensors: weights and optimizer state */
  double time;                             /* run.time in seconds; 0: the run is given in steps */
  int steps_estimated;                     /* 1: run.time decides, and the last step is not known yet */
  int64_t train_rows, validation_rows;     /* of JSONL files; 0: the data is text */
  int64_t train_windows;                   /* windows of data.sequence tokens in an epoch */
  int64_t trained_tokens;                  /* tokens of train_tokens that have a loss */
  int64_t truncated_rows, cut_tokens;      /* rows longer than data.sequence that were cut; tokens cut off */
  int64_t dropped_rows;                    /* rows left out because they are longer than data.sequence */
  int64_t untrained_rows;                  /* rows left out because they have no token with a loss */
  int64_t equal_rows;                      /* pairs left out because both answers are equal */
  int64_t cached_files;                    /* files whose tokens were read from the cache */
  int64_t max_positions;                   /* longest sequence of the model, tokens */
  int64_t window;                          /* data.sequence: tokens of a window, and of the KV cache */
  int64_t vocab_size;
  const char *model; /* the configuration's model, or "": there is none; borrowed */
  int preference;    /* 1: the run trains on pairs of answers; losses are per pair, bits per byte are not defined */
  int64_t layers;    /* layers of the model */
  int ranks;         /* ranks of rfr_run_options.comm; 1 without one */
  rfr_shard shard;   /* parallel.shard */
} rfr_run_info;
RFR_API void rfr_run_get_info(const rfr_run *run, rfr_run_info *out);

/* Called with a piece of text; trained 1: its tokens have a loss. The text is not NUL-terminated. */
typedef void (*rfr_sample_fn)(const char *text, size_t n, int trained, void *user);
/* Writes the text of a training row's tokens in pieces, special tokens included. `row` is 0 to
 * rfr_run_info.train_rows - 1, in the order of the files. Errors: argument (no such row, or the data is text). */
RFR_API rfr_status rfr_run_data_row(const rfr_run *run, int64_t row, rfr_sample_fn write, void *user);

/* The tokenizer of the run; NULL: tokens are bytes. The chat template of its conversations; NULL: there is none, or the
 * run was opened with no_data. Both are borrowed and valid as long as the run. */
RFR_API const rfr_tokenizer *rfr_run_tokenizer(const rfr_run *run);
RFR_API const rfr_chat_template *rfr_run_template(const rfr_run *run);

/* Path of the i-th file of the training or the held-out data; NULL past the end. Borrowed. */
RFR_API const char *rfr_run_data_file(const rfr_run *run, int validation, int64_t i);

/* The stages of a run with parallel.pipeline, and the memory of their callables. */
typedef struct rfr_run_pipeline {
  size_t size;
  int ranks, rank; /* ranks 1: there is no pipeline, and all other fields are 0 */
  int stages;      /* stages of all ranks */
  rfr_schedule_kind schedule;
  int64_t microbatches;
  int64_t planned_bytes;     /* persistent results of the callables, outside the programs' arena and the step memory */
  int64_t slot_bytes, slots; /* bytes and number of microbatch slots, in the step memory */
  int64_t shared_bytes;      /* buffers that live within one action, in the step memory */
  int64_t message_bytes;     /* bytes of an activation or of its gradient */
  int64_t messages;          /* messages that this rank sends in a step */
  double recomputed_flops;   /* recomputation of a microbatch on this rank */
  int64_t last_layers;       /* layers of the last stage; the others are split evenly over the other stages */
} rfr_run_pipeline;
RFR_API void rfr_run_get_pipeline(const rfr_run *run, rfr_run_pipeline *out);
/* Runs a step with a synchronization before and after each action. `costs` has rfr_run_pipeline.stages entries; each
 * gets the seconds of the stage's F, I, W and B (medians over its microbatches), in the form of rfr_schedule_simulate.
 * *update: seconds of the optimizer's program on this rank. All ranks make the call together. Errors: argument, without
 * a pipeline. */
RFR_API rfr_status rfr_run_stage_costs(rfr_run *run, rfr_stage_costs *costs, double *update);

/* The compiled programs, for plans, traces and tensors; borrowed. The index of a program (RFR_RUN_TRAIN, ...); -1 if it
 * was not compiled. */
RFR_API rfr_programs *rfr_run_programs(rfr_run *run);
RFR_API int rfr_run_program_index(const rfr_run *run, int program);

/* A phase of a run: consecutive steps of one size (batch.ramp). A run without a ramp has one phase. */
typedef struct rfr_run_phase {
  size_t size;
  int64_t until;    /* last step of the phase; 0: it is the last phase */
  int64_t tokens;   /* tokens of a step, over all ranks */
  int64_t sequence; /* tokens of a sequence */
  int program;      /* index of its training program in rfr_run_programs, -1 if the run was opened without one */
} rfr_run_phase;
/* Phase i, from 0, in the order of their steps. Errors: argument, past the last phase. */
RFR_API rfr_status rfr_run_phase_at(const rfr_run *run, int i, rfr_run_phase *out);

/* The machine and the build. Pointers are borrowed from the context. */
typedef struct rfr_machine {
  size_t size;
  const char *isa; /* kernels in use: "v2", "v3", "v4" */
  int threads;
  int has_amx;             /* bf16 matrix units, and the kernel allows their use */
  char matmul[96];         /* the GEMM library: "oneDNN 2.6.3 (avx512_core_amx)", or why there is none */
  int matmul_library;      /* 0: there is none; GEMMs use the portable kernel, without matrix units */
  const char *module_path; /* folder of the loadable modules */
  rfr_dtype best_dtype;    /* what `dtype: auto` means on the context's device */
  const char *device;      /* the context's: "cpu", "cuda", ... */
} rfr_machine;
RFR_API rfr_status rfr_machine_describe(rfr_ctx *ctx, rfr_machine *out);
/* Writes one line about the context's GPU and its libraries, at most `size` bytes with the NUL: "NVIDIA H200, ...". For
 * a context on the CPU: about the first GPU. Loads the libraries, so do not call it in a run on the CPU. Errors:
 * backend.missing, with the reason why no GPU can be used. */
RFR_API rfr_status rfr_cuda_describe(rfr_ctx *ctx, char *text, size_t size);

/* One component that GPUs need: the module, the driver, a library. */
typedef struct rfr_piece {
  const char *name, *costs; /* what does not work without it; static */
  char found[160];          /* with its version; "": not found */
  int missing;              /* 1: not found, or too old */
} rfr_piece;
/* The i-th component, from 0. Loads the libraries, as rfr_cuda_describe does. Errors: argument, past the end. */
RFR_API rfr_status rfr_cuda_piece(rfr_ctx *ctx, int i, rfr_piece *out);

/* Writes the resolved configuration as YAML; with `sources` each line ends with the source of its value. Ignored keys
 * are reported as warnings to options->on_event. Errors: config.*. */
RFR_API rfr_status rfr_config_resolve(rfr_ctx *ctx, const char *config_text, const rfr_run_options *options,
                                      int sources, rfr_write_fn write, void *user);

/* Writes the configuration of `refrain finetune`: it trains an adapter of `model` (a Hugging Face folder or a GGUF
 * file) on rows; `data` has n_data files or patterns. data.sequence is chosen from the lengths of the rows, some rows
 * are held out, and rows with pairs of answers give a preference run. Overrides in `options` change this. Pass the same
 * options to rfr_run_open. `options` NULL: the defaults; on_event gets only warnings. Reads the rows, loads no weights.
 * Errors: argument; file.open; data.format; those of a run's configuration and data. */
RFR_API rfr_status rfr_finetune_config(rfr_ctx *ctx, const char *model, const char *const *data, int n_data,
                                       const rfr_run_options *options, rfr_write_fn write, void *user);
/* Writes a configuration that opens `model` without training it, for rfr_run_open with `folder` NULL and the programs
 * RFR_RUN_GENERATE. Its windows are the model's longest sequence, at most `longest` tokens, or the override
 * data.sequence of `options`. Errors: argument; file.open; those of reading the model's configuration. */
RFR_API rfr_status rfr_model_run_config(rfr_ctx *ctx, const char *model, int64_t longest,
                                        const rfr_run_options *options, rfr_write_fn write, void *user);

/* One key of the configuration, a row of the table in docs/config.md. All text is static. */
typedef struct rfr_config_key {
  size_t size;
  const char *name;     /* "optimizer.lr" */
  const char *type;     /* what a file may hold: "number" */
  const char *initial;  /* the default as text; "required": there is none; "auto": derived from other keys */
  const char *accepted; /* a range "A..B", "A.." or ">A", or choices "a|b"; "": any value of the type */
  const char *meaning;
  int may_change; /* 1: a resume may change it */
} rfr_config_key;
/* The i-th key, from 0, in the order of the file format. Needs no context; any thread. Errors: argument past the end,
 * with *out zeroed. */
RFR_API rfr_status rfr_config_key_at(int i, rfr_config_key *out);

#ifdef __cplusplus
}
#endif
#endif
