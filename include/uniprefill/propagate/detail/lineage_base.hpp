// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What the lineages of both backends keep and tell.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The step of a lineage, its current rows, and the two buffers that take turns.
class lineage_base {
  public:
    [[nodiscard]] UNIPREFILL_HOST_API bool has_begun() const noexcept { return begun_; }
    /// The step as begin() took it.
    [[nodiscard]] UNIPREFILL_HOST_API const batch_view& step() const noexcept { return step_; }
    /// The current rows: the step with its own tags, options and spans, and the offsets and positions of the
    /// rows that are left. `cached_lens` are the step's: an engine whose layers hold different keys replaces
    /// them.
    [[nodiscard]] UNIPREFILL_HOST_API batch_view current() const noexcept { return current_; }
    /// Whether no row can be missing.
    [[nodiscard]] UNIPREFILL_HOST_API bool holds_every_row() const noexcept {
        return original_rows_ == nullptr;
    }
    /// The row of the step that each current row is, [current().num_rows]; null while no row can be missing.
    [[nodiscard]] UNIPREFILL_HOST_API const std::int32_t* original_rows() const noexcept {
        return original_rows_;
    }

  protected:
    struct buffer {
        std::int32_t* original_rows = nullptr; // [max_rows]
        std::int32_t* positions = nullptr;     // [max_rows]
        std::int32_t* cu_seqlens = nullptr;    // [max_requests + 1]
        std::int32_t* cu_segments = nullptr;   // [max_segments + 1]
    };

    explicit UNIPREFILL_HOST_API lineage_base(const limits& bounds) noexcept
        : bounds_(bounds) {}

    [[nodiscard]] UNIPREFILL_HOST_API const limits& bounds() const noexcept { return bounds_; }
    /// Bytes of both buffers; 0 where the limits are not valid.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t buffer_bytes() const noexcept {
        if (!validate(bounds_).ok()) {
            return 0;
        }
        workspace counting;
        static_cast<void>(carve(counting));
        static_cast<void>(carve(counting));
        return counting.bytes_used();
    }
    /// Starts @p step with every row current; takes the buffers from @p memory. Both have been checked.
    UNIPREFILL_HOST_API void start(const batch_view& step, workspace& memory) noexcept {
        buffers_[0] = carve(memory);
        buffers_[1] = carve(memory);
        next_buffer_ = 0;
        step_ = step;
        begun_ = true;
        static_cast<void>(restore());
    }
    /// Makes every row of the step current again.
    UNIPREFILL_HOST_API status restore() noexcept {
        UNIPREFILL_TRY(check_begun());
        current_ = step_;
        original_rows_ = nullptr;
        return success();
    }
    /// Whether @p decided, in @p space, is about the current rows.
    [[nodiscard]] UNIPREFILL_HOST_API status check_about(const selection& decided,
                                                         memory_space space) const noexcept {
        UNIPREFILL_TRY(check_begun());
        if (decided.space != space) {
            return failure(status_code::not_supported, "decided.space",
                           space == memory_space::host ? "host memory" : "device memory",
                           static_cast<std::int32_t>(decided.space));
        }
        if (decided.num_rows != current_.num_rows) {
            return failure(status_code::invalid_argument, "decided.num_rows", "the number of current rows",
                           decided.num_rows);
        }
        if (decided.num_requests != current_.num_requests || decided.num_segments != current_.num_segments) {
            return failure(status_code::invalid_argument, "decided.num_segments",
                           "the requests and segments of the step", decided.num_segments);
        }
        return success();
    }
    /// The buffer that the next selection is composed into.
    [[nodiscard]] UNIPREFILL_HOST_API const buffer& next_buffer() const noexcept {
        return buffers_[next_buffer_];
    }
    /// Makes the rows of next_buffer(), @p num_rows at most, the current ones.
    UNIPREFILL_HOST_API void advance(std::int32_t num_rows) noexcept {
        const buffer& now = next_buffer();
        next_buffer_ = 1 - next_buffer_;
        original_rows_ = now.original_rows;
        current_.num_rows = num_rows;
        current_.positions = now.positions;
        current_.cu_seqlens = now.cu_seqlens;
        current_.cu_segments = step_.cu_segments != nullptr ? now.cu_segments : nullptr;
    }

  private:
    [[nodiscard]] UNIPREFILL_HOST_API status check_begun() const noexcept {
        if (!begun_) {
            return failure(status_code::wrong_state, "lineage", "begin() before apply() and revive()", 0);
        }
        return success();
    }
    [[nodiscard]] UNIPREFILL_HOST_API buffer carve(workspace& memory) const noexcept {
        buffer made;
        made.original_rows = memory.take<std::int32_t>(bounds_.max_rows);
        made.positions = memory.take<std::int32_t>(bounds_.max_rows);
        made.cu_seqlens = memory.take<std::int32_t>(std::int64_t{bounds_.max_requests} + 1);
        made.cu_segments = memory.take<std::int32_t>(std::int64_t{bounds_.max_segments} + 1);
        return made;
    }

    limits bounds_;
    batch_view step_{};
    batch_view current_{};
    const std::int32_t* original_rows_ = nullptr;
    buffer buffers_[2];
    std::int32_t next_buffer_ = 0;
    bool begun_ = false;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
