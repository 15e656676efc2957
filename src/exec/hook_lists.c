/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists of hooks: which runs when, and which error is returned.
 */
#include "exec/hook_lists.h"

const char *const RFI_HOOK_NAMES[] = {"pre_warmup",   "post_warmup",   "pre_forward", "post_forward",
                                      "pre_backward", "post_backward", "pre_wgrad",   "post_wgrad"};

rfr_hooks rfr_hooks_default(void) { return (rfr_hooks){.size = sizeof(rfr_hooks)}; }

const rfr_hook_list *rfi_hooks_at(const rfr_hooks *h, int point) {
  const rfr_hook_list *const lists[] = {&h->pre_forward,   &h->post_forward, &h->pre_backward,
                                        &h->post_backward, &h->pre_wgrad,    &h->post_wgrad};
  return lists[point - RFR_HOOK_PRE_FORWARD];
}

rfr_status rfi_check_hook_list(const rfr_hook_list *l) {
  bool good = rfi_is_list(l->hooks, l->n);
  for (int i = 0; good && i < l->n; i++) good = l->hooks[i].fn != NULL;
  return good ? RFR_OK : rfi_fail(RFI_E_ARGUMENT, "a hook list is NULL with n > 0, or has a hook without a function");
}

rfr_status rfi_check_hook_parts(const rfr_hooks *h, const char *const lacks[3], rfi_error error, const char *kind,
                                const char *name) {
  for (int at = RFR_HOOK_PRE_FORWARD; at <= RFR_HOOK_POST_WGRAD; at++) {
    const char *part = lacks[(at - RFR_HOOK_PRE_FORWARD) / 2];
    if (part && rfi_hooks_at(h, at)->n > 0)
      return rfi_fail(error, "%s \"%s\" has %s hooks, which never run: it has no %s", kind, name, RFI_HOOK_NAMES[at],
                      part);
  }
  return RFR_OK;
}

rfr_status rfi_check_hooks(const rfr_hooks *h, int n_hooks, int n, const char *options, const char *units) {
  if (h ? n_hooks != n : n_hooks != 0)
    return rfi_fail(RFI_E_ARGUMENT, "%s.hooks has %d entries for %d %s: one for each, or none", options, n_hooks, n,
                    units);
  for (int i = 0; i < n_hooks; i++) {
    if (h[i].size != sizeof *h)
      return rfi_fail(RFI_E_ARGUMENT, "hooks %d: size is %zu, but rfr_hooks_default sets %zu", i, h[i].size, sizeof *h);
    for (int at = RFR_HOOK_PRE_FORWARD; at <= RFR_HOOK_POST_WGRAD; at++)
      RFI_TRY(rfi_check_hook_list(rfi_hooks_at(&h[i], at)));
  }
  return RFR_OK;
}

/* If a hook returns the status of a failed library call, the message of that call becomes part of the error. */
static rfr_status run_hook(const rfi_hooked *x, const rfr_hook_list *list, int i, const rfr_hook_event *event) {
  rfi_fail_status(RFR_OK); /* clears earlier errors */
  const rfr_status s = list->hooks[i].fn(event, list->hooks[i].user);
  const rfr_error *e = rfr_last_error();
  const bool own = e->status == s;
  if (s == RFR_OK) return RFR_OK;
  rfi_fail(RFI_E_GRAPHS_HOOK, "%s hook %d of %s %d, microbatch %d, in %s%s%s%s%s", RFI_HOOK_NAMES[event->point], i,
           x->unit, event->callable, event->microbatch, event->capture ? "capture" : x->eager, own ? ": " : "",
           own ? e->slug : "", own ? ": " : "", own ? e->message : "");
  return rfi_fail_status(s);
}

/* Runs all post hooks, even after an error, because each hook undoes its own work. Keeps the first error: `s`, or that
 * of a hook. */
static rfr_status run_post(const rfi_hooked *x, rfr_hook_event *event, rfr_status s) {
  for (int i = 0; i < x->post->n; i++) {
    char text[2048];
    const rfr_error e = *rfr_last_error();
    rfi_snprintf(text, sizeof text, "%s", e.message);
    event->failed = s != RFR_OK;
    const rfr_status own = run_hook(x, x->post, i, event);
    if (s == RFR_OK) {
      s = own;
      continue;
    }
    rfi_fail_slug(e.slug, "%s", text);
    rfi_fail_status(s);
  }
  return s;
}

rfr_status rfi_run_hooked(const rfi_hooked *x, rfr_hook_event *event) {
  int done = 0;
  rfr_status s = RFR_OK;
  for (; done < x->pre->n && s == RFR_OK; done += s == RFR_OK) s = run_hook(x, x->pre, done, event);
  if (s != RFR_OK && done == 0) return s;
  if (s == RFR_OK) s = x->work(x->user);
  event->point = (rfr_hook_point)(event->point + 1);
  return run_post(x, event, s);
}
