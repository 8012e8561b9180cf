// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The functions by which the device cuts attention into pieces, on the host, against the definition: each row
// meets each key that it reads in exactly one slot of the tiles of its item, and no other key unmasked.

#include "check.hpp"
#include "support/scale.hpp"

#include <uniprefill/attend/detail/attend_work.hpp>

#include <algorithm>
#include <limits>

namespace up = uniprefill;
using namespace attend_test;

namespace {

namespace detail = up::detail;

struct list_entries {
    const std::int32_t* blocks;
    std::int32_t count;
    std::int32_t operator()(std::int32_t entry) const {
        REQUIRE((entry >= 0 && entry < count));
        return blocks[entry];
    }
};

/// What run() of the CUDA backend makes of a scene, in host memory.
template <class T>
detail::attend_step step_of(scene<T>& what, std::int32_t tile_rows) {
    const model& shape = what.keys.shape();
    detail::attend_step made;
    made.batch = what.keys.batch();
    made.kept_bound = what.num_queries();
    if (!what.kept.identity) {
        made.kept_to_old = what.kept.kept_to_old.data();
        made.cu_kept = what.kept.cu_segments.data();
    }
    made.units = what.lists.heads > 0 ? what.lists.heads : shape.kv_heads;
    made.unit_heads = shape.heads / made.units;
    made.kv_units = made.units / shape.kv_heads;
    made.window = what.options.window;
    made.cached_positions = what.options.cached_positions;
    made.cached_positions_stride = what.options.cached_positions_stride;
    made.tile_rows = tile_rows;
    made.key_bytes = 512;
    made.cut_by(what.lists.view(shape.block_rows, made.batch.num_segments));
    return made;
}

/// Bounds over an item's rows, as kernels reduce them.
detail::item_reach bounds_of(const std::vector<detail::row_reach>& rows) {
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
    detail::item_reach made{{most, most, most}, {0, 0, 0}};
    for (const detail::row_reach& row : rows) {
        made.least = {std::min(made.least.first, row.first), std::min(made.least.end, row.end),
                      std::min(made.least.window, row.window)};
        made.most = {std::max(made.most.first, row.first), std::max(made.most.end, row.end),
                     std::max(made.most.window, row.window)};
    }
    return made;
}

/// What lanes make of a tile of means: @p meet_mean is told of each row and block that isn't masked.
template <std::int32_t G, class Tile, class Meet>
void meet_means(const Tile& what, std::int32_t tile_keys, const detail::attend_item& item,
                const std::vector<detail::row_reach>& rows, const Meet& meet_mean) {
    REQUIRE((what.masked && what.unlisted == 0 && what.first[0] % tile_keys == 0));
    const std::int32_t whole = item.segment_rows / G;
    bool sound = true;
    for (std::int32_t in_tile = 0; in_tile < tile_keys; ++in_tile) {
        const std::int32_t slot = in_tile / Tile::slot_keys;
        const std::int32_t block = what.first[0] + in_tile;
        const bool brought = what.first[slot] + in_tile % Tile::slot_keys < what.end[slot];
        sound =
            sound && (!brought || (what.first[slot] + in_tile % Tile::slot_keys == block && block < whole));
        for (std::size_t row = 0; row < rows.size(); ++row) {
            const detail::mean_range range = detail::means_of<G>(rows[row], item.context);
            if (block >= range.from && block < range.to &&
                (what.skipped[in_tile / 32] >> (in_tile % 32) & 1u) != 0) {
                sound = sound && brought;
                meet_mean(row, block);
            }
        }
    }
    REQUIRE(sound);
}

/// Walks through an item. @p meet is told of each row and key that isn't masked, and @p meet_mean of rows and
/// blocks by means, which come last.
template <std::int32_t TileKeys, std::int32_t G, bool Means, class Meet, class MeetMean>
void walk_item(const detail::attend_step& step, const detail::attend_item& item,
               const std::vector<detail::row_reach>& rows, bool sound, const Meet& meet,
               const MeetMean& meet_mean) {
    using tile = detail::key_tile<TileKeys, G, Means>;
    const std::int32_t keys = item.context + item.segment_rows;
    bool means_began = false;
    detail::key_walk<TileKeys, G, list_entries, Means> walk(
        item, bounds_of(rows), item.has_list, {step.lists.blocks + item.list_begin, item.list_entries},
        Means && item.has_list);
    tile now{};
    std::int32_t last = -1;
    for (std::int32_t tiles = 0; walk.next(now); ++tiles) {
        REQUIRE(tiles <= 3 + 3 * (keys + item.list_entries * G) / TileKeys);
        if constexpr (Means) {
            REQUIRE((now.of_means || !means_began));
            if (now.of_means) {
                means_began = true;
                meet_means<G>(now, TileKeys, item, rows, meet_mean);
                continue;
            }
        }
        for (std::int32_t slot = 0; slot < tile::slots; ++slot) {
            const std::int32_t first = now.first[slot];
            const std::int32_t end = now.end[slot];
            REQUIRE((first >= 0 && end >= first && end <= keys && end - first <= tile::slot_keys));
            if (first < end) {
                // Slots are cut alike for all rows.
                REQUIRE((first < item.context ? first : first - item.context) % tile::slot_keys == 0);
                REQUIRE((!sound || first > last));
                last = first;
            }
            const bool unlisted = (now.unlisted >> slot & 1u) != 0;
            for (std::size_t row = 0; row < rows.size(); ++row) {
                const detail::row_reach& reach = rows[row];
                const std::int32_t from = unlisted ? std::max(reach.first, reach.window) : reach.first;
                const std::int32_t to = std::min(reach.end, end);
                if (!now.masked) {
                    REQUIRE((end - first == tile::slot_keys && from <= first && to == end));
                }
                for (std::int32_t key = std::max(from, first); key < to; ++key) {
                    meet(row, key);
                }
            }
        }
    }
}

/// Blocks that a row meets by their means, by the definition.
std::vector<bool> skips_of(const scene<float>& what, const request_tensors& tensors, std::int32_t segment,
                           std::int32_t row, std::vector<bool> reads) {
    met_keys met;
    if (what.lists.heads > 0) {
        const model& shape = what.keys.shape();
        const auto s = static_cast<std::size_t>(segment);
        const std::int32_t begin = what.keys.cu_segments[s];
        const std::size_t r = what.request_of(segment);
        met.first_key = what.keys.cached_lens[r] + begin - what.keys.cu_seqlens[r];
        met.blocks = (what.keys.cu_segments[s + 1] - begin) / shape.block_rows;
    }
    const std::size_t keys = reads.size();
    met.add_means(what, tensors, row, reads);
    return {reads.begin() + static_cast<std::ptrdiff_t>(keys), reads.end()};
}

/// @return pairs of rows and keys, or means, that were met
template <std::int32_t TileKeys, std::int32_t G, bool Means>
std::int64_t check_scene(scene<float>& what, std::int32_t tile_rows) {
    const model& shape = what.keys.shape();
    const detail::attend_step step = step_of(what, tile_rows);
    std::vector<request_tensors> tensors;
    for (std::size_t r = 0; r < what.keys.data.size(); ++r) {
        tensors.emplace_back(what, r);
    }
    std::vector<int> taken(static_cast<std::size_t>(what.num_queries() * shape.heads), 0);
    std::int64_t pairs = 0;
    for (std::int32_t segment = 0; segment < step.batch.num_segments; ++segment) {
        const std::int32_t items = detail::tiles_of(step, segment) * step.units;
        for (std::int32_t index = 0; index < items; ++index) {
            const detail::attend_item item = detail::item_of(step, segment, index);
            REQUIRE((item.num_rows > 0 && item.num_rows <= tile_rows));
            REQUIRE((item.unit >= 0 && item.unit < step.units));
            std::vector<detail::row_reach> rows;
            std::vector<std::vector<bool>> right;
            std::vector<std::vector<bool>> skips;
            for (std::int32_t row = 0; row < item.num_rows; ++row) {
                const detail::item_row where = detail::row_of(step, item, row);
                REQUIRE((where.head / (shape.heads / step.units) == item.unit));
                ++taken[static_cast<std::size_t>(where.kept * shape.heads + where.head)];
                rows.push_back(detail::reach_of(step, item, row));
                right.push_back(reads_of(what, tensors[what.request_of(segment)], segment,
                                         what.row_of(where.kept), where.head));
                skips.push_back(Means ? skips_of(what, tensors[what.request_of(segment)], segment,
                                                 what.row_of(where.kept), right.back())
                                      : std::vector<bool>{});
            }
            const auto meet_once = [&](std::vector<std::vector<bool>>& left, std::size_t row,
                                       std::int32_t at) {
                if (!left[row][static_cast<std::size_t>(at)]) {
                    CAPTURE(row, at, &left == &skips);
                    FAIL("a key, or mean, that the row doesn't read, or has met before");
                }
                left[row][static_cast<std::size_t>(at)] = false;
                ++pairs;
            };
            walk_item<TileKeys, G, Means>(
                step, item, rows, true,
                [&](std::size_t row, std::int32_t key) { meet_once(right, row, key); },
                [&](std::size_t row, std::int32_t block) { meet_once(skips, row, block); });
            right.insert(right.end(), skips.begin(), skips.end());
            for (const std::vector<bool>& row : right) {
                REQUIRE(std::none_of(row.begin(), row.end(), [](bool left) { return left; }));
            }
        }
    }
    REQUIRE(std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; }));
    return pairs;
}

template <std::int32_t G>
scene<float> any_scene(generator& random, std::uint64_t number) {
    model shape;
    shape.kv_heads = random.among({1, 2});
    shape.heads = shape.kv_heads * random.among({1, 3, 4, 5, 8});
    shape.head_dim = 1;
    shape.block_rows = G;
    std::vector<request> requests;
    for (std::int32_t r = 1 + random.below(3); r > 0; --r) {
        requests.push_back(random.any_request(shape));
    }
    if (random.chance(15)) {
        requests[0].segments.push_back(G == 16 ? 700 : 2 * G + 50); // more blocks than some tiles have keys
    }
    scene<float> what(shape, requests);
    if (random.chance(40)) {
        what.set_window(random.among({1, 2, 17, 64, 150, 1000000000}));
    }
    if (random.chance(50)) {
        const auto percent = static_cast<std::uint32_t>(random.among({0, 5, 50, 95}));
        what.keep_rows([&](std::uint64_t seed, std::int32_t row) {
            return coin(seed + number, 2, 0, static_cast<std::uint64_t>(row), percent);
        });
    }
    if (random.chance(75)) {
        const std::int32_t heads = random.chance(60) ? shape.heads : shape.kv_heads;
        const auto percent = static_cast<std::uint32_t>(random.among({0, 10, 40, 80, 100}));
        const std::int32_t window = random.among({0, 0, 1, 20, 64, 300, 1000000000});
        const auto of_query_block = [&](std::uint64_t seed, std::int32_t segment, std::int32_t head,
                                        std::int32_t query_block, int block) {
            const auto list = static_cast<std::uint64_t>((segment * 1000 + query_block) * 1000 + head);
            return block < 0 ? coin(seed + number, 3, list, 0, 85)
                             : coin(seed + number, 1, list, static_cast<std::uint64_t>(block), percent);
        };
        if (random.chance(50)) {
            what.list_own_blocks(heads, window, random.among({1, 7, 16, 40, 64, 100, 1000}), of_query_block);
        } else {
            what.list_blocks(heads, window,
                             [&](std::uint64_t seed, std::int32_t segment, std::int32_t head, int block) {
                                 return of_query_block(seed, segment, head, 0, block);
                             });
        }
    }
    return what;
}

/// One request of four blocks and a bit, whose lists name nothing but a window of one: its last rows have
/// means at any G.
template <std::int32_t G>
scene<float> unlisted_scene() {
    model shape;
    shape.heads = 2;
    shape.kv_heads = 1;
    shape.head_dim = 1;
    shape.block_rows = G;
    request one;
    one.segments = {4 * G + 5};
    scene<float> what(shape, {one});
    what.list_blocks(shape.heads, G, [](std::uint64_t, std::int32_t, std::int32_t, int) { return false; });
    return what;
}

struct met_pairs {
    std::int64_t keys = 0;
    std::int64_t means = 0;
};

/// Tiles of keys and rows of the bodies that there are.
template <std::int32_t G>
met_pairs check_tiles(scene<float>&& what) {
    const model& shape = what.keys.shape();
    INFO("G " << G << ", " << shape.heads << '/' << shape.kv_heads << " heads, window " << what.options.window
              << ", lists " << what.lists.heads << " of " << what.lists.window << " by "
              << what.lists.query_rows << ", queries " << what.num_queries());
    const std::int64_t met = check_scene<128, G, false>(what, 128);
    REQUIRE(check_scene<128, G, false>(what, 192) == met);
    REQUIRE(check_scene<64, G, false>(what, 128) == met);
    REQUIRE(check_scene<32, G, false>(what, 128) == met);
    REQUIRE(check_scene<64, G, false>(what, 1) == met);
    const std::int64_t with_means = check_scene<128, G, true>(what, 128);
    REQUIRE(check_scene<64, G, true>(what, 128) == with_means);
    REQUIRE(check_scene<32, G, true>(what, 1) == with_means);
    return {met, with_means - met};
}

template <std::int32_t G>
void check_block_rows() {
    const met_pairs sure = check_tiles<G>(unlisted_scene<G>());
    REQUIRE(sure.keys > 0);
    REQUIRE(sure.means > 0);
    met_pairs all;
    for (const std::uint32_t number : uniprefill_test::spread_cases(40, 6)) {
        generator random(uniprefill_test::seed() * 1000 + number * 8 + G);
        INFO("case " << number);
        const met_pairs met = check_tiles<G>(any_scene<G>(random, number));
        all.keys += met.keys;
        all.means += met.means;
    }
    REQUIRE(all.keys > 0);
    // A quarter of the cases may have none at large G.
    REQUIRE((all.means > 0 || uniprefill_test::is_scaled_down()));
}

/// Lists and row maps that the host backend refuses: kernels take what comes.
template <std::int32_t G>
void check_nonsense() {
    for (const std::uint32_t number : uniprefill_test::spread_cases(40, 6)) {
        generator random(uniprefill_test::seed() * 1000 + 500 + number * 8 + G);
        scene<float> what = any_scene<G>(random, number);
        const auto any = [&](std::int32_t least, std::int32_t most) {
            return random.chance(20) ? random.among({-1, 2147483647, -2147483647 - 1, 1 << 20})
                                     : least + random.below(most - least + 1);
        };
        for (std::int32_t& block : what.lists.blocks) {
            block = random.chance(50) ? block : any(0, 20);
        }
        for (std::int64_t& offset : what.lists.offsets) {
            offset = random.chance(80) ? offset
                                       : random.among({std::int64_t{-1}, std::int64_t{1} << 40,
                                                       -(std::int64_t{1} << 40), std::int64_t{3}});
        }
        for (std::int32_t& row : what.kept.kept_to_old) {
            row = random.chance(80) ? row : any(0, what.keys.num_rows());
        }
        for (std::int32_t& first : what.kept.cu_segments) {
            first = random.chance(80) ? first : any(0, what.num_queries());
        }
        INFO("case " << number << ", G " << G);
        const detail::attend_step step = step_of(what, 128);
        for (std::int32_t segment = 0; segment < step.batch.num_segments; ++segment) {
            const std::int32_t items = detail::tiles_of(step, segment) * step.units;
            for (std::int32_t index = 0; index < items; ++index) {
                const detail::attend_item item = detail::item_of(step, segment, index);
                REQUIRE((item.list_begin >= 0 && item.list_entries >= 0));
                REQUIRE((step.lists.offsets == nullptr ||
                         item.list_begin + item.list_entries <= step.lists.capacity));
                std::vector<detail::row_reach> rows;
                for (std::int32_t row = 0; row < item.num_rows; ++row) {
                    const detail::item_row where = detail::row_of(step, item, row);
                    REQUIRE((where.kept >= 0 && where.kept < what.num_queries()));
                    rows.push_back(detail::reach_of(step, item, row));
                }
                const auto keys = item.context + item.segment_rows;
                walk_item<64, G, true>(
                    step, item, rows, false,
                    [&](std::size_t, std::int32_t key) { REQUIRE((key >= 0 && key < keys)); },
                    [&](std::size_t, std::int32_t block) {
                        REQUIRE((block >= 0 && block < item.segment_rows / G));
                    });
            }
        }
    }
}

} // namespace

TEST_CASE("emulated tiles: each row meets what it reads, once", "[attend]") {
    check_block_rows<16>();
    check_block_rows<32>();
    check_block_rows<64>();
    check_block_rows<128>();
    check_block_rows<256>();
}

TEST_CASE("emulated tiles: arrays that make no sense lead nowhere", "[attend]") {
    check_nonsense<16>();
    check_nonsense<64>();
    check_nonsense<256>();
}
