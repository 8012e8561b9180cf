// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which attention kernel does which types on which device.
#pragma once

#include <uniprefill/attend/detail/cuda_attend_portable.cuh>
#include <uniprefill/attend/detail/cuda_attend_sm90.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The attention kernels of some types, head dimension and G, with or without means, behind one face.
template <class T, class Cache, std::int32_t D, std::int32_t G, bool Means>
class attend_bodies {
    using task = attend_task<T, Cache>;
    using sm90 = attend_sm90_shape<D, G>;
    using portable = attend_portable_shape<D, G>;
    static_assert(std::is_same_v<T, bfloat16> || std::is_same_v<T, half>,
                  "prefill_attention<Policy, backend::cuda>: bf16 or fp16 rows expected");
    static_assert(std::is_same_v<typename Cache::element, T>,
                  "prefill_attention<Policy, backend::cuda>: a cache of the rows' element type expected");

  public:
    /// Whether the body that is asked for exists on the device.
    [[nodiscard]] static UNIPREFILL_HOST_API status check(const cuda_device& device) noexcept {
        if (device.compute_capability < 80) {
            return failure(status_code::not_supported, "device", "compute capability 8.0 or higher",
                           device.compute_capability);
        }
        if (device.body == cuda_body::sm90 &&
            (device.compute_capability != 90 || device.code_architecture < 90 ||
             device.encode_tensor_map == nullptr)) {
            return failure(status_code::not_supported, "device.body", "automatic or portable on this device",
                           static_cast<std::int32_t>(device.body));
        }
        return success();
    }
    [[nodiscard]] static UNIPREFILL_HOST_API std::int32_t tile_rows(const cuda_device& device) noexcept {
        return uses_sm90(device) ? sm90::rows : portable::tile_rows;
    }
    [[nodiscard]] static UNIPREFILL_HOST_API status prepare(const cuda_device& device) noexcept {
        UNIPREFILL_TRY(check(device));
        if (uses_sm90(device)) {
            constexpr std::size_t bytes = sm90::dynamic_bytes;
            UNIPREFILL_TRY(require_sm90a_code(attend_sm90_kernel<T, Cache, D, G, false, Means>));
            UNIPREFILL_TRY(allow_shared_memory(attend_sm90_kernel<T, Cache, D, G, false, Means>, bytes));
            return allow_shared_memory(attend_sm90_kernel<T, Cache, D, G, true, Means>, bytes);
        }
        constexpr std::size_t bytes = portable::dynamic_bytes;
        UNIPREFILL_TRY(allow_shared_memory(attend_portable_kernel<T, Cache, D, G, false, Means>, bytes));
        return allow_shared_memory(attend_portable_kernel<T, Cache, D, G, true, Means>, bytes);
    }
    /// The plan, and the kernel. step.tile_rows must be that of tile_rows().
    [[nodiscard]] static UNIPREFILL_HOST_API status launch(const cuda_device& device, const task& what,
                                                           backend::cuda::stream stream) noexcept {
        const bool softcap = what.scores.softcap > 0;
        if (uses_sm90(device)) {
            attend_sm90_task<T, Cache, Means> all{};
            all.task = what;
            using tile = typename sm90::template tile<Means>;
            UNIPREFILL_TRY(make_tensor_map(device, what.keys, tile::slot_keys, all.keys, "keys.rows"));
            UNIPREFILL_TRY(make_tensor_map(device, what.values, tile::slot_keys, all.values, "values.rows"));
            if constexpr (Means) {
                if (what.mean_keys.data != nullptr) {
                    UNIPREFILL_TRY(make_tensor_map(device, what.mean_keys, tile::slot_keys, all.mean_keys,
                                                   "means.keys"));
                    UNIPREFILL_TRY(make_tensor_map(device, what.mean_values, tile::slot_keys, all.mean_values,
                                                   "means.values"));
                }
            }
            UNIPREFILL_TRY(launch_plan(device, what, stream));
            return detail::launch(device,
                                  softcap ? attend_sm90_kernel<T, Cache, D, G, true, Means>
                                          : attend_sm90_kernel<T, Cache, D, G, false, Means>,
                                  static_cast<unsigned>(device.ctas(1)), sm90::threads,
                                  static_cast<std::size_t>(sm90::dynamic_bytes), stream, all);
        }
        UNIPREFILL_TRY(launch_plan(device, what, stream));
        return detail::launch(device,
                              softcap ? attend_portable_kernel<T, Cache, D, G, true, Means>
                                      : attend_portable_kernel<T, Cache, D, G, false, Means>,
                              static_cast<unsigned>(device.ctas(portable::ctas_per_multiprocessor)),
                              portable::threads, static_cast<std::size_t>(portable::dynamic_bytes), stream,
                              what);
    }

  private:
    [[nodiscard]] static UNIPREFILL_HOST_API status launch_plan(const cuda_device& device, const task& what,
                                                                backend::cuda::stream stream) noexcept {
        return detail::launch(device, attend_plan_kernel<>, 1, attend_plan_threads, 0, stream, what.step,
                              what.plan);
    }
    [[nodiscard]] static UNIPREFILL_HOST_API bool uses_sm90(const cuda_device& device) noexcept {
        return device.body != cuda_body::portable && device.compute_capability == 90 &&
               device.code_architecture >= 90 && device.encode_tensor_map != nullptr;
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
