// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Moving rows in place with many workers: pieces are taken in order, and one is written only when all pieces
/// that are read from where it goes have been read.
///
/// A worker draws a ticket (the next piece), reads the piece into memory of its own, says so, waits until the
/// pieces that it would overwrite have been read, writes; then it draws the next. Whoever holds the lowest
/// ticket that isn't written waits only for lower ones, which are written; so somebody can always go on, no
/// matter how many workers run at once.
///
/// The protocol is the same on host and device, so that threads of the host can test it.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What the workers of one move share. All zero at the start.
///
/// 32 pieces are a group with a bit for each. Group g has word g % ring, the bits of which are set by g /
/// ring even, and cleared by g / ring odd: so the words serve again without anybody having to clear them.
struct piece_order {
    static constexpr std::uint32_t group = 32; ///< pieces
    static constexpr std::uint32_t ring = 1024;

    std::uint32_t next_ticket;
    std::uint32_t apart[63];
    std::uint32_t frontier; ///< all groups below are read
    std::uint32_t apart_too[63];
    std::uint32_t read[ring];

    /// The word of group @p g once all its pieces are read; its complement when none is.
    [[nodiscard]] static UNIPREFILL_API constexpr std::uint32_t whole(std::uint32_t g) noexcept {
        return g / ring % 2 == 0 ? ~0u : 0u;
    }
};

/// What has been read, as one worker knows it.
/// @tparam Memory atomic operations on 32-bit words: `load` (acquire), `flip` (exclusive or that gives the
/// value
///         before; release), `raise` (maximum; release), `fence` (sequentially consistent), `pause`
template <class Memory>
class piece_reader {
  public:
    UNIPREFILL_API explicit piece_reader(piece_order* order) noexcept
        : order_(order) {}

    /// Says that piece @p piece is read. Call it once for each piece, when nothing reads the piece any more.
    UNIPREFILL_API void tell(std::uint32_t piece) noexcept {
        const std::uint32_t group = piece / piece_order::group;
        if (group >= piece_order::ring) { // the word's group before must be through
            wait_for_group(group - piece_order::ring);
        }
        const std::uint32_t bit = 1u << piece % piece_order::group;
        const std::uint32_t word = Memory::flip(&order_->read[group % piece_order::ring], bit) ^ bit;
        if (word == piece_order::whole(group)) {
            pass_groups_from(group);
        }
    }

    /// Whether all pieces below @p needed are known to be read, without a look at shared memory.
    [[nodiscard]] UNIPREFILL_API bool knows(std::uint32_t needed) const noexcept {
        return needed <= std::uint64_t{groups_} * piece_order::group;
    }
    /// Whether all pieces below @p needed are read; looks once.
    [[nodiscard]] UNIPREFILL_API bool look(std::uint32_t needed) noexcept {
        if (knows(needed)) {
            return true;
        }
        const std::uint32_t passed = Memory::load(&order_->frontier);
        groups_ = passed > groups_ ? passed : groups_;
        if (knows(needed) || needed / piece_order::group > groups_) {
            return knows(needed);
        }
        // The needed pieces end in the first group that isn't through, so the word is this group's.
        const std::uint32_t unread =
            Memory::load(&order_->read[groups_ % piece_order::ring]) ^ piece_order::whole(groups_);
        return (unread & ((1u << needed % piece_order::group) - 1)) == 0;
    }
    /// Returns once all pieces below @p needed are read.
    UNIPREFILL_API void wait(std::uint32_t needed) noexcept {
        while (!look(needed)) {
            Memory::pause();
        }
    }

  private:
    UNIPREFILL_API void wait_for_group(std::uint32_t group) noexcept {
        wait((group + 1) * piece_order::group);
    }

    /// Raises the frontier beyond group @p group, which is whole, and those behind it that are whole too.
    UNIPREFILL_API void pass_groups_from(std::uint32_t group) noexcept {
        // The fence lets this see what those saw who told of the group's other pieces. And either this sees
        // the frontier at its group, or whoever raises it to there sees the group whole.
        Memory::fence();
        while (Memory::load(&order_->frontier) == group &&
               Memory::load(&order_->read[group % piece_order::ring]) == piece_order::whole(group)) {
            ++group;
            Memory::raise(&order_->frontier, group);
            Memory::fence();
        }
    }

    piece_order* order_;
    std::uint32_t groups_ = 0; ///< groups below are known to be read
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
