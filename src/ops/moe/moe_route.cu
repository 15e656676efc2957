/* SPDX-License-Identifier: Apache-2.0
 *
 * Routing and its gradient on a GPU: a warp per token.
 *
 *   index[t] = the k experts of the highest scores, of equal ones the smaller index;  weight[t] = their scores
 *
 * Each compared score becomes a key, an integer in the same order, so that the maximum over a warp is one instruction.
 * The keys of up to 1024 experts are in registers, adjacent experts in one lane: each lane sorts its own once, and each
 * choice removes the first key of the first lane that has the best. For more experts, or for more than 32 choices, keys
 * are recomputed for each choice, and the next choice is the best one after the last. Up to 8 choices of up to 256
 * experts need at most eight lanes per token, and are sorted. A NaN is less than everything, so the chosen experts are
 * always k different ones. The scores of the chosen are recomputed from their logits, which are in the cache.
 */
#include <climits>

#include "ops/elementwise/map.cuh"
#include "ops/moe/route_rows.cuh"

enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES };
enum { K, SCORE, NORM, GROUPS, GROUP_K, SCALE };
static const unsigned ALL = 0xffffffffu;

/* ---- keys ---- */

enum { NO_KEY = 0, NAN_KEY = 1 }; /* numbers have larger keys, from that of -inf on */

static __device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f); /* +0 and -0 have equal keys */
  return x != x ? NAN_KEY : bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct choice {
  uint32_t key;
  int at;
};
static __device__ __forceinline__ bool comes_after(uint32_t key, int at, const choice &last) {
  return key < last.key || (key == last.key && at > last.at);
}
/* The maximum over all lanes; each lane gets it. */
static __device__ __forceinline__ choice best_of(const choice &mine) {
  choice best;
  best.key = __reduce_max_sync(ALL, mine.key);
  best.at = (int)__reduce_min_sync(ALL, mine.key == best.key ? (unsigned)mine.at : UINT_MAX);
  return best;
}
static __device__ __forceinline__ choice nothing_yet() { return {UINT_MAX, -1}; }
static __device__ __forceinline__ float value_of(uint32_t key) {
  return key == NAN_KEY ? NAN : __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/* ---- choosing a token's experts ---- */

struct route_args {
  const void *logits;
  const float *bias;
  float *weight;
  int32_t *index, *chosen; /* chosen: index, or workspace if index is unused */
  uint32_t *group_keys;    /* (T, groups) */
  int64_t tokens;
  int experts, k, score, norm, groups, group_k, wide;
  float scale;
};

/* A token's experts `first` ... `last`. V > 0: V experts per lane in registers; V = 0: any number of experts, in
 * memory. PLAIN: the logits themselves are compared. */
template <typename X, int V, bool PLAIN> struct token {
  const route_args &a;
  const rfi_route<X> &route;
  const uint32_t *groups; /* the token's group keys once the best groups are known; NULL: no limit */
  choice last_group;
  uint32_t key[V ? V : 1];
  int at[V ? V : 1];

  static __device__ __forceinline__ int place(int v) {
    const int lane = threadIdx.x % LANES;
    return V ? lane * V + v : v * LANES + lane;
  }
  __device__ __forceinline__ int n() const { return V ? V : (a.experts + LANES - 1) / LANES; }
  __device__ __forceinline__ uint32_t compute(int e, float logit) const {
    if (PLAIN) return key_of(logit);
    return key_of(route.score_of(logit) + (a.bias ? a.bias[e] : 0.0f));
  }
  __device__ __forceinline__ bool allowed(int e) const {
    if (!groups) return true;
    const int g = e / (a.experts / a.groups);
    return !comes_after(groups[g], g, last_group);
  }
  __device__ __forceinline__ choice of(int v) const {
    if (V) return {key[v], at[v]};
    const int e = place(v);
    return {e < a.experts && allowed(e) ? compute(e, route.logit(e)) : (uint32_t)NO_KEY, e};
  }
  __device__ __forceinline__ void limit() {
#pragma unroll
    for (int v = 0; v < V; v++)
      if (at[v] < a.experts && !allowed(at[v])) key[v] = NO_KEY;
  }
  /* The best of experts `first` ... `end` - 1 that comes after `last` in the order. */
  __device__ __forceinline__ choice next(int first, int end, const choice &last) const {
    choice best = {NO_KEY, INT_MAX};
#pragma unroll
    for (int v = 0; v < n(); v++) {
      const choice x = of(v);
      if (x.at >= first && x.at < end && x.key > best.key && comes_after(x.key, x.at, last)) best = x;
    }
    return best_of(best);
  }
  /* Sorts, best first. Swaps only adjacent keys, so equal ones stay in order. */
  __device__ __forceinline__ void sort() {
#pragma unroll
    for (int round = 0; round < V; round++) {
#pragma unroll
      for (int v = round % 2; v + 1 < V; v += 2) {
        const bool swap = key[v + 1] > key[v];
        const uint32_t better = swap ? key[v + 1] : key[v], worse = swap ? key[v] : key[v + 1];
        const int first = swap ? at[v + 1] : at[v], second = swap ? at[v] : at[v + 1];
        key[v] = better, key[v + 1] = worse, at[v] = first, at[v + 1] = second;
      }
    }
  }
  __device__ __forceinline__ void drop_first() {
#pragma unroll
    for (int v = 0; v + 1 < V; v++) key[v] = key[v + 1], at[v] = at[v + 1];
    if (V) key[V ? V - 1 : 0] = NO_KEY;
  }
};

/* Limits the choice to the best groups. A group's score is the sum of its best experts, in descending order. */
template <typename X, int V> static __device__ void limit_groups(token<X, V, false> &x, int64_t t) {
  const route_args &a = x.a;
  const int lane = threadIdx.x % LANES, size = a.experts / a.groups, best = a.k / a.group_k;
  uint32_t *keys = a.group_keys + t * a.groups;
  for (int g = 0; g < a.groups; g++) {
    float sum = 0;
    choice last = nothing_yet();
    for (int j = 0; j < best; j++) {
      last = x.next(g * size, (g + 1) * size, last);
      sum += value_of(last.key);
    }
    if (lane == g % LANES) keys[g] = key_of(sum);
  }
  __syncwarp();
  choice last = nothing_yet();
  for (int j = 0; j < a.group_k; j++) {
    choice mine = {NO_KEY, INT_MAX};
    for (int g = lane; g < a.groups; g += LANES)
      if (keys[g] > mine.key && comes_after(keys[g], g, last)) mine = {keys[g], g};
    last = best_of(mine);
  }
  x.groups = keys;
  x.last_group = last;
  x.limit();
}

template <typename X, int V, bool PLAIN>
static __global__ void __launch_bounds__(THREADS) route(const __grid_constant__ route_args a) {
  typedef token<X, V, PLAIN> token_type;
  constexpr bool FEW = V > 0;
  __shared__ int taken[WARPS][LANES]; /* by choice */
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const unsigned before = (1u << lane) - 1;
  const int64_t t = (int64_t)blockIdx.x * WARPS + warp;
  if (t >= a.tokens) return;
  if (V) taken[warp][lane] = 0;
  if (V) __syncwarp();
  rfi_route<X> route((const X *)a.logits + t * a.experts, a.experts, a.score);
  float logit[V ? V : 1];
  if (V && a.wide) {
#pragma unroll
    for (int v = 0; v < V; v += 4) {
      float four[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      const int e = token_type::place(v);
      if (e < a.experts) rfi_widen(rfi_load<X, 4>(route.logits + e), four);
#pragma unroll
      for (int u = 0; u < 4; u++) logit[V ? v + u : 0] = four[u];
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; v++) {
      const int e = token_type::place(v);
      logit[v] = e < a.experts ? route.logit(e) : -INFINITY;
    }
  }
  if (a.score == RFR_MOE_SOFTMAX && V == 0) route.softmax();
  if constexpr (V > 0 && !PLAIN) {
    float high = -INFINITY;
#pragma unroll
    for (int v = 0; v < V; v++) high = fmaxf(high, logit[v]);
    if (a.score == RFR_MOE_SOFTMAX) route.softmax_in(logit, rfi_warp_max(high));
  }
  token_type x = {a, route, NULL, {}, {}, {}};
#pragma unroll
  for (int v = 0; v < V; v++) {
    x.at[v] = x.place(v);
    x.key[v] = x.at[v] < a.experts ? x.compute(x.at[v], logit[v]) : (uint32_t)NO_KEY;
  }
  if constexpr (!PLAIN) {
    if (a.groups > 1) limit_groups(x, t);
  }
  if (V) x.sort();
  choice last = nothing_yet();
  const float high = V && PLAIN ? value_of(__reduce_max_sync(ALL, x.key[0])) : 0.0f;
  int mine = 0;
  for (int first = 0; first < a.k; first += LANES) {
    const int n = FEW || a.k - first < LANES ? a.k - first : LANES;
    for (int j = 0; j < n; j++) {
      if (V) { /* of the lanes that have the maximum, the first one writes its expert */
        const bool has = x.key[0] == __reduce_max_sync(ALL, x.key[0]);
        const unsigned who = __ballot_sync(ALL, has);
        if (has && !(who & before)) {
          taken[warp][j] = x.at[0];
          x.drop_first();
        }
      } else {
        last = x.next(0, a.experts, last);
        if (lane == j) mine = last.at;
      }
    }
    if (V) {
      __syncwarp();
      mine = taken[warp][lane];
    }
    if (lane < n && a.chosen) a.chosen[t * a.k + first + lane] = mine;
    if (FEW) break;
  }
  if (!a.weight) return;
  if constexpr (V > 0 && PLAIN) {
    float any = 0; /* NaN if a logit is NaN: then so are all scores */
#pragma unroll
    for (int v = 0; v < V; v++) any += logit[v];
    if (a.score == RFR_MOE_SOFTMAX && a.norm && !__any_sync(ALL, any != any))
      route.max = high; /* with norm, the common divisor cancels */
    else if (a.score == RFR_MOE_SOFTMAX) route.softmax_in(logit, high);
  }
  const rfi_chosen<X, FEW> chosen(route, a.chosen ? a.chosen + t * a.k : NULL, a.k, mine);
  float sum = 0;
  for (int j = lane; a.norm && j < a.k; j = chosen.next(j)) sum += chosen.score(j);
  if (a.norm) sum = RFI_ROUTE_TINY + rfi_warp_sum(sum);
  for (int j = lane; j < a.k; j = chosen.next(j)) {
    const float w = chosen.score(j);
    a.weight[t * a.k + j] = a.scale * (a.norm ? w / sum : w);
  }
}

/* ---- up to 8 choices by logits: eight lanes per token ---- */

enum { BEST = 8, SIDE = 8, TOKENS = LANES / SIDE, MOST_FEW = 256 };

static __device__ __forceinline__ void in_order(uint32_t &x, uint32_t &y) {
  const uint32_t better = max(x, y);
  y = min(x, y), x = better;
}
/* Sorts with Batcher's network, best first. */
static __device__ __forceinline__ void sort(uint32_t (&x)[BEST]) {
  in_order(x[0], x[1]), in_order(x[2], x[3]), in_order(x[4], x[5]), in_order(x[6], x[7]);
  in_order(x[0], x[2]), in_order(x[1], x[3]), in_order(x[4], x[6]), in_order(x[5], x[7]);
  in_order(x[1], x[2]), in_order(x[5], x[6]);
  in_order(x[0], x[4]), in_order(x[1], x[5]), in_order(x[2], x[6]), in_order(x[3], x[7]);
  in_order(x[2], x[4]), in_order(x[3], x[5]);
  in_order(x[1], x[2]), in_order(x[3], x[4]), in_order(x[5], x[6]);
}
/* Merges two sorted lists and keeps the best. */
static __device__ __forceinline__ void keep_best(uint32_t (&x)[BEST], const uint32_t (&y)[BEST]) {
#pragma unroll
  for (int i = 0; i < BEST; i++) x[i] = max(x[i], y[BEST - 1 - i]);
#pragma unroll
  for (int distance = BEST / 2; distance > 0; distance /= 2)
#pragma unroll
    for (int i = 0; i < BEST; i++)
      if ((i & distance) == 0) in_order(x[i], x[i + distance]);
}
/* Adds in the same order as a full warp would add its first eight lanes. */
static __device__ __forceinline__ float side_sum(float x) {
#pragma unroll
  for (int distance = SIDE / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL, x, distance);
  return x;
}

/* The maximum over a token's lanes; each gets it. */
static __device__ __forceinline__ choice side_best(choice best) {
#pragma unroll
  for (int distance = SIDE / 2; distance > 0; distance /= 2) {
    const choice other = {__shfl_xor_sync(ALL, best.key, distance), __shfl_xor_sync(ALL, best.at, distance)};
    if (other.key > best.key || (other.key == best.key && other.at < best.at)) best = other;
  }
  return best;
}

/* Eight choices are in lanes `first` ...: returns the one with rank `rank`. */
static __device__ __forceinline__ int at_rank(const choice &mine, int first, int rank) {
  int better = 0, at = 0;
#pragma unroll
  for (int i = 0; i < BEST; i++) {
    const uint32_t key = __shfl_sync(ALL, mine.key, first + i);
    const int other = __shfl_sync(ALL, mine.at, first + i);
    better += key > mine.key || (key == mine.key && other < mine.at);
  }
#pragma unroll
  for (int i = 0; i < BEST; i++) {
    const int other = __shfl_sync(ALL, mine.at, first + i);
    if (__shfl_sync(ALL, better, first + i) == rank) at = other;
  }
  return at;
}

/* V experts per lane. The sorted value has 32 bits: a key without its last bits, which are replaced by the expert, in
 * descending order. Chosen keys that differ only in the dropped bits are sorted afterwards. If other keys tie with the
 * last chosen one, or there is a NaN, a warp scans all experts for each choice. */
template <typename X, int V>
static __global__ void __launch_bounds__(THREADS, V > 16 ? 2 : 4) route_few(const __grid_constant__ route_args a) {
  constexpr uint32_t WHO = V * SIDE - 1;
  const int lane = threadIdx.x % LANES, side = lane % SIDE;
  const int64_t first = ((int64_t)blockIdx.x * WARPS + threadIdx.x / LANES) * TOKENS;
  if (first >= a.tokens) return;
  const int64_t t = min(first + lane / SIDE, a.tokens - 1); /* lanes without a token repeat the last one */
  const X *const logits = (const X *)a.logits + t * a.experts;
  const auto place = [&](int v) { return (v / 4 * SIDE + side) * 4 + v % 4; };
  float x[V];
#pragma unroll
  for (int v = 0; v < V; v++) x[v] = -INFINITY;
  if (a.wide) {
#pragma unroll
    for (int v = 0; v < V; v += 4)
      if (place(v) < a.experts) rfi_widen(rfi_load<X, 4>(logits + place(v)), *(float(*)[4]) & x[v]);
  } else {
#pragma unroll
    for (int v = 0; v < V; v++)
      if (place(v) < a.experts) x[v] = rfi_widen(logits[place(v)]);
  }
  uint32_t who[V], best[BEST], bits = 0;
  float any = 0; /* NaN if a logit is NaN */
#pragma unroll
  for (int v = 0; v < V; v++) {
    const uint32_t b = __float_as_uint(x[v] + 0.0f); /* +0 and -0 have equal keys */
    who[v] = ((b ^ ((uint32_t)((int32_t)b >> 31) | 0x80000000u)) & ~WHO) | (WHO - (uint32_t)place(v));
    bits |= b;
    any += x[v];
  }
#pragma unroll
  for (int v = 0; v < V; v += BEST) {
    uint32_t next[BEST];
#pragma unroll
    for (int i = 0; i < BEST; i++) next[i] = who[v + i];
    sort(next);
#pragma unroll
    for (int i = 0; v == 0 && i < BEST; i++) best[i] = next[i];
    if (v > 0) keep_best(best, next);
  }
#pragma unroll
  for (int distance = 1; distance < SIDE; distance *= 2) {
    uint32_t other[BEST];
#pragma unroll
    for (int i = 0; i < BEST; i++) other[i] = __shfl_xor_sync(ALL, best[i], distance);
    keep_best(best, other);
  }
  uint32_t own = best[0];
#pragma unroll
  for (int i = 1; i < BEST; i++) own = side == i ? best[i] : own;
  int mine = (int)(WHO - (own & WHO));
  bool unsure = any != any;
  if (__any_sync(ALL, (bits & WHO) != 0)) { /* otherwise the keys differ in the sorted bits, or not at all */
    const uint32_t last = best[BEST - 1], from = last & ~WHO, after = __shfl_down_sync(ALL, own, 1);
    const uint32_t worst = __shfl_sync(ALL, own, lane - side + a.k - 1); /* the last of the chosen */
    bool more = false;
#pragma unroll
    for (int v = 0; v < V; v++) more |= who[v] - from < last - from;
    unsure |= more && (worst ^ last) <= WHO;
    if (__any_sync(ALL, side + 1 < BEST && (own ^ after) <= WHO)) {
      const choice one = {mine < a.experts ? key_of(rfi_widen(logits[mine])) : (uint32_t)NO_KEY, mine};
      mine = at_rank(one, lane - side, side);
    }
  }
  if (__any_sync(ALL, unsure)) {
    choice last = nothing_yet();
    for (int j = 0; j < a.k; j++) {
      choice next = {NO_KEY, INT_MAX};
#pragma unroll
      for (int v = 0; v < V; v++) {
        const uint32_t key = place(v) < a.experts ? key_of(x[v]) : (uint32_t)NO_KEY;
        const bool left = (key < last.key) | ((key == last.key) & (place(v) > last.at));
        const bool better = left & (key > next.key);
        next.key = better ? key : next.key, next.at = better ? place(v) : next.at;
      }
      last = side_best(next);
      mine = side == j ? last.at : mine;
    }
  }
  const bool chosen = side < a.k;
  float w = chosen ? rfi_widen(logits[mine]) : -INFINITY;
  if (a.score == RFR_MOE_SIGMOID) {
    w = chosen ? rfi_route_sigmoid(w) : 0.0f;
  } else {
    const float high = __shfl_sync(ALL, w, lane - side);
    w = chosen ? expf(w - high) : 0.0f;
    if (a.score == RFR_MOE_SOFTMAX_CHOSEN) w *= 1 / side_sum(w);
    else if (__any_sync(ALL, !a.norm || any != any)) { /* with norm, the common divisor cancels */
      float all = 0;
#pragma unroll
      for (int v = 0; v < V; v++) all += expf(x[v] - high);
      all = side_sum(all);
      if (!a.norm || all != all) w *= 1 / all;
    }
  }
  if (a.norm) w /= RFI_ROUTE_TINY + side_sum(w);
  if (!chosen || first + lane / SIDE >= a.tokens) return;
  if (a.chosen) a.chosen[t * a.k + side] = mine;
  if (a.weight) a.weight[t * a.k + side] = a.scale * w;
}

/* Whether experts and choices fit into registers. */
static int is_small(const rfr_call *c) { return c->attr[K].i <= LANES && c->in[0].type.shape[1] <= 1024; }

/* Bytes for the keys of groups, and for the choices if a warp cannot keep them and index is unused. */
static size_t group_bytes(const rfr_call *c) {
  const int64_t groups = c->attr[GROUPS].i;
  return groups > 1 ? (size_t)rfi_blocks(c->in[0].type.shape[0] * groups * 4, 64) * 64 : 0;
}
static size_t route_workspace(const rfr_call *c) {
  return group_bytes(c) + (is_small(c) ? 0 : (size_t)(c->in[0].type.shape[0] * c->attr[K].i * 4));
}

template <typename X, bool PLAIN> static void launch_route(const rfr_call *c, const route_args &a) {
  const unsigned grid = (unsigned)rfi_blocks(a.tokens, WARPS);
  cudaStream_t stream = rfi_stream(c);
  if (PLAIN && a.k <= BEST && a.experts <= MOST_FEW) {
    const unsigned few = (unsigned)rfi_blocks(a.tokens, WARPS * TOKENS);
    if (a.experts <= 64) route_few<X, 8><<<few, THREADS, 0, stream>>>(a);
    else if (a.experts <= 128) route_few<X, 16><<<few, THREADS, 0, stream>>>(a);
    else route_few<X, 32><<<few, THREADS, 0, stream>>>(a);
  } else if (!is_small(c)) route<X, 0, PLAIN><<<grid, THREADS, 0, stream>>>(a);
  else if (a.experts <= 128) route<X, 4, PLAIN><<<grid, THREADS, 0, stream>>>(a);
  else if (a.experts <= 256) route<X, 8, PLAIN><<<grid, THREADS, 0, stream>>>(a);
  else if (a.experts <= 512) route<X, 16, PLAIN><<<grid, THREADS, 0, stream>>>(a);
  else route<X, 32, PLAIN><<<grid, THREADS, 0, stream>>>(a);
}

static rfr_status run_route(const rfr_call *c) {
  const rfr_arg *logits = &c->in[0];
  route_args a;
  a.logits = logits->data;
  a.bias = c->n_in > 1 ? (const float *)c->in[1].data : NULL;
  a.weight = (float *)c->out[0].data;
  a.index = (int32_t *)c->out[1].data;
  a.chosen = a.index || is_small(c) ? a.index : (int32_t *)((char *)c->workspace + group_bytes(c));
  a.group_keys = (uint32_t *)c->workspace;
  a.tokens = logits->type.shape[0];
  a.experts = (int)logits->type.shape[1];
  a.k = (int)c->attr[K].i, a.score = (int)c->attr[SCORE].i, a.norm = (int)c->attr[NORM].i;
  a.groups = (int)c->attr[GROUPS].i, a.group_k = (int)c->attr[GROUP_K].i;
  a.scale = (float)c->attr[SCALE].f;
  a.wide = a.experts % 4 == 0 && (uintptr_t)a.logits % 16 == 0;
  if (a.tokens == 0) return RFR_OK;
  const bool plain = !a.bias && a.groups == 1;
  RFI_WITH_FLOAT(logits->type.dtype, X, plain ? launch_route<X, true>(c, a) : launch_route<X, false>(c, a));
  return rfi_cuda_launched("moe_route");
}

/* ---- moe_route_bwd ---- */

struct bwd_args {
  const float *dweight;
  const void *logits;
  const int32_t *index;
  void *dlogits;
  int64_t tokens;
  int experts, k, score, norm;
  float scale;
};

enum { AT_ONCE = 4 }; /* experts per lane for which a warp's choices are broadcast once */

template <typename X, bool FEW>
static __global__ void __launch_bounds__(THREADS) route_bwd(const __grid_constant__ bwd_args a) {
  const int lane = threadIdx.x % LANES;
  const int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / LANES;
  if (t >= a.tokens) return;
  const float *dweight = a.dweight + t * a.k;
  X *dlogits = (X *)a.dlogits + t * a.experts;
  rfi_route<X> route((const X *)a.logits + t * a.experts, a.experts, a.score);
  if (a.score == RFR_MOE_SOFTMAX) route.softmax();
  const int32_t *index = a.index + t * a.k;
  const rfi_chosen<X, FEW> chosen(route, index, a.k, FEW && lane < a.k ? index[lane] : 0);
  float sum = 0, along = 0, dot = 0;
  for (int j = lane; j < a.k; j = chosen.next(j)) {
    const float r = chosen.score(j);
    sum += r;
    along += dweight[j] * r;
  }
  sum = RFI_ROUTE_TINY + rfi_warp_sum(sum);
  along = rfi_warp_sum(along) / sum;
  const auto dr = [&](int j) { return a.scale * (a.norm ? (dweight[j] - along) / sum : dweight[j]); };
  for (int j = lane; j < a.k; j = chosen.next(j)) dot += dr(j) * chosen.score(j);
  dot = rfi_warp_sum(dot);
  /* the contribution of the lane's choice to its expert */
  int to = -1;
  float gives = 0;
  const auto take = [&](int j) {
    const float r = j < a.k ? chosen.score(j) : 0.0f, d = j < a.k ? dr(j) : 0.0f;
    to = j < a.k ? chosen.expert(j) : -1;
    gives = a.score == RFR_MOE_SOFTMAX ? d * r : a.score == RFR_MOE_SIGMOID ? d * r * (1 - r) : (d - dot) * r;
  };
  take(lane);
  for (int e0 = 0; e0 < a.experts; e0 += LANES * AT_ONCE) {
    float d[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) d[u] = 0;
    for (int first = 0; first < a.k; first += LANES) {
      if (!FEW) take(first + lane);
      const int n = a.k - first < LANES ? a.k - first : LANES;
      for (int j = 0; j < n; j++) {
        const int e = __shfl_sync(ALL, to, j);
        const float x = __shfl_sync(ALL, gives, j);
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) d[u] += e0 + u * LANES + lane == e ? x : 0.0f;
      }
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const int e = e0 + u * LANES + lane;
      if (e >= a.experts) continue;
      if (a.score == RFR_MOE_SOFTMAX) d[u] -= dot * route.score(e);
      dlogits[e] = rfi_narrow<X>(d[u]);
    }
  }
}

static rfr_status run_route_bwd(const rfr_call *c) {
  const rfr_arg *logits = &c->in[1];
  bwd_args a;
  a.dweight = (const float *)c->in[0].data;
  a.logits = logits->data;
  a.index = (const int32_t *)c->in[2].data;
  a.dlogits = c->out[0].data;
  a.tokens = logits->type.shape[0];
  a.experts = (int)logits->type.shape[1];
  a.k = (int)c->in[0].type.shape[1];
  a.score = (int)c->attr[0].i, a.norm = (int)c->attr[1].i, a.scale = (float)c->attr[2].f;
  if (rfi_elements(logits) == 0) return RFR_OK;
  const unsigned grid = (unsigned)rfi_blocks(a.tokens, WARPS);
  if (a.k <= LANES) RFI_WITH_FLOAT(logits->type.dtype, X, route_bwd<X, true><<<grid, THREADS, 0, rfi_stream(c)>>>(a))
  else RFI_WITH_FLOAT(logits->type.dtype, X, route_bwd<X, false><<<grid, THREADS, 0, rfi_stream(c)>>>(a))
  return rfi_cuda_launched("moe_route_bwd");
}

/* Experts are counted in 32 bits. */
static int route_takes(const rfr_call *c) { return rfi_takes_floats(c) && c->in[0].type.shape[1] < INT_MAX / 2; }
static int route_bwd_takes(const rfr_call *c) { return rfi_takes_floats(c) && c->in[1].type.shape[1] < INT_MAX / 2; }

extern "C" const rfi_cuda_kernel RFI_CUDA(moe_route) = {run_route, route_workspace, route_takes};
extern "C" const rfi_cuda_kernel RFI_CUDA(moe_route_bwd) = {run_route_bwd, NULL, route_bwd_takes};
