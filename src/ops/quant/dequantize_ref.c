/* SPDX-License-Identifier: Apache-2.0
 *
 * dequantize as its formula. Every operation rounds to f32, so the reference determines every bit.
 */
#include "ops/quant/formats.h"
#include "support/op_case.h"

static const float nf4[16] = {
#include "ops/quant/nf4.def"
};
static const float dynamic_signed[256] = {
#include "ops/quant/dynamic_signed.def"
};
static const float dynamic_unsigned[256] = {
#include "ops/quant/dynamic_unsigned.def"
};

static rfi_quant_layout layout_of(const rfi_call *call) {
  const rfr_shape *s = &call->attr[2].s;
  return rfi_quant_layout_for((rfr_quant)call->attr[0].i, s->rank, s->dim);
}

/* Writes finite scales, because random bytes could be NaN or infinite. Half of the numbers of fp8 get a sign. */
RFT_OPERANDS(dequantize) {
  const rfi_quant_layout l = layout_of(call);
  uint8_t *x = call->in[0].data;
  const int64_t at = l.nested_at ? l.nested_at : l.scales_at;
  for (int64_t i = at; i + 4 <= l.bytes; i += 4) {
    const float scale = 0.1f + (float)x[i] / 64;
    memcpy(x + i, &scale, sizeof scale);
  }
  for (int64_t i = 0; i < l.n && call->attr[0].i == RFR_QUANT_FP8; i += 2) x[i] |= 0x80;
}

static float f32_at(const uint8_t *x, int64_t at, int64_t i) {
  float y;
  memcpy(&y, x + at + 4 * i, sizeof y);
  return y;
}

RFT_REF(dequantize) {
  const rfr_quant format = (rfr_quant)call->attr[0].i;
  const rfi_quant_layout l = layout_of(call);
  const uint8_t *x = call->in[0].data;
  double *y = call->out[0].data;
  for (int64_t i = 0; i < l.n; i++) {
    const int64_t b = i / l.block;
    float scale, number;
    if (format == RFR_QUANT_NF4) {
      const volatile float product = dynamic_signed[x[l.scales_at + b]] * f32_at(x, l.nested_at, b / RFI_NESTED);
      scale = product + f32_at(x, l.nested_at, (l.scales + RFI_NESTED - 1) / RFI_NESTED);
      number = nf4[i % 2 ? x[i / 2] & 15 : x[i / 2] >> 4];
    } else {
      scale = f32_at(x, l.scales_at, b);
      number = format == RFR_QUANT_INT8       ? (float)(int8_t)x[i]
               : format == RFR_QUANT_FP8      ? (float)rfr_float_from_bits(RFR_E4M3, x[i])
               : format == RFR_QUANT_DYNAMIC8 ? dynamic_signed[x[i]]
                                              : dynamic_unsigned[x[i]];
    }
    const float value = number * scale;
    y[i] = format == RFR_QUANT_INT8 ? value * RFI_INT8_STEP : value;
  }
}
RFT_CASES(dequantize) = {
    "dequantize(b[72]<256) format=1 to=f shape=[7,13]",
    "dequantize(b[13596]<256) format=1 to=f shape=[3,131,67]",
    "dequantize(b[40]<256) format=1 to=f shape=[1]",
    "dequantize(b[4]<256) format=1 to=f shape=[0,5]",
    "dequantize(b[124]<256) format=2 to=f shape=[7,13]",
    "dequantize(b[34908]<256) format=2 to=f shape=[67,517]",
    "dequantize(b[0]<256) format=2 to=f shape=[0,4]",
    "dequantize(b[100]<127) format=3 to=f shape=[7,13]",
    "dequantize(b[26348]<127) format=3 to=f shape=[3,131,67]",
    "dequantize(b[34644]<127) format=3 to=f shape=[67,517]",
    "dequantize(b[20]<127) format=3 to=f shape=[1]",
    "dequantize(b[0]<127) format=3 to=f shape=[0,4]",
    "dequantize(b[100]<256) format=4 to=f shape=[91]",
    "dequantize(b[20332]<256) format=4 to=f shape=[1,20003]",
    "dequantize(b[604]<256) format=5 to=f shape=[19,31]",
    NULL,
};
