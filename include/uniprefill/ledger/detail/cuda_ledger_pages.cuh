// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Pages that nobody needs any more, listed by one thread block in the order of the host's ledger.
#pragma once

#include <uniprefill/ledger/detail/cuda_scan.cuh>
#include <uniprefill/ledger/detail/divided_pages.hpp>
#include <uniprefill/ledger/held_rows.hpp>
#include <uniprefill/ledger/layer_list.hpp>
#include <uniprefill/ledger/pages.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

struct cuda_page_task {
    const std::int32_t* request_ids = nullptr; // [count]
    std::int32_t count = 0;
    layer_list layers;
    page_rule rule;
    page_tables tables;
    std::int32_t* pages = nullptr; // [capacity]
    std::int32_t capacity = 0;
    std::int32_t* num_pages = nullptr; // [1]
};

class UNIPREFILL_HIDDEN page_lister {
  public:
    __device__ page_lister(const cuda_ledger_state& ledger, const cuda_page_task& task)
        : ledger_(ledger)
        , task_(task)
        , shared_(task.tables.layer_stride == 0)
        , num_tables_((shared_ && task.layers.count > 0 ? 1 : task.layers.count) * std::int64_t{task.count}) {
    }

    /// Everything is looked at before the first entry is changed.
    __device__ void run(ledger_scan::room& scan) {
        bool good = __syncthreads_and(lists_are_good() ? 1 : 0) != 0;
        if (!good) {
            if (ledger_thread() == 0) {
                *task_.num_pages = 0;
            }
            return;
        }
        const std::int32_t found =
            visit(scan, [&](std::int64_t table, std::int32_t) { good = look_at(table) && good; });
        good = __syncthreads_and(good ? 1 : 0) != 0;
        if (good && found > task_.capacity) {
            good = false;
            if (ledger_thread() == 0) {
                ledger_.raise(ledger_complaint::too_many_pages, -1, -1, found);
            }
        }
        if (good) {
            static_cast<void>(
                visit(scan, [&](std::int64_t table, std::int32_t before) { hand_back(table, before); }));
        }
        if (ledger_thread() == 0) {
            *task_.num_pages = good ? found : 0;
        }
    }

  private:
    /// What this thread sees of it.
    [[nodiscard]] __device__ bool lists_are_good() const {
        bool good = true;
        for (std::int32_t i = ledger_thread(); i < task_.layers.count; i += ledger_threads) {
            good = ledger_.require_layer(task_.layers.at(i)) && good;
        }
        for (std::int32_t r = ledger_thread(); r < task_.count; r += ledger_threads) {
            const std::int32_t id = task_.request_ids[r];
            if (id != -1 && !ledger_.is_admitted(id)) {
                ledger_.raise(ledger_complaint::unknown_request, id, -1, id);
                good = false;
            }
        }
        return good;
    }
    [[nodiscard]] __device__ std::int32_t request(std::int64_t table) const {
        const std::int32_t id = task_.request_ids[table % task_.count];
        return ledger_.is_admitted(id) ? id : -1;
    }
    [[nodiscard]] __device__ std::int32_t layer(std::int64_t table) const {
        return task_.layers.at(static_cast<std::int32_t>(table / task_.count));
    }
    [[nodiscard]] __device__ std::int32_t index(std::int64_t table) const {
        return task_.tables.rows == request_index::batch ? static_cast<std::int32_t>(table % task_.count)
                                                         : request(table);
    }
    [[nodiscard]] __device__ bool span_is_there(std::int64_t table) const {
        const page_span used = task_.tables.span(layer(table), index(table));
        return used.begin >= 0 && used.end >= used.begin && used.end <= task_.tables.max_pages;
    }
    /// @pre request() >= 0 and span_is_there()
    [[nodiscard]] __device__ divided_pages divide(std::int64_t table) const {
        const request_record state = ledger_.record(request(table));
        page_span live{};
        const std::int32_t first = static_cast<std::int32_t>(table / task_.count);
        for (std::int32_t i = first; i < (shared_ ? task_.layers.count : first + 1); ++i) {
            const page_span also =
                held_rows_maker::make(state, ledger_.set_of(task_.layers.at(i))).live_pages(task_.rule);
            live = i == first ? also : together(live, also);
        }
        return {task_.tables.span(layer(table), index(table)), live};
    }

    /// Calls visitor(table, pages of those before it) for each table, several at once. @return all pages
    template <class Visitor>
    [[nodiscard]] __device__ std::int32_t visit(ledger_scan::room& scan, Visitor visitor) {
        std::int32_t before = 0;
        for (std::int64_t first = 0; first < num_tables_; first += ledger_threads) {
            const std::int64_t table = first + ledger_thread();
            const bool there = table < num_tables_ && request(table) >= 0;
            std::int32_t here = 0;
            if (there && span_is_there(table)) {
                const divided_pages parts = divide(table);
                here = parts.before.count() + parts.after.count();
            }
            std::int32_t offset = 0;
            std::int32_t all = 0;
            ledger_scan(scan).exclusive_sum(here, offset, all);
            if (there) {
                visitor(table, before + offset);
            }
            before += all;
            __syncthreads();
        }
        return before;
    }

    [[nodiscard]] __device__ bool look_at(std::int64_t table) const {
        if (!span_is_there(table)) {
            ledger_.raise(ledger_complaint::table_span, request(table), layer(table),
                          task_.tables.span(layer(table), index(table)).end);
            return false;
        }
        const divided_pages parts = divide(table);
        const std::int32_t* const entries = task_.tables.entries(layer(table), index(table));
        for (const page_span part : {parts.before, parts.after}) {
            for (std::int32_t entry = part.begin; entry < part.end; ++entry) {
                if (entries[entry] < 0 || entries[entry] == task_.tables.no_page) {
                    ledger_.raise(ledger_complaint::table_page, request(table), layer(table), entries[entry]);
                    return false;
                }
            }
        }
        return true;
    }
    __device__ void hand_back(std::int64_t table, std::int32_t before) const {
        const divided_pages parts = divide(table);
        std::int32_t* const entries = task_.tables.entries(layer(table), index(table));
        for (const page_span part : {parts.before, parts.after}) {
            for (std::int32_t entry = part.begin; entry < part.end; ++entry) {
                task_.pages[before++] = entries[entry];
                entries[entry] = task_.tables.no_page;
            }
        }
        task_.tables.span(layer(table), index(table)) = parts.kept;
    }

    const cuda_ledger_state& ledger_;
    const cuda_page_task& task_;
    bool shared_; ///< by all layers: each request has one table
    std::int64_t num_tables_;
};

template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    hand_back_kernel(const __grid_constant__ cuda_ledger_state ledger,
                     const __grid_constant__ cuda_page_task task) {
    __shared__ ledger_scan::room scan;
    let_next_kernel_start();
    wait_for_previous_kernel();
    page_lister(ledger, task).run(scan);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
