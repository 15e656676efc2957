/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain doctor: what this machine and this build can use, and what does not work without each missing piece.
 */
#include <string.h>

#include "cli.h"

static void cpu_model(char *out, size_t size) {
  FILE *f = fopen("/proc/cpuinfo", "r");
  char line[256];
  snprintf(out, size, "unknown CPU");
  while (f && fgets(line, sizeof line, f)) {
    char *colon = strchr(line, ':');
    if (strncmp(line, "model name", 10) != 0 || !colon) continue;
    colon += 1 + strspn(colon + 1, " \t");
    snprintf(out, size, "%.*s", (int)strcspn(colon, "\n"), colon);
    break;
  }
  if (f) fclose(f);
}

const char *cli_device(const cli *c, char buf[160]) {
  char model[128];
  rfr_machine m;
  cpu_model(model, sizeof model);
  rfr_machine_describe(c->ctx, &m);
  if (strcmp(m.device, "cpu") != 0) {
    char gpu[256];
    rfr_cuda_describe(c->ctx, gpu, sizeof gpu);
    snprintf(buf, 160, "%s: %.*s", m.device, (int)strcspn(gpu, ","), gpu);
    return buf;
  }
  snprintf(buf, 160, "%s, %d thread%s", model, m.threads, m.threads == 1 ? "" : "s");
  return buf;
}

/* Prints the pieces that were found in one line, then one line per missing piece; as JSON all of them. */
static void put_pieces(rfr_ctx *ctx, json *j) {
  rfr_piece p;
  const char *before = "for GPUs     ";
  if (j) json_begin(j, "cuda_pieces", '[');
  for (int i = 0; rfr_cuda_piece(ctx, i, &p) == RFR_OK; i++) {
    if (j) {
      json_begin(j, NULL, '{');
      json_text(j, "name", p.name);
      json_text(j, "found", p.found);
      json_int(j, "missing", p.missing);
      json_text(j, "costs", p.costs);
      json_end(j, '}');
    } else if (p.found[0]) {
      printf("%s%s", before, p.found);
      before = ", ";
    }
  }
  if (j) json_end(j, ']');
  else if (*before == ',') putchar('\n');
  for (int i = 0; !j && rfr_cuda_piece(ctx, i, &p) == RFR_OK; i++)
    if (p.missing) printf("missing      %s: %s\n", p.name, p.costs);
}

rfr_status cli_doctor(cli *c) {
  char model[128];
  rfr_machine m;
  cpu_model(model, sizeof model);
  rfr_machine_describe(c->ctx, &m);
  char gpu[256];
  const bool has_gpu = rfr_cuda_describe(c->ctx, gpu, sizeof gpu) == RFR_OK;
  if (!has_gpu) snprintf(gpu, sizeof gpu, "%s", rfr_last_error()->message);
  double f32, bf16;
  rfr_status s = cli_peak(c->ctx, RFR_F32, &f32);
  if (s == RFR_OK) s = cli_peak(c->ctx, RFR_BF16, &bf16);
  if (s != RFR_OK) return s;
  if (c->json) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_text(&j, "version", rfr_version());
    json_text(&j, "cpu", model);
    json_int(&j, "threads", m.threads);
    json_text(&j, "isa", m.isa);
    json_int(&j, "amx", m.has_amx);
    json_text(&j, "matmul", m.matmul);
    json_int(&j, "matmul_library", m.matmul_library);
    json_text(&j, "best_dtype", rfr_dtype_name(m.best_dtype));
    json_int(&j, "has_cuda", has_gpu);
    json_text(&j, "cuda", gpu);
    put_pieces(c->ctx, &j);
    json_double(&j, "peak_f32", f32);
    json_double(&j, "peak_bf16", bf16);
    json_end(&j, '}');
    putchar('\n');
    return RFR_OK;
  }
  printf("refrain      %s\n", rfr_version());
  printf("CPU          %s\n", model);
  printf("threads      %d\n", m.threads);
  printf("kernels      %s (v2: SSE4, v3: AVX2, v4: AVX-512)\n", m.isa);
  printf("matrix units %s\n", m.has_amx ? "AMX" : "none");
  printf("GEMMs        %s, measured %.0f GFLOP/s in f32 and %.0f in bf16\n", m.matmul, f32 * 1e-9, bf16 * 1e-9);
  printf("dtype auto   %s\n", rfr_dtype_name(m.best_dtype));
  printf("GPU          %s\n", gpu);
  put_pieces(c->ctx, NULL);
  if (!m.matmul_library)
    printf(
        "missing      oneDNN: GEMMs run on the portable kernel, which does not use AMX. Refrain looks for the module\n"
        "             in %s; builds on a machine with oneDNN's headers (Debian: libdnnl-dev) have it.\n",
        m.module_path);
  return RFR_OK;
}
