// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/serving/simulation.hpp"

#include "engine/app/sampling.hpp"

#include <algorithm>
#include <chrono>
#include <ctime>

namespace engine {

namespace {

/// Seconds since some moment.
double reading(const step_clock& clock) {
    if (clock.processor_time) {
        return static_cast<double>(std::clock()) / CLOCKS_PER_SEC / clock.threads;
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

} // namespace

simulation simulate(server& serving, const std::vector<arrival>& workload, const step_clock& clock,
                    const std::function<void(double)>& progress) {
    simulation made;
    made.requests.resize(workload.size());
    double now = 0;
    std::size_t arrived = 0;
    std::size_t finished = 0;
    while (finished < workload.size()) {
        if (serving.idle()) now = std::max(now, workload[arrived].seconds);
        for (; arrived < workload.size() && workload[arrived].seconds <= now; ++arrived) {
            made.requests[static_cast<std::size_t>(serving.submit(workload[arrived].request))].arrived =
                workload[arrived].seconds;
        }
        const double start = reading(clock);
        step_sample sample;
        sample.did = serving.step();
        now += clock.fixed > 0 ? clock.fixed : reading(clock) - start;
        for (const step_outcome::emitted& output : sample.did.outputs) {
            request_times& times = made.requests[static_cast<std::size_t>(output.request)];
            if (times.first_token == 0) times.first_token = now;
            if (output.token) times.last_token = now;
            if (output.finished) {
                times.finished = now;
                ++finished;
            }
        }
        sample.end = now;
        sample.pages = serving.pool().num_taken();
        sample.cached_pages = serving.cached_pages();
        sample.dense_pages = serving.dense_pages();
        sample.running = serving.num_running();
        sample.waiting = serving.num_waiting();
        made.steps.push_back(std::move(sample));
        if (progress) progress(static_cast<double>(finished) / static_cast<double>(workload.size()));
    }
    made.seconds = now - workload.front().seconds;
    serving.forget_prefixes();
    made.leaked_pages = serving.pool().num_taken();
    return made;
}

std::vector<std::int32_t> run_alone(loaded_model& model, const policy& policy, const serving_request& asked) {
    reader pass(model, policy, static_cast<std::int32_t>(asked.prompt.size()), asked.new_tokens);
    pass.prefill(asked.prompt);
    std::vector<std::int32_t> tokens = asked.prompt;
    for (std::int32_t i = 0; i < asked.new_tokens; ++i) {
        const std::int32_t token = greedy(pass.logits().data(), model.config().vocab);
        if (model.words().ends_generation(token)) break;
        tokens.push_back(token);
        if (i + 1 < asked.new_tokens) pass.feed_one(token);
    }
    return tokens;
}

} // namespace engine
