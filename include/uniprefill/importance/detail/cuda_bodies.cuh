// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which score kernel does which types on which device.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/importance/detail/cuda_portable.cuh>
#include <uniprefill/importance/detail/cuda_sm90.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The score kernels of some types, head dimension and G, behind one face.
template <class Q, class T, class Cache, std::int32_t D, std::int32_t G>
class score_bodies {
    using task = cuda_score_task<Q, T, Cache>;
    using portable = portable_shape<Q, D>;
    using sm90 = sm90_shape<T, D>;

  public:
    /// Hopper's body multiplies what it copies: 16-bit elements and FP8, rows and cache alike.
    static constexpr bool has_sm90 =
        sm90::exists && !std::is_same_v<T, float> && std::is_same_v<typename Cache::element, T>;

    /// Whether the body that is asked for exists, and the device runs it.
    [[nodiscard]] static UNIPREFILL_HOST_API status check(const cuda_device& device) noexcept {
        if (device.compute_capability < 80) {
            return failure(status_code::not_supported, "device", "compute capability 8.0 or higher",
                           device.compute_capability);
        }
        if (device.body == cuda_body::sm90 && (!has_sm90 || device.compute_capability != 90)) {
            return failure(status_code::not_supported, "device.body",
                           "automatic or portable for these element types on this device",
                           static_cast<std::int32_t>(device.body));
        }
        return success();
    }
    [[nodiscard]] static UNIPREFILL_HOST_API cuda_tiling tiling(const cuda_device& device) noexcept {
        return uses_sm90(device) ? cuda_tiling{G, sm90::tile_keys, sm90::chunk_rows}
                                 : cuda_tiling{G, portable::tile_keys, portable::chunk_rows};
    }
    /// Thread blocks that launch() takes.
    [[nodiscard]] static UNIPREFILL_HOST_API std::int32_t ctas(const cuda_device& device) noexcept {
        return device.ctas(uses_sm90(device) ? 1 : portable::ctas_per_multiprocessor);
    }
    [[nodiscard]] static UNIPREFILL_HOST_API status prepare(const cuda_device& device) noexcept {
        UNIPREFILL_TRY(check(device));
        if constexpr (has_sm90) {
            if (uses_sm90(device)) {
                constexpr std::size_t bytes = sm90::dynamic_bytes;
                UNIPREFILL_TRY(require_sm90a_code(sm90_score_kernel<Q, T, Cache, D, G, false>));
                UNIPREFILL_TRY(allow_shared_memory(sm90_score_kernel<Q, T, Cache, D, G, false>, bytes));
                return allow_shared_memory(sm90_score_kernel<Q, T, Cache, D, G, true>, bytes);
            }
        }
        constexpr std::size_t bytes = portable::dynamic_bytes;
        UNIPREFILL_TRY(allow_shared_memory(portable_score_kernel<Q, T, Cache, D, G, false>, bytes));
        return allow_shared_memory(portable_score_kernel<Q, T, Cache, D, G, true>, bytes);
    }
    /// The tiling must be that of tiling().
    [[nodiscard]] static UNIPREFILL_HOST_API status launch(const cuda_device& device, const task& what,
                                                           backend::cuda::stream stream) noexcept {
        const bool softcap = what.softcap > 0;
        if constexpr (has_sm90) {
            if (uses_sm90(device)) {
                return detail::launch(device,
                                      softcap ? sm90_score_kernel<Q, T, Cache, D, G, true>
                                              : sm90_score_kernel<Q, T, Cache, D, G, false>,
                                      static_cast<unsigned>(ctas(device)), sm90_threads,
                                      static_cast<std::size_t>(sm90::dynamic_bytes), stream, what);
            }
        }
        return detail::launch(device,
                              softcap ? portable_score_kernel<Q, T, Cache, D, G, true>
                                      : portable_score_kernel<Q, T, Cache, D, G, false>,
                              static_cast<unsigned>(ctas(device)), portable::threads,
                              static_cast<std::size_t>(portable::dynamic_bytes), stream, what);
    }

  private:
    [[nodiscard]] static UNIPREFILL_HOST_API bool uses_sm90(const cuda_device& device) noexcept {
        return has_sm90 && device.body != cuda_body::portable && device.compute_capability == 90 &&
               device.code_architecture >= 90;
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
