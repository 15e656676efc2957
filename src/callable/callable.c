/* SPDX-License-Identifier: Apache-2.0
 *
 * Turns a recorded forward into the joint trace of a callable. Each output that depends on a parameter or an input_grad
 * gets a cotangent as an input of the trace; each trainable parameter's gradient is accumulated into its main gradient,
 * a state. Then the passes run as for any other trace and remove unused work.
 *
 * Parts follow the phase labels of autodiff: forward is F, dgrad I, wgrad W. A part reads results of earlier parts from
 * the slot; no part reads a result of a later one (phases.c).
 */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "callable/graphed.h"

const char RFI_GRAD_PREFIX[] = "grad.";
const char RFI_UNREDUCED_PREFIX[] = "unreduced.";
static const rfr_source nowhere;                /* of ops that the caller has not recorded */
static const char BAD_PREFIX[] = "graphs.bad."; /* prefix of the names of outputs that report invalid group sizes */

static rfr_status refuse(const rfi_callable *c, const char *what, const char *name) {
  return rfi_fail(RFI_E_GRAPHS_CALLABLE, "callable \"%s\": %s \"%s\"", c->u.name, what, name);
}

/* The input, or the output, with a name; RFR_NONE: there is none. */
static rfr_value value_of(const rfr_trace *t, const char *name, bool output) {
  const int i = rfi_names_find(output ? &t->output_names : &t->input_names, name);
  return i < 0 ? RFR_NONE : output ? t->outputs[i].value : t->inputs[i];
}

/* ---- the joint trace ---- */

static bool is_call_input(int role) { return role == RFR_ROLE_INPUT || role == RFR_ROLE_INPUT_GRAD; }

/* The input with the microbatch's number, which random ops read. */
static void declare_microbatch(rfi_callable *c, rfr_trace *t) {
  if (c->microbatch == RFR_NONE)
    c->microbatch = rfr_input(t, RFI_MICROBATCH_INPUT, RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){1}));
}

/* Copies op i. A random op reads its microbatch from the slot, and gets a site that no other callable has. */
static rfr_status copy_op(rfi_callable *c, rfi_rewrite *r, int i, int64_t site) {
  const rfi_opr *op = &r->from->ops[i];
  if (op->def->code == RFI_OP_gradient || op->phase != RFR_PHASE_FORWARD)
    return refuse(c, "the trace must be a forward only, but has op", op->def->name);
  if (op->def->flags & RFI_HOST)
    return refuse(c, "a callable cannot contain an op that waits for the host:", op->def->name);
  if (!rfi_is_random(op)) return rfi_rewrite_op(r, i, NULL);
  const int at = rfi_operand_index(op->def, "microbatch"), own_site = rfi_attr_find(op->def, "site");
  if (at < 0 || own_site < 0) return refuse(c, "a random op cannot read the microbatch from the slot:", op->def->name);
  declare_microbatch(c, r->to);
  rfr_value in[RFI_MAX_NAMES];
  rfi_attr attr[RFI_MAX_ATTR];
  for (int k = 0; k < at; k++) in[k] = k < op->n_in && op->in[k] >= 0 ? r->map[op->in[k]] : RFR_NONE;
  in[at] = c->microbatch;
  memcpy(attr, op->attr, sizeof *attr * (size_t)op->def->n_attrs);
  attr[own_site].i += site;
  rfi_opr own = *op;
  own.n_in = at + 1;
  own.in = in;
  own.attr = attr;
  return rfi_rewrite_as(r, i, &own, NULL);
}

/* Extends `reaches` from outputs to all values that they depend on along a gradient path. */
static void propagate_back(const rfr_trace *t, bool *reaches) {
  for (int i = t->n_ops - 1; i >= 0; i--) {
    const rfi_opr *op = &t->ops[i];
    bool any = false;
    for (int j = 0; j < op->n_out; j++)
      any = any || (op->out[j] >= 0 && reaches[op->out[j]] && rfr_dtype_is_float(t->values[op->out[j]].type.dtype));
    for (int k = 0; k < op->n_in; k++)
      if (op->in[k] >= 0 && !(op->def->flags & RFI_STOP)) reaches[op->in[k]] = reaches[op->in[k]] || any;
  }
}

static char *grad_name(rfr_trace *t, const char *name) {
  return rfi_arena_printf(t->arena, "%s%s", RFI_GRAD_PREFIX, name);
}

/* The origin of group sizes, before casts and copies: an input, or another op's result. */
static rfr_value sizes_of(const rfr_trace *t, rfr_value v) {
  for (;;) {
    v = t->values[v].base;
    const rfi_opr *op = t->values[v].op < 0 ? NULL : &t->ops[t->values[v].op];
    if (!op || (op->def->code != RFI_OP_cast && op->def->code != RFI_OP_copy)) return v;
    v = op->in[0];
  }
}

/* Group sizes from moe_sort are always valid; all others come from the caller and are checked at run time. */
static rfr_status check_splits(rfr_graphs *g, rfi_callable *c, const rfi_rewrite *r) {
  const rfr_trace *t = r->from;
  int n = 0;
  for (int i = 0; i < t->n_ops; i++) n += t->ops[i].def->code == RFI_OP_splits_to_offsets;
  if (!(c->checked = rfi_arena_alloc(g->m.strings, sizeof *c->checked * (size_t)(n + 1)))) return RFR_NO_MEMORY;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (op->def->code != RFI_OP_splits_to_offsets) continue;
    const rfr_value sizes = sizes_of(t, op->in[0]);
    for (int k = 0; k < c->n_in; k++)
      if (c->in[k].data.value == sizes) c->in[k].splits = true;
    if (op->out[1] < 0) continue;
    const int maker = t->values[op->in[0]].op;
    if (maker >= 0 && t->ops[maker].def->code == RFI_OP_moe_sort) continue;
    const char *scope = rfi_arena_strdup(g->m.strings, op->scope);
    const char *name = rfi_arena_printf(r->to->arena, "%s%d", BAD_PREFIX, c->n_checked);
    if (!scope || !name) return RFR_NO_MEMORY;
    c->checked[c->n_checked++] = (rfi_checked){scope, RFR_NONE};
    rfr_output_at(r->to, nowhere, name, r->map[op->out[1]]);
  }
  return rfr_trace_status(r->to);
}

/* Records the sum over all outputs of output times cotangent as one loss; RFR_NONE: no output has a cotangent. */
static rfr_status record_loss(rfi_callable *c, rfr_trace *t, const bool *reached, rfr_value *loss) {
  *loss = RFR_NONE;
  for (int k = 0; k < c->n_out; k++) {
    rfi_port *p = &c->out[k];
    const rfr_value v = p->data.value;
    if (v < 0 || !reached[v]) continue;
    const rfr_type type = t->values[v].type;
    const rfr_value same = value_of(t, p->name, false);
    if (same >= 0 && t->values[same].role == RFR_ROLE_TRAINABLE)
      return refuse(
          c, "gradients are found by name, so a trainable parameter and an output with a gradient cannot both be named",
          p->name);
    const char *name = grad_name(t, p->name);
    if (!name) return RFR_NO_MEMORY;
    p->grad.value = rfr_input_at(t, nowhere, name, RFR_ROLE_INPUT, type.dtype, type.rank, type.shape);
    rfr_value part = rfi_record(t, nowhere, RFI_OP_cotangent, 2, (rfr_value[]){v, p->grad.value}, NULL, NULL);
    *loss = *loss < 0 ? part : rfr_add_at(t, nowhere, *loss, part);
  }
  return rfr_trace_status(t);
}

/* A parameter that reaches no output: if the caller declared a main gradient, it gets zeros; otherwise the parameter
 * has none. */
static rfr_status record_unused(rfr_trace *t, const char *name, const rfr_main_gradient *m, const rfi_value *x) {
  if (!m) return RFR_OK;
  rfr_output_at(t, nowhere, name,
                rfr_input_at(t, nowhere, name, RFR_ROLE_STATE, m->type.dtype, x->type.rank, x->type.shape));
  return rfr_trace_status(t);
}

/* `used`: an output depends on the value. */
static rfr_status record_gradient(const rfr_graphs *g, const rfi_callable *c, rfr_trace *t, rfr_value loss, rfr_value v,
                                  bool used) {
  const rfi_value x = t->values[v];
  const bool trained = x.role == RFR_ROLE_TRAINABLE;
  if (!trained && x.role != RFR_ROLE_INPUT_GRAD) return RFR_OK;
  if (!used && !g->options.allow_unused_input)
    return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                    "callable \"%s\": %s \"%s\" needs a gradient, but no output depends on it: make it %s, or set "
                    "rfr_graphs_options.allow_unused_input",
                    c->u.name, trained ? "parameter" : "input", x.name,
                    trained ? "frozen" : "an input without gradient");
  const rfr_main_gradient *m = trained ? rfi_main_gradient_of(g, x.name) : NULL;
  const char *name = grad_name(t, x.name);
  if (!name) return RFR_NO_MEMORY;
  if (!used) return trained ? record_unused(t, name, m, &x) : RFR_OK;
  if (trained) {
    const rfr_dtype dtype = m ? m->type.dtype : RFR_F32;
    rfr_value onto = rfr_input_at(t, nowhere, name, RFR_ROLE_STATE, dtype, x.type.rank, x.type.shape);
    rfr_output_at(t, nowhere, name, rfr_gradient_onto_at(t, nowhere, loss, v, onto));
  } else {
    rfr_output_at(t, nowhere, name, rfr_gradient_at(t, nowhere, loss, v, x.type.dtype));
  }
  return rfr_trace_status(t);
}

static rfr_status record_backward(const rfr_graphs *g, rfi_callable *c, rfr_trace *t) {
  /* reached from an input along a gradient path; `reaches` follows it in the same allocation: an output depends on
   * it */
  bool *reached;
  rfr_value loss;
  const int n = t->n_inputs, n_values = t->n_values;
  RFI_TRY(RFI_ALLOC(t->ctx, 2 * ((size_t)n_values + 1), &reached));
  bool *reaches = reached + n_values + 1;
  for (int i = 0; i < n; i++) {
    const int role = t->values[t->inputs[i]].role;
    reached[t->inputs[i]] = role == RFR_ROLE_TRAINABLE || role == RFR_ROLE_INPUT_GRAD;
  }
  for (int k = 0; k < c->n_out; k++)
    if (c->out[k].data.value >= 0) reaches[c->out[k].data.value] = true;
  rfi_reach(t, true, reached);
  propagate_back(t, reaches);
  rfr_status s = record_loss(c, t, reached, &loss);
  for (int i = 0; i < n && s == RFR_OK; i++)
    s = record_gradient(g, c, t, loss, t->inputs[i], loss >= 0 && reaches[t->inputs[i]]);
  rfi_free(t->ctx, reached);
  return s;
}

/* ---- ports ---- */

int rfi_port_find(const rfi_port *port, int n, const char *name) {
  for (int i = 0; i < n; i++)
    if (port[i].name && name && strcmp(port[i].name, name) == 0) return i;
  return -1;
}

static rfr_status add_port(rfr_graphs *g, rfi_callable *c, bool output, const char *name, rfr_value v) {
  rfi_port *p = output ? &c->out[c->n_out++] : &c->in[c->n_in++];
  *p = (rfi_port){.output = output, .callable = c->u.index, .data.value = v, .grad.value = RFR_NONE};
  return !name || (p->name = rfi_arena_strdup(g->m.strings, name)) ? RFR_OK : RFR_NO_MEMORY;
}

/* Adds the ports that a description lists; a NULL name stands for an absent port. */
static rfr_status add_listed(rfr_graphs *g, rfi_callable *c, bool output, const char *const *names, int n,
                             const rfr_trace *t) {
  for (int i = 0; i < n; i++) {
    const rfr_value v = names[i] ? value_of(t, names[i], output) : RFR_NONE;
    if (names[i] && (v < 0 || (!output && !is_call_input(t->values[v].role))))
      return refuse(c, output ? "the trace has no output" : "the trace has no input", names[i]);
    if (rfi_port_find(output ? c->out : c->in, i, names[i]) >= 0)
      return refuse(c, output ? "rfr_callable.outputs repeats output" : "rfr_callable.inputs repeats input", names[i]);
    RFI_TRY(add_port(g, c, output, names[i], v));
  }
  return RFR_OK;
}

static rfr_status add_ports(rfr_graphs *g, rfi_callable *c, const rfr_callable *desc, const rfr_trace *t) {
  const int inputs = desc->inputs ? desc->n_inputs : t->n_inputs;
  const int outputs = desc->outputs ? desc->n_outputs : t->n_outputs;
  if (!(c->in = rfi_arena_alloc(g->m.strings, sizeof *c->in * (size_t)(inputs + outputs + 1)))) return RFR_NO_MEMORY;
  if (desc->inputs) RFI_TRY(add_listed(g, c, false, desc->inputs, inputs, t));
  for (int i = 0; i < t->n_inputs; i++) {
    const rfi_value *x = &t->values[t->inputs[i]];
    if (!is_call_input(x->role)) continue;
    if (desc->inputs && rfi_port_find(c->in, c->n_in, x->name) < 0)
      return refuse(c, "rfr_callable.inputs does not list input", x->name);
    if (!desc->inputs) RFI_TRY(add_port(g, c, false, x->name, t->inputs[i]));
  }
  c->out = c->in + c->n_in;
  if (desc->outputs) return add_listed(g, c, true, desc->outputs, outputs, t);
  for (int k = 0; k < outputs; k++) RFI_TRY(add_port(g, c, true, t->outputs[k].name, t->outputs[k].value));
  return RFR_OK;
}

/* ---- parts ---- */

static const uint8_t phase_of[RFI_PARTS] = {RFR_PHASE_LOAD,  RFR_PHASE_SETUP, RFR_PHASE_FORWARD,
                                            RFR_PHASE_DGRAD, RFR_PHASE_WGRAD, RFR_PHASE_OPTIM};

/* The part whose call returns an output. */
static rfi_part part_of_output(const rfi_callable *c, const char *name) {
  const size_t n = strlen(RFI_GRAD_PREFIX);
  if (rfi_port_find(c->out, c->n_out, name) >= 0 || strncmp(name, BAD_PREFIX, strlen(BAD_PREFIX)) == 0)
    return RFI_PART_F;
  return strncmp(name, RFI_GRAD_PREFIX, n) == 0 && rfi_port_find(c->in, c->n_in, name + n) >= 0 ? RFI_PART_I
                                                                                                : RFI_PART_W;
}

/* Copies for outputs have no label from autodiff; they run in the part that returns the output. */
static rfr_status order_parts(rfi_callable *c, const rfr_trace *in) {
  uint8_t *phase;
  RFI_TRY(RFI_ALLOC(in->ctx, (size_t)in->n_ops + 1, &phase));
  for (int i = 0; i < in->n_ops; i++)
    phase[i] = in->ops[i].phase < RFR_PHASE_WGRAD ? in->ops[i].phase : (uint8_t)RFR_PHASE_WGRAD;
  for (int i = 0; i < in->n_outputs; i++) {
    const int maker = in->values[in->outputs[i].value].op;
    const uint8_t wanted = phase_of[part_of_output(c, in->outputs[i].name)];
    if (maker >= 0 && phase[maker] > wanted) phase[maker] = wanted;
  }
  rfr_trace_destroy(c->u.trace);
  const rfr_status s = rfi_order_phases(in, phase, &c->u.trace);
  rfi_free(in->ctx, phase);
  return s;
}

/* Replaces parameters by shards: setup gathers them, the last part reduce-scatters the gradients. */
static rfr_status shard(const rfr_graphs *g, rfi_callable *c) {
  const rfi_shard o = {
      .ranks = g->m.comm ? g->m.comm->size : 1, .gradient = RFI_GRAD_PREFIX, .gathered = RFI_UNREDUCED_PREFIX};
  rfr_trace *unsharded = c->u.trace;
  const rfr_status s = rfi_shard_callable(unsharded, &o, &c->u.trace);
  rfr_trace_destroy(unsharded);
  return s;
}

static void find_parts(rfi_callable *c) {
  for (int part = 0, i = 0; part <= RFI_PARTS; part++) {
    while (part > 0 && i < c->u.trace->n_ops && c->u.trace->ops[i].phase == phase_of[part - 1]) i++;
    c->u.start[part] = i;
  }
}

bool rfi_next_use(const rfi_callable *c, rfi_use *u) {
  const rfr_trace *t = c->u.trace;
  for (; u->op < t->n_ops; u->op++, u->next = 0) {
    const rfi_opr *op = &t->ops[u->op];
    const int n = op->def->flags & RFI_VIEW ? 0 : op->n_in + op->n_out;
    while (u->op >= c->u.start[u->part + 1]) u->part++;
    while (u->next < n) {
      const int k = u->next++;
      const rfr_value v = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
      if (v < 0) continue;
      u->owner = t->values[v].base;
      u->result = k >= op->n_in;
      return true;
    }
  }
  return false;
}

/* ---- compilation ---- */

static rfr_tensor describe(const rfr_graphs *g, const rfr_trace *t, const char *name, rfr_value v) {
  const rfi_value *x = &t->values[v];
  return (rfr_tensor){.name = name,
                      .role = (rfr_role)x->role,
                      .type = x->type,
                      .bytes = rfi_bytes(&x->type),
                      .host = g->m.backend->host};
}

static rfr_status check_name(const rfi_callable *c, const char *name) {
  const char *const reserved[] = {"graphs.", RFI_GRAD_PREFIX, RFI_UNREDUCED_PREFIX};
  for (size_t i = 0; i < sizeof reserved / sizeof *reserved; i++)
    if (strncmp(name, reserved[i], strlen(reserved[i])) == 0)
      return rfi_fail(RFI_E_GRAPHS_CALLABLE, "callable \"%s\": \"%s\" is a reserved name: rename the input or output",
                      c->u.name, name);
  return RFR_OK;
}

static rfr_status check_names(const rfi_callable *c, const rfr_trace *t) {
  for (int i = 0; i < t->n_inputs; i++) RFI_TRY(check_name(c, t->values[t->inputs[i]].name));
  for (int i = 0; i < t->n_outputs; i++) RFI_TRY(check_name(c, t->outputs[i].name));
  return RFR_OK;
}

static void find_data(const rfr_graphs *g, const rfr_trace *t, const char *name, bool output, rfi_port_data *data) {
  data->value = value_of(t, name, output);
  if (data->value >= 0) data->tensor = describe(g, t, name, data->value);
}

/* Sets the ports' values to value ids of the final trace. */
static rfr_status find_ports(rfr_graphs *g, rfi_callable *c) {
  const rfr_trace *t = c->u.trace;
  for (rfi_port *p = c->in; p < rfi_ports_end(c); p++) {
    const char *grad = p->grad.tensor.name;
    p->grad = (rfi_port_data){.value = RFR_NONE, .fixed = p->grad.fixed};
    if (!p->name) continue;
    if (!grad) grad = rfi_arena_printf(g->m.strings, "%s%s", RFI_GRAD_PREFIX, p->name);
    if (!grad) return RFR_NO_MEMORY;
    p->grad.tensor.name = grad;
    find_data(g, t, p->name, p->output, &p->data);
    if (!g->inference) find_data(g, t, grad, !p->output, &p->grad);
  }
  if (c->microbatch >= 0) c->microbatch = value_of(t, RFI_MICROBATCH_INPUT, false);
  for (int k = 0; k < c->n_checked; k++) {
    char name[32];
    rfi_snprintf(name, sizeof name, "%s%d", BAD_PREFIX, k);
    c->checked[k].bad = value_of(t, name, true);
  }
  return RFR_OK;
}

/* Whether the input is linked to an output that has no gradient. */
static bool is_without_gradient(const rfr_graphs *g, const rfi_callable *c, const rfr_callable *desc,
                                const char *input) {
  for (int i = 0; i < desc->n_links; i++) {
    const rfr_callable_link *l = &desc->links[i];
    if (!l->input || strcmp(l->input, input) != 0 || l->callable < 0 || l->callable >= c - g->callable) continue;
    const rfi_callable *from = &g->callable[l->callable];
    const int out = rfi_port_find(from->out, from->n_out, l->output);
    return out >= 0 && from->out[out].grad.value < 0;
  }
  return false;
}

static rfr_status record_joint(rfr_graphs *g, rfi_callable *c, const rfr_callable *desc, int64_t site,
                               rfr_trace **out) {
  rfr_status s;
  rfi_rewrite r = {.from = desc->trace};
  *out = NULL;
  RFI_TRY(rfi_rewrite_begin(desc->trace, &r));
  for (int i = 0; i < r.to->n_inputs && !g->inference; i++) {
    rfi_value *x = &r.to->values[r.to->inputs[i]];
    if (x->role == RFR_ROLE_INPUT_GRAD && is_without_gradient(g, c, desc, x->name)) x->role = RFR_ROLE_INPUT;
  }
  for (int i = 0; i < desc->trace->n_ops; i++) RFI_GOTO(copy_op(c, &r, i, site));
  for (int k = 0; k < c->n_out; k++) {
    rfr_value *v = &c->out[k].data.value;
    if (*v < 0) continue;
    *v = r.map[*v];
    rfr_output_at(r.to, nowhere, c->out[k].name, *v);
  }
  RFI_GOTO(check_splits(g, c, &r));
  if (c->recipe.draws && !g->inference) declare_microbatch(c, r.to);
  rfr_scope(r.to, "");
  if (!g->inference) RFI_GOTO(record_backward(g, c, r.to));
  RFI_GOTO(rfr_trace_finish(r.to));
  *out = r.to;
  r.to = NULL;
  rfi_rewrite_abort(&r);
  return RFR_OK;
fail:
  rfi_rewrite_abort(&r);
  return s;
}

bool rfi_has_backward(const rfi_callable *c) {
  for (int k = 0; k < c->n_out; k++)
    if (c->out[k].grad.value >= 0) return true;
  return false;
}

/* The number of copies of one callable's saved activations; passes use it to compare memory savings. */
static int count_copies(const rfr_graphs *g) {
  int n = 0;
  for (int i = 0; i < g->n_stages; i++) n += g->stage[i].slots * (g->stage[i].end - g->stage[i].first);
  return n > 0 ? n : 1;
}

static bool is_written(void *executor, const char *state) {
  const rfi_named *x = rfi_storage_find(&((const rfi_executor *)executor)->store, state);
  return x && x->written;
}

rfi_pass_options rfi_callable_options(rfr_graphs *g, const rfi_callable *c) {
  rfi_pass_options o = rfi_executor_pass_options(&g->m);
  o.fuse = g->options.fuse;
  o.prune = o.split_phases = true;
  o.sharded = c->gathered;
  o.copies = count_copies(g);
  o.separate_wgrad = c->stage->separate_wgrad;
  o.gathered = c->gathered && o.separate_wgrad;
  o.slots = g->recipe.slots;
  o.first_slot = c->first_slot;
  o.first_linear = c->first_linear;
  o.trains = !g->inference;
  o.is_written = is_written;
  return o;
}

rfr_status rfi_callable_order(rfr_graphs *g, rfi_callable *c) {
  RFI_TRY(order_parts(c, c->u.pipeline.stage[RFI_STAGES - 1].trace));
  if (c->sharded) RFI_TRY(shard(g, c));
  find_parts(c);
  return find_ports(g, c);
}

/* A pre_forward hook may gather parameters into the caller's memory, where they are valid only during the call. */
static bool has_gather_hook(const rfr_graphs *g, int index) {
  const rfr_graphs_options *o = &g->options;
  return o->n_tensors > 0 && o->n_hooks > 0 && o->hooks[index].pre_forward.n > 0;
}

/* The layers of other ranks are not known here, so with a default two ranks would draw the same numbers. The
 * descriptions of the stage precede `desc`. */
static rfr_status check_first(const rfr_graphs *g, int index, const rfr_callable *desc) {
  const rfi_callable *c = &g->callable[index];
  rfr_schedule_info info;
  bool sites = rfr_trace_sites(desc->trace) > 0, linears = c->recipe.draws && !g->inference;
  if (!g->options.schedule || (!sites && !linears)) return RFR_OK;
  RFI_TRY(rfr_schedule_get_info(g->options.schedule, &info));
  if (info.ranks == 1) return RFR_OK;
  for (int i = index; i >= c->stage->first; i--) {
    sites = sites && desc[i - index].first_site < 0;
    linears = linears && desc[i - index].first_linear < 0;
  }
  if (!sites && !linears) return RFR_OK;
  return rfi_fail(RFI_E_GRAPHS_CALLABLE,
                  "callable \"%s\" draws random numbers in stage %d of a schedule of %d ranks: set "
                  "rfr_callable.%s of the stage's first callable to the sum of %s over all layers "
                  "before it, so that no two ranks draw the same %s",
                  c->u.name, c->stage->number, info.ranks, sites ? "first_site" : "first_linear",
                  sites ? "rfr_trace_sites" : "rfr_trace_linears", sites ? "masks" : "numbers");
}

static rfr_status check_trace(const rfr_graphs *g, const rfi_callable *c, const rfr_trace *t) {
  if (t->ctx != g->m.ctx)
    return rfi_fail(
        RFI_E_GRAPHS_CALLABLE,
        "callable \"%s\": its trace was recorded in another context: record it in the context of the graphs",
        c->u.name);
  RFI_TRY(rfr_trace_status(t));
  if (rfi_trace_is_finished(t)) return RFR_OK;
  return rfi_fail(RFI_E_GRAPHS_CALLABLE, "callable \"%s\": its trace is not finished: call rfr_trace_finish first",
                  c->u.name);
}

rfr_status rfi_callable_compile(rfr_graphs *g, int index, const rfr_callable *desc, rfi_next *next) {
  rfi_callable *c = &g->callable[index];
  rfr_trace *joint;
  if (desc->first_site >= 0) next->site = desc->first_site;
  if (desc->first_linear >= 0) next->linear = desc->first_linear;
  c->u.index = index;
  c->microbatch = RFR_NONE;
  c->level = -1;
  c->sharded = desc->sharded != 0;
  c->stage->sharded = c->stage->sharded || c->sharded;
  c->gathered = c->sharded || desc->gathered || has_gather_hook(g, index);
  c->u.name = desc->name ? rfi_arena_strdup(g->m.strings, desc->name) : rfi_arena_printf(g->m.strings, "%d", index);
  if (!c->u.name) return RFR_NO_MEMORY;
  c->first_linear = next->linear;
  RFI_TRY(check_trace(g, c, desc->trace));
  RFI_TRY(check_first(g, index, desc));
  RFI_TRY(check_names(c, desc->trace));
  RFI_TRY(add_ports(g, c, desc, desc->trace));
  RFI_TRY(record_joint(g, c, desc, next->site, &joint));
  next->site += rfr_trace_sites(desc->trace);
  next->linear += rfr_trace_linears(desc->trace);
  const rfi_pass_options o = rfi_callable_options(g, c);
  rfr_status s = rfi_pipeline_run(joint, &o, &c->u.pipeline);
  rfr_trace_destroy(joint);
  return s == RFR_OK ? rfi_callable_order(g, c) : s;
}
