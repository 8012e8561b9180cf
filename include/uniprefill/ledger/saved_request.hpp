// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// A request's part of a ledger as a flat buffer: what drop_ledger::save() writes and restore() reads.
///
/// 64-bit words in the machine's byte order; no address, no slot, so that it may be restored to another slot,
/// ledger or process whose layers have the same sets:
/// ```
/// saved_header
/// int32  set of each layer [num_layers], positions of each set before dense_from [num_sets], padded with 0
/// uint64 planes [num_planes, ceil(dense_from / 64)]
/// ```
/// Positions from dense_from on are held by every set. The checksum finds damage, not malice: restore()
/// checks every number besides, so that no buffer whatever makes a ledger contradict itself.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// The version of the format that this library writes, and the only one that it reads.
UNIPREFILL_HIDDEN inline constexpr std::uint32_t saved_request_version = 1;

/// The beginning of the buffer. An engine may read it to learn what room a request will take.
struct saved_header {
    /// "UPFPGRDL" in memory, when the lowest byte comes first.
    UNIPREFILL_HIDDEN static constexpr std::uint64_t magic_number = 0x4c44524750465055;
    std::uint64_t magic = magic_number;
    std::uint64_t bytes = 0;    ///< of the whole buffer
    std::uint64_t checksum = 0; ///< of all words, this one counted as 0
    std::uint32_t version = saved_request_version;
    std::int32_t num_tokens = 0;
    std::int32_t dense_from = 0;
    std::int32_t num_layers = 0;
    std::int32_t num_sets = 0;
    std::int32_t relation = 0; ///< set_relation
};

UNIPREFILL_END_NAMESPACE
