// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// SipHash-2-4 with 128 bits over a stream of 64-bit words.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// As the reference implementation hashes the words' bytes, lowest first.
class sip_hash {
  public:
    UNIPREFILL_API sip_hash(std::uint64_t key0, std::uint64_t key1) noexcept
        : a_(key0 ^ 0x736f6d6570736575u)
        , b_(key1 ^ 0x646f72616e646f6du ^ 0xee)
        , c_(key0 ^ 0x6c7967656e657261u)
        , d_(key1 ^ 0x7465646279746573u) {}

    UNIPREFILL_API void absorb(std::uint64_t word) noexcept {
        d_ ^= word;
        mix();
        mix();
        a_ ^= word;
        ++words_;
    }

    /// The hash of what has been absorbed, which may go on.
    UNIPREFILL_API void finish(std::uint64_t& low, std::uint64_t& high) const noexcept {
        sip_hash end = *this;
        end.absorb(words_ << 59); // the number of bytes, modulo 256, above no bytes that are left
        end.c_ ^= 0xee;
        low = end.squeeze();
        end.b_ ^= 0xdd;
        high = end.squeeze();
    }

  private:
    [[nodiscard]] static UNIPREFILL_API std::uint64_t rotate(std::uint64_t word, int bits) noexcept {
        return (word << bits) | (word >> (64 - bits));
    }
    UNIPREFILL_API void mix() noexcept {
        a_ += b_;
        b_ = rotate(b_, 13) ^ a_;
        a_ = rotate(a_, 32);
        c_ += d_;
        d_ = rotate(d_, 16) ^ c_;
        a_ += d_;
        d_ = rotate(d_, 21) ^ a_;
        c_ += b_;
        b_ = rotate(b_, 17) ^ c_;
        c_ = rotate(c_, 32);
    }
    [[nodiscard]] UNIPREFILL_API std::uint64_t squeeze() noexcept {
        for (int round = 0; round < 4; ++round) {
            mix();
        }
        return a_ ^ b_ ^ c_ ^ d_;
    }

    std::uint64_t a_;
    std::uint64_t b_;
    std::uint64_t c_;
    std::uint64_t d_;
    std::uint64_t words_ = 0;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
