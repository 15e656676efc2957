// SPDX-License-Identifier: Apache-2.0
//
// Fine-tunes a published model on conversations and exports the adapter: finetune MODEL ROWS.jsonl RUN EXPORT
//   MODEL   a Hugging Face folder or a GGUF file      RUN     the folder of the run, which must not exist
//   ROWS    one {"messages": [...]} per line          EXPORT  the folder of the adapter for the PEFT library
#include <stdio.h>
#include <stdlib.h>

#include <refrain/refrain.h>

static void check(rfr_status s) {
  if (s == RFR_OK) return;
  fprintf(stderr, "%s\n%s\n", rfr_last_error()->message, rfr_last_error()->next);
  exit(1);
}

static void on_event(const rfr_event *e, void *user) {
  (void)user;
  if (e->kind == RFR_EVENT_METRICS) printf("step %d of %d: loss %.4f\n", (int)e->step, (int)e->steps, e->loss);
  if (e->kind == RFR_EVENT_EVALUATION) printf("held-out loss %.4f\n", e->loss);
  if (e->kind == RFR_EVENT_WARNING) printf("warning: %s\n", e->message);
}

// A row as the model sees it: only tokens in [ ] are trained.
static void print_piece(const char *text, size_t n, int trained, void *user) {
  (void)user;
  printf(trained ? "[%.*s]" : "%.*s", (int)n, text);
}

int main(int argc, char **argv) {
  char config[4096];
  rfr_ctx *ctx;
  rfr_run *run;
  rfr_run_info info;
  rfr_run_options o = rfr_run_options_default();
  rfr_export_options to = rfr_export_options_default();
  if (argc != 5) return fprintf(stderr, "usage: finetune MODEL ROWS.jsonl RUN EXPORT\n"), 2;
  snprintf(config, sizeof config,
           "refrain: 1\n"
           "model: \"%s\"\n"
           "adapter: {type: lora, rank: 8, targets: [q_proj, v_proj]}\n"
           "data: {train: [\"%s\"], validation: 10%%, sequence: 64}\n"
           "batch: {tokens: 256, microbatch: 2}\n"
           "optimizer: {lr: 1e-3, clip: 1.0}\n"
           "run: {epochs: 3}\n",
           argv[1], argv[2]);
  o.on_event = on_event;
  to.format = "peft";
  check(rfr_ctx_create(NULL, &ctx));
  check(rfr_run_open(ctx, config, argv[3], &o, &run)); // reads the weights, compiles the steps
  rfr_run_get_info(run, &info);
  printf("%d rows, %d tokens, %d of them trained; %d parameters, %d trained\n", (int)info.train_rows,
         (int)info.train_tokens, (int)info.trained_tokens, (int)info.parameters, (int)info.trainable_parameters);
  check(rfr_run_data_row(run, 0, print_piece, NULL));
  puts("");
  check(rfr_run_train(run)); // evaluates and saves at its end; RFR_STOPPED after rfr_run_request_stop
  rfr_run_close(run);
  check(rfr_export(ctx, argv[3], argv[4], &to));
  printf("wrote %s\n", argv[4]);
  rfr_ctx_destroy(ctx);
  return 0;
}
