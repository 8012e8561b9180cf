// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

namespace engine::cpu {

/// Instruction sets that the row and attention kernels are compiled for. `portable` runs everywhere.
enum class simd_level { portable, avx2, avx512 };

/// The best level that this processor and its operating system run. Constant for a process.
simd_level best_simd();

/// True when bf16 matrix tiles (AMX) exist and the operating system granted them to this process, which the
/// first call asks for: call it before the first use of a library that would use them. Thread-safe.
bool has_amx_bf16();

/// How a product of fp32 values is computed. All accumulate in fp32; results are fp32.
enum class arithmetic {
    automatic, ///< the fastest of fp32 and bf16x3 on this processor: both are near-exact
    fp32,      ///< exact products
    bf16x3, ///< each operand split into two bf16 parts, three of the four part products: relative error about
            ///< 2^-16
    bf16,   ///< both operands rounded to bf16: relative error of each product about 2^-8
};

/// What `wanted` becomes here: bf16x3 and bf16 need AMX and become fp32 without it (the other bf16
/// instructions are hardly faster than fp32 ones). Never returns `automatic`.
arithmetic resolve(arithmetic wanted);

/// "auto", "fp32", "bf16x3", "bf16".
const char* name(arithmetic kind);

/// "Intel(R) Xeon(R) ...", for reports; "unknown" where the system doesn't say.
const char* cpu_name();

} // namespace engine::cpu
