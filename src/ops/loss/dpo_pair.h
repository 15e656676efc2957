/* SPDX-License-Identifier: Apache-2.0
 *
 * One pair of direct preference optimization, shared by the CPU and the GPU: all in f64, because the sums of long
 * answers are hundreds of nats and their difference decides.
 */
#ifndef RFI_DPO_PAIR_H
#define RFI_DPO_PAIR_H

#include <math.h>

#ifdef __CUDACC__
#define RFI_DPO_CALL static __host__ __device__ __forceinline__
#else
#define RFI_DPO_CALL static inline
#endif

/* h of dpo_loss: by how many nats the model prefers the chosen answer more than the reference model does. */
RFI_DPO_CALL double rfi_dpo_gain(double chosen, double rejected, double reference) {
  return rejected - chosen - reference;
}

/* log(1 + e^x), without overflow */
RFI_DPO_CALL double rfi_dpo_softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(x > 0 ? -x : x)); }
RFI_DPO_CALL double rfi_dpo_sigmoid(double x) { return x > 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x)); }

RFI_DPO_CALL double rfi_dpo_loss(double z, double smoothing) {
  return (1 - smoothing) * rfi_dpo_softplus(-z) + smoothing * rfi_dpo_softplus(z);
}
/* d loss / d z */
RFI_DPO_CALL double rfi_dpo_slope(double z, double smoothing) {
  return smoothing * rfi_dpo_sigmoid(z) - (1 - smoothing) * rfi_dpo_sigmoid(-z);
}

#endif
