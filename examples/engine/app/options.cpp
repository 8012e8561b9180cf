// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/options.hpp"

#include "engine/app/model_shapes.hpp"
#include "engine/app/policy_file.hpp"
#include "engine/error.hpp"

#include <uniprefill/core/version.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <functional>
#include <istream>
#include <limits>
#include <string_view>
#include <utility>

namespace engine {
namespace {

constexpr std::int32_t many = 1 << 30;
constexpr std::int32_t default_continuation = 64;
constexpr std::size_t max_prompt_bytes = std::size_t{256} << 20;

// ---------------------------------------------------------------------------------------------------------------------
// Values. The parser library only ever sees texts, so that all complaints have one form.

template <class Number>
Number whole_number(const std::string& option, const std::string& text, Number lowest, Number highest) {
    Number number{};
    const char* end = text.data() + text.size();
    const auto [stop, fault] = std::from_chars(text.data(), end, number);
    if (fault != std::errc{} || stop != end || number < lowest || number > highest) {
        const bool open =
            highest == std::numeric_limits<Number>::max() || highest == static_cast<Number>(many);
        throw error(option,
                    "a whole number " +
                        (open ? "of at least " + std::to_string(lowest)
                              : "from " + std::to_string(lowest) + " to " + std::to_string(highest)),
                    engine::quoted(text));
    }
    return number;
}

double real_number(const std::string& option, const std::string& text, bool (*fits)(double),
                   const char* expected) {
    double number = 0;
    const char* end = text.data() + text.size();
    const auto [stop, fault] = std::from_chars(text.data(), end, number);
    if (fault != std::errc{} || stop != end || !fits(number))
        throw error(option, expected, engine::quoted(text));
    return number;
}

double share(const std::string& option, const std::string& text) {
    // What rounds to no share at all in the selector's arithmetic is out of range too.
    const auto fits = [](double number) { return uniprefill::unit_fraction::from(number).value > 0; };
    return real_number(option, text, fits, "a number in (0, 1]");
}

template <class Enum>
Enum named(const std::string& option, const std::string& text, const char* expected) {
    Enum value{};
    if (!parse(text, value)) throw error(option, expected, engine::quoted(text));
    return value;
}

std::vector<policy_options::layer_share> layer_list(const std::string& option, const std::string& text) {
    std::vector<policy_options::layer_share> out;
    std::size_t start = 0;
    while (start <= text.size()) {
        const std::size_t end = std::min(text.find(',', start), text.size());
        const std::string entry = text.substr(start, end - start);
        const std::size_t colon = entry.find(':');
        policy_options::layer_share one;
        one.layer = whole_number<std::int32_t>(option, entry.substr(0, colon), 0, 4095);
        if (colon != std::string::npos) one.share = share(option, entry.substr(colon + 1));
        if (!out.empty() && out.back().layer >= one.layer) {
            throw error(option, "layers in rising order, each once",
                        std::to_string(one.layer) + " after " + std::to_string(out.back().layer));
        }
        out.push_back(one);
        start = end + 1;
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// The options of each command.

/// Options of one command with what each does to the result, applied once the whole line has been read:
/// `--help` wins over a bad value.
class option_table {
  public:
    explicit option_table(CLI::App* app)
        : app_(app) {}

    void group(const char* name) { group_ = name; }

    void value(const char* names, const char* type, const char* help,
               std::function<void(const std::string& option, const std::string& text)> apply) {
        CLI::Option* option = app_->add_option(names);
        option->description(help)->type_name(type)->expected(1)->group(group_);
        entries_.push_back({option, std::move(apply)});
    }

    /// The same for one value or more after the name.
    void values(const char* names, const char* type, const char* help,
                std::function<void(const std::string& option, const std::vector<std::string>& texts)> apply) {
        CLI::Option* option = app_->add_option(names);
        option->description(help)->type_name(type)->expected(1, 10000)->group(group_);
        entries_.push_back(
            {option, [option, apply = std::move(apply)](const std::string& name, const std::string&) {
                 apply(name, option->results());
             }});
    }

    void flag(const char* names, const char* help, bool& target) {
        app_->add_flag(names, target, help)->group(group_);
    }

    void apply() const {
        for (const entry& one : entries_) {
            if (one.option->count() == 0) continue;
            // The longest spelling, which is the one that help and error messages lead with.
            const std::string name = one.option->get_lnames().empty()
                                         ? one.option->get_name()
                                         : "--" + one.option->get_lnames().front();
            one.apply(name, one.option->results().back());
        }
    }

  private:
    struct entry {
        CLI::Option* option;
        std::function<void(const std::string&, const std::string&)> apply;
    };
    CLI::App* app_;
    std::string group_;
    std::vector<entry> entries_;
};

template <class Target>
auto whole(Target& target, std::int32_t lowest, std::int32_t highest) {
    return [&target, lowest, highest](const std::string& option, const std::string& text) {
        target = whole_number<std::int32_t>(option, text, lowest, highest);
    };
}

auto text_into(std::string& target, const char* expected) {
    return [&target, expected](const std::string& option, const std::string& text) {
        if (text.empty()) throw error(option, expected, "an empty text");
        target = text;
    };
}

void add_model(option_table& table, options& chosen, const char* names) {
    table.group("Model");
    table.value(names, "PATH", "GGUF file, architecture llama", text_into(chosen.model, "a path"));
}

void add_prompt(option_table& table, options& chosen) {
    table.group("Prompt");
    table.value("-t,--text", "TEXT", "the prompt itself",
                [&](const std::string&, const std::string& text) { chosen.text = text; });
    table.value("-f,--text-file", "FILE", "a file that holds it; - for standard input",
                [&](const std::string& option, const std::string& text) {
                    if (text.empty()) throw error(option, "a path", "an empty text");
                    chosen.text_file = text;
                });
}

void add_policy(option_table& table, policy_options& chosen) {
    using uniprefill::mass_scope;
    using uniprefill::rule_kind;
    table.group("Policy: what is dropped where (the model's own unless given)");
    table.value("--policy", "FILE", "policy file (JSON); the options below change it",
                text_into(chosen.file, "a path"));
    table.value("--layers", "LIST", "selecting layers instead of the policy's: 7,11,15 or 7:0.99,15:0.995",
                [&](const std::string& option, const std::string& text) {
                    chosen.layers = layer_list(option, text);
                });
    table.value(
        "--p", "SHARE", "of the mass (top-p), the blocks (fixed-ratio) or the largest block (max-fraction)",
        [&](const std::string& option, const std::string& text) { chosen.share = share(option, text); });
    table.value("--scope", "NAME", "free: forced rows don't count toward p; all: they do",
                [&](const std::string& option, const std::string& text) {
                    chosen.scope = named<mass_scope>(option, text, "free or all");
                });
    table.value("--selector", "NAME", "top-p, fixed-ratio, fixed-budget or max-fraction",
                [&](const std::string& option, const std::string& text) {
                    chosen.selector =
                        named<rule_kind>(option, text, "top-p, fixed-ratio, fixed-budget or max-fraction");
                });
    table.value("--budget", "ROWS", "rows kept by fixed-budget", whole(chosen.budget, 1, many));
    table.value("--min-kept", "ROWS", "keep at least so many", whole(chosen.min_kept, 0, many));
    table.value("--max-kept", "ROWS", "keep at most so many", whole(chosen.max_kept, 1, many));
    table.value("-G,--block-rows", "ROWS", "G, rows of a block, 8 to 256", whole(chosen.block_rows, 8, 256));
    table.value("-n,--observations", "ROWS", "n, last rows whose attention decides, 1 to 512",
                whole(chosen.observations, 1, 512));
    table.value("--sink", "ROWS", "first rows that are never dropped", whole(chosen.sink, 0, many));
    table.value("--tail", "ROWS", "last rows that are never dropped", whole(chosen.tail, 0, many));
    table.value("--min-length", "TOKENS", "leave shorter prompts alone", whole(chosen.min_length, 0, many));
    table.value("--span", "TOKENS", "decide by spans of so many positions; 0: the whole prompt at once",
                whole(chosen.span, 0, many));
    table.value("--propagation", "NAME",
                "cumulative: dropped for good; revive: scored again at each selecting layer",
                [&](const std::string& option, const std::string& text) {
                    chosen.propagation = named<uniprefill::propagation>(option, text, "cumulative or revive");
                });
    table.value("--lists", "SHARE",
                "each head reads the fewest blocks that hold so much of its mass; off: all keys",
                [&](const std::string& option, const std::string& text) {
                    chosen.list_share = text == "off" ? 0.0 : share(option, text);
                });
}

void add_device(option_table& table, options& chosen) {
    table.value("--device", "NAME", "cpu (the default) or cuda",
                [&](const std::string& option, const std::string& text) {
                    chosen.device = named<device_kind>(option, text, "cpu or cuda");
                });
}

void add_running(option_table& table, options& chosen, std::int32_t cores) {
    table.group("Running");
    table.value("-j,--threads", "N", "threads (all cores unless given)", whole(chosen.threads, 1, cores));
    table.value("--arithmetic", "NAME", "of matrix products: auto, fp32, bf16 or bf16x3",
                [&](const std::string& option, const std::string& text) {
                    chosen.arithmetic = named<arithmetic>(option, text, "auto, fp32, bf16 or bf16x3");
                });
}

void add_sampling(option_table& table, options& chosen, const char* tokens_help) {
    table.group("Generated text");
    table.value("--tokens", "N", tokens_help, whole(chosen.tokens, 0, many));
    table.value("--temperature", "T", "0 (the default) takes the likeliest token",
                [&](const std::string& option, const std::string& text) {
                    const auto fits = [](double number) { return std::isfinite(number) && number >= 0; };
                    chosen.sampling.temperature = real_number(option, text, fits, "a number of at least 0");
                });
    table.value("--top-k", "K", "draw from the K likeliest tokens; 0: from all",
                whole(chosen.sampling.top_k, 0, many));
    table.value("--top-p", "SHARE", "draw from the fewest tokens that hold this share of the probability",
                [&](const std::string& option, const std::string& text) {
                    chosen.sampling.top_p = share(option, text);
                });
    table.value("--seed", "N", "of the draw", [&](const std::string& option, const std::string& text) {
        chosen.sampling.seed =
            whole_number<std::uint64_t>(option, text, 0, std::numeric_limits<std::uint64_t>::max());
    });
}

/// The parts of a comma-separated list, each read by @p read; none twice.
template <class Value, class Read>
auto list_into(std::vector<Value>& target, Read read) {
    return [&target, read](const std::string& option, const std::string& text) {
        target.clear();
        for (std::size_t start = 0; start <= text.size();) {
            const std::size_t end = std::min(text.find(',', start), text.size());
            const Value value = read(option, text.substr(start, end - start));
            if (std::find(target.begin(), target.end(), value) != target.end()) {
                throw error(option, "each value once", engine::quoted(text));
            }
            target.push_back(value);
            start = end + 1;
        }
    };
}

template <class Enum>
auto names_into(std::vector<Enum>& target, const char* expected) {
    return list_into(target, [expected](const std::string& option, const std::string& one) {
        return named<Enum>(option, one, expected);
    });
}

void add_prefill(option_table& table, options& whole_line) {
    prefill_options& chosen = whole_line.prefill;
    table.group("Model: random weights in the shape of a known one");
    table.value("--shape", "NAME",
                "llama3-8b (the default), llama3-70b, llama3.2-1b, llama3.2-3b, mistral-7b, smollm2-135m, "
                "qwen3-next-like, gemma3-12b-like",
                [&](const std::string& option, const std::string& text) {
                    static_cast<void>(model_shape(option, text));
                    chosen.shape = text;
                });
    table.value("--layers", "N", "layers, instead of the shape's", whole(chosen.layers, 1, 4096));
    table.value("--seed", "N", "of weights and tokens (1)",
                [&chosen](const std::string& option, const std::string& text) {
                    chosen.seed = whole_number<std::uint64_t>(option, text, 0,
                                                              std::numeric_limits<std::uint64_t>::max());
                });
    table.group("What is run: each attention, length and mode, one after the other");
    table.value("--tokens", "LIST", "prompt lengths: 32768 or 4096,131072",
                list_into(chosen.tokens, [](const std::string& option, const std::string& one) {
                    return whole_number<std::int32_t>(option, one, 1, 1 << 21);
                }));
    table.value("--mode", "LIST", "of dense (the default), drop, lists and both",
                names_into(chosen.modes, "dense, drop, lists or both"));
    table.value("--attention", "LIST", "of uniprefill (the default) and cudnn; lists are always uniprefill's",
                names_into(chosen.attention, "cudnn or uniprefill"));
    table.value("--counts", "NAME", "read (the default), budget or buckets: how row counts reach the host",
                [&](const std::string& option, const std::string& text) {
                    chosen.counts = named<counts_kind>(option, text, "read, budget or buckets");
                });
    table.value("--bucket-rows", "ROWS", "row counts are rounded up to multiples of it (1024)",
                whole(chosen.bucket_rows, 1, many));
    table.value(
        "--keep", "SHARE", "of the rows, kept at each selecting layer (0.65)",
        [&](const std::string& option, const std::string& text) { chosen.keep = share(option, text); });
    table.value("--selecting", "LIST",
                "selecting layers (7,11,15,... but not the last; hybrids: all full ones but the first)",
                [&](const std::string& option, const std::string& text) {
                    chosen.selecting.clear();
                    for (const policy_options::layer_share& one : layer_list(option, text)) {
                        if (one.share)
                            throw error(option, "layers alone; --keep has the share", engine::quoted(text));
                        chosen.selecting.push_back(one.layer);
                    }
                });
    table.value(
        "--blocks", "SHARE", "of the blocks, on each head's list (0.15)",
        [&](const std::string& option, const std::string& text) { chosen.blocks = share(option, text); });
    table.value("--list-heads", "NAME",
                "query (the default): a list for each query head; kv: for each KV head",
                [&](const std::string& option, const std::string& text) {
                    if (text != "query" && text != "kv")
                        throw error(option, "query or kv", engine::quoted(text));
                    chosen.lists_by_kv_head = text == "kv";
                });
    table.value("--list-sink", "ROWS", "first positions on every list (64)",
                whole(chosen.list_sink, 0, many));
    table.value("--list-window", "ROWS", "last positions that each query reads (256)",
                whole(chosen.list_window, 0, many));
    table.value("--min-length", "TOKENS", "shorter prompts run dense (0)", whole(chosen.min_length, 0, many));
    table.group("Measuring");
    add_device(table, whole_line);
    table.value("--warmups", "N", "runs before the measured ones (2)", whole(chosen.warmups, 1, 1000));
    table.value("--repeats", "N", "measured runs; medians are reported (5)", whole(chosen.repeats, 1, 1000));
    table.flag("--in-turn", "modes of one length run in turn, all in memory at once", chosen.in_turn);
    table.value("--json", "FILE", "where the figures go as well", text_into(chosen.json, "a path"));
}

void add_calibrating(option_table& table, calibrate_options& chosen) {
    const auto positive = [](double number) { return std::isfinite(number) && number > 0; };
    table.group("Texts like those that prompts will be");
    table.values("--texts", "FILE...", "text files, together at least windows * (tokens + 64) tokens",
                 [&chosen](const std::string& option, const std::vector<std::string>& files) {
                     for (const std::string& file : files) {
                         if (file.empty()) throw error(option, "paths", "an empty text");
                     }
                     chosen.texts = files;
                 });
    table.value("--windows", "K", "prompts, drawn from all over the texts (8)",
                whole(chosen.windows, 1, 1000));
    table.value("--tokens", "N", "tokens of each (4096)", whole(chosen.tokens, 512, many));
    table.value("--seed", "S", "of the windows' places and the search's order (1)",
                [&chosen](const std::string& option, const std::string& text) {
                    chosen.seed = whole_number<std::uint64_t>(option, text, 0,
                                                              std::numeric_limits<std::uint64_t>::max());
                });
    table.group("What is looked for");
    table.value("--divergence", "KL", "most KL from the dense run, nats, mean over windows (0.01)",
                [&chosen, positive](const std::string& option, const std::string& text) {
                    chosen.divergence = real_number(option, text, positive, "a number above 0");
                });
    table.value("--for-length", "TOKENS", "prompts whose work is to be saved (the model's context)",
                whole(chosen.for_length, 1, many));
    table.value("--lists", "NAME", "on (the default): block lists may be chosen too; off: dropping alone",
                [&chosen](const std::string& option, const std::string& text) {
                    if (text != "on" && text != "off") throw error(option, "on or off", engine::quoted(text));
                    chosen.lists = text == "on";
                });
    const auto bound = [](std::optional<double>& target) {
        return
            [&target](const std::string& option, const std::string& text) { target = share(option, text); };
    };
    table.value("--lin", "SHARE", "instead: least divergence with at most this share of rows (and --att)",
                bound(chosen.lin));
    table.value("--att", "SHARE", "and at most this share of the pairs that attention scores",
                bound(chosen.att));
    table.value("--worst", "WEIGHT", "of the worst window's KL beside the mean's 1, there (0.1)",
                [&chosen](const std::string& option, const std::string& text) {
                    const auto fits = [](double number) { return std::isfinite(number) && number >= 0; };
                    chosen.worst = real_number(option, text, fits, "a number of at least 0");
                });
    table.value("--begin", "FILE", "policy that it begins with there (the default for the model)",
                text_into(chosen.begin, "a path"));
    table.value("--time-limit", "MINUTES", "the best so far is taken then (60)",
                [&chosen, positive](const std::string& option, const std::string& text) {
                    chosen.minutes = real_number(option, text, positive, "a number above 0");
                });
}

void add_serving(option_table& table, serve_options& chosen) {
    workload_options& asked = chosen.workload;
    const auto positive = [](double number) { return std::isfinite(number) && number > 0; };
    table.group("Requests, drawn from texts");
    table.value("--texts", "LIST", "a file that names text files, one path on a line",
                text_into(asked.texts, "a path"));
    table.value("--requests", "N", "how many (32)", whole(asked.requests, 1, 100000));
    table.value("--rate", "R", "requests a second, on average (2; a trace's own)",
                [&asked, positive](const std::string& option, const std::string& text) {
                    asked.rate = real_number(option, text, positive, "a number above 0");
                });
    table.value("--seed", "N", "of texts, lengths and times (1)",
                [&asked](const std::string& option, const std::string& text) {
                    asked.seed = whole_number<std::uint64_t>(option, text, 0,
                                                             std::numeric_limits<std::uint64_t>::max());
                });
    table.value("--min-prompt", "TOKENS", "shortest prompt (200)", whole(asked.min_prompt, 1, many));
    table.value("--max-prompt", "TOKENS", "longest prompt (3000)", whole(asked.max_prompt, 1, many));
    table.value("--min-new", "TOKENS", "fewest tokens to write (8)", whole(asked.min_new, 1, many));
    table.value("--max-new", "TOKENS", "most tokens to write (64)", whole(asked.max_new, 1, many));
    table.value("--shared", "SHARE", "of the prompts begin like others do (0.5)",
                [&asked](const std::string& option, const std::string& text) {
                    const auto fits = [](double number) { return number >= 0 && number <= 1; };
                    asked.shared = real_number(option, text, fits, "a number in [0, 1]");
                });
    table.value("--order", "N", "draw another order of arrival for the same requests; 0: as drawn",
                [&asked](const std::string& option, const std::string& text) {
                    asked.order = whole_number<std::uint64_t>(option, text, 0,
                                                              std::numeric_limits<std::uint64_t>::max());
                });
    table.value("--trace", "FILE",
                "times and lengths of a trace (CSV: TIMESTAMP,ContextTokens,GeneratedTokens)",
                text_into(asked.trace, "a path"));
    table.group("Server");
    table.value("--slots", "N", "requests running at once (8)", whole(chosen.slots, 1, 256));
    table.value("--prefill-budget", "ROWS", "prompt rows of a step (span + n - 1)",
                whole(chosen.budget, 1, many));
    table.value("--pages", "N", "of the pool, 16 rows of one layer each", whole(chosen.pages, 1, many));
    table.value("--preemption", "NAME", "recompute or swap",
                [&chosen](const std::string& option, const std::string& text) {
                    chosen.preemption = named<preemption>(option, text, "recompute or swap");
                });
    table.flag("--no-prefix-cache", "compute every prompt from its beginning", chosen.without_prefix_cache);
    table.value("--step-seconds", "S", "count every step as so long, for runs that repeat exactly",
                [&chosen, positive](const std::string& option, const std::string& text) {
                    chosen.step_seconds = real_number(option, text, positive, "a number above 0");
                });
    table.flag("--processor-time", "count processor time of a thread, for machines that others use too",
               chosen.processor_time);
    table.flag("--check", "run every request alone afterwards and compare the tokens", chosen.check);
}

// ---------------------------------------------------------------------------------------------------------------------

/// The parser library's complaint in our words.
error in_our_words(const CLI::ParseError& fault, const CLI::App& app) {
    const auto chosen = app.get_subcommands();
    const std::vector<std::string> left = app.remaining(true);
    if (chosen.empty()) {
        return {"command",
                "calibrate, compare, generate, inspect, prefill or serve-sim (uniprefill-engine --help)",
                left.empty() ? "none" : engine::quoted(left.front())};
    }
    const std::string help = "uniprefill-engine " + chosen.back()->get_name() + " --help";
    const std::string line = fault.what();
    if (!left.empty()) {
        return {"command line", "options that " + help + " lists", engine::quoted(left.front())};
    }
    if (fault.get_name() == "ArgumentMismatch") {
        const bool missing = line.find("missing") != std::string::npos;
        return {line.substr(0, line.find(':')), "one value", missing ? "none" : "more than one"};
    }
    return {"command line", "what " + help + " lists", engine::quoted(line, 200)};
}

void check_policy(const policy_options& policy) {
    using uniprefill::rule_kind;
    if (policy.selector == rule_kind::fixed_budget && !policy.budget) {
        throw error("--budget", "the rows that --selector fixed-budget keeps", "none");
    }
    if (policy.budget && policy.selector && *policy.selector != rule_kind::fixed_budget) {
        throw error("--budget", "--selector fixed-budget beside it", name_of(*policy.selector));
    }
    const auto has_share = [](const policy_options::layer_share& one) { return one.share.has_value(); };
    const bool shares_given =
        policy.share ||
        (!policy.layers.empty() && std::all_of(policy.layers.begin(), policy.layers.end(), has_share));
    if ((policy.selector == rule_kind::fixed_ratio || policy.selector == rule_kind::max_fraction) &&
        !shares_given) {
        throw error("--p", std::string("the share for --selector ") + name_of(*policy.selector), "none");
    }
}

void check_workload(const workload_options& asked) {
    if (asked.texts.empty()) throw error("--texts", "a file that names text files", "none");
    const auto ascend = [](const char* option, std::int32_t lowest, std::int32_t highest) {
        if (highest < lowest) {
            throw error(option, "at least " + std::to_string(lowest), std::to_string(highest));
        }
    };
    ascend("--max-prompt", asked.min_prompt, asked.max_prompt);
    ascend("--max-new", asked.min_new, asked.max_new);
}

void check_prefill(const options& chosen) {
    if (chosen.device != device_kind::cuda) {
        throw error("--device", "cuda, which prefill is for (compare measures on the CPU)",
                    name_of(chosen.device));
    }
    const prefill_options& asked = chosen.prefill;
    const std::int32_t layers = asked.layers.value_or(model_shape("--shape", asked.shape).layers);
    if (!asked.selecting.empty() && asked.selecting.back() >= layers) {
        throw error("--selecting", "layers 0 to " + std::to_string(layers - 1),
                    std::to_string(asked.selecting.back()));
    }
    const layer_pattern pattern = model_pattern("--shape", asked.shape);
    for (const std::int32_t layer : asked.selecting) {
        if (pattern.kind(layer) != layer_kind::full) {
            throw error("--selecting", "layers with full attention", std::to_string(layer));
        }
    }
    const auto lists = [](prefill_mode mode) {
        return mode == prefill_mode::lists || mode == prefill_mode::both;
    };
    const auto has = [&](attention_kind kind) {
        return std::find(asked.attention.begin(), asked.attention.end(), kind) != asked.attention.end();
    };
    if (!has(attention_kind::uniprefill) && std::all_of(asked.modes.begin(), asked.modes.end(), lists)) {
        throw error("--attention", "uniprefill, which alone reads lists", "cudnn");
    }
}

void check_whole(const options& chosen) {
    if (chosen.command == command::prefill) return check_prefill(chosen);
    if (chosen.model.empty()) throw error("--model", "the path of a GGUF file", "none");
    if (chosen.command == command::inspect) return;
    if (chosen.command == command::calibrate) {
        const calibrate_options& asked = chosen.calibrate;
        if (asked.texts.empty()) throw error("--texts", "text files", "none");
        if (asked.lin.has_value() != asked.att.has_value()) {
            throw error(asked.lin ? "--att" : "--lin", "a number, as the other bound is given", "none");
        }
        if (!asked.lin && !asked.begin.empty()) {
            throw error("--begin", "--lin and --att beside it", "neither");
        }
        if (!asked.lin && asked.worst) throw error("--worst", "--lin and --att beside it", "neither");
        if (asked.lin && asked.divergence) {
            throw error("--divergence", "neither --lin nor --att beside it", "both");
        }
        return;
    }
    if (chosen.command == command::serve_sim) {
        check_workload(chosen.serve.workload);
        check_policy(chosen.policy);
        return;
    }
    if (chosen.text && chosen.text_file) throw error("prompt", "one of --text and --text-file", "both");
    if (!chosen.text && !chosen.text_file) throw error("prompt", "--text or --text-file", "neither");
    if (chosen.text && chosen.text->empty()) throw error("--text", "a prompt", "an empty text");
    if (chosen.dense && chosen.policy.any())
        throw error("--dense", "no option about the policy beside it", "one");
    check_policy(chosen.policy);
}

/// What the options say, over what the policy had.
void change(uniprefill::selection_rule& rule, const policy_options& by) {
    using uniprefill::rule_kind;
    const bool shareless = rule.kind == rule_kind::fixed_budget;
    if (by.selector) rule.kind = *by.selector;
    if (by.budget) rule.budget_rows = *by.budget;
    if (by.selector && *by.selector != rule_kind::fixed_budget) rule.budget_rows = 0;
    if (by.scope) rule.scope = *by.scope;
    if (shareless && rule.kind == rule_kind::top_p) {
        rule.p = uniprefill::unit_fraction::from(default_share(rule.scope));
    }
    if (by.share) rule.p = uniprefill::unit_fraction::from(*by.share);
    if (by.min_kept) rule.min_kept_rows = *by.min_kept;
    if (by.max_kept) rule.max_kept_rows = *by.max_kept;
}

} // namespace

bool policy_options::any() const {
    return !file.empty() || selector || scope || share || budget || min_kept || max_kept || block_rows ||
           observations || sink || tail || min_length || span || propagation || list_share || !layers.empty();
}

bool parse(const std::string& text, arithmetic& kind) {
    for (const arithmetic one :
         {arithmetic::automatic, arithmetic::fp32, arithmetic::bf16, arithmetic::bf16x3}) {
        if (text == cpu::name(one)) {
            kind = one;
            return true;
        }
    }
    return false;
}

bool parse(const std::string& text, preemption& way) {
    for (const preemption one : {preemption::recompute, preemption::swap}) {
        if (text == name_of(one)) {
            way = one;
            return true;
        }
    }
    return false;
}

const char* name_of(preemption way) {
    return way == preemption::swap ? "swap" : "recompute";
}

command_line parse_command_line(const std::vector<std::string>& arguments, std::int32_t cores) {
    options calibrate;
    options compare;
    options generate;
    options inspect;
    options prefill;
    options serve;
    calibrate.command = command::calibrate;
    calibrate.threads = cores;
    generate.command = command::generate;
    generate.tokens = 128;
    inspect.command = command::inspect;
    prefill.command = command::prefill;
    serve.command = command::serve_sim;
    compare.threads = generate.threads = serve.threads = cores;

    CLI::App app("Reads prompts with a language model, dropping tokens that no longer matter on the way\n"
                 "(uniprefill), and compares that with the dense run.",
                 "uniprefill-engine");
    app.get_formatter()->column_width(30);
    app.require_subcommand(1);
    app.set_version_flag("--version", "uniprefill-engine " + std::to_string(UNIPREFILL_VERSION_MAJOR) + "." +
                                          std::to_string(UNIPREFILL_VERSION_MINOR) + "." +
                                          std::to_string(UNIPREFILL_VERSION_PATCH));
    app.footer("uniprefill-engine COMMAND --help lists the options of a command.\n"
               "Exit code: 0, or 2 with one line that says what was expected and what came.");

    option_table for_calibrate(
        app.add_subcommand("calibrate", "Find out what this model can drop where, and write a policy file"));
    add_model(for_calibrate, calibrate, "-m,--model,model");
    add_calibrating(for_calibrate, calibrate.calibrate);
    add_running(for_calibrate, calibrate, cores);
    add_device(for_calibrate, calibrate);
    for_calibrate.group("Output");
    for_calibrate.value("-o,--out", "FILE", "policy file (policy.json); measurements go beside it",
                        text_into(calibrate.calibrate.out, "a path"));

    option_table for_compare(app.add_subcommand(
        "compare", "Prefill the same prompt dense and sparsified; compare time, work and answers"));
    add_model(for_compare, compare, "-m,--model");
    add_prompt(for_compare, compare);
    add_policy(for_compare, compare.policy);
    add_running(for_compare, compare, cores);
    add_device(for_compare, compare);
    for_compare.value("--continuation", "N", "last tokens of the text, held out to judge quality (64)",
                      whole(compare.continuation, 0, many));
    add_sampling(for_compare, compare, "tokens to show from both runs (40)");
    for_compare.group("Output");
    for_compare.value("-o,--out", "DIR", "where report.json and report.html go (uniprefill-report)",
                      text_into(compare.out, "a folder"));
    for_compare.flag("--json", "print the report as JSON instead of a table", compare.json);

    option_table for_generate(app.add_subcommand("generate", "Read a prompt and go on writing"));
    add_model(for_generate, generate, "-m,--model");
    add_prompt(for_generate, generate);
    add_policy(for_generate, generate.policy);
    for_generate.flag("--dense", "drop nothing, read every key", generate.dense);
    add_running(for_generate, generate, cores);
    add_device(for_generate, generate);
    add_sampling(for_generate, generate, "tokens to write (128)");

    option_table for_inspect(app.add_subcommand("inspect", "Say what a model file holds"));
    add_model(for_inspect, inspect, "-m,--model,model");
    for_inspect.group("Output");
    for_inspect.flag("--json", "print it as JSON", inspect.json);

    option_table for_prefill(app.add_subcommand(
        "prefill", "Measure prefills of random weights and tokens on a CUDA device (synthetic)"));
    add_prefill(for_prefill, prefill);

    option_table for_serve(app.add_subcommand(
        "serve-sim", "Serve many requests at once: batching, chunks, preemption, prefix reuse"));
    add_model(for_serve, serve, "-m,--model");
    add_serving(for_serve, serve.serve);
    add_policy(for_serve, serve.policy);
    for_serve.flag("--dense", "drop nothing, read every key, and leave the rest of the policy as it is",
                   serve.dense);
    add_running(for_serve, serve, cores);
    for_serve.group("Output");
    for_serve.flag("--json", "print the figures as JSON instead of a table", serve.json);

    for (const std::string& argument : arguments) {
        // The parser would take the next argument for the value.
        if (argument.size() > 3 && argument.compare(0, 2, "--") == 0 &&
            argument.find('=') == argument.size() - 1) {
            throw error(argument.substr(0, argument.size() - 1), "one value", "none after the =");
        }
    }
    try {
        app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
    } catch (const CLI::CallForHelp&) {
        return {std::nullopt, app.help()};
    } catch (const CLI::CallForVersion&) {
        return {std::nullopt, app.version() + "\n"};
    } catch (const CLI::ParseError& fault) {
        throw in_our_words(fault, app);
    }

    const std::string name = app.get_subcommands().back()->get_name();
    option_table& table = name == "calibrate"  ? for_calibrate
                          : name == "compare"  ? for_compare
                          : name == "generate" ? for_generate
                          : name == "inspect"  ? for_inspect
                          : name == "prefill"  ? for_prefill
                                               : for_serve;
    options& chosen = name == "calibrate"  ? calibrate
                      : name == "compare"  ? compare
                      : name == "generate" ? generate
                      : name == "inspect"  ? inspect
                      : name == "prefill"  ? prefill
                                           : serve;
    table.apply();
    check_whole(chosen);
    return {chosen, ""};
}

policy resolve_policy(const options& chosen, const model_identity& model) {
    if (chosen.dense) return dense();
    const policy_options& by = chosen.policy;
    const std::string source = by.file.empty() ? "policy" : printable(by.file);
    policy out = by.file.empty() ? default_policy(model) : load_policy(by.file);

    const bool follows_observations = out.tail == out.num_observations;
    if (by.block_rows) out.block_rows = *by.block_rows;
    if (by.observations) out.num_observations = *by.observations;
    if (by.sink) out.sink = *by.sink;
    if (by.observations && follows_observations) out.tail = *by.observations;
    if (by.tail) out.tail = *by.tail;
    if (by.min_length) out.min_length = *by.min_length;
    if (by.span) out.span = *by.span;
    if (by.propagation) out.propagation = *by.propagation;
    if (by.list_share) {
        if (*by.list_share == 0) {
            clear_lists(out);
        } else {
            out.list_rules.clear();
            if (!out.lists) out.lists.emplace();
            out.lists->rule = uniprefill::selection_rule::top_p(*by.list_share, out.lists->rule.scope);
        }
    }
    if (!by.layers.empty()) {
        const auto scope = by.scope.value_or(uniprefill::mass_scope::free);
        out.rules.clear();
        for (const policy_options::layer_share& one : by.layers) {
            out.rules.push_back({one.layer, uniprefill::selection_rule::top_p(default_share(scope), scope)});
        }
        out.name = "from the command line";
        out.comment.clear();
    } else if (by.any() && !(by.file.empty() && out.rules.empty())) {
        policy_options without_file = by;
        without_file.file.clear();
        if (without_file.any()) out.name += ", changed by options";
    }
    for (std::size_t i = 0; i < out.rules.size(); ++i) {
        change(out.rules[i].rule, by);
        if (!by.layers.empty() && by.layers[i].share) {
            out.rules[i].rule.p = uniprefill::unit_fraction::from(*by.layers[i].share);
        }
    }
    check(out, source + ": ");
    if (!by.layers.empty()) { // not the file's
        policy asked;
        asked.rules = out.rules;
        check_layers(asked, model.layers, "--");
    }
    check_layers(out, model.layers, source + ": ");
    return out;
}

namespace {

std::string read_all(const std::string& option, const std::string& path, std::istream& from) {
    std::string text;
    std::vector<char> piece(std::size_t{1} << 16);
    while (from.read(piece.data(), static_cast<std::streamsize>(piece.size())) || from.gcount() > 0) {
        text.append(piece.data(), static_cast<std::size_t>(from.gcount()));
        if (text.size() > max_prompt_bytes) throw error(option, "at most 256 MiB", "more");
    }
    if (from.bad()) throw error(option, "a file that can be read", engine::quoted(path));
    return text;
}

} // namespace

std::string read_file(const std::string& option, const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file.is_open()) throw error(option, "a file that can be read", engine::quoted(path));
    return read_all(option, path, file);
}

std::string read_prompt(const options& chosen, std::istream& standard_input) {
    std::string text;
    if (chosen.text) {
        text = *chosen.text;
    } else if (*chosen.text_file == "-") {
        text = read_all("--text-file", "-", standard_input);
    } else {
        text = read_file("--text-file", chosen.text_file.value());
    }
    if (text.empty()) throw error("prompt", "at least one byte", "an empty text");
    return text;
}

prompt_plan plan_prompt(const options& chosen, std::int32_t tokens, std::int32_t context) {
    if (tokens <= 0) throw error("prompt", "at least one token", std::to_string(tokens));
    prompt_plan out;
    out.prompt = tokens;
    std::int32_t after = chosen.tokens;
    if (chosen.command == command::compare) {
        const std::int32_t wanted = chosen.continuation.value_or(default_continuation);
        if (chosen.continuation && tokens <= wanted) {
            throw error("--continuation", "fewer than the text's " + std::to_string(tokens) + " tokens",
                        std::to_string(wanted));
        }
        // A short text is worth more as a prompt: quality is then judged on what the dense run would say.
        out.held_out = tokens >= 2 * wanted || chosen.continuation ? wanted : 0;
        out.compared = out.held_out > 0 ? out.held_out : default_continuation;
        out.prompt -= out.held_out;
        after = std::max(after, out.compared);
    }
    if (std::int64_t{out.prompt} + after > context) {
        throw error("prompt",
                    "at most " + std::to_string(context) + " tokens, the model's context, with " +
                        std::to_string(after) + " that follow",
                    std::to_string(out.prompt));
    }
    return out;
}

} // namespace engine
