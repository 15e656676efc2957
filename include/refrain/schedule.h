/* SPDX-License-Identifier: Apache-2.0
 *
 * Pipeline schedules: a list of actions for each rank, as data. No device is needed.
 *
 * Every schedule is valid: each call that creates one checks it completely, and errors name rank, position and action.
 * Every stage has each microbatch's forward once, and in training its backward once (B, or I and W). An action comes
 * after those that it depends on, on its rank and across ranks, and no ranks wait for each other in a cycle.
 *
 * A stage is a part of the model on one rank; it owns one or more consecutive layers. Stage s sends its output to s + 1
 * and its input gradient to s - 1. If two adjacent stages are on different ranks, the schedule may have SEND and RECV
 * for them; without these the consumer still waits for the producer. Ranks, stages, microbatches, slots and positions
 * count from 0.
 *
 *   rfr_schedule *s;
 *   const char text[] = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n";
 *   rfr_schedule_parse(ctx, "mine", text, sizeof text - 1, &s);
 *   int n;
 *   const rfr_action *a = rfr_schedule_actions(s, 1, &n);   // rank 1: four actions
 *   rfr_schedule_destroy(s);
 */
#ifndef REFRAIN_SCHEDULE_H
#define REFRAIN_SCHEDULE_H

#include "refrain/ctx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, of a microbatch, what). */
#define RFR_ACTIONS(X)                                                  \
  X(F, 1, "forward")                                                    \
  X(I, 1, "backward: gradient of the input")                            \
  X(W, 1, "backward: gradients of the weights")                         \
  X(B, 1, "I and W in one action")                                      \
  X(OPT, 0, "optimizer step of the stage's weights")                    \
  X(UNSHARD, 0, "gather the stage's sharded weights")                   \
  X(RESHARD, 0, "free the gathered weights")                            \
  X(REDUCE, 0, "reduce the gradients of the stage's sharded weights")   \
  X(SEND_F, 1, "send the stage's output to the next stage")             \
  X(RECV_F, 1, "receive the stage's input from the previous stage")     \
  X(SEND_B, 1, "send the stage's input gradient to the previous stage") \
  X(RECV_B, 1, "receive the stage's output gradient from the next stage")
typedef enum rfr_action_op {
#define RFR_ACTION_ENUM(name, microbatch, what) RFR_ACTION_##name,
  RFR_ACTIONS(RFR_ACTION_ENUM)
#undef RFR_ACTION_ENUM
      RFR_ACTION_COUNT
} rfr_action_op;

typedef struct rfr_action {
  int32_t op; /* rfr_action_op */
  int32_t stage;
  int32_t microbatch; /* -1: of the whole stage (OPT, UNSHARD, RESHARD, REDUCE) */
} rfr_action;

/* "1I0": stage, op, microbatch; "1OPT". Into `out`, which it returns. */
enum { RFR_ACTION_TEXT = 48 };
RFR_API const char *rfr_action_print(rfr_action a, char *out);

typedef struct rfr_schedule rfr_schedule;

/* From lists: actions[r] are the n_actions[r] of rank r, copied. They determine the number of stages and microbatches,
 * and the rank of each stage. Errors: schedule.action, schedule.count, schedule.order, schedule.deadlock. */
RFR_API rfr_status rfr_schedule_create(rfr_ctx *ctx, int ranks, const rfr_action *const *actions, const int *n_actions,
                                       rfr_schedule **out);
/* From text: actions as rfr_action_print writes them, separated by blanks, one line per rank; empty lines and lines
 * that begin with # are ignored. `name` is the source in errors. Errors: schedule.parse and those above. */
RFR_API rfr_status rfr_schedule_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, rfr_schedule **out);
/* From order lists in the format of Transformer Engine: c is a forward of chunk c, -c its backward, -c-0.5 its separate
 * weight gradients; chunks count from 1, and the k-th of each is microbatch k - 1: "[1,1,-1,-1,-1.5,-1.5]" is 0F0 0F1
 * 0I0 0I1 0W0 0W1. Commas or blanks separate numbers; brackets are optional; one list per rank, separated by a newline
 * or ;. Chunk c of rank r of R is stage (c - 1) R + r. `layers`: the layers of each chunk, n_layers counts, or one
 * count for all chunks; n_layers 0: one layer each. Errors: as rfr_schedule_parse. */
RFR_API rfr_status rfr_schedule_parse_order(rfr_ctx *ctx, const char *name, const char *text, size_t n,
                                            const int *layers, int n_layers, rfr_schedule **out);

/* The usual schedules; docs/schedules.md has pictures. */
#define RFR_SCHEDULE_KINDS(X)   \
  X(GPIPE, "gpipe")             \
  X(1F1B, "1f1b")               \
  X(INTERLEAVED, "interleaved") \
  X(ZB_H1, "zb-h1")             \
  X(ZB_V, "zb-v")
typedef enum rfr_schedule_kind {
#define RFR_SCHEDULE_ENUM(name, text) RFR_SCHEDULE_##name,
  RFR_SCHEDULE_KINDS(RFR_SCHEDULE_ENUM)
#undef RFR_SCHEDULE_ENUM
} rfr_schedule_kind;
RFR_API const char *rfr_schedule_kind_name(rfr_schedule_kind kind); /* NULL: there is none */

typedef struct rfr_schedule_options {
  size_t size;
  rfr_schedule_kind kind;
  int ranks;
  int microbatches;
  int chunks; /* stages per rank; 0: 2 for interleaved and zb-v, else 1. 1f1b has 1, zb-v 2 */
  int group;  /* interleaved and zb-h1 with several chunks: microbatches that a chunk runs before the next chunk;
                 0: the number of ranks. With fewer, a step needs less memory and has a larger bubble */
} rfr_schedule_options;
RFR_API rfr_schedule_options rfr_schedule_options_default(void);
/* The backwards of each stage run in ascending microbatches. gpipe, 1f1b and interleaved have B, the others I and W.
 * Errors: argument, overflow. */
RFR_API rfr_status rfr_schedule_generate(rfr_ctx *ctx, const rfr_schedule_options *options, rfr_schedule **out);
/* The same schedule with SEND and RECV between adjacent stages on different ranks. Errors: argument, if it has some
 * already. */
RFR_API rfr_status rfr_schedule_add_communication(const rfr_schedule *s, rfr_schedule **out);

/* Accepts NULL. Call it before the context is destroyed. */
RFR_API void rfr_schedule_destroy(rfr_schedule *s);
/* The text form, which parses back equal, except for the layers (rfr_schedule_set_layers), which it does not contain.
 */
RFR_API rfr_status rfr_schedule_print(const rfr_schedule *s, rfr_write_fn write, void *user);

typedef struct rfr_schedule_info {
  int ranks, stages, microbatches;
  int n_actions;     /* of all ranks */
  int training;      /* 0: forwards only */
  int communication; /* 1: there are SEND and RECV */
} rfr_schedule_info;
RFR_API rfr_status rfr_schedule_get_info(const rfr_schedule *s, rfr_schedule_info *out);
/* A rank's list and its length; borrowed. NULL and 0 for an unknown rank. */
RFR_API const rfr_action *rfr_schedule_actions(const rfr_schedule *s, int rank, int *n);
/* The rank of a stage; -1: no such stage. */
RFR_API int rfr_schedule_rank(const rfr_schedule *s, int stage);
/* Position of an action in its rank's list, of the first one if there are several (UNSHARD ...); -1: none. For I and W
 * also the B that includes them. */
RFR_API int rfr_schedule_find(const rfr_schedule *s, rfr_action a);

/* Layers (callables) of each stage; they are numbered stage after stage. One each until they are set: `layers` has n
 * counts, one per stage, or one for all stages. Errors: argument. */
RFR_API rfr_status rfr_schedule_set_layers(rfr_schedule *s, const int *layers, int n);
RFR_API int rfr_schedule_layers(const rfr_schedule *s, int stage); /* 0: there is no such stage */

/* A slot is the memory for one microbatch's data in a stage: from its F (or its RECV_F) until the last of its I and W
 * (and its SENDs). Microbatches whose windows do not overlap share a slot, so a stage has as many slots as microbatches
 * in flight. Windows count the stage's own actions only: if an adjacent stage reads a slot of this stage, compare with
 * the position of that stage's W (rfr_schedule_find). */
RFR_API int rfr_schedule_slots(const rfr_schedule *s, int stage);                /* 0: there is no such stage */
RFR_API int rfr_schedule_slot(const rfr_schedule *s, int stage, int microbatch); /* -1: not there */

/* ---- costs of a schedule ---- */

/* Costs of one stage. Seconds of each op; negative: not given. F, I and W must be given if they are used; if B is not
 * given, it is I + W; the others are then 0. SEND_F and SEND_B are the time of a message to the rank of an adjacent
 * stage, also if no action sends it; the sender does not wait for it. RECV is the time of the receiver. */
typedef struct rfr_stage_costs {
  double seconds[RFR_ACTION_COUNT];
  int64_t activation_bytes; /* of one microbatch, from F to the last of I and W */
  int64_t wgrad_bytes;      /* the part of them that W still needs after I */
  int64_t gradient_bytes;   /* the output gradient: from its arrival to the last of I and W */
  int64_t weight_bytes;     /* of the stage, always live: weights, gradients, optimizer state */
} rfr_stage_costs;
/* F, I and W take 1 second each, and a microbatch has 1 byte from F to W: bytes then count microbatches in flight. */
RFR_API rfr_stage_costs rfr_stage_costs_default(void);

typedef struct rfr_rank_result {
  double busy, idle;  /* seconds; their sum is the makespan */
  int slots;          /* slots of all its stages; each slot has its own graphs */
  int live;           /* largest number of microbatches in flight at one time, over all its stages */
  int64_t slot_bytes; /* weights, and activations and output gradients of all slots */
  int64_t live_bytes; /* peak of live bytes; no plan is smaller */
} rfr_rank_result;
typedef struct rfr_schedule_result {
  double makespan;
  double bubble;                  /* the largest idle share of a rank */
  int slots;                      /* of all stages */
  int64_t slot_bytes, live_bytes; /* of the rank with the most */
} rfr_schedule_result;
/* Simulates the schedule. `costs`: n_costs entries, one per stage or one for all; NULL: the default. `ranks` gets an
 * entry per rank, `start` and `end` the times of each action, rank after rank; all may be NULL. Errors: argument,
 * overflow. */
RFR_API rfr_status rfr_schedule_simulate(const rfr_schedule *s, const rfr_stage_costs *costs, int n_costs,
                                         rfr_schedule_result *out, rfr_rank_result *ranks, double *start, double *end);
/* Costs of `stages` stages from the text of a file, JSON or CSV, into costs[stages]; docs/schedules.md describes the
 * format. A file with costs of a layer is split as rfr_layer_costs_stages does. Errors: json, schedule.parse. */
RFR_API rfr_status rfr_schedule_costs_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, int stages,
                                            rfr_stage_costs *costs);

/* The number of consecutive layers of a stage, if `layers` are split evenly over `stages`; *first: the first one. */
RFR_API int64_t rfr_stage_layers(int64_t layers, int stages, int stage, int64_t *first);

/* Measured costs of a model of equal layers, for one microbatch; seconds of F, I and W. */
typedef struct rfr_layer_costs {
  double layer[3];
  double first[3], last[3]; /* of the embedding; of the last norm, the LM head and the loss */
  double update;            /* per trained parameter, once per step */
  int64_t layers, tokens;   /* of the model and of the microbatch that were measured */
} rfr_layer_costs;
/* From the text of a JSON file, as `refrain profile --write-costs` writes it. Errors: json, schedule.parse. */
RFR_API rfr_status rfr_layer_costs_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n,
                                         rfr_layer_costs *out);
/* Costs of `stages` stages of a model of `layers` layers, into costs[stages]: those of their layers, and those of the
 * ends for the first and the last stage. Errors: argument. */
RFR_API rfr_status rfr_layer_costs_stages(const rfr_layer_costs *costs, int64_t layers, int stages,
                                          rfr_stage_costs *out);

#ifdef __cplusplus
}
#endif
#endif
