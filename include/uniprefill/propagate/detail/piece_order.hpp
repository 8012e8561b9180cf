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

/// What has been read, as one worker knows it. A worker finds out by itself from the words; the frontier only
/// spares it those that others have looked at, and is raised by whoever knows more.
/// @tparam Memory operations on words that workers share, each called by all that make up a worker: `load`
///         (acquire), `flip` (exclusive or; release), `raise` (maximum; release), `pause`, and `count_whole`:
///         how many groups from a given one on, `at_once` at most, are whole (acquire)
template <class Memory>
class piece_reader {
    static_assert(Memory::at_once <= piece_order::ring);

  public:
    UNIPREFILL_API explicit piece_reader(piece_order* order) noexcept
        : order_(order) {}

    /// Says that piece @p piece is read. Call it once for each piece, when nothing reads the piece any more.
    UNIPREFILL_API void tell(std::uint32_t piece) noexcept {
        const std::uint32_t group = piece / piece_order::group;
        if (group >= piece_order::ring) { // the word's group before must be through
            wait((group - piece_order::ring + 1) * piece_order::group);
        }
        Memory::flip(&order_->read[group % piece_order::ring], 1u << piece % piece_order::group);
        if (piece % piece_order::group == 0) { // somebody has to, before others wait
            look_on();
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
        take_frontier();
        if (knows(needed)) {
            return true;
        }
        look_at_groups();
        if (knows(needed) || needed / piece_order::group > groups_) {
            return knows(needed);
        }
        // The needed pieces end in the first group that isn't known to be whole.
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
    UNIPREFILL_API void take_frontier() noexcept {
        const std::uint32_t passed = Memory::load(&order_->frontier);
        groups_ = passed > groups_ ? passed : groups_;
    }
    /// Counts on from the groups that are known. A word that serves a later group by now doesn't look whole:
    /// then the frontier has passed, and tells. A word that serves an earlier group still would look whole as
    /// long as nothing of that one is read; but all groups before those looked at are whole, and these are
    /// fewer than words.
    UNIPREFILL_API void look_at_groups() noexcept {
        const std::uint32_t before = groups_;
        std::uint32_t more = 0;
        do {
            more = Memory::count_whole(order_->read, groups_);
            groups_ += more;
        } while (more == Memory::at_once);
        if (groups_ != before) {
            Memory::raise(&order_->frontier, groups_);
        }
    }
    UNIPREFILL_API void look_on() noexcept {
        take_frontier();
        look_at_groups();
    }

    piece_order* order_;
    std::uint32_t groups_ = 0; ///< groups below are known to be read
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
