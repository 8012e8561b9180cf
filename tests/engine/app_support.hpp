// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/error.hpp"

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace app_test {

/// The one line that a refused call would print; empty if it isn't refused.
template <class Call>
std::string refusal(Call call) {
    try {
        call();
    } catch (const engine::error& refused) {
        return refused.what();
    }
    return {};
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

inline std::string bytes_of(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream out;
    out << file.rdbuf();
    return out.str();
}

/// A folder of its own that goes with the test.
class scratch_folder {
  public:
    scratch_folder() {
        std::string pattern = (std::filesystem::temp_directory_path() / "uniprefill-test-XXXXXX").string();
        path_ = ::mkdtemp(pattern.data());
    }
    ~scratch_folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    scratch_folder(const scratch_folder&) = delete;
    scratch_folder& operator=(const scratch_folder&) = delete;

    const std::filesystem::path& path() const { return path_; }

  private:
    std::filesystem::path path_;
};

} // namespace app_test
