// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/drop_scale.hpp"
#include "engine/app/report.hpp"

#include <string>

namespace engine {

// The figures of report.html, each a <figure> or several. Shapes are inline SVG that stretches to its box;
// labels are text beside it, so that they keep their size on a phone.

std::string two_times(const report& shown);
std::string survival_map(const report& shown, const drop_scale& scale);
std::string rows_by_layer(const report& shown, const drop_scale& scale);
std::string time_by_layer(const report& shown);
std::string masses_by_layer(const report& shown, const drop_scale& scale);

} // namespace engine
