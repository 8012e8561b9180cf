// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/host_info.hpp"

#include "engine/error.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <thread>

namespace engine {

std::int32_t usable_cores() {
    return std::max(1, static_cast<std::int32_t>(std::thread::hardware_concurrency()));
}

std::string cpu_name() {
    std::ifstream file("/proc/cpuinfo");
    std::string line;
    while (std::getline(file, line)) {
        const auto colon = line.find(": ");
        if (line.compare(0, 10, "model name") == 0 && colon != std::string::npos) {
            return printable(line.substr(colon + 2));
        }
    }
    return "unknown processor";
}

std::int64_t peak_memory_bytes() {
    std::ifstream file("/proc/self/status");
    std::string line;
    while (std::getline(file, line)) {
        if (line.compare(0, 6, "VmHWM:") == 0) {
            std::int64_t kibibytes = 0;
            std::istringstream(line.substr(6)) >> kibibytes;
            return kibibytes * 1024;
        }
    }
    return 0;
}

bool reset_peak_memory() {
    std::ofstream file("/proc/self/clear_refs"); // 5: the peak resident set (proc(5))
    file << "5" << std::flush;
    return file.good();
}

} // namespace engine
