// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

/// @file
/// Saved requests that were tampered with.

#include "ledger/ledger_fixture.hpp"
#include "property/random.hpp"

namespace ledger_test {

using bytes = std::vector<std::byte>;

/// Gives a forged buffer the checksum that it needs.
inline void sign(bytes& saved) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < saved.size() / 8; ++i) {
        std::uint64_t word = 0;
        std::memcpy(&word, saved.data() + 8 * i, i == 2 ? 0 : 8);
        sum += up::detail::checksum_part(word, i);
    }
    std::memcpy(saved.data() + 16, &sum, 8);
}

template <class Value>
void put(bytes& saved, std::size_t at, Value value) {
    std::memcpy(saved.data() + at, &value, sizeof value);
}

/// A good buffer with one to three other bytes, in the numbers rather than in the planes, and a right
/// checksum.
inline bytes forge_at_random(const bytes& good, property::random_numbers& random) {
    bytes forged = good;
    for (int change = random.between(1, 3); change > 0; --change) {
        const int at = random.chance(0.7) ? random.between(24, 79)
                                          : random.between(0, static_cast<int>(good.size()) - 1);
        forged[static_cast<std::size_t>(at)] = static_cast<std::byte>(random.between(0, 255));
    }
    sign(forged);
    return forged;
}

} // namespace ledger_test
