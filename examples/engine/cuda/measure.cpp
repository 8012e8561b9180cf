// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app/model_shapes.hpp"
#include "engine/app/policy.hpp"
#include "engine/app/quality.hpp"
#include "engine/cuda/model.hpp"
#include "engine/cuda/program.hpp"
#include "engine/cuda/session.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <random>
#include <utility>

namespace engine {

namespace {

using json = nlohmann::ordered_json;
using cuda::stage_names;

/// One prefill among those asked for.
struct variant {
    std::int32_t tokens = 0;
    prefill_mode mode = prefill_mode::dense;
    attention_kind attention = attention_kind::uniprefill;
};

bool drops(prefill_mode mode) {
    return mode == prefill_mode::drop || mode == prefill_mode::both;
}

bool has_lists(prefill_mode mode) {
    return mode == prefill_mode::lists || mode == prefill_mode::both;
}

std::vector<variant> variants_of(const prefill_options& asked) {
    std::vector<variant> all;
    for (const std::int32_t tokens : asked.tokens) {
        for (const prefill_mode mode : asked.modes) {
            for (const attention_kind kind : asked.attention) {
                if (has_lists(mode) && kind == attention_kind::cudnn) continue;
                all.push_back({tokens, mode, kind});
            }
        }
    }
    return all;
}

/// Rows kept at each selecting layer by fixed budgets: a share of those before, rounded.
std::int32_t budget_of(double keep, std::int32_t rows) {
    return std::max(static_cast<std::int32_t>(std::lround(keep * rows)), 1);
}

/// Layers that select where none were named: a llama's fixed list, of a hybrid each with full attention but
/// the first.
std::vector<std::int32_t> usual_selecting(std::int32_t layers, const layer_pattern& pattern) {
    std::vector<std::int32_t> all;
    if (pattern.period > 1) {
        for (std::int32_t layer = 2 * pattern.period - 1; layer < layers; layer += pattern.period) {
            all.push_back(layer);
        }
        return all;
    }
    for (const layer_rule& rule : fixed_list(layers).rules) {
        all.push_back(rule.layer);
    }
    return all;
}

cuda::session_options session_for(const variant& one, const prefill_options& asked,
                                  const cuda::cuda_model& model) {
    cuda::session_options made;
    made.prompt = one.tokens;
    made.attention = one.attention;
    made.counts = asked.counts;
    made.bucket_rows = asked.bucket_rows;
    if (one.tokens < asked.min_length) return made; // the library isn't asked
    if (drops(one.mode)) {
        std::vector<std::int32_t> layers = asked.selecting;
        if (layers.empty()) layers = usual_selecting(model.config().layers, model.pattern());
        std::int32_t rows = one.tokens;
        for (const std::int32_t layer : layers) {
            auto rule = uniprefill::selection_rule::fixed_ratio(asked.keep);
            if (asked.counts == counts_kind::budget) {
                rows = budget_of(asked.keep, rows);
                rule = uniprefill::selection_rule::fixed_budget(rows);
            }
            made.selecting.push_back({layer, rule, nullptr});
        }
    }
    if (has_lists(one.mode)) {
        made.lists.emplace();
        made.lists->rule = uniprefill::selection_rule::fixed_ratio(asked.blocks);
        made.lists->rule.scope = uniprefill::mass_scope::all;
        made.lists->sink = asked.list_sink;
        made.lists->window = asked.list_window;
        made.lists_by_kv_head = asked.lists_by_kv_head;
    }
    return made;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const std::size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

json spread_of(const std::vector<double>& values) {
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    return {{"median", median(values)}, {"min", *least}, {"max", *most}};
}

std::vector<std::int32_t> random_tokens(std::int32_t count, std::int32_t vocab, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
    for (std::int32_t& token : tokens) {
        token = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocab));
    }
    return tokens;
}

json decisions_of(const cuda::session& session) {
    json all = json::array();
    for (const cuda::decision_record& decision : session.decisions()) {
        const uniprefill::segment_outcome& outcome = decision.outcomes.front();
        all.push_back({{"layer", decision.layer},
                       {"rows", outcome.rows},
                       {"kept", outcome.kept},
                       {"reason", to_string(outcome.reason)}});
        if (is_fault(outcome.reason)) {
            throw error("decision at layer " + std::to_string(decision.layer), "one that can be trusted",
                        to_string(outcome.reason));
        }
    }
    return all;
}

/// Nats between the next-token distributions of two runs; null where there is nothing to compare with.
json divergence(const std::vector<float>& reference, const std::vector<float>& logits) {
    if (reference.empty()) return nullptr;
    const auto vocab = static_cast<std::int32_t>(logits.size());
    return compare_logits(reference.data(), logits.data(), 1, vocab, {}).kl_mean;
}

/// One prefill that is run again and again. Every repetition must come to the same logits, bit for bit.
class measured_prefill {
  public:
    /// Warms it up.
    measured_prefill(const variant& one, const prefill_options& asked, const cuda::cuda_model& model)
        : one_(one)
        , asked_(asked)
        , model_(model)
        , session_(model, session_for(one, asked, model))
        , tokens_(random_tokens(one.tokens, model.config().vocab,
                                asked.seed + static_cast<std::uint64_t>(one.tokens))) {
        static_cast<void>(session_.prefill(tokens_));
        logits_ = session_.logits(); // kernel by kernel, whatever comes later
        all_same_ = same();
        // What becomes a graph is recorded by the second run, and replayed from the third on.
        const std::int32_t warmups = std::max(asked.warmups, asked.counts == counts_kind::read ? 1 : 2);
        for (std::int32_t i = 1; i < warmups; ++i) {
            static_cast<void>(session_.prefill(tokens_));
        }
    }

    void run_once() {
        const cuda::prefill_times& times = session_.prefill(tokens_);
        device_ms_.push_back(times.device_ms);
        wall_ms_.push_back(times.wall_ms);
        reads_ = times.count_reads;
        all_same_ = same() && all_same_;
    }

    /// @param reference  logits of the first dense run over these tokens, filled by it
    json figures(std::vector<float>& reference) {
        if (reference.empty() && one_.mode == prefill_mode::dense) reference = logits_;
        const std::size_t nodes = session_.graph_nodes();
        json stages;
        session_.prefill_by_stage(tokens_);
        const auto by_stage = session_.stages();
        for (std::size_t i = 0; i < stage_names.size(); ++i) {
            stages[stage_names[i]] = by_stage[i];
        }
        json windows; // whose; none in models without
        if (model_.pattern().has(layer_kind::window)) {
            windows = session_.windows_by_cudnn() ? "cudnn" : "uniprefill";
        }
        double lin = 0;
        for (const std::int32_t rows : session_.rows_kept()) {
            lin += static_cast<double>(rows) / one_.tokens / model_.config().layers;
        }
        return {{"tokens", one_.tokens},
                {"mode", name_of(one_.mode)},
                {"attention", name_of(one_.attention)},
                {"counts", name_of(asked_.counts)},
                {"windows_before_drops", windows},
                {"left_alone", one_.tokens < asked_.min_length},
                {"ttft_ms", spread_of(device_ms_)},
                {"wall_ms", spread_of(wall_ms_)},
                {"repeats", asked_.repeats},
                {"count_reads", reads_},
                {"graph_nodes", nodes},
                {"graphs", session_.graphs()},
                {"same_logits_every_time", all_same_},
                {"kl_to_first_dense", divergence(reference, logits_)},
                {"stage_ms_kernel_by_kernel", stages},
                {"share_of_rows", lin},
                {"rows_kept", session_.rows_kept()},
                {"decisions", decisions_of(session_)}};
    }

  private:
    bool same() {
        if (session_.likeliest() < 0) throw error("logits", "finite numbers", "others");
        return session_.logits() == logits_;
    }

    variant one_;
    const prefill_options& asked_;
    const cuda::cuda_model& model_;
    cuda::session session_;
    std::vector<std::int32_t> tokens_;
    std::vector<float> logits_;
    bool all_same_ = true;
    std::vector<double> device_ms_;
    std::vector<double> wall_ms_;
    std::int32_t reads_ = 0;
};

/// Variants of one length that share the device while they are measured: all of them, which then take turns,
/// or one.
std::vector<std::vector<variant>> rounds_of(const prefill_options& asked) {
    std::vector<std::vector<variant>> rounds;
    for (const variant& one : variants_of(asked)) {
        if (!asked.in_turn || rounds.empty() || rounds.back().front().tokens != one.tokens) {
            rounds.emplace_back();
        }
        rounds.back().push_back(one);
    }
    return rounds;
}

/// What the shape's layers are, and where they aren't what the model of that name has.
json layers_of(const std::string& shape, const layer_pattern& pattern) {
    if (pattern.period == 1) return "full attention";
    json made{{"full_attention", "last of " + std::to_string(pattern.period)}};
    if (pattern.others == layer_kind::window) made["window"] = pattern.window;
    if (pattern.others == layer_kind::linear) {
        made["gated_delta_rule"] = {{"k_heads", pattern.linear_k_heads},
                                    {"v_heads", pattern.linear_v_heads},
                                    {"head_dim", cuda::gated_delta_call::head_dim}};
    }
    if (shape == "qwen3-next-like") {
        made["ffn"] = "dense, of the width that a token activates of the model's experts: no routing";
    }
    return made;
}

json description(const prefill_options& asked, const cuda::cuda_model& model) {
    cudaDeviceProp properties{};
    int device = 0;
    int runtime = 0;
    int driver = 0;
    cuda::check(cudaGetDevice(&device), "device");
    cuda::check(cudaGetDeviceProperties(&properties, device), "device");
    cuda::check(cudaRuntimeGetVersion(&runtime), "device");
    cuda::check(cudaDriverGetVersion(&driver), "device");
    const llama_config& config = model.config();
    return {{"kind", "synthetic: random weights and tokens, shares imposed"},
            {"device", properties.name},
            {"cuda_runtime", runtime},
            {"cuda_driver", driver},
            {"cublaslt", cuda::products::library_version()},
            {"dense_attention", cuda::dense_attention::library()},
            {"shape",
             {{"name", asked.shape},
              {"layers", config.layers},
              {"hidden", config.hidden},
              {"ffn", config.ffn},
              {"heads", config.heads},
              {"kv_heads", config.kv_heads},
              {"head_dim", config.head_dim},
              {"vocab", config.vocab},
              {"rope_base", config.rope_base},
              {"layers_are", layers_of(asked.shape, model.pattern())}}},
            {"weight_bytes", model.bytes()},
            {"keep", asked.keep},
            {"blocks", asked.blocks},
            {"lists_by", asked.lists_by_kv_head ? "KV head" : "query head"},
            {"list_sink", asked.list_sink},
            {"list_window", asked.list_window},
            {"min_length", asked.min_length},
            {"bucket_rows", asked.bucket_rows},
            {"warmups", asked.warmups},
            {"in_turn", asked.in_turn},
            {"seed", asked.seed}};
}

void write(const std::string& path, const json& figures) {
    std::ofstream file(path, std::ios::binary);
    file << figures.dump(1) << '\n';
    if (!file.flush()) throw error("--json", "a file that can be written", engine::quoted(path));
}

} // namespace

void run_cuda_prefill(const options& chosen) {
    const prefill_options& asked = chosen.prefill;
    cuda::require_device();
    llama_config config = model_shape("--shape", asked.shape);
    if (asked.layers) config.layers = *asked.layers;
    if (std::find(asked.attention.begin(), asked.attention.end(), attention_kind::cudnn) !=
            asked.attention.end() &&
        !cuda::dense_attention::built()) {
        throw error("--attention", "uniprefill, as this program was built without cuDNN and its frontend",
                    "cudnn");
    }
    const cuda::cuda_model model(config, asked.seed, model_pattern("--shape", asked.shape));
    json figures = description(asked, model);
    figures["runs"] = json::array();
    std::printf("%s, %d layers, synthetic, on %s\n%9s %-6s %-10s %-8s %12s %12s %9s %6s\n",
                asked.shape.c_str(), static_cast<int>(config.layers),
                figures["device"].get<std::string>().c_str(), "tokens", "mode", "attention", "counts",
                "TTFT ms", "wall ms", "rows", "reads");
    std::vector<float> reference;
    std::int32_t reference_tokens = 0;
    for (const std::vector<variant>& round : rounds_of(asked)) {
        const std::int32_t tokens = round.front().tokens;
        if (reference_tokens != tokens) reference.clear();
        reference_tokens = tokens;
        std::vector<std::unique_ptr<measured_prefill>> runs;
        runs.reserve(round.size());
        for (const variant& one : round) {
            runs.push_back(std::make_unique<measured_prefill>(one, asked, model));
        }
        for (std::int32_t i = 0; i < asked.repeats; ++i) {
            for (const auto& one : runs) {
                one->run_once();
            }
        }
        for (std::size_t i = 0; i < runs.size(); ++i) {
            const json run = runs[i]->figures(reference);
            std::printf("%9d %-6s %-10s %-8s %12.2f %12.2f %8.1f%% %6d%s\n", static_cast<int>(tokens),
                        name_of(round[i].mode), name_of(round[i].attention), name_of(asked.counts),
                        run["ttft_ms"]["median"].get<double>(), run["wall_ms"]["median"].get<double>(),
                        100 * run["share_of_rows"].get<double>(), run["count_reads"].get<int>(),
                        run["same_logits_every_time"].get<bool>() ? "" : "  LOGITS DIFFER FROM RUN TO RUN");
            std::fflush(stdout);
            figures["runs"].push_back(run);
            if (!asked.json.empty()) write(asked.json, figures); // stays, whatever comes next
        }
    }
}

} // namespace engine
