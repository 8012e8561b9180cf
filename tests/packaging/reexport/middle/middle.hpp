// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/status.hpp>

namespace middle {

/// Refuses what isn't in (0, 1].
uniprefill::status check_share(double p);

} // namespace middle
