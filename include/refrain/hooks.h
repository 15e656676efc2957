/* SPDX-License-Identifier: Apache-2.0
 *
 * Hooks: calls of yours before and after the parts of a step, for what cannot be captured, for example gathering
 * parameters. Callables have them at creation (rfr_graphs_options.hooks).
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
  int callable, microbatch; /* -1 for the warm-up hooks */
  int capture;              /* 1: around a capture; 0: in warm-up */
  int iteration;            /* warm-up iteration; 0 in capture */
  int failed;               /* 1, in post hooks only: the work after their pre hooks failed */
  /* Tensors of the part. Forward: inputs and outputs. Backward: output gradients and input gradients. Wgrad: none, and
   * the main gradients. data is NULL for absent ones. In warm-up the inputs have their values before the part runs, and
   * addresses of fixed ports, main gradients and written states are scratch memory. In capture the addresses are final
   * but hold no values; main gradients hold the caller's values: do not write them. */
  const rfr_tensor *inputs, *outputs;
  int n_inputs, n_outputs;
  const char *name;             /* of the callable; NULL for the warm-up hooks */
  const rfr_tensor *parameters; /* the callable's trainable and frozen parameters */
  int n_parameters;
  int has_wgrad;   /* 1: the callable has a W part, so its wgrad hooks run */
  int wgrad_reads; /* 1: W reads parameters. W runs after post_backward, in a B too: free gathered parameters in */
                   /* post_wgrad then, not in post_backward */
} rfr_hook_event;

/* Hooks run during creation, outside the captured region, on the creating thread, and never at replay. A status other
 * than RFR_OK ends creation with that status, as graphs.hook; if the hook returns the status of a failed library call,
 * the message includes that call's error. A hook must return: no exception, panic or longjmp may leave it. */
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
 * part first. If a hook of a post list fails, the rest of the list runs with `failed` set. Creation returns the first
 * error. A list for a part that the callable does not have (backward hooks without a backward, wgrad hooks without
 * trainable parameters) is graphs.callable. With `eager` and no warm-up nothing runs at creation, hooks included. */
typedef struct rfr_hooks {
  size_t size;
  rfr_hook_list pre_forward, post_forward, pre_backward, post_backward, pre_wgrad, post_wgrad;
} rfr_hooks;
RFR_API rfr_hooks rfr_hooks_default(void);

#ifdef __cplusplus
}
#endif
#endif
