// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/report.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace engine {

/// The layers at which tokens were dropped, each with the colour that stands for it everywhere on the page.
class drop_scale {
  public:
    explicit drop_scale(const report& shown);

    const std::vector<std::int32_t>& layers() const { return layers_; }
    std::int32_t tokens(std::size_t index) const { return tokens_[index]; }
    std::int32_t tokens_never_dropped() const { return never_; }

    /// Which of layers(), or -1.
    std::int32_t index_of(std::int32_t layer) const;

    /// Custom properties --d0, --d1, ... and the classes that use them, for light and dark.
    std::string css() const;

  private:
    std::vector<std::int32_t> layers_;
    std::vector<std::int32_t> tokens_;
    std::int32_t never_ = 0;
};

/// Neighbouring tokens that were dropped at the same layer.
struct token_run {
    std::int32_t first = 0;
    std::int32_t count = 0;
    std::int32_t layer = -1;
};
std::vector<token_run> runs_of(const std::vector<std::int32_t>& drop_layer);

} // namespace engine
