// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Compiled once for each set of flags; UNIPREFILL_BENCH_MAKE names the function that it defines.

#include "estimator_case.hpp"

#include <uniprefill/core/exceptions.hpp>
#include <uniprefill/importance/importance.hpp>

#include <cstddef>
#include <numeric>
#include <random>
#include <vector>

namespace up = uniprefill;

namespace estimator_bench {
namespace {

template <class T>
std::vector<T> random_rows(std::size_t count, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<T> values(count);
    for (T& value : values) {
        value = up::from_float<T>(normal(random));
    }
    return values;
}

template <class T>
class one_prompt final : public estimator_case {
  public:
    explicit one_prompt(const shape& what)
        : bounds_(limits_of(what))
        , estimator_(bounds_)
        , positions_(static_cast<std::size_t>(what.keys))
        , cu_seqlens_{0, what.keys}
        , masses_(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds_)))
        , memory_(estimator_.workspace_bytes() + up::workspace::alignment) {
        std::mt19937 random(1);
        const auto rows = static_cast<std::size_t>(what.keys);
        const auto heads = static_cast<std::size_t>(what.heads);
        const auto kv_heads = static_cast<std::size_t>(what.kv_heads);
        const auto head_dim = static_cast<std::size_t>(what.head_dim);
        queries_ = random_rows<T>(rows * heads * head_dim, random);
        keys_ = random_rows<T>(rows * kv_heads * head_dim, random);
        std::iota(positions_.begin(), positions_.end(), 0);
    }

    void run() override {
        const std::int64_t d = bounds_.head_dim;
        const std::int32_t rows = bounds_.max_rows;
        up::batch_view batch;
        batch.num_requests = 1;
        batch.num_segments = 1;
        batch.num_rows = rows;
        batch.tags = &tag_;
        batch.cu_seqlens = cu_seqlens_;
        batch.positions = positions_.data();
        const up::head_rows<const T> queries{queries_.data(),   bounds_.num_heads * d, d, rows,
                                             bounds_.num_heads, bounds_.head_dim};
        const up::key_source<T> keys{
            {keys_.data(), bounds_.num_kv_heads * d, d, rows, bounds_.num_kv_heads, bounds_.head_dim}, {}};
        void* start = memory_.data();
        std::size_t space = memory_.size();
        std::align(up::workspace::alignment, estimator_.workspace_bytes(), start, space);
        up::throw_if_failed(estimator_.run(
            queries, keys, {}, batch, up::mass_view::over(masses_.data(), bounds_, up::memory_space::host),
            {}, up::workspace(start, space)));
    }

  private:
    static up::limits limits_of(const shape& what) {
        up::limits bounds;
        bounds.max_rows = what.keys;
        bounds.num_heads = what.heads;
        bounds.num_kv_heads = what.kv_heads;
        bounds.head_dim = what.head_dim;
        return bounds;
    }

    up::limits bounds_;
    up::importance_estimator<> estimator_;
    std::vector<T> queries_;
    std::vector<T> keys_;
    std::vector<std::int32_t> positions_;
    std::int32_t cu_seqlens_[2];
    up::request_tag tag_ = up::request_tag::prefill;
    std::vector<std::int64_t> masses_;
    std::vector<std::byte> memory_;
};

} // namespace

std::unique_ptr<estimator_case> UNIPREFILL_BENCH_MAKE(const shape& what) {
    switch (what.type) {
    case element::f16:
        return std::make_unique<one_prompt<up::half>>(what);
    case element::bf16:
        return std::make_unique<one_prompt<up::bfloat16>>(what);
    case element::f32:
        break;
    }
    return std::make_unique<one_prompt<float>>(what);
}

} // namespace estimator_bench
