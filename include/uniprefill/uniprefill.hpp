// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Everything that a plain C++17 compiler can build.
#pragma once

#include <uniprefill/attend/attention.hpp>
#include <uniprefill/attend/decode.hpp>
#include <uniprefill/attend/means.hpp>
#include <uniprefill/attend/merge.hpp>
#include <uniprefill/comm/reduction.hpp>
#include <uniprefill/core/attention_options.hpp>
#include <uniprefill/core/attention_params.hpp>
#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/config.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/extent.hpp>
#include <uniprefill/core/fixed_point.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/metrics.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/core/version.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/importance/head_reduction.hpp>
#include <uniprefill/importance/importance.hpp>
#include <uniprefill/ledger/drop_ledger.hpp>
#include <uniprefill/ledger/held_rows.hpp>
#include <uniprefill/ledger/kv_slots.hpp>
#include <uniprefill/ledger/layer_list.hpp>
#include <uniprefill/ledger/layer_sets.hpp>
#include <uniprefill/ledger/ledger_fault.hpp>
#include <uniprefill/ledger/ledger_limits.hpp>
#include <uniprefill/ledger/page_signature.hpp>
#include <uniprefill/ledger/pages.hpp>
#include <uniprefill/ledger/request_texts.hpp>
#include <uniprefill/ledger/saved_request.hpp>
#include <uniprefill/ledger/stage_rows.hpp>
#include <uniprefill/ledger/step_arrays.hpp>
#include <uniprefill/ledger/step_wishes.hpp>
#include <uniprefill/pipeline/policy.hpp>
#include <uniprefill/pipeline/prefill_sparsifier.hpp>
#include <uniprefill/propagate/compaction.hpp>
#include <uniprefill/propagate/lineage.hpp>
#include <uniprefill/propagate/policy.hpp>
#include <uniprefill/propagate/row_map.hpp>
#include <uniprefill/select/block_lister.hpp>
#include <uniprefill/select/query_block_lister.hpp>
#include <uniprefill/select/query_sampling.hpp>
#include <uniprefill/select/ranked_blocks.hpp>
#include <uniprefill/select/rule.hpp>
#include <uniprefill/select/selector.hpp>
