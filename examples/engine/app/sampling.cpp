// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/sampling.hpp"

#include "engine/app/number_text.hpp"
#include "engine/error.hpp"

#include <uniprefill/core/fixed_point.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

namespace engine {
namespace {

std::uint64_t rotate_left(std::uint64_t value, int bits) {
    return (value << bits) | (value >> (64 - bits));
}

} // namespace

std::int32_t greedy(const float* logits, std::int32_t count) {
    std::int32_t best = 0;
    for (std::int32_t id = 0; id < count; ++id) {
        if (!std::isfinite(logits[id])) {
            throw error("logit of token " + std::to_string(id), "a finite number", short_number(logits[id]));
        }
        if (logits[id] > logits[best]) best = id;
    }
    return best;
}

sampler::sampler(const sampling_options& options)
    : options_(options) {
    if (!(options.temperature >= 0) || !std::isfinite(options.temperature)) {
        throw error("temperature", "a finite number of at least 0", short_number(options.temperature));
    }
    if (options.top_k < 0) throw error("top-k", "0 (all tokens) or more", std::to_string(options.top_k));
    if (!(options.top_p > 0 && options.top_p <= 1)) {
        throw error("top-p", "a number in (0, 1]", short_number(options.top_p));
    }
    // SplitMix64 (Steele, Lea and Flood 2014) spreads the seed, so that near seeds give unlike states.
    std::uint64_t x = options.seed;
    for (std::uint64_t& word : state_) {
        x += 0x9e3779b97f4a7c15u;
        std::uint64_t z = x;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        word = z ^ (z >> 31);
    }
}

std::uint64_t sampler::random() {
    const std::uint64_t result = rotate_left(state_[1] * 5, 7) * 9;
    const std::uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = rotate_left(state_[3], 45);
    return result;
}

std::uint64_t sampler::random_below(std::uint64_t bound) {
    // Lemire 2019: the high half of a product is uniform once the few low halves that fall short are drawn
    // again.
    const std::uint64_t short_by = (0 - bound) % bound;
    for (;;) {
        const auto product = uniprefill::wide_product::of(random(), bound);
        if (product.low >= short_by) return product.high;
    }
}

std::int32_t sampler::next(const float* logits, std::int32_t count) {
    const std::int32_t best = greedy(logits, count);
    if (options_.temperature == 0) return best;

    candidates_.clear();
    const auto top = static_cast<double>(logits[best]);
    for (std::int32_t id = 0; id < count; ++id) {
        const double relative = std::exp((static_cast<double>(logits[id]) - top) / options_.temperature);
        const auto weight = static_cast<std::uint64_t>(relative * 0x1p40);
        if (weight > 0) candidates_.emplace_back(weight, id);
    }
    const auto likelier = [](const auto& a, const auto& b) {
        return a.first != b.first ? a.first > b.first : a.second < b.second;
    };
    const auto top_k = static_cast<std::size_t>(options_.top_k);
    if (top_k > 0 && top_k < candidates_.size()) {
        std::nth_element(candidates_.begin(), candidates_.begin() + options_.top_k, candidates_.end(),
                         likelier);
        candidates_.resize(top_k);
    }
    std::sort(candidates_.begin(), candidates_.end(), likelier);

    std::uint64_t total = 0;
    for (const auto& candidate : candidates_) {
        total += candidate.first;
    }
    if (options_.top_p < 1) {
        const auto wanted = uniprefill::unit_fraction::from(options_.top_p);
        std::uint64_t held = 0;
        std::size_t kept = 0;
        while (kept < candidates_.size() &&
               (kept == 0 || !uniprefill::at_least_fraction(held, wanted, total))) {
            held += candidates_[kept++].first;
        }
        candidates_.resize(kept);
        total = held;
    }

    std::uint64_t drawn = random_below(total);
    for (const auto& candidate : candidates_) {
        if (drawn < candidate.first) return candidate.second;
        drawn -= candidate.first;
    }
    return best; // not reached: the weights sum to total
}

} // namespace engine
