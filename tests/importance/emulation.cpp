// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The functions by which the CUDA estimator plans a step and combines scores to masses, run by one thread,
// against the host estimator.

#include "caches.hpp"
#include "estimate.hpp"
#include "naive_partials.hpp"
#include "random_step.hpp"
#include "serial_estimator.hpp"

#include <uniprefill/importance/detail/score_share.hpp>

#include <algorithm>
#include <iostream>
#include <limits>
#include <map>
#include <tuple>

namespace up = uniprefill;
using namespace importance_test;

namespace {

using strands = serial_estimator::strands;

/// Those of the two bodies: Hopper's, and the portable one.
std::vector<detail::cuda_tiling> tilings(std::int32_t block_rows) {
    return {{block_rows, 128, 512}, {block_rows, 64, 256}};
}

/// Limits that hold a step and not a span or a key before its segments more.
template <class T>
up::limits exact_limits(const step<T>& what) {
    up::limits bounds = what.tight_limits();
    bounds.max_forced_spans =
        static_cast<std::int32_t>(std::max(what.forced_spans.size(), what.observed_spans.size()));
    for (std::int32_t s = 0; s < what.num_segments(); ++s) {
        bounds.max_context_keys += naive_segment<T>(what, s, {}).context();
    }
    return bounds;
}

/// Does what the three stages of the device do. @param out nonsense before
template <class HeadReduction = up::head_sum, class T>
void run(serial_estimator& estimator, const step<T>& what, const up::attention_params& params, masses& out,
         std::uint32_t ctas) {
    estimator.plan();
    for (std::int32_t s = 0; s < what.num_segments(); ++s) {
        INFO("segment " << s);
        if (estimator.segment(s).num_observations > 0) {
            naive_partials<T>(what, params, estimator, s).write();
        }
    }
    estimator.template combine<HeadReduction>(params.sink_logits, out, true, ctas);
    REQUIRE(estimator.is_intact());
}

bool has_nonsense(const std::vector<std::int64_t>& numbers) {
    return std::find(numbers.begin(), numbers.end(), masses::nonsense) != numbers.end();
}

/// A step's masses under both tilings, against the host's; then that nothing else makes a difference.
/// @return the largest difference, see worst_difference()
template <class T>
double check_alike(const step<T>& what, const up::attention_params& params, std::uint32_t ctas) {
    double worst = 0;
    const up::limits bounds = exact_limits(what);
    const caches<T> cached(what);
    masses host = estimate(what, cached.contiguous(), params, bounds);
    for (const detail::cuda_tiling& tiling : tilings(bounds.block_rows)) {
        INFO("tiles of " << tiling.tile_keys << " keys");
        serial_estimator estimator(bounds, what.batch(), tiling);
        masses came(bounds);
        run(estimator, what, params, came, ctas);
        REQUIRE_FALSE(has_nonsense(came.buffer));
        REQUIRE_FALSE(has_nonsense(came.heads));
        worst = std::max(worst, worst_difference(came, host, what.batch()));

        // The same bits from another grid, and from the kernel that doesn't know the heads.
        masses again(bounds);
        estimator.combine<up::head_sum>(params.sink_logits, again, true, ctas + 3);
        REQUIRE(again.buffer == came.buffer);
        REQUIRE(again.heads == came.heads);
        estimator.combine<up::head_sum>(params.sink_logits, again, false, ctas + 1);
        REQUIRE(again.buffer == came.buffer);
        // However slots are shared out.
        for (const strands how : {strands::of_a_warp, strands::of_a_thread_block}) {
            estimator.combine<up::head_sum>(params.sink_logits, again, true, ctas, how);
            worst = std::max(worst, worst_difference(again, host, what.batch()));
        }
        // Heads reduced otherwise.
        estimator.combine<up::head_max>(params.sink_logits, again, true, ctas);
        for (std::int64_t block = 0; block < bounds.max_blocks(); ++block) {
            std::int64_t largest[2] = {0, 0};
            for (std::int64_t head = 0; head < bounds.num_heads; ++head) {
                const std::int64_t at = head * came.head_view().head_stride + block;
                largest[0] = std::max(largest[0], came.head_view().free[at]);
                largest[1] = std::max(largest[1], came.head_view().forced[at]);
            }
            REQUIRE(again.view().free[block] == largest[0]);
            REQUIRE(again.view().forced[block] == largest[1]);
        }
    }
    return worst;
}

/// The shapes that kernels are instantiated for, but for small head dimensions: the scores aren't ours.
model any_model(generator& random) {
    model shape;
    shape.kv_heads = random.among({1, 1, 2, 3, 5, 8, 9});
    shape.heads = shape.kv_heads * random.among({1, 2, 3, 4});
    shape.head_dim = random.among({1, 4, 7});
    shape.block_rows = random.among({16, 32, 64, 128, 256});
    shape.num_observations = random.among({1, 2, 7, 16, 33, 64});
    return shape;
}

std::vector<request> any_requests(generator& random, const model& shape) {
    std::vector<request> requests;
    for (std::int32_t r = 1 + random.below(4); r > 0; --r) {
        requests.push_back(random.any_request(shape));
    }
    return requests;
}

/// Spoils an element of a query or key.
void spoil(step<float>& what, generator& random) {
    const float value =
        random.among({std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()});
    const auto r = static_cast<std::size_t>(random.below(static_cast<std::int32_t>(what.requests().size())));
    const model& shape = what.shape();
    const bool is_query = random.chance(50);
    std::vector<float>& values = is_query ? what.data[r].queries : what.data[r].keys;
    if (values.empty()) {
        return;
    }
    const std::int32_t at = random.below(static_cast<std::int32_t>(values.size()));
    values[static_cast<std::size_t>(at)] = value;
    const std::int32_t width = (is_query ? shape.heads : shape.kv_heads) * shape.head_dim;
    const std::int32_t in_step = at + (what.cu_seqlens[r] - (is_query ? 0 : what.cached_lens[r])) * width;
    if (in_step >= what.cu_seqlens[r] * width) { // else it is cached
        (is_query ? what.queries : what.keys)[static_cast<std::size_t>(in_step)] = value;
    }
}

} // namespace

TEST_CASE("the device's functions make the host's masses", "[importance]") {
    double worst = 0;
    for (std::uint64_t i = 0; i < 400; ++i) {
        generator random(uniprefill_test::seed() * 1000 + i);
        const model shape = any_model(random);
        step<float> what(shape, any_requests(random, shape));
        std::vector<float> sinks;
        const up::attention_params params = random.any_params(shape, sinks);
        if (!sinks.empty() && random.chance(10)) {
            sinks.back() = std::numeric_limits<float>::infinity();
        }
        if (random.chance(15)) {
            spoil(what, random);
        }
        INFO("case " << i << ": " << shape.heads << '/' << shape.kv_heads << " heads, d " << shape.head_dim
                     << ", G " << shape.block_rows << ", n " << shape.num_observations << ", scale "
                     << params.scale << ", softcap " << params.softcap << ", sinks " << sinks.size());
        worst = std::max(worst, check_alike(what, params, 1 + static_cast<std::uint32_t>(random.below(40))));
        REQUIRE(worst < 1);
    }
    std::cout << "worst difference " << worst << std::endl;
}

TEST_CASE("as they do where thread blocks share the slots of a row", "[importance]") {
    for (const std::int32_t g : {16, 32}) {
        for (const std::int32_t cached : {255, 256, 257, 384, 1000}) { // in blocks, own ones come on top
            request what{static_cast<std::uint64_t>(cached), up::request_tag::chunk, cached * g - 5, {3 * g}};
            what.options = {1, 0, g + 3, 0};
            what.forced = {{what.cached + 5, what.cached + 9}};
            const step<float> long_one({2, 1, 2, g, 3}, {what, {7, up::request_tag::prefill, 0, {40}}});
            INFO("G " << g << ", " << cached << " blocks cached");
            REQUIRE(check_alike(long_one, {}, 5) < 1);
        }
    }
}

TEST_CASE("as they do where powers of two leave the range of floats", "[importance]") {
    request what{11, up::request_tag::chunk, 90, {150, 100}, {1, 4, 20, 0}};
    what.spread = 120.0f; // scores of hundreds, with either sign
    const double worst = check_alike(step<float>({4, 2, 16, 32, 16}, {what}), {}, 4);
    std::cout << "scores of hundreds, worst difference " << worst << std::endl;
    REQUIRE(worst < 100); // a unit in the last place of such scores is 1e-5 of a mass, and there are some
}

TEST_CASE("a step may need all of the workspace that its limits ask for", "[importance]") {
    // One block, that the tail cuts, after less than one block of context: three slots.
    request what{12, up::request_tag::chunk, 30, {40}, {1, 0, 8, 0}};
    const step<float> small({2, 1, 4, 64, 4}, {what});
    REQUIRE(check_alike(small, {}, 1) < 1);
    serial_estimator estimator(exact_limits(small), small.batch(), {64, 64, 256});
    estimator.plan();
    const detail::cuda_segment& plan = estimator.segment(0);
    REQUIRE(plan.slots() == 3);
    REQUIRE(plan.slots() * plan.lanes == estimator.buffers().max_partials);
    REQUIRE(plan.lanes == estimator.buffers().max_stats);
    REQUIRE(plan.num_cuts == estimator.buffers().max_cuts);
}

TEST_CASE("thread blocks share all tiles, each once", "[importance]") {
    for (std::uint64_t i = 0; i < 200; ++i) {
        generator random(uniprefill_test::seed() * 2000 + i);
        model shape = any_model(random);
        shape.head_dim = 1;
        shape.num_observations = random.among({1, 33, 64, 128, 512});
        std::vector<request> requests = any_requests(random, shape);
        requests[0].cached = random.among({0, 500, 9000});
        const step<float> what(shape, requests);
        for (const detail::cuda_tiling& tiling : tilings(shape.block_rows)) {
            serial_estimator estimator(exact_limits(what), what.batch(), tiling);
            estimator.plan();
            /// (segment, KV head, first query row, tile)
            std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>, int> seen;
            const auto ctas = static_cast<std::uint32_t>(random.among({1, 2, 7, 132}));
            INFO("case " << i << ", tiles of " << tiling.tile_keys << " keys, " << ctas << " thread blocks");
            for (std::uint32_t cta = 0; cta < ctas; ++cta) {
                detail::cuda_share share(estimator.buffers(), tiling, what.num_segments(), cta, ctas);
                detail::cuda_run run;
                while (share.next(run)) {
                    for (std::int32_t tile = run.tile_begin; tile < run.tile_end; ++tile) {
                        ++seen[{run.segment, run.kv_head, run.first_row, tile}];
                    }
                }
            }
            std::size_t wanted = 0;
            for (std::int32_t s = 0; s < what.num_segments(); ++s) {
                const detail::cuda_segment& plan = estimator.segment(s);
                if (plan.num_observations == 0) {
                    continue;
                }
                std::int64_t keys = 0;
                std::int32_t slots = 0;
                for (std::int32_t tile = 0; tile < plan.tiles(); ++tile) {
                    for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
                        for (std::int32_t row = 0; row < plan.lanes; row += tiling.chunk_rows) {
                            REQUIRE(seen[{s, head, row, tile}] == 1);
                            ++wanted;
                        }
                    }
                    // Tiles follow each other, key by key and slot by slot.
                    const auto at = detail::cuda_tile::at(plan, tile, tiling.tile_keys, tiling.slot_keys());
                    REQUIRE(at.own == (at.first_key >= plan.context));
                    REQUIRE(at.first_key == keys);
                    REQUIRE((!at.own || at.first_row == keys - plan.context));
                    REQUIRE(at.first_slot == slots);
                    REQUIRE(at.num_keys > 0);
                    REQUIRE(at.num_keys <= tiling.tile_keys);
                    keys += at.num_keys;
                    slots += (at.num_keys + tiling.slot_keys() - 1) / tiling.slot_keys();
                }
                REQUIRE(keys == plan.context + plan.rows);
                REQUIRE(slots == plan.context_slots + plan.own_slots);
            }
            REQUIRE(seen.size() == wanted);
        }
    }
}
