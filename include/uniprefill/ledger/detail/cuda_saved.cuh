// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Requests as flat buffers in device memory: a thread block for each.
#pragma once

#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>
#include <uniprefill/ledger/detail/cuda_set_writer.cuh>
#include <uniprefill/ledger/detail/saved_words.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Buffers that begin at multiples of a stride.
template <class Byte, class Bytes>
struct cuda_saved_task {
    const std::int32_t* requests = nullptr;   // [count]
    const std::int32_t* num_tokens = nullptr; // [count] positions to save; null: all
    std::int32_t count = 0;
    Byte* buffers = nullptr; // [count, stride]
    std::uint64_t stride = 0;
    Bytes* bytes = nullptr; // [count] or null
};
using cuda_save_task = cuda_saved_task<std::byte, std::uint64_t>;
using cuda_restore_task = cuda_saved_task<const std::byte, const std::uint64_t>;

/// Adds up what the threads of a thread block know, in any order.
/// @param shared in shared memory
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint64_t add_up(std::uint64_t mine,
                                                                       unsigned long long& shared) {
    if (ledger_thread() == 0) {
        shared = 0;
    }
    __syncthreads();
    atomicAdd(&shared, static_cast<unsigned long long>(mine));
    __syncthreads();
    const std::uint64_t sum = shared;
    __syncthreads();
    return sum;
}

class UNIPREFILL_HIDDEN request_saver {
  public:
    __device__ request_saver(const cuda_ledger_state& ledger, const cuda_save_task& task)
        : ledger_(ledger)
        , task_(task) {}

    __device__ void save(std::int32_t r, unsigned long long& shared) const {
        const std::uint64_t bytes = write(r, shared);
        if (ledger_thread() == 0 && task_.bytes != nullptr) {
            task_.bytes[r] = bytes;
        }
    }

  private:
    /// @return bytes written. The same in each thread.
    [[nodiscard]] __device__ std::uint64_t write(std::int32_t r, unsigned long long& shared) const {
        const std::int32_t request = task_.requests[r];
        if (request == -1) {
            return 0;
        }
        if (!ledger_.is_admitted(request)) {
            return refuse(ledger_complaint::unknown_request, request, request);
        }
        const request_record state = ledger_.record(request);
        if (state.header->open != 0) {
            return refuse(ledger_complaint::busy_request, request, request);
        }
        const std::int32_t held = state.header->committed.num_tokens;
        const std::int32_t num_tokens = task_.num_tokens != nullptr ? task_.num_tokens[r] : held;
        if (num_tokens < 0 || num_tokens > held) {
            return refuse(ledger_complaint::rollback, request, num_tokens);
        }
        const request_writer writer(ledger_.bounds, ledger_.layout.layer_sets(ledger_.memory), state,
                                    num_tokens);
        if (writer.bytes() > task_.stride) {
            return refuse(ledger_complaint::saved_room, request, static_cast<std::int64_t>(task_.stride));
        }
        std::byte* const out = task_.buffers + static_cast<std::uint64_t>(r) * task_.stride;
        const std::uint64_t body = add_up(writer.write_body(out, share_of_thread()), shared);
        if (ledger_thread() == 0) {
            writer.write_header(out, body);
        }
        return writer.bytes();
    }
    [[nodiscard]] __device__ std::uint64_t refuse(ledger_complaint what, std::int32_t request,
                                                  std::int64_t came) const {
        if (ledger_thread() == 0) {
            ledger_.raise(what, request, -1, came);
        }
        return 0;
    }

    const cuda_ledger_state& ledger_;
    const cuda_save_task& task_;
};

class UNIPREFILL_HIDDEN request_restorer {
  public:
    struct room {
        set_writer::room sets;
        unsigned long long sum;
        std::uint64_t header[header_words];
        std::uint64_t bytes;
        bool claimed;
    };

    __device__ request_restorer(const cuda_ledger_state& ledger, const cuda_restore_task& task, room& shared)
        : ledger_(ledger)
        , task_(task)
        , shared_(shared) {}

    /// As the host's ledger does it.
    __device__ void restore(std::int32_t r) {
        request_ = task_.requests[r];
        if (request_ == -1) {
            return;
        }
        if (ledger_thread() == 0) {
            shared_.claimed = claim();
        }
        __syncthreads();
        if (!shared_.claimed) {
            return;
        }
        take(r);
        __syncthreads();
        if (ledger_thread() == 0) {
            __threadfence();
            atomicExch(&ledger_.record(request_).header->open, 0);
        }
    }

  private:
    /// Nobody else restores to the slot meanwhile, not even where it is listed twice. By one thread.
    [[nodiscard]] __device__ bool claim() const {
        if (!ledger_.is_admitted(request_)) {
            ledger_.raise(ledger_complaint::unknown_request, request_, -1, request_);
            return false;
        }
        constexpr std::int32_t restoring = -1; // no step's ticket
        request_header& header = *ledger_.record(request_).header;
        if (atomicCAS(&header.open, 0, restoring) != 0) {
            ledger_.raise(ledger_complaint::busy_request, request_, -1, request_);
            return false;
        }
        __threadfence();
        const std::int32_t held = *static_cast<const volatile std::int32_t*>(&header.committed.num_tokens);
        if (held != 0) {
            ledger_.raise(ledger_complaint::has_positions, request_, -1, held);
            atomicExch(&header.open, 0);
        }
        return held == 0;
    }

    /// Says what is wrong, if anything is. The flaw is the same in each thread.
    [[nodiscard]] __device__ bool refuse(const saved_flaw& flaw) const {
        if (flaw.any() && ledger_thread() == 0) {
            ledger_.raise(flaw.what, request_, flaw.layer, flaw.came);
        }
        return flaw.any();
    }

    __device__ void take(std::int32_t r) {
        // Read once, so that all threads judge the same numbers whoever writes the buffer meanwhile.
        const std::byte* const in = task_.buffers + static_cast<std::uint64_t>(r) * task_.stride;
        const bool is_long = task_.stride >= sizeof(saved_header);
        if (ledger_thread() == 0) {
            for (std::uint64_t i = 0; is_long && i < header_words; ++i) {
                shared_.header[i] = load_word(in, i);
            }
            constexpr std::uint64_t bytes_at = offsetof(saved_header, bytes) / sizeof(std::uint64_t);
            shared_.bytes = task_.bytes != nullptr ? task_.bytes[r] : is_long ? shared_.header[bytes_at] : 0;
        }
        __syncthreads();
        const std::uint64_t bytes = shared_.bytes;
        saved_header header;
        std::memcpy(&header, shared_.header, sizeof header);
        const request_reader reader(ledger_.bounds, ledger_.layout.layer_sets(ledger_.memory), header, in,
                                    bytes);
        // A buffer that says its bytes itself is believed only where it is one of this format.
        const bool has_header = is_long && (task_.bytes == nullptr || bytes >= sizeof header);
        if ((has_header && refuse(reader.judge_format())) || refuse(judge_bytes(bytes)) ||
            refuse(reader.judge_header(add_up(reader.body_checksum(share_of_thread()), shared_.sum))) ||
            !layers_agree(reader)) {
            return;
        }
        take_sets(reader);
    }

    [[nodiscard]] __device__ saved_flaw judge_bytes(std::uint64_t bytes) const {
        return bytes >= sizeof(saved_header) && bytes <= task_.stride
                   ? saved_flaw{}
                   : saved_flaw{ledger_complaint::saved_bytes, static_cast<std::int64_t>(bytes)};
    }
    [[nodiscard]] __device__ bool layers_agree(const request_reader& reader) const {
        bool good = true;
        for (std::int32_t layer = ledger_thread(); layer < ledger_.bounds.num_layers;
             layer += ledger_threads) {
            const saved_flaw flaw = reader.judge_layer(layer);
            if (flaw.any()) {
                ledger_.raise(flaw.what, request_, flaw.layer, flaw.came);
                good = false;
            }
        }
        return __syncthreads_and(good ? 1 : 0) != 0;
    }

    __device__ void take_sets(const request_reader& reader) {
        const request_record state = ledger_.record(request_);
        const saved_header& header = reader.header();
        reader.take_planes(state.sets, share_of_thread());
        __syncthreads();
        saved_flaw flaw;
        if (__syncthreads_and(state.sets.well_formed(header.dense_from, share_of_thread()) ? 1 : 0) == 0) {
            flaw.what = ledger_complaint::saved_planes;
        }
        set_writer writer(state.sets, nullptr, 0, shared_.sets);
        for (std::int32_t set = 0; !flaw.any() && set < ledger_.bounds.num_sets; ++set) {
            const std::int32_t counted =
                set == 0 ? header.dense_from : writer.recount(set, 0, header.dense_from, 0);
            if (ledger_thread() == 0) {
                state.committed_below[set] = state.staged_below[set] = counted;
            }
            if (__syncthreads_and(reader.agrees(set, counted) ? 1 : 0) == 0) {
                flaw = {ledger_complaint::saved_below, set};
            }
        }
        if (refuse(flaw)) {
            __syncthreads();
            reader.give_back(state.sets, share_of_thread());
            for (std::int32_t set = ledger_thread(); set < ledger_.bounds.num_sets; set += ledger_threads) {
                state.committed_below[set] = state.staged_below[set] = 0; // of an empty request
            }
        } else if (ledger_thread() == 0) {
            state.header->committed = state.header->staged = {header.num_tokens, header.dense_from};
        }
    }

    const cuda_ledger_state& ledger_;
    const cuda_restore_task& task_;
    room& shared_;
    std::int32_t request_ = -1;
};

template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    save_kernel(const __grid_constant__ cuda_ledger_state ledger,
                const __grid_constant__ cuda_save_task task) {
    __shared__ unsigned long long sum;
    let_next_kernel_start();
    wait_for_previous_kernel();
    for (auto r = static_cast<std::int32_t>(blockIdx.x); r < task.count;
         r += static_cast<std::int32_t>(gridDim.x)) {
        request_saver(ledger, task).save(r, sum);
    }
}

template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    restore_kernel(const __grid_constant__ cuda_ledger_state ledger,
                   const __grid_constant__ cuda_restore_task task) {
    __shared__ request_restorer::room room;
    let_next_kernel_start();
    wait_for_previous_kernel();
    for (auto r = static_cast<std::int32_t>(blockIdx.x); r < task.count;
         r += static_cast<std::int32_t>(gridDim.x)) {
        request_restorer(ledger, task, room).restore(r);
        __syncthreads();
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
