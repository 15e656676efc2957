// SPDX-License-Identifier: Apache-2.0
//
// Asks a fine-tuned model one question and prints its answer while it is generated: chat RUN QUESTION
#include <cstdio>
#include <memory>
#include <refrain/refrain.h>
#include <stdexcept>
#include <string>

static void check(rfr_status status) {
  if (status != RFR_OK) throw std::runtime_error(rfr_last_error()->message);
}

template <auto destroy> struct Destroy {
  template <typename Handle> void operator()(Handle *h) const { destroy(h); }
};
using Context = std::unique_ptr<rfr_ctx, Destroy<rfr_ctx_destroy>>;
using Run = std::unique_ptr<rfr_run, Destroy<rfr_run_close>>;
using Decoder = std::unique_ptr<rfr_decoder, Destroy<rfr_decoder_destroy>>;

struct Tokens : rfr_tokens {
  Tokens() : rfr_tokens{} {}
  ~Tokens() { rfr_tokens_deinit(this); }
  Tokens(const Tokens &) = delete;
};

static std::string json(const std::string &text) { // as a JSON string
  std::string out = "\"";
  for (const unsigned char c : text) {
    char code[8];
    std::snprintf(code, sizeof code, c < 0x20 || c == '"' || c == '\\' ? "\\u%04x" : "%c", c);
    out += code;
  }
  return out + "\"";
}

static void print(const char *text, size_t n, void *) { std::fwrite(text, 1, n, stdout); }

static int take(int32_t token, void *decoder) { // a result other than 0 ends the text
  return rfr_decoder_add(static_cast<rfr_decoder *>(decoder), token, print, nullptr) != RFR_OK;
}

int main(int argc, char **argv) try {
  if (argc != 3) return std::fprintf(stderr, "usage: chat RUN QUESTION\n"), 2;
  rfr_ctx *c = nullptr;
  check(rfr_ctx_create(nullptr, &c));
  const Context ctx(c);
  rfr_run_options o = rfr_run_options_default();
  o.programs = RFR_RUN_GENERATE; // reads the newest checkpoint
  rfr_run *r = nullptr;
  check(rfr_run_open(ctx.get(), nullptr, argv[1], &o, &r));
  const Run run(r);
  const rfr_tokenizer *tokenizer = rfr_run_tokenizer(r);
  const rfr_chat_template *chat = rfr_run_template(r);
  if (!tokenizer || !chat) throw std::runtime_error("the run has no tokenizer or no chat template");

  const std::string messages = "[{\"role\": \"user\", \"content\": " + json(argv[2]) + "}]";
  rfr_chat_options render = rfr_chat_options_default();
  render.add_generation_prompt = 1;
  Tokens prompt; // special tokens in the question stay text
  check(rfr_chat_encode(chat, tokenizer, messages.data(), messages.size(), &render, &prompt));

  int32_t stop[16];
  int n_stop = 0;
  check(rfr_chat_stops(chat, tokenizer, stop, 16, &n_stop));
  rfr_generate_options generate = rfr_generate_options_default();
  generate.tokens = 100;
  generate.temperature = 0;
  generate.stop = stop, generate.n_stop = n_stop;
  rfr_decoder *d = nullptr;
  check(rfr_decoder_create(tokenizer, 0, &d));
  const Decoder decoder(d);
  check(rfr_run_generate_tokens(r, prompt.ids, prompt.n, &generate, take, d));
  check(rfr_decoder_end(d, print, nullptr));
  std::puts("");
  return 0;
} catch (const std::exception &e) { return std::fprintf(stderr, "%s\n", e.what()), 1; }
