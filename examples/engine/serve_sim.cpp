// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app/host_info.hpp"
#include "engine/app/progress.hpp"
#include "engine/commands.hpp"
#include "engine/cpu/threads.hpp"
#include "engine/error.hpp"
#include "engine/serving/serve_report.hpp"

#include <algorithm>
#include <iostream>
#include <limits>
#include <string>

namespace engine {

namespace {

constexpr std::int32_t default_span = 1024;

/// The policy with spans, since a server reads prompts in chunks.
policy serving_policy(const options& chosen, const model_identity& model) {
    options with_rules = chosen;
    with_rules.dense = false;
    policy made = resolve_policy(with_rules, model);
    if (made.span == 0 && !chosen.policy.span) made.span = default_span;
    if (chosen.dense) {
        made.rules.clear();
        clear_lists(made);
        made.name = dense().name;
    }
    return made;
}

/// Fills in what the command line left open.
serve_options resolve(const options& chosen, const policy& policy, const llama_config& config) {
    serve_options made = chosen.serve;
    if (made.workload.trace.empty() && !made.workload.rate) made.workload.rate = default_rate;
    const workload_options& asked = made.workload;
    const std::int64_t tokens = std::int64_t{asked.max_prompt} + asked.max_new;
    if (tokens > config.context) {
        throw error("--max-prompt",
                    "at most " + std::to_string(config.context) +
                        " tokens, the model's context, with --max-new",
                    std::to_string(tokens));
    }
    if (made.budget == 0) {
        made.budget = policy.span > 0 ? policy.span + policy.num_observations - 1 : asked.max_prompt;
    }
    if (made.pages == 0) {
        const std::int64_t longest = uniprefill::num_blocks(static_cast<std::int32_t>(tokens), 16) + 1;
        made.pages = static_cast<std::int32_t>(std::min<std::int64_t>(
            longest * config.layers * std::max(1, made.slots / 2), std::numeric_limits<std::int32_t>::max()));
    }
    return made;
}

server_options server_for(const serve_options& chosen) {
    server_options made;
    made.slots = chosen.slots;
    made.budget = chosen.budget;
    made.pages = chosen.pages;
    made.max_tokens = chosen.workload.max_prompt + chosen.workload.max_new;
    made.preemption = chosen.preemption;
    made.prefix_cache = !chosen.without_prefix_cache;
    return made;
}

/// Requests whose tokens aren't those that they have when they run alone.
std::vector<std::int32_t> differing(loaded_model& model, const policy& policy, const server& served,
                                    const std::vector<arrival>& workload) {
    std::vector<std::int32_t> found;
    progress bar("running each request alone");
    for (std::size_t id = 0; id < workload.size(); ++id) {
        const auto number = static_cast<std::int32_t>(id);
        if (run_alone(model, policy, workload[id].request) != served.request(number).tokens) {
            found.push_back(workload[id].number);
        }
        bar.update(static_cast<double>(id + 1) / static_cast<double>(workload.size()));
    }
    return found;
}

} // namespace

void run_serve_sim(const options& chosen) {
    cpu::set_threads(chosen.threads);
    loaded_model model(chosen.model, chosen.arithmetic);
    serve_report made;
    made.policy = serving_policy(chosen, model.identity());
    made.options = resolve(chosen, made.policy, model.config());
    const std::vector<arrival> workload =
        draw_workload(made.options.workload, read_texts(made.options.workload.texts, model.words()));

    server serving(model, made.policy, server_for(made.options));
    {
        progress bar("serving");
        made.run = simulate(serving, workload,
                            {made.options.step_seconds, made.options.processor_time, chosen.threads},
                            [&](double done) { bar.update(done); });
    }
    made.model = model.weights().name();
    made.machine = {cpu_name(), chosen.threads, cpu::name(model.ops().kind())};
    made.page_tokens = serving.page_rows();
    made.page_bytes = serving.page_bytes();
    made.counts = serving.counts();
    made.requests = served_by(serving, workload, made.run);
    made.checked = made.options.check;
    if (made.checked) made.different = differing(model, made.policy, serving, workload);

    if (chosen.json) {
        std::cout << serve_report_json(made);
    } else {
        print_serve_report(made, std::cout);
    }
    if (!made.different.empty()) {
        throw error("--check", "the tokens that each request has alone",
                    "others for " + std::to_string(made.different.size()) +
                        " requests, the first of them number " + std::to_string(made.different.front()));
    }
}

} // namespace engine
