// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app/host_info.hpp"
#include "engine/app/number_text.hpp"
#include "engine/app/output_folder.hpp"
#include "engine/app/policy_file.hpp"
#include "engine/calibration/cpu_windows.hpp"
#include "engine/calibration/outcome.hpp"
#include "engine/calibration/sweep.hpp"
#include "engine/commands.hpp"
#include "engine/cpu/threads.hpp"
#include "engine/cuda/program.hpp"
#include "engine/error.hpp"
#include "engine/open_model.hpp"
#include "engine/reading/reader.hpp"

#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <utility>

namespace engine {

namespace {

using clock = std::chrono::steady_clock;

/// What trails may take, of a machine that does something else too.
constexpr std::size_t trail_bytes = std::size_t{6} << 30;

std::vector<std::int32_t> tokens_of(const prompt_model& model, const std::vector<std::string>& files) {
    std::vector<std::int32_t> all;
    for (const std::string& file : files) {
        const std::vector<std::int32_t> one = model.words().encode(read_file("--texts", file));
        all.insert(all.end(), one.begin(), one.end());
    }
    return all;
}

/// The policy's file and, beside it, the measurements: policy.json and policy.measured.json.
struct output_names {
    std::string folder;
    std::string policy;
    std::string measured;
};

output_names names_for(const std::string& path) {
    const std::filesystem::path whole(path);
    if (whole.filename().empty() || std::filesystem::is_directory(whole)) {
        throw error("--out", "the name of a file", engine::quoted(path));
    }
    const std::string folder = whole.parent_path().string();
    return {folder.empty() ? "." : folder, whole.filename().string(),
            whole.stem().string() + ".measured" + whole.extension().string()};
}

std::unique_ptr<calibration::window_reader> reader_of(prompt_model& model, device_kind device,
                                                      const policy& base,
                                                      std::vector<calibration::window> windows) {
    if (device == device_kind::cuda) return cuda_window_reader(model, base, std::move(windows));
    auto& on_cpu = dynamic_cast<loaded_model&>(model);
    return std::make_unique<calibration::cpu_windows>(on_cpu.weights(), on_cpu.ops(), base,
                                                      std::move(windows), trail_bytes);
}

/// The search that was asked for, into @p found.
void look(const calibrate_options& asked, const policy& base, std::int32_t layers,
          const calibration::search_calls& calls, calibration::outcome& found) {
    if (!asked.lin) {
        calibration::search search(layers, {found.divergence, asked.lists, asked.seed}, calls);
        const bool probed = search.probe();
        found.probes = search.probes();
        std::cout << '\n' << calibration::table_of_layers(found) << '\n';
        found.complete = probed && search.run();
        found.path = search.path();
        found.best = search.best();
        found.evaluations = search.evaluations();
        return;
    }
    calibration::sweep_options bounds;
    bounds.lin = *asked.lin;
    bounds.att = *asked.att;
    bounds.worst = asked.worst.value_or(bounds.worst);
    bounds.lists = asked.lists;
    bounds.seed = asked.seed;
    calibration::sweep sweep(layers, bounds, calls);
    found.within = bounds;
    found.complete = sweep.run(calibration::choice_of(base, layers));
    found.path = sweep.path();
    found.best = sweep.best();
    found.evaluations = sweep.evaluations();
    if (found.path.empty()) {
        throw error("--time-limit", "time for a run of the policy to begin with",
                    short_number(asked.minutes));
    }
}

} // namespace

void run_calibrate(const options& chosen) {
    namespace calibrating = calibration;
    const calibrate_options& asked = chosen.calibrate;
    const auto start = clock::now();
    const auto seconds = [start] { return std::chrono::duration<double>(clock::now() - start).count(); };
    const double limit = 60 * asked.minutes;
    const output_names names = names_for(asked.out);
    output_folder out(names.folder);
    cpu::set_threads(chosen.threads);
    const std::unique_ptr<prompt_model> opened = open_model(chosen);
    prompt_model& model = *opened;
    const llama_config& config = model.config();
    if (config.layers < 2) throw error("--model", "at least 2 layers", std::to_string(config.layers));
    if (std::int64_t{asked.tokens} + calibrating::fed_tokens > config.context) {
        throw error("--tokens",
                    "at most " + std::to_string(config.context - calibrating::fed_tokens) +
                        ", the model's context without the tokens that follow",
                    std::to_string(asked.tokens));
    }
    const calibrating::cost_model cost(config, asked.for_length.value_or(config.context));
    const std::vector<calibrating::window> windows =
        calibrating::draw_windows(tokens_of(model, asked.texts), asked.tokens, asked.windows, asked.seed);
    policy base;
    if (asked.lin) {
        base = asked.begin.empty() ? default_policy(model.identity()) : load_policy(asked.begin);
        if (!asked.lists) clear_lists(base);
        calibrating::check_begin(base, config.layers, asked.tokens,
                                 asked.begin.empty() ? "the model's policy: " : "--begin: ");
    }

    // The search leaves some time for the comparison with the fixed list: a run of all windows or five.
    double until = (asked.lin ? 0.97 : 0.9) * limit;
    const auto reader = reader_of(model, chosen.device, base, windows);
    calibrating::trial trial(*reader, cost, [&] { return seconds() < until; });
    const auto candidates =
        asked.lin ? std::vector<bool>(static_cast<std::size_t>(config.layers), true)
                  : calibrating::marked_layers(calibrating::candidate_layers(config.layers), config.layers);
    if (!trial.read_dense(candidates)) {
        throw error("--time-limit", "time for the dense run of each window", short_number(asked.minutes));
    }
    const calibrating::search_calls calls{
        [&](const calibrating::choice& one) { return trial.run(one); },
        [&](const calibrating::choice& one, const std::vector<bool>& layers) { trial.adopt(one, layers); },
        [&](const std::string& line) {
            std::cout << "[" << duration_text(seconds()) << "] " << line << std::endl;
        }};

    calibrating::outcome found;
    found.model = printable(model.name());
    found.device = model.device();
    found.arithmetic = model.arithmetic();
    found.threads = chosen.threads;
    found.tokens = asked.tokens;
    for (const calibrating::window& one : windows) {
        found.begins.push_back(one.begin);
    }
    found.length = cost.length();
    found.attention_share = cost.attention_share();
    found.divergence = asked.divergence.value_or(calibrating::search_options{}.divergence);
    found.seed = asked.seed;
    look(asked, base, config.layers, calls, found);
    found.layers_run = reader->layers_run();
    found.layers_replayed = reader->layers_replayed();
    until = limit;
    for (const calibrating::choice& one : calibrating::fixed_list_choices(found.best.choice)) {
        const auto measured = trial.run(one);
        if (!measured) break;
        found.baseline.push_back({one, *measured});
        if (measured->work.total < found.best.measured.work.total) break;
    }
    found.seconds = seconds();
    out.write({{names.policy, write_policy(calibrating::policy_of(found, base))},
               {names.measured, calibrating::json_of(found)}});
    std::cout << '\n' << calibrating::summary_of(found) << "\nThe policy: " << asked.out << '\n';
}

} // namespace engine
