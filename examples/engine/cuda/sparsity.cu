// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/sparsity.hpp"

#include "engine/cuda/runtime.hpp"

#include <uniprefill/core/exceptions.hpp>
#include <uniprefill/pipeline/prefill_sparsifier.cuh>
#include <uniprefill/propagate/compaction.cuh>
#include <uniprefill/select/block_lister.cuh>

#include <map>
#include <string>

namespace engine::cuda {

namespace {

using uniprefill::memory_space;
using uniprefill::throw_if_failed;
using uniprefill::backend::cuda;

constexpr std::int32_t block_rows = 64;
constexpr std::int32_t observations = 128;

template <std::int32_t HeadDim>
class sparsity_of final : public sparsity {
  public:
    explicit sparsity_of(const sparsity_options& options)
        : options_(options)
        , device_(current_device())
        , sparsifier_(options_.bounds,
                      {options_.selecting.data(), static_cast<std::int32_t>(options_.selecting.size())},
                      device_)
        , lister_(options_.bounds, device_) {
        throw_if_failed(sparsifier_.check());
        throw_if_failed(sparsifier_.template prepare<bfloat16>());
        memory_ = device_array<std::byte>(sparsifier_.workspace_bytes());
        if (!options_.lists) return;
        throw_if_failed(uniprefill::validate(*options_.lists));
        const std::int64_t blocks = options_.bounds.max_blocks();
        const std::int32_t heads = options_.bounds.num_heads;
        masses_ = device_array<std::int64_t>(static_cast<std::size_t>(2 * heads * blocks));
        head_masses_ = {masses_.data(), masses_.data() + heads * blocks, blocks, heads};
        uniprefill::workspace counting;
        static_cast<void>(carve(counting));
        list_memory_ = device_array<std::byte>(counting.bytes_used());
        uniprefill::workspace pieces(list_memory_.data(), list_memory_.bytes());
        lists_ = carve(pieces);
        list_scratch_ = device_array<std::byte>(lister_.workspace_bytes());
    }

    bool selects(std::int32_t layer) const override { return sparsifier_.selects(layer); }
    bool looks(std::int32_t layer) const override { return options_.lists || selects(layer); }

    void begin(const uniprefill::batch_view& batch, cudaStream_t on) override {
        step_.emplace(sparsifier_);
        if (options_.lists) step_->want_head_masses(head_masses_);
        throw_if_failed(step_->begin(batch, {memory_.data(), memory_.bytes()}, on));
        decided_ = {};
    }
    uniprefill::batch_view rows() const override { return step_->rows(); }

    void look(std::int32_t layer, const uniprefill::head_rows<const bfloat16>& q,
              const uniprefill::head_rows<const bfloat16>& k, std::int32_t kept_bound,
              cudaStream_t on) override {
        throw_if_failed(step_->decide(layer, q, uniprefill::key_source<bfloat16>{k, {}}, {}, nullptr,
                                      kept_bound, decided_, on));
        if (options_.lists) {
            throw_if_failed(lister_.run(head_masses_, step_->masses().faults, step_->rows(), *options_.lists,
                                        lists_, {list_scratch_.data(), list_scratch_.bytes()}, on));
        }
    }
    const uniprefill::selection& decided() const override { return decided_; }
    const uniprefill::block_lists& lists() const override { return lists_; }

    void leave(const uniprefill::byte_rows& hidden, const uniprefill::byte_rows& queries,
               cudaStream_t on) override {
        const uniprefill::row_tensor moved[] = {{hidden, {}}, {queries, {}}};
        throw_if_failed(step_->leave(decided_, moved, 2, on));
    }

    void save(std::size_t place) override { saved_.insert_or_assign(place, state{*step_, decided_, lists_}); }
    void restore(std::size_t place) override {
        const state& from = saved_.at(place);
        step_.emplace(from.step);
        decided_ = from.decided;
        lists_ = from.lists;
    }

    std::size_t bytes() const override {
        return memory_.bytes() + masses_.bytes() + list_memory_.bytes() + list_scratch_.bytes();
    }

  private:
    using policy = uniprefill::default_policy<block_rows, observations, HeadDim>;
    using sparsifier = uniprefill::prefill_sparsifier<policy, cuda>;
    using step = uniprefill::prefill_step<policy, cuda>;
    struct state {
        sparsity_of::step step;
        uniprefill::selection decided;
        uniprefill::block_lists lists;
    };

    static uniprefill::cuda_device current_device() {
        uniprefill::cuda_device device;
        throw_if_failed(uniprefill::cuda_device::current(device));
        return device;
    }
    uniprefill::block_lists carve(uniprefill::workspace& memory) const {
        const uniprefill::limits& bounds = options_.bounds;
        return uniprefill::block_lists::carve(
            memory, bounds, options_.lists_by_kv_head ? bounds.num_kv_heads : bounds.num_heads,
            memory_space::device);
    }

    sparsity_options options_;
    uniprefill::cuda_device device_;
    sparsifier sparsifier_;
    uniprefill::block_lister<uniprefill::selection_rule, cuda> lister_;
    device_array<std::byte> memory_;
    device_array<std::int64_t> masses_;
    uniprefill::head_mass_view head_masses_{};
    device_array<std::byte> list_memory_;
    device_array<std::byte> list_scratch_;
    std::optional<step> step_;
    uniprefill::selection decided_{};
    uniprefill::block_lists lists_{};
    std::map<std::size_t, state> saved_;
};

} // namespace

std::unique_ptr<sparsity> make_sparsity(const sparsity_options& options) {
    if (options.bounds.block_rows != block_rows || options.bounds.num_observations != observations) {
        throw error("--device cuda", "G 64 and n 128, which its kernels are compiled for",
                    "G " + std::to_string(options.bounds.block_rows) + " and n " +
                        std::to_string(options.bounds.num_observations));
    }
    switch (options.bounds.head_dim) {
    case 64:
        return std::make_unique<sparsity_of<64>>(options);
    case 128:
        return std::make_unique<sparsity_of<128>>(options);
    case 256:
        return std::make_unique<sparsity_of<256>>(options);
    default:
        throw error("--device cuda, head dimension", "64, 128 or 256",
                    std::to_string(options.bounds.head_dim));
    }
}

} // namespace engine::cuda
