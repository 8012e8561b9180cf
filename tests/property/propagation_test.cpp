// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Rows through many layers: lineage and compaction against sets of positions. A row's state is the list of
// layers that worked on it, folded into one number, so a row in a wrong place or a layer too many shows.

#include "property/decision.hpp"
#include "property/request.hpp"
#include "property/step.hpp"

#include <uniprefill/propagate/policy.hpp>

#include <map>

using namespace property;

namespace {

using state = std::uint64_t;

state fold(state before, int layer) {
    return before * 0x9e3779b97f4a7c15u + static_cast<state>(layer) + 1;
}

/// Rows wider than their state, as strided tensors are.
class state_tensor {
  public:
    explicit state_tensor(int rows)
        : cells_(static_cast<std::size_t>(3 * rows + 3), 0x5555) {
        view_ = {cells_.data(), 3 * sizeof(state), 2 * sizeof(state), rows};
    }
    up::byte_rows view() const { return view_; }

    static state& of(const up::byte_rows& rows, int row) {
        return *reinterpret_cast<state*>(static_cast<char*>(rows.data) + row * rows.row_stride_bytes);
    }

  private:
    std::vector<state> cells_;
    up::byte_rows view_;
};

/// Random masses for the current rows: any keep set will do here.
std::vector<std::int64_t> random_masses(random_numbers& numbers, const up::limits& bounds) {
    std::vector<std::int64_t> buffer(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds)), 0);
    for (std::size_t i = 0; i < static_cast<std::size_t>(2 * bounds.max_blocks()); ++i) {
        buffer[i] = static_cast<std::int64_t>(numbers.next() >> numbers.between(20, 60));
    }
    return buffer;
}

template <class Policy>
void run_layers(random_numbers& numbers, oracle::propagation mode) {
    shape of;
    of.dim = 1;
    of.block_rows = numbers.one_of({8, 16, 11});
    std::vector<request> requests;
    for (int count = numbers.between(1, 4); count > 0; --count) {
        request_wishes wishes;
        wishes.segments = numbers.between(1, 3);
        wishes.gaps = numbers.chance(0.5);
        wishes.spans = numbers.chance(0.3);
        requests.push_back(random_request(numbers, of, wishes, rounding::f32));
    }
    const step<float> packed(requests, of);
    const up::batch_view whole = packed.batch();
    const up::limits bounds = packed.limits();

    up::row_lineage<> lineage(bounds);
    const aligned_memory memory(lineage.state_bytes());
    REQUIRE(lineage.begin(whole, memory.view(), {}).ok());
    const state_tensor working(whole.num_rows);
    const state_tensor full(whole.num_rows);
    const up::row_tensor hidden{working.view(), full.view()};

    std::vector<oracle::row_history> histories;
    std::vector<std::map<int, state>> states;
    for (const request& one : requests) {
        histories.emplace_back(mode, one.positions);
        states.emplace_back();
        for (const int position : one.positions) {
            states.back()[position] = static_cast<state>(position) * 1000 + states.size();
        }
    }
    for (int r = 0, row = 0; r < whole.num_requests; ++r) {
        for (const int position : requests[static_cast<std::size_t>(r)].positions) {
            state_tensor::of(Policy::rows_of(lineage, hidden), row++) =
                states[static_cast<std::size_t>(r)][position];
        }
    }

    const int layers = numbers.between(1, 8);
    for (int layer = 0; layer < layers; ++layer) {
        const bool selects = numbers.chance(0.5);
        if (selects) {
            REQUIRE(Policy::enter(lineage, &hidden, 1, {}).ok());
        }
        const up::batch_view entered = lineage.current();
        bool good = true;
        for (int r = 0; r < whole.num_requests; ++r) {
            const std::vector<int>& wanted = histories[static_cast<std::size_t>(r)].enter(selects);
            good = good && std::vector<int>(entered.positions + entered.cu_seqlens[r],
                                            entered.positions + entered.cu_seqlens[r + 1]) == wanted;
        }
        REQUIRE(good);
        if (selects) {
            std::vector<std::int64_t> buffer = random_masses(numbers, bounds);
            const auto masses = up::mass_view::over(buffer.data(), bounds, up::memory_space::host);
            const std::vector<up::selection_rule> rules(static_cast<std::size_t>(whole.num_requests),
                                                        random_rule(numbers, 30).ours);
            up::workspace count;
            static_cast<void>(up::selection::carve(count, bounds, up::memory_space::host));
            const aligned_memory arrays(count.bytes_used());
            up::workspace piece = arrays.view();
            up::selection decided = up::selection::carve(piece, bounds, up::memory_space::host);
            const up::block_selector<> selector(bounds);
            const aligned_memory scratch(selector.workspace_bytes());
            REQUIRE(selector.run(masses, entered, rules.data(), decided, scratch.view(), {}).ok());
            const std::vector<kept_segment> kept = consistent(decided, entered);
            for (int r = 0, s = 0; r < whole.num_requests; ++r) {
                std::vector<bool> keep;
                for (; s < whole.num_segments && whole.request_of(s) == r; ++s) {
                    const std::vector<bool>& one = kept[static_cast<std::size_t>(s)].keep;
                    keep.insert(keep.end(), one.begin(), one.end());
                }
                histories[static_cast<std::size_t>(r)].keep(keep);
            }
            const std::vector<int> before(entered.positions, entered.positions + entered.num_rows);
            REQUIRE(Policy::leave(lineage, decided, &hidden, 1, {}).ok());
            // Keys of the rows before are still needed: their arrays must have survived.
            REQUIRE(std::equal(before.begin(), before.end(), entered.positions));
        }
        // The layer works on what is left.
        const up::batch_view now = lineage.current();
        const up::byte_rows rows = Policy::rows_of(lineage, hidden);
        for (int row = 0; row < now.num_rows; ++row) {
            state_tensor::of(rows, row) = fold(state_tensor::of(rows, row), layer);
        }
        for (int r = 0; r < whole.num_requests; ++r) {
            const auto& processed = histories[static_cast<std::size_t>(r)].processed().back();
            REQUIRE(now.cu_seqlens[r + 1] - now.cu_seqlens[r] == static_cast<int>(processed.size()));
            for (std::size_t i = 0; i < processed.size(); ++i) {
                state& wanted = states[static_cast<std::size_t>(r)][processed[i]];
                wanted = fold(wanted, layer);
                const int row = now.cu_seqlens[r] + static_cast<int>(i);
                good = good && state_tensor::of(rows, row) == wanted && now.positions[row] == processed[i];
                const int original = lineage.holds_every_row() ? row : lineage.original_rows()[row];
                good = good && whole.positions[original] == processed[i];
            }
        }
        REQUIRE(good);
    }
    // At the end every revived row has exactly the layers that worked on it.
    if (mode == oracle::propagation::revive) {
        REQUIRE(Policy::enter(lineage, &hidden, 1, {}).ok());
        bool good = true;
        for (int r = 0, row = 0; r < whole.num_requests; ++r) {
            for (const auto& one : states[static_cast<std::size_t>(r)]) {
                good = good && state_tensor::of(full.view(), row++) == one.second;
            }
        }
        REQUIRE(good);
    }
}

} // namespace

TEST_CASE("rows of every layer are the oracle's, and carry their state") {
    const int cases = scaled(1500);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        if (numbers.chance(0.5)) {
            run_layers<up::cumulative>(numbers, oracle::propagation::cumulative);
        } else {
            run_layers<up::revive>(numbers, oracle::propagation::revive);
        }
    }
}
