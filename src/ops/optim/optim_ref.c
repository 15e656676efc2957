/* SPDX-License-Identifier: Apache-2.0
 *
 * Reference kernels and cases of the optimizer.
 */
#include <math.h>
#include <string.h>

#include "core/rng.h"
#include "support/op_case.h"

RFT_REF(lr_schedule) {
  const rfi_attr *a = call->attr;
  const int64_t *steps = call->in[1].data;
  int64_t n = ((int64_t *)call->in[0].data)[1], warmup = a[3].i, total = a[4].i, decay = a[5].i;
  if (steps) n = ((int64_t *)call->in[0].data)[0], warmup = steps[0], total = steps[2], decay = total - steps[1];
  double base = a[1].f, min = a[2].f, lr;
  if (n < warmup) {
    lr = base * (double)(n + 1) / (double)warmup;
  } else if (a[0].i == RFR_LR_CONSTANT) {
    lr = base;
  } else if (n >= total) {
    lr = min;
  } else if (a[0].i == RFR_LR_LINEAR) {
    lr = base + (min - base) * (double)(n - warmup) / (double)(total - warmup);
  } else if (a[0].i == RFR_LR_COSINE) {
    lr = min + (base - min) * 0.5 * (1 + cos(acos(-1.0) * (double)(n - warmup) / (double)(total - warmup)));
  } else {
    double into = (double)(n - (total - decay));
    lr = into < 0 ? base : base + (min - base) * into / (double)decay;
  }
  *(double *)call->out[0].data = lr;
}
RFT_CASES(lr_schedule) = {
    "lr_schedule(I[4]=3,2,1,1) kind=0 base=0.001 min=0 warmup=7 total=0 decay=0",
    "lr_schedule(I[4]=900,900,1,0) kind=0 base=0.001 min=0.1 warmup=7 total=10 decay=0",
    "lr_schedule(I[4]=41,37,1,4) kind=1 base=0.003 min=0.0002 warmup=5 total=101 decay=0",
    "lr_schedule(I[4]=37,37,1,0) kind=2 base=0.003 min=0.0002 warmup=5 total=101 decay=0",
    "lr_schedule(I[4]=80,79,1,1) kind=3 base=0.003 min=0.0002 warmup=5 total=101 decay=20",
    "lr_schedule(I[4]=90,90,1,0) kind=3 base=0.003 min=0.0002 warmup=5 total=101 decay=20",
    "lr_schedule(I[4]=2000,1999,1,1) kind=2 base=0.003 min=0.0002 warmup=0 total=101 decay=0",
    "lr_schedule(I[4]=52,37,1,15, I[3]=5,40,60) kind=3 base=0.003 min=0.0002 warmup=9 total=101 decay=20",
    "lr_schedule(I[4]=59,59,1,0, I[3]=5,-7,60) kind=3 base=0.003 min=0.0002 warmup=9 total=101 decay=20",
    "lr_schedule(I[4]=3,1,1,2, I[3]=5,40,60) kind=0 base=0.003 min=0.0002 warmup=9 total=101 decay=20",
    "lr_schedule(I[4]=77,77,1,0, I[3]=5,9223372036854775807,9223372036854775807) kind=3 base=0.003 min=0.0002 "
    "warmup=9 total=101 decay=20",
    NULL,
};

RFT_REF(grad_norm) {
  double sum = 0;
  int32_t *zeros = call->out[2].data;
  for (int k = 1; k < call->n_in; k++) {
    bool zero = true;
    for (int64_t i = 0; i < rfi_count(&call->in[k].type); i++) {
      double g = ((double *)call->in[k].data)[i];
      sum += g * g;
      zero = zero && g == 0;
    }
    if (zeros && zeros[k - 1] >= 0) zeros[k - 1] = zero ? zeros[k - 1] + 1 : -1;
  }
  if (call->out[0].data) *(double *)call->out[0].data = sqrt(sum);
  if (call->out[1].data) *(int32_t *)call->out[1].data = !isfinite(sqrt(sum));
}
RFT_CASES(grad_norm) = {
    "grad_norm(_, f[7,13], f[31])",
    "grad_norm(_, F[67,1031], f[1], f[2049], F[0,3])",
    "grad_norm(_, f[1])",
    "grad_norm(_, f[0])",
    "grad_norm(_, f[5], F[3]=inf)",
    "grad_norm(i[5]=0,0,-1,7,8, f[3]=0, f[2049], f[5]=0, f[1031]=0, f[2]=nan)",
    "grad_norm(i[3]=4,9,3, f[7,13]=1e-30, F[0,3], F[3]=1e-40)",
    NULL,
};

RFT_REF(grad_squares) {
  double *squares = call->out[0].data;
  for (int k = 0; k < call->n_in; k++) {
    squares[k] = 0;
    for (int64_t i = 0; i < rfi_count(&call->in[k].type); i++)
      squares[k] += ((double *)call->in[k].data)[i] * ((double *)call->in[k].data)[i];
  }
}
RFT_CASES(grad_squares) = {
    "grad_squares(f[7,13], f[31])",
    "grad_squares(F[67,1031], f[1], f[2049], F[0,3])",
    "grad_squares(f[5]=0, f[3])",
    "grad_squares(f[17,1031])",
    NULL,
};

RFT_REF(norm_of_squares) {
  const int64_t ranks = call->attr[0].i, n = call->in[1].type.shape[0] / ranks;
  const double *squares = call->in[1].data;
  int32_t *zeros = call->out[2].data;
  double sum = 0;
  for (int64_t k = 0; k < n; k++) {
    double own = 0;
    for (int64_t r = 0; r < ranks; r++) own += squares[r * n + k];
    if (zeros && zeros[k] >= 0) zeros[k] = own == 0 ? zeros[k] + 1 : -1;
    sum += own;
  }
  if (call->out[0].data) *(double *)call->out[0].data = sqrt(sum);
  if (call->out[1].data) *(int32_t *)call->out[1].data = !isfinite(sqrt(sum));
}
RFT_CASES(norm_of_squares) = {
    "norm_of_squares(_, D[6]=1,4,9,16,25,36) ranks=2",
    "norm_of_squares(i[3]=4,-1,0, D[6]=0,4,0,0,25,36) ranks=2",
    "norm_of_squares(i[2]=7,3, D[6]=0,2,0,5,0,0) ranks=3",
    "norm_of_squares(_, D[1]=0) ranks=1",
    NULL,
};

RFT_REF(clip_scale) {
  double norm = *(double *)call->in[0].data, max = call->attr[0].f, scale = max / (norm + 1e-6);
  *(double *)call->out[0].data = max == 0 || scale > 1 ? 1 : scale;
}
RFT_CASES(clip_scale) = {
    "clip_scale(F[1]=3.7) max=1",
    "clip_scale(F[1]=0.25) max=1",
    "clip_scale(F[1]=0) max=0.5",
    "clip_scale(F[1]=9) max=0",
    NULL,
};

/* x as bf16 by the draw of element i; x itself without draws. */
static double drawn(double x, const rfi_attr *draws, const int64_t *step, int64_t i) {
  const float f = (float)x;
  uint32_t bits;
  if (draws[0].i == 0) return x;
  const uint64_t at = (uint64_t)(draws[1].i + i);
  const uint64_t key = rfi_stream_key((uint64_t)step[2], 0x726F756E64696E67u);
  const uint32_t word = rfi_draw4(key, at / 8, (uint32_t)draws[0].i, 0, (uint64_t)step[0]).v[at % 8 / 2];
  memcpy(&bits, &f, sizeof bits);
  bits += at % 2 ? word >> 16 : word & 0xFFFFu;
  return (double)rfr_float_from_bits(RFR_BF16, (uint16_t)(bits >> 16));
}

RFT_REF(adamw) {
  double *w = call->in[0].data, *m = call->in[2].data, *v = call->in[3].data, *master = call->in[4].data;
  const double *g = call->in[1].data, *clip = call->in[6].data;
  double beta1 = call->attr[0].f, beta2 = call->attr[1].f, eps = call->attr[2].f, decay = call->attr[3].f;
  double lr = *(double *)call->in[5].data * call->attr[4].f, t = (double)((int64_t *)call->in[8].data)[1] + 1;
  if (call->in[7].data && *(int32_t *)call->in[7].data) return;
  for (int64_t i = 0; i < rfi_count(&call->in[0].type); i++) {
    double x = clip ? g[i] * *clip : g[i], old = master ? master[i] : w[i];
    m[i] = beta1 * m[i] + (1 - beta1) * x;
    v[i] = beta2 * v[i] + (1 - beta2) * x * x;
    double mean = m[i] / (1 - pow(beta1, t)), square = v[i] / (1 - pow(beta2, t));
    w[i] = old - lr * (mean / (sqrt(square) + eps) + decay * old);
    if (master) master[i] = w[i];
    w[i] = drawn(w[i], &call->attr[5], call->in[8].data, i);
  }
}
RFT_CASES(adamw) = {
    "adamw(f[7,13], f[7,13], F[7,13], F[7,13]>0, _, F[1]=0.01, F[1]=0.5, i[1]=0, I[4]=5,4,1,1) beta1=0.9 beta2=0.95 "
    "eps=1e-08 decay=0.1 lr_scale=1",
    "adamw(f[1031], F[1031], f[1031], f[1031]>0, F[1031], F[1]=0.003, _, i[1]=0, I[4]=0,0,1,0) beta1=0.9 beta2=0.999 "
    "eps=1e-06 decay=0.01 lr_scale=0.5",
    "adamw(f[1], f[1], F[1], F[1]>0, F[1], F[1]=0.01, F[1]=1, _, I[4]=99,99,1,0) beta1=0.8 beta2=0.9 eps=1e-08 "
    "decay=0 lr_scale=1",
    "adamw(f[3,5,11], f[3,5,11], f[3,5,11], F[3,5,11]>0, F[3,5,11], F[1]=0.01, F[1]=1, i[1]=1, I[4]=9,7,1,2) beta1=0.9 "
    "beta2=0.95 eps=1e-08 decay=0.1 lr_scale=1",
    "adamw(f[67,521], f[67,521], F[67,521], F[67,521]>0, F[67,521], F[1]=0.01, F[1]=0.7, i[1]=0, I[4]=1000,998,1,2) "
    "beta1=0.9 beta2=0.95 eps=1e-08 decay=0.1 lr_scale=2",
    "adamw(h[67,521], f[67,521], f[67,521], f[67,521]>0, _, F[1]=0.01, F[1]=0.7, i[1]=0, I[4]=1000,998,77,2) "
    "beta1=0.9 beta2=0.95 eps=1e-08 decay=0.1 lr_scale=2 draws=9",
    "adamw(h[13,31], F[13,31], F[13,31], F[13,31]>0, _, F[1]=0.01, _, _, I[4]=7,6,3,1) beta1=0.9 beta2=0.95 eps=1e-08 "
    "decay=0.1 lr_scale=1 draws=16777215 first=1027",
    "adamw(f[0,4], f[0,4], F[0,4], F[0,4], _, F[1]=0.01, _, i[1]=0, I[4]=0,0,1,0) beta1=0.9 beta2=0.95 eps=1e-08 "
    "decay=0.1 lr_scale=1",
    NULL,
};

RFT_REF(sgd) {
  double *w = call->in[0].data, *b = call->in[2].data, *master = call->in[3].data;
  const double *g = call->in[1].data, *clip = call->in[5].data;
  double momentum = call->attr[0].f, decay = call->attr[1].f, lr = *(double *)call->in[4].data * call->attr[2].f;
  if (call->in[6].data && *(int32_t *)call->in[6].data) return;
  for (int64_t i = 0; i < rfi_count(&call->in[0].type); i++) {
    double x = clip ? g[i] * *clip : g[i], old = master ? master[i] : w[i];
    if (b) x = b[i] = momentum * b[i] + x;
    w[i] = old - lr * (x + decay * old);
    if (master) master[i] = w[i];
    w[i] = drawn(w[i], &call->attr[3], call->n_in > 7 ? call->in[7].data : NULL, i);
  }
}
RFT_CASES(sgd) = {
    "sgd(f[7,13], f[7,13], _, _, F[1]=0.1, _, _) momentum=0 decay=0 lr_scale=1",
    "sgd(f[1031], F[1031], F[1031], F[1031], F[1]=0.05, F[1]=0.25, i[1]=0) momentum=0.9 decay=0.01 lr_scale=0.5",
    "sgd(f[1], f[1], f[1], _, F[1]=0.1, F[1]=1, i[1]=0) momentum=0.9 decay=0 lr_scale=1",
    "sgd(f[67,521], f[67,521], f[67,521], F[67,521], F[1]=0.1, F[1]=0.5, i[1]=0) momentum=0.5 decay=0.1 lr_scale=3",
    "sgd(f[3,5,11], f[3,5,11], f[3,5,11], F[3,5,11], F[1]=0.1, _, i[1]=1) momentum=0.9 decay=0.1 lr_scale=1",
    "sgd(h[67,521], f[67,521], f[67,521], _, F[1]=0.1, F[1]=0.5, i[1]=0, I[4]=31,30,5,1) momentum=0.5 decay=0.1 "
    "lr_scale=3 draws=1 first=256",
    "sgd(h[7,13], f[7,13], _, _, F[1]=0.1, _, _, I[4]=0,0,1,0) momentum=0 decay=0 lr_scale=1 draws=2 first=5",
    "sgd(f[0], f[0], F[0], _, F[1]=0.1, _, i[1]=0) momentum=0.9 decay=0.1 lr_scale=1",
    NULL,
};

RFT_REF(muon_momentum) {
  const double *g = call->in[0].data, *clip = call->in[2].data, k = call->attr[0].f;
  double *b = call->in[1].data, *u = call->out[0].data;
  const bool skip = call->in[3].data && *(int32_t *)call->in[3].data;
  for (int64_t i = 0; i < rfi_count(&call->in[0].type); i++) {
    const double x = (1 - k) * (clip ? g[i] * *clip : g[i]), next = k * b[i] + x;
    u[i] = x + k * next;
    if (!skip) b[i] = next;
  }
}
RFT_CASES(muon_momentum) = {
    "muon_momentum(f[7,13], f[7,13], F[1]=0.5, i[1]=0) momentum=0.95 to=f32",
    "muon_momentum(F[3,67,31], f[3,67,31], _, i[1]=0) momentum=0.9 to=bf16",
    "muon_momentum(f[129,64], F[129,64], F[1]=0.25, i[1]=0) momentum=0.95 to=bf16",
    "muon_momentum(f[5,11], F[5,11], F[1]=1, i[1]=1) momentum=0.95 to=f32",
    "muon_momentum(f[1,3], F[1,3], _, _) momentum=0 to=f32",
    "muon_momentum(F[0,4], F[0,4], _, _) momentum=0.95 to=bf16",
    NULL,
};

RFT_REF(muon_polynomial) {
  const int r = call->in[0].type.rank;
  const int64_t m = call->in[0].type.shape[r - 1], batch = r == 3 ? call->in[0].type.shape[0] : 1;
  for (int64_t k = 0; k < batch; k++) {
    const double *g = (double *)call->in[0].data + k * m * m, *p = (double *)call->in[1].data + k * m * m;
    double *q = (double *)call->out[0].data + k * m * m, trace = 0, f = 1;
    for (int64_t i = 0; i < m; i++) trace += g[i * m + i];
    if (call->attr[3].i) f = 1 / (sqrt(trace) + 1e-7);
    for (int64_t i = 0; i < m * m; i++)
      q[i] = f * ((i / m == i % m ? call->attr[0].f : 0) + call->attr[1].f * f * f * g[i] +
                  call->attr[2].f * f * f * f * f * p[i]);
  }
}
RFT_CASES(muon_polynomial) = {
    "muon_polynomial(F[7,7], F[7,7]) a=3.4445 b=-4.775 c=2.0315 unit=0",
    "muon_polynomial(h[7,7], h[7,7]) a=3.4445 b=-4.775 c=2.0315 unit=0",
    "muon_polynomial(F[9,9]>0, F[9,9]>0) a=3.4445 b=-4.775 c=2.0315 unit=1",
    "muon_polynomial(h[9,9]>0, h[9,9]>0) a=3.4445 b=-4.775 c=2.0315 unit=1",
    "muon_polynomial(F[5,33,33]>0, F[5,33,33]) a=1.5 b=0.5 c=-0.25 unit=1",
    "muon_polynomial(h[5,33,33]>0, h[5,33,33]) a=1.5 b=0.5 c=-0.25 unit=1",
    "muon_polynomial(F[129,129]>0, F[129,129]) a=3.4445 b=-4.775 c=2.0315 unit=1",
    "muon_polynomial(h[129,129]>0, h[129,129]) a=3.4445 b=-4.775 c=2.0315 unit=1",
    "muon_polynomial(F[2,1,1]>0, F[2,1,1]) a=1 b=1 c=1 unit=0",
    "muon_polynomial(F[3,3]=0, F[3,3]=0) a=1 b=1 c=1 unit=1",
    "muon_polynomial(h[3,3]=0, h[3,3]=0) a=1 b=1 c=1 unit=1",
    "muon_polynomial(F[0,5,5], F[0,5,5]) a=1 b=1 c=1 unit=1",
    NULL,
};

RFT_REF(ema) {
  double *a = call->in[0].data;
  const double *w = call->in[1].data, n = (double)((int64_t *)call->in[3].data)[1] + 1 - (double)call->attr[1].i;
  double d = call->attr[0].f;
  if (call->attr[2].i) d = fmin(d, (1 + n) / (10 + n));
  if (call->in[2].data && *(int32_t *)call->in[2].data) return;
  for (int64_t i = 0; i < rfi_count(&call->in[0].type); i++) a[i] = n < 1 ? w[i] : d * a[i] + (1 - d) * w[i];
}
RFT_CASES(ema) = {
    "ema(F[7,13], f[7,13], i[1]=0, I[4]=5,4,1,1) decay=0.9 start=0 warmup=0",
    "ema(F[67,521], f[67,521], _, I[4]=5,4,1,1) decay=0.999 start=3 warmup=1",
    "ema(F[3,5,11], f[3,5,11], i[1]=1, I[4]=9,7,1,2) decay=0.99 start=0 warmup=0",
    "ema(F[1031], F[1031], i[1]=0, I[4]=9,7,1,2) decay=0.99 start=8 warmup=1",
    "ema(F[1,3], f[1,3], i[1]=0, I[4]=0,0,1,0) decay=0.5 start=0 warmup=1",
    "ema(F[0,4], f[0,4], i[1]=0, I[4]=0,0,1,0) decay=0.5 start=0 warmup=0",
    NULL,
};

RFT_REF(ema_weight) {
  for (int64_t i = 0; i < rfi_count(&call->in[0].type); i++)
    ((double *)call->out[0].data)[i] = ((double *)call->in[0].data)[i];
}
RFT_CASES(ema_weight) = {
    "ema_weight(F[7,13]) to=f",
    "ema_weight(F[67,1031]) to=bf16",
    "ema_weight(F[1,3]) to=f16",
    "ema_weight(F[0,5]) to=f",
    NULL,
};

static double scale_of(int32_t shift) { return pow(2, fmin(24, fmax(0, 16.0 + shift))); }

RFT_REF(loss_scale) {
  double *scale = call->out[0].data, *inverse = call->out[1].data;
  if (scale) *scale = scale_of(*(int32_t *)call->in[0].data);
  if (inverse) *inverse = 1 / scale_of(*(int32_t *)call->in[0].data);
}
RFT_CASES(loss_scale) = {"loss_scale(i[2]=0,0)",   "loss_scale(i[2]=-5,17)", "loss_scale(i[2]=8,1999)",
                         "loss_scale(i[2]=-99,3)", "loss_scale(i[2]=400,3)", NULL};

RFT_REF(loss_scale_end) {
  int32_t *state = call->out[0].data, good = state[1];
  double scale = scale_of(state[0]);
  const bool skip = *(int32_t *)call->in[1].data, twice = !skip && good + 1 >= call->attr[0].i;
  if (skip) scale /= 2;
  if (twice) scale *= 2;
  state[0] = (int32_t)fmin(8, fmax(-16, log2(scale) - 16));
  state[1] = skip || twice ? 0 : good + 1;
}
RFT_CASES(loss_scale_end) = {
    "loss_scale_end(i[2]=0,0, i[1]=0) every=2000",
    "loss_scale_end(i[2]=0,1999, i[1]=0) every=2000",
    "loss_scale_end(i[2]=3,1999, i[1]=1) every=2000",
    "loss_scale_end(i[2]=8,1, i[1]=0) every=2",
    "loss_scale_end(i[2]=-16,5, i[1]=1) every=9",
    "loss_scale_end(i[2]=-7,0, i[1]=0) every=1",
    NULL,
};

RFT_REF(skip_bad) {
  int32_t first = 0, value = 1, number = 0;
  for (int k = 1; k < call->n_in; k++)
    for (int64_t i = 0; i < call->in[k].type.shape[0]; i++) {
      const int32_t flag = ((int32_t *)call->in[k].data)[i];
      number++;
      if (flag && !first) first = number, value = flag;
    }
  if (call->out[0].data) *(int32_t *)call->out[0].data = first ? 1 : *(int32_t *)call->in[0].data;
  if (call->out[1].data) *(int32_t *)call->out[1].data = first;
  if (call->out[2].data) *(int32_t *)call->out[2].data = value - 1;
}
RFT_CASES(skip_bad) = {"skip_bad(i[1]=0)",
                       "skip_bad(i[1]=1, i[1]=0)",
                       "skip_bad(i[1]=0, i[1]=0, i[1]=5, i[1]=2)",
                       "skip_bad(i[1]=1, i[1]=3)",
                       "skip_bad(i[1]=0, i[1]=0, i[1]=0)",
                       "skip_bad(i[1]=0, i[3]=0,0,4, i[2]=0,9)",
                       "skip_bad(i[1]=0, i[40]<1, i[0]<3, i[2]=0,2)",
                       NULL};

RFT_REF(step_end) {
  int64_t *step = call->out[0].data;
  int32_t skip = *(int32_t *)call->in[1].data;
  step[0] += 1;
  step[skip ? 3 : 1] += 1;
}
RFT_CASES(step_end) = {
    "step_end(I[4]=0,0,1,0, i[1]=0)",
    "step_end(I[4]=0,0,1,0, i[1]=1)",
    "step_end(I[4]=1000000000007,999999999989,-5,18, i[1]=0)",
    "step_end(I[4]=77,70,9,7, i[1]=1)",
    NULL,
};
