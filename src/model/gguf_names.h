/* SPDX-License-Identifier: Apache-2.0
 *
 * Architectures, keys and tensor names of GGUF, for the reader (gguf_model.c) and the writer (gguf_model_write.c).
 */
#ifndef RFI_GGUF_NAMES_H
#define RFI_GGUF_NAMES_H

#include "data/gguf.h"

typedef struct rfi_gguf_architecture {
  const char *name, *model_type, *moe_type; /* moe_type: the name if expert_count is given; NULL: no experts */
  bool interleaved;                         /* rows of q and k are interleaved */
  bool norm_plus_one;
  bool transposed; /* GEMM weights are Conv1D in the library */
  bool post_norms; /* norms after the branches */
} rfi_gguf_architecture;

/* The i-th architecture; NULL: there are no more. */
const rfi_gguf_architecture *rfi_gguf_architecture_at(size_t i);

typedef enum rfi_gguf_use {
  RFI_GGUF_SIZE,
  RFI_GGUF_REAL,
  RFI_GGUF_CHECKED
} rfi_gguf_use; /* CHECKED: read by a separate name */
typedef struct rfi_gguf_hyperparameter {
  const char *key, *field; /* of the GGUF file after "ARCHITECTURE.", and of config.json */
  rfi_gguf_use use;
} rfi_gguf_hyperparameter;

const rfi_gguf_hyperparameter *rfi_gguf_hyperparameters(const rfi_gguf_architecture *a, size_t *n);

/* A change of a tensor's values by the reader; the writer undoes it. */
typedef enum rfi_gguf_change {
  RFI_GGUF_AS_IS,
  RFI_GGUF_MINUS_ONE,
  RFI_GGUF_INTERLEAVED,
  RFI_GGUF_TRANSPOSED
} rfi_gguf_change;
rfi_gguf_change rfi_gguf_change_of(const rfi_gguf_architecture *a, const char *name, int rank);

/* The GGUF name of a Hugging Face tensor; *expert: its part of the packed tensor, or -1. False: there is no such name.
 * g NULL: the names of a file that is written. */
bool rfi_gguf_translate(const rfi_gguf *g, const rfi_gguf_architecture *a, const char *name, char *out, size_t size,
                        int64_t *expert);

/* Llama 3's factors for the frequencies of RoPE: Meta's reference code, apply_scaling. */
double rfi_gguf_llama3_factor(double inverse_frequency, double factor, double low, double high, double original);

#endif
