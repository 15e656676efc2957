/* SPDX-License-Identifier: Apache-2.0
 *
 * Reference and cases of dropout: each element's draw is computed separately.
 */
#include "core/rng.h"
#include "support/op_case.h"

RFT_REF(dropout) {
  const double *x = call->in[0].data;
  const int64_t *step = call->in[1].data;
  double *y = call->out[0].data, p = call->attr[0].f;
  uint64_t key = rfi_stream_key((uint64_t)step[2], (uint64_t)call->attr[2].i);
  const int32_t given = call->n_in > 2 && call->in[2].data ? *(const int32_t *)call->in[2].data : call->microbatch;
  uint32_t microbatch = given > 0 ? (uint32_t)given : 0;
  for (int64_t i = 0; i < rfi_count(&call->out[0].type); i++) {
    rfi_u32x4 draw = rfi_draw4(key, (uint64_t)i / 4, (uint32_t)call->attr[1].i, microbatch, (uint64_t)step[0]);
    y[i] = draw.v[i % 4] >= p * 4294967296.0 ? x[i] / (1 - p) : 0;
  }
}
RFT_CASES(dropout) = {"dropout(f[7,13], I[4]=3,2,77,0) p=0.3 site=2 stream=1",
                      "dropout(f[1,37], I[4]=0,0,5,0) @mb=3 p=0.1 site=0 stream=0",
                      "dropout(f[5,29], I[4]=4,0,5,0, i[1]=6) @mb=3 p=0.2 site=1 stream=0",
                      "dropout(f[0,3], I[4]=1,1,1,0) p=0.5 site=1 stream=2",
                      "dropout(f[3,5,1], I[4]=9,9,1,0) p=0 site=4 stream=3",
                      "dropout(f[41,811], I[4]=1000,2,77,0) @mb=1 p=0.25 site=7 stream=1",
                      NULL};
