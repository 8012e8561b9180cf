// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Slots that were looked up, for whoever writes them afterwards.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The first slots that a call looks up, in the order in which it writes them afterwards. Every slot is
/// looked up before the first is written, and a table entry that no cache holds is dear: it is read once
/// where there is room for it here, on the stack. Rows of a prompt share their entries, so theirs are asked
/// for twice.
class noted_slots {
  public:
    /// A row for each of 256 requests in 32 layers.
    static constexpr std::int32_t capacity = 8192;

    /// Not initialised: what was noted alone is read.
    UNIPREFILL_HOST_API noted_slots() noexcept {} // NOLINT(*-use-equals-default, *-member-init)

    /// Whether slots of so many rows of a request are noted.
    [[nodiscard]] static UNIPREFILL_HOST_API bool worth_it(std::int32_t rows) noexcept { return rows <= 4; }
    /// A slot that comes again from next().
    UNIPREFILL_HOST_API void note(std::int64_t slot) noexcept {
        if (count_ < capacity) {
            slots_[count_++] = static_cast<std::uint32_t>(slot);
        }
    }
    /// The lowest and the highest of some slots, noted or not.
    UNIPREFILL_HOST_API void include(std::int64_t lowest, std::int64_t highest) noexcept {
        lowest_ = lowest < lowest_ ? lowest : lowest_;
        highest_ = highest > highest_ ? highest : highest_;
    }
    /// Whether every slot that is included is one, and none exceeds @p most.
    [[nodiscard]] UNIPREFILL_HOST_API bool all_within(std::int64_t most) const noexcept {
        return lowest_ >= 0 && highest_ <= most;
    }

    /// The next noted slot, from the first on; asks @p look_up where there was no room.
    template <class LookUp>
    [[nodiscard]] UNIPREFILL_HOST_API std::int64_t next(LookUp look_up) noexcept {
        return taken_ < count_ && highest_ <= most_ ? std::int64_t{slots_[taken_++]} : look_up();
    }

  private:
    static constexpr std::int64_t most_ = 0xffffffff; ///< of a note

    std::int64_t lowest_ = 0;
    std::int64_t highest_ = 0;
    std::int32_t count_ = 0;
    std::int32_t taken_ = 0;
    std::uint32_t slots_[capacity];
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
