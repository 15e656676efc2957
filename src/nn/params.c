/* SPDX-License-Identifier: Apache-2.0
 *
 * The parameters of the model types, in one table for GPT-2 and one for the others: names, shapes, order and initial
 * values. No other file knows them.
 *
 * The flat list is: the rows before the layers, the rows of a layer L times, the rows after the layers. A row that the
 * description switches off (a bias, a tied head) is left out.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "nn/adapter.h"

typedef struct row {
  rfi_param_kind kind;
  const char *name;  /* %lld stands for the layer */
  const char *shape; /* one letter or digit per dimension, see size_of */
  char init;         /* n: normal; r: normal, last GEMM of a residual branch; 1: scale of a norm; 0: zeros */
  char only_if; /* a: attention_bias; q: attention_bias or qkv_bias; m: mlp_bias; n: qk_norm of each head; w: qk_norm
                      * of the row; u: untied head; p: norms after the branches; b: norms before them; B: these alone;
                      * P: both; k: packed weights; l: separate ones; d: layer without experts; D: and not packed;
                      * e: layer with experts; s: layer with a shared expert; ' ': always */
} row;

#define LL "model.layers.%lld."
static const row llama_before[] = {{RFI_PARAM_TOKENS, "model.embed_tokens.weight", "VC", 'n', ' '}};
static const row llama_layer[] = {
    {RFI_PARAM_NORM1, LL "input_layernorm.weight", "C", '1', 'b'},
    {RFI_PARAM_QKV, LL "self_attn.qkv_proj.weight", "JC", 'n', 'k'},
    {RFI_PARAM_Q, LL "self_attn.q_proj.weight", "QC", 'n', 'l'},
    {RFI_PARAM_Q_BIAS, LL "self_attn.q_proj.bias", "Q", '0', 'q'},
    {RFI_PARAM_K, LL "self_attn.k_proj.weight", "KC", 'n', 'l'},
    {RFI_PARAM_K_BIAS, LL "self_attn.k_proj.bias", "K", '0', 'q'},
    {RFI_PARAM_V, LL "self_attn.v_proj.weight", "KC", 'n', 'l'},
    {RFI_PARAM_V_BIAS, LL "self_attn.v_proj.bias", "K", '0', 'q'},
    {RFI_PARAM_Q_NORM, LL "self_attn.q_norm.weight", "D", '1', 'n'},
    {RFI_PARAM_K_NORM, LL "self_attn.k_norm.weight", "D", '1', 'n'},
    {RFI_PARAM_Q_NORM, LL "self_attn.q_norm.weight", "Q", '1', 'w'},
    {RFI_PARAM_K_NORM, LL "self_attn.k_norm.weight", "K", '1', 'w'},
    {RFI_PARAM_O, LL "self_attn.o_proj.weight", "CQ", 'r', ' '},
    {RFI_PARAM_O_BIAS, LL "self_attn.o_proj.bias", "C", '0', 'a'},
    {RFI_PARAM_POST1, LL "post_attention_layernorm.weight", "C", '1', 'p'},
    {RFI_PARAM_NORM2, LL "post_attention_layernorm.weight", "C", '1', 'B'},
    {RFI_PARAM_NORM2, LL "pre_feedforward_layernorm.weight", "C", '1', 'P'},
    {RFI_PARAM_ROUTER, LL "mlp.gate.weight", "XC", 'n', 'e'},
    {RFI_PARAM_EXPERT_UP, LL "mlp.experts.gate_up_proj", "Y2C", 'n', 'e'},
    {RFI_PARAM_EXPERT_DOWN, LL "mlp.experts.down_proj", "YCF", 'r', 'e'},
    {RFI_PARAM_SHARED_GATE, LL "mlp.shared_expert_gate.weight", "1C", 'n', 's'},
    {RFI_PARAM_GATE, LL "mlp.shared_expert.gate_proj.weight", "SC", 'n', 's'},
    {RFI_PARAM_UP, LL "mlp.shared_expert.up_proj.weight", "SC", 'n', 's'},
    {RFI_PARAM_DOWN, LL "mlp.shared_expert.down_proj.weight", "CS", 'r', 's'},
    {RFI_PARAM_GATE_UP, LL "mlp.gate_up_proj.weight", "GC", 'n', 'k'},
    {RFI_PARAM_GATE, LL "mlp.gate_proj.weight", "IC", 'n', 'D'},
    {RFI_PARAM_GATE_BIAS, LL "mlp.gate_proj.bias", "I", '0', 'm'},
    {RFI_PARAM_UP, LL "mlp.up_proj.weight", "IC", 'n', 'D'},
    {RFI_PARAM_UP_BIAS, LL "mlp.up_proj.bias", "I", '0', 'm'},
    {RFI_PARAM_DOWN, LL "mlp.down_proj.weight", "CI", 'r', 'd'},
    {RFI_PARAM_DOWN_BIAS, LL "mlp.down_proj.bias", "C", '0', 'm'},
    {RFI_PARAM_POST2, LL "post_feedforward_layernorm.weight", "C", '1', 'p'},
};
static const row llama_after[] = {
    {RFI_PARAM_NORM, "model.norm.weight", "C", '1', ' '},
    {RFI_PARAM_HEAD, "lm_head.weight", "VC", 'n', 'u'},
};

#define GL "transformer.h.%lld."
static const row gpt2_before[] = {
    {RFI_PARAM_TOKENS, "transformer.wte.weight", "VC", 'n', ' '},
    {RFI_PARAM_POSITIONS, "transformer.wpe.weight", "PC", 'n', ' '},
};
static const row gpt2_layer[] = {
    {RFI_PARAM_NORM1, GL "ln_1.weight", "C", '1', ' '},
    {RFI_PARAM_NORM1_BIAS, GL "ln_1.bias", "C", '0', ' '},
    {RFI_PARAM_QKV, GL "attn.c_attn.weight", "C3", 'n', ' '},
    {RFI_PARAM_QKV_BIAS, GL "attn.c_attn.bias", "3", '0', ' '},
    {RFI_PARAM_O, GL "attn.c_proj.weight", "CC", 'r', ' '},
    {RFI_PARAM_O_BIAS, GL "attn.c_proj.bias", "C", '0', ' '},
    {RFI_PARAM_NORM2, GL "ln_2.weight", "C", '1', ' '},
    {RFI_PARAM_NORM2_BIAS, GL "ln_2.bias", "C", '0', ' '},
    {RFI_PARAM_UP, GL "mlp.c_fc.weight", "CI", 'n', ' '},
    {RFI_PARAM_UP_BIAS, GL "mlp.c_fc.bias", "I", '0', ' '},
    {RFI_PARAM_DOWN, GL "mlp.c_proj.weight", "IC", 'r', ' '},
    {RFI_PARAM_DOWN_BIAS, GL "mlp.c_proj.bias", "C", '0', ' '},
};
static const row gpt2_after[] = {
    {RFI_PARAM_NORM, "transformer.ln_f.weight", "C", '1', ' '},
    {RFI_PARAM_NORM_BIAS, "transformer.ln_f.bias", "C", '0', ' '},
    {RFI_PARAM_HEAD, "lm_head.weight", "VC", 'n', 'u'},
};

typedef struct part {
  const row *rows;
  int n;
} part;

enum { BEFORE, LAYER, AFTER };
static const part parts[2][3] = {
#define PART(a) \
  { a, (int)(sizeof a / sizeof a[0]) }
    {PART(llama_before), PART(llama_layer), PART(llama_after)},
    {PART(gpt2_before), PART(gpt2_layer), PART(gpt2_after)},
#undef PART
};

static const part *parts_of(const rfr_model_config *c) { return parts[c->type == RFR_MODEL_GPT2]; }

/* `experts`: in a layer with experts. */
static bool enabled(const rfr_model_config *c, const row *r, bool experts) {
  switch (r->only_if) {
    case 'a': return c->attention_bias;
    case 'q': return c->attention_bias || c->qkv_bias;
    case 'n': return c->qk_norm && !rfi_has_row_norms(c);
    case 'w': return rfi_has_row_norms(c);
    case 'm': return c->mlp_bias;
    case 'u': return !c->tie_embeddings;
    case 'd': return !experts;
    case 'D': return !experts && !rfi_is_packed(c);
    case 'k': return rfi_is_packed(c);
    case 'l': return !rfi_is_packed(c);
    case 'e': return experts;
    case 's': return experts && c->shared_size > 0;
    case 'p': return rfi_has_post_norms(c);
    case 'b': return rfi_has_pre_norms(c);
    case 'B': return rfi_has_pre_norms(c) && !rfi_has_post_norms(c);
    case 'P': return rfi_has_pre_norms(c) && rfi_has_post_norms(c);
    default: return true;
  }
}

static int64_t size_of(const rfr_model_config *c, char letter) {
  switch (letter) {
    case 'V': return c->vocab_size;
    case 'C': return c->hidden_size;
    case 'I': return c->intermediate_size;
    case 'D': return c->head_dim;
    case 'P': return c->max_positions;
    case 'Q': return c->heads * c->head_dim;
    case 'K': return c->kv_heads * c->head_dim;
    case 'J': return (c->heads + 2 * c->kv_heads) * c->head_dim;
    case 'G': return 2 * c->intermediate_size;
    case 'X': return c->experts;
    case 'Y': return c->expert_ranks > 1 ? c->experts / c->expert_ranks : c->experts;
    case 'F': return c->expert_size;
    case '2': return 2 * c->expert_size;
    case 'S': return c->shared_size;
    case '1': return 1;
    default: return 3 * c->hidden_size; /* '3' */
  }
}

static int count(const rfr_model_config *c, int which, bool experts) {
  const part *p = &parts_of(c)[which];
  int n = 0;
  for (int i = 0; i < p->n; i++) n += enabled(c, &p->rows[i], experts);
  return n;
}

/* The number of parameters of the layers before `layer`. */
static int before(const rfr_model_config *c, int64_t layer) {
  int with = 0;
  for (int64_t l = 0; l < layer && c->experts > 0; l++) with += rfr_model_has_experts(c, l);
  return with * count(c, LAYER, true) + ((int)layer - with) * count(c, LAYER, false);
}

int rfi_parameter_index(const rfr_model_config *c, rfi_param_kind kind, int64_t layer) {
  int start = 0;
  for (int which = BEFORE; which <= AFTER; which++) {
    const part *p = &parts_of(c)[which];
    const bool experts = rfr_model_has_experts(c, layer);
    int k = which == LAYER ? before(c, layer) : 0;
    for (int i = 0; i < p->n; i++) {
      if (!enabled(c, &p->rows[i], experts)) continue;
      if (p->rows[i].kind == kind) return start + k;
      k++;
    }
    start += which == LAYER ? before(c, c->layers) : count(c, which, false);
  }
  return -1;
}

int64_t rfi_parameter_layer(const rfr_model_config *c, int i) {
  rfi_adapter_part part;
  const rfi_adapter_target *target = rfi_adapter_owner(c, i, &part);
  const int at = (target ? target->parameter : i) - count(c, BEFORE, false);
  int64_t layer = 0;
  if (at < 0) return -1;
  while (layer < c->layers && at >= before(c, layer + 1)) layer++;
  return layer;
}

static void describe(const rfr_model_config *c, const row *r, int64_t layer, rfr_parameter *out) {
  memset(out, 0, sizeof *out);
  const char *at = strstr(r->name, "%lld");
  if (at) snprintf(out->name, sizeof out->name, "%.*s%lld%s", (int)(at - r->name), r->name, (long long)layer, at + 4);
  else snprintf(out->name, sizeof out->name, "%s", r->name);
  out->rank = (int)strlen(r->shape);
  for (int d = 0; d < out->rank; d++) out->shape[d] = size_of(c, r->shape[d]);
  out->init = r->init == '1' ? RFR_INIT_ONES : r->init == '0' ? RFR_INIT_ZEROS : RFR_INIT_NORMAL;
  if (r->init == '1' && rfi_is_gemma(c)) out->init = RFR_INIT_ZEROS; /* Gemma stores the scale minus one */
  out->std = c->init_std;
  /* the residual stream sums 2L branches: this keeps its variance at that of one branch */
  if (r->init == 'r') out->std = c->init_std / sqrt(2.0 * (double)c->layers);
}

double rfi_model_elements(const rfr_model_config *c) {
  const double with = (double)rfr_model_expert_layers(c), layers[2] = {(double)c->layers - with, with};
  double n = 0;
  for (int which = BEFORE; which <= AFTER; which++)
    for (int experts = 0; experts <= (which == LAYER); experts++)
      for (int i = 0; i < parts_of(c)[which].n; i++) {
        const row *r = &parts_of(c)[which].rows[i];
        double elements = which == LAYER ? layers[experts] : 1;
        if (!enabled(c, r, experts)) continue;
        for (const char *d = r->shape; *d; d++) elements *= (double)size_of(c, *d);
        n += elements;
      }
  return n;
}

static int base_count(const rfr_model_config *c) {
  return count(c, BEFORE, false) + before(c, c->layers) + count(c, AFTER, false);
}

int rfr_model_parameter_count(const rfr_model_config *c) {
  return base_count(c) + (c->adapter ? c->adapter->count : 0);
}

/* The row of the i-th parameter of the model without the adapter. */
static const row *find_row(const rfr_model_config *c, int i, int64_t *of_layer) {
  const int first = count(c, BEFORE, false);
  int which = BEFORE;
  int64_t layer = 0;
  bool experts = false;
  if (i >= first) {
    which = LAYER;
    i -= first;
    const int rows[2] = {count(c, LAYER, false), count(c, LAYER, true)};
    for (; layer < c->layers; layer++) {
      experts = rfr_model_has_experts(c, layer);
      if (i < rows[experts]) break;
      i -= rows[experts];
    }
    if (layer == c->layers) which = AFTER;
  }
  const part *p = &parts_of(c)[which];
  for (int k = 0; k < p->n; k++) {
    if (!enabled(c, &p->rows[k], experts) || i-- > 0) continue;
    *of_layer = layer;
    return &p->rows[k];
  }
  return NULL;
}

bool rfi_is_linear(rfi_param_kind kind) {
  switch (kind) {
    case RFI_PARAM_QKV:
    case RFI_PARAM_Q:
    case RFI_PARAM_K:
    case RFI_PARAM_V:
    case RFI_PARAM_O:
    case RFI_PARAM_GATE_UP:
    case RFI_PARAM_GATE:
    case RFI_PARAM_UP:
    case RFI_PARAM_DOWN:
    case RFI_PARAM_EXPERT_UP:
    case RFI_PARAM_EXPERT_DOWN: return true;
    default: return false;
  }
}

rfi_param_kind rfi_parameter_kind(const rfr_model_config *c, int i) {
  int64_t layer;
  return find_row(c, i, &layer)->kind;
}

bool rfi_is_of_experts(const char *name) { return strstr(name, ".mlp.experts.") != NULL; }

rfr_status rfr_model_parameter(const rfr_model_config *c, int i, rfr_parameter *out) {
  const int total = rfr_model_parameter_count(c), base = base_count(c);
  int64_t layer;
  memset(out, 0, sizeof *out);
  if (i < 0 || i >= total) return rfi_fail(RFI_E_ARGUMENT, "parameter %d of a model that has %d", i, total);
  if (i >= base) return rfi_adapter_parameter(c, i, out);
  const row *r = find_row(c, i, &layer);
  describe(c, r, layer, out);
  if (rfi_is_linear(r->kind)) out->format = c->base_format;
  return RFR_OK;
}
