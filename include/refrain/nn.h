/* SPDX-License-Identifier: Apache-2.0
 *
 * Transformer models as recording code: a description, its parameters under the names
 * that Hugging Face gives them, and the ops of a forward pass over packed documents.
 *
 * Parameters are inputs of the trace, declared once and shared by every microbatch of
 * it. Nothing here allocates tensors or computes: values come from rfr_parameter_fill or
 * from a checkpoint, into the memory that rfr_programs_tensor names.
 *
 *   rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
 *   c.hidden_size = 128; c.layers = 4; c.heads = 4; c.kv_heads = 2;
 *   rfr_value *p = malloc(rfr_model_parameter_count(&c) * sizeof *p);
 *   rfr_model_declare(t, &c, NULL, 0, p);
 *   rfr_value h = rfr_model_forward(t, &c, p, tokens, offsets, RFR_NONE);
 *   rfr_output(t, "logits", rfr_model_logits(t, &c, p, h, RFR_F32));
 *
 * Sources: Llama: Touvron et al., arXiv 2302.13971. GPT-2: Radford et al., 2019. Gemma: Gemma Team,
 * arXiv 2403.08295; Gemma 2: arXiv 2408.00118. Mixtral: Jiang et al., arXiv 2401.04088.
 */
#ifndef REFRAIN_NN_H
#define REFRAIN_NN_H

#include "refrain/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gemma is Llama with norms whose scale is 1 + w, embeddings times sqrt(C), a GELU gate and a tied head; Gemma 2 has
 * norms behind both branches too. "Llama" below: all that is not GPT-2. */
typedef enum rfr_model_type { RFR_MODEL_LLAMA, RFR_MODEL_GPT2, RFR_MODEL_GEMMA, RFR_MODEL_GEMMA2 } rfr_model_type;

enum { RFR_MAX_LAYERS = 4096 };

typedef struct rfr_model_config {
  size_t size;
  rfr_model_type type;
  int64_t vocab_size;
  int64_t hidden_size;       /* C */
  int64_t intermediate_size; /* of the MLP */
  int64_t layers;            /* L */
  int64_t heads;             /* H; C = H * head_dim is not required of Llama */
  int64_t kv_heads;          /* a divisor of H; GPT-2: H */
  int64_t head_dim;          /* D, even with rotary embedding */
  int64_t max_positions;     /* longest document; GPT-2: rows of the position table */
  double norm_eps;
  double rope_theta; /* Llama */
  rfr_rope_scaling rope_scaling;
  double dropout;     /* after the embedding and before each residual addition */
  double init_std;    /* of weights; the last product of each residual branch gets init_std / sqrt(2L) */
  int tie_embeddings; /* the LM head is the embedding table */
  int attention_bias; /* Llama: biases on q, k, v and o */
  int mlp_bias;       /* Llama: biases in the MLP */
  int qkv_bias;       /* Llama: biases on q, k and v alone, as Qwen2 has them */
  int qk_norm;        /* Llama: RMSNorm of each head of q and k before the rotation, as Qwen3 has it */
  int64_t window;     /* Llama: rows that a row sees, itself included, as in Mistral; 0: its document's */
  uint64_t no_window[RFR_MAX_LAYERS / 64]; /* bit l % 64 of element l / 64: layer l has no window all the same */
  double attention_scalar;                 /* Gemma 2: scores are divided by its square root; 0: head_dim */
  double attention_cap;                    /* Gemma 2: scores x become cap tanh(x / cap); 0: they stay */
  double logit_cap;                        /* Gemma 2: the same of logits */
  /* Llama: experts in place of each MLP, 0: none. With qk_norm they are Qwen3-MoE's, with qkv_bias Qwen2-MoE's, else
   * Mixtral's. A token goes to experts_per_token of them, those with the highest softmax of the router's logits. */
  int64_t experts;
  int64_t experts_per_token;
  int64_t expert_size;                    /* in place of intermediate_size, of each */
  uint64_t mlp_only[RFR_MAX_LAYERS / 64]; /* bit l % 64 of element l / 64: layer l has an MLP all the same */
  int64_t
      shared_size; /* of one more that all tokens go to, times the logistic function of a gate: Qwen2-MoE's; 0: none */
  int expert_norm; /* the weights of a token's experts add up to 1; Mixtral's do */
  int router_narrow;   /* logits and weights of the router are rounded to dtype, as the transformers library has them */
  double balance_loss; /* factors of rfr_model_routing_loss */
  double z_loss;
  int64_t longest; /* rows of the longest document that it is given; 0: max_positions. What work is counted by */
  rfr_dtype dtype; /* of parameters and activations: f32, bf16 or f16 */
} rfr_model_config;

/* A small byte model of the type: vocab 256, C 256, L 4, H 4. */
RFR_API rfr_model_config rfr_model_config_default(rfr_model_type type);
/* Errors: model.config, naming the field. */
RFR_API rfr_status rfr_model_config_check(const rfr_model_config *c);
/* 1 when the layer's attention has the window. */
RFR_API int rfr_model_has_window(const rfr_model_config *c, int64_t layer);
/* 1 when the layer has experts in place of an MLP; and how many layers have. */
RFR_API int rfr_model_has_experts(const rfr_model_config *c, int64_t layer);
RFR_API int64_t rfr_model_expert_layers(const rfr_model_config *c);
/* "llama", "gpt2", "gemma", "gemma2" */
RFR_API const char *rfr_model_type_name(rfr_model_type type);

typedef enum rfr_init_kind { RFR_INIT_NORMAL, RFR_INIT_ZEROS, RFR_INIT_ONES } rfr_init_kind;

/* One parameter: its Hugging Face name, shape and first values. */
typedef struct rfr_parameter {
  char name[96];
  int rank;
  int64_t shape[3];
  rfr_init_kind init;
  double std;
} rfr_parameter;

/* Number of parameters (tensors) of a model, and the i-th in the order of the forward
 * pass. Errors of the second: RFR_INVALID past the end. */
RFR_API int rfr_model_parameter_count(const rfr_model_config *c);
RFR_API rfr_status rfr_model_parameter(const rfr_model_config *c, int i, rfr_parameter *out);

/* Fills `data` (dense, f32, bf16 or f16) with first values. A value depends on the seed, the
 * parameter's name and the element's index alone; the arithmetic is in integers up to
 * one product, so that every machine gets the same bits, with any number of `threads`, from 1 to 4096. The narrow
 * forms are the f32 form rounded. */
RFR_API rfr_status rfr_parameter_fill(const rfr_parameter *p, uint64_t seed, rfr_dtype dtype, int threads, void *data);

/* Declares every parameter as an input in the order of rfr_model_parameter; `out` has
 * room for all. Those whose name matches one of the `frozen` globs (*, ?) get the role
 * frozen, the others trainable. Errors are latched in the trace. */
RFR_API void rfr_model_declare(rfr_trace *t, const rfr_model_config *c, const char *const *frozen, int n_frozen,
                               rfr_value *out);

/* The hidden state (T,C) after the last norm. tokens i32 (T); offsets i32 (documents+1),
 * ascending, first 0, last T. `step` (a step block) turns dropout on; RFR_NONE leaves
 * it out, as evaluation wants. */
RFR_API rfr_value rfr_model_forward(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters,
                                    rfr_value tokens, rfr_value offsets, rfr_value step);
/* What experts leave of a forward pass: each is NULL, or room for a value for each layer with experts. */
typedef struct rfr_experts {
  rfr_value *logits; /* of the router, (T,experts) */
  rfr_value *index;  /* the experts of each token, i32 (T,experts_per_token) */
  rfr_value *splits; /* rows of each expert, i32 (experts) */
  rfr_value *bad;    /* what rfr_splits_to_offsets says of them */
} rfr_experts;
/* rfr_model_forward of a model with experts that is to be trained. */
RFR_API rfr_value rfr_model_forward_experts(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters,
                                            rfr_value tokens, rfr_value offsets, rfr_value step,
                                            const rfr_experts *experts);
/* f32 (1): the mean over layers with experts of rfr_moe_loss by balance_loss and z_loss, of what the forward left of
 * each. `targets`, i32 (T), and `ignore` say which tokens count. RFR_NONE: the model has neither factor. */
RFR_API rfr_value rfr_model_routing_loss(rfr_trace *t, const rfr_model_config *c, const rfr_experts *experts,
                                         rfr_value targets, int ignore);
/* The same for the next rows of a text that is made token by token: tokens and positions i32
 * (rows) as rfr_text_read gives them. The keys and values of layer L are kept in the states
 * "cache.L.k" and "cache.L.v" (capacity,Hk,D), which it declares; programs of one compile
 * that name the same capacity share them. */
RFR_API rfr_value rfr_model_forward_cached(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters,
                                           rfr_value tokens, rfr_value positions, rfr_value cursor, int64_t capacity);
/* logits (T,V) of a hidden state (T,C), in type `to`, softcapped if the model has a cap. */
RFR_API rfr_value rfr_model_logits(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters,
                                   rfr_value hidden, rfr_dtype to);

/* 1 when `name` matches `glob`: * any run of characters, ? one, all else itself. */
RFR_API int rfr_name_matches(const char *glob, const char *name);

#ifdef __cplusplus
}
#endif
#endif
