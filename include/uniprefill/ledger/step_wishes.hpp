// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What a step on a device is to tell its engine.
#pragma once

#include <uniprefill/ledger/kv_slots.hpp>
#include <uniprefill/ledger/layer_list.hpp>
#include <uniprefill/ledger/step_arrays.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What a step is to tell of some layers, worked out in the launch that changes it.
template <class Slots = contiguous_slots, class Index = std::int32_t, class Slot = std::int64_t>
struct step_wishes {
    layer_list layers;            ///< an entry for each part of the arrays; `layers.layers` in device memory
    Slots slots{};                ///< tables in device memory; only needed where out.slots is wanted
    step_arrays<Index, Slot> out; ///< in device memory
};

UNIPREFILL_END_NAMESPACE
