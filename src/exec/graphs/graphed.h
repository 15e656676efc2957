/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside graphed callables. The data's path:
 *
 *   callable.c      recorded forward -> joint trace (outputs get cotangents, parameters main gradients) -> passes
 *                   -> the same ops in the order of their parts: load, setup, F, I, W, each a range of one trace;
 *                   sharded: setup gathers the parameters, and a last part, reduce, sums the gradients over the ranks
 *   graph_ports.c   links, and memory of the caller's for inputs, outputs and their gradients
 *   graph_recompute.c  what is made again, of all callables together, by what the next two say of it
 *   graph_kernels.c a kernel for every op, arguments for every slot
 *   graph_memory.c  parts on a stage's time axis -> lifetimes -> one arena; an address for every value of every slot
 *   graphs.c        all of that in turn; the public answers
 *   graph_walk.c    warm-up and capture, with hooks around each part
 *   graph_calls.c   a schedule -> the calls of a step, and the main gradients that each makes final
 *   graph_shard.c   UNSHARD, RESHARD and REDUCE of a schedule -> when sharded callables' parameters and gradients are
 *                   whole, where, and what runs between the calls for it
 *   graph_debug.c   what is over -> poison
 *   graph_rebind.c  memory of the caller's that has moved -> the same graphs for its new place
 *   graph_splits.c  what forwards say of the caller's splits, told late
 *   graph_counts.c  steps that were begun -> the states that draws read the step from
 *   graph_step.c    these calls: order, signature, copies, launches
 *
 * The arena:
 *
 *   [ persistent | slots of stage 0 | slots of stage 1 | ... | shared by all actions | windows | scratch ]
 *
 * A slot holds what lives from one part of a microbatch to another, each stage's slots alike; what lives within one
 * part is in the shared bytes, since parts run one after the other. With one slot in all, both are planned as one.
 * The windows hold what is gathered, from UNSHARD to RESHARD, and whole gradients, from their first W to REDUCE.
 */
#ifndef RFI_GRAPHED_H
#define RFI_GRAPHED_H

#include "exec/exec.h"
#include "ops/rule.h"
#include "refrain/graphs.h"

typedef enum rfi_part {
  RFI_PART_LOAD,
  RFI_PART_SETUP,
  RFI_PART_F,
  RFI_PART_I,
  RFI_PART_W,
  RFI_PART_REDUCE,
  RFI_PARTS
} rfi_part;

typedef struct rfi_port { /* an input or output of a callable */
  const char *name;
  rfr_value value;                /* RFR_NONE: it is absent, and has no name */
  rfr_value grad;                 /* its gradient: of an output an input, of an input an output; RFR_NONE: none */
  void **fixed, **fixed_grad;     /* where they are, per slot; NULL: in the slot */
  int callable, port;             /* linked: the other end; -1: the caller's */
  bool splits;                    /* sizes of groups, which the device alone reads */
  const void *sample;             /* for warm-up, of the caller's until creation ends; NULL: zeros */
  rfr_tensor tensor, grad_tensor; /* without data: that is the slot's */
} rfi_port;

typedef enum rfi_storage_class {
  RFI_STORAGE_NONE,
  RFI_STORAGE_NAMED,
  RFI_STORAGE_PERSISTENT,
  RFI_STORAGE_SLOT,
  RFI_STORAGE_SHARED,
  RFI_STORAGE_WINDOW,
  RFI_STORAGE_FIXED
} rfi_storage_class;

typedef struct rfi_storage { /* of an owner of storage */
  rfi_storage_class home;
  int64_t offset; /* in its home; of a named one its number, of a fixed one where warm-up has it in the scratch */
  void *const *fixed;
  int callable; /* not -1: `owner` of that callable has the bytes, from `offset` on */
  rfr_value owner;
} rfi_storage;

typedef struct rfi_checked { /* splits of the caller's */
  const char *scope;
  rfr_value bad; /* what splits_to_offsets says of them */
} rfi_checked;

typedef struct rfi_look { /* at what a forward says of them */
  int callable, check, microbatch;
  int64_t step;
} rfi_look;

typedef struct rfi_splits {
  int32_t *said;                /* a ring, which the device writes */
  rfi_look *look;               /* of which forward */
  int size;                     /* of both; 0: no callable has any */
  int64_t launched, seen, left; /* forwards; those before `left` are of no step any more */
  int64_t step;                 /* how many began before this one */
  int32_t found;                /* a bad group that is yet to be told; -1: none */
  rfi_look first;               /* where it was */
} rfi_splits;

typedef struct rfi_counts { /* of steps, that we move on */
  rfr_trace *trace;         /* rfr_step_end of each; NULL: there are none */
  rfi_bound *bound;
  int n;
  int64_t skip_at; /* the flag that they read, in the arena; 0 but while a step is left */
} rfi_counts;

typedef struct rfi_instance { /* of a callable in a slot */
  rfi_bound *bound;
  rfi_graph *graph[RFI_PARTS]; /* NULL: nothing to do, or eager */
  int32_t microbatch;          /* that the slot says it has, 0 at first; -1: nobody knows */
} rfi_instance;

typedef struct rfi_callable {
  const char *name;
  rfi_pipeline pipeline;
  rfr_trace *trace;         /* in the order of the parts */
  int start[RFI_PARTS + 1]; /* the parts' ops */
  rfi_bound *bound;         /* of those with kernels, without addresses */
  int n_bound, first[RFI_PARTS + 1];
  rfi_port *in, *out;
  int n_in, n_out;
  rfr_value microbatch;  /* the input that says which it is; RFR_NONE: nobody asks */
  rfi_storage *place;    /* per value, of owners */
  int64_t *workspace_at; /* per bound op, in its home */
  rfi_checked *checked;
  int n_checked;
  int *gradients, n_gradients; /* main gradients that W adds to: numbers of names */
  int stage;
  bool sharded, wgrad_reads; /* W reads what is gathered */
  bool gathered;             /* sharded, or by the caller: parameters are there within calls alone */
  int *wholes, n_wholes;     /* sharded: whole gradients, numbers of names */
  rfi_instance *instance;    /* per slot of the stage */
  int level;                 /* of its frontier: what is made again; -1: it has none */
} rfi_callable;

typedef struct rfi_validity { /* of what a slot's microbatch has given, that which holds */
  int outputs;                /* those of callables before this one */
  int gradients;              /* those of inputs of this callable and of the ones behind it */
} rfi_validity;

typedef struct rfi_stage_plan {
  int first, end; /* callables */
  int number;     /* in the schedule */
  bool delayed;   /* some W comes by itself */
  bool acts;      /* it has UNSHARD, RESHARD or REDUCE */
  int slots;
  rfi_validity *held;                 /* per slot */
  int64_t offset, bytes;              /* of the first slot; of one */
  int64_t window[2], window_bytes[2]; /* of what is gathered; of whole gradients */
} rfi_stage_plan;

typedef struct rfi_named { /* a parameter, state, constant or main gradient, shared by name */
  rfr_tensor tensor;       /* with data */
  int64_t offset;          /* in the arena; -1: the caller's */
  int64_t scratch;         /* in the scratch memory, where warm-up has it if it is written */
  bool written;            /* by some callable */
  bool window;             /* a whole gradient: between two REDUCEs alone, nobody's but ours */
  int writer;              /* of a state: a callable that writes it in a part; -1 */
  rfi_part writer_part;
  bool accumulate; /* a main gradient that the beginning of a step leaves */
  int parameter;   /* of a main gradient: whose; else -1 */
  int gradient;    /* of a parameter: its main gradient; -1 */
} rfi_named;

typedef struct rfi_step_call { /* what the caller is to do */
  rfr_action_op op;            /* F, I, W or B */
  int callable, microbatch, slot;
  bool first, last; /* of the microbatch in the stage: takes the slot, frees it */
} rfi_step_call;

/* What we do of a schedule ourselves, in front of call number `at`. */
typedef enum rfi_own_op { RFI_OWN_GATHER, RFI_OWN_DROP, RFI_OWN_CLEAR, RFI_OWN_REDUCE } rfi_own_op;
typedef struct rfi_own {
  rfi_own_op op;
  int callable, at;
} rfi_own;

typedef struct rfi_calls { /* of a step */
  rfi_step_call *call;
  int n;
  bool endless;   /* no schedule: these are one microbatch's, and come again for the next */
  int *ready;     /* main gradients, in the order in which they are final */
  int *ready_end; /* how many are when a step has begun, behind its first call, its second ... */
  rfi_own *own;
  int n_own;
} rfi_calls;

typedef enum rfi_step_state { RFI_STEP_NONE, RFI_STEP_OPEN, RFI_STEP_BROKEN } rfi_step_state;

struct rfr_graphs {
  rfi_exec_target m;
  rfr_graphs_options options;
  bool inference;
  rfi_callable *callable;
  int n;
  rfi_stage_plan *stage;
  int n_stages;
  rfi_named *named;
  rfi_names names;
  int n_named, cap_named;
  rfi_arena *layout; /* what the choice of what is made again leads to: kernels and places */
  unsigned char *arena;
  rfr_graphs_memory memory;
  int64_t shared_at, window_at, scratch_at;
  bool warm;                 /* what is updated is the scratch memory */
  rfr_tensor *event_tensors; /* room for what an event shows */
  const void **from;         /* room for what a part's copies read */
  bool joint;                /* one slot in all: what lives within a part is in it too */
  rfi_calls calls;
  rfi_step_state state;
  int64_t next; /* of the step's calls */
  int next_own;
  rfi_splits splits;
  rfi_counts counts;
  bool ended; /* the last step was not left */
  bool loaded;
};

/* ---- callable.c ---- */
/* What the options say of a parameter's main gradient; NULL: nothing. */
const rfr_main_gradient *rfi_main_gradient_of(const rfr_graphs *g, const char *parameter);
/* Fills in everything up to `trace`, `start` and ports from a description; sites of dropout count from *site. */
rfr_status rfi_callable_compile(rfr_graphs *g, int index, const rfr_callable *desc, int64_t *site);
/* The passes' options, nothing made again. */
rfi_pass_options rfi_callable_options(rfr_graphs *g, const rfi_callable *c);
/* `trace`, `start` and ports once more, from what the passes made. */
rfr_status rfi_callable_order(rfr_graphs *g, rfi_callable *c);
static inline bool rfi_has(const rfi_callable *c, rfi_part part) { return c->first[part + 1] > c->first[part]; }
/* Some output's gradient is given or passed on: a backward is called. */
bool rfi_has_backward(const rfi_callable *c);
/* The port of a name; -1: none has it, or there is no name. */
int rfi_port_find(const rfi_port *port, int n, const char *name);
extern const char RFI_GRAD_PREFIX[];  /* of main gradients' and cotangents' names */
extern const char RFI_WHOLE_PREFIX[]; /* before that, of a sharded parameter's whole gradient */

/* ---- graph_ports.c ---- */
/* A port in a slot. */
rfr_tensor rfi_port_tensor(const rfr_graphs *g, int callable, int slot, const rfi_port *port, bool grad);
/* Links, fixed memory and samples of a callable's description. */
rfr_status rfi_graphs_links(rfr_graphs *g, int index, const rfr_callable *desc);
/* Where the addresses are that `f` has new ones for, which are fit to take their place. */
rfr_status rfi_graphs_fixed_of(const rfr_graphs *g, int callable, const rfr_callable_fixed *f, void ***addresses);
/* What callables write of the caller's memory (states, main gradients, fixed outputs) overlaps none that is not shared
 * lawfully (refrain/graphs.h), by these calls of a step. */
rfr_status rfi_graphs_check_overlap(const rfr_graphs *g, const rfi_calls *calls);

/* ---- graph_memory.c ---- */
enum { RFI_GIVEN_TEXT = 2 * RFI_TYPE_TEXT + 32 };
/* The caller's description of what has type `want`; false: of another type, and `text` says which. */
bool rfi_graphs_is_type(const rfr_type *want, const rfr_type *given, char text[RFI_GIVEN_TEXT]);
/* Why kernels cannot be given memory of the caller's; NULL: they can. */
const char *rfi_graphs_place_lacks(const rfr_graphs *g, const void *data);
/* Kernels take a main gradient as flat memory: it is dense. */
rfr_status rfi_graphs_check_view(const rfr_main_gradient *m, const rfr_type *type);
/* Adds the inputs that a callable shares by name. */
rfr_status rfi_graphs_names(rfr_graphs *g, rfi_callable *c);
/* Places every value: g->memory. */
rfr_status rfi_graphs_place(rfr_graphs *g);
/* Allocates the arena. */
rfr_status rfi_graphs_allocate(rfr_graphs *g);
/* Where one that is shared by name is; in warm-up, if it is written then, in the scratch memory. */
unsigned char *rfi_graphs_named_data(const rfr_graphs *g, const rfi_named *x);
/* Address of a value of a callable in a slot. */
unsigned char *rfi_graphs_address(const rfr_graphs *g, int callable, int slot, rfr_value v);
/* Writes addresses into an instance's bound ops. */
void rfi_graphs_set_addresses(rfr_graphs *g, int callable, int slot);

/* All of them. */
void rfi_graphs_set_all_addresses(rfr_graphs *g);

/* ---- graph_shard.c ---- */
bool rfi_graphs_is_sharded(const rfr_graphs *g);
/* The schedule says when the stage's sharded callables are whole. */
bool rfi_graphs_has_windows(const rfr_graphs *g, const rfi_stage_plan *s);
/* Whether the schedule has the parameters there for every part that reads them, and each gradient reduced. Fills in the
 * stages' window[] and the bytes of all, of which window_bytes are given. */
rfr_status rfi_graphs_place_windows(rfr_graphs *g);
/* What we do ourselves for action i of a rank's list, in front of call `at`; `to` NULL: how many it is. */
int rfi_graphs_own(const rfr_graphs *g, const rfi_stage_plan *s, const rfr_action *a, int i, int at, rfi_own *to);
/* Runs a part of a callable in a slot, with what it takes to have its parameters whole. */
rfr_status rfi_graphs_run(rfr_graphs *g, int callable, int slot, rfi_part part, bool eager);
/* Runs those in front of call `at`, from number *next on. */
rfr_status rfi_graphs_run_own(rfr_graphs *g, int64_t at, int *next, bool eager);

/* ---- graph_rebind.c ---- */
/* Errors: replay.signature, if the tensor is one that is shared by name, and says where that was before a rebind. */
rfr_status rfi_graphs_check_current(const rfr_graphs *g, const rfr_tensor *x);

/* ---- graph_recompute.c ---- */
/* Binds and places what the callables' traces are, and makes again what is marked, or options and budget demand. */
rfr_status rfi_graphs_lay_out(rfr_graphs *g);

/* ---- graph_kernels.c ---- */
/* What the callables' traces are now gets kernels; once placed, each slot arguments, yet without addresses. */
rfr_status rfi_graphs_select_kernels(rfr_graphs *g);
rfr_status rfi_graphs_make_instances(rfr_graphs *g);
/* Runs a part of a callable in a slot, and it alone: its graph, or kernel by kernel. */
rfr_status rfi_graphs_run_part(rfr_graphs *g, int callable, int slot, rfi_part part, bool eager);

/* ---- graph_splits.c ---- */
rfr_status rfi_graphs_splits_create(rfr_graphs *g);
/* A forward was launched; the step is left; a step begins, ends or is waited for: graphs.splits, once. */
rfr_status rfi_graphs_splits_launched(rfr_graphs *g, const rfi_step_call *call);
void rfi_graphs_splits_leave(rfr_graphs *g);
rfr_status rfi_graphs_splits_report(rfr_graphs *g);

/* ---- graph_counts.c ---- */
/* How many states count steps for us, of those that have places. */
int rfi_graphs_counted(const rfr_graphs *g);
rfr_status rfi_graphs_counts_create(rfr_graphs *g);
/* A step has ended, or was left. */
rfr_status rfi_graphs_count(rfr_graphs *g, bool skipped);

/* ---- graph_walk.c ---- */
rfr_status rfi_graphs_warm_up(rfr_graphs *g);
rfr_status rfi_graphs_capture(rfr_graphs *g);
void rfi_graphs_drop(rfr_graphs *g, int callable, int slot); /* its graphs */

/* ---- graph_calls.c ---- */
/* The stages that a schedule has on the graphs' rank, `first` on the first callable; NULL: *n gets their number. */
rfr_status rfi_graphs_read_stages(const rfr_graphs *g, const rfr_schedule *s, rfi_stage_plan *stages, int *n);
/* The calls of a step; nothing is left of them after an error. */
rfr_status rfi_graphs_make_calls(rfr_graphs *g, const rfr_schedule *schedule, rfi_calls *calls);
/* Fills in what g->memory says of slots in use. */
void rfi_graphs_count_live(rfr_graphs *g);
void rfi_graphs_drop_calls(rfr_graphs *g, rfi_calls *calls);
/* The next call; false: there are no more. A step without a schedule may be complete and go on. */
bool rfi_graphs_next_call(const rfr_graphs *g, rfi_step_call *out);
bool rfi_graphs_is_complete(const rfr_graphs *g);
const char *rfi_call_text(int op); /* what a message calls it */
/* graphs.order within a step of which a call is still to come that adds onto a main gradient, number `gradient`. */
rfr_status rfi_graphs_check_gradient(const rfr_graphs *g, int gradient);

/* Why a call of a microbatch cannot be the next one, as ", ..." or "". */
void rfi_graphs_explain_order(const rfr_graphs *g, int callable, int microbatch, bool forward, char text[96]);

/* ---- graph_debug.c ---- */
/* Of a slot all, or all but the input gradients; of what parts share; of every slot. */
rfr_status rfi_graphs_poison_slot(rfr_graphs *g, int stage, int slot, bool gradients);
rfr_status rfi_graphs_poison_shared(rfr_graphs *g);
rfr_status rfi_graphs_poison_all(rfr_graphs *g);

/* ---- graph_step.c ---- */
/* Errors: argument, if a tensor lies in a slot and what it was given for is over. */
rfr_status rfi_graphs_check_valid(const rfr_graphs *g, const rfr_tensor *x);
void rfi_graphs_invalidate(rfi_stage_plan *s, int slot);
/* Writes which microbatch a slot has. */
rfr_status rfi_graphs_set_microbatch(rfr_graphs *g, int callable, int slot, int microbatch);
/* A graph of a part, with the copies of what its call is given. */
rfr_status rfi_graphs_capture_part(rfr_graphs *g, int callable, int slot, rfi_part part, rfi_graph **out);

#endif
