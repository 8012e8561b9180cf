// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/policy_file.hpp"
#include "engine/app/report.hpp"

#include <nlohmann/json.hpp>

#include <cstddef>

namespace engine {
namespace {

using json = nlohmann::ordered_json;

json to_json(const prefill_run& run) {
    return {{"ttft_s", run.ttft_s},
            {"peak_memory_bytes", run.peak_memory_bytes > 0 ? json(run.peak_memory_bytes) : json(nullptr)},
            {"generated_ids", run.generated},
            {"generated_text", run.generated_text}};
}

json to_json(const quality& compared, bool on_real_tokens) {
    return {{"kl_mean", compared.kl_mean},
            {"kl_median", compared.kl_median},
            {"kl_max", compared.kl_max},
            {"agree", compared.agree},
            {"agree_sure", compared.agree_sure},
            {"dnll", compared.dnll},
            {"dense_nll", compared.dense_nll},
            {"positions", compared.positions},
            {"sure_positions", compared.sure_positions},
            {"tokens", compared.real_tokens},
            {"on_real_tokens", on_real_tokens}};
}

json layers_to_json(const report& made) {
    json out = json::array();
    for (std::size_t i = 0; i < made.sparsified.layers.size(); ++i) {
        const layer_row& row = made.sparsified.layers[i];
        json one = {{"layer", row.layer},
                    {"rows_in", row.rows_in},
                    {"rows_kept", row.rows_kept},
                    {"share", row.share},
                    {"dropped_mass_share", row.dropped_mass_share},
                    {"seconds", row.seconds},
                    {"dense_seconds", nullptr},
                    {"selects", row.selects}};
        if (i < made.dense.layers.size()) one["dense_seconds"] = made.dense.layers[i].seconds;
        if (row.selects) one["reason"] = row.reason;
        out.push_back(one);
    }
    return out;
}

json masses_to_json(const report& made) {
    json out = json::array();
    for (const selecting_layer_masses& seen : made.masses) {
        out.push_back({{"layer", seen.layer},
                       {"rule", seen.rule},
                       {"block_mass", seen.block_mass},
                       {"block_first_position", seen.block_first_position},
                       {"kept", seen.kept},
                       {"forced", seen.forced}});
    }
    return out;
}

/// Runs of neighbours that were dropped at the same layer.
json dropped_to_json(const std::vector<std::int32_t>& drop_layer) {
    json out = json::array();
    std::size_t start = 0;
    for (std::size_t i = 1; i <= drop_layer.size(); ++i) {
        if (i < drop_layer.size() && drop_layer[i] == drop_layer[start]) continue;
        if (drop_layer[start] >= 0) {
            out.push_back({{"first", start}, {"last", i - 1}, {"layer", drop_layer[start]}});
        }
        start = i;
    }
    return out;
}

json machine_to_json(const machine_info& of) {
    json out = {{"cpu", of.cpu}};
    if (of.device.empty()) {
        out["threads"] = of.threads;
    } else {
        out["device"] = of.device;
    }
    out["arithmetic"] = of.arithmetic;
    return out;
}

} // namespace

std::string report_json(const report& made) {
    const json out = {{"tokens", made.tokens},
                      {"dense", to_json(made.dense)},
                      {"sparsified", to_json(made.sparsified)},
                      {"speedup", made.speedup()},
                      {"lin", made.lin},
                      {"att", made.att},
                      {"estimator_pairs", made.estimator_pairs},
                      {"quality", to_json(made.quality, made.quality_on_real_tokens)},
                      {"layers", layers_to_json(made)},
                      {"model", made.model},
                      {"prompt", made.prompt_name},
                      {"machine", machine_to_json(made.machine)},
                      {"policy", json::parse(write_policy(made.policy))},
                      {"selecting_layers", masses_to_json(made)},
                      {"dropped", dropped_to_json(made.drop_layer)}};
    return out.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

} // namespace engine
