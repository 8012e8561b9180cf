// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/model_file/mapped_file.hpp"

#include "engine/error.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace engine {

namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& expected, const std::string& came) {
    throw error("model file " + quoted(path, 400), expected, came);
}

/// Closes on every way out of the constructor; the mapping outlives its descriptor.
struct descriptor {
    int number;
    ~descriptor() {
        if (number >= 0) ::close(number);
    }
};

} // namespace

mapped_file::mapped_file(const std::string& path) {
    // O_NONBLOCK: opening a named pipe must not wait for its writer only to be refused below.
    const descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (file.number < 0) refuse(path, "a file that can be read", std::strerror(errno));
    struct stat about = {};
    if (::fstat(file.number, &about) != 0) refuse(path, "a file that can be read", std::strerror(errno));
    if (!S_ISREG(about.st_mode)) {
        refuse(path, "a regular file", S_ISDIR(about.st_mode) ? "a directory" : "something else");
    }
    if (about.st_size <= 0) refuse(path, "a GGUF file", "an empty file");
    const auto size = static_cast<std::size_t>(about.st_size);
    void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
    if (address == MAP_FAILED) refuse(path, "a file that can be mapped", std::strerror(errno));
    bytes_ = byte_span{static_cast<const std::byte*>(address), size};
}

mapped_file::~mapped_file() {
    if (bytes_.data != nullptr) ::munmap(const_cast<std::byte*>(bytes_.data), bytes_.size);
}

mapped_file::mapped_file(mapped_file&& other) noexcept
    : bytes_(std::exchange(other.bytes_, byte_span{})) {}

mapped_file& mapped_file::operator=(mapped_file&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
}

} // namespace engine
