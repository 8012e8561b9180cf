// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/output_folder.hpp"

#include "engine/error.hpp"

#include <cerrno>
#include <cstddef>
#include <fcntl.h>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace engine {
namespace {

[[noreturn]] void refuse(const std::string& argument, const char* expected, int fault) {
    throw error(argument, expected, std::generic_category().message(fault));
}

/// A file under a name of its own that vanishes unless it gets its real one.
class temporary_file {
  public:
    temporary_file(const std::string& folder, std::string_view bytes) {
        int file = -1;
        for (int number = 0; file < 0; ++number) {
            path_ = folder + "/.uniprefill-" + std::to_string(::getpid()) + "-" + std::to_string(number);
            file = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
            if (file < 0 && errno != EEXIST) {
                const int fault = errno;
                path_.clear();
                refuse("output folder " + engine::quoted(folder), "a folder that files can be made in",
                       fault);
            }
        }
        int fault = 0;
        while (!bytes.empty() && fault == 0) {
            const ssize_t written = ::write(file, bytes.data(), bytes.size());
            if (written >= 0) {
                bytes.remove_prefix(static_cast<std::size_t>(written));
            } else if (errno != EINTR) {
                fault = errno;
            }
        }
        // Some file systems only notice that they are full when asked to finish.
        if (fault == 0 && ::fsync(file) != 0 && errno != EINVAL) fault = errno;
        if (::close(file) != 0 && fault == 0) fault = errno;
        if (fault != 0) {
            remove();
            refuse("output folder " + engine::quoted(folder), "room for the report", fault);
        }
    }
    ~temporary_file() { remove(); }
    temporary_file(temporary_file&& other) noexcept
        : path_(std::exchange(other.path_, {})) {}
    temporary_file(const temporary_file&) = delete;
    temporary_file& operator=(const temporary_file&) = delete;
    temporary_file& operator=(temporary_file&&) = delete;

    /// 0, or why not.
    int rename_to(const std::string& target) {
        if (::rename(path_.c_str(), target.c_str()) != 0) return errno;
        path_.clear();
        return 0;
    }

  private:
    void remove() {
        if (!path_.empty()) ::unlink(path_.c_str());
        path_.clear();
    }
    std::string path_;
};

/// Keeps what is at `target` under the name `saved`, which becomes empty if there is nothing. 0, or why not.
int set_aside(const std::string& target, std::string& saved) {
    std::error_code ignored;
    if (std::filesystem::is_directory(target, ignored)) return EISDIR;
    ::unlink(saved.c_str());
    if (::link(target.c_str(), saved.c_str()) == 0) return 0;
    // Not every file system has hard links.
    if (errno != ENOENT && ::rename(target.c_str(), saved.c_str()) == 0) return 0;
    if (errno != ENOENT) return errno;
    saved.clear();
    return 0;
}

} // namespace

output_folder::output_folder(std::string path)
    : path_(std::move(path)) {
    namespace fs = std::filesystem;
    std::error_code fault;
    std::vector<std::string> absent;
    for (fs::path at = fs::absolute(path_, fault).lexically_normal();
         !fault && !fs::exists(at, fault) && !fault; at = at.parent_path()) {
        if (at.has_filename()) absent.insert(absent.begin(), at.string());
        if (at == at.root_path()) break;
    }
    for (std::size_t i = 0; i < absent.size() && !fault; ++i) {
        if (fs::create_directory(absent[i], fault)) made_.push_back(absent[i]);
    }
    if (!fault && !fs::is_directory(path_, fault) && !fault)
        fault = std::make_error_code(std::errc::not_a_directory);
    try {
        if (fault)
            refuse("output folder " + engine::quoted(path_), "a folder that can be made", fault.value());
        const temporary_file trial(path_, "trial");
    } catch (const error&) {
        for (auto made = made_.rbegin(); made != made_.rend(); ++made) {
            ::rmdir(made->c_str());
        }
        throw;
    }
}

output_folder::~output_folder() {
    // rmdir leaves folders that hold something alone.
    for (auto made = made_.rbegin(); made != made_.rend(); ++made) {
        ::rmdir(made->c_str());
    }
}

void output_folder::write(const std::vector<output_file>& files) {
    std::vector<temporary_file> temporaries;
    temporaries.reserve(files.size());
    for (const output_file& file : files) {
        temporaries.emplace_back(path_, file.bytes);
    }

    // Renaming hardly ever fails, but if it does half way, what was there before comes back.
    struct replaced {
        std::string target;
        std::string saved; ///< empty: there was nothing
    };
    std::vector<replaced> done;
    const auto undo = [&] {
        for (auto one = done.rbegin(); one != done.rend(); ++one) {
            if (one->saved.empty()) {
                ::unlink(one->target.c_str());
            } else {
                ::rename(one->saved.c_str(), one->target.c_str());
            }
        }
    };
    for (std::size_t i = 0; i < files.size(); ++i) {
        const std::string target = path_ + "/" + files[i].name;
        std::string saved = path_ + "/.uniprefill-before-" + files[i].name;
        int fault = set_aside(target, saved);
        if (fault == 0) fault = temporaries[i].rename_to(target);
        if (fault != 0) {
            if (!saved.empty()) ::rename(saved.c_str(), target.c_str());
            undo();
            refuse("file " + engine::quoted(target), "a file that can be replaced", fault);
        }
        done.push_back({target, saved});
    }
    for (const replaced& one : done) {
        if (!one.saved.empty()) ::unlink(one.saved.c_str());
    }
}

} // namespace engine
