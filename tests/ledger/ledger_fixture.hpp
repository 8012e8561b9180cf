// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

/// @file
/// A ledger over memory of exactly its size between two canaries, and batches that own their arrays.

#include <uniprefill/ledger/drop_ledger.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ledger_test {

namespace up = uniprefill;
using positions = std::vector<std::int32_t>;

inline std::string text(const up::status& what) {
    char buffer[320];
    up::format(what, buffer, sizeof buffer);
    return buffer;
}

inline void must(const up::status& what) {
    if (!what.ok()) {
        throw std::runtime_error(text(what));
    }
}

inline positions range(std::int32_t begin, std::int32_t end) {
    positions made(static_cast<std::size_t>(end - begin));
    std::iota(made.begin(), made.end(), begin);
    return made;
}

/// Positions at equal distances.
inline positions every(std::int32_t step, std::int32_t begin, std::int32_t end) {
    positions made;
    for (std::int32_t position = begin; position < end; position += step) {
        made.push_back(position);
    }
    return made;
}

class owned_ledger {
  public:
    owned_ledger(const up::ledger_limits& bounds, std::vector<std::int32_t> layer_sets)
        : layer_sets_(std::move(layer_sets))
        , bytes_(up::drop_ledger<>::state_bytes(bounds))
        , storage_(bytes_ + 2 * canary_bytes + up::workspace::alignment, canary) {
        const auto address = reinterpret_cast<std::uintptr_t>(storage_.data()) + canary_bytes;
        offset_ = canary_bytes +
                  (up::workspace::alignment - address % up::workspace::alignment) % up::workspace::alignment;
        must(ledger.bind(bounds, layer_sets_.data(), memory(), bytes_));
    }

    up::drop_ledger<> ledger;

    std::byte* memory() { return storage_.data() + offset_; }
    std::size_t bytes() const { return bytes_; }
    const std::vector<std::int32_t>& layer_sets() const { return layer_sets_; }
    std::vector<std::byte> snapshot() { return {memory(), memory() + bytes_}; }
    bool is(const std::vector<std::byte>& before) {
        return std::memcmp(memory(), before.data(), bytes_) == 0;
    }
    bool canaries_intact() const {
        for (std::size_t i = 0; i < storage_.size(); ++i) {
            if ((i < offset_ || i >= offset_ + bytes_) && storage_[i] != canary) {
                return false;
            }
        }
        return true;
    }

    up::held_rows rows(std::int32_t request, std::int32_t layer) {
        up::held_rows held;
        must(ledger.rows_of(request, layer, held));
        return held;
    }
    positions held(std::int32_t request, std::int32_t layer) {
        const up::held_rows view = rows(request, layer);
        positions made(static_cast<std::size_t>(view.length()));
        made.resize(static_cast<std::size_t>(view.copy_positions(0, made.data(), view.length())));
        return made;
    }

  private:
    static constexpr std::size_t canary_bytes = 512;
    static constexpr std::byte canary{0xa5};

    std::vector<std::int32_t> layer_sets_;
    std::size_t bytes_;
    std::vector<std::byte> storage_;
    std::size_t offset_ = 0;
};

/// The limits and the ledger of a model whose given layers select.
inline owned_ledger make_ledger(const std::vector<std::int32_t>& selecting, std::int32_t num_layers,
                                up::set_relation relation, std::int32_t max_tokens = 2048,
                                std::int32_t max_requests = 4) {
    std::vector<std::int32_t> layer_sets(static_cast<std::size_t>(num_layers));
    up::ledger_limits bounds{max_requests, max_tokens, num_layers, 0, relation};
    const auto map =
        relation == up::set_relation::nested ? up::cumulative_layer_sets : up::revived_layer_sets;
    must(map(selecting.data(), static_cast<std::int32_t>(selecting.size()), num_layers, layer_sets.data(),
             bounds.num_sets));
    return {bounds, layer_sets};
}

/// Rows of a step, or those that enter one of its layers.
struct rows_batch {
    std::vector<std::int32_t> ids;
    std::vector<up::request_tag> tags;
    std::vector<std::int32_t> cu{0};
    positions packed;

    void add(std::int32_t id, up::request_tag tag, const positions& rows) {
        ids.push_back(id);
        tags.push_back(tag);
        packed.insert(packed.end(), rows.begin(), rows.end());
        cu.push_back(static_cast<std::int32_t>(packed.size()));
    }
    up::batch_view view() const {
        up::batch_view batch;
        batch.num_requests = static_cast<std::int32_t>(ids.size());
        batch.num_segments = batch.num_requests;
        batch.num_rows = static_cast<std::int32_t>(packed.size());
        batch.tags = tags.data();
        batch.cu_seqlens = cu.data();
        batch.positions = packed.data();
        return batch;
    }
};

/// One request of a step whose drop is decided once: the rows that enter `layer` and those after it.
struct step_request {
    std::int32_t id;
    up::request_tag tag;
    positions rows;
    positions kept;
};

/// Opens a step with the given rows and lets the kept ones alone enter `layer` and the layers after it.
class open_step {
  public:
    open_step(owned_ledger& owner, const std::vector<step_request>& requests, std::int32_t layer)
        : ledger_(owner.ledger) {
        rows_batch entering;
        for (const step_request& request : requests) {
            batch_.add(request.id, request.tag, request.rows);
            entering.add(request.id, request.tag, request.kept);
        }
        must(ledger_.begin_step(batch_.view(), batch_.ids.data(), step));
        must(ledger_.append(step, layer, entering.view()));
    }
    void commit() { must(ledger_.commit_step(step)); }
    void abort() { must(ledger_.abort_step(step)); }

    up::ledger_step step;

    std::vector<std::int64_t> slots(std::int32_t layer, const up::block_table_view& table) const {
        std::vector<std::int64_t> out(num_rows(layer));
        must(ledger_.slot_mapping(step, layer, table, out.data(), static_cast<std::int32_t>(out.size())));
        return out;
    }
    positions row_positions(std::int32_t layer) const {
        positions out(num_rows(layer));
        must(ledger_.row_positions(step, layer, out.data(), static_cast<std::int32_t>(out.size())));
        return out;
    }
    positions write_rows(std::int32_t layer) const {
        positions out(num_rows(layer));
        must(ledger_.write_rows(step, layer, out.data(), static_cast<std::int32_t>(out.size())));
        return out;
    }
    std::vector<std::int32_t> cached_lens(std::int32_t layer) const {
        std::vector<std::int32_t> out(batch_.ids.size());
        must(ledger_.cached_lens(step, layer, out.data(), step.num_requests()));
        return out;
    }
    std::vector<std::int32_t> seq_lens(std::int32_t layer) const {
        std::vector<std::int32_t> out(batch_.ids.size());
        must(ledger_.seq_lens(step, layer, out.data(), step.num_requests()));
        return out;
    }

  private:
    std::size_t num_rows(std::int32_t layer) const {
        std::int32_t rows = 0;
        must(ledger_.num_rows(step, layer, rows));
        return static_cast<std::size_t>(rows);
    }

    up::drop_ledger<>& ledger_;
    rows_batch batch_;
};

} // namespace ledger_test
