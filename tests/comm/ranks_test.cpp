// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Heads spread over 1, 2, 4 and 8 ranks, each a thread, with reductions that users would write.

#include "comm/rank_group.hpp"
#include "comm/tensor_parallel.hpp"

#include <memory>

using namespace tensor_parallel;

namespace {

static_assert(up::is_reduction_v<up::no_reduction, up::host_stream>);
static_assert(up::is_reduction_v<up::no_reduction, up::backend::cuda::stream>);
static_assert(up::is_reduction_v<group_reduction, up::host_stream>);
static_assert(!up::is_reduction_v<group_reduction, up::backend::cuda::stream>, "it takes host buffers");
static_assert(up::is_reduction_v<up::reduction_callback<up::host_stream>, up::host_stream>);
struct no_status {
    void operator()(std::int64_t*, std::int64_t, up::rank_reduction, up::host_stream) const noexcept {}
};
static_assert(!up::is_reduction_v<no_status, up::host_stream>);

template <class HeadReduction>
using ranks = std::vector<std::unique_ptr<rank_step<HeadReduction>>>;

/// Every rank's decision about its share of @p whole; @p spoilt_rank's keys of request 0 are infinite.
template <class HeadReduction, class MakeReduction>
ranks<HeadReduction> decide_on_ranks(const problem& whole, int count, const MakeReduction& make_reduction,
                                     int spoilt_rank = -1) {
    ranks<HeadReduction> all;
    for (int rank = 0; rank < count; ++rank) {
        problem share = share_of(whole, rank, count);
        if (rank == spoilt_rank) {
            spoil_keys(share, 0);
        }
        all.push_back(std::make_unique<rank_step<HeadReduction>>(share, whole.of.heads));
    }
    rank_group group(count);
    const auto reduction = make_reduction(group);
    group.run([&](int rank) { all[static_cast<std::size_t>(rank)]->decide(reduction); });
    return all;
}

template <class HeadReduction, class MakeReduction>
void split_decides_as_unsplit(const MakeReduction& make_reduction) {
    int dropped = 0;
    const int cases = scaled(100);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        const problem whole = random_problem(numbers, 8);
        const unsplit<HeadReduction> wanted(whole);
        for (const int count : {1, 2, 4, 8}) {
            INFO(count << " ranks");
            for (const auto& rank : decide_on_ranks<HeadReduction>(whole, count, make_reduction)) {
                REQUIRE(rank->result().ok());
                REQUIRE(rank->masses() == wanted.masses);
                REQUIRE(rank->kept() == wanted.kept);
            }
        }
        for (const kept_segment& segment : wanted.kept) {
            dropped += segment.outcome.rows - segment.outcome.kept;
        }
    }
    CHECK(dropped > 0);
}

const auto own = [](rank_group& group) { return group_reduction{&group}; };
const auto callback = [](rank_group& group) { return group_callback(group); };

} // namespace

TEST_CASE("heads summed over 1, 2, 4, 8 ranks: masses and keep sets as if one rank had all heads") {
    split_decides_as_unsplit<up::head_sum>(own);
}

TEST_CASE("the maximum over heads on 1, 2, 4, 8 ranks, through a callback") {
    split_decides_as_unsplit<up::head_max>(callback);
}

TEST_CASE("a fault on one rank keeps its request whole on every rank, and the others as they were") {
    const int cases = scaled(100);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        const problem whole = random_problem(numbers, 8);
        problem spoilt = whole;
        spoil_keys(spoilt, 0);
        const unsplit<up::head_sum> wanted(spoilt);
        const auto reasons = [&](up::keep_reason reason) {
            return std::count_if(wanted.kept.begin(), wanted.kept.end(),
                                 [&](const kept_segment& one) { return one.outcome.reason == reason; });
        };
        REQUIRE(reasons(up::keep_reason::non_finite) + reasons(up::keep_reason::short_segment) +
                    reasons(up::keep_reason::rerun_dense) >
                0);
        for (const int count : {2, 4, 8}) {
            const int spoilt_rank = numbers.between(0, count - 1);
            INFO(count << " ranks, the fault on rank " << spoilt_rank);
            const auto all = decide_on_ranks<up::head_sum>(whole, count, own, spoilt_rank);
            for (const auto& rank : all) {
                REQUIRE(rank->result().ok());
                REQUIRE(rank->masses() == all.front()->masses());
                REQUIRE(rank->kept() == all.front()->kept());
                REQUIRE(same_rows_and_reasons(rank->kept(), wanted.kept));
            }
        }
    }
}

TEST_CASE("a reduction that fails ends the decision, and nothing has been dropped") {
    random_numbers numbers(base_seed());
    const problem whole = random_problem(numbers, 1);
    rank_step<up::head_sum> rank(whole, whole.of.heads);
    const int rows = rank.rows_alive().num_rows;
    rank.decide(up::reduction_callback<up::host_stream>{
        [](void* context, std::int64_t*, std::int64_t, up::rank_reduction, up::host_stream) {
            return up::failure(up::status_code::backend_error, "network", "a network",
                               *static_cast<int*>(context));
        },
        const_cast<int*>(&rows)});
    CHECK(rank.result().code == up::status_code::backend_error);
    CHECK(rank.result().came == rows);
    CHECK(rank.result().layer == 0);
    CHECK(rank.rows_alive().num_rows == rows);
}

TEST_CASE("a callback without a function is no reduction") {
    std::int64_t buffer[] = {3, -1};
    CHECK(up::reduction_callback<up::host_stream>{}(buffer, 2, up::rank_reduction::sum, {}).ok());
    CHECK(up::no_reduction{}(buffer, 2, up::rank_reduction::maximum, up::host_stream{}).ok());
    CHECK(buffer[0] == 3);
    CHECK(buffer[1] == -1);
}
