// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// step_arrays on the device: a thread block tells of a stretch of rows of one layer.
#pragma once

#include <uniprefill/ledger/detail/cuda_scan.cuh>
#include <uniprefill/ledger/detail/cuda_step_rows.cuh>
#include <uniprefill/ledger/step_wishes.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Rows of a layer that a thread block tells of.
inline constexpr std::int32_t told_rows = 4 * ledger_threads;

/// Thread blocks that tell of a layer whose arrays have @p num_rows entries by row.
[[nodiscard]] inline UNIPREFILL_API std::int32_t stretches_of(std::int32_t num_rows) noexcept {
    return num_rows > told_rows ? num_blocks(num_rows, told_rows) : 1;
}

template <class Slots, class Index, class Slot>
class UNIPREFILL_HIDDEN step_teller {
  public:
    using wanted_type = step_wishes<Slots, Index, Slot>;

    /// @param offsets [num_requests + 1] room in shared memory
    /// @param nothing the step was refused, or has no such rows: its arrays are those of one without rows
    __device__ step_teller(const cuda_ledger_state& ledger, const cuda_step& step, rows_source source,
                           const wanted_type& wanted, std::int32_t part, bool nothing, std::int32_t* offsets)
        : ledger_(ledger)
        , step_(step)
        , wanted_(wanted)
        , offsets_(offsets)
        , source_(source)
        , part_(part)
        , layer_(wanted.layers.at(part)) {
        const bool there = ledger.require_layer(layer_);
        set_ = there ? ledger.set_of(layer_) : 0;
        num_requests_ = nothing || !there ? 0 : step.num_requests;
    }

    /// @param stretches that there are of each layer
    __device__ void tell(std::int32_t stretch, std::int32_t stretches, ledger_scan::room& scan) {
        place_requests(scan, [this](std::int32_t r) { return rows_of(r).count(); });
        const std::int32_t rows = offsets_[num_requests_];
        if (stretch == 0) {
            tell_requests(rows);
            if (rows > wanted_.out.num_rows && by_row() && ledger_thread() == 0) {
                ledger_.raise(ledger_complaint::too_few_entries, -1, layer_, wanted_.out.num_rows);
            }
        }
        const std::int32_t first = stretch * told_rows;
        const std::int32_t left = wanted_.out.num_rows - first; // first + told_rows may be no int32
        for (std::int32_t i = ledger_thread(); i < left && i < told_rows; i += ledger_threads) {
            const std::int32_t row = first + i;
            if (row < rows) {
                tell_row(row);
            } else {
                pad_row(row);
            }
        }
        if (wanted_.out.chunks != nullptr) {
            __syncthreads();
            tell_chunks(stretch, stretches, scan);
        }
    }

  private:
    [[nodiscard]] __device__ bool by_row() const {
        const step_arrays<Index, Slot>& out = wanted_.out;
        return out.row_positions != nullptr || out.write_rows != nullptr || out.window_rows != nullptr ||
               out.slots != nullptr;
    }
    [[nodiscard]] __device__ step_rows rows_of(std::int32_t r) const {
        const std::int32_t request = step_.request_ids[r];
        if (!ledger_.is_slot(request)) {
            return {};
        }
        const request_record state = ledger_.record(request);
        // A step that begins is opened by another thread block at this moment.
        const bool there = source_ == rows_source::arriving || state.header->open == step_.ticket;
        return there ? step_rows(source_, state, set_, step_, r) : step_rows();
    }

    /// Where what counts so many entries of each request begins: its rows, or its chunks.
    template <class Count>
    __device__ void place_requests(ledger_scan::room& scan, Count count_of) {
        std::int32_t before = 0;
        for (std::int32_t first = 0; first < num_requests_; first += ledger_threads) {
            const std::int32_t r = first + ledger_thread();
            const std::int32_t count = r < num_requests_ ? count_of(r) : 0;
            std::int32_t offset = 0;
            std::int32_t all = 0;
            ledger_scan(scan).exclusive_sum(count, offset, all);
            if (r < num_requests_) {
                offsets_[r] = before + offset;
            }
            before += all;
            __syncthreads();
        }
        if (ledger_thread() == 0) {
            offsets_[num_requests_] = before;
        }
        __syncthreads();
    }

    /// The last request whose entries don't begin beyond this one; those without entries come before it.
    [[nodiscard]] __device__ std::int32_t request_of(std::int32_t entry) const {
        std::int32_t low = 0;
        std::int32_t high = num_requests_;
        while (high - low > 1) {
            const std::int32_t middle = low + (high - low) / 2;
            if (offsets_[middle] <= entry) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }

    static __device__ void put(Index* array, std::int64_t index, std::int32_t value) {
        if (array != nullptr) {
            array[index] = value;
        }
    }

    __device__ void tell_requests(std::int32_t rows) const {
        const step_arrays<Index, Slot>& out = wanted_.out;
        const std::int64_t first = std::int64_t{part_} * out.num_requests;
        for (std::int32_t r = ledger_thread(); r < out.num_requests; r += ledger_threads) {
            const step_rows of = r < num_requests_ ? rows_of(r) : step_rows();
            put(out.cached_lens, first + r, of.before());
            put(out.seq_lens, first + r, of.length());
            put(out.cu_seqlens, first + part_ + r, r < num_requests_ ? offsets_[r] : rows);
            put(out.num_pages, first + r, num_blocks(of.length(), out.page_tokens));
            put(out.partial_pages, first + r,
                of.count() > 0 && of.before() % out.page_tokens != 0 ? of.before() / out.page_tokens : -1);
        }
        if (ledger_thread() == 0) {
            put(out.cu_seqlens, first + part_ + out.num_requests, rows);
        }
    }

    __device__ void tell_row(std::int32_t row) const {
        const step_arrays<Index, Slot>& out = wanted_.out;
        const std::int64_t at = std::int64_t{part_} * out.num_rows + row;
        const std::int32_t r = request_of(row);
        const step_rows of = rows_of(r);
        const std::int32_t index = row - offsets_[r];
        const std::int32_t cache_row = of.before() + index;
        put(out.write_rows, at, cache_row);
        if (out.row_positions != nullptr || out.window_rows != nullptr) {
            const std::int32_t position = of.position(index);
            put(out.row_positions, at, position);
            put(out.window_rows, at, of.window_row(position, out.window));
        }
        if (out.slots != nullptr) {
            out.slots[at] = slot_of(r, cache_row);
        }
    }
    [[nodiscard]] __device__ Slot slot_of(std::int32_t r, std::int32_t cache_row) const {
        const std::int32_t request = step_.request_ids[r];
        const std::int64_t slot =
            wanted_.slots.slot(layer_, wanted_.slots.rows == request_index::batch ? r : request, cache_row);
        if (slot < 0) {
            ledger_.raise(ledger_complaint::no_page, request, layer_, cache_row);
            return wanted_.out.no_slot;
        }
        constexpr std::int64_t most = sizeof(Slot) == sizeof(std::int32_t) ? INT32_MAX : INT64_MAX;
        if (slot > most) {
            ledger_.raise(ledger_complaint::slot_too_large, request, layer_, slot);
            return wanted_.out.no_slot;
        }
        return static_cast<Slot>(slot);
    }

    __device__ void pad_row(std::int32_t row) const {
        const step_arrays<Index, Slot>& out = wanted_.out;
        const std::int64_t at = std::int64_t{part_} * out.num_rows + row;
        put(out.row_positions, at, -1);
        put(out.write_rows, at, -1);
        put(out.window_rows, at, -1);
        if (out.slots != nullptr) {
            out.slots[at] = out.no_slot;
        }
    }

    /// This thread block's share of them. Offsets of rows aren't needed any more.
    __device__ void tell_chunks(std::int32_t stretch, std::int32_t stretches, ledger_scan::room& scan) {
        const step_arrays<Index, Slot>& out = wanted_.out;
        place_requests(scan, [&](std::int32_t r) { return num_blocks(rows_of(r).count(), out.chunk_rows); });
        const std::int32_t chunks = offsets_[num_requests_];
        if (stretch == 0 && chunks > out.num_chunks && ledger_thread() == 0) {
            ledger_.raise(ledger_complaint::too_few_chunks, -1, layer_, out.num_chunks);
        }
        Index* const entries = out.chunks + std::int64_t{2} * part_ * out.num_chunks;
        const std::int64_t step = std::int64_t{stretches} * ledger_threads;
        for (std::int64_t chunk = std::int64_t{stretch} * ledger_threads + ledger_thread();
             chunk < out.num_chunks; chunk += step) {
            const bool there = chunk < chunks;
            const std::int32_t r = there ? request_of(static_cast<std::int32_t>(chunk)) : -1;
            entries[2 * chunk] = r;
            entries[2 * chunk + 1] = there ? static_cast<std::int32_t>(chunk) - offsets_[r] : -1;
        }
    }

    const cuda_ledger_state& ledger_;
    const cuda_step& step_;
    const wanted_type& wanted_;
    std::int32_t* offsets_;
    rows_source source_;
    std::int32_t part_; ///< of the arrays
    std::int32_t layer_;
    std::int32_t set_ = 0;
    std::int32_t num_requests_ = 0;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
