/* SPDX-License-Identifier: Apache-2.0
 *
 * The calls of a step. The call list of graph_calls.c gives the next call; any other is an error that names it. A call
 * is checked completely before anything of it runs. After a call that failed while it ran, the step can only be
 * aborted.
 */
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"
#include "exec/step_memory.h"

/* ---- the order ---- */

/* The reason why no call is accepted now; NULL: calls are accepted. */
static const char *closed_reason(const rfr_graphs *g) {
  return g->state == RFI_STEP_OPEN   ? NULL
         : g->state == RFI_STEP_NONE ? "no step has begun"
                                     : "a call of this step has failed: abort it";
}

/* The call of a part must be the next one in order. A B is called as its I. */
static rfr_status check_order(const rfr_graphs *g, rfi_part part, int callable, int microbatch, rfi_step_call *call) {
  static const char *const names[RFI_PARTS] = {
      [RFI_PART_F] = "forward", [RFI_PART_I] = "backward", [RFI_PART_W] = "wgrad"};
  const char *asked = names[part];
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  if (callable < 0 || callable >= g->n) return rfi_fail(RFI_E_ARGUMENT, "callable %d of %d", callable, g->n);
  if (g->state != RFI_STEP_OPEN)
    return rfi_fail(RFI_E_GRAPHS_ORDER, "%s of callable \"%s\": %s", asked, g->callable[callable].u.name,
                    closed_reason(g));
  if (!rfi_graphs_next_call(g, call))
    return rfi_fail(RFI_E_GRAPHS_ORDER,
                    "%s of callable \"%s\", microbatch %d: the schedule has no more calls, end the step", asked,
                    g->callable[callable].u.name, microbatch);
  const bool right = part == RFI_PART_W ? call->op == RFR_ACTION_W : rfi_parts_of(call->op) & 1 << part;
  if (right && call->of->u.index == callable && call->microbatch == microbatch) return RFR_OK;
  char why[96];
  rfi_graphs_explain_order(g, callable, microbatch, part == RFI_PART_F, why);
  return rfi_fail(RFI_E_GRAPHS_ORDER,
                  "%s of callable \"%s\", microbatch %d%s: the %s expects %s of callable \"%s\", microbatch %d", asked,
                  g->callable[callable].u.name, microbatch, why, g->evaluating ? "evaluation" : "schedule",
                  rfi_call_text(call->op), call->of->u.name, call->microbatch);
}

rfr_status rfr_graphs_expected(const rfr_graphs *g, rfr_action *call, int *callable) {
  rfi_step_call next;
  RFI_TRY(rfi_check_handle(call, "call"));
  RFI_TRY(rfi_check_handle(callable, "callable"));
  *call = (rfr_action){-1, -1, -1};
  *callable = -1;
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  if (g->state != RFI_STEP_OPEN) return rfi_fail(RFI_E_GRAPHS_ORDER, "%s", closed_reason(g));
  if (!rfi_graphs_next_call(g, &next)) return RFR_OK;
  *call = (rfr_action){(int32_t)next.op, next.of->stage->number, next.microbatch};
  *callable = next.of->u.index;
  return RFR_OK;
}

/* ---- tensors that the caller passes ---- */

/* Whether a port's result in a slot is still valid. A linked output is valid until its reader has run. */
static bool is_valid(const rfi_validity *valid, const rfi_port *p) {
  if (!p->output) return p->callable >= valid->gradients && !p->link;
  return p->callable < valid->outputs && (!p->link || p->link->callable >= valid->outputs);
}

/* Whether bytes of a slot belong to an output or input gradient that is still valid. */
static bool is_valid_in_slot(const rfr_graphs *g, const rfi_stage_plan *s, int slot, const void *data, int64_t bytes) {
  for (const rfi_callable *c = g->callable + s->first; c < g->callable + s->end; c++)
    for (const rfi_port *p = c->in; p < rfi_ports_end(c); p++) {
      if (!is_valid(&s->valid[slot], p)) continue;
      const rfr_tensor t = rfi_port_tensor(g, slot, p, !p->output);
      if (rfi_lies_in(data, bytes, t.data, t.bytes)) return true;
    }
  return false;
}

/* `call` NULL: the caller reads or writes. The first call of a slot's next microbatch invalidates the contents of the
 * slot. Several slots may share a block: its bytes are valid if they are valid for one of these slots. */
static rfr_status check_slot_data(const rfr_graphs *g, const rfi_step_call *call, const char *name, const void *data,
                                  int64_t bytes, bool *is_slot) {
  const bool holds = rfi_step_memory_holds(&g->m);
  *is_slot = rfi_step_memory_has(g->m.layout.step, data, bytes);
  for (const rfi_stage_plan *s = g->stage; s < g->stage + g->n_stages && bytes > 0; s++)
    for (int slot = 0; slot < s->slots; slot++) {
      if (!rfi_overlaps(data, bytes, rfi_graphs_slot(g, s, slot), s->bytes) &&
          !rfi_overlaps(data, bytes, rfi_graphs_block(g, s, slot), s->block_bytes))
        continue;
      const bool ends = call && call->first && call->slot == slot && s == call->of->stage;
      *is_slot = true;
      if (!ends && is_valid_in_slot(g, s, slot, data, bytes) && holds) return RFR_OK;
    }
  return *is_slot ? rfi_fail(RFI_E_ARGUMENT,
                             "\"%s\" points to slot memory that is no longer valid: copy a tensor while it is valid",
                             name ? name : "")
                  : RFR_OK;
}

static bool lies_in(const rfr_tensor *x, const void *data, int64_t bytes) {
  return rfi_lies_in(x->data, x->bytes, data, bytes);
}

static bool lies_in_fixed(const rfr_graphs *g, const rfr_tensor *x) {
  for (const rfi_callable *c = g->callable; c < g->callable + g->n; c++)
    for (const rfi_port *p = c->in; p < rfi_ports_end(c); p++)
      for (int slot = 0; slot < c->u.slots; slot++)
        if ((p->data.fixed && lies_in(x, p->data.fixed[slot], p->data.tensor.bytes)) ||
            (p->grad.fixed && lies_in(x, p->grad.fixed[slot], p->grad.tensor.bytes)))
          return true;
  return false;
}

/* An output may alias a state or a parameter in the caller's memory. */
static bool lies_in_named(const rfr_graphs *g, const rfr_tensor *x) {
  for (int i = 0; i < g->m.store.n; i++)
    if (lies_in(x, g->m.store.named[i].tensor.data, g->m.store.named[i].tensor.bytes)) return true;
  return false;
}

rfr_status rfi_graphs_check_tensor(const rfr_graphs *g, const rfr_tensor *x) {
  const rfi_named *named = rfi_storage_find(&g->m.store, x->name);
  const rfr_tensor *now = named ? &named->tensor : NULL;
  const char *name = x->name ? x->name : "";
  bool is_slot;
  if ((unsigned)x->type.dtype >= RFR_DTYPE_COUNT || x->type.rank < 0 || x->type.rank > RFR_MAX_RANK ||
      !rfi_type_fits(&x->type))
    return rfi_fail(RFI_E_ARGUMENT, "tensor \"%s\" has no valid type", name);
  if (x->bytes != rfi_bytes(&x->type))
    return rfi_fail(RFI_E_ARGUMENT, "tensor \"%s\": bytes is %lld, its type has %lld", name, (long long)x->bytes,
                    (long long)rfi_bytes(&x->type));
  if (x->bytes == 0) return RFR_OK;
  if (now && now->role == x->role) {
    if (lies_in(x, now->data, now->bytes)) return RFR_OK;
    if (x->bytes > now->bytes)
      return rfi_fail(RFI_E_ARGUMENT, "tensor \"%s\": bytes is %lld, the graphs have %lld", name, (long long)x->bytes,
                      (long long)now->bytes);
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "\"%s\": this tensor has address %p, it is now at %p: query it again", name,
                    x->data, now->data);
  }
  RFI_TRY(check_slot_data(g, NULL, x->name, x->data, x->bytes, &is_slot));
  if (is_slot || lies_in(x, g->m.layout.arena, g->memory.persistent_bytes) || lies_in_named(g, x) ||
      lies_in_fixed(g, x))
    return RFR_OK;
  return rfi_fail(RFI_E_ARGUMENT, "tensor \"%s\" is not memory of these graphs", name);
}

/* ---- the signature ---- */

/* The ports that the caller passes: inputs, or gradients of outputs, that are not linked. */
static bool is_expected(const rfi_port *p, bool grad) { return !p->link && (!grad || p->grad.value >= 0); }

/* The expected port with this name, or the i-th one if name is NULL; NULL: none. */
static const rfi_port *find_expected(const rfi_ports *x, const char *name, int i) {
  for (const rfi_port *p = x->port; p < x->port + x->n; p++) {
    if (!is_expected(p, x->grad)) continue;
    if (name ? p->name && strcmp(p->name, name) == 0 : i-- == 0) return p;
  }
  return NULL;
}

static rfr_status check_data(const rfr_graphs *g, const rfi_step_call *call, const rfi_port *p, bool grad,
                             const rfr_binding *b) {
  const rfi_port_data *data = rfi_port_of(p, grad);
  const rfr_tensor *want = &data->tensor;
  void *const *fixed = data->fixed;
  bool is_slot;
  if (!p->name) {
    if (!b->data) return RFR_OK;
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "data is passed for an input that was captured as absent");
  }
  RFI_TRY(rfi_check_captured(p->name, &want->type, fixed ? fixed[call->slot] : NULL, b));
  if (p->splits && !grad && want->bytes > 0 && !g->m.backend->reaches(g->m.device, b->data))
    return rfi_fail(
        RFI_E_REPLAY_SIGNATURE,
        "\"%s\": group sizes must be device memory, because the host does not read them: compute them on the device or "
        "copy them there first",
        p->name);
  return fixed ? RFR_OK : check_slot_data(g, call, p->name, b->data, want->bytes, &is_slot);
}

/* Sets g->given[] of the ports. */
static rfr_status check_bindings(rfr_graphs *g, const rfi_step_call *call, const rfi_ports *x, const rfr_binding *b,
                                 int n_b) {
  const char *name = call->of->u.name;
  int wanted = 0;
  for (int k = 0; k < x->n; k++) {
    wanted += is_expected(&x->port[k], x->grad);
    g->given[k] = NULL;
  }
  if (n_b != wanted || (n_b > 0 && !b))
    return rfi_fail(RFI_E_REPLAY_SIGNATURE, "callable \"%s\" takes %d %s, not %d", name, wanted,
                    x->grad ? "output gradients" : "inputs", b ? n_b : 0);
  for (int i = 0; i < n_b; i++) {
    const rfi_port *p = find_expected(x, b[i].name, i);
    if (!p)
      return rfi_fail(RFI_E_REPLAY_SIGNATURE, "callable \"%s\" takes no %s \"%s\"", name,
                      x->grad ? "gradient of an output" : "input", b[i].name);
    if (g->given[p - x->port])
      return rfi_fail(RFI_E_REPLAY_SIGNATURE, "callable \"%s\": \"%s\" is passed twice", name,
                      p->name ? p->name : "an absent input");
    g->given[p - x->port] = &b[i];
    if (check_data(g, call, p, x->grad, &b[i]) != RFR_OK) return rfi_fail_prefix("callable \"%s\", ", name);
  }
  return RFR_OK;
}

/* All outputs are returned, but of input gradients only those that are not linked. */
static bool is_returned(const rfi_ports *x, int i) { return !x->grad || !x->port[i].link; }

static rfr_status check_returned(const rfi_callable *c, const rfi_ports *x, const rfr_tensor *room, int n) {
  int wanted = 0;
  for (int i = 0; i < x->n; i++) wanted += is_returned(x, i);
  if (n == wanted && (n == 0 || room)) return RFR_OK;
  return rfi_fail(RFI_E_REPLAY_SIGNATURE, "callable \"%s\" returns %d %s, there is room for %d", c->u.name, wanted,
                  x->grad ? "input gradients" : "outputs", room ? n : 0);
}

/* ---- running ---- */

static bool is_copied(const rfi_port *p, bool grad) {
  const rfi_port_data *data = rfi_port_of(p, grad);
  return p->name && is_expected(p, grad) && !data->fixed && data->tensor.bytes > 0;
}

/* Lists the ports that are copied into the slot; returns their count. */
static int list_copies(const rfr_graphs *g, const rfi_callable *c, int slot, rfi_part part, rfi_copy *to) {
  const rfi_ports x = rfi_ports_taken(c, part);
  int n = 0;
  for (int i = 0; i < x.n; i++) {
    if (!is_copied(&x.port[i], x.grad)) continue;
    const rfr_tensor t = rfi_port_tensor(g, slot, &x.port[i], x.grad);
    to[n++] = (rfi_copy){t.data, (size_t)t.bytes};
  }
  return n;
}

rfr_status rfi_graphs_capture_part(rfr_graphs *g, const rfi_callable *c, int slot, rfi_part part, rfi_graph **out) {
  rfi_copy *copies;
  RFI_TRY(RFI_ALLOC(g->m.ctx, sizeof *copies * (size_t)(c->n_in + c->n_out + 1), &copies));
  const int n = list_copies(g, c, slot, part, copies);
  const rfr_status s = rfi_unit_capture(&g->m, &c->u, slot, part, copies, n, out);
  rfi_free(g->m.ctx, copies);
  return s;
}

/* With a graph the copies are part of it; without one they are enqueued first. */
static rfr_status run_with_inputs(rfr_graphs *g, const rfi_step_call *call, rfi_part part, const rfi_ports *x) {
  const bool captured = call->of->u.instance[call->slot].graph[part] != NULL;
  int n = 0;
  for (int i = 0; i < x->n; i++) {
    if (!is_copied(&x->port[i], x->grad)) continue;
    const void *from = g->from[n++] = g->given[i]->data;
    const rfr_tensor to = rfi_port_tensor(g, call->slot, &x->port[i], x->grad);
    if (!captured && to.data != from) RFI_TRY(g->m.backend->move(g->m.device, to.data, from, (size_t)to.bytes));
  }
  return rfi_graphs_run(g, call->of, call->slot, part, false);
}

/* Fills single bytes that differ, because a fill takes a value and a copy would need host memory that stays valid. */
rfr_status rfi_graphs_set_microbatch(rfr_graphs *g, const rfi_step_call *call) {
  const rfi_callable *c = call->of;
  const int32_t microbatch = call->microbatch + g->options.first_microbatch;
  rfi_instance *x = &c->u.instance[call->slot];
  unsigned char now[4], was[4];
  if (c->microbatch < 0 || x->microbatch == microbatch) return RFR_OK;
  const bool known = x->microbatch >= 0;
  memcpy(now, &microbatch, sizeof now);
  memcpy(was, &x->microbatch, sizeof was);
  x->microbatch = -1;
  unsigned char *at = rfi_unit_address(&g->m, &c->u, call->slot, c->microbatch);
  for (int k = 0; k < 4; k++)
    if (!known || now[k] != was[k]) RFI_TRY(rfi_executor_fill(&g->m, at + k, now[k], 1));
  x->microbatch = microbatch;
  return RFR_OK;
}

void rfi_graphs_invalidate(rfi_stage_plan *s, int slot) { s->valid[slot] = (rfi_validity){s->first, s->end}; }

/* Marks the call's results as valid; the last gradient of a microbatch invalidates its outputs. */
static void update_valid(const rfi_step_call *call) {
  const rfi_stage_plan *s = call->of->stage;
  rfi_validity *valid = &s->valid[call->slot];
  if (call->op == RFR_ACTION_F) valid->outputs = call->of->u.index + 1;
  else if (call->op != RFR_ACTION_W) valid->gradients = call->of->u.index;
  if (call->last && call->op != RFR_ACTION_F) valid->outputs = s->first;
}

/* The step counts as broken until end_call: after a failure it can only be aborted. */
static rfr_status begin_call(rfr_graphs *g, const rfi_step_call *call) {
  rfi_stage_plan *s = call->of->stage;
  g->state = RFI_STEP_BROKEN;
  if (call->first) rfi_graphs_invalidate(s, call->slot);
  return g->options.debug && call->first ? rfi_graphs_poison_slot(g, s, call->slot) : RFR_OK;
}

/* Runs the shard actions before the next call. Without gradients the outputs stay valid. */
static rfr_status end_call(rfr_graphs *g, const rfi_step_call *call) {
  if (g->options.debug) {
    const bool over = call->last && call->op != RFR_ACTION_F;
    const rfi_stage_plan *stage = call->of->stage;
    RFI_TRY(rfi_graphs_poison_region(g, RFI_REGION_SHARED));
    if (call->frees_block) RFI_TRY(rfi_graphs_poison_block(g, stage, call->slot));
    if (over) RFI_TRY(rfi_graphs_poison_ended(g, stage, call->slot));
  }
  if (!g->evaluating) RFI_TRY(rfi_graphs_run_shard_actions(g, g->next + 1, &g->next_shard_action, false));
  update_valid(call);
  g->next++;
  if (rfi_graphs_is_complete(g)) RFI_TRY(rfi_graphs_join_side_stream(g)); /* the caller may read all main gradients */
  g->state = RFI_STEP_OPEN;
  return RFR_OK;
}

/* ---- the public calls ---- */

static rfr_status make_call(rfr_graphs *g, rfi_part part, int callable, int microbatch, const rfr_binding *b, int n_b,
                            rfr_tensor *results, int n_results) {
  rfi_step_call call;
  RFI_TRY(check_order(g, part, callable, microbatch, &call));
  const rfi_callable *c = call.of;
  const rfi_ports taken = rfi_ports_taken(c, part), returned = rfi_ports_returned(c, part);
  RFI_TRY(check_bindings(g, &call, &taken, b, n_b));
  RFI_TRY(check_returned(c, &returned, results, n_results));
  if (c->microbatch >= 0 && microbatch > RFI_MAX_MICROBATCH - g->options.first_microbatch)
    return rfi_fail(RFI_E_ARGUMENT,
                    "callable \"%s\" draws random numbers: microbatch %d + rfr_graphs_options.first_microbatch %d "
                    "exceeds %d",
                    c->u.name, microbatch, g->options.first_microbatch, RFI_MAX_MICROBATCH);
  RFI_TRY(begin_call(g, &call));
  RFI_TRY(rfi_graphs_wait_side_stream(g, call.waits));
  if (part == RFI_PART_F) RFI_TRY(rfi_graphs_set_microbatch(g, &call));
  if (part != RFI_PART_W) RFI_TRY(run_with_inputs(g, &call, part, &taken));
  if (part == RFI_PART_F) RFI_TRY(rfi_graphs_splits_launched(g, &call));
  if (rfi_call_runs(&call, RFI_PART_W)) RFI_TRY(rfi_graphs_run_wgrad(g, &call));
  for (int i = 0, k = 0; i < returned.n; i++)
    if (is_returned(&returned, i)) results[k++] = rfi_port_tensor(g, call.slot, &returned.port[i], returned.grad);
  return end_call(g, &call);
}

rfr_status rfr_graphs_forward(rfr_graphs *g, int callable, int microbatch, const rfr_binding *inputs, int n_inputs,
                              rfr_tensor *outputs, int n_outputs) {
  return make_call(g, RFI_PART_F, callable, microbatch, inputs, n_inputs, outputs, n_outputs);
}

rfr_status rfr_graphs_backward(rfr_graphs *g, int callable, int microbatch, const rfr_binding *output_grads,
                               int n_output_grads, rfr_tensor *input_grads, int n_input_grads) {
  return make_call(g, RFI_PART_I, callable, microbatch, output_grads, n_output_grads, input_grads, n_input_grads);
}

rfr_status rfr_graphs_wgrad(rfr_graphs *g, int callable, int microbatch) {
  return make_call(g, RFI_PART_W, callable, microbatch, NULL, 0, NULL, 0);
}

/* ---- beginning and end ---- */

static rfr_status find_shared(const rfr_graphs *g, const rfr_binding *b, rfi_named **out) {
  RFI_TRY(rfi_graphs_get(g, b->name, out));
  return rfi_check_captured(b->name, &(*out)->tensor.type,
                            rfi_is_parameter((*out)->tensor.role) ? (*out)->tensor.data : NULL, b);
}

/* Clears adjacent gradients with one fill, because each fill is a launch on a device. */
static rfr_status clear_gradients(rfr_graphs *g) {
  unsigned char *from = NULL, *to = NULL;
  for (int i = 0; i < g->m.store.n; i++) {
    const rfi_named *x = &g->m.store.named[i];
    unsigned char *data = x->tensor.data;
    if (x->parameter < 0 || x->accumulate) continue;
    if (data != to || x->offset < 0) {
      RFI_TRY(rfi_executor_fill(&g->m, from, 0, to - from));
      from = data;
    }
    to = data + (x->offset < 0 ? x->tensor.bytes : rfi_storage_bytes(&x->tensor.type));
    if (x->offset >= 0) continue;
    RFI_TRY(rfi_executor_fill(&g->m, from, 0, to - from));
    from = to = NULL;
  }
  return rfi_executor_fill(&g->m, from, 0, to - from);
}

static rfr_status begin(rfr_graphs *g, const rfr_binding *inputs, int n) {
  rfi_named *x;
  for (int i = 0; i < n; i++) {
    RFI_TRY(find_shared(g, &inputs[i], &x));
    if (x->tensor.role == RFR_ROLE_CONST) g->loaded = false;
    if (!rfi_is_parameter(x->tensor.role))
      RFI_TRY(g->m.backend->move(g->m.device, x->tensor.data, inputs[i].data, (size_t)x->tensor.bytes));
  }
  RFI_TRY(rfi_graphs_set_up(g, g->loaded, false));
  g->loaded = true;
  for (rfi_stage_plan *s = g->stage; s < g->stage + g->n_stages; s++)
    for (int slot = 0; slot < s->slots; slot++) {
      rfi_graphs_invalidate(s, slot);
      if (g->options.debug) RFI_TRY(rfi_graphs_poison_slot(g, s, slot));
    }
  if (g->options.debug) RFI_TRY(rfi_graphs_poison_region(g, RFI_REGION_WINDOW));
  if (g->options.debug) RFI_TRY(rfi_graphs_poison_region(g, RFI_REGION_SHARED));
  if (g->evaluating) return RFR_OK;
  RFI_TRY(clear_gradients(g));
  RFI_TRY(rfi_graphs_clear_amaxes(g));
  g->next_shard_action = 0;
  return rfi_graphs_run_shard_actions(g, 0, &g->next_shard_action, false);
}

/* Begins a step of either kind, once its own checks have passed. */
static rfr_status begin_checked(rfr_graphs *g, bool evaluating, const rfr_binding *inputs, int n_inputs) {
  rfi_named *x;
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  if (g->state != RFI_STEP_NONE) return rfi_fail(RFI_E_GRAPHS_ORDER, "a step has begun: end or abort it first");
  if (!rfi_is_list(inputs, n_inputs)) return rfi_fail(RFI_E_ARGUMENT, "%d inputs, or NULL", n_inputs);
  for (int i = 0; i < n_inputs; i++) {
    RFI_TRY(find_shared(g, &inputs[i], &x));
    if (evaluating && x->tensor.role == RFR_ROLE_STATE)
      return rfi_fail(RFI_E_PROGRAM_NAME, "\"%s\" is a state, which an evaluation does not change", x->tensor.name);
  }
  RFI_TRY(rfi_graphs_splits_report(g));
  RFI_TRY(rfi_step_memory_take(&g->m, true));
  RFI_TRY(rfi_graphs_join_side_stream(g)); /* an abort may have failed to */
  g->state = RFI_STEP_BROKEN;
  g->evaluating = evaluating;
  g->ended = false;
  RFI_TRY(begin(g, inputs, n_inputs));
  g->state = RFI_STEP_OPEN;
  g->next = 0;
  return RFR_OK;
}

rfr_status rfr_graphs_begin_step(rfr_graphs *g, const rfr_binding *inputs, int n_inputs) {
  return begin_checked(g, false, inputs, n_inputs);
}

rfr_status rfr_graphs_begin_evaluation(rfr_graphs *g, const rfr_binding *inputs, int n_inputs) {
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  for (int i = 0; i < g->m.store.n; i++) {
    const rfi_named *x = &g->m.store.named[i];
    if (x->writer >= 0 && x->writer_part == RFI_PART_F)
      return rfi_fail(
          RFI_E_GRAPHS_CALLABLE,
          "callable \"%s\" writes state \"%s\" in its forward, so an evaluation would change it: evaluate with "
          "an inference set that does not write it",
          g->callable[x->writer].u.name, x->tensor.name);
  }
  return begin_checked(g, true, inputs, n_inputs);
}

static void close_step(rfr_graphs *g) {
  g->splits.step += !g->evaluating;
  g->state = RFI_STEP_NONE;
  g->evaluating = false;
  rfi_step_memory_release(&g->m);
}

rfr_status rfr_graphs_end_step(rfr_graphs *g) {
  rfi_step_call call;
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  if (g->state != RFI_STEP_OPEN) return rfi_fail(RFI_E_GRAPHS_ORDER, "%s", closed_reason(g));
  if (!rfi_graphs_is_complete(g) && rfi_graphs_next_call(g, &call))
    return rfi_fail(RFI_E_GRAPHS_ORDER,
                    "the step is not complete: the next call is %s of callable \"%s\", microbatch %d",
                    rfi_call_text(call.op), call.of->u.name, call.microbatch);
  const bool evaluating = g->evaluating;
  g->state = RFI_STEP_BROKEN;
  if (!evaluating) RFI_TRY(rfi_graphs_count(g, false));
  close_step(g);
  g->ended = !evaluating;
  return rfi_graphs_splits_report(g);
}

rfr_status rfr_graphs_abort_step(rfr_graphs *g) {
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  g->ended = false;
  if (g->state == RFI_STEP_NONE) return RFR_OK;
  const bool evaluating = g->evaluating;
  rfi_graphs_splits_abort(g);
  const rfr_status joined = rfi_graphs_join_side_stream(g);
  close_step(g);
  RFI_TRY(joined);
  return evaluating ? RFR_OK : rfi_graphs_count(g, true);
}

rfr_status rfr_graphs_wait(rfr_graphs *g) {
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  RFI_TRY(g->m.backend->wait(g->m.device));
  return rfi_graphs_splits_report(g);
}

rfr_status rfr_graphs_set_stream(rfr_graphs *g, void *stream) {
  RFI_TRY(rfi_check_handle(g, "rfr_graphs"));
  return g->m.backend->set_stream(g->m.device, stream);
}
