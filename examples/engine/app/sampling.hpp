// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace engine {

struct sampling_options {
    double temperature = 0; ///< 0: greedy, and everything below is ignored
    std::int32_t top_k = 0; ///< only the k likeliest tokens; 0: all
    double top_p = 1;       ///< only the fewest likeliest tokens that hold this share
    std::uint64_t seed = 0;
};

/// The largest of `count` >= 1 logits; ties go to the lower id. Throws `error` on NaN or infinity.
std::int32_t greedy(const float* logits, std::int32_t count);

/// Draws tokens. The same seed and logits give the same tokens with any standard library and compiler: the
/// generator is ours (xoshiro256**, Blackman and Vigna 2018), probabilities are integers (2^-40 of the
/// likeliest token's) before anything is decided by them, and ties go to the lower id.
class sampler {
  public:
    /// Throws `error` unless temperature >= 0 is finite, top_k >= 0 and top_p in (0, 1].
    explicit sampler(const sampling_options& options);

    std::int32_t next(const float* logits, std::int32_t count);

  private:
    std::uint64_t random();
    std::uint64_t random_below(std::uint64_t bound);

    sampling_options options_;
    std::uint64_t state_[4];
    std::vector<std::pair<std::uint64_t, std::int32_t>> candidates_; // weight, id
};

} // namespace engine
