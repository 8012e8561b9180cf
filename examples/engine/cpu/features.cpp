// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cpu/features.hpp"

#include <fstream>
#include <string>

#if defined(__linux__) && defined(__x86_64__)
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

namespace engine::cpu {

namespace {

#if defined(__x86_64__)

bool request_amx() {
#    if defined(__linux__) && defined(UNIPREFILL_ENGINE_AMX)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16") || best_simd() != simd_level::avx512) return false;
    // CPUID leaf 7: EDX bit 22 is AMX-BF16, bit 24 AMX-TILE.
    unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
    __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    constexpr unsigned needed = 1u << 22 | 1u << 24;
    if ((edx & needed) != needed) return false;
    // Linux gives the tile registers only to processes that ask (arch_prctl, ARCH_REQ_XCOMP_PERM, component
    // 18).
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#    else
    return false;
#    endif
}

#endif

} // namespace

simd_level best_simd() {
#if defined(__x86_64__)
    static const simd_level level = [] {
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            return simd_level::avx512;
        }
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return simd_level::avx2;
        return simd_level::portable;
    }();
    return level;
#else
    return simd_level::portable;
#endif
}

bool has_amx_bf16() {
#if defined(__x86_64__)
    static const bool granted = request_amx();
    return granted;
#else
    return false;
#endif
}

arithmetic resolve(arithmetic wanted) {
    switch (wanted) {
    case arithmetic::automatic:
    case arithmetic::bf16x3:
        return has_amx_bf16() ? arithmetic::bf16x3 : arithmetic::fp32;
    case arithmetic::bf16:
        return has_amx_bf16() ? arithmetic::bf16 : arithmetic::fp32;
    case arithmetic::fp32:
        break;
    }
    return arithmetic::fp32;
}

const char* name(arithmetic kind) {
    switch (kind) {
    case arithmetic::automatic:
        return "auto";
    case arithmetic::bf16x3:
        return "bf16x3";
    case arithmetic::bf16:
        return "bf16";
    case arithmetic::fp32:
        break;
    }
    return "fp32";
}

const char* cpu_name() {
    static const std::string found = [] {
        std::ifstream info("/proc/cpuinfo");
        for (std::string line; std::getline(info, line);) {
            const std::size_t colon = line.find(':');
            if (line.rfind("model name", 0) == 0 && colon + 2 < line.size()) return line.substr(colon + 2);
        }
        return std::string("unknown");
    }();
    return found.c_str();
}

} // namespace engine::cpu
