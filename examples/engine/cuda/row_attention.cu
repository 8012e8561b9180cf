// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/row_attention.hpp"

#include "engine/cuda/runtime.hpp"

#include <uniprefill/attend/attention.cuh>
#include <uniprefill/attend/decode.cuh>
#include <uniprefill/attend/means.cuh>
#include <uniprefill/core/exceptions.hpp>

#include <cstddef>
#include <string>

namespace engine::cuda {

namespace {

using uniprefill::throw_if_failed;

template <std::int32_t HeadDim>
class row_attention_of final : public row_attention {
  public:
    row_attention_of(const uniprefill::limits& bounds, bool means)
        : attention_(bounds, current_device())
        , decoding_(of_one_row(bounds), current_device()) {
        throw_if_failed(attention_.check());
        throw_if_failed(attention_.template prepare<bfloat16>());
        throw_if_failed(attention_.template prepare<bfloat16, cache>());
        memory_ = device_array<std::byte>(attention_.workspace_bytes());
        throw_if_failed(decoding_.check());
        throw_if_failed(decoding_.template prepare<bfloat16, cache>());
        decoding_memory_ = device_array<std::byte>(decoding_.workspace_bytes());
        if (!means) return;
        throw_if_failed(attention_.template prepare<bfloat16, uniprefill::no_cache<bfloat16>, true>());
        uniprefill::workspace counting;
        static_cast<void>(uniprefill::block_means<bfloat16>::carve(counting, bounds));
        mean_memory_ = device_array<std::byte>(counting.bytes_used());
        uniprefill::workspace pieces(mean_memory_.data(), mean_memory_.bytes());
        means_ = uniprefill::block_means<bfloat16>::carve(pieces, bounds);
    }

    void run(const attention_call& call, cudaStream_t on) override {
        if (call.means) {
            attend_with_means(call, on);
            return;
        }
        if (call.cached_k == nullptr) {
            attend(call, uniprefill::no_cache<bfloat16>{}, uniprefill::no_cache<bfloat16>{}, on);
            return;
        }
        const std::int64_t row = std::int64_t{attention_.bounds().num_kv_heads} * HeadDim;
        // One request: the distance to the next one's keys is never used.
        const cache k{call.cached_k, 0, row, HeadDim};
        const cache v{call.cached_v, 0, row, HeadDim};
        if (call.decode_len == nullptr) return attend(call, k, v, on);
        uniprefill::decode_rows rows;
        rows.space = uniprefill::memory_space::device;
        rows.num_rows = 1;
        rows.lens = call.decode_len;
        throw_if_failed(decoding_.run(call.queries, k, v, {}, rows, call.out, nullptr,
                                      {decoding_memory_.data(), decoding_memory_.bytes()}, on));
    }

  private:
    using cache = uniprefill::contiguous_cache<bfloat16>;

    template <class Cache>
    void attend(const attention_call& call, const Cache& k, const Cache& v, cudaStream_t on) {
        uniprefill::attention_options options;
        options.window = call.window;
        throw_if_failed(attention_.run(call.queries, uniprefill::key_source<bfloat16, Cache>{call.keys, k},
                                       uniprefill::key_source<bfloat16, Cache>{call.values, v}, options,
                                       call.batch, call.kept, call.lists, call.out, nullptr,
                                       {memory_.data(), memory_.bytes()}, on));
    }

    void attend_with_means(const attention_call& call, cudaStream_t on) {
        throw_if_failed(uniprefill::average_blocks(attention_.device(), call.keys, call.values, call.batch,
                                                   attention_.bounds(), means_, on));
        uniprefill::attention_options options;
        options.window = call.window;
        throw_if_failed(attention_.run(call.queries, uniprefill::key_source<bfloat16>{call.keys, {}},
                                       uniprefill::key_source<bfloat16>{call.values, {}}, options, call.batch,
                                       call.kept, call.lists, means_, call.out, nullptr,
                                       {memory_.data(), memory_.bytes()}, on));
    }

    static uniprefill::cuda_device current_device() {
        uniprefill::cuda_device device;
        throw_if_failed(uniprefill::cuda_device::current(device));
        return device;
    }
    static uniprefill::limits of_one_row(uniprefill::limits bounds) {
        bounds.max_rows = 1;
        bounds.max_segments = 1;
        return bounds;
    }

    uniprefill::prefill_attention<uniprefill::attention_policy<64, HeadDim>, uniprefill::backend::cuda>
        attention_;
    uniprefill::decode_attention<uniprefill::decode_policy<HeadDim>, uniprefill::backend::cuda> decoding_;
    device_array<std::byte> memory_;
    device_array<std::byte> decoding_memory_;
    device_array<std::byte> mean_memory_;
    uniprefill::block_means<bfloat16> means_{};
};

} // namespace

std::unique_ptr<row_attention> make_row_attention(const uniprefill::limits& bounds, bool means) {
    switch (bounds.head_dim) {
    case 64:
        return std::make_unique<row_attention_of<64>>(bounds, means);
    case 128:
        return std::make_unique<row_attention_of<128>>(bounds, means);
    case 256:
        return std::make_unique<row_attention_of<256>>(bounds, means);
    default:
        throw error("--device cuda, head dimension", "64, 128 or 256", std::to_string(bounds.head_dim));
    }
}

} // namespace engine::cuda
