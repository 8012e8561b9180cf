// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Gather, residual add and RMSNorm in one: sums to the bit, norms within the stated error of one in double
// precision, and the same bits in and out of place, for any number of thread blocks, and when done one after
// the other.

#include "device_tensors.cuh"
#include "support/cuda_calls.hpp"

#include <uniprefill/propagate/add_norm.cuh>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

using namespace propagate_test;
using uniprefill_test::captured_graph;
using uniprefill_test::device_array;
using uniprefill_test::has_device;

namespace {

constexpr double stated_error = 1.0 / (1 << 19);

template <class Element>
bool same_bits(const std::vector<Element>& a, const std::vector<Element>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(Element)) == 0;
}

template <class T>
std::vector<T> random_elements(std::mt19937& random, std::size_t count, float spread) {
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<T> values(count);
    for (T& value : values) {
        value = up::from_float<T>(normal(random));
    }
    return values;
}

/// Hidden states and residuals, and what becomes of them.
template <class Element, class Weight>
class norm_case {
  public:
    norm_case(std::mt19937& random, std::int32_t rows, std::int32_t hidden_size, std::int32_t gap,
              bool one_plus)
        : rows_(rows)
        , size_(hidden_size)
        , stride_(hidden_size + gap)
        , one_plus_(one_plus)
        , hidden(random_elements<Element>(random, count(), 1.0f))
        , residual(random_elements<Element>(random, count(), 3.0f))
        , weight_(random_elements<Weight>(random, static_cast<std::size_t>(hidden_size), 0.5f))
        , on_weight_(weight_) {}

    [[nodiscard]] std::size_t count() const {
        return static_cast<std::size_t>(rows_) * static_cast<std::size_t>(stride_);
    }
    template <class T>
    [[nodiscard]] up::element_rows<T> view(const device_array<Element>& tensor) const {
        return {tensor.data(), stride_, size_, rows_};
    }
    [[nodiscard]] up::add_norm<Element, Weight> arguments(const device_array<Element>& in_hidden,
                                                          const device_array<Element>& in_residual,
                                                          const device_array<Element>& out_hidden,
                                                          const device_array<Element>& out_residual) const {
        up::add_norm<Element, Weight> made;
        made.hidden = view<const Element>(in_hidden);
        made.residual = view<const Element>(in_residual);
        made.out_hidden = view<Element>(out_hidden);
        made.out_residual = view<Element>(out_residual);
        made.weight = on_weight_.data();
        made.epsilon = epsilon;
        made.one_plus_weight = one_plus_;
        return made;
    }
    /// Checks the results of rows @p map of the inputs.
    void check(const std::vector<std::int32_t>& map, const std::vector<Element>& normed,
               const std::vector<Element>& summed) const {
        double worst = 0;
        std::int64_t wrong_sums = 0;
        for (std::size_t j = 0; j < map.size(); ++j) {
            const std::size_t from = static_cast<std::size_t>(map[j]) * static_cast<std::size_t>(stride_);
            const std::size_t to = j * static_cast<std::size_t>(stride_);
            double squares = 0;
            std::vector<double> sums(static_cast<std::size_t>(size_));
            for (std::size_t i = 0; i < sums.size(); ++i) {
                const Element sum = up::from_float<Element>(up::to_float(hidden[from + i]) +
                                                            up::to_float(residual[from + i]));
                wrong_sums += up::to_float(summed[to + i]) == up::to_float(sum) ? 0 : 1;
                sums[i] = static_cast<double>(up::to_float(sum));
                squares += sums[i] * sums[i];
            }
            const double scale = 1.0 / std::sqrt(squares / size_ + static_cast<double>(epsilon));
            for (std::size_t i = 0; i < sums.size(); ++i) {
                const double factor = (one_plus_ ? 1.0 : 0.0) + static_cast<double>(up::to_float(weight_[i]));
                const double exact = sums[i] * scale * factor;
                const auto got = static_cast<double>(up::to_float(normed[to + i]));
                // Rounding is monotone: whatever lies within the error rounds to something between these.
                const double slack = std::abs(exact) * stated_error;
                const double low = static_cast<double>(
                    up::to_float(up::from_float<Element>(static_cast<float>(exact - slack))));
                const double high = static_cast<double>(
                    up::to_float(up::from_float<Element>(static_cast<float>(exact + slack))));
                if (!(got >= low && got <= high)) {
                    FAIL("row " << j << ", element " << i << ": " << exact << " expected, came " << got);
                }
                worst = std::max(worst, std::abs(exact) > 1e-3 ? std::abs(got / exact - 1) : 0);
            }
        }
        REQUIRE(wrong_sums == 0);
        INFO("largest relative error " << worst);
        CHECK(worst <
              1.0 / 256 + 2 * stated_error); // what rounding to a bfloat16 adds, and half has more bits
    }

    static constexpr float epsilon = 1e-5f;

  private:
    std::int32_t rows_, size_, stride_;
    bool one_plus_;

  public:
    std::vector<Element> hidden;
    std::vector<Element> residual;

  private:
    std::vector<Weight> weight_;
    device_array<Weight> on_weight_;
};

template <class Element, class Weight>
void run_case(std::mt19937& random, std::int32_t full_rows, std::int32_t hidden_size, std::int32_t gap,
              bool one_plus, std::uint32_t kind) {
    const std::int32_t rows = uniprefill_test::scaled(full_rows, 10);
    INFO(rows << " rows of " << hidden_size << " elements of " << sizeof(Element) << " bytes, gap " << gap);
    const norm_case<Element, Weight> what(random, rows, hidden_size, gap, one_plus);
    const keep_set kept(keeps_of_kind(random, rows, kind), {0, rows});
    const device_keep_set map(kept);
    const device_scratch scratch;
    const std::vector<std::int32_t> kept_rows(kept.kept_to_old.begin(),
                                              kept.kept_to_old.begin() + kept.kept());
    const auto rest = [&](std::vector<Element> tensor) {
        return std::vector<Element>(tensor.begin() + kept.kept() * std::int64_t{hidden_size + gap},
                                    tensor.end());
    };
    device_array<Element> hidden(what.hidden), residual(what.residual), normed(what.hidden),
        summed(what.residual);
    const auto run = [&](const up::row_map& rows_of, const auto& a, const auto& b, const auto& c,
                         const auto& d, std::int32_t max_ctas) {
        check_ok(up::compact_add_norm(rows_of, what.arguments(a, b, c, d), scratch.view(),
                                      current_device(max_ctas), nullptr));
    };
    run(map.view, hidden, residual, normed, summed, 0);
    const std::vector<Element> want_normed = normed.get();
    const std::vector<Element> want_summed = summed.get();
    what.check(kept_rows, want_normed, want_summed);
    REQUIRE(same_bits(rest(want_normed), rest(what.hidden))); // rows beyond the kept ones
    REQUIRE(same_bits(hidden.get(), what.hidden));
    REQUIRE(same_bits(residual.get(), what.residual));

    for (const std::int32_t max_ctas : {1, 2, 7, 0}) {
        INFO("max_ctas " << max_ctas);
        normed.set(what.hidden);
        summed.set(what.residual);
        run(map.view, hidden, residual, normed, summed, max_ctas);
        REQUIRE(same_bits(normed.get(), want_normed));
        REQUIRE(same_bits(summed.get(), want_summed));
        // In place, straight and crosswise.
        run(map.view, normed, summed, normed, summed, max_ctas); // of results: only to have other contents
        normed.set(what.hidden);
        summed.set(what.residual);
        run(map.view, normed, summed, normed, summed, max_ctas);
        REQUIRE(same_bits(normed.get(), want_normed));
        REQUIRE(same_bits(summed.get(), want_summed));
        normed.set(what.residual);
        summed.set(what.hidden);
        run(map.view, summed, normed, normed, summed, max_ctas);
        if (gap == 0) {
            std::vector<Element> crossed = normed.get();
            crossed.resize(static_cast<std::size_t>(kept.kept()) * static_cast<std::size_t>(hidden_size));
            std::vector<Element> wanted = want_normed;
            wanted.resize(crossed.size());
            REQUIRE(same_bits(crossed, wanted));
        }
    }

    // One after the other: gather both, then add and normalise where they are.
    device_array<Element> gathered_hidden(what.hidden), gathered_residual(what.residual);
    const auto bytes_of = [&](const device_array<Element>& tensor) {
        constexpr auto size = static_cast<std::int64_t>(sizeof(Element));
        return up::byte_rows{tensor.data(), (hidden_size + gap) * size, hidden_size * size, rows};
    };
    check_ok(
        up::compact(map.view, bytes_of(hidden), bytes_of(gathered_hidden), {}, current_device(), nullptr));
    check_ok(up::compact(map.view, bytes_of(residual), bytes_of(gathered_residual), {}, current_device(),
                         nullptr));
    up::row_map every = map.view;
    every.identity = true;
    every.num_kept = rows;
    run(every, gathered_hidden, gathered_residual, gathered_hidden, gathered_residual, 0);
    const auto kept_elements =
        static_cast<std::size_t>(kept.kept()) * static_cast<std::size_t>(hidden_size + gap);
    const auto head = [&](std::vector<Element> tensor) {
        tensor.resize(kept_elements);
        return tensor;
    };
    if (gap == 0) {
        REQUIRE(same_bits(head(gathered_hidden.get()), head(want_normed)));
        REQUIRE(same_bits(head(gathered_residual.get()), head(want_summed)));
    }
}

} // namespace

TEST_CASE("compact_add_norm: element types, weights and sizes") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    std::uint32_t kind = 0;
    for (const std::int32_t size : {520, 8, 64, 1032, 4096, 5376}) {
        const std::int32_t gap = size % 3 == 0 ? 8 : 0;
        run_case<up::bfloat16, up::bfloat16>(random, 200, size, gap, kind % 2 == 0, kind);
        run_case<up::half, up::half>(random, 150, size, 8 - gap, kind % 2 == 1, kind + 2);
        run_case<float, float>(random, 100, size, gap, kind % 2 == 0, kind + 4);
        run_case<up::bfloat16, float>(random, 120, size, gap, kind % 2 == 1, kind + 6);
        ++kind;
    }
    // The longest rows of two vectors for each thread, and of all.
    run_case<up::bfloat16, up::bfloat16>(random, 60, 16384, 0, true, 7);
    run_case<up::bfloat16, up::bfloat16>(random, 60, 16392, 0, true, 7);
    run_case<up::bfloat16, up::bfloat16>(random, 40, 32768, 0, false, 6);
    run_case<float, float>(random, 40, 16384, 0, false, 4);
}

TEST_CASE("compact_add_norm: many rows in place") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 1);
    // More rows than there are bits that tell which are read.
    constexpr std::int32_t rows = 40000;
    const norm_case<up::bfloat16, up::bfloat16> what(random, rows, 512, 0, false);
    const device_scratch scratch;
    device_array<up::bfloat16> hidden(what.hidden), residual(what.residual), normed(what.hidden),
        summed(what.residual);
    for (const std::uint32_t kind : spread_cases(16, 3)) {
        const up::cuda_device device = current_device();
        const keep_set kept(keeps_of_kind(random, rows, kind), {0, rows});
        const device_keep_set map(kept);
        normed.set(what.hidden);
        summed.set(what.residual);
        check_ok(up::compact_add_norm(map.view, what.arguments(hidden, residual, normed, summed), {}, device,
                                      nullptr));
        const auto want_normed = normed.get();
        const auto want_summed = summed.get();
        normed.set(what.hidden);
        summed.set(what.residual);
        check_ok(up::compact_add_norm(map.view, what.arguments(normed, summed, normed, summed),
                                      scratch.view(), device, nullptr));
        INFO("kind " << kind << ": " << kept.kept() << " rows kept");
        REQUIRE(same_bits(normed.get(), want_normed));
        REQUIRE(same_bits(summed.get(), want_summed));
    }
}

TEST_CASE("compact_add_norm: a captured graph follows maps and counts; NaN stays in its row") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 2);
    constexpr std::int32_t rows = 500;
    norm_case<up::half, up::half> what(random, rows, 256, 0, false);
    for (std::size_t i = 0; i < 3; ++i) {
        what.hidden[i * 256 * 100 + 5] = up::from_float<up::half>(std::numeric_limits<float>::quiet_NaN());
    }
    device_array<up::half> hidden(what.hidden), residual(what.residual), normed(what.hidden),
        summed(what.residual);
    device_keep_set map(rows, 1);
    const device_scratch scratch;
    const up::cuda_device device = current_device();
    captured_graph graph([&](cudaStream_t stream) {
        check_ok(up::compact_add_norm(map.view, what.arguments(normed, summed, normed, summed),
                                      scratch.view(), device, stream));
    });
    for (const std::uint32_t kind : spread_cases(16, 3)) {
        const keep_set kept(keeps_of_kind(random, rows, kind), {0, rows});
        map.set(kept);
        normed.set(what.hidden);
        summed.set(what.residual);
        graph.replay();
        const auto got = normed.get();
        const auto got_sum = summed.get();
        for (std::int32_t j = 0; j < kept.kept(); ++j) {
            const std::int32_t old = kept.kept_to_old[static_cast<std::size_t>(j)];
            const float first = up::to_float(got[static_cast<std::size_t>(j) * 256]);
            REQUIRE(std::isnan(first) == (old % 100 == 0 && old < 300));
        }
        normed.set(what.hidden);
        summed.set(what.residual);
        check_ok(up::compact_add_norm(map.view, what.arguments(hidden, residual, normed, summed), {}, device,
                                      nullptr));
        REQUIRE(same_bits(normed.get(), got));
        REQUIRE(same_bits(summed.get(), got_sum));
    }
}

TEST_CASE("compact_add_norm: maps and counts that make no sense leave rows alone") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 3);
    constexpr std::int32_t rows = 64;
    const norm_case<float, float> what(random, rows, 128, 0, false);
    std::vector<std::int32_t> map(rows);
    for (std::size_t j = 0; j < map.size(); ++j) {
        const std::int32_t wild[] = {-1, rows, INT32_MIN, INT32_MAX};
        map[j] = j % 3 == 0 ? wild[j / 3 % 4] : static_cast<std::int32_t>(random() % rows);
    }
    device_keep_set hostile(rows, 1);
    hostile.set_raw(map, {0, INT32_MAX});
    const device_scratch scratch;
    device_array<float> hidden(what.hidden), residual(what.residual), normed(what.hidden),
        summed(what.residual);
    const up::cuda_device device = current_device();
    const uniprefill_test::cuda_calls before = uniprefill_test::cuda_calls::now();
    check_ok(up::compact_add_norm(hostile.view, what.arguments(hidden, residual, normed, summed), {}, device,
                                  nullptr));
    CHECK(before.since().empty());
    const auto got = normed.get();
    const auto got_sum = summed.get();
    for (std::size_t j = 0; j < map.size(); ++j) {
        const std::size_t to = j * 128;
        if (map[j] >= 0 && map[j] < rows) {
            const std::size_t from = static_cast<std::size_t>(map[j]) * 128;
            CHECK(got_sum[to] == what.hidden[from] + what.residual[from]);
        } else {
            CHECK(got[to] == what.hidden[to]);
            CHECK(got_sum[to] == what.residual[to]);
        }
    }
    check_ok(up::compact_add_norm(hostile.view, what.arguments(normed, summed, normed, summed),
                                  scratch.view(), current_device(), nullptr));
    CHECK(normed.get().size() == got.size()); // it came to an end
}

TEST_CASE("compact_add_norm: wrong arguments are named") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(1);
    const norm_case<up::half, up::half> what(random, 8, 64, 0, false);
    device_array<up::half> a(what.hidden), b(what.residual), c(what.hidden), d(what.residual);
    const keep_set kept(std::vector<bool>(8, true), {0, 8});
    const device_keep_set map(kept);
    const auto refuses = [&](up::status_code code, const char* argument, auto spoil) {
        auto norm = what.arguments(a, b, c, d);
        spoil(norm);
        const up::status result = up::compact_add_norm(map.view, norm, {}, current_device(), nullptr);
        CHECK(up::to_string(result.code) == std::string(up::to_string(code)));
        CHECK(result.argument == std::string(argument));
    };
    using code = up::status_code;
    refuses(code::invalid_argument, "norm.residual", [](auto& n) { n.residual.row_elements = 56; });
    refuses(code::out_of_range, "norm.hidden", [](auto& n) { n.hidden.num_rows = 7; });
    refuses(code::out_of_range, "norm.out_hidden", [](auto& n) { n.out_hidden.num_rows = 7; });
    refuses(code::invalid_argument, "norm.out_residual", [](auto& n) { n.out_residual.data = nullptr; });
    refuses(code::misaligned, "norm.hidden", [](auto& n) { n.hidden.data += 1; });
    refuses(code::misaligned, "norm.out_hidden", [](auto& n) { n.out_hidden.row_stride = 68; });
    refuses(code::misaligned, "norm.weight", [](auto& n) { n.weight += 1; });
    refuses(code::invalid_argument, "norm.weight", [](auto& n) { n.weight = nullptr; });
    refuses(code::invalid_argument, "norm.epsilon", [](auto& n) { n.epsilon = 0; });
    refuses(code::invalid_argument, "norm.out_residual", [](auto& n) { n.out_residual = n.out_hidden; });
    refuses(code::invalid_argument, "norm.out_hidden", [&](auto& n) { n.out_hidden.data = a.data() + 64; });
    refuses(code::invalid_argument, "workspace", [&](auto& n) { n.out_hidden.data = a.data(); });
    refuses(code::out_of_range, "norm.hidden.row_elements", [](auto& n) {
        n.hidden.row_elements = n.residual.row_elements = n.out_hidden.row_elements =
            n.out_residual.row_elements = 0;
    });
    CHECK(
        up::compact_add_norm(kept.view, what.arguments(a, b, c, d), {}, current_device(), nullptr).argument ==
        std::string("rows.space"));
}
