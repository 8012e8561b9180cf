// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// One prompt to estimate, and the estimator as each set of compiler flags makes it.
#pragma once

#include <cstdint>
#include <memory>

namespace estimator_bench {

enum class element { f32, f16, bf16 };

/// The shape of SmolLM2-135M's attention by default.
struct shape {
    std::int32_t keys = 8192;
    std::int32_t heads = 9;
    std::int32_t kv_heads = 3;
    std::int32_t head_dim = 64;
    element type = element::f32;

    /// Multiplications and additions of q.k over 128 observation rows.
    [[nodiscard]] double flops() const { return 2.0 * heads * 128 * keys * head_dim; }
};

/// A prompt of random queries and keys, with everything allocated.
class estimator_case {
  public:
    virtual ~estimator_case() = default;
    virtual void run() = 0;
};

std::unique_ptr<estimator_case> make_native(const shape& what); ///< -O3 -march=native
std::unique_ptr<estimator_case> make_avx2(const shape& what);   ///< -O3 -mavx2 -mfma
std::unique_ptr<estimator_case> make_plain(const shape& what);  ///< -O2

} // namespace estimator_bench
