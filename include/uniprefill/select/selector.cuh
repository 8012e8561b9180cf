// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From block masses to a keep set, on the device.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/select/selector.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// How the CUDA selector runs. Results don't depend on it; zeros are right for production.
struct cuda_selector_options {
    /// How many launches decide and write.
    enum class launch_count : std::int32_t {
        automatic, ///< one where that is faster
        one,       ///< one where the step has one segment, but for rules of one's own
        two,       ///< one that decides, one that writes
    };
    launch_count launches = launch_count::automatic;
    /// Thread blocks that decide together: 1, 2, 4 or 8; 0: by size.
    std::int32_t cluster_ctas = 0;
};

/// On CUDA devices: the same keep sets, row maps, counts and outcomes as the host backend, bit for bit.
///
/// Masses, the arrays of the batch, rules and outputs lie in device memory. Nothing is allocated,
/// synchronised with or read back, and only kernels go onto the stream, so a call can be captured into a
/// graph and replayed with other lengths, masses, rules, options and spans, within what the host knows:
/// `num_requests`, `num_segments` and `num_rows`, the last an upper bound of the rows that `cu_seqlens`
/// tells.
///
/// A step of one segment takes one launch, in which every thread block, or for many blocks every cluster,
/// decides it for itself; others take two, of which the first decides each segment once: small ones by a
/// thread block each, large ones by clusters where there are any (compute capability 9.0 and up) and segments
/// are not so many that all count as small. Nothing is sorted: a histogram of all masses tells the few blocks
/// among which the cut lies, and comparing each of these with each tells which of them it is. Top-p and
/// budgets over the mass of free rows, without spans, take the fewest instructions; other rules and spans
/// take longer. A rule of one's own takes two launches, gets its masses sorted, and must have `keep_count()`
/// and `exact_rows()` that the device can call (mark them `__host__ __device__`).
///
/// **What only the host can refuse.** On the device a segment is kept whole with the fault `invalid` where
/// its rule, its tag, its request's options or its forced spans make no sense (of a rule of one's own the
/// fields of rule_base are checked: validate() belongs to the host), and with the fault `overflow` where
/// spans lie beyond limits::max_forced_spans. Under exact rows that is `rerun_dense`, as any fault. Where
/// segments are in no order (offsets that fall, or that don't tile the requests), every row of the step is
/// kept, in place: `invalid` everywhere, no bit of keep_bits is set, and offsets are clamped so that they
/// rise. Positions that don't ascend give some keep set.
///
/// **kept_bound** must be known to the host: it is batch.num_rows unless the caller knows better. An engine
/// whose segments all have fixed budgets passes their sum. Should more rows be kept (a request that is
/// switched off, say), those beyond are dropped, and their segments say `rerun_dense`.
///
/// Old rows from cu_seqlens[num_requests] to batch.num_rows get -1 in old_to_kept.
///
/// Deterministic for any grid. Thread-safe: the object is immutable; concurrent calls need workspaces and
/// outputs of their own. O(rows + blocks) work, and O(log(rows)) for each span.
template <class Rule>
class block_selector<Rule, backend::cuda> {
    static_assert(is_selection_rule_v<Rule>,
                  "Rule: a trivially copyable type derived from uniprefill::rule_base expected, with "
                  "std::int32_t keep_count(const ranked_blocks&) const noexcept");

  public:
    /// Keeps @p bounds, which run() checks, and what @p device is. Needs no device itself.
    explicit UNIPREFILL_HOST_API block_selector(const limits& bounds, const cuda_device& device,
                                                const cuda_selector_options& options = {}) noexcept
        : bounds_(bounds)
        , device_(device)
        , options_(options) {}

    /// Bytes of workspace that run() needs: 72 for each segment, and for each block 16, with a rule of one's
    /// own 40. Pure; 0 where the limits are not valid.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Puts onto @p stream what fills every array of @p out, and sets its counts; `kept_bound` is
    /// batch.num_rows.
    /// @param masses as importance writes them for @p batch, reduced over heads and ranks
    /// @param batch the step, in device memory
    /// @param rules [num_requests] the rule of each request, in device memory
    /// @param out made by selection::carve with limits that are no smaller
    /// @param memory workspace_bytes() bytes of device memory, used until the work is done
    /// @return invalid_argument, out_of_range, not_supported, workspace_too_small, misaligned or
    /// backend_error;
    ///         nothing has been launched then.
    UNIPREFILL_HOST_API status run(const mass_view& masses, const batch_view& batch, const Rule* rules,
                                   selection& out, workspace memory,
                                   backend::cuda::stream stream) const noexcept {
        return run(masses, batch, rules, batch.num_rows, out, memory, stream);
    }
    /// As above, with an upper bound of the kept rows that the caller knows, 0..limits.max_rows.
    UNIPREFILL_HOST_API status run(const mass_view& masses, const batch_view& batch, const Rule* rules,
                                   std::int32_t kept_bound, selection& out, workspace memory,
                                   backend::cuda::stream stream) const noexcept;

  private:
    limits bounds_;
    cuda_device device_;
    cuda_selector_options options_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/select/detail/cuda_selector.inl>
