// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Scores and softmax in double, shared by the oracle's masses and its attention.

#include "oracle/oracle.hpp"

#include <limits>

namespace oracle {

/// The score of a key that the query may not see.
inline constexpr double no_score = -std::numeric_limits<double>::infinity();

/// q[row, head] . k[key, kv head of head]
double dot_product(const tensor& q, int row, int head, const tensor& k, int key);

/// Scale, then soft-cap.
double score_of(double dot, const score_parameters& parameters);

/// Shares of one query's scores; a learned sink logit of the head takes its part of the denominator.
std::vector<double> softmax(const std::vector<double>& scores, const score_parameters& parameters, int head);

} // namespace oracle
