// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/windows.hpp"

#include "engine/cuda/compare_rows.hpp"
#include "engine/cuda/policy_session.hpp"
#include "engine/cuda/program.hpp"
#include "engine/cuda/prompt.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace engine::cuda {

using calibration::choice;

namespace {

/// Sizes of products differ in whole tiles of this many rows.
constexpr std::int32_t row_multiple = 128;

} // namespace

cuda_windows::desk::desk(const cuda_model& model, const session_options& options, std::int32_t rows)
    : session(model, options)
    , divergences(static_cast<std::size_t>(rows))
    , divergences_here(static_cast<std::size_t>(rows))
    , now(calibration::dense_choice(model.config().layers)) {
    session.count(true);
}

cuda_windows::cuda_windows(const cuda_model& model, policy base, std::vector<calibration::window> windows,
                           std::int32_t workers, std::size_t spare)
    : model_(model)
    , base_(std::move(base))
    , windows_(std::move(windows))
    , spare_(spare)
    , places_(windows_.size()) {
    if (windows_.empty()) throw error("windows", "at least one", "none");
    const calibration::window& first = windows_.front();
    for (const calibration::window& one : windows_) {
        if (one.prompt.size() != first.prompt.size() || one.fed.size() != first.fed.size()) {
            throw error("windows", "prompts of one length", "several");
        }
    }
    const policy none = policy_of(calibration::dense_choice(layers()), base_);
    session_options options = options_under(none, static_cast<std::int32_t>(first.prompt.size()),
                                            std::max(static_cast<std::int32_t>(first.fed.size()), 1));
    options.row_multiple = row_multiple;
    for (std::int32_t i = 0; i < std::max(workers, 1); ++i) {
        desks_.push_back(std::make_unique<desk>(model_, options, options.following + 1));
    }
    for (place& one : places_) {
        one.adopted = calibration::dense_choice(layers());
    }
}

std::int32_t cuda_windows::prompt_tokens(std::size_t window) const {
    return static_cast<std::int32_t>(windows_[window].prompt.size());
}

void cuda_windows::prefill(std::size_t window, const choice& chosen, desk& by, bool left) {
    place& at = places_[window];
    if (!(by.now == chosen)) {
        change_policy(by.session, policy_of(chosen, base_));
        by.now = chosen;
    }
    // The latest layer at which the adopted choice's trail can be joined.
    std::int32_t start = 0;
    if (at.keeps) {
        start = std::min(first_difference(chosen, at.adopted), layers() - 1);
        while (start > 0 && !at.left.begins_at(start)) {
            --start;
        }
    }
    by.session.leave_trail(left ? &at.left : nullptr);
    if (start > 0) {
        by.session.prefill_from(at.left, start, windows_[window].prompt);
    } else {
        by.session.prefill(windows_[window].prompt);
    }
    by.session.leave_trail(nullptr);
    layers_replayed_ += start;
    layers_run_ += layers() - start;
}

std::size_t cuda_windows::bytes_wanted(const place& at, const std::vector<bool>& layers) const {
    const llama_config& config = model_.config();
    const std::size_t rows = windows_.front().prompt.size();
    std::size_t wanted = 0;
    if (at.left.k.size() == 0) {
        wanted += 4 * rows * static_cast<std::size_t>(config.layers) *
                  static_cast<std::size_t>(config.kv_heads * config.head_dim);
    }
    for (std::size_t layer = 0; layer < static_cast<std::size_t>(config.layers); ++layer) {
        const bool kept = layer < at.left.stops.size() && at.left.stops[layer].hidden.size() > 0;
        const bool asked = layers.empty() || layers[layer];
        if (asked && !kept) wanted += 4 * rows * static_cast<std::size_t>(config.hidden);
    }
    return wanted;
}

/// What is taken of a room counts twice until the room goes: that errs on the safe side.
cuda_windows::room::room(cuda_windows& of, std::size_t wanted)
    : of_(of)
    , bytes_(wanted) {
    if (wanted == 0) return;
    const std::lock_guard<std::mutex> lock(of_.rooms_);
    std::size_t free = 0;
    std::size_t all = 0;
    check(cudaMemGetInfo(&free, &all), "memory");
    is_there_ = free > of_.spare_ + of_.set_aside_ + wanted;
    if (!is_there_) bytes_ = 0;
    of_.set_aside_ += bytes_;
}

cuda_windows::room::~room() {
    const std::lock_guard<std::mutex> lock(of_.rooms_);
    of_.set_aside_ -= bytes_;
}

void cuda_windows::read_dense(std::size_t window, const std::vector<bool>& layers, std::int32_t worker) {
    desk& by = *desks_[static_cast<std::size_t>(worker)];
    place& at = places_[window];
    const choice dense = calibration::dense_choice(this->layers());
    forget(window);
    const room aside(*this, bytes_wanted(at, layers));
    const bool left = aside.is_there();
    at.left.may_begin = layers;
    prefill(window, dense, by, left);
    const auto vocab = static_cast<std::size_t>(model_.config().vocab);
    const std::size_t rows = windows_[window].fed.size() + 1;
    if (at.dense.size() == 0) at.dense = device_array<float>(rows * vocab);
    const auto copy = [&](std::size_t row, std::size_t count) {
        check(cudaMemcpyAsync(at.dense.data() + row * vocab, by.session.device_logits(),
                              count * vocab * sizeof(float), cudaMemcpyDeviceToDevice, by.session.queue()),
              "dense answers");
    };
    copy(0, 1);
    by.session.feed(windows_[window].fed);
    copy(1, rows - 1);
    check(cudaStreamSynchronize(by.session.queue()), "dense answers");
    at.keeps = left;
    at.adopted = dense;
}

calibration::window_reader::answer cuda_windows::read(std::size_t window, const choice& chosen,
                                                      std::int32_t worker) {
    desk& by = *desks_[static_cast<std::size_t>(worker)];
    const place& at = places_[window];
    prefill(window, chosen, by, false);
    answer made;
    made.layers = records_of(by.session);
    const std::int32_t vocab = model_.config().vocab;
    const auto rows = static_cast<std::int32_t>(windows_[window].fed.size()) + 1;
    compare_rows(at.dense.data(), by.session.device_logits(), 1, vocab, by.divergences.data(),
                 by.session.queue());
    by.session.feed(windows_[window].fed);
    compare_rows(at.dense.data() + vocab, by.session.device_logits(), rows - 1, vocab,
                 by.divergences.data() + 1, by.session.queue());
    check(cudaMemcpyAsync(by.divergences_here.data(), by.divergences.data(),
                          static_cast<std::size_t>(rows) * sizeof(double), cudaMemcpyDeviceToHost,
                          by.session.queue()),
          "divergences");
    check(cudaStreamSynchronize(by.session.queue()), "divergences");
    for (std::int32_t row = 0; row < rows; ++row) {
        const double divergence = by.divergences_here[static_cast<std::size_t>(row)];
        if (!std::isfinite(divergence)) {
            throw error("logits of window " + std::to_string(window) + ", row " + std::to_string(row),
                        "finite numbers", "others");
        }
        made.kl += divergence / rows;
    }
    return made;
}

void cuda_windows::adopt(std::size_t window, const choice& chosen, const std::vector<bool>& layers,
                         std::int32_t worker) {
    place& at = places_[window];
    if (at.keeps && chosen == at.adopted) return;
    const room aside(*this, bytes_wanted(at, layers));
    const bool left = aside.is_there();
    if (left) {
        at.left.may_begin = layers;
        prefill(window, chosen, *desks_[static_cast<std::size_t>(worker)], true);
    }
    at.keeps = left;
    at.adopted = chosen;
}

void cuda_windows::forget(std::size_t window) {
    places_[window].keeps = false;
}

std::vector<float> cuda_windows::logits(std::size_t window, const choice& chosen, std::int32_t worker) {
    desk& by = *desks_[static_cast<std::size_t>(worker)];
    prefill(window, chosen, by, false);
    std::vector<float> made = by.session.logits();
    by.session.feed(windows_[window].fed);
    const std::vector<float> rest = by.session.logits();
    made.insert(made.end(), rest.begin(), rest.end());
    return made;
}

} // namespace engine::cuda

namespace engine {

std::unique_ptr<calibration::window_reader> cuda_window_reader(const prompt_model& model, const policy& base,
                                                               std::vector<calibration::window> windows) {
    const auto& opened = dynamic_cast<const cuda_prompt_model&>(model);
    // As many as keep the device busy where prompts are short; each costs a cache and rows of one prompt.
    constexpr std::int32_t workers = 4;
    constexpr std::size_t spare = std::size_t{4} << 30;
    return std::make_unique<cuda::cuda_windows>(opened.weights(), base, std::move(windows), workers, spare);
}

} // namespace engine
