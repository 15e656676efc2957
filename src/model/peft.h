/* SPDX-License-Identifier: Apache-2.0
 *
 * Folders of adapters in the format of the PEFT library: adapter_config.json and adapter_model.safetensors.
 */
#ifndef RFI_PEFT_H
#define RFI_PEFT_H

#include <jansson.h>
#include <stdbool.h>

#include "refrain/nn.h"
#include "refrain/tensor.h"

#define RFI_PEFT_CONFIG "adapter_config.json"
#define RFI_PEFT_WEIGHTS "adapter_model.safetensors"
enum { RFI_PEFT_NAME = 128 };

/* adapter_config.json of the model's adapter; `base` is the path of the base model, "" for none. A new reference; NULL
 * when out of memory. */
json_t *rfi_peft_config(const rfr_model_config *c, const char *base);
/* The name of an adapter's parameter in adapter_model.safetensors. `inner`: see peft.c; false but for experts. */
void rfi_peft_name(const char *parameter, bool inner, char out[RFI_PEFT_NAME]);
/* The tensor of parameter i of the model's list, of the adapter, in adapter_model.safetensors: its name and shape.
 * Experts are packed there as A (E r,in) and B (out,r E). */
void rfi_peft_tensor(const rfr_model_config *c, int i, char name[RFI_PEFT_NAME], rfr_type *type);
/* Copies a parameter of shape `type` between our order of elements and PEFT's: they differ in B of experts. `size`:
 * bytes of an element. */
void rfi_peft_order(const rfr_type *type, bool is_b, bool to_peft, size_t size, const void *from, void *to);

typedef struct rfi_peft rfi_peft;
/* Errors: adapter; json; safetensors; file.*. */
rfr_status rfi_peft_open(rfr_ctx *ctx, const char *folder, rfi_peft **out);
void rfi_peft_close(rfi_peft *p); /* accepts NULL */
/* Checks that adapter_config.json and the tensors agree on a module: `has_tensors` must equal what target_modules,
 * exclude_modules and layers_to_transform select or, for a packed parameter, target_parameters. `in_block`: all-linear
 * includes the module. Errors: adapter, with both sides. */
rfr_status rfi_peft_check_target(rfr_ctx *ctx, const json_t *config, const char *path, const char *module, bool packed,
                                 bool in_block, bool has_tensors);
/* Creates the adapter that the folder describes, for the model `c`, which has none. The tensors determine the targets.
 * Errors: adapter, with the field or tensor that is not supported or does not fit the model. */
rfr_status rfi_peft_adapter(const rfi_peft *p, const rfr_model_config *c, double dropout, rfr_adapter **out);
/* Checks that the tensor of parameter i is f32, unless it is missing. Errors: resume.mismatch. */
rfr_status rfi_peft_check_f32(const rfi_peft *p, const rfr_model_config *c, int i);
/* Reads the values of parameter i of the model's list, which belongs to the adapter, as f32, in our order. Errors:
 * adapter for a missing tensor or another shape; model.nonfinite; file.*. */
rfr_status rfi_peft_read(rfi_peft *p, const rfr_model_config *c, int i, float *data);

#endif
