// SPDX-License-Identifier: Apache-2.0
//
// Training in a thread of a C++ program, with progress and cancel. The run's calls stay on one thread,
// except rfr_run_request_stop, which any thread may call.
#include <atomic>
#include <cstdio>
#include <fstream>
#include <refrain/train.h>
#include <stdlib.h> // mkdtemp is POSIX
#include <string>
#include <thread>

static const char *config = R"(refrain: 1
model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}
data: {train: ["text.txt"], sequence: 32, tokenizer: bytes}
batch: {tokens: 256, microbatch: 8}
optimizer: {name: adamw, lr: 3e-3}
run: {steps: 1000000, seed: 1}
)";
struct Progress { // written by the training thread
  std::atomic<bool> ended{false};
  std::atomic<long> step{0};
  std::atomic<double> loss{0.0};
};

static void on_event(const rfr_event *e, void *user) {
  auto *p = static_cast<Progress *>(user);
  if (e->kind == RFR_EVENT_END) p->ended = true;
  if (e->kind != RFR_EVENT_METRICS) return;
  p->loss = e->loss;
  p->step = static_cast<long>(e->step);
}

int main() {
  std::string folder = "train_thread.XXXXXX";
  if (!mkdtemp(&folder[0])) return 1;
  std::ofstream text(folder + "/text.txt");
  for (int i = 0; i < 500; i++) text << "the quick brown fox jumps over the lazy dog " << i % 10 << "\n";
  text.close();
  Progress progress;
  rfr_ctx *ctx = nullptr;
  rfr_run *run = nullptr;
  rfr_run_options options = rfr_run_options_default();
  options.config_folder = folder.c_str();
  options.on_event = on_event;
  options.event_user = &progress;
  rfr_status status = rfr_ctx_create(nullptr, &ctx);
  if (status == RFR_OK) status = rfr_run_open(ctx, config, (folder + "/run").c_str(), &options, &run);
  if (status != RFR_OK) return std::fprintf(stderr, "%s\n", rfr_last_error()->message), 1;

  std::thread worker([&] { status = rfr_run_train(run); });
  while (progress.step < 50 && !progress.ended) std::this_thread::yield(); // a window would paint its progress bar here
  rfr_run_request_stop(run);                                               // the cancel button
  worker.join();
  std::printf("stopped after %ld steps, loss %.2f, resumable: %s\n", progress.step.load(), progress.loss.load(),
              status == RFR_STOPPED ? "yes" : "no");
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
  return status == RFR_STOPPED && progress.loss < 5.0 ? 0 : 1;
}
