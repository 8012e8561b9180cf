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
#include <utility>

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
        , sparsifier_(made_by(options_))
        , lister_(options_.bounds, device_) {
        check_options(options_);
        throw_if_failed(sparsifier_.template prepare<bfloat16>());
        take_memory();
    }

    void change(std::vector<uniprefill::selecting_layer<uniprefill::selection_rule>> selecting,
                std::optional<uniprefill::list_options<>> lists, engine::list_rules rules) override {
        sparsity_options next = options_;
        next.selecting = std::move(selecting);
        next.lists = lists;
        next.list_rules = std::move(rules);
        check_options(next);
        step_.reset(); // it knows the sparsifier
        saved_.clear();
        options_ = std::move(next);
        sparsifier_ = made_by(options_);
        take_memory();
    }

    bool selects(std::int32_t layer) const override { return sparsifier_.selects(layer); }
    bool lists_at(std::int32_t layer) const override { return lists_of(layer).has_value(); }
    bool looks(std::int32_t layer) const override { return selects(layer) || lists_at(layer); }

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
        if (const auto lists = lists_of(layer)) {
            throw_if_failed(lister_.run(head_masses_, step_->masses().faults, step_->rows(), *lists, lists_,
                                        {list_scratch_.data(), list_scratch_.bytes()}, on));
        }
    }
    const uniprefill::selection& decided() const override { return decided_; }
    const uniprefill::block_lists& lists() const override { return lists_; }

    void leave(const uniprefill::byte_rows& hidden, const uniprefill::byte_rows& queries,
               cudaStream_t on) override {
        const uniprefill::row_tensor moved[] = {{hidden, {}}, {queries, {}}};
        throw_if_failed(step_->leave(decided_, moved, 2, on));
    }

    std::size_t decision_bytes() const override {
        uniprefill::workspace counting;
        static_cast<void>(uniprefill::selection::carve(counting, options_.bounds, memory_space::device));
        return counting.bytes_used();
    }
    uniprefill::selection keep_decision(std::byte* memory, cudaStream_t on) const override {
        uniprefill::workspace pieces(memory, decision_bytes());
        const auto room = uniprefill::selection::carve(pieces, options_.bounds, memory_space::device);
        uniprefill::selection kept = decided_;
        if (kept.identity) return kept;
        const auto copy = [on](std::int32_t* to, std::int32_t*& from, std::int64_t count) {
            check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof(std::int32_t),
                                  cudaMemcpyDeviceToDevice, on),
                  "decision");
            from = to;
        };
        copy(room.kept_to_old, kept.kept_to_old, kept.kept_bound);
        copy(room.cu_seqlens, kept.cu_seqlens, std::int64_t{kept.num_requests} + 1);
        copy(room.cu_segments, kept.cu_segments, std::int64_t{kept.num_segments} + 1);
        kept.keep_bits = nullptr; // rows are moved by the maps alone
        kept.old_to_kept = nullptr;
        kept.outcomes = nullptr;
        return kept;
    }
    void replay(const uniprefill::selection& kept, cudaStream_t on) override {
        throw_if_failed(step_->leave(kept, nullptr, 0, on));
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

    std::optional<uniprefill::list_options<>> lists_of(std::int32_t layer) const {
        return engine::lists_at(options_.lists, options_.list_rules, layer);
    }
    sparsifier made_by(const sparsity_options& options) const {
        return sparsifier(options.bounds,
                          {options.selecting.data(), static_cast<std::int32_t>(options.selecting.size())},
                          device_);
    }
    void check_options(const sparsity_options& options) const {
        throw_if_failed(made_by(options).check());
        if (options.lists) throw_if_failed(uniprefill::validate(*options.lists));
        for (const auto& one : options.list_rules) {
            throw_if_failed(uniprefill::validate(one.rule));
        }
    }
    void take_memory() {
        const std::size_t wanted = sparsifier_.workspace_bytes();
        if (wanted > memory_.bytes()) {
            memory_ = device_array<std::byte>(); // before more is taken
            memory_ = device_array<std::byte>(wanted);
        }
        if (!options_.lists || list_memory_.bytes() > 0) return;
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
