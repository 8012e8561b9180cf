// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From masses by head to block lists, on the device.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/select/block_lister.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// On CUDA devices: the same lists as the host backend, bit for bit (block_lister.hpp says what they are).
///
/// Masses, fault words, the arrays of the batch and the lists lie in device memory. Nothing is allocated,
/// synchronised with or read back, and only kernels go onto the stream, so a call can be captured into a
/// graph and replayed with other lengths, masses, fault words, options and spans, within what the host knows:
/// `num_requests`, `num_segments`, `num_rows` (an upper bound of the rows that `cu_seqlens` tells), and
/// list_options.
///
/// Two launches: in the first a thread block for each list decides which blocks it has (a histogram of all
/// masses tells the few among which the last one lies; nothing is sorted), in the second, once all lengths
/// are known, numbers are written. A rule of one's own gets its masses sorted, and must have `keep_count()`
/// and `exact_rows()` that the device can call (mark them `__host__ __device__`).
///
/// **What only the host can refuse.** On the device a list has every block of its segment where, under
/// mass_scope::free, its request's options or forced spans make no sense or spans lie beyond
/// limits::max_forced_spans. Where segments are in no order (offsets that fall, or that don't tile the
/// requests), all lists have every block of the rows that their offsets name within the step, and those
/// beyond `out.capacity` are left out. Positions that don't ascend give some sinks.
///
/// Deterministic for any grid. Thread-safe: the object is immutable; concurrent calls need workspaces and
/// outputs of their own. O(blocks * query heads) work and O(log(rows)) for each list; under mass_scope::free
/// O(log(rows)) for each span and list besides.
template <class Rule>
class block_lister<Rule, backend::cuda> {
    static_assert(is_selection_rule_v<Rule>,
                  "Rule: a trivially copyable type derived from uniprefill::rule_base expected, with "
                  "std::int32_t keep_count(const ranked_blocks&) const noexcept");

  public:
    /// Keeps @p bounds, which run() checks, and what @p device is. Needs no device itself.
    explicit UNIPREFILL_HOST_API block_lister(const limits& bounds, const cuda_device& device) noexcept
        : bounds_(bounds)
        , device_(device) {}

    /// Bytes of workspace that run() needs: for each query head 4 for each of limits::max_segments, and for
    /// each of limits::max_blocks() 1, with a rule of one's own 25. Pure; 0 where the limits are not valid.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Puts onto @p stream what writes the lists of all segments, and sets `window` and `num_segments` of
    /// @p out.
    /// @param per_head  [limits::num_heads, blocks] in device memory, as importance writes it for @p batch:
    ///                  all query heads of this rank; head_stride of at least num_rows / G + num_segments
    /// @param faults    [batch.num_segments] fault words in device memory, as mass_view has them
    /// @param batch     the step, in device memory
    /// @param options   in host memory
    /// @param out       made by block_lists::carve in device memory with the same limits, a list for each
    ///                  query head or for each KV head
    /// @param memory    workspace_bytes() bytes of device memory, used until the work is done
    /// @return invalid_argument, out_of_range, not_supported, workspace_too_small, misaligned or
    ///         backend_error; nothing has been launched then, unless it is backend_error
    UNIPREFILL_HOST_API status run(const head_mass_view& per_head, const std::int64_t* faults,
                                   const batch_view& batch, const list_options<Rule>& options,
                                   block_lists& out, workspace memory,
                                   backend::cuda::stream stream) const noexcept;

  private:
    limits bounds_;
    cuda_device device_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/select/detail/cuda_block_lister.inl>
