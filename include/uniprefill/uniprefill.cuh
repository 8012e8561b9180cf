// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Everything: what a plain C++17 compiler can build, and what takes nvcc.
#pragma once

#include <uniprefill/attend/attention.cuh>
#include <uniprefill/attend/decode.cuh>
#include <uniprefill/attend/means.cuh>
#include <uniprefill/attend/merge.cuh>
#include <uniprefill/core/cuda.cuh>
#include <uniprefill/importance/importance.cuh>
#include <uniprefill/ledger/drop_ledger.cuh>
#include <uniprefill/pipeline/prefill_sparsifier.cuh>
#include <uniprefill/propagate/add_norm.cuh>
#include <uniprefill/propagate/compaction.cuh>
#include <uniprefill/propagate/lineage.cuh>
#include <uniprefill/select/block_lister.cuh>
#include <uniprefill/select/query_block_lister.cuh>
#include <uniprefill/select/selector.cuh>
#include <uniprefill/uniprefill.hpp>
