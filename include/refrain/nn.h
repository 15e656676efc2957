/* SPDX-License-Identifier: Apache-2.0
 *
 * Records transformer models into a trace: a description of the model, its parameters with Hugging Face names, and the
 * ops of a forward pass over packed documents.
 *
 * Parameters are inputs of the trace, declared once and shared by all microbatches. These calls only record: they
 * allocate no tensors and compute nothing, except rfr_parameter_fill. Parameter values come from rfr_parameter_fill or
 * a checkpoint and go into the memory that rfr_programs_tensor returns.
 *
 * Shapes: T tokens of all documents, C hidden_size, V vocab_size, H heads, Hk kv_heads, D head_dim, L layers.
 * Recording calls latch the first error in the trace (rfr_trace_finish returns it) and return RFR_NONE then. A trace
 * belongs to one thread at a time; the calls without a trace may run on any thread. No call touches a device.
 *
 *   rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
 *   c.hidden_size = 128; c.layers = 4; c.heads = 4; c.kv_heads = 2;
 *   rfr_value *p = malloc(rfr_model_parameter_count(&c) * sizeof *p);
 *   rfr_model_declare(t, &c, NULL, 0, p);
 *   rfr_value h = rfr_model_forward(t, &c, p, tokens, offsets, RFR_NONE);
 *   rfr_output(t, "logits", rfr_model_logits(t, &c, p, h, RFR_F32));
 *
 * Sources: Llama: Touvron et al., arXiv 2302.13971. GPT-2: Radford et al., 2019. Gemma: Gemma Team,
 * arXiv 2403.08295; Gemma 2: arXiv 2408.00118; Gemma 3: arXiv 2503.19786. Mixtral: Jiang et al., arXiv 2401.04088.
 * OLMo 2: OLMo Team, arXiv 2501.00656. The others: the transformers library, version 5.
 */
#ifndef REFRAIN_NN_H
#define REFRAIN_NN_H

#include "refrain/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "Llama" in the comments below means every type but GPT-2. */
typedef enum rfr_model_type {
  RFR_MODEL_LLAMA,
  RFR_MODEL_GPT2,
  RFR_MODEL_GEMMA,   /* Llama with norms of scale 1 + w, embeddings times sqrt(C), a GELU gate and a tied head */
  RFR_MODEL_GEMMA2,  /* Gemma with a norm before and after each branch, caps and windows */
  RFR_MODEL_GEMMA3,  /* Gemma 2 with norms of q and k and a second RoPE base */
  RFR_MODEL_OLMO2,   /* Llama with norms after the branches instead of before, and norms over all columns of q and k */
  RFR_MODEL_SMOLLM3, /* Llama with layers without RoPE */
  RFR_MODEL_PHI3,    /* Llama with one weight for q, k and v and one for gate and up */
  RFR_MODEL_GRANITE  /* Llama with multipliers */
} rfr_model_type;

enum { RFR_MAX_LAYERS = 4096, RFR_MAX_FACTORS = 256 };

/* RoPE scalings with more parameters than rfr_rope_scaling. YaRN (Peng et al., arXiv 2309.00071): frequencies with at
 * most beta_slow turns within `original` positions are divided by `factor`, those with at least beta_fast turns stay,
 * and those between are interpolated by the index of the pair. LongRoPE (Ding et al., arXiv 2402.13753): each frequency
 * is divided by its own factor, from short_factor if no document of the program can be longer than `original`,
 * otherwise from long_factor. Rotated columns of q and k are multiplied by attention_factor. */
typedef enum rfr_rope_type { RFR_ROPE_PLAIN, RFR_ROPE_YARN, RFR_ROPE_LONGROPE } rfr_rope_type;
typedef struct rfr_rope_extension {
  rfr_rope_type type; /* RFR_ROPE_PLAIN: rope_scaling is used instead */
  int64_t original;   /* positions */
  double attention_factor;
  double factor, beta_fast, beta_slow; /* YaRN */
  int truncate;                        /* YaRN: round the limits outwards to whole pairs */
  double short_factor[RFR_MAX_FACTORS], long_factor[RFR_MAX_FACTORS]; /* LongRoPE: one for each pair */
} rfr_rope_extension;

typedef struct rfr_adapter rfr_adapter;

typedef struct rfr_model_config {
  size_t size;
  rfr_model_type type;
  int64_t vocab_size;
  int64_t hidden_size;       /* C */
  int64_t intermediate_size; /* of the MLP */
  int64_t layers;            /* L */
  int64_t heads;             /* H; Llama does not need C = H * head_dim */
  int64_t kv_heads;          /* a divisor of H; GPT-2: H */
  int64_t head_dim;          /* D, even with rotary embedding */
  int64_t max_positions;     /* longest document; GPT-2: rows of the position table */
  double norm_eps;
  double rope_theta; /* Llama */
  /* Gemma 3: theta of the layers with a window, which have no scaling; 0: theta and scaling of the others */
  double local_theta;
  rfr_rope_scaling rope_scaling;
  rfr_rope_extension rope_extension;
  int64_t rotary_dim; /* Phi-3: columns of a head that RoPE rotates, the first ones; 0: all */
  double dropout;     /* after the embedding and before each residual addition */
  double init_std;    /* of weights; the last GEMM of each residual branch gets init_std / sqrt(2L) */
  int tie_embeddings; /* the LM head is the embedding table */
  int attention_bias; /* Llama: biases on q, k, v and o */
  int mlp_bias;       /* Llama: biases in the MLP */
  int qkv_bias;       /* Llama: biases on q, k and v only, as in Qwen2 */
  int qk_norm;        /* Llama: RMSNorm of q and k before RoPE: of each head, as in Qwen3; OLMo 2: of the row */
  int64_t window;     /* Llama: sliding window in rows, the row itself included; 0: none */
  uint64_t no_window[RFR_MAX_LAYERS / 64]; /* bit l % 64 of element l / 64: layer l has no window */
  uint64_t no_rope[RFR_MAX_LAYERS / 64];   /* SmolLM3, in the same form: layers without RoPE */
  double attention_scalar;                 /* Gemma 2 and 3: scores are divided by its square root; 0: head_dim */
  double attention_cap;                    /* Gemma 2: scores x become cap tanh(x / cap); 0: no cap */
  double logit_cap;                        /* Gemma 2 and 3: the same for logits */
  double attention_multiplier;             /* Granite: factor of scores; 0: 1 / sqrt(head_dim) */
  double embedding_multiplier;             /* Granite: factor of embeddings; 0: none */
  double residual_multiplier;              /* Granite: factor of each branch; 0: none */
  double logits_scaling;                   /* Granite: logits are divided by it; 0: none */
  /* Llama: number of experts that replace each MLP; 0: none. qk_norm gives Qwen3-MoE, qkv_bias Qwen2-MoE, neither gives
   * Mixtral. A token goes to the experts_per_token experts with the highest softmax of the router's logits. */
  int64_t experts;
  int64_t experts_per_token;
  int64_t expert_size;                    /* intermediate size of each expert */
  uint64_t mlp_only[RFR_MAX_LAYERS / 64]; /* bit l % 64 of element l / 64: layer l has an MLP instead of experts */
  /* Qwen2-MoE: intermediate size of the shared expert, whose result for each token has a sigmoid gate; 0: none */
  int64_t shared_size;
  int expert_norm;     /* the weights of a token's experts are normalized to 1; must be 1 for Mixtral */
  int router_narrow;   /* router logits and weights are rounded to dtype, as in the transformers library */
  double balance_loss; /* factors of the aux loss and the z-loss, see rfr_model_routing_loss */
  double z_loss;
  int64_t longest;            /* rows of the longest document, for counting work; 0: max_positions */
  rfr_dtype dtype;            /* of parameters and activations: f32, bf16 or f16 */
  const rfr_adapter *adapter; /* of this model; NULL: none. It must be valid while the description is used. */
  rfr_quant base_format;      /* storage of the frozen linear weights of blocks, experts included */
  /* Ranks over which the experts are spread evenly, in rank order; 0 and 1: none. The parameters of experts are those
   * of one rank, and a forward sends rows to the ranks that have their experts. */
  int expert_ranks;
  int64_t expert_capacity; /* rows that a rank sends to another one at once; 0: all that there can be */
} rfr_model_config;

/* A small byte model of the type: vocab 256, C 256, L 4, H 4. */
RFR_API rfr_model_config rfr_model_config_default(rfr_model_type type);
/* Checks all fields against their limits and each other. Errors: model.config names the field; argument for a wrong
 * size. */
RFR_API rfr_status rfr_model_config_check(const rfr_model_config *c);
/* 1 if attention of the layer has the window. */
RFR_API int rfr_model_has_window(const rfr_model_config *c, int64_t layer);
/* 1 if the layer has rotary embedding. */
RFR_API int rfr_model_has_rope(const rfr_model_config *c, int64_t layer);
/* 1 if the layer has experts instead of an MLP; and the number of such layers. */
RFR_API int rfr_model_has_experts(const rfr_model_config *c, int64_t layer);
RFR_API int64_t rfr_model_expert_layers(const rfr_model_config *c);
/* "llama", "gpt2", "gemma", "gemma2", "gemma3", "olmo2", "smollm3", "phi3", "granite" */
RFR_API const char *rfr_model_type_name(rfr_model_type type);

typedef enum rfr_init_kind { RFR_INIT_NORMAL, RFR_INIT_ZEROS, RFR_INIT_ONES, RFR_INIT_UNIFORM } rfr_init_kind;

/* One parameter: its Hugging Face name, shape and initial values. `std` is for RFR_INIT_NORMAL and RFR_INIT_UNIFORM,
 * whose values lie between -sqrt(3) std and sqrt(3) std. */
typedef struct rfr_parameter {
  char name[96];
  int rank;
  int64_t shape[3];
  rfr_init_kind init;
  double std;
  rfr_quant format; /* RFR_QUANT_NONE: stored in the model's dtype; else as u8 (rfr_quant_bytes) */
} rfr_parameter;

/* The number of parameters (tensors) of a checked model, and the i-th: those of the model in the order of the forward
 * pass, then those of its adapter. Errors: argument past the end. */
RFR_API int rfr_model_parameter_count(const rfr_model_config *c);
RFR_API rfr_status rfr_model_parameter(const rfr_model_config *c, int i, rfr_parameter *out);

/* Fills `data` (dense; f32, bf16 or f16) with the initial values of p. A value depends only on the seed, the
 * parameter's name and the element's index, and every machine computes the same bits with any number of `threads` (1 to
 * 4096). 16-bit values are the f32 values, rounded. Errors: argument for another dtype or number of threads. */
RFR_API rfr_status rfr_parameter_fill(const rfr_parameter *p, uint64_t seed, rfr_dtype dtype, int threads, void *data);

/* Declares all parameters as inputs, in the order of rfr_model_parameter; `out` has rfr_model_parameter_count elements.
 * A parameter whose name matches one of the `frozen` patterns (rfr_name_matches) gets the role frozen. In a model with
 * an adapter, all parameters except the adapter's get the role frozen. The others get the role trainable. */
RFR_API void rfr_model_declare(rfr_trace *t, const rfr_model_config *c, const char *const *frozen, int n_frozen,
                               rfr_value *out);

/* ---- adapters ----
 *
 * An adapter trains a model of frozen weights: it adds the product of two small matrices to the weights of some linear
 * layers. A target with weight W (out,in), rank r and alpha has the parameters A (r,in), "MODULE.lora_A.weight", and B
 * (out,r), "MODULE.lora_B.weight", where MODULE is the parameter's name without ".weight":
 *   LoRA  y = x WT + b + s (dropout(x) AT) BT,   s = alpha / r, with rslora alpha / sqrt(r)
 *   DoRA  the rows of W + s B A are scaled to the norms m (out), "MODULE.lora_magnitude_vector"; the norms of W + s B A
 *         have no gradient
 * An embedding table (V,C) has "MODULE.lora_embedding_A" (r,V) and "MODULE.lora_embedding_B" (C,r). Initially A is
 * uniform and B zero, as in the PEFT library. DoRA's m starts with the norms of W's rows; rfr_parameter_fill fills it
 * with ones, because it does not have W.
 *
 *   rfr_adapter_options o = rfr_adapter_options_default();
 *   rfr_adapter_create(ctx, &c, &o, &adapter);
 *   c.adapter = adapter;
 *
 * Sources: LoRA: Hu et al., arXiv 2106.09685. rsLoRA: Kalajdzievski, arXiv 2312.03732. DoRA: Liu et al.,
 * arXiv 2402.09353. */

/* A number for the targets whose name matches the pattern. */
typedef struct rfr_adapter_number {
  const char *match;
  double value;
} rfr_adapter_number;

typedef struct rfr_adapter_options {
  size_t size;
  int64_t rank; /* 1 to 65536 */
  double alpha; /* more than 0 */
  int rslora, dora;
  double dropout; /* of the input of A, 0 up to but not 1 */
  const char *const
      *targets; /* patterns (rfr_name_matches) of modules; "all-linear": all linear layers of the blocks */
  int n_targets;
  const rfr_adapter_number *ranks, *alphas; /* for some of the targets; if several match, the last one applies */
  int n_ranks, n_alphas;
} rfr_adapter_options;

/* rank 16, alpha 32, targets all-linear */
RFR_API rfr_adapter_options rfr_adapter_options_default(void);
/* Creates the description of an adapter for a model without one. The caller destroys *out after the last use of a model
 * description that refers to it. Errors: adapter, with the pattern or module; model.config; argument. */
RFR_API rfr_status rfr_adapter_create(rfr_ctx *ctx, const rfr_model_config *c, const rfr_adapter_options *options,
                                      rfr_adapter **out);
RFR_API void rfr_adapter_destroy(rfr_adapter *adapter); /* accepts NULL */

/* Returns the hidden state (T,C) after the last norm. tokens: i32 (T). offsets: i32 (documents+1), ascending from 0 to
 * T. step: a step block, which turns dropout on; RFR_NONE for evaluation. */
RFR_API rfr_value rfr_model_forward(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters,
                                    rfr_value tokens, rfr_value offsets, rfr_value step);
/* Results of the routers: each is NULL, or an array with one element for each layer with experts. */
typedef struct rfr_experts {
  rfr_value *logits; /* (T,experts) */
  rfr_value *index;  /* the experts of each token, i32 (T,experts_per_token) */
  rfr_value *splits; /* rows of each expert, i32 (experts) */
  rfr_value *bad;    /* the flag of rfr_splits_to_offsets for the splits */
} rfr_experts;
/* rfr_model_forward that also returns the results of the routers, for training; `experts` may be NULL. */
RFR_API rfr_value rfr_model_forward_experts(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters,
                                            rfr_value tokens, rfr_value offsets, rfr_value step,
                                            const rfr_experts *experts);
/* Returns the aux loss, f32 (1): the mean of rfr_moe_loss over the layers with experts, with the factors balance_loss
 * and z_loss; needs experts->logits and experts->index. Tokens whose target (i32 (T)) is `ignore` do not count. Returns
 * RFR_NONE without a factor. */
RFR_API rfr_value rfr_model_routing_loss(rfr_trace *t, const rfr_model_config *c, const rfr_experts *experts,
                                         rfr_value targets, int ignore);
/* rfr_model_forward for the next rows of a text that is generated token by token. tokens, positions: i32 (rows), from
 * rfr_text_read. Declares the states "cache.L.k" and "cache.L.v" (capacity,Hk,D) for the keys and values of layer L;
 * programs of one compile with the same capacity share them. */
RFR_API rfr_value rfr_model_forward_cached(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters,
                                           rfr_value tokens, rfr_value positions, rfr_value cursor, int64_t capacity);
/* Returns the logits (T,V) of a hidden state (T,C), of type `to`; softcapped if the model has logit_cap. */
RFR_API rfr_value rfr_model_logits(rfr_trace *t, const rfr_model_config *c, const rfr_value *parameters,
                                   rfr_value hidden, rfr_dtype to);

/* 1 if `name` matches `glob`: * matches any characters, ? one character, any other character itself. */
RFR_API int rfr_name_matches(const char *glob, const char *name);

#ifdef __cplusplus
}
#endif
#endif
