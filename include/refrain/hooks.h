/* SPDX-License-Identifier: Apache-2.0
 *
 * Hooks: calls of yours before and after the parts of a step, for what cannot be captured, for example gathering
 * parameters. Hooks of callables (rfr_graphs_options.hooks) run during creation, around each warm-up and capture of a
 * part, and never at replay. Hooks of programs (rfr_compile_options.hooks) run in rfr_program_run and around
 * rfr_program_capture, and never at replay.
 */
#ifndef REFRAIN_HOOKS_H
#define REFRAIN_HOOKS_H

#include "refrain/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

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

/* Borrowed, valid during the hook. */
typedef struct rfr_hook_event {
  size_t size;
  rfr_hook_point point;
  int callable;   /* or the program; -1 for the warm-up hooks */
  int microbatch; /* -1 for the warm-up hooks, and if the program has no microbatches (rfr_microbatch) */
  int capture;    /* 1: around a capture; 0: in warm-up, or in rfr_program_run */
  int iteration;  /* warm-up iteration; 0 in capture */
  int failed;     /* 1, in post hooks only: the work after their pre hooks failed */
  /* Tensors of the part. Forward: inputs and outputs. Backward: output gradients and input gradients. Wgrad: none, and
   * the main gradients. data is NULL for absent ones. In warm-up the inputs have their values before the part runs, and
   * addresses of fixed ports, main gradients and written states are scratch memory. In capture the addresses are final
   * but hold no values; main gradients hold the caller's values: do not write them.
   * Of a program: always its inputs that are no parameters, and its outputs, whose bytes are undefined before the step
   * has computed them. */
  const rfr_tensor *inputs, *outputs;
  int n_inputs, n_outputs;
  const char *name;             /* of the callable or program; NULL for the warm-up hooks */
  const rfr_tensor *parameters; /* its trainable and frozen parameters */
  int n_parameters;
  int has_wgrad;   /* 1: the callable has a W part, so its wgrad hooks run; 0 for a program */
  int wgrad_reads; /* 1: W reads parameters. W runs after post_backward, in a B too: free gathered parameters in */
                   /* post_wgrad then, not in post_backward */
} rfr_hook_event;

/* Hooks run on the thread of the call, outside the captured region, when earlier work is done. A status other than
 * RFR_OK ends creation, the run or the capture with that status, as graphs.hook; if the hook returns the status of a
 * failed library call, the message includes that call's error. A hook cannot run or capture the programs that it
 * belongs to (program.order). A hook must return: no exception, panic or longjmp may leave it. */
typedef rfr_status (*rfr_hook_fn)(const rfr_hook_event *event, void *user);
typedef struct rfr_hook {
  rfr_hook_fn fn;
  void *user;
} rfr_hook;
typedef struct rfr_hook_list { /* called in order */
  const rfr_hook *hooks;
  int n;
} rfr_hook_list;
/* Order for a B: pre_backward, I, post_backward, pre_wgrad, W, post_wgrad. If the first hook of a pre list succeeded
 * (or the list is empty), the post list runs exactly once, also after a failure: then with `failed` set, innermost
 * part first. If a hook of a post list fails, the rest of the list runs with `failed` set. The first error is returned;
 * the rest of a program does not run then. A list for a part that the callable does not have (backward hooks without a
 * backward, wgrad hooks without trainable parameters) is graphs.callable, in a program argument. With `eager` and no
 * warm-up nothing runs at creation of graphs, hooks included.
 *
 * In a program hooks are called around the forward and the backward of each microbatch: the ops from the first to the
 * last of it. The microbatches follow each other, then comes the optimizer. An op that a pass has moved before the end
 * of an earlier part (a gather, a gradient that is zeroed) runs there. Weight gradients are part of the backward. */
typedef struct rfr_hooks {
  size_t size;
  rfr_hook_list pre_forward, post_forward, pre_backward, post_backward, pre_wgrad, post_wgrad;
} rfr_hooks;
RFR_API rfr_hooks rfr_hooks_default(void);

#ifdef __cplusplus
}
#endif
#endif
