/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphed callables, for programs with a training loop of their own. Each callable (usually a layer) is captured as
 * three graphs per microbatch slot: forward (F), input gradient (I) and weight gradient (W). The caller replays them in
 * the order of a schedule.
 *
 * Terms. A callable is a recorded forward. Its trace inputs of role input and input_grad are passed at each call;
 * trainable and frozen inputs are its parameters; states and constants are shared by name between all callables. An
 * output that depends on a parameter or on an input_grad gets a gradient in the backward. A stage is a run of
 * callables. A slot is the memory of one microbatch in flight in one stage. A main gradient is the buffer that a
 * parameter's gradient is accumulated in. Names that begin with "grad.", "unreduced." or "graphs." are reserved.
 *
 *   rfr_callable c = rfr_callable_default();
 *   c.name = "layer", c.trace = t;                        // x of role input_grad, output y
 *   rfr_graphs_create(ctx, &c, 1, NULL, &graphs);
 *   rfr_graphs_begin_step(graphs, NULL, 0);               // zeroes the main gradients
 *   rfr_binding x = {NULL, type, data}, dy = {NULL, type, more};
 *   rfr_tensor y, dx;
 *   rfr_graphs_forward(graphs, 0, 0, &x, 1, &y, 1);
 *   rfr_graphs_backward(graphs, 0, 0, &dy, 1, &dx, 1);    // also runs W, unless the schedule has separate W actions
 *   rfr_graphs_end_step(graphs);
 *
 * Memory: nothing is allocated after rfr_graphs_create, except by rfr_graphs_reschedule and rfr_graphs_rebind.
 *
 * Threads and streams: one thread at a time, with the context that created the graphs. On a GPU a call returns before
 * its work has finished; rfr_graphs_wait waits. Data passed to a call must be ready when the call is made, or be
 * produced by earlier work in the caller's stream (rfr_graphs_set_stream), and must stay unchanged until
 * rfr_graphs_wait. No call may be made while a stream is capturing.
 *
 * Schedules: the actions F, I, W and B are calls of the caller (rfr_graphs_expected returns the next one). Messages
 * between ranks are the caller's, between the calls. UNSHARD, RESHARD and REDUCE are also the caller's, except for
 * sharded callables, where the graphs run them.
 *
 * Every call returns argument for a NULL handle or a NULL out parameter.
 */
#ifndef REFRAIN_GRAPHS_H
#define REFRAIN_GRAPHS_H

#include "refrain/program.h"
#include "refrain/schedule.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rfr_graphs rfr_graphs;

/* Connects an input to the output of an earlier callable of the same stage: both use the same memory, nothing is
 * copied, and the caller passes neither. The input's gradient is the output's gradient. If the output has no gradient
 * (its callable is frozen), the input has none either, as if its role were input. An output feeds at most one link. */
typedef struct rfr_callable_link {
  const char *input;
  int callable;
  const char *output;
} rfr_callable_link;

/* Fixed memory: the caller's memory for an input, an output, or the gradient of one, instead of slot memory; nothing is
 * copied. The address is captured, so there is one address per slot of the stage; rfr_schedule_slot maps a microbatch
 * to its slot (without a schedule there is one slot). Calls still pass a binding for fixed inputs; another address is
 * replay.signature. The contents must stay valid as long as slot memory would.
 *
 * Memory that callables write (fixed outputs, fixed input gradients, states they update, main gradients) must not
 * overlap other memory that callables use (graphs.callable), with these exceptions:
 *
 *   one tensor under one name          a parameter, a state or a main gradient shared by two callables
 *   two main gradients                 if both have `accumulate` set: the caller decides when each one uses the memory
 *   fixed output and fixed input       the input belongs to a later callable, which reads the output in place
 *   fixed input gradient and           the output belongs to an earlier callable, likewise
 *   fixed output gradient
 *
 * The last two need identical byte ranges in slots that always hold the same microbatch. This holds within a stage;
 * between two stages of a rank it depends on the schedule, and rfr_graphs_reschedule checks it again. Memory that is
 * only read (parameters, constants, states that are never updated, fixed inputs and output gradients) may overlap. */
typedef struct rfr_callable_fixed {
  const char *port; /* an input or output that is not linked */
  int gradient;     /* 1: the gradient of `port` */
  void *const
      *data;  /* one device address per slot, multiples of 16 bytes, valid until destroy or rebind. Warm-up and */
  int n_data; /* capture do not access it: in warm-up the port uses scratch memory, which hook events show */
} rfr_callable_fixed;
typedef struct rfr_callable_moved { /* for rfr_graphs_rebind */
  int callable;
  rfr_callable_fixed to;
} rfr_callable_moved;

typedef struct rfr_callable {
  size_t size;
  const char *name;               /* used in messages; NULL: its number */
  const rfr_trace *trace;         /* the forward of one microbatch, recorded in the same context and finished with
                                     rfr_trace_finish; may be destroyed after creation */
  const rfr_callable_link *links; /* inputs that are neither linked nor fixed are copied into the slot */
  const rfr_callable_fixed *fixed;
  int n_links, n_fixed;
  /* The order of inputs and outputs in calls. A NULL entry is an absent input or output: calls pass no data for it. A
   * NULL list: all inputs (outputs) of the trace, in its order. */
  const char *const *inputs, *const *outputs;
  int n_inputs, n_outputs;
  const rfr_binding
      *samples;  /* input values for warm-up, by name; others are zeros. Needed where zeros are not a valid */
  int n_samples; /* input, for example as a divisor */
  int inference; /* 1: no backward. All callables of a set or none */
  int sharded;   /* 1: each rank holds a shard of its parameters, see below */
  /* 1: the caller gathers the parameters before each call and may free them after it. Then no value derived from
   * parameters, such as a cast, is kept between calls. It is set automatically for a callable with pre_forward hooks if
   * rfr_graphs_options.tensors is not empty, because such hooks usually gather. Set it if your loop gathers between the
   * calls without hooks, because the graphs cannot detect that. */
  int gathered;
  /* The number of random ops (rfr_dropout) that the model records before this callable: the sum of rfr_trace_sites over
   * the earlier layers. It selects the dropout masks; with the right numbers a pipeline draws the masks of a single
   * program. -1, the default: continue from the previous callable in the list (from 0 for the first). In a schedule
   * with several ranks the first callable of each stage that draws random numbers must set it (graphs.callable),
   * because the layers of the other ranks are not known here. At most 2^24. */
  int64_t first_site;
  /* The same for linear layers under a recipe: the sum of rfr_trace_linears over the earlier layers. It selects the
   * random numbers with which nvfp4 rounds, and the slots of fp8_delayed (recipe.h). */
  int64_t first_linear;
} rfr_callable;
RFR_API rfr_callable rfr_callable_default(void);

/* Sharded callables (FSDP). Each rank of rfr_graphs_options.comm holds a flat shard of ceil(n / ranks) elements of
 * every parameter and of its main gradient; the last shard is zero-padded. rfr_graphs_tensor, rfr_graphs_gradient and
 * the options' tensors and gradients are shards.
 *
 * Without UNSHARD, RESHARD or REDUCE in the stage, every call gathers the parameters it reads, and a call with weight
 * gradients reduce-scatters them onto the shard of the main gradient. The collectives are captured; gathered
 * parameters and unreduced gradients take memory for the length of one call.
 *
 * With those actions in the stage, UNSHARD gathers, RESHARD frees, and REDUCE reduce-scatters the gradients that were
 * accumulated since the last REDUCE. They run automatically after the call that precedes them in the schedule (or when
 * the step begins). F, I and B need gathered parameters, W only if it reads a parameter; the schedule must end with
 * RESHARD and REDUCE of the stage.
 *
 * All ranks make the same calls, and create their graphs at the same time if warm-up runs. */

/* ---- creation ---- */

/* The buffer that a parameter's gradient is accumulated in. It is checked like a tensor: type, strides and bytes. */
typedef struct rfr_main_gradient {
  size_t size;
  const char *parameter;
  rfr_type type; /* dtype f32, bf16 or f16 (sums are made in f32 and rounded once) and the parameter's shape; for a
                    sharded parameter the shard's */
  void *data;    /* the caller's device memory, a multiple of 16 bytes; NULL: the graphs allocate it */
  int64_t bytes; /* size of `data`: exactly that of `type`; 0 if data is NULL */
  const int64_t *strides; /* of data, in elements, one per dimension; must describe dense memory. NULL: dense */
  int n_strides;          /* the rank; 0 if strides is NULL */
  int accumulate;         /* 0: zeroed when a step begins; 1: kept */
} rfr_main_gradient;
/* size set, all else zero. */
RFR_API rfr_main_gradient rfr_main_gradient_default(void);

typedef struct rfr_graphs_options {
  size_t size;
  /* The stages of this rank own the callables in ascending order, rfr_schedule_layers each. NULL: one stage and any
   * number of microbatches, one at a time: F of all callables, then B from the last to the first. */
  const rfr_schedule *schedule; /* of the same context; may be destroyed after creation */
  int rank;
  int first_microbatch; /* added to the number of a microbatch that addresses dropout masks; default 0. The sum must be
                           below 2^20 where random numbers are drawn */
  /* 1: an input_grad or a trainable parameter may reach no output. The input_grad then has no gradient (data NULL). The
   * parameter has none either, unless `gradients` has an entry for it: then its main gradient gets zeros added, and is
   * final when a step begins. 0: it is graphs.callable. */
  int allow_unused_input;
  /* 1: nothing is captured; each call launches its kernels one by one, with bitwise the same results. On device
   * cuda:none only a plan is computed. */
  int eager;
  /* 1: dead buffers are filled with NaN (floats) or -1 (integers): free slots, outputs after the last gradient, and
   * input gradients and outputs without gradients when the slot's next forward begins. Results do not change. */
  int debug;
  int fuse;       /* as in rfr_compile_options; default 1 */
  int64_t budget; /* bytes of the arena and of `step_memory`; 0: no limit */
  /* As in rfr_compile_options, for all callables together; default: keep. Ops marked with rfr_set_recompute are always
   * recomputed. Without effect in inference. */
  rfr_recompute recompute;
  /* The caller's memory for parameters, states and constants, which must outlive the graphs; the graphs allocate the
   * others. It must be device memory, at multiples of 16 bytes; on a GPU, unpinned host memory and another GPU's
   * memory are program.state. The captured address is used at every replay. The graphs cannot see that the caller has
   * moved a tensor: pass the parameters to rfr_graphs_begin_step to have their addresses compared, and call
   * rfr_graphs_rebind after a move. */
  const rfr_binding *tensors;
  int n_tensors;
  const rfr_main_gradient *gradients; /* default for a parameter without an entry: f32, allocated, zeroed each step */
  int n_gradients;
  int warmup_iterations;  /* runs of each part before capture, with zero output gradients; default 0 */
  const rfr_hooks *hooks; /* one entry per callable, or NULL and n_hooks 0 */
  int n_hooks;
  rfr_hook_list pre_warmup, post_warmup; /* once, around all iterations; not called if there are none */
  /* This rank's communicator for collective ops; outlives the graphs. It may belong to another context, as those of
   * ranks that are threads do. NULL: no collectives, or a single rank. */
  rfr_comm *comm;
  /* Step memory (rfr_step_memory) for slots, shared bytes, gathered parameters and scratch. Others may use it between
   * the steps of these graphs. NULL: they are in the arena. */
  rfr_step_memory *step_memory;
  /* 1, the default: on a GPU, W may run on a side stream, concurrently with later F and I that do not conflict with it.
   * Results do not change. These W's have separate scratch memory; if it exceeds `budget` or `step_memory`, all W's run
   * in order. Without a schedule, work in your stream may read a main gradient after rfr_graphs_gradient has returned
   * it, or after the last call of the microbatch. rfr_graphs_report with "wgrad" lists each W. 0: everything runs in
   * order, in one stream. */
  int wgrad_side_stream;
} rfr_graphs_options;
RFR_API rfr_graphs_options rfr_graphs_options_default(void);

/* Compiles, warms up and captures; `options` NULL: the defaults. Warm-up and capture walk over the schedule's actions
 * and visit each part of each callable and slot once per iteration. Updates of parameters, states and gradients in
 * warm-up go to scratch memory, so that nothing of the caller's changes, also after an error. Afterwards descriptions
 * and options, with everything they point to, may be freed, except memory of tensors, gradients and fixed ports, and
 * the communicator. Errors: argument; graphs.callable, also for a trace of another context or one that is not finished;
 * graphs.hook; program.state; program.name; plan.over_budget; dist.communicator; memory.in_use, if warm-up would run in
 * `step_memory` while a step uses it; and those of the passes. */
RFR_API rfr_status rfr_graphs_create(rfr_ctx *ctx, const rfr_callable *callables, int n,
                                     const rfr_graphs_options *options, rfr_graphs **out);
/* Frees everything; accepts NULL. Call it before the communicator is destroyed. */
RFR_API void rfr_graphs_destroy(rfr_graphs *g);

/* ---- a step ---- */

/* Begins a step: copies `inputs` into states and constants of their names, computes what depends on parameters only
 * (for frozen parameters and constants only once and after they were written), and zeroes main gradients. An input
 * that names a parameter is not copied: its type and address are compared with the captured ones (replay.signature),
 * which finds parameters that have moved. Errors: graphs.order; program.name; memory.in_use (rfr_step_memory);
 * replay.signature, naming the first field that differs; nothing was executed then.
 *
 * The step counters are the states "step" and "rng.NAME", which random ops read. They advance by one when a step ends
 * or is aborted, so that no two steps draw the same masks; except a counter that a callable writes, or that lies in
 * the caller's memory (rfr_graphs_options.tensors): the callable or the caller advances it. */
RFR_API rfr_status rfr_graphs_begin_step(rfr_graphs *g, const rfr_binding *inputs, int n_inputs);
/* Begins an evaluation: forwards only. For each microbatch from 0 on (any number), call F of every callable of this
 * rank in ascending order; rfr_graphs_end_step or rfr_graphs_abort_step ends it. Step counters, main gradients,
 * parameters and states do not change, so training continues as if there had been no evaluation. `inputs` as in
 * rfr_graphs_begin_step, but only constants and parameters. Outputs are valid until the next forward of the stage.
 * Fixed ports have their addresses of slot 0. Sharded callables gather in each call. Dropout stays active, with the
 * masks of the next step: to evaluate without it, record an inference set without dropout over the same
 * rfr_graphs_options.tensors. Errors: graphs.order; program.name; replay.signature; graphs.callable, if a forward
 * writes a state. */
RFR_API rfr_status rfr_graphs_begin_evaluation(rfr_graphs *g, const rfr_binding *inputs, int n_inputs);
/* The forward of a callable. `inputs`: one binding per input that is not linked, by position if its name is NULL, else
 * by name; copied into the slot unless fixed. `outputs` has room for all outputs. They are valid until the slot's last
 * gradient has run; without gradients, until its next forward or the next step. An output with the name of a state, of
 * which it is a new version, is that state, valid until it is written again; other outputs that alias a state or a
 * sharded parameter are refused at creation. A linked output is valid until its reader has run. An input may be the
 * output of an earlier call while that is valid. On a GPU inputs may be host memory, which is copied before the launch
 * (the driver may wait); group sizes (rfr_splits_to_offsets) must be device memory. Errors: graphs.order, naming the
 * call that the schedule expects; replay.signature, naming the first field that differs; argument, for slot memory
 * that is no longer valid. Nothing was executed then. */
RFR_API rfr_status rfr_graphs_forward(rfr_graphs *g, int callable, int microbatch, const rfr_binding *inputs,
                                      int n_inputs, rfr_tensor *outputs, int n_outputs);
/* The backward. `output_grads`: one binding per output that has a gradient and is not linked, by position or by name.
 * `input_grads` has room for one tensor per input that is not linked; data is NULL if it has no gradient. They are
 * valid until the slot's next forward, which refuses them as input, or the next step. If the schedule has B, the
 * weight gradients run too. Errors: as rfr_graphs_forward. */
RFR_API rfr_status rfr_graphs_backward(rfr_graphs *g, int callable, int microbatch, const rfr_binding *output_grads,
                                       int n_output_grads, rfr_tensor *input_grads, int n_input_grads);
/* The weight gradients of a callable, accumulated into the main gradients. Errors: graphs.order. */
RFR_API rfr_status rfr_graphs_wgrad(rfr_graphs *g, int callable, int microbatch);
/* The call that the schedule expects now; any other is graphs.order. *call: F, I, W or B, its stage and microbatch; B
 * and I are rfr_graphs_backward. If no call is left, all fields and *callable are -1 and the step has to end. Without
 * a schedule a step may also end where F of callable 0 is expected. Errors: graphs.order, outside a step or after a
 * failed call. */
RFR_API rfr_status rfr_graphs_expected(const rfr_graphs *g, rfr_action *call, int *callable);
/* Errors: graphs.order, naming the next missing call; graphs.splits for the first forward with invalid group sizes
 * since the last such error, naming step, callable, layer, microbatch and group: the step has ended all the same. On a
 * device the error may come later, from rfr_graphs_wait or the beginning of a later step (which has not begun then), at
 * most 64 forwards of the callable later. Invalid group sizes in an aborted step are not reported. */
RFR_API rfr_status rfr_graphs_end_step(rfr_graphs *g);
/* Ends a step at any point; does nothing outside one. Slots are freed. Main gradients are undefined until the next step
 * begins; the caller restores those with `accumulate`. The step counters advance; to repeat the step with the same
 * masks, save them with rfr_graphs_get_rng before it and restore them with rfr_graphs_set_rng. Errors: those of the
 * device; then the counters have not advanced. */
RFR_API rfr_status rfr_graphs_abort_step(rfr_graphs *g);
/* The main gradients that the last call completed: no later call of this step adds to them. Each is listed once per
 * step, after the call with its last W (after rfr_graphs_begin_step if there is none); without a schedule, where
 * another microbatch may always follow, after rfr_graphs_end_step. `gradients` has room for `max` tensors; NULL: only
 * *n is set. On a GPU the work may still be running. */
RFR_API rfr_status rfr_graphs_grads_ready(const rfr_graphs *g, rfr_tensor *gradients, int max, int *n);
/* Later steps follow another schedule, for example with more microbatches; NULL: none. Nothing is captured again, so it
 * must have the same stages on this rank, no more slots, and separate W actions only where they were captured. Errors:
 * graphs.order, within a step; graphs.schedule; graphs.callable, if fixed memory would no longer pass between stages in
 * order. */
RFR_API rfr_status rfr_graphs_reschedule(rfr_graphs *g, const rfr_schedule *schedule);
/* The caller's memory has moved. `tensors` and `gradients`: as in rfr_graphs_options, those given there that now have
 * another address; types must be the captured ones, and `accumulate` is ignored. `fixed`: new addresses, for every
 * slot, of ports that had fixed memory. All of it moves or nothing; the caller copies the contents. All graphs are
 * captured again; no hook runs. Afterwards the old addresses are refused in rfr_graphs_begin_step, in calls, and in
 * rfr_graphs_read and rfr_graphs_write. Errors: graphs.order, within a step; program.name; program.state;
 * graphs.callable, as at creation; replay.signature. After an error everything is as before. */
RFR_API rfr_status rfr_graphs_rebind(rfr_graphs *g, const rfr_binding *tensors, int n_tensors,
                                     const rfr_main_gradient *gradients, int n_gradients,
                                     const rfr_callable_moved *fixed, int n_fixed);
/* Call this after frozen parameters or constants were written by other means than rfr_graphs_write and step inputs:
 * values derived from them are recomputed when the next step begins. Errors: graphs.order, within a step. */
RFR_API rfr_status rfr_graphs_changed(rfr_graphs *g);
/* Waits until all launched work has finished. Errors: those of the device; graphs.splits. */
RFR_API rfr_status rfr_graphs_wait(rfr_graphs *g);
/* Sets the stream, a cudaStream_t, that calls enqueue into from now on, after everything enqueued before. Inputs then
 * only have to precede the call in that stream, and later work in it needs no rfr_graphs_wait (which waits for the
 * whole stream). NULL: a stream of the graphs' own, the initial one; the legacy default stream is cudaStreamLegacy.
 * The stream must exist until another is set or rfr_graphs_destroy returns. Errors: argument, on the CPU; cuda. */
RFR_API rfr_status rfr_graphs_set_stream(rfr_graphs *g, void *stream);

/* ---- queries ---- */

/* The memory of a parameter, state or constant, valid until a rebind moves it; and of a parameter's main gradient.
 * Within a step a main gradient is available only after its last W: before that graphs.order, naming the call it waits
 * for. On a device use rfr_graphs_read and rfr_graphs_write. Errors: program.name. */
RFR_API rfr_status rfr_graphs_tensor(const rfr_graphs *g, const char *name, rfr_tensor *out);
RFR_API rfr_status rfr_graphs_gradient(const rfr_graphs *g, const char *parameter, rfr_tensor *out);
/* Copies a tensor's bytes to or from host memory; waits for launched work. The tensor is one that these graphs
 * returned. Errors: argument, for a tensor whose bytes do not match its type, for memory that is not of these graphs,
 * and for a tensor of a slot that is no longer valid; replay.signature, for one that a rebind has moved. */
RFR_API rfr_status rfr_graphs_write(rfr_graphs *g, const rfr_tensor *to, const void *from);
RFR_API rfr_status rfr_graphs_read(rfr_graphs *g, const rfr_tensor *from, void *to);
/* As rfr_programs_get_rng and rfr_programs_set_rng. Within a step: the step's own state; otherwise that of the next
 * step, which is what a checkpoint stores. rfr_graphs_begin_step may set a stream's state too, as input "rng.NAME" or
 * "step". Errors: program.name; graphs.order, for a set within a step. */
RFR_API rfr_status rfr_graphs_get_rng(rfr_graphs *g, const char *stream, rfr_rng *out);
RFR_API rfr_status rfr_graphs_set_rng(rfr_graphs *g, const char *stream, const rfr_rng *rng);
/* The number of kernels in a callable's F, I or W; 0: that call does nothing. -1: no such part. */
RFR_API int rfr_graphs_ops(const rfr_graphs *g, int callable, rfr_action_op part);
/* Set `size` to sizeof(rfr_graphs_memory) first; no more than `size` bytes are written. Later versions append fields.
 */
typedef struct rfr_graphs_memory {
  size_t size;
  int64_t planned_bytes;     /* the arena: all below */
  int64_t persistent_bytes;  /* allocated parameters, states and main gradients; results of the load and setup phases */
  int64_t slot_bytes;        /* all slots of all stages */
  int64_t shared_bytes;      /* buffers that live within one action, shared by all actions */
  int64_t window_bytes;      /* gathered parameters and unreduced gradients of sharded callables, at their peak */
  int64_t scratch_bytes;     /* written in warm-up instead of states and gradients */
  int64_t lower_bound_bytes; /* of slots and shared bytes: the sum of bytes that are live at once */
  int64_t live_bytes;        /* slots that hold a microbatch at the same time, at most, in the current schedule */
  int slots, live, graphs;   /* live: the number of such slots */
  int64_t saved_bytes;       /* reduction of slot and shared bytes by recompute */
  int recomputed;            /* recomputed ops per microbatch, over all callables, */
  double recomputed_flops;   /* and their work */
  int64_t step_memory_bytes; /* of planned_bytes: those of rfr_graphs_options.step_memory, shared with others */
} rfr_graphs_memory;
RFR_API rfr_status rfr_graphs_get_memory(const rfr_graphs *g, rfr_graphs_memory *out);
/* The compiled ops of a callable in the order load, setup, F, I, W (phases load, setup, forward, dgrad, wgrad).
 * Borrowed; NULL: no such callable. */
RFR_API const rfr_trace *rfr_graphs_trace(const rfr_graphs *g, int callable);
/* The decisions of a pass for a callable; NULL for an unknown pass. "wgrad": the stream of each W, and the call that
 * waits for it or the reason why it runs in order. Borrowed. */
RFR_API const char *rfr_graphs_report(const rfr_graphs *g, int callable, const char *pass);

#ifdef __cplusplus
}
#endif
#endif
