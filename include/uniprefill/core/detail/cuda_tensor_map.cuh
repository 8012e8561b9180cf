// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Rows of heads as the copy engine of compute capability 9.0 knows them. PTX ISA, section
/// cp.async.bulk.tensor; CUDA Driver API, section Tensor Map Object Management.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/core/detail/cuda_copy.cuh>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/rows.hpp>

#include <cuda.h>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Describes rows for copies of @p box_rows rows and 128 bytes of one head, into the 128-byte swizzle. What
/// lies beyond the rows or the head arrives as zeros. Rows must start at multiples of 16 bytes.
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status make_tensor_map(const cuda_device& device,
                                                         const head_rows<const T>& rows,
                                                         std::int32_t box_rows, CUtensorMap& out,
                                                         const char* argument) noexcept {
    static_assert(std::is_same_v<T, bfloat16> || std::is_same_v<T, half>, "elements of 16 bits");
    using encoder =
        CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(rows.head_dim),
                                 static_cast<cuuint64_t>(rows.num_heads),
                                 static_cast<cuuint64_t>(rows.num_rows)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(rows.head_stride) * sizeof(T),
                                   static_cast<cuuint64_t>(rows.row_stride) * sizeof(T)};
    const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(box_rows)};
    const cuuint32_t steps[3] = {1, 1, 1};
    const CUresult result = reinterpret_cast<encoder>(device.encode_tensor_map)(
        &out,
        std::is_same_v<T, bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
        const_cast<T*>(rows.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? success()
                                  : failure(status_code::invalid_argument, argument,
                                            "strides that a tensor map takes: below 2^40 bytes",
                                            static_cast<std::int64_t>(result));
}

#if defined(__CUDACC__)
/// Starts a copy of one box to shared memory at @p to; @p barrier is told of its bytes.
__device__ UNIPREFILL_HIDDEN inline void load_box(std::uint32_t to, const CUtensorMap& map,
                                                  std::uint64_t* barrier, std::int32_t column,
                                                  std::int32_t head, std::int32_t row) {
#    if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(head), "r"(row), "r"(shared_address(barrier))
                 : "memory");
#    else
    static_cast<void>(to);
    static_cast<void>(map);
    static_cast<void>(barrier);
    static_cast<void>(column);
    static_cast<void>(head);
    static_cast<void>(row);
#    endif
}
/// Has the copy engine fetch what it needs to know of @p map.
__device__ UNIPREFILL_HIDDEN inline void prefetch_tensor_map(const CUtensorMap& map) {
#    if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#    else
    static_cast<void>(map);
#    endif
}
#endif

} // namespace detail

UNIPREFILL_END_NAMESPACE
