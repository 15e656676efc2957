/* SPDX-License-Identifier: Apache-2.0
 *
 * References and cases of the maps of parts, slot by slot.
 */
#include "support/op_case.h"

static int64_t sum(const int32_t *counts, int64_t n) {
  int64_t total = 0;
  for (int64_t i = 0; i < n; i++) total += counts[i] > 0 ? counts[i] : 0;
  return total;
}

RFT_REF(moe_parts) {
  const int64_t ranks = call->attr[0].i, capacity = call->attr[1].i, each = call->in[0].type.shape[0] / ranks;
  const int64_t slots = call->in[1].type.shape[0];
  const int32_t *splits = call->in[0].data, *order = call->in[1].data, *place = call->in[2].data;
  int32_t *part_order = call->out[0].data, *part_place = call->out[1].data, *need = call->out[2].data;
  int64_t most = 0;
  for (int64_t i = 0; part_order && i < ranks * capacity; i++) part_order[i] = -1;
  for (int64_t s = 0; part_place && s < slots; s++) part_place[s] = -1;
  for (int64_t r = 0; r < ranks; r++) {
    const int64_t first = sum(splits, r * each), rows = sum(splits + r * each, each);
    int64_t real = 0;
    for (int64_t i = 0; i < rows; i++) {
      if (first + i >= slots) break;
      real++;
      if (part_order && i < capacity) part_order[r * capacity + i] = order[first + i];
      for (int64_t s = 0; part_place && i < capacity && s < slots; s++)
        if (place[s] == first + i) part_place[s] = (int32_t)(r * capacity + i);
    }
    most = real > most ? real : most;
  }
  if (need) *need = most > capacity ? (int32_t)most : 0;
}
#define MAPS "i[6]=3,0,4,1,5,2, i[3,2]=1,3,5,0,2,4"
RFT_CASES(moe_parts) = {
    "moe_parts(i[4]=2,1,0,3, " MAPS ") ranks=2 capacity=6",
    "moe_parts(i[4]=4,1,0,1, " MAPS ") ranks=2 capacity=3",
    "moe_parts(i[4]=0,0,0,6, " MAPS ") ranks=4 capacity=5",
    "moe_parts(i[3]=2,1,1, i[6]=3,0,4,1,-1,-1, i[3,2]=1,3,-1,0,2,-1) ranks=3 capacity=2",
    "moe_parts(i[2]=-4,9, " MAPS ") ranks=2 capacity=7",
    "moe_parts(i[5]=1,1,1,1,2, " MAPS ") ranks=1 capacity=6",
    "moe_parts(i[2]=0, i[0]<1, i[0,2]<1) ranks=2 capacity=3",
    "moe_parts(i[2]=1,2, i[3]=0,1,2, i[1,3]=0,1,2) ranks=2 capacity=0",
    NULL,
};

RFT_REF(moe_part_experts) {
  const int64_t ranks = call->attr[0].i, capacity = call->attr[1].i, experts = call->in[0].type.shape[0] / ranks;
  const int32_t *counts = call->in[0].data;
  int32_t *index = call->out[0].data;
  for (int64_t i = 0; i < ranks * capacity; i++) {
    const int32_t *own = counts + i / capacity * experts;
    index[i] = -1;
    for (int64_t e = 0; e < experts; e++)
      if (i % capacity >= sum(own, e) && i % capacity < sum(own, e + 1)) index[i] = (int32_t)e;
  }
}
RFT_CASES(moe_part_experts) = {
    "moe_part_experts(i[6]=2,0,1,0,3,1) ranks=2 capacity=5",
    "moe_part_experts(i[6]=2,0,1,0,3,1) ranks=3 capacity=2",
    "moe_part_experts(i[4]=0) ranks=4 capacity=3",
    "moe_part_experts(i[3]=9,9,9) ranks=1 capacity=11",
    "moe_part_experts(i[2]=-1,2) ranks=1 capacity=3",
    "moe_part_experts(i[2]=1,2) ranks=2 capacity=0",
    NULL,
};
