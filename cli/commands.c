/* SPDX-License-Identifier: Apache-2.0
 *
 * The tables of commands and of their options. Every command has its own list of options, so an option may differ in
 * meaning, argument and help text between two commands. Rows that several commands share are macros.
 */
#include <limits.h>
#include <stddef.h>
#include <string.h>

#include "cli.h"

#define FIELD(name) offsetof(cli, name)
#define WORD(name) " " #name
#define SECOND_WORD(e, name) " " name
#define PROGRAM_WORD(bit, name) " " #name

/* NAME, ARGUMENT, CHOICES, kind, field, help */
#define HELP \
  { "help", NULL, NULL, CLI_FLAG, FIELD(help), "print this text" }
#define JSON                                                                                              \
  {                                                                                                       \
    "json", NULL, NULL, CLI_FLAG, FIELD(json),                                                            \
        "print one JSON object on standard output, an error as one object on standard error; no progress" \
  }
#define QUIET \
  { "quiet", NULL, NULL, CLI_FLAG, FIELD(quiet), "print no progress; warnings and errors remain" }
#define DEVICE                                                                               \
  {                                                                                          \
    "device", "NAME", "cpu cuda cuda:0 cuda:none auto", CLI_TEXT, FIELD(device),             \
        "where to run (REFRAIN_DEVICE, or cpu); cuda:none plans for a GPU without using one" \
  }
#define THREADS                                                                   \
  {                                                                               \
    "threads", "N", NULL, CLI_INTEGER, FIELD(threads),                            \
        "threads; 0: the cores that this process may use (REFRAIN_THREADS, or 0)" \
  }
#define SET                                                                                    \
  {                                                                                            \
    "set", "KEY=VALUE", NULL, CLI_LIST, FIELD(sets),                                           \
        "override one configuration key, as model.hidden_size=256; may be given several times" \
  }
#define DTYPE                                                     \
  {                                                               \
    "dtype", "TYPE", "f32 bf16 f16 auto", CLI_TEXT, FIELD(dtype), \
        "type of weights and activations: precision.dtype (auto)" \
  }
#define STEPS \
  { "steps", "N", NULL, CLI_INTEGER, FIELD(steps), "steps to time; 0: as many as a few seconds allow (0)" }
#define EAGER                                                                             \
  {                                                                                       \
    "eager", NULL, NULL, CLI_FLAG, FIELD(eager),                                          \
        "run op by op instead of replaying a captured step; results are bitwise the same" \
  }
#define PROGRAM \
  { "program", "NAME", "" RFR_RUN_PROGRAMS(PROGRAM_WORD), CLI_TEXT, FIELD(program), "program of the run (train)" }
#define SVG \
  { "svg", "FILE", NULL, CLI_TEXT, FIELD(svg), "write a picture; - is standard output" }

#define TEMPLATE                                                                                          \
  {"system", "TEXT", NULL, CLI_TEXT, FIELD(system), "system message (none)"}, {                           \
    "template", "NAME", NULL, CLI_TEXT, FIELD(template), "chat template: model, chatml or a file (model)" \
  }
#define EMA \
  { "ema", NULL, NULL, CLI_FLAG, FIELD(ema), "use the averaged weights of the checkpoint (optimizer.ema)" }
#define SAMPLING                                                                                               \
  {"tokens", "N", NULL, CLI_INTEGER, FIELD(tokens), "maximum number of tokens (256)"},                         \
      {"context",      "N",                                                                                    \
       NULL,           CLI_INTEGER,                                                                            \
       FIELD(context), "context length in tokens; 0: data.sequence of a RUN, for a MODEL at most 2048 (0)"},   \
      {"temperature",                                                                                          \
       "X",                                                                                                    \
       NULL,                                                                                                   \
       CLI_NUMBER,                                                                                             \
       FIELD(temperature),                                                                                     \
       "sampling temperature; 0 takes the most probable token (0.8)"},                                         \
      {"top-k", "K", NULL, CLI_INTEGER, FIELD(top_k), "sample from the K most probable tokens; 0: all (0)"},   \
      {"top-p",      "P",                                                                                      \
       NULL,         CLI_NUMBER,                                                                               \
       FIELD(top_p), "sample from the smallest set of most probable tokens whose probabilities sum to P (1)"}, \
      {"min-p",      "P",                                                                                      \
       NULL,         CLI_NUMBER,                                                                               \
       FIELD(min_p), "sample from tokens with at least P times the probability of the most probable one (0)"}, \
      {"repetition-penalty",                                                                                   \
       "X",                                                                                                    \
       NULL,                                                                                                   \
       CLI_NUMBER,                                                                                             \
       FIELD(penalty),                                                                                         \
       "divide the positive logits of tokens in the text by X, and multiply the negative ones (1)"},           \
      {"seed", "N", NULL, CLI_INTEGER, FIELD(seed), "seed of the sampling (0)"}, {                             \
    "stop", "TEXT", NULL, CLI_LIST, FIELD(stops), "end the text before TEXT; may be given several times"       \
  }

#define OPTIONS(...)     \
  (const cli_option[]) { \
    __VA_ARGS__, { 0 }   \
  }
#define ON_A_DEVICE DEVICE, THREADS, JSON, QUIET, HELP

static const cli_command commands[CLI_COMMAND_COUNT] = {
    [CLI_INDEX_train] =
        {"train", "CONFIG|RUN", 1, 1, "train a model",
         "CONFIG is a YAML file; the run is written to runs/CONFIG or to --out. With --resume, training "
         "continues from the newest checkpoint; then the operand may also be the folder of the run. Under mpirun, srun "
         "or torchrun each process is a rank.",
         "refrain train examples/demo.yaml --out runs/demo",
         OPTIONS(
             SET, {"out", "FOLDER", NULL, CLI_TEXT, FIELD(out), "folder of the run (runs/CONFIG)"},
             {"ranks", "N", NULL, CLI_INTEGER, FIELD(ranks),
              "train on N ranks of this machine: one GPU each, or processes of mpirun that share the cores"},
             {"resume", NULL, NULL, CLI_FLAG, FIELD(resume), "continue from the newest checkpoint of the run"},
             {"strict", NULL, NULL, CLI_FLAG, FIELD(strict),
              "refuse to resume with another machine, library or thread count, which may change results"},
             {"debug", NULL, NULL, CLI_FLAG, FIELD(debug), "guard every buffer and check every result for NaN; slow"},
             EAGER, ON_A_DEVICE)},
    [CLI_INDEX_finetune] =
        {"finetune", "MODEL DATA...", 2, INT_MAX, "train an adapter for a model on rows of text",
         "Trains a LoRA adapter of MODEL; the model's weights are frozen. DATA are JSONL files of conversations "
         "(messages), of prompts and completions, of instructions, or of texts. --set changes the configuration, such "
         "as --set adapter.rank=8 or --set run.epochs=1; --set adapter.type=none trains all weights. The configuration "
         "is written to config.yaml in the run's folder. `refrain train RUN --resume` continues the run. `refrain "
         "check MODEL DATA...` shows the memory and the tokens before training.",
         "refrain finetune SmolLM2-135M-Instruct chat.jsonl --out runs/chat",
         OPTIONS(SET, {"out", "FOLDER", NULL, CLI_TEXT, FIELD(out), "folder of the run (runs/DATA)"}, ON_A_DEVICE)},
    [CLI_INDEX_generate] =
        {"generate", "RUN|MODEL", 1, 1, "continue a text with a run's newest checkpoint or a model",
         "Writes the prompt and its continuation to standard output. The text ends at a stop token of the model, "
         "before a --stop text, or after --tokens. With --chat the prompt is a user's message, and only the answer is "
         "written. With --prompts, continues each prompt of a JSONL file and adds the members text and tokens to its "
         "object.",
         "refrain generate runs/demo --prompt '#include <'",
         OPTIONS(
             {"prompt", "TEXT", NULL, CLI_TEXT, FIELD(prompt), "text to continue; - reads standard input (a newline)"},
             {"prompts", "FILE", NULL, CLI_TEXT, FIELD(prompts),
              "JSONL of prompts: {\"prompt\": TEXT} or {\"messages\": [...]}; - is standard input"},
             {"batch", "N", NULL, CLI_INTEGER, FIELD(batch),
              "continue N of the --prompts at once, at most 64; each has its own KV cache (1)"},
             {"out", "FILE", NULL, CLI_TEXT, FIELD(out), "write the results of --prompts here (standard output)"},
             {"chat", NULL, NULL, CLI_FLAG, FIELD(chat), "the prompt is a message; answer with the chat template"},
             TEMPLATE, SAMPLING, EMA, SET, ON_A_DEVICE)},
    [CLI_INDEX_chat] =
        {"chat", "RUN|MODEL", 1, 1, "chat with a run's newest checkpoint or a model",
         "Each line of standard input is a message; a backslash at its end continues it on the next line. /reset "
         "starts a new conversation, /system TEXT starts one with a system message, /quit ends. At a terminal, Ctrl-C "
         "ends an answer. In a pipe, only the answers are written, one after the other.",
         "refrain chat runs/finetune --temperature 0.2", OPTIONS(TEMPLATE, SAMPLING, EMA, SET, ON_A_DEVICE)},
    [CLI_INDEX_eval] = {"eval", "RUN|MODEL", 1, 1, "evaluate a run's newest checkpoint, or a model",
                        "Evaluates on the run's held-out data. For a MODEL, name the data: --set "
                        "data.validation=FILES. Prints the mean loss in nats per token and, if the bytes of the data "
                        "are known, bits per byte.",
                        "refrain eval runs/demo --json", OPTIONS(EMA, SET, ON_A_DEVICE)},
    [CLI_INDEX_tokenize] =
        {"tokenize", "MODEL [FILE...]", 1, INT_MAX, "print the token ids of a text, or write a token file",
         "Tokenizes FILE or standard input and prints one id per line; the counts go to standard error. MODEL may also "
         "be a tokenizer.json. With --decode, reads ids and prints their text. With --out, writes the ids of text "
         "files and of JSONL files of texts into one token file, which data.train reads: each text is a document, with "
         "the tokens that training adds.",
         "refrain tokenize SmolLM2-135M-Instruct web.jsonl.zst --out web.bin",
         OPTIONS({"out", "FILE", NULL, CLI_TEXT, FIELD(out), "write a token file, X.bin"},
                 {"to", "FORMAT", "megatron llmc nanogpt", CLI_TEXT, FIELD(to),
                  "megatron: X.bin, and documents in X.idx; llmc: ids after a header; nanogpt: only ids (megatron)"},
                 {"decode", NULL, NULL, CLI_FLAG, FIELD(decode), "read token ids and print their text"},
                 {"special", NULL, NULL, CLI_FLAG, FIELD(special),
                  "add the tokens that the tokenizer adds around a text, such as BOS"},
                 THREADS, JSON, QUIET, HELP)},
    [CLI_INDEX_tokenizer_train] =
        {"tokenizer-train", "FILES...", 1, INT_MAX, "train a tokenizer on texts",
         "Trains byte-level BPE on text files and JSONL files of rows, and writes a folder with tokenizer.json and "
         "tokenizer_config.json. data.tokenizer takes this folder, and other libraries read it. The first special "
         "token ends a text. The result depends only on the texts and options.",
         "refrain tokenizer-train 'notes/**/*.txt' --vocab 8192 --out tokenizer",
         OPTIONS({"out", "FOLDER|FILE", NULL, CLI_TEXT, FIELD(out),
                  "folder to write, or X.json to write only tokenizer.json"},
                 {"vocab", "N", NULL, CLI_INTEGER, FIELD(vocab),
                  "number of tokens: 256 bytes, the special tokens and the merges (32768)"},
                 {"special", "TOKEN", NULL, CLI_LIST, FIELD(specials),
                  "a special token; may be given several times (<|endoftext|>)"},
                 {"pattern", "NAME", "gpt2 llama3 qwen2", CLI_TEXT, FIELD(pattern),
                  "how texts are split into words; llama3: as cl100k, up to three digits in a word; qwen2: one digit "
                  "(gpt2)"},
                 {"min-frequency", "N", NULL, CLI_INTEGER, FIELD(min_frequency),
                  "merge no pair that occurs less often (2)"},
                 {"max-bytes", "N", NULL, CLI_INTEGER, FIELD(max_bytes),
                  "train on the first part of each file, N bytes in all; 0: all text (0)"},
                 {"template", "NAME", NULL, CLI_TEXT, FIELD(template),
                  "chat template to write into the folder: chatml or a file (none)"},
                 THREADS, JSON, QUIET, HELP)},
    [CLI_INDEX_check] = {"check", "CONFIG|RUN|MODEL [DATA...]", 1, INT_MAX,
                         "print the resolved configuration, or the data for finetune",
                         "Reads the configuration and prints every key with its value and the source of the value: "
                         "a line of the file, --set, a default, or derived from other keys. With DATA, prints the rows "
                         "and tokens that `refrain finetune` would train on, a row as the model sees it, and the "
                         "memory of a step. Allocates no tensor.",
                         "refrain check examples/small.yaml --set model.hidden_size=256",
                         OPTIONS(SET,
                                 {"files", "SPLIT", "train validation", CLI_TEXT, FIELD(files),
                                  "list the data files of one split instead"},
                                 ON_A_DEVICE)},
    [CLI_INDEX_inspect] =
        {"inspect", "MODEL|FILE", 1, 1, "describe a model's folder or file, or an adapter",
         "Prints the kind of the file or folder, the description of the model, the metadata, unknown fields, and every "
         "tensor with its bytes, type and shape. FILE is a safetensors or GGUF file. Reads no weights.",
         "refrain inspect model.gguf --json", OPTIONS(JSON, HELP)},
    [CLI_INDEX_export] = {"export", "RUN|MODEL", 1, 1, "write a run's newest checkpoint or a model for other programs",
                          "Writes a model in the format of --to. The output must not exist; a failed export leaves no "
                          "output. An adapter is merged into the weights, except with --to peft and --to gguf-lora.",
                          "refrain export runs/chat --to gguf --dtype q8_0 --out chat.gguf",
                          OPTIONS({"to", "FORMAT", "hf gguf peft gguf-lora", CLI_TEXT, FIELD(to),
                                   "hf: a Hugging Face folder; gguf: one file; peft and gguf-lora: only the adapter"},
                                  {"out", "PATH", NULL, CLI_TEXT, FIELD(out), "folder or file to write"},
                                  {"dtype", "TYPE", "f32 bf16 f16 q8_0 q4_0", CLI_TEXT, FIELD(dtype),
                                   "type of the weights; q8_0 and q4_0 only for gguf (that of the model)"},
                                  EMA, THREADS, JSON, QUIET, HELP)},
    [CLI_INDEX_keys] = {"keys", "[WORD]", 0, 1, "print the table of configuration keys",
                        "Prints each key with its type, default, accepted values and meaning. With WORD, prints only "
                        "keys whose name or meaning contains it.",
                        "refrain keys recompute", OPTIONS(JSON, HELP)},
    [CLI_INDEX_plan] =
        {"plan", "CONFIG|RUN|MODEL", 1, 1, "print every buffer of a training step and the memory it needs",
         "Compiles the step and plans its memory without allocating it, so a model of any size can be "
         "planned on any machine. If the step does not fit, prints the bytes of each kind and the "
         "settings that need less, and exits with code 3.",
         "refrain plan examples/small.yaml --svg plan.svg",
         OPTIONS(SET, PROGRAM, {"all", NULL, NULL, CLI_FLAG, FIELD(all), "print every buffer on its own line"},
                 {"frontier", NULL, NULL, CLI_FLAG, FIELD(frontier),
                  "print the recompute frontier: memory against extra work"},
                 {"values", NULL, NULL, CLI_FLAG, FIELD(values), "print the names that run.watch can match"},
                 {"ranks", "N", NULL, CLI_INTEGER, FIELD(ranks),
                  "plan each distinct rank of a step over N ranks, at most 4096"},
                 {"costs", "FILE", NULL, CLI_TEXT, FIELD(costs),
                  "with --ranks: estimate the time of a step from a file written by profile --write-costs"},
                 {"link", "RATE", NULL, CLI_NUMBER, FIELD(link), "with --costs: GB per second that a rank sends (50)"},
                 SVG, ON_A_DEVICE)},
    [CLI_INDEX_trace] =
        {"trace", "CONFIG|RUN|MODEL", 1, 1, "print a program after a pass",
         "Prints the decisions of the pass as comments, then the program.",
         "refrain trace examples/small.yaml --after autodiff --phase wgrad",
         OPTIONS(
             SET, {"after", "PASS", "record" RFR_PASSES(WORD), CLI_TEXT, FIELD(after), "pass to print after (lower)"},
             {"phase", "PHASE", "" RFR_PHASES(SECOND_WORD), CLI_TEXT, FIELD(phase), "print the ops of one phase only"},
             PROGRAM, {"diff", NULL, NULL, CLI_FLAG, FIELD(diff), "print what the pass changed"},
             {"flat", NULL, NULL, CLI_FLAG, FIELD(flat), "print the form that rfr_trace_parse reads"}, ON_A_DEVICE)},
    [CLI_INDEX_schedule] =
        {"schedule", "", 0, 0, "simulate a pipeline schedule",
         "Prints the actions of each rank over time, the bubble, the microbatch slots and the peak "
         "bytes. Needs no device and no model. Takes one of --kind, --order and --file.",
         "refrain schedule --kind 1f1b --stages 4 --microbatches 8",
         OPTIONS({"kind", "KIND", "gpipe 1f1b interleaved zb-h1 zb-v", CLI_TEXT, FIELD(kind), "kind of schedule"},
                 {"stages", "P", NULL, CLI_INTEGER, FIELD(stages), "ranks of the pipeline, for --kind"},
                 {"microbatches", "M", NULL, CLI_INTEGER, FIELD(microbatches), "microbatches of a step, for --kind"},
                 {"chunks", "V", NULL, CLI_INTEGER, FIELD(chunks),
                  "stages of each rank; 0: 2 for interleaved and zb-v, else 1 (0)"},
                 {"group", "G", NULL, CLI_INTEGER, FIELD(group),
                  "microbatches that a rank runs in one stage before the next stage; 0: P (0)"},
                 {"order", "LIST", NULL, CLI_TEXT, FIELD(order),
                  "order list instead of a kind, as 1,2,-2,-1; a semicolon starts the next rank"},
                 {"layers", "COUNTS", NULL, CLI_TEXT, FIELD(layers),
                  "layers of each chunk of --order, as 3,2; a single count is for all chunks"},
                 {"file", "FILE", NULL, CLI_TEXT, FIELD(file),
                  "actions instead of a kind, as 0F0 0B0, one line per rank; - is standard input"},
                 {"costs", "FILE", NULL, CLI_TEXT, FIELD(costs), "seconds and bytes of each stage, JSON or CSV"},
                 {"communication", NULL, NULL, CLI_FLAG, FIELD(communication), "add sends and receives"}, SVG, JSON,
                 HELP)},
    [CLI_INDEX_profile] = {"profile", "CONFIG|RUN|MODEL|NAME", 1, 1,
                           "time every op of a training step on random tokens",
                           "Prints the time of each op. NAME is a benchmark: a built-in configuration, or small. "
                           "`refrain bench` lists them.",
                           "refrain profile examples/small.yaml --trace step.json",
                           OPTIONS(SET, DTYPE, STEPS,
                                   {"trace", "FILE", NULL, CLI_TEXT, FIELD(trace),
                                    "write one step's ops as JSON for Perfetto or Chrome"},
                                   {"write-costs", "FILE", NULL, CLI_TEXT, FIELD(write_costs),
                                    "write the costs of a layer as JSON, for schedule --costs and plan --costs; with "
                                    "--ranks those of each stage"},
                                   {"ranks", "N", NULL, CLI_INTEGER, FIELD(ranks),
                                    "time the step of N ranks, and the stages of a pipeline, instead of ops"},
                                   ON_A_DEVICE)},
    [CLI_INDEX_report] =
        {"report", "RUN...", 1, INT_MAX, "write runs as one page for a browser",
         "Reads the folders of the runs, also while they are in progress, and writes one HTML file that needs no "
         "network. It has the curves of all runs, the expert load, the arena of the step, the ops under the roofline, "
         "samples, and the configurations with their differences. With --follow, serves the page to browsers of this "
         "machine until Ctrl-C; the page then shows new steps as they are logged.",
         "refrain report runs/first runs/second --out report.html",
         OPTIONS({"out", "FILE", NULL, CLI_TEXT, FIELD(out), "file to write; - is standard output (report.html)"},
                 {"wandb", "FOLDER", NULL, CLI_TEXT, FIELD(wandb),
                  "write offline runs of Weights & Biases into FOLDER instead, for `wandb sync`"},
                 {"follow", NULL, NULL, CLI_FLAG, FIELD(follow), "serve the page at 127.0.0.1 instead"},
                 {"port", "N", NULL, CLI_INTEGER, FIELD(port), "with --follow: port; 0 takes a free one (0)"}, QUIET,
                 JSON, HELP)},
    [CLI_INDEX_diff] =
        {"diff", "RUN RUN", 2, 2, "print the differences of two runs",
         "Compares the configurations (with the source of each value), the curves (with the first step that differs) "
         "and the weights of the newest checkpoints, by tensor. Speed and machine are printed, but do not count as "
         "differences. The exit code is 0 if the runs are equal, 1 if they differ, 2 after an error.",
         "refrain diff runs/first runs/second",
         OPTIONS({"all", NULL, NULL, CLI_FLAG, FIELD(all), "print all tensors that differ, not only 20"}, JSON, HELP)},
    [CLI_INDEX_top] = {"top", "RUN", 1, 1, "watch a run at the terminal",
                       "Shows progress, losses, speed, experts, memory and the last events of a run, and redraws "
                       "every second until Ctrl-C. Without a terminal, prints one screen of 80 columns.",
                       "refrain top runs/demo",
                       OPTIONS({"once", NULL, NULL, CLI_FLAG, FIELD(once), "print one screen and end"}, HELP)},
    [CLI_INDEX_sweep] =
        {"sweep", "GRID", 1, 1, "train a configuration with a grid of values",
         "GRID is a YAML file with a configuration and lists of values for its keys. Trains one run for each "
         "combination, as `refrain train` does, in FOLDER/run-001 and so on, and ranks the runs by held-out loss. A "
         "run that fails is recorded and the others continue. With --resume, finished runs are skipped, stopped ones "
         "continue, and failed ones are retried.",
         "refrain sweep lr.yaml --out sweeps/lr --report lr.html",
         OPTIONS(SET, {"out", "FOLDER", NULL, CLI_TEXT, FIELD(out), "folder of the sweep (sweeps/GRID)"},
                 {"jobs", "N", NULL, CLI_INTEGER, FIELD(jobs), "runs at a time, which share the cores (1)"},
                 {"resume", NULL, NULL, CLI_FLAG, FIELD(resume), "continue the sweep in the folder"},
                 {"report", "FILE", NULL, CLI_TEXT, FIELD(report),
                  "write the best runs, at most 16, as one page for a browser"},
                 ON_A_DEVICE)},
    [CLI_INDEX_bench] = {"bench", "[NAME]", 0, 1, "time training steps and replays of built-in programs",
                         "Runs a benchmark and prints its times. Without NAME, runs every benchmark that suits a CPU.",
                         "refrain bench gpt2-124m --json", OPTIONS(SET, DTYPE, EAGER, STEPS, ON_A_DEVICE)},
    [CLI_INDEX_doctor] =
        {"doctor", "", 0, 0, "print what this machine and this build can use",
         "Lists the kernels, libraries and modules that were found, and what does not work without each missing one.",
         "refrain doctor", OPTIONS(DEVICE, THREADS, JSON, HELP)},
};

const cli_command *cli_command_at(int i) { return i >= 0 && i < CLI_COMMAND_COUNT ? &commands[i] : NULL; }
const char *cli_command_name(int command) { return commands[command].name; }

/* The words of operands. */
static const struct {
  const char *word, *meaning;
} operand_words[] = {
    {"CONFIG", "a YAML file"},
    {"RUN", "the folder of a run, or its config.yaml"},
    {"MODEL", "a Hugging Face folder, such as one checkpoint of a run, or a GGUF file"},
    {"DATA", "a JSONL file (.jsonl, .jsonl.gz, .jsonl.zst), or a pattern of such files"},
    {"GRID", "a YAML file of a sweep"},
    {"FILES", "text files and JSONL files, folders or patterns of them"},
};
enum { N_OPERAND_WORDS = sizeof operand_words / sizeof operand_words[0] };

const char *cli_operand_word(int i, const char **meaning) {
  if (i < 0 || i >= N_OPERAND_WORDS) return NULL;
  *meaning = operand_words[i].meaning;
  return operand_words[i].word;
}

bool cli_has_operand(const cli_command *command, const char *word) {
  const size_t n = strlen(word);
  for (const char *s = command->operands; *s; s += *s != '\0') {
    const size_t length = strcspn(s, "|[] .");
    if (length == n && strncmp(s, word, n) == 0) return true;
    s += length;
  }
  return false;
}
