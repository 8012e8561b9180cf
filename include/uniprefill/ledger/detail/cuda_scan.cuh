// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Prefix sums over the threads of a thread block.
#pragma once

#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>

#include <cub/block/block_scan.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

using ledger_scan = cub::BlockScan<std::int32_t, ledger_threads>;

} // namespace detail

UNIPREFILL_END_NAMESPACE
