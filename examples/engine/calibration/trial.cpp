// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/trial.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace engine::calibration {

trial::trial(window_reader& reader, const cost_model& cost, std::function<bool()> go_on)
    : reader_(reader)
    , cost_(cost)
    , go_on_(std::move(go_on)) {}

/// work(window, worker) for each window, none twice. What it throws is thrown on. @return whether none was
/// left out
template <class Work>
bool trial::for_each_window(const Work& work) {
    std::atomic<std::size_t> next{0};
    std::atomic<bool> stopped{false};
    std::exception_ptr failure;
    std::mutex failing;
    const auto run = [&](std::int32_t worker) {
        try {
            for (std::size_t window = next++; window < reader_.windows(); window = next++) {
                if (stopped || !go_on_()) {
                    stopped = true;
                    return;
                }
                work(window, worker);
            }
        } catch (...) {
            stopped = true;
            const std::lock_guard<std::mutex> lock(failing);
            if (!failure) failure = std::current_exception();
        }
    };
    const auto most = static_cast<std::int32_t>(reader_.windows());
    const std::int32_t workers = std::max(std::min(reader_.workers(), most), 1);
    std::vector<std::thread> others;
    for (std::int32_t worker = 1; worker < workers; ++worker) {
        try {
            others.emplace_back(run, worker);
        } catch (const std::system_error&) {
            break; // those that there are do its work
        }
    }
    run(0);
    for (std::thread& other : others) {
        other.join();
    }
    if (failure) std::rethrow_exception(failure);
    return !stopped;
}

bool trial::read_dense(const std::vector<bool>& layers) {
    return for_each_window(
        [&](std::size_t window, std::int32_t worker) { reader_.read_dense(window, layers, worker); });
}

std::optional<score> trial::run(const choice& chosen) {
    std::vector<window_reader::answer> answers(reader_.windows());
    const bool whole = for_each_window([&](std::size_t window, std::int32_t worker) {
        answers[window] = reader_.read(window, chosen, worker);
    });
    if (!whole) return std::nullopt;
    score made;
    made.work = {0, 0, 0, 0};
    const auto count = static_cast<double>(answers.size());
    for (std::size_t window = 0; window < answers.size(); ++window) {
        const double kl = answers[window].kl;
        const calibration::work took = cost_.of(answers[window].layers, reader_.prompt_tokens(window));
        made.by_window.push_back(kl);
        made.kl += kl / count;
        made.kl_max = std::max(made.kl_max, kl);
        made.work.lin += took.lin / count;
        made.work.att += took.att / count;
        made.work.looks += took.looks / count;
        made.work.total += took.total / count;
    }
    return made;
}

void trial::adopt(const choice& chosen, const std::vector<bool>& layers) {
    // Where there is no time left, runs that nobody will ask for begin where they would have.
    static_cast<void>(for_each_window(
        [&](std::size_t window, std::int32_t worker) { reader_.adopt(window, chosen, layers, worker); }));
}

} // namespace engine::calibration
