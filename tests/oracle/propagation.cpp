// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "oracle/oracle.hpp"

#include <algorithm>

namespace oracle {

row_history::row_history(propagation mode, std::vector<int> prompt)
    : mode_(mode)
    , prompt_(std::move(prompt))
    , alive_(prompt_) {}

const std::vector<int>& row_history::enter(bool layer_selects) {
    if (layer_selects && mode_ == propagation::revive) {
        alive_ = prompt_;
    }
    stored_.push_back(alive_);
    processed_.push_back(alive_);
    return stored_.back();
}

void row_history::keep(const std::vector<bool>& kept) {
    std::vector<int> left;
    for (std::size_t row = 0; row < alive_.size(); ++row) {
        if (kept[row]) {
            left.push_back(alive_[row]);
        }
    }
    alive_ = left;
    processed_.back() = left;
}

std::vector<range> row_history::dropped_ranges(int layer) const {
    return missing_ranges(prompt_, stored_[static_cast<std::size_t>(layer)]);
}

std::vector<range> missing_ranges(const std::vector<int>& prompt, const std::vector<int>& held) {
    std::vector<range> ranges;
    for (const int position : prompt) {
        if (std::binary_search(held.begin(), held.end(), position)) {
            continue;
        }
        if (!ranges.empty() && ranges.back().end == position) {
            ++ranges.back().end;
        } else {
            ranges.push_back({position, position + 1});
        }
    }
    return ranges;
}

} // namespace oracle
