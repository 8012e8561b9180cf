// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What derives numbers from a ledger's state is for devices, too: this is compiled, and never run.

#include <uniprefill/ledger/drop_ledger.hpp>

namespace up = uniprefill;

namespace {

__global__ void derive(std::byte* memory, up::detail::ledger_layout layout, up::page_rule rule,
                       up::block_table_view table, up::layer_list layers, up::page_tables tables,
                       std::int32_t* out, std::int64_t* slots, up::page_signature* signatures) {
    const auto request = static_cast<std::int32_t>(blockIdx.x);
    const auto set = static_cast<std::int32_t>(threadIdx.x);
    const up::detail::request_record state = layout.record(memory, request);
    const up::held_rows held = up::detail::held_rows_maker::make(state, set);
    out[0] = held.length() + held.num_tokens() + held.position_of(5) + held.row_of(6);
    out[1] = held.window_row(70, rule.window) + held.pages(rule.page_tokens);
    out[2] = held.live_pages(rule).count() + held.fork_pages(rule).copied;
    out[3] = held.copy_positions(0, out + 64, 64) + held.copy_dropped_ranges(nullptr, 0);
    out[4] = state.rows_below(set, 9) + state.length_before(set) + state.length(set);
    out[5] = layers.at(set) + tables.span(0, request).count() + tables.entries(0, request)[0];
    up::detail::fill_rows(state, set, 0, 1, out + 6, out + 7, out + 8, rule.window);
    slots[0] = table.slot(layers.at(0), request, held.length());
    slots[1] = up::contiguous_slots{}.slot(0, request, 0);
    signatures[0] = up::sign_text({}, out, 9);
    state.sets.copy_prefix(state.sets, 64);
    out[9] = state.sets.well_formed(64) ? state.sets.recount(set, 0, 64, 0) : 0;
    state.sets.fill(0, 64);
    state.sets.keep(set, 0, 64, out, 1);
    state.sets.clear(0, 64);
    state.copy_below(state.staged_below, state.committed_below);
    state.header->close();
}

} // namespace

/// So that the kernel isn't left out.
const void* ledger_functions_on_a_device() {
    return reinterpret_cast<const void*>(&derive);
}
