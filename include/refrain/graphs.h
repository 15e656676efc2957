/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphed callables, for those who have a training loop of their own: of each callable's forward, input gradient and
 * weight gradient one graph per place that a microbatch may have in flight, replayed in the order of a schedule.
 *
 * A callable is a recorded forward: its trace's inputs of role input and input_grad are what each call gives, trainable
 * and frozen ones its parameters, states and constants are shared by name among all callables. Names that begin with
 * "grad." or "whole." are the library's. Its outputs that depend on a parameter or on an input_grad get a gradient in
 * the backward, and are not called as a trained parameter is. A slot is the memory of one microbatch in flight within a
 * stage; a stage is a run of callables. After rfr_graphs_create nothing is allocated but by rfr_graphs_reschedule and
 * rfr_graphs_rebind.
 *
 *   rfr_callable c = rfr_callable_default();
 *   c.name = "layer", c.trace = t;                        // x of role input_grad, output y
 *   rfr_graphs_create(ctx, &c, 1, NULL, &graphs);
 *   rfr_graphs_begin_step(graphs, NULL, 0);               // main gradients are zero now
 *   rfr_binding x = {NULL, type, data}, dy = {NULL, type, more};
 *   rfr_tensor y, dx;
 *   rfr_graphs_forward(graphs, 0, 0, &x, 1, &y, 1);
 *   rfr_graphs_backward(graphs, 0, 0, &dy, 1, &dx, 1);    // and the weight gradients, unless the schedule has W
 *   rfr_graphs_end_step(graphs);
 *
 * One thread at a time, with the context that they were created in. What a call launched may still run when it returns
 * (rfr_graphs_wait), except on the CPU: what it is given on a device is ready when it is called, or is before it in the
 * caller's stream (rfr_graphs_set_stream); and it stays as it is until rfr_graphs_wait. Of a schedule's actions F, I, W
 * and B are calls (rfr_graphs_expected says which is next); messages between ranks are the caller's, between the calls,
 * and so are UNSHARD, RESHARD and REDUCE, but for those of sharded callables.
 */
#ifndef REFRAIN_GRAPHS_H
#define REFRAIN_GRAPHS_H

#include "refrain/program.h"
#include "refrain/schedule.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_graphs rfr_graphs;

/* An input that is another callable's output, in its own bytes: `output` of an earlier callable of the same stage. That
 * output's gradient is then this input's, and is passed on inside too; where it has none, as one of a frozen callable,
 * the input has none either, as if its role were input. An output goes to one such input at most. */
typedef struct rfr_callable_link {
  const char *input;
  int callable;
  const char *output;
} rfr_callable_link;

/* Memory of the caller's for an input, an output or a gradient of one, in place of the slot's: nothing is copied. A
 * graph has one address for it, and belongs to a slot; so there is one for each slot of the stage, and
 * rfr_schedule_slot says which slot a microbatch has (without a schedule there is one). A call still gives what it
 * reads there, and another address is an error. It stays as it is for as long as a slot's own would.
 *
 * What callables write of the caller's memory (fixed outputs and input gradients, states that they update, main
 * gradients) overlaps nothing else that any callable has there (graphs.callable). Two callables may have the same as
 *
 *   one tensor of one name             a parameter, a state, a main gradient
 *   main gradients of two names        both `accumulate`: the caller says when the memory is whose
 *   output and input, fixed            the input is a later callable's: what was made is read where it is
 *   input and output gradient, fixed   the output is an earlier callable's: likewise
 *
 * The last two are the same bytes from end to end, in slots that always have the same microbatch: one that has a call
 * in the later callable's slot is the one that came into the earlier one's last. In one stage that is the same slot;
 * between two stages of a rank the schedule decides, that of rfr_graphs_reschedule too. What is only read (parameters,
 * constants, states that nobody updates, fixed inputs and output gradients) overlaps as it likes. */
typedef struct rfr_callable_fixed {
  const char *port;  /* an input or output that is not linked */
  int gradient;      /* 1: not that, but its gradient */
  void *const *data; /* on the device, at multiples of 16 bytes, until rfr_graphs_destroy or a rebind has moved it. */
  int n_data;        /* Neither warm-up nor capture reads or writes there */
} rfr_callable_fixed;
typedef struct rfr_callable_moved { /* for rfr_graphs_rebind */
  int callable;
  rfr_callable_fixed to;
} rfr_callable_moved;

typedef struct rfr_callable {
  size_t size;
  const char *name;               /* in messages; NULL: its number */
  const rfr_trace *trace;         /* finished, the forward of one microbatch; may be destroyed after creation */
  const rfr_callable_link *links; /* an input is copied into the slot, or linked, or fixed */
  const rfr_callable_fixed *fixed;
  int n_links, n_fixed;
  /* In the order in which calls have them; NULL stands for one that is absent, whose place in a call has no data. The
   * whole list NULL: all of the trace, in its order. */
  const char *const *inputs, *const *outputs;
  int n_inputs, n_outputs;
  const rfr_binding *samples; /* what warm-up reads of inputs, by name; of others zeros. Needed where zeros are no */
  int n_samples;              /* input, as of an op that divides by one */
  int inference;              /* 1: no backward; all callables of a set or none */
  int sharded;                /* 1: each rank holds a part of its parameters, see below */
  /* 1: what it reads of parameters is in the caller's memory within its calls alone, say gathered for each: nothing is
   * made of them ahead of these, as a cast would be otherwise when a step begins. A callable with pre_forward hooks
   * beside rfr_graphs_options.tensors is one, for such hooks gather. A W that comes by itself makes nothing of them
   * again. */
  int gathered;
  /* How many calls of rfr_dropout the model records before this callable; -1: as many as those before it in the list
   * have. A pipeline's ranks give it, and draw as one program that holds them all. */
  int64_t first_site;
} rfr_callable;
RFR_API rfr_callable rfr_callable_default(void);

/* Of a sharded callable each rank of rfr_graphs_options.comm holds a part of every parameter and of its main
 * gradient: ceil(n / ranks) elements, flat; what is over at the last rank's end is zeros. Tensors and gradients,
 * the options' too, are the parts. Each call gathers what it reads, and where weight gradients are made adds up the
 * ranks' and this rank's part of the sum onto its main gradient: collectives are captured, and what is whole has
 * memory for the length of a call. A stage with UNSHARD, RESHARD or REDUCE in the schedule does these instead, for
 * its sharded callables: UNSHARD gathers the parameters, RESHARD drops them, REDUCE does what is said above of the
 * gradients that have been added up whole since the last one. They run by themselves, each behind the call that is
 * before it in the schedule, or when the step begins, and what is whole has memory for that long; F, I and B want
 * the parameters gathered, W if it reads one, and the stage ends with RESHARD and REDUCE. All ranks make the same
 * calls, and create their graphs at the same time if these warm up. */

/* ---- hooks ---- */

typedef enum rfr_hook_point {
  RFR_HOOK_PRE_WARMUP,
  RFR_HOOK_POST_WARMUP,
  RFR_HOOK_PRE_FORWARD,
  RFR_HOOK_POST_FORWARD,
  RFR_HOOK_PRE_BACKWARD,
  RFR_HOOK_POST_BACKWARD,
  RFR_HOOK_PRE_WGRAD,
  RFR_HOOK_POST_WGRAD
} rfr_hook_point;

typedef struct rfr_hook_event {
  size_t size;
  rfr_hook_point point;
  int callable, microbatch; /* -1 around the whole warm-up */
  int capture;              /* 1: around a capture; 0: in warm-up */
  int iteration;            /* of the warm-up; 0 in capture */
  int failed;               /* 1, post hooks alone: what their pre hooks began has failed */
  /* What the part reads and makes: of a forward inputs and outputs, of a backward the outputs' gradients and the
   * inputs', of a wgrad nothing and the main gradients. Data NULL: there is none. In warm-up what is read is there
   * already before the part; in capture they hold no values. Main gradients are from zero in warm-up, in memory that is
   * the walk's; in capture they are where they will be, which is as the caller has it: leave them. */
  const rfr_tensor *inputs, *outputs;
  int n_inputs, n_outputs;
} rfr_hook_event;

/* Runs outside what is captured, on the thread that creates the graphs, and never at replay. Anything but RFR_OK ends
 * creation with that status, as graphs.hook; one that a call of the library has just given the hook brings that call's
 * message along. It returns: an exception, a panic or a longjmp must not leave it. */
typedef rfr_status (*rfr_hook_fn)(const rfr_hook_event *event, void *user);
typedef struct rfr_hook {
  rfr_hook_fn fn;
  void *user;
} rfr_hook;
typedef struct rfr_hook_list { /* called in order */
  const rfr_hook *hooks;
  int n;
} rfr_hook_list;
/* A post list is called once, behind what its pre list began; when that failed too, innermost first, with `failed`. A
 * pre list has begun something when its first hook has succeeded, or when it is empty. All of a post list is called:
 * behind a hook of it that fails the others with `failed`. The first error is the one that creation ends with. */
typedef struct rfr_hooks {
  size_t size;
  rfr_hook_list pre_forward, post_forward, pre_backward, post_backward, pre_wgrad, post_wgrad;
} rfr_hooks;
RFR_API rfr_hooks rfr_hooks_default(void);

/* ---- creation ---- */

/* Where a parameter's gradient is added up. */
typedef struct rfr_main_gradient {
  const char *parameter;
  void *data;             /* the caller's, of the parameter's shape, on the device; NULL: ours */
  int accumulate;         /* 1: the beginning of a step leaves what is there; 0: it is cleared then */
  rfr_dtype dtype;        /* RFR_F32, for which 0 stands too, RFR_BF16 or RFR_F16: sums are made in f32, rounded once */
  const int64_t *strides; /* of data, in elements, one per dimension: of a view, which must be dense; NULL: it is */
} rfr_main_gradient;

typedef struct rfr_graphs_options {
  size_t size;
  /* Its rank's stages own the callables in ascending order, rfr_schedule_layers each. NULL: one stage, microbatch by
   * microbatch F of all callables, then B from the last to the first; any number of microbatches. */
  const rfr_schedule *schedule; /* which may be destroyed after creation */
  int rank;
  int allow_unused_input; /* 1: an input_grad that reaches no output has no gradient; 0: it is an error */
  /* 1: nothing is captured, each call runs its kernels one by one; the same bits. On device cuda:none, where nothing
   * runs, the plan alone is made. */
  int eager;
  /* 1: what is over is poisoned (NaN, -1): slots that are free, outputs behind the last gradient, input gradients, and
   * outputs without gradients, when the slot's next forward begins. The same bits of all that holds. */
  int debug;
  int fuse;       /* as in rfr_compile_options; default 1 */
  int64_t budget; /* bytes of the whole arena; 0: no limit */
  /* As in rfr_compile_options, of all callables together; default: keep. What a trace marks by rfr_set_recompute is
   * marked here too. Inference has nothing to make again. */
  rfr_recompute recompute;
  /* Memory of the caller's for parameters, states and constants, which outlives the graphs; others are ours. This and
   * other memory that graphs keep is the device's, at multiples of 16 bytes: on a GPU, memory of the host that is not
   * pinned and another GPU's are refused (program.state, graphs.callable). */
  const rfr_binding *tensors;
  int n_tensors;
  const rfr_main_gradient *gradients; /* of those parameters where the default, ours and cleared, will not do */
  int n_gradients;
  int warmup_iterations;  /* runs of each part before capture; default 0. Output gradients are zeros then */
  const rfr_hooks *hooks; /* one entry per callable, or NULL and n_hooks 0; another count is an error */
  int n_hooks;
  rfr_hook_list pre_warmup, post_warmup; /* once for the whole warm-up; not at all when it has no iterations */
  rfr_comm *comm; /* of collective ops, this rank's end; outlives the graphs. NULL: there are none, or of one rank */
} rfr_graphs_options;
RFR_API rfr_graphs_options rfr_graphs_options_default(void);

/* Compiles, warms up and captures; `options` NULL: the defaults. Warm-up and capture walk over the schedule's actions,
 * each part of each slot once an iteration; in a B, a callable's wgrad comes right behind its backward. What warm-up
 * would update of parameters, states and gradients is updated in a scratch memory. When this has returned, descriptions
 * and options may go with all that they point to (traces, schedule, names, lists, samples), but for memory of tensors,
 * gradients and ports, and the communicator. After an error nothing of the caller's has changed and nothing is held.
 * Errors: graphs.callable, graphs.hook, program.state, program.name, plan.over_budget, dist.communicator, and those of
 * the passes. */
RFR_API rfr_status rfr_graphs_create(rfr_ctx *ctx, const rfr_callable *callables, int n,
                                     const rfr_graphs_options *options, rfr_graphs **out);
/* Frees everything; accepts NULL. Before the context and the communicator. */
RFR_API void rfr_graphs_destroy(rfr_graphs *g);

/* ---- a step ---- */

/* Begins a step: copies `inputs` into states and constants of their names, makes what depends on parameters alone (on
 * frozen ones and constants the first time, and when they were written), clears main gradients. An input that is a
 * parameter is compared instead, type and address, with what was captured: so a step finds out that one has moved.
 * Errors: program.name; replay.signature, naming the first field that differs; nothing has run then.
 *
 * A step is counted when it ends or is aborted: the states that draws read the step from, "step" and "rng.NAME", are
 * moved on by one then, so that no two steps have the same masks. But one that a callable writes, or whose memory is
 * the caller's (rfr_graphs_options.tensors), is not: the callable does that, or the caller. */
RFR_API rfr_status rfr_graphs_begin_step(rfr_graphs *g, const rfr_binding *inputs, int n_inputs);
/* The forward of a callable. `inputs`: one binding per input that is not linked, by position where the name is NULL,
 * else by name; each is copied into the slot, unless it is fixed. `outputs`, room for all of them, get tensors that
 * hold until the slot's last gradient has run; without gradients, until its next forward or the next step begins. One
 * that has the name of a state which it is a new version of is the state, and holds until that is written again; no
 * other is such a state's memory, or a sharded parameter's: copies of them may be outputs. An input may be what calls
 * have given, where it is, as long as that holds; a linked output holds until its reader has run. A GPU may
 * be given memory of the host's, which is copied in front of the launch, and the driver may wait for it; but sizes of
 * groups (rfr_splits_to_offsets) are refused there, since nothing of a routing is to wait.
 * Errors: graphs.order, naming what the schedule wants; replay.signature, naming the first field that differs;
 * argument, for memory of a slot where nothing holds any more; nothing has run then. */
RFR_API rfr_status rfr_graphs_forward(rfr_graphs *g, int callable, int microbatch, const rfr_binding *inputs,
                                      int n_inputs, rfr_tensor *outputs, int n_outputs);
/* The backward. `output_grads`: one binding per output, by position or by name, but of those alone that have a gradient
 * and go to no other callable; `input_grads`, room for one per unlinked input: data NULL where there is none. They hold
 * until the slot's next forward, which is refused if it is given them, or the next step begins. Where the schedule
 * has B, the weight gradients run too. Errors: as rfr_graphs_forward. */
RFR_API rfr_status rfr_graphs_backward(rfr_graphs *g, int callable, int microbatch, const rfr_binding *output_grads,
                                       int n_output_grads, rfr_tensor *input_grads, int n_input_grads);
/* The weight gradients of a callable, added onto the main gradients. Errors: graphs.order, where none wait. */
RFR_API rfr_status rfr_graphs_wgrad(rfr_graphs *g, int callable, int microbatch);
/* The call that the schedule wants now, the only one that is not graphs.order: F, I, W or B of a stage and microbatch,
 * and whose; B and I are rfr_graphs_backward. None is left: op, stage, microbatch and callable are -1, the step is to
 * end. Without a schedule it may end also where F of callable 0 is wanted. Errors: graphs.order, where no step has
 * begun, or a call of it has failed. */
RFR_API rfr_status rfr_graphs_expected(const rfr_graphs *g, rfr_action *call, int *callable);
/* Errors: graphs.order, naming what is still to come; graphs.splits, once for the first forward known to have had bad
 * splits since the last such error, naming step, callable, layer, microbatch and group: the step has ended all the
 * same. What ran on a device may not be known yet: then rfr_graphs_wait, or the beginning of a later step, which has
 * not begun then, has this error, at most 64 forwards of a callable later. Those of an aborted step are not told. */
RFR_API rfr_status rfr_graphs_end_step(rfr_graphs *g);
/* Leaves a step wherever it is, or none: slots are free, main gradients undefined until the next begins; those that
 * were declared to accumulate, which no beginning clears, are the caller's to restore. It is counted all the same; to
 * try it again with the same masks, rfr_graphs_set_rng what rfr_graphs_get_rng gave before it. Errors: those of the
 * device, which has not counted it then. */
RFR_API rfr_status rfr_graphs_abort_step(rfr_graphs *g);
/* The main gradients that the last call made final: nothing of this step adds to them any more. Over a step each is
 * named once, by the call whose W is its last (by the step's beginning where there is none); without a schedule, where
 * any microbatch may be followed by another, by its end. `gradients` has room for `max`; NULL: *n alone. What was
 * launched may still run. */
RFR_API rfr_status rfr_graphs_grads_ready(const rfr_graphs *g, rfr_tensor *gradients, int max, int *n);
/* The steps from now on follow another schedule, say of more microbatches; NULL: none. Nothing is captured anew: it has
 * the same stages on this rank, no more slots, and W by itself only where it was captured so. Errors: graphs.schedule;
 * graphs.callable, if stages would no longer hand on what they have in the same memory. */
RFR_API rfr_status rfr_graphs_reschedule(rfr_graphs *g, const rfr_schedule *schedule);
/* Memory of the caller's has moved: `tensors` and `gradients` as in rfr_graphs_options, of those that were given there
 * and that lie elsewhere now; all else about them stays: a gradient of another type, or one that is not dense, is
 * program.state, and dtype 0 and `accumulate` are as they were. `fixed`: memory of inputs, outputs and their gradients,
 * for every slot again, of those that had fixed memory. All of it moves at once, or nothing; what was in the old place
 * is the caller's to copy. All graphs are captured again; no hook runs. From then on another address is refused: in
 * rfr_graphs_begin_step, in calls, and in rfr_graphs_read and rfr_graphs_write of a tensor from before. Errors:
 * graphs.order, within a step; program.name; program.state; graphs.callable, as at creation; replay.signature. After
 * one everything is as it was. */
RFR_API rfr_status rfr_graphs_rebind(rfr_graphs *g, const rfr_binding *tensors, int n_tensors,
                                     const rfr_main_gradient *gradients, int n_gradients,
                                     const rfr_callable_moved *fixed, int n_fixed);
/* Frozen parameters or constants were written by other means than rfr_graphs_write and a step's inputs: what depends on
 * them alone is made anew when the next step begins. Errors: graphs.order, within a step. */
RFR_API rfr_status rfr_graphs_changed(rfr_graphs *g);
/* Waits until all that calls launched has run, on their stream. Errors: of the device; graphs.splits. */
RFR_API rfr_status rfr_graphs_wait(rfr_graphs *g);
/* The caller's stream, a cudaStream_t, into which calls enqueue from now on, behind all that was enqueued before. What
 * a call is given need only come before it in the stream, and what comes behind it there needs no rfr_graphs_wait,
 * which waits for the whole stream. NULL: one of the graphs' own, as at first; the legacy default stream is
 * cudaStreamLegacy. The stream is there until another is set or rfr_graphs_destroy has returned. Errors: argument, on
 * the CPU, which has none; cuda. */
RFR_API rfr_status rfr_graphs_set_stream(rfr_graphs *g, void *stream);

/* ---- answers ---- */

/* The memory of a parameter, state or constant, until a rebind moves it; of a parameter's main gradient, which within a
 * step is there only when the last W that adds onto it has run: graphs.order before, naming the call that it waits for.
 * On a device rfr_graphs_read and rfr_graphs_write take it to the host and back. */
RFR_API rfr_status rfr_graphs_tensor(const rfr_graphs *g, const char *name, rfr_tensor *out);
RFR_API rfr_status rfr_graphs_gradient(const rfr_graphs *g, const char *parameter, rfr_tensor *out);
/* Copies to or from host memory; waits for what was launched. Errors: argument, for a tensor of a slot that no longer
 * holds; replay.signature, for one that a rebind has moved. */
RFR_API rfr_status rfr_graphs_write(rfr_graphs *g, const rfr_tensor *to, const void *from);
RFR_API rfr_status rfr_graphs_read(rfr_graphs *g, const rfr_tensor *from, void *to);
/* As rfr_programs_get_rng and rfr_programs_set_rng: within a step its own, else that of the next one to begin, which is
 * what a checkpoint keeps. A step that begins may give a stream's state too, as that of "rng.NAME" or "step", and is
 * counted from there. Errors: program.name; graphs.order, for a set within a step. */
RFR_API rfr_status rfr_graphs_get_rng(rfr_graphs *g, const char *stream, rfr_rng *out);
RFR_API rfr_status rfr_graphs_set_rng(rfr_graphs *g, const char *stream, const rfr_rng *rng);
/* How many ops a callable's part has: F, I or W; 0: a call of it has nothing to do. -1: there is no such part. */
RFR_API int rfr_graphs_ops(const rfr_graphs *g, int callable, rfr_action_op part);
/* `size` is the caller's sizeof: fields that a later version adds come at the end, and no more than `size` bytes are
 * written. */
typedef struct rfr_graphs_memory {
  size_t size;
  int64_t planned_bytes;     /* the arena: all below */
  int64_t persistent_bytes;  /* parameters, states and main gradients of ours; what load and setup make */
  int64_t slot_bytes;        /* of all slots of all stages */
  int64_t shared_bytes;      /* what lives within one action, shared by all */
  int64_t window_bytes;      /* what is whole of sharded parameters and gradients, when most of it is */
  int64_t scratch_bytes;     /* what warm-up updates in place of states and gradients */
  int64_t lower_bound_bytes; /* of slots and shared, each slot at an address of its own: most bytes live at once */
  /* Of slots that have a microbatch at the same time, at most, by the schedule that is followed: what they need whose
   * slots move. */
  int64_t live_bytes;
  int slots, live, graphs; /* live: such slots */
  int64_t saved_bytes;     /* that slots and shared have less because of what is made again */
  int recomputed;          /* ops made again for a microbatch, of all callables, */
  double recomputed_flops; /* and their work */
} rfr_graphs_memory;
RFR_API rfr_status rfr_graphs_get_memory(const rfr_graphs *g, rfr_graphs_memory *out);
/* A callable's ops in the order load, setup, F, I, W (phases load, setup, forward, dgrad, wgrad). Borrowed. */
RFR_API const rfr_trace *rfr_graphs_trace(const rfr_graphs *g, int callable);
/* What a pass decided for a callable; NULL for an unknown pass. */
RFR_API const char *rfr_graphs_report(const rfr_graphs *g, int callable, const char *pass);

#ifdef __cplusplus
}
#endif
#endif
