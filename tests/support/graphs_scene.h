/* SPDX-License-Identifier: Apache-2.0
 *
 * Scenes of graphed callables: a few blocks of a kind, one callable each, under a schedule, run for ten optimizer steps
 * and compared bitwise with one program of all of them.
 */
#ifndef RFT_GRAPHS_SCENE_H
#define RFT_GRAPHS_SCENE_H

#include <stdbool.h>

#include "refrain/graphs.h"
#include "support/context.h"

enum { RFT_T = 24, RFT_C = 32, RFT_BLOCKS = 4, RFT_MICROBATCHES = 8 }; /* tokens, width; maximum sizes of a scene */

typedef struct rft_recorder { /* parameters of one block; of all blocks */
  rfr_trace *t;
  rfr_dtype dtype;
  int block;
  unsigned frozen; /* a bit per block */
  rfr_value offsets, step;
  bool marks; /* recompute policies apply; the reference program has none, and keeps all values */
} rft_recorder;

/* Records block r->block; x and the result are (T, C). Parameters are "b<block>.<name>". */
typedef rfr_value (*rft_block)(rft_recorder *r, rfr_value x);
rfr_value rft_block_linear(rft_recorder *r, rfr_value x); /* "w", "bias" */
rfr_value rft_block_mlp(rft_recorder *r, rfr_value x);    /* with dropout, as are the next two */
rfr_value rft_block_attention(rft_recorder *r, rfr_value x);
rfr_value rft_block_transformer(rft_recorder *r, rfr_value x);
rfr_value rft_block_experts(rft_recorder *r, rfr_value x);
/* rfr_set_recompute, if policies apply. */
void rft_policy(rft_recorder *r, rfr_policy policy);

typedef struct rft_scene {
  rft_block block;
  int blocks, microbatches;
  rfr_dtype dtype;
  unsigned frozen;
  const char *schedule; /* order list of one rank; NULL: none */
  int layers;           /* blocks per stage, with a schedule */
  bool fuse, eager, linked, debug, in_order;
  unsigned marked; /* blocks to recompute, a bit each */
  rfr_recompute recompute;
  int64_t budget;
  rfr_step_memory *step_memory;
} rft_scene;

typedef struct rft_buffers { /* buffers of one side, by (microbatch, block) */
  unsigned char x[RFT_MICROBATCHES][RFT_BLOCKS + 1][RFT_T * RFT_C * 4];
  unsigned char dx[RFT_MICROBATCHES][RFT_BLOCKS + 1][RFT_T * RFT_C * 4];
} rft_buffers;

/* A trace of block `block` alone: input "x", output "y". */
rfr_trace *rft_block_trace(const rft_scene *s, int block);
/* Creates the callables of a scene; the schedule may be NULL, otherwise the caller destroys it after the graphs. */
rfr_graphs *rft_make_graphs(const rft_scene *s, rfr_schedule **schedule);
/* Runs ten steps of a scene and of its reference program, and compares them. */
void rft_run_scene(const rft_scene *s);

rfr_type rft_activation(const rft_scene *s);
/* Fills a tensor of f32 or bf16 with values of -by .. by that depend only on the seed. */
void rft_fill_by(const rfr_tensor *x, uint64_t seed, float by);
/* Sets initial values of parameters and states, equal for equal sizes; does not change gradients. */
void rft_fill_named(rfr_graphs *g);
/* Fills an activation; what: 1 an input, 2 an output's gradient. */
void rft_draw(const rft_scene *s, void *to, int step, int m, int what);
/* Makes one call, from and to the buffers. */
void rft_forward(rfr_graphs *g, const rft_scene *s, rft_buffers *b, int block, int m);
void rft_backward(rfr_graphs *g, const rft_scene *s, rft_buffers *b, int block, int m);

/* An entry for the main gradient of a parameter in `data`, which may be NULL. */
rfr_main_gradient rft_main_gradient(const char *parameter, rfr_type type, void *data, int accumulate);

/* A tensor's values in host memory, which the caller frees. */
rfr_tensor rft_of_graphs(rfr_graphs *g, const rfr_tensor *x);
/* Fails the test unless `s` is the error with this slug and its message contains the text. */
void rft_refused(rfr_status s, const char *slug, const char *text);

/* A generated schedule; the caller destroys it. */
rfr_schedule *rft_generate(rfr_schedule_kind kind, int ranks, int microbatches, int chunks);

/* Makes every allocation of creation fail once: each failure is a status, and no memory leaks. Returns the graphs of
 * the first success, which must need more than `least` allocations. */
rfr_graphs *rft_create_after_faults(const rfr_callable *c, const rfr_graphs_options *o, int64_t least);

#endif
