// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <string>
#include <vector>

namespace engine {

/// A file to be written: its name within the folder, and all its bytes.
struct output_file {
    std::string name;
    std::string bytes;
};

/// The folder that results go to. It is made and tried before the long work that fills it, and removed again
/// if it was made and nothing came.
class output_folder {
  public:
    /// Throws `error` unless files can be made in `path`, which is created (with its parents) if absent.
    explicit output_folder(std::string path);
    ~output_folder();
    output_folder(const output_folder&) = delete;
    output_folder& operator=(const output_folder&) = delete;

    /// Writes all the files, or none and throws `error`: readers never see half a file, nor one file of this
    /// run beside another's of an earlier run (but for an instant).
    void write(const std::vector<output_file>& files);

    const std::string& path() const { return path_; }

  private:
    std::string path_;
    std::vector<std::string> made_; ///< folders that were absent, outermost first
};

} // namespace engine
