/* SPDX-License-Identifier: Apache-2.0
 *
 * Internals of graphed callables, in the order of the data flow:
 *
 *   callable.c      recorded forward -> joint trace (cotangents for outputs, main gradients for parameters) -> passes
 *                   -> ops ordered by part: load, setup, F, I, W, each a range of one trace. If sharded, setup
 *                   gathers the parameters, and a last part, reduce, reduce-scatters the gradients
 *   graph_names.c   parameters, states, constants and main gradients, which callables share by name
 *   graph_ports.c   links, and the caller's memory for inputs, outputs and their gradients
 *   graph_recompute.c  chooses recompute levels for all callables together, by planning with the next
 *   graph_memory.c  parts on a stage's time axis -> lifetimes -> one arena; a location per value
 *   graphs.c        creation; public queries
 *   graph_walk.c    warm-up and capture, with hooks around each part
 *   graph_calls.c   a schedule -> stages, the calls of a step, and the main gradients that each call completes
 *   graph_shard.c   UNSHARD, RESHARD and REDUCE of a schedule -> memory of gathered parameters and unreduced gradients,
 *                   and the collectives that run between calls
 *   graph_debug.c   fills dead buffers
 *   graph_rebind.c  new addresses for the caller's memory
 *   graph_splits.c  reports invalid group sizes
 *   graph_side_stream.c
 *                   selects the W's that run on a side stream, and the calls that wait for them
 *   graph_counts.c  advances the step counters and the states of delayed scaling
 *   graph_step.c    the calls of a step: order, the caller's tensors, copies, launches
 *
 * The memory has the regions of layout.h. All slots of a stage have the same layout. Values that live within one part
 * are in the shared bytes, because parts run one after the other. If there is only one slot, both are planned as one.
 * With separate W actions a slot may have two ranges: its own, and a block for what is dead after I. Slots whose
 * microbatches are never between F and I at the same time share a block.
 * Windows hold gathered parameters, from UNSHARD to RESHARD, and unreduced gradients, from their first W to REDUCE.
 */
#ifndef RFI_GRAPHED_H
#define RFI_GRAPHED_H

#include "exec/exec.h"
#include "ops/rule.h"
#include "pass/recipe_rules.h"
#include "refrain/graphs.h"

typedef struct rfi_port_data { /* the data of a port, or its gradient */
  rfr_value value;             /* RFR_NONE: absent, or without a name */
  void **fixed;                /* the caller's memory, an address per slot; NULL: in the slot */
  rfr_tensor tensor;           /* data is NULL: it depends on the slot */
} rfi_port_data;

/* An input or output of a callable. In the joint trace, the data of inputs and the gradients of outputs are inputs; the
 * data of outputs and the gradients of inputs are outputs. */
typedef struct rfi_port {
  const char *name;
  rfi_port_data data, grad;
  bool output;
  int callable;          /* the callable of the port */
  struct rfi_port *link; /* the other end of the link; NULL: not linked */
  bool splits;           /* group sizes, which must be in device memory */
  const void *sample;    /* input of warm-up, owned by the caller until creation ends; NULL: zeros */
} rfi_port;
static inline const rfi_port_data *rfi_port_of(const rfi_port *p, bool grad) { return grad ? &p->grad : &p->data; }

typedef struct rfi_ports { /* the ports for which a part takes data, or returns data */
  const rfi_port *port;
  int n;
  bool grad; /* gradients of the ports, not values */
} rfi_ports;

typedef struct rfi_checked { /* a check of group sizes that come from the caller */
  const char *scope;
  rfr_value bad; /* result of splits_to_offsets: 0, or 1 + the first invalid group */
} rfi_checked;

typedef struct rfi_split_check { /* the forward that wrote a ring entry */
  int callable, check, microbatch;
  int64_t step;
} rfi_split_check;

typedef struct rfi_splits {
  int32_t *result;                 /* ring written by the device */
  rfi_split_check *check;          /* ring of the same size: what was checked */
  int size;                        /* entries of both rings; 0: no callable has group sizes */
  int64_t launched, seen, aborted; /* numbers of forwards; those before `aborted` belong to aborted steps */
  int64_t step;                    /* number of the current step */
  int32_t found;                   /* an invalid group that is not reported yet; -1: none */
  rfi_split_check first;           /* the check that found it */
} rfi_splits;

typedef struct rfi_set_recipe { /* delayed scaling, common to all callables */
  int slots;                    /* number of slots; 0: none */
  rfr_recipe delayed;           /* history, margin and rule */
} rfi_set_recipe;

typedef struct rfi_next { /* the first site and linear of the next callable, unless its description sets them */
  int64_t site, linear;
} rfi_next;

typedef struct rfi_callable {
  rfi_exec_unit u;
  rfi_port *in, *out; /* of one array: outputs follow the inputs */
  int n_in, n_out;
  rfr_value microbatch; /* the input with the microbatch number; RFR_NONE: not used */
  rfi_checked *checked;
  int n_checked;
  int *gradients, n_gradients;   /* main gradients that W accumulates into, as indices of named entries */
  int *parameters, n_parameters; /* trainable and frozen, as indices of named entries */
  struct rfi_stage_plan *stage;
  bool sharded;
  bool wgrad_reads;      /* W reads parameters */
  rfi_recipe_use recipe; /* recipes of its linear layers; `delayed` is not set */
  int first_slot;        /* the first slot of delayed scaling */
  int64_t first_linear;
  bool gathered;               /* sharded, or gathered by the caller: parameters are valid only within calls */
  int *unreduced, n_unreduced; /* sharded: unreduced gradients, as indices of named entries */
  int level;                   /* level of its recompute frontier; -1: it has no frontier */
  const char *in_order;        /* why its W does not run on the side stream; NULL: it may */
  rfi_report report;           /* of rfi_graphs_report_side_stream */
} rfi_callable;

typedef struct rfi_validity { /* the results of a slot's microbatch that the caller may use */
  int outputs;                /* outputs of callables before this one */
  int gradients;              /* input gradients of this callable and of later ones */
} rfi_validity;

typedef struct rfi_stage_plan {
  int first, end;                     /* range of callables */
  int number;                         /* stage number in the schedule */
  bool separate_wgrad;                /* the schedule has separate W actions */
  bool fsdp_actions;                  /* the schedule has UNSHARD, RESHARD or REDUCE */
  bool sharded, reduces, wgrad_reads; /* a callable is sharded; and has W; and its W reads parameters */
  int slots;
  rfi_validity *valid;   /* per slot */
  int64_t offset, bytes; /* offset of the first slot in the region; size of each slot */
  int *block, blocks;    /* block of each slot, number of blocks. Blocks follow the slots; 0: there are none */
  int64_t block_bytes;   /* size of each block; 0: not used */
  int64_t window[2], window_bytes[2]; /* index 0: gathered parameters; 1: unreduced gradients */
} rfi_stage_plan;

/* A bit per part that an action runs; 0: the action computes nothing. */
static inline uint8_t rfi_parts_of(int op) {
  switch (op) {
    case RFR_ACTION_F: return 1 << RFI_PART_F;
    case RFR_ACTION_I: return 1 << RFI_PART_I;
    case RFR_ACTION_W: return 1 << RFI_PART_W;
    case RFR_ACTION_B: return 1 << RFI_PART_I | 1 << RFI_PART_W;
    default: return 0;
  }
}

typedef struct rfi_step_call {
  rfr_action_op op; /* F, I, W or B */
  const rfi_callable *of;
  int microbatch, slot;
  bool first, last; /* the first call of the microbatch in the stage takes the slot, the last call frees it */
  bool frees_block; /* the call is the last I */
  int number;       /* its W runs on the side stream, as the number-th of the calls, from 1; 0: in order */
  /* the last of these W's that must be done before F or I of the call, and before its W in order; 0: none */
  int waits, wgrad_waits;
} rfi_step_call;

typedef struct rfi_shard_action { /* an action of the schedule that runs before call `at` */
  int op; /* UNSHARD, RESHARD, REDUCE; W: clears the unreduced gradients before ops add to them */
  const rfi_callable *of;
  int at;
} rfi_shard_action;

typedef struct rfi_calls { /* the calls of a step */
  rfi_arena *arena;
  rfi_step_call *call;
  int n, cap_calls;
  bool endless; /* no schedule: the calls of one microbatch, repeated for the next */
  int *last;    /* per name: the last call that accumulates into it; -1: none */
  /* main gradients by their last call: the first one of call i - 1, and per name the next one of its call; -1: none */
  int *completes, *next;
  rfi_shard_action *shard_action;
  int n_shard_actions, cap_shard_actions;
} rfi_calls;

typedef enum rfi_step_state { RFI_STEP_NONE, RFI_STEP_OPEN, RFI_STEP_BROKEN } rfi_step_state;

struct rfr_graphs {
  rfi_executor m;
  rfr_graphs_options options;
  rfi_names gradients; /* of options.gradients */
  bool inference;
  rfi_callable *callable;
  int n;
  rfi_stage_plan *stage;
  int n_stages;
  rfi_arena *placed; /* kernels and storage for the chosen recompute levels */
  rfr_graphs_memory memory;
  rfr_tensor *event_tensors; /* capacity for the tensors of a hook event */
  const void **from;         /* capacity for the sources of a part's copies */
  const rfr_binding **given; /* per port of the current call: the caller's entry; NULL: none */
  rfi_calls calls;
  rfi_calls evaluation; /* F of every callable, slot 0, repeated for each microbatch */
  bool evaluating;      /* the step is an evaluation */
  rfi_step_state state;
  int64_t next; /* number of the next call */
  int next_shard_action;
  rfi_splits splits;
  /* The update of states when a step ends. Part F: rfr_step_end of each counter; REDUCE: the update of delayed scaling,
   * with its collective. Without a trace, there is nothing to update. */
  rfi_exec_unit counts;
  rfi_set_recipe recipe;
  bool ended;           /* the last step ended without an abort */
  bool has_side_stream; /* a W may run on the side stream */
  int launched, waited; /* the last W there; the last that the main stream waits for */
  bool loaded;
};

/* ---- callable.c ---- */
/* Compiles a description, number `index` of a list: sets all fields up to `trace`, `start` and the ports. */
rfr_status rfi_callable_compile(rfr_graphs *g, int index, const rfr_callable *desc, rfi_next *next);
/* The pass options, without recompute. */
rfi_pass_options rfi_callable_options(rfr_graphs *g, const rfi_callable *c);
/* Sets `trace`, `start` and the ports from the result of the passes. */
rfr_status rfi_callable_order(rfr_graphs *g, rfi_callable *c);
typedef struct rfi_use { /* an op, not a view, that reads or writes a value */
  int op, next;          /* next: index among the op's operands, then results */
  rfi_part part;
  rfr_value owner; /* owner of the value's storage */
  bool result;
} rfi_use;
/* Iterates over the uses of an ordered callable, starting with {0}; false: the end. */
bool rfi_next_use(const rfi_callable *c, rfi_use *u);
/* Whether some output has a gradient, so that there is a backward. */
bool rfi_has_backward(const rfi_callable *c);
/* The index of the port with a name; -1: none, or name is NULL. */
int rfi_port_find(const rfi_port *port, int n, const char *name);
extern const char RFI_GRAD_PREFIX[];      /* prefix of main gradients and cotangents */
extern const char RFI_UNREDUCED_PREFIX[]; /* prefix before RFI_GRAD_PREFIX: a sharded parameter's unreduced gradient */

/* ---- graph_ports.c ---- */
/* F takes inputs and returns outputs, I takes output gradients and returns input gradients, W takes and returns
 * nothing. */
rfi_ports rfi_ports_taken(const rfi_callable *c, rfi_part part);
rfi_ports rfi_ports_returned(const rfi_callable *c, rfi_part part);
/* The tensor of a port, or of its gradient, in a slot. */
rfr_tensor rfi_port_tensor(const rfr_graphs *g, int slot, const rfi_port *port, bool grad);
static inline const rfi_port *rfi_ports_end(const rfi_callable *c) { return c->out + c->n_out; }
/* Reads links, fixed memory and samples of a callable's description. */
rfr_status rfi_graphs_links(rfr_graphs *g, int index, const rfr_callable *desc);
/* The array of addresses that `f` replaces; `f` must have been checked. */
rfr_status rfi_graphs_fixed_of(const rfr_graphs *g, int callable, const rfr_callable_fixed *f, void ***addresses);
/* Checks that memory of the caller which callables write overlaps other memory only as rfr_callable_fixed allows, given
 * these calls of a step. */
rfr_status rfi_graphs_check_overlap(const rfr_graphs *g, const rfi_calls *calls);

/* ---- graph_names.c ---- */
static inline bool rfi_is_shared(int role) {
  return rfi_is_parameter(role) || role == RFR_ROLE_STATE || role == RFR_ROLE_CONST;
}
enum { RFI_MISMATCH_TEXT = 2 * RFI_TYPE_TEXT + 32 };
/* Compares types; false: `text` describes the difference. */
bool rfi_graphs_type_matches(const rfr_type *want, const rfr_type *type, char text[RFI_MISMATCH_TEXT]);
/* The reason why the caller's memory cannot be used; NULL: it can be. */
const char *rfi_graphs_address_defect(const rfr_graphs *g, const void *data);
/* Checks an entry for a main gradient: type, bytes and strides must match a parameter (or shard) of this shape. */
rfr_status rfi_graphs_check_gradient_entry(const rfr_main_gradient *m, const rfr_type *parameter);
/* Checks each entry of a list without its context: size and fields. */
rfr_status rfi_graphs_check_gradient_list(const rfr_main_gradient *m, int n);
/* The entry of a parameter, state or constant, and of the main gradient of a parameter. Errors: program.name. */
rfr_status rfi_graphs_get(const rfr_graphs *g, const char *name, rfi_named **out);
rfr_status rfi_graphs_get_gradient(const rfr_graphs *g, const char *parameter, rfi_named **out);
/* Reads the names of rfr_graphs_options.gradients. */
rfr_status rfi_graphs_list_gradients(rfr_graphs *g);
/* The options' entry for the main gradient of a parameter; NULL: none. */
const rfr_main_gradient *rfi_main_gradient_of(const rfr_graphs *g, const char *parameter);
/* Adds the inputs that a callable shares by name with other callables. */
rfr_status rfi_graphs_names(rfr_graphs *g, rfi_callable *c);
/* Reads the lists of the options; checks states that several callables use, and names that outputs alias. */
rfr_status rfi_graphs_check_names(rfr_graphs *g);

/* ---- graph_memory.c ---- */
/* Assigns storage to every value; sets g->memory. `side_stream`: W's may run on the side stream. */
rfr_status rfi_graphs_place(rfr_graphs *g, bool side_stream);
/* Allocates the planned memory. */
rfr_status rfi_graphs_allocate(rfr_graphs *g);
/* The first byte of a slot, and of its block. */
unsigned char *rfi_graphs_slot(const rfr_graphs *g, const rfi_stage_plan *s, int slot);
unsigned char *rfi_graphs_block(const rfr_graphs *g, const rfi_stage_plan *s, int slot);
/* Writes addresses into the kernels of all slots. */
void rfi_graphs_set_addresses(rfr_graphs *g);

/* ---- graph_side_stream.c ---- */
/* Selects the callables whose W may run on the side stream; storage must be assigned. `fits` 0: none, because the plan
 * would exceed the budget or the step memory. */
void rfi_graphs_choose_side_stream(rfr_graphs *g, bool fits);
/* Selects the W's of a step that run there, and the calls that wait for them, from the addresses of all slots. */
rfr_status rfi_graphs_order_side_stream(const rfr_graphs *g, rfi_calls *calls);
/* Runs the W of a call, on either stream. */
rfr_status rfi_graphs_run_wgrad(rfr_graphs *g, const rfi_step_call *call);
/* Makes later work of the main stream wait for the W's up to `number`. */
rfr_status rfi_graphs_wait_side_stream(rfr_graphs *g, int number);
/* The same for all W's; after that, numbers start at 1 again. */
rfr_status rfi_graphs_join_side_stream(rfr_graphs *g);
/* A line per W of a callable, valid until the next call; NULL: no memory. */
const char *rfi_graphs_report_side_stream(const rfr_graphs *g, int callable);

/* ---- graph_shard.c ---- */
/* Whether the stage has sharded callables and shard actions. */
bool rfi_stage_has_windows(const rfi_stage_plan *s);
/* Checks that parameters are gathered for every part that reads them, and that each gradient is reduced. Sets window[]
 * and window_bytes[] of the stages. */
rfr_status rfi_graphs_place_windows(rfr_graphs *g);
/* Appends the shard actions of action i of a rank's list; they run before the next call. */
rfr_status rfi_graphs_add_shard_actions(const rfr_graphs *g, const rfi_stage_plan *s, const rfr_action *a, int i,
                                        rfi_calls *to);
/* Runs a part of a callable in a slot, with the collectives that it needs. */
rfr_status rfi_graphs_run(rfr_graphs *g, const rfi_callable *c, int slot, rfi_part part, bool eager);
/* Runs LOAD, unless it has run, and SETUP of all callables that are not sharded. */
rfr_status rfi_graphs_set_up(rfr_graphs *g, bool loaded, bool eager);
/* Runs the shard actions up to call `at`, from number *next on. */
rfr_status rfi_graphs_run_shard_actions(rfr_graphs *g, int64_t at, int *next, bool eager);

/* ---- graph_recompute.c ---- */
/* Selects kernels and assigns storage, with the recompute that marks, options and budget require. */
rfr_status rfi_graphs_lay_out(rfr_graphs *g);

/* ---- graph_splits.c ---- */
rfr_status rfi_graphs_splits_create(rfr_graphs *g);
/* Called after the launch of a forward: enqueues the copy of its results to the ring. */
rfr_status rfi_graphs_splits_launched(rfr_graphs *g, const rfi_step_call *call);
/* Called when the step is aborted: its results are not reported. */
void rfi_graphs_splits_abort(rfr_graphs *g);
/* Returns graphs.splits, once, for the first invalid result that has arrived. */
rfr_status rfi_graphs_splits_report(rfr_graphs *g);

/* ---- graph_counts.c ---- */
/* Records the update of states, and adds its flag as a named tensor. */
rfr_status rfi_graphs_counts_create(rfr_graphs *g);
/* Called at the start of a step. */
rfr_status rfi_graphs_clear_amaxes(rfr_graphs *g);
/* Advances the counters; unless the step was aborted (`skipped`), updates the states of delayed scaling. */
rfr_status rfi_graphs_count(rfr_graphs *g, bool skipped);

/* ---- graph_walk.c ---- */
rfr_status rfi_graphs_warm_up(rfr_graphs *g);
rfr_status rfi_graphs_capture(rfr_graphs *g);

/* ---- graph_calls.c ---- */
/* Creates the stages of this rank and assigns blocks to their slots; without a schedule there is one stage. */
rfr_status rfi_graphs_make_stages(rfr_graphs *g);
/* Lists the calls of a step, or of an evaluation: F of every callable. Destroy `arena`, also after an error. */
rfr_status rfi_graphs_make_calls(rfr_graphs *g, const rfr_schedule *schedule, bool evaluation, rfi_calls *calls);
/* Sets `live` and `live_bytes` of g->memory. */
void rfi_graphs_count_live(rfr_graphs *g);
/* The next call; false: none. A step without a schedule may be complete here and may also continue. */
bool rfi_graphs_next_call(const rfr_graphs *g, rfi_step_call *out);
bool rfi_graphs_is_complete(const rfr_graphs *g);
const char *rfi_call_text(int op); /* for messages */
/* Whether a call runs a part. */
bool rfi_call_runs(const rfi_step_call *call, rfi_part part);
/* graphs.order if a later call of the current step adds to the main gradient with this index. */
rfr_status rfi_graphs_check_gradient(const rfr_graphs *g, int gradient);
/* Why a call of a microbatch cannot be the next one, as ", ..."; "" if unknown. */
void rfi_graphs_explain_order(const rfr_graphs *g, int callable, int microbatch, bool forward, char text[96]);

/* ---- graph_debug.c ---- */
/* Fill with the debug byte: a slot with its block; a slot except the input gradients; a block; a region. */
rfr_status rfi_graphs_poison_slot(rfr_graphs *g, const rfi_stage_plan *s, int slot);
rfr_status rfi_graphs_poison_ended(rfr_graphs *g, const rfi_stage_plan *s, int slot);
rfr_status rfi_graphs_poison_block(rfr_graphs *g, const rfi_stage_plan *s, int slot);
rfr_status rfi_graphs_poison_region(rfr_graphs *g, rfi_region region);

/* ---- graph_step.c ---- */
/* Checks a tensor that the caller passes back: its bytes must match the type, and its memory must belong to these
 * graphs and still be valid. */
rfr_status rfi_graphs_check_tensor(const rfr_graphs *g, const rfr_tensor *x);
void rfi_graphs_invalidate(rfi_stage_plan *s, int slot);
/* Writes the microbatch number into a slot. */
rfr_status rfi_graphs_set_microbatch(rfr_graphs *g, const rfi_step_call *call);
/* Captures a part, with the copies of the inputs of its call. */
rfr_status rfi_graphs_capture_part(rfr_graphs *g, const rfi_callable *c, int slot, rfi_part part, rfi_graph **out);

/* The memory that rfr_graphs_create would plan; `live`, `live_bytes` and `graphs` are not set. Nothing is allocated or
 * run. Addresses of the caller's memory are compared, not dereferenced. */
rfr_status rfi_graphs_plan(rfr_ctx *ctx, const rfr_callable *callables, int n, const rfr_graphs_options *options,
                           rfr_graphs_memory *out);

#endif
