/* SPDX-License-Identifier: Apache-2.0
 *
 * Work between two lists of the caller's hooks: a part of a callable, a warm-up, a part of a program.
 */
#ifndef RFI_HOOK_LISTS_H
#define RFI_HOOK_LISTS_H

#include "base/base.h"
#include "refrain/hooks.h"

typedef struct rfi_hooked {
  const rfr_hook_list *pre, *post;
  rfr_status (*work)(void *user);
  void *user;
  /* for messages: the object that has the hooks, and the verb for what it does when it is not captured */
  const char *unit, *eager;
} rfi_hooked;

/* Runs the work between its hooks; event->point is that of `pre`. If the first pre hook succeeded, or there is none,
 * all of `post` runs, with `failed` set after an error. Returns the first error. */
rfr_status rfi_run_hooked(const rfi_hooked *x, rfr_hook_event *event);

extern const char *const RFI_HOOK_NAMES[]; /* by point */
/* The hooks at a point; points count from RFR_HOOK_PRE_FORWARD. */
const rfr_hook_list *rfi_hooks_at(const rfr_hooks *h, int point);
rfr_status rfi_check_hook_list(const rfr_hook_list *l);
/* Refuses hooks that would never run. lacks[]: the name of the forward, of the backward and of the wgrad if the unit
 * lacks it, else NULL. `kind` and `name` are those of the unit. */
rfr_status rfi_check_hook_parts(const rfr_hooks *h, const char *const lacks[3], rfi_error error, const char *kind,
                                const char *name);
/* Checks the hooks of n units: one entry per unit, or NULL and 0. `options` and `units` are names for messages. */
rfr_status rfi_check_hooks(const rfr_hooks *h, int n_hooks, int n, const char *options, const char *units);

#endif
