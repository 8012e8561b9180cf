// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cpu/attention.hpp"

#include "engine/cpu/kernels.hpp"
#include "engine/cpu/threads.hpp"
#include "engine/error.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

namespace engine::cpu {

namespace {

constexpr float log2_e = 1.44269504088896340736f;
constexpr std::int64_t target_rows = 192; // of a query tile, all its heads counted
constexpr std::size_t packed_bytes_at_once = std::size_t{256} << 20;

std::int64_t divide_up(std::int64_t a, std::int64_t b) {
    return (a + b - 1) / b;
}

void check_positions(const char* argument, const std::int32_t* positions, std::int64_t rows) {
    if (rows > 0 && positions == nullptr) throw error(argument, "one position a row", "none");
    for (std::int64_t i = 1; i < rows; ++i) {
        if (positions[i] < positions[i - 1]) {
            throw error(argument, "positions in ascending order",
                        std::to_string(positions[i]) + " after " + std::to_string(positions[i - 1]) +
                            " in row " + std::to_string(i));
        }
    }
}

void check_lists(const attention_call& call) {
    const key_lists& lists = call.lists;
    if (lists.block_keys < 1) throw error("lists.block_keys", "at least 1", std::to_string(lists.block_keys));
    if (lists.window < 0) throw error("lists.window", "0 or more", std::to_string(lists.window));
    if ((lists.mean_keys == nullptr) != (lists.mean_values == nullptr)) {
        throw error("lists.mean_values", "means of keys and of values, or neither", "one of them");
    }
    if (lists.first_key < 0 || lists.first_key > call.key_rows) {
        throw error("lists.first_key", "0 to key_rows", std::to_string(lists.first_key));
    }
    const std::int64_t blocks = divide_up(call.key_rows - lists.first_key, lists.block_keys);
    for (int head = 0; head < call.query_heads; ++head) {
        const std::int64_t begin = lists.offsets[head], end = lists.offsets[head + 1];
        if (begin < 0 || end < begin) {
            throw error("lists.offsets", "0 or more, not descending",
                        std::to_string(end) + " after " + std::to_string(begin) + " of head " +
                            std::to_string(head));
        }
        if (end > 0 && lists.blocks == nullptr) {
            throw error("lists.blocks", "offsets[query_heads] numbers", "none");
        }
        std::int64_t before = -1;
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int32_t block = lists.blocks[i];
            if (block <= before || block >= blocks) {
                throw error("lists.blocks",
                            "ascending numbers below " + std::to_string(blocks) + " for each head",
                            std::to_string(block) + " of head " + std::to_string(head));
            }
            before = block;
        }
    }
}

void check(const attention_call& call) {
    if (call.kv_heads < 1) throw error("kv_heads", "at least 1", std::to_string(call.kv_heads));
    if (call.query_heads < 1 || call.query_heads % call.kv_heads != 0) {
        throw error("query_heads", "a multiple of " + std::to_string(call.kv_heads),
                    std::to_string(call.query_heads));
    }
    if (call.head_dim < 1 || call.head_dim > 256)
        throw error("head_dim", "1 to 256", std::to_string(call.head_dim));
    if (call.window < 0) throw error("window", "0 or more", std::to_string(call.window));
    if (call.query_rows < 0) throw error("query_rows", "0 or more", std::to_string(call.query_rows));
    if (call.key_rows < 0) throw error("key_rows", "0 or more", std::to_string(call.key_rows));
    check_positions("query_positions", call.query_positions, call.query_rows);
    check_positions("key_positions", call.key_positions, call.key_rows);
    if (call.lists.offsets != nullptr) check_lists(call);
}

// One row of a KV store as fp32.
void read_row(const kv_rows& source, std::int64_t row, int head, int dim, float* to) {
    const std::int64_t slot = source.slots == nullptr ? row : source.slots[row];
    const std::int64_t offset = slot * source.row_stride + head * source.head_stride;
    switch (source.type) {
    case uniprefill::element_type::f32:
        std::memcpy(to, static_cast<const float*>(source.data) + offset,
                    static_cast<std::size_t>(dim) * sizeof(float));
        break;
    case uniprefill::element_type::bf16: {
        const auto* from = static_cast<const uniprefill::bfloat16*>(source.data) + offset;
        for (int c = 0; c < dim; ++c) {
            to[c] = uniprefill::to_float(from[c]);
        }
        break;
    }
    case uniprefill::element_type::f16: {
        const auto* from = static_cast<const uniprefill::half*>(source.data) + offset;
        for (int c = 0; c < dim; ++c) {
            to[c] = uniprefill::to_float(from[c]);
        }
        break;
    }
    }
}

// Keys [from, to).
struct key_range {
    std::int64_t from, to;
};

// What a call comes to, once its sizes are known.
struct plan {
    const attention_kernel* kernel;
    int group;       // query heads that share the rows of a query tile: all of a KV head, or one with lists
    int units;       // such groups of a KV head
    int dim;         // padded
    int tile_blocks; // row blocks of a query tile
    std::int64_t tile_queries, tile_rows, query_tiles;
    std::int64_t first_tile, key_tiles; // those that any query sees
    int heads_at_once;
    std::int64_t mean_blocks, mean_tiles; // blocks that have means, and tiles of them
};

// What each thread works in.
struct thread_memory {
    float *rows, *maximum, *sum, *out;
    float *mean_maximum, *mean_sum, *mean_out; // of means, before they are weighed
    std::int64_t *from, *to;                   // by row: the keys that it sees,
    std::int64_t *piece_from, *piece_to;       // and a piece of those that it reads
    key_range* pieces;                         // those of a tile that all rows read
    std::byte* queries;

    static std::size_t carve(const plan& p, std::byte* base, thread_memory& to_fill) {
        const auto rows = static_cast<std::size_t>(p.tile_rows), dim = static_cast<std::size_t>(p.dim);
        const auto unpacked =
            static_cast<std::size_t>(std::max(p.kernel->keys_per_tile, p.kernel->rows_per_block));
        carver from(base);
        to_fill.rows = from.take<float>(unpacked * dim);
        to_fill.maximum = from.take<float>(rows);
        to_fill.sum = from.take<float>(rows * static_cast<std::size_t>(p.kernel->sum_parts));
        to_fill.out = from.take<float>(rows * dim);
        const std::size_t mean_rows = p.mean_tiles > 0 ? rows : 0;
        to_fill.mean_maximum = from.take<float>(mean_rows);
        to_fill.mean_sum = from.take<float>(mean_rows * static_cast<std::size_t>(p.kernel->sum_parts));
        to_fill.mean_out = from.take<float>(mean_rows * dim);
        to_fill.from = from.take<std::int64_t>(rows);
        to_fill.to = from.take<std::int64_t>(rows);
        to_fill.piece_from = from.take<std::int64_t>(rows);
        to_fill.piece_to = from.take<std::int64_t>(rows);
        to_fill.pieces = from.take<key_range>(static_cast<std::size_t>(p.kernel->keys_per_tile));
        to_fill.queries = from.take<std::byte>(static_cast<std::size_t>(p.tile_blocks) *
                                               p.kernel->query_block_bytes(p.dim));
        return from.used();
    }
};

// What they share: by query the keys it sees, with lists the first of its window's blocks, and the packed
// tiles of the heads at work. With means: by query the blocks that it meets by their means unless they are
// listed; by head those that aren't; and the means of those, packed.
struct shared_memory {
    std::int64_t *from, *to, *window;
    std::byte *keys, *values;
    std::int64_t *mean_from, *mean_to;
    std::int64_t* num_skipped; // [query_heads]
    std::int64_t* skipped;     // [query_heads, mean_blocks]
    std::byte *mean_keys, *mean_values;

    static std::size_t carve(const attention_call& call, const plan& p, std::byte* base,
                             shared_memory& to_fill) {
        const auto tiles = static_cast<std::size_t>(p.heads_at_once) * static_cast<std::size_t>(p.key_tiles);
        carver from(base);
        to_fill.from = from.take<std::int64_t>(static_cast<std::size_t>(call.query_rows));
        to_fill.to = from.take<std::int64_t>(static_cast<std::size_t>(call.query_rows));
        to_fill.window = from.take<std::int64_t>(static_cast<std::size_t>(call.query_rows));
        to_fill.keys = from.take<std::byte>(tiles * p.kernel->key_tile_bytes(p.dim));
        to_fill.values = from.take<std::byte>(tiles * p.kernel->value_tile_bytes(p.dim));
        const auto heads = static_cast<std::size_t>(p.mean_tiles > 0 ? call.query_heads : 0);
        const auto mean_tiles =
            static_cast<std::size_t>(p.heads_at_once * p.units) * static_cast<std::size_t>(p.mean_tiles);
        const auto queries = static_cast<std::size_t>(p.mean_tiles > 0 ? call.query_rows : 0);
        to_fill.mean_from = from.take<std::int64_t>(queries);
        to_fill.mean_to = from.take<std::int64_t>(queries);
        to_fill.num_skipped = from.take<std::int64_t>(heads);
        to_fill.skipped = from.take<std::int64_t>(heads * static_cast<std::size_t>(p.mean_blocks));
        to_fill.mean_keys = from.take<std::byte>(mean_tiles * p.kernel->key_tile_bytes(p.dim));
        to_fill.mean_values = from.take<std::byte>(mean_tiles * p.kernel->value_tile_bytes(p.dim));
        return from.used();
    }
};

// Keys that query `q` sees: indices [from, to), since positions ascend.
void find_visible(const attention_call& call, std::int64_t q, std::int64_t& from, std::int64_t& to) {
    const std::int32_t* begin = call.key_positions;
    const std::int32_t* end = begin + call.key_rows;
    const std::int64_t position = call.query_positions[q];
    to = std::upper_bound(begin, end, position) - begin;
    from = call.window == 0 ? 0 : std::lower_bound(begin, begin + to, position - call.window + 1) - begin;
}

// With which key the blocks begin that query `q` reads whether they are listed or not: keys from `to` on it
// doesn't see.
std::int64_t find_window(const attention_call& call, std::int64_t q, std::int64_t to) {
    const key_lists& lists = call.lists;
    if (lists.window == 0) return to;
    const std::int64_t position = call.query_positions[q];
    const std::int64_t first =
        std::lower_bound(call.key_positions, call.key_positions + to, position - lists.window + 1) -
        call.key_positions;
    if (first <= lists.first_key) return lists.first_key;
    return first - (first - lists.first_key) % lists.block_keys;
}

// The blocks that query `q`, which sees keys [from, to), meets by their means unless they are listed.
key_range find_mean_blocks(const attention_call& call, std::int64_t q, std::int64_t from, std::int64_t to) {
    const key_lists& lists = call.lists;
    const std::int64_t first = std::max<std::int64_t>(0, from - lists.first_key);
    const std::int64_t last = (lists.window == 0 ? to - 1 : find_window(call, q, to)) - lists.first_key;
    const std::int64_t begin = divide_up(first, lists.block_keys);
    return {begin, last <= 0 ? begin : std::max(begin, last / lists.block_keys)};
}

plan make_plan(const attention_call& call, const attention_kernel& kernel) {
    plan p{};
    p.kernel = &kernel;
    p.units = call.lists.offsets == nullptr ? 1 : call.query_heads / call.kv_heads;
    p.group = call.query_heads / call.kv_heads / p.units;
    p.dim = static_cast<int>(divide_up(call.head_dim, kernel.dim_multiple)) * kernel.dim_multiple;
    p.tile_queries = std::min(std::max<std::int64_t>(1, target_rows / p.group), call.query_rows);
    p.tile_blocks = static_cast<int>(divide_up(p.tile_queries * p.group, kernel.rows_per_block));
    p.tile_rows = static_cast<std::int64_t>(p.tile_blocks) * kernel.rows_per_block;
    p.query_tiles = divide_up(call.query_rows, p.tile_queries);
    std::int64_t from = 0, to = 0, unused = 0;
    find_visible(call, 0, from, unused);
    find_visible(call, call.query_rows - 1, unused, to);
    p.first_tile = from / kernel.keys_per_tile;
    p.key_tiles = std::max<std::int64_t>(0, divide_up(to, kernel.keys_per_tile) - p.first_tile);
    const std::size_t head_bytes = static_cast<std::size_t>(std::max<std::int64_t>(1, p.key_tiles)) *
                                   (kernel.key_tile_bytes(p.dim) + kernel.value_tile_bytes(p.dim));
    p.heads_at_once = static_cast<int>(std::clamp<std::size_t>(packed_bytes_at_once / head_bytes, 1,
                                                               static_cast<std::size_t>(call.kv_heads)));
    if (call.lists.offsets != nullptr && call.lists.mean_keys != nullptr) {
        p.mean_blocks = (call.key_rows - call.lists.first_key) / call.lists.block_keys;
        p.mean_tiles = divide_up(p.mean_blocks, kernel.keys_per_tile);
    }
    return p;
}

void pack_tile(const attention_call& call, const plan& p, int head, std::int64_t tile, float* rows,
               std::byte* keys, std::byte* values) {
    const std::int64_t first = (p.first_tile + tile) * p.kernel->keys_per_tile;
    const std::int64_t count = std::min<std::int64_t>(p.kernel->keys_per_tile, call.key_rows - first);
    std::memset(rows, 0,
                static_cast<std::size_t>(p.kernel->keys_per_tile) * static_cast<std::size_t>(p.dim) *
                    sizeof(float));
    for (std::int64_t i = 0; i < count; ++i) {
        read_row(call.keys, first + i, head, call.head_dim, rows + i * p.dim);
    }
    p.kernel->pack_keys(rows, p.dim, keys);
    for (std::int64_t i = 0; i < count; ++i) {
        read_row(call.values, first + i, head, call.head_dim, rows + i * p.dim);
    }
    p.kernel->pack_values(rows, p.dim, values);
}

// Tile `tile` of the means of the blocks that a query head skips.
void pack_means(const attention_call& call, const plan& p, const shared_memory& shared, int query_head,
                std::int64_t tile, float* rows, std::byte* keys, std::byte* values) {
    const std::int64_t first = tile * p.kernel->keys_per_tile;
    const std::int64_t count =
        std::min<std::int64_t>(p.kernel->keys_per_tile, shared.num_skipped[query_head] - first);
    if (count <= 0) return;
    const std::int64_t* const blocks = shared.skipped + query_head * p.mean_blocks + first;
    const int head = query_head / (call.query_heads / call.kv_heads);
    const auto read = [&](const float* means) {
        std::memset(rows, 0,
                    static_cast<std::size_t>(p.kernel->keys_per_tile) * static_cast<std::size_t>(p.dim) *
                        sizeof(float));
        for (std::int64_t i = 0; i < count; ++i) {
            std::copy_n(means + (blocks[i] * call.kv_heads + head) * call.head_dim, call.head_dim,
                        rows + i * p.dim);
        }
    };
    read(call.lists.mean_keys);
    p.kernel->pack_keys(rows, p.dim, keys);
    read(call.lists.mean_values);
    p.kernel->pack_values(rows, p.dim, values);
}

// By query the blocks that it may meet by their means, by head those that it skips.
void find_skipped(const attention_call& call, const plan& p, const shared_memory& shared) {
    for (std::int64_t q = 0; q < call.query_rows; ++q) {
        const key_range blocks = find_mean_blocks(call, q, shared.from[q], shared.to[q]);
        shared.mean_from[q] = blocks.from;
        shared.mean_to[q] = blocks.to;
    }
    for (int head = 0; head < call.query_heads; ++head) {
        const std::int32_t* listed = call.lists.blocks + call.lists.offsets[head];
        const std::int32_t* const end = call.lists.blocks + call.lists.offsets[head + 1];
        std::int64_t* const skipped = shared.skipped + head * p.mean_blocks;
        std::int64_t count = 0;
        for (std::int64_t block = 0; block < p.mean_blocks; ++block) {
            if (listed != end && *listed == block) {
                ++listed;
            } else {
                skipped[count++] = block;
            }
        }
        shared.num_skipped[head] = count;
    }
}

// The keys of [first, last) that a head reads wherever they are seen: those before the first block, and
// listed blocks, neighbours as one piece.
int find_pieces(const key_lists& lists, int head, std::int64_t first, std::int64_t last, key_range* pieces) {
    int count = 0;
    const auto add = [&](std::int64_t from, std::int64_t to) {
        from = std::max(from, first);
        to = std::min(to, last);
        if (from >= to) return;
        if (count > 0 && pieces[count - 1].to == from) {
            pieces[count - 1].to = to;
        } else {
            pieces[count++] = {from, to};
        }
    };
    add(0, lists.first_key);
    const std::int32_t* const end = lists.blocks + lists.offsets[head + 1];
    const auto block_of = [&](std::int64_t key) { return (key - lists.first_key) / lists.block_keys; };
    const std::int64_t first_block = first > lists.first_key ? block_of(first) : 0;
    for (const std::int32_t* block = std::lower_bound(lists.blocks + lists.offsets[head], end, first_block);
         block != end; ++block) {
        const std::int64_t from = lists.first_key + std::int64_t{*block} * lists.block_keys;
        if (from >= last) break;
        add(from, from + lists.block_keys);
    }
    return count;
}

// How many of the keys [0, end) a head reads wherever they are seen.
std::int64_t count_listed(const key_lists& lists, int head, std::int64_t end) {
    if (end <= lists.first_key) return end;
    const std::int64_t block = (end - lists.first_key) / lists.block_keys;
    const std::int32_t* const first = lists.blocks + lists.offsets[head];
    const std::int32_t* const last = lists.blocks + lists.offsets[head + 1];
    const std::int32_t* const at = std::lower_bound(first, last, block);
    const std::int64_t rest = at != last && *at == block ? (end - lists.first_key) % lists.block_keys : 0;
    return lists.first_key + (at - first) * lists.block_keys + rest;
}

// The `index`th piece of what a row reads of a tile: the pieces that all rows read, and what its window has.
key_range piece_of_row(const key_range* pieces, int count, std::int64_t window, std::int64_t last,
                       int index) {
    int before = 0; // pieces that end before the window, which goes on to the end
    while (before < count && pieces[before].to < window) {
        ++before;
    }
    if (index < before) return pieces[index];
    if (index > before) return {last, last};
    return {std::min({before < count ? pieces[before].from : last, window, last}), last};
}

// One tile of keys against the rows of one head, as lists say: a call for each piece that a row reads.
void attend_listed(const attention_call& call, const plan& p, const shared_memory& shared,
                   const thread_memory& own, int head, std::int64_t first_query, std::int64_t rows,
                   attention_tile& work) {
    const std::int64_t first = work.first_key, last = first + p.kernel->keys_per_tile;
    const int count = find_pieces(call.lists, head, first, last, own.pieces);
    if (count == 0 && shared.window[first_query] >= last) return;
    const std::int64_t padded_rows = std::int64_t{work.row_blocks} * p.kernel->rows_per_block;
    for (int index = 0; index <= count; ++index) {
        bool any = false;
        for (std::int64_t row = 0; row < padded_rows; ++row) {
            key_range piece{0, 0};
            if (row < rows) {
                const std::int64_t window = std::max(shared.window[first_query + row], first);
                piece = piece_of_row(own.pieces, count, window, last, index);
                piece.from = std::max(piece.from, own.from[row]);
                piece.to = std::min(piece.to, own.to[row]);
            }
            own.piece_from[row] = piece.from;
            own.piece_to[row] = std::max(piece.from, piece.to);
            any = any || piece.from < piece.to;
        }
        if (any) p.kernel->attend(work);
    }
}

// The means of the blocks that a head skips, against its rows: in sums of their own, since a mean weighs as
// many keys as its block has.
void attend_means(const attention_call& call, const plan& p, const shared_memory& shared,
                  const thread_memory& own, int head, std::int64_t first_query, std::int64_t rows,
                  const std::byte* keys, const std::byte* values, attention_tile work) {
    const std::int64_t padded_rows = std::int64_t{work.row_blocks} * p.kernel->rows_per_block;
    const std::int64_t* const skipped = shared.skipped + head * p.mean_blocks;
    const std::int64_t* const end = skipped + shared.num_skipped[head];
    std::int64_t last = 0;
    for (std::int64_t row = 0; row < padded_rows; ++row) {
        const std::int64_t q = first_query + row;
        own.piece_from[row] = row < rows ? std::lower_bound(skipped, end, shared.mean_from[q]) - skipped : 0;
        own.piece_to[row] = row < rows ? std::lower_bound(skipped, end, shared.mean_to[q]) - skipped : 0;
        last = std::max(last, own.piece_to[row]);
    }
    std::fill_n(own.mean_maximum, padded_rows, -std::numeric_limits<float>::infinity());
    std::fill_n(own.mean_sum, padded_rows * p.kernel->sum_parts, 0.0f);
    std::fill_n(own.mean_out, padded_rows * p.dim, 0.0f);
    work.from = own.piece_from;
    work.to = own.piece_to;
    work.maximum = own.mean_maximum;
    work.sum = own.mean_sum;
    work.out = own.mean_out;
    for (std::int64_t tile = 0; tile * p.kernel->keys_per_tile < last; ++tile) {
        work.first_key = tile * p.kernel->keys_per_tile;
        work.keys = keys + static_cast<std::size_t>(tile) * p.kernel->key_tile_bytes(p.dim);
        work.values = values + static_cast<std::size_t>(tile) * p.kernel->value_tile_bytes(p.dim);
        p.kernel->attend(work);
    }
    const float weight = std::log2(static_cast<float>(call.lists.block_keys));
    for (std::int64_t row = 0; row < rows; ++row) {
        if (own.piece_from[row] >= own.piece_to[row]) continue;
        const float raised = own.mean_maximum[row] + weight;
        const float largest = std::max(own.maximum[row], raised);
        const float of_keys = std::exp2(own.maximum[row] - largest), of_means = std::exp2(raised - largest);
        for (int i = 0; i < p.kernel->sum_parts; ++i) {
            float& sum = own.sum[row * p.kernel->sum_parts + i];
            sum = sum * of_keys + own.mean_sum[row * p.kernel->sum_parts + i] * of_means;
        }
        for (int c = 0; c < call.head_dim; ++c) {
            float& out = own.out[row * p.dim + c];
            out = out * of_keys + own.mean_out[row * p.dim + c] * of_means;
        }
    }
}

// Query tile `tile` of unit `unit`: rows are (query, head of the unit), queries first, so that those which
// see a tile of keys are neighbours.
void attend_queries(const attention_call& call, const plan& p, const shared_memory& shared,
                    const thread_memory& own, int unit, std::int64_t tile, const std::byte* keys,
                    const std::byte* values, const std::byte* mean_keys, const std::byte* mean_values) {
    const attention_kernel& kernel = *p.kernel;
    const std::int64_t first_query = tile * p.tile_queries;
    const std::int64_t queries = std::min(p.tile_queries, call.query_rows - first_query);
    const std::int64_t rows = queries * p.group;
    const int blocks = static_cast<int>(divide_up(rows, kernel.rows_per_block));
    const std::int64_t padded_rows = static_cast<std::int64_t>(blocks) * kernel.rows_per_block;
    const auto query_of = [&](std::int64_t row) { return first_query + row / p.group; };
    const auto head_of = [&](std::int64_t row) { return unit * p.group + row % p.group; };
    const bool listed = call.lists.offsets != nullptr;

    std::fill_n(own.maximum, padded_rows, -std::numeric_limits<float>::infinity());
    std::fill_n(own.sum, padded_rows * kernel.sum_parts, 0.0f);
    std::fill_n(own.out, padded_rows * p.dim, 0.0f);
    const float scale = call.scale * log2_e;
    for (int block = 0; block < blocks; ++block) {
        std::fill_n(own.rows, static_cast<std::int64_t>(kernel.rows_per_block) * p.dim, 0.0f);
        for (int r = 0; r < kernel.rows_per_block; ++r) {
            const std::int64_t row = static_cast<std::int64_t>(block) * kernel.rows_per_block + r;
            own.from[row] = row < rows ? shared.from[query_of(row)] : 0;
            own.to[row] = row < rows ? shared.to[query_of(row)] : 0;
            if (row >= rows) continue;
            const float* from =
                call.queries + query_of(row) * call.query_row_stride + head_of(row) * call.query_head_stride;
            float* to = own.rows + static_cast<std::int64_t>(r) * p.dim;
            for (int c = 0; c < call.head_dim; ++c) {
                to[c] = from[c] * scale;
            }
        }
        kernel.pack_queries(own.rows, p.dim,
                            own.queries + static_cast<std::size_t>(block) * kernel.query_block_bytes(p.dim));
    }

    const std::int64_t from = shared.from[first_query] / kernel.keys_per_tile;
    const std::int64_t to = divide_up(shared.to[first_query + queries - 1], kernel.keys_per_tile);
    for (std::int64_t key_tile = from; key_tile < to; ++key_tile) {
        const auto packed = static_cast<std::size_t>(key_tile - p.first_tile);
        attention_tile work{};
        work.row_blocks = blocks;
        work.dim = p.dim;
        work.queries = own.queries;
        work.keys = keys + packed * kernel.key_tile_bytes(p.dim);
        work.values = values + packed * kernel.value_tile_bytes(p.dim);
        work.first_key = key_tile * kernel.keys_per_tile;
        work.from = listed ? own.piece_from : own.from;
        work.to = listed ? own.piece_to : own.to;
        work.maximum = own.maximum;
        work.sum = own.sum;
        work.out = own.out;
        if (listed) {
            attend_listed(call, p, shared, own, unit, first_query, rows, work);
        } else {
            kernel.attend(work);
        }
    }
    if (p.mean_tiles > 0) {
        attention_tile work{};
        work.row_blocks = blocks;
        work.dim = p.dim;
        work.queries = own.queries;
        attend_means(call, p, shared, own, unit, first_query, rows, mean_keys, mean_values, work);
    }

    for (std::int64_t row = 0; row < rows; ++row) {
        float* to_row = call.out + query_of(row) * call.out_row_stride + head_of(row) * call.out_head_stride;
        float sum = 0;
        for (int i = 0; i < kernel.sum_parts; ++i) {
            sum += own.sum[row * kernel.sum_parts + i];
        }
        const float factor = sum == 0 ? 0.0f : 1.0f / sum; // 0: it reads no key
        for (int c = 0; c < call.head_dim; ++c) {
            to_row[c] = own.out[row * p.dim + c] * factor;
        }
    }
}

void attend_with(const attention_call& call, scratch& memory, const attention_kernel& kernel) {
    check(call);
    if (call.query_rows == 0) return;
    const plan p = make_plan(call, kernel);
    thread_memory sized{};
    const int threads = max_threads();
    memory.reserve_threads(threads, thread_memory::carve(p, nullptr, sized));
    shared_memory shared{};
    std::byte* base = memory.shared(shared_memory::carve(call, p, nullptr, shared));
    shared_memory::carve(call, p, base, shared);
    for (std::int64_t q = 0; q < call.query_rows; ++q) {
        find_visible(call, q, shared.from[q], shared.to[q]);
        shared.window[q] = find_window(call, q, shared.to[q]);
    }
    if (p.mean_tiles > 0) find_skipped(call, p, shared);
    const std::size_t key_bytes = kernel.key_tile_bytes(p.dim), value_bytes = kernel.value_tile_bytes(p.dim);
    const auto keys_of = [&](std::int64_t head) {
        return shared.keys + static_cast<std::size_t>(head * p.key_tiles) * key_bytes;
    };
    const auto values_of = [&](std::int64_t head) {
        return shared.values + static_cast<std::size_t>(head * p.key_tiles) * value_bytes;
    };
#pragma omp parallel num_threads(threads)
    {
        thread_memory own{};
        thread_memory::carve(p, memory.own(this_thread()), own);
        for (int first_head = 0; first_head < call.kv_heads; first_head += p.heads_at_once) {
            const int heads = std::min(p.heads_at_once, call.kv_heads - first_head);
#pragma omp for schedule(static)
            for (std::int64_t item = 0; item < heads * p.key_tiles; ++item) {
                const std::int64_t head = item / p.key_tiles, tile = item % p.key_tiles;
                pack_tile(call, p, first_head + static_cast<int>(head), tile, own.rows,
                          keys_of(head) + static_cast<std::size_t>(tile) * key_bytes,
                          values_of(head) + static_cast<std::size_t>(tile) * value_bytes);
            }
#pragma omp for schedule(static)
            for (std::int64_t item = 0; item < heads * p.units * p.mean_tiles; ++item) {
                const std::int64_t unit = item / p.mean_tiles, tile = item % p.mean_tiles;
                pack_means(call, p, shared, first_head * p.units + static_cast<int>(unit), tile, own.rows,
                           shared.mean_keys + static_cast<std::size_t>(item) * key_bytes,
                           shared.mean_values + static_cast<std::size_t>(item) * value_bytes);
            }
            // The last tiles see the most keys: they go first, so that the threads end together.
#pragma omp for schedule(dynamic, 1)
            for (std::int64_t item = 0; item < heads * p.units * p.query_tiles; ++item) {
                const std::int64_t unit = item % (heads * p.units), head = unit / p.units;
                const std::int64_t tile = p.query_tiles - 1 - item / (heads * p.units);
                const auto mean_tile = static_cast<std::size_t>(unit * p.mean_tiles);
                attend_queries(call, p, shared, own, first_head * p.units + static_cast<int>(unit), tile,
                               keys_of(head), values_of(head), shared.mean_keys + mean_tile * key_bytes,
                               shared.mean_values + mean_tile * value_bytes);
            }
        }
    }
}

} // namespace

void attend(const attention_call& call, scratch& memory) {
    const arithmetic kind = resolve(call.kind);
    attend_with(call, memory,
                kind == arithmetic::fp32 ? attention_for(best_simd())
                                         : amx_attention(kind == arithmetic::bf16x3));
}

void attend_fp32(const attention_call& call, scratch& memory, simd_level level) {
    attend_with(call, memory, attention_for(level));
}

std::int64_t attention_pairs(const attention_call& call) {
    check(call);
    const bool listed = call.lists.offsets != nullptr;
    std::int64_t pairs = 0;
    for (std::int64_t q = 0; q < call.query_rows; ++q) {
        std::int64_t from = 0, to = 0;
        find_visible(call, q, from, to);
        if (!listed) {
            pairs += (to - from) * call.query_heads;
            continue;
        }
        const std::int64_t window = std::max(from, std::min(to, find_window(call, q, to)));
        const bool has_means = call.lists.mean_keys != nullptr;
        const key_range means = has_means ? find_mean_blocks(call, q, from, to) : key_range{0, 0};
        for (int head = 0; head < call.query_heads; ++head) {
            pairs +=
                to - window + count_listed(call.lists, head, window) - count_listed(call.lists, head, from);
            const std::int32_t* const begin = call.lists.blocks + call.lists.offsets[head];
            const std::int32_t* const end = call.lists.blocks + call.lists.offsets[head + 1];
            pairs += means.to - means.from -
                     (std::lower_bound(begin, end, means.to) - std::lower_bound(begin, end, means.from));
        }
    }
    return pairs;
}

} // namespace engine::cpu
