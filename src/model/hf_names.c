/* SPDX-License-Identifier: Apache-2.0
 *
 * Names of the tensors of a model folder. A folder stores the weights of each expert as separate tensors.
 */
#include <stdio.h>
#include <string.h>

#include "model/hf.h"
#include "model/hf_families.h"

/* Points at ".mlp.experts." in the name of a packed expert weight (gate_up_proj or down_proj); NULL for other names. */
static const char *experts_of(const char *name) {
  const char *at = strstr(name, ".mlp.experts.");
  return at && strchr(at + strlen(".mlp.experts."), '.') ? NULL : at;
}

int rfi_hf_pieces(const char *name, const rfr_type *type) {
  const char *at = experts_of(name);
  if (!at) return 1;
  return (int)type->shape[0] * (strcmp(at, ".mlp.experts.gate_up_proj") == 0 ? 2 : 1);
}

void rfi_hf_piece(const rfr_model_config *c, const char *name, const rfr_type *type, int i, rfi_hf_tensor *out) {
  static const char *const names[2][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
  const char *at = experts_of(name), *gate = strstr(name, ".mlp.gate.weight");
  const char *block = rfi_hf_is_mixtral(c) ? "block_sparse_moe" : "mlp";
  *out = (rfi_hf_tensor){.rank = type->rank};
  memcpy(out->shape, type->shape, sizeof out->shape);
  if (!at) {
    if (gate) snprintf(out->name, sizeof out->name, "%.*s.%s.gate.weight", (int)(gate - name), name, block);
    else snprintf(out->name, sizeof out->name, "%s", name);
    return;
  }
  const bool up = rfi_hf_pieces(name, type) > type->shape[0];
  out->rank = 2;
  out->shape[0] = up ? type->shape[1] / 2 : type->shape[1];
  out->shape[1] = type->shape[2];
  snprintf(out->name, sizeof out->name, "%.*s.%s.experts.%d.%s.weight", (int)(at - name), name, block, up ? i / 2 : i,
           names[rfi_hf_is_mixtral(c)][up ? i % 2 : 2]);
}
