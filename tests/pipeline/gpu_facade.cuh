// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// A make-believe engine of a few layers, on a device and on the host, that prefills through the facade. What
/// the device's saw at each selecting layer is recorded; the host's goes the same way and compares.
///
/// Masses of the two backends differ by rounding, so the host takes the device's for its decision, once it
/// has seen that they are its own but for that. Everything after it must then be the same bits.

#include "importance/gpu_step.cuh"
#include "support/scale.hpp"

#include <uniprefill/pipeline/prefill_sparsifier.cuh>
#include <uniprefill/select/block_lister.cuh>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

namespace pipeline_test {

using namespace importance_test;
using uniprefill_test::check_cuda;

using bf16 = up::bfloat16;
constexpr std::int32_t G = 16, N = 32, D = 64, heads = 4, kv_heads = 2;
constexpr std::int32_t num_layers = 6;
constexpr std::int32_t tensor_width = 8; // integers of a row of the tensor that travels
using policy = up::default_policy<G, N, D>;
using rule = up::selection_rule;
using cache_view = up::contiguous_cache<bf16>;
using device_estimator = up::importance_estimator<policy::estimator, up::backend::cuda>;
using device_selector = up::block_selector<rule, up::backend::cuda>;
using device_sparsifier = up::prefill_sparsifier<policy, up::backend::cuda>;
using host_sparsifier = up::prefill_sparsifier<policy>;

} // namespace pipeline_test

UNIPREFILL_BEGIN_NAMESPACE

// The engine's largest kernels are compiled once, in gpu_facade_kernels.cu.
extern template status
pipeline_test::device_estimator::prepare<bfloat16, bfloat16, contiguous_cache<bfloat16>>() const noexcept;
extern template status pipeline_test::device_estimator::run<bfloat16, bfloat16, contiguous_cache<bfloat16>>(
    const head_rows<const bfloat16>&, const key_source<bfloat16, contiguous_cache<bfloat16>>&,
    const attention_params&, const batch_view&, const mass_view&, const head_mass_view&, workspace,
    backend::cuda::stream) const noexcept;
extern template status pipeline_test::device_selector::run(const mass_view&, const batch_view&,
                                                           const selection_rule*, std::int32_t, selection&,
                                                           workspace, backend::cuda::stream) const noexcept;

UNIPREFILL_END_NAMESPACE

namespace pipeline_test {

inline void require_ok(const up::status& done) {
    INFO(message(done));
    REQUIRE(done.ok());
}

/// Which of the model's heads an engine has, where several share them: as many each, in their order.
struct head_share {
    std::int32_t rank = 0;
    std::int32_t ranks = 1;

    [[nodiscard]] std::int32_t num_heads() const { return heads / ranks; }
    [[nodiscard]] std::int32_t num_kv_heads() const { return kv_heads / ranks; }
    /// Elements before its own in a row of queries, and in one of keys.
    [[nodiscard]] std::ptrdiff_t first_query() const { return std::ptrdiff_t{rank} * num_heads() * D; }
    [[nodiscard]] std::ptrdiff_t first_key() const { return std::ptrdiff_t{rank} * num_kv_heads() * D; }
};

/// The same requests at every layer, with other queries and keys.
struct content {
    std::vector<step<bf16>> layers;
    std::vector<caches<bf16>> cached;
    std::vector<rule> rules;          // [num_requests] where a layer asks each request
    std::vector<std::int32_t> hidden; // [num_rows][tensor_width]

    content(std::vector<request> requests, std::vector<rule> by_request)
        : rules(std::move(by_request)) {
        for (std::int32_t layer = 0; layer < num_layers; ++layer) {
            layers.emplace_back(model{heads, kv_heads, D, G, N}, requests);
            cached.emplace_back(layers.back());
            for (request& one : requests) {
                one.seed += 1000;
            }
        }
        for (std::int32_t i = 0; i < rows() * tensor_width; ++i) {
            hidden.push_back(i * 7919);
        }
    }
    [[nodiscard]] std::int32_t rows() const { return layers[0].num_rows(); }
    [[nodiscard]] up::batch_view batch() const { return layers[0].batch(); }
    [[nodiscard]] up::limits limits() const {
        up::limits bounds = layers[0].tight_limits();
        bounds.num_layers = num_layers;
        return bounds;
    }
    /// Puts zeros where a rank buffer within limits() has the masses of a segment of the whole step.
    void forget_masses(std::vector<std::int64_t>& buffer, std::int32_t segment) const {
        const std::int32_t begin = batch().segment_begin(segment);
        const std::int64_t first = up::block_offset(segment, begin, G);
        const std::int64_t count = up::num_blocks(batch().segment_end(segment) - begin, G);
        for (std::int64_t block = first; block < first + count; ++block) {
            buffer[static_cast<std::size_t>(block)] = 0;
            buffer[static_cast<std::size_t>(block + limits().max_blocks())] = 0;
        }
    }
};

inline const std::vector<up::propagation> modes{up::propagation::cumulative, up::propagation::revive};
/// The one that moves more, where a test is scaled down.
inline std::vector<up::propagation> scaled_modes() {
    return uniprefill_test::is_scaled_down() ? std::vector<up::propagation>{up::propagation::revive} : modes;
}

inline std::vector<request> first_requests() {
    std::vector<request> requests;
    requests.push_back({21, up::request_tag::prefill, 0, {533}, {1, 20, 40, 0}});
    requests.push_back({22, up::request_tag::chunk, 77, {170, 229}, {1, 90, 10, 0}});
    requests.push_back({23, up::request_tag::decode, 300, {1}});
    requests.push_back({24, up::request_tag::prefill, 0, {300}, {1, 4, 4, 0}});
    requests.push_back({25, up::request_tag::prefill, 0, {5}, {1, 1, 1, 0}});
    requests[0].forced = {{130, 141}, {163, 230}};
    requests[3].gaps = true;
    return requests;
}
/// No larger, and other requests in the same places.
inline std::vector<request> second_requests() {
    std::vector<request> requests = first_requests();
    requests[0].segments = {400};
    requests[0].forced = {{11, 12}, {50, 60}};
    requests[0].seed = 31;
    requests[1].segments = {100, 200};
    requests[2].tag = up::request_tag::verify;
    requests[3].options.enabled = 0;
    requests[4].segments = {80};
    requests[4].seed = 32;
    return requests;
}
inline content first_content() {
    return {first_requests(),
            {rule::top_p(0.95), rule::fixed_ratio(0.5), rule::top_p(0.9), rule::max_fraction(0.1),
             rule::top_p(0.9)}};
}
inline content second_content() {
    return {second_requests(),
            {rule::fixed_ratio(0.7), rule::top_p(0.9), rule::top_p(0.9), rule::top_p(0.8),
             rule::fixed_budget(40)}};
}

/// The first, with a key that isn't a number: in the last KV head of request 0, at the first selecting layer.
inline content content_with_fault() {
    content made = first_content();
    made.layers[1].keys[(10 * kv_heads + kv_heads - 1) * D + 3] = bf16{0x7fc0};
    return made;
}

/// The second asks each request for its rule.
inline std::vector<up::selecting_layer<rule>> some_layers() {
    static const rule any{};
    return {{1, rule::top_p(0.9), nullptr}, {3, {}, &any}, {4, rule::fixed_ratio(0.5), nullptr}};
}

/// Everything that a selecting layer leaves behind, in host memory.
struct seen {
    std::vector<std::int64_t> masses; // after the reduction
    std::vector<std::uint32_t> keep_bits;
    std::vector<std::int32_t> kept_to_old, old_to_kept, cu_seqlens, cu_segments;
    std::vector<up::segment_outcome> outcomes;
    std::vector<std::int32_t> rows_cu_seqlens, rows_cu_segments, positions, original_rows; // after leave()
    std::vector<std::int32_t> hidden;
};

/// Masses by head of a layer, selecting or not, and the lists made of them, in host memory.
struct seen_lists {
    std::vector<std::int64_t> masses; // [2][heads][max_blocks]: free, forced
    std::vector<std::int64_t> faults, offsets;
    std::vector<std::int32_t> blocks;
};

/// Lists by query head, of the rule's own scope, and by KV head in turn.
struct lists_of_layer {
    up::list_options<rule> how;
    std::int32_t heads;

    static lists_of_layer at(std::int32_t layer, const up::limits& bounds) {
        return layer % 2 == 0
                   ? lists_of_layer{{rule::top_p(0.9, up::mass_scope::all), 20, 64}, bounds.num_heads}
                   : lists_of_layer{{rule::fixed_ratio(0.4), 0, 0}, bounds.num_kv_heads};
    }
};

/// The same in device memory, where the step and the lister write.
class list_recorder {
  public:
    list_recorder(const up::limits& bounds, std::int32_t layer)
        : bounds_(bounds)
        , made_(lists_of_layer::at(layer, bounds))
        , masses_(
              std::vector<std::int64_t>(static_cast<std::size_t>(2 * bounds.num_heads * bounds.max_blocks())))
        , faults_(std::vector<std::int64_t>(static_cast<std::size_t>(bounds.max_segments))) {
        up::workspace counting;
        static_cast<void>(up::block_lists::carve(counting, bounds, made_.heads, up::memory_space::device));
        memory_ = device_array<unsigned char>(counting.bytes_used());
        up::workspace pieces(memory_.data(), memory_.size());
        lists_ = up::block_lists::carve(pieces, bounds, made_.heads, up::memory_space::device);
        scratch_ = device_array<unsigned char>(
            up::block_lister<rule, up::backend::cuda>(bounds, up::cuda_device{}).workspace_bytes());
    }
    [[nodiscard]] up::head_mass_view masses() const {
        const std::int64_t blocks = bounds_.max_blocks();
        return {masses_.data(), masses_.data() + bounds_.num_heads * blocks, blocks, bounds_.num_heads};
    }
    /// Makes lists, after decide() and before leave().
    [[nodiscard]] up::status make(const up::prefill_step<policy, up::backend::cuda>& step,
                                  const up::cuda_device& device, cudaStream_t stream) {
        const up::block_lister<rule, up::backend::cuda> lister(bounds_, device);
        return lister.run(masses(), step.masses().faults, step.rows(), made_.how, lists_,
                          {scratch_.data(), scratch_.size()}, stream);
    }
    [[nodiscard]] up::status record_faults(const up::mass_view& masses, cudaStream_t stream) {
        return up::cuda_result(cudaMemcpyAsync(faults_.data(), masses.faults,
                                               faults_.size() * sizeof(std::int64_t),
                                               cudaMemcpyDeviceToDevice, stream),
                               "faults");
    }
    /// @param segments  of the step
    [[nodiscard]] seen_lists get(std::int32_t segments) const {
        seen_lists seen;
        seen.masses = masses_.get();
        seen.faults = faults_.get();
        const auto copy = [](auto& to, const auto* from, std::int64_t count) {
            to.resize(static_cast<std::size_t>(count));
            check_cuda(cudaMemcpy(to.data(), from, to.size() * sizeof(to[0]), cudaMemcpyDeviceToHost),
                       "lists");
        };
        copy(seen.offsets, lists_.offsets, std::int64_t{segments} * made_.heads + 1);
        REQUIRE(seen.offsets.back() >= 0);
        REQUIRE(seen.offsets.back() <= lists_.capacity);
        copy(seen.blocks, lists_.blocks, seen.offsets.back());
        return seen;
    }

  private:
    up::limits bounds_;
    lists_of_layer made_;
    device_array<std::int64_t> masses_, faults_;
    up::block_lists lists_;
    device_array<unsigned char> memory_, scratch_;
};

/// Member by member: nobody writes the bytes behind the last one.
template <class = void>
__global__ void copy_outcomes(up::segment_outcome* to, const up::segment_outcome* from, std::int32_t count) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count;
         i += static_cast<std::int32_t>(blockDim.x)) {
        to[i].total_mass = from[i].total_mass;
        to[i].dropped_mass = from[i].dropped_mass;
        to[i].rows = from[i].rows;
        to[i].kept = from[i].kept;
        to[i].cut_block = from[i].cut_block;
        to[i].cut_rows = from[i].cut_rows;
        to[i].reason = from[i].reason;
    }
}

/// The same in device memory, as large as the limits allow.
class recorder {
  public:
    explicit recorder(const up::limits& bounds)
        : masses_(zeros<std::int64_t>(up::mass_view::rank_buffer_size(bounds)))
        , keep_bits_(zeros<std::uint32_t>((bounds.max_blocks() + 31) / 32))
        , kept_to_old_(zeros<std::int32_t>(bounds.max_rows))
        , old_to_kept_(zeros<std::int32_t>(bounds.max_rows))
        , cu_seqlens_(zeros<std::int32_t>(bounds.max_requests + 1))
        , cu_segments_(zeros<std::int32_t>(bounds.max_segments + 1))
        , outcomes_(zeros<up::segment_outcome>(bounds.max_segments))
        , rows_cu_seqlens_(zeros<std::int32_t>(bounds.max_requests + 1))
        , rows_cu_segments_(zeros<std::int32_t>(bounds.max_segments + 1))
        , positions_(zeros<std::int32_t>(bounds.max_rows))
        , original_rows_(zeros<std::int32_t>(bounds.max_rows))
        , hidden_(zeros<std::int32_t>(std::int64_t{bounds.max_rows} * tensor_width)) {}

    [[nodiscard]] up::status record_decision(const up::mass_view& masses, const up::selection& kept,
                                             cudaStream_t stream) {
        UNIPREFILL_TRY(copy(masses_, masses.free, masses_.size(), stream));
        UNIPREFILL_TRY(copy(keep_bits_, kept.keep_bits, keep_bits_.size(), stream));
        UNIPREFILL_TRY(
            copy(kept_to_old_, kept.kept_to_old, static_cast<std::size_t>(kept.kept_bound), stream));
        UNIPREFILL_TRY(copy(old_to_kept_, kept.old_to_kept, static_cast<std::size_t>(kept.num_rows), stream));
        UNIPREFILL_TRY(copy(cu_seqlens_, kept.cu_seqlens, cu_seqlens_.size(), stream));
        UNIPREFILL_TRY(copy(cu_segments_, kept.cu_segments, cu_segments_.size(), stream));
        copy_outcomes<><<<1, 32, 0, stream>>>(outcomes_.data(), kept.outcomes,
                                              static_cast<std::int32_t>(outcomes_.size()));
        return up::cuda_result(cudaPeekAtLastError(), "copy_outcomes");
    }
    [[nodiscard]] up::status record_rows(const up::batch_view& rows, const up::row_map& map,
                                         const up::byte_rows& hidden, cudaStream_t stream) {
        const auto bound = static_cast<std::size_t>(rows.num_rows);
        UNIPREFILL_TRY(copy(rows_cu_seqlens_, rows.cu_seqlens, rows_cu_seqlens_.size(), stream));
        UNIPREFILL_TRY(copy(rows_cu_segments_, rows.cu_segments, rows_cu_segments_.size(), stream));
        UNIPREFILL_TRY(copy(positions_, rows.positions, bound, stream));
        UNIPREFILL_TRY(copy(original_rows_, map.kept_to_old, bound, stream));
        return copy(hidden_, static_cast<const std::int32_t*>(hidden.data), bound * tensor_width, stream);
    }
    [[nodiscard]] seen get() const {
        return {masses_.get(),           keep_bits_.get(),   kept_to_old_.get(),   old_to_kept_.get(),
                cu_seqlens_.get(),       cu_segments_.get(), outcomes_.get(),      rows_cu_seqlens_.get(),
                rows_cu_segments_.get(), positions_.get(),   original_rows_.get(), hidden_.get()};
    }

  private:
    /// Steps write as much as they have rows; all of it is read back.
    template <class T>
    static device_array<T> zeros(std::int64_t count) {
        return device_array<T>(std::vector<T>(static_cast<std::size_t>(count)));
    }
    template <class T>
    static up::status copy(const device_array<T>& to, const T* from, std::size_t count, cudaStream_t stream) {
        return up::cuda_result(
            cudaMemcpyAsync(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToDevice, stream), "record");
    }

    device_array<std::int64_t> masses_;
    device_array<std::uint32_t> keep_bits_;
    device_array<std::int32_t> kept_to_old_, old_to_kept_, cu_seqlens_, cu_segments_;
    device_array<up::segment_outcome> outcomes_;
    device_array<std::int32_t> rows_cu_seqlens_, rows_cu_segments_, positions_, original_rows_, hidden_;
};

/// What a layer does to the rows that are alive, whoever they are.
template <class = void>
__global__ void transform_rows(std::int32_t* hidden, const std::int32_t* num_rows, std::int32_t layer) {
    const std::int32_t end = *num_rows * tensor_width;
    for (auto i = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x); i < end;
         i += static_cast<std::int32_t>(gridDim.x * blockDim.x)) {
        hidden[i] = static_cast<std::int32_t>(3u * static_cast<std::uint32_t>(hidden[i]) +
                                              static_cast<std::uint32_t>(layer));
    }
}

template <class T>
up::byte_rows as_rows(const T* data, std::int32_t rows, std::int64_t width) {
    return up::as_byte_rows(const_cast<T*>(data), rows, width);
}

/// The engine on the device. Its arrays stay where they are, so that a graph of run() can be replayed.
class device_engine {
  public:
    /// @param first the largest content that it will run
    /// @param device the current one
    device_engine(const content& first, std::vector<up::selecting_layer<rule>> layers, up::propagation mode,
                  const up::cuda_device& device, head_share share = {})
        : device_(device)
        , share_(share)
        , bounds_(first.limits())
        , layers_(std::move(layers))
        , rules_(first.rules)
        , batch_(first.layers[0])
        , queries_(first.layers[0].queries.size())
        , working_(first.hidden.size())
        , full_(first.hidden.size()) {
        // Rows beyond those that are left are recorded too, whether or not new arrays are filled.
        for (const device_array<std::int32_t>* rows : {&working_, &full_}) {
            check_cuda(cudaMemset(rows->data(), 0xa5, rows->size() * sizeof(std::int32_t)), "rows");
        }
        bounds_.num_global_heads = heads;
        bounds_.num_heads = share.num_heads();
        bounds_.num_kv_heads = share.num_kv_heads();
        for (up::selecting_layer<rule>& one : layers_) {
            if (one.per_request != nullptr) {
                one.per_request = rules_.data();
            }
            recorders_.push_back(std::make_unique<recorder>(bounds_));
        }
        sparsifier_ = std::make_unique<device_sparsifier>(
            bounds_,
            up::sparsifier_options<rule>{layers_.data(), static_cast<std::int32_t>(layers_.size()), mode, {}},
            device);
        require_ok(sparsifier_->check());
        require_ok(prepare());
        memory_ = device_array<unsigned char>(sparsifier_->workspace_bytes() + guard);
        // Whether or not new arrays are filled.
        check_cuda(cudaMemset(memory_.data() + sparsifier_->workspace_bytes(), 0xa5, guard), "guard bytes");
        keys_ = device_array<bf16>(first.layers[0].keys.size());
        for (std::int32_t layer = 0; layer < num_layers; ++layer) {
            const auto which = static_cast<std::size_t>(layer);
            all_queries_.emplace_back(first.layers[which].queries);
            all_keys_.emplace_back(first.layers[which].keys);
            cached_.emplace_back(first.cached[which].rows());
        }
        cache_ = first.cached[0].contiguous();
    }

    /// Puts @p what into the arrays. Its caches lie as those of the first content do.
    void load(const content& what) {
        batch_.assign(what.layers[0]);
        rules_.set(what.rules);
        for (std::size_t layer = 0; layer < num_layers; ++layer) {
            all_queries_[layer].set(what.layers[layer].queries);
            all_keys_[layer].set(what.layers[layer].keys);
            REQUIRE(what.cached[layer].contiguous().request_stride == cache_.request_stride);
            cached_[layer].set(what.cached[layer].rows());
        }
        (revives() ? full_ : working_).set(what.hidden);
    }

    /// From here on run() has every layer's masses by head written, and lists made of them.
    void want_lists() {
        for (std::int32_t layer = 0; layer < num_layers; ++layer) {
            list_recorders_.push_back(std::make_unique<list_recorder>(bounds_, layer));
        }
    }

    /// What the constructor did for its thread's device. Judges nothing.
    [[nodiscard]] up::status prepare() const { return sparsifier_->prepare<bf16, bf16, cache_view>(); }

    /// One prefill through all layers. Judges nothing, so that any thread may call it.
    /// @param kept_bound what decisions are told to be at most; negative: nothing
    template <class Reduction = up::no_reduction>
    [[nodiscard]] up::status run(cudaStream_t stream, bool recording, const Reduction& reduction = {},
                                 std::int32_t kept_bound = -1) {
        up::prefill_step<policy, up::backend::cuda> step(*sparsifier_);
        UNIPREFILL_TRY(step.begin(batch_.batch(), {memory_.data(), sparsifier_->workspace_bytes()}, stream));
        const up::row_tensor tensor{as_rows(working_.data(), bounds_.max_rows, tensor_width),
                                    revives() ? as_rows(full_.data(), bounds_.max_rows, tensor_width)
                                              : up::byte_rows{}};
        std::size_t next = 0;
        for (std::int32_t layer = 0; layer < num_layers; ++layer) {
            UNIPREFILL_TRY(step.enter(layer, &tensor, 1, stream));
            UNIPREFILL_TRY(project(step, layer, stream));
            const std::int32_t alive = step.rows().num_rows;
            const up::head_rows<const bf16> q{
                queries_.data() + share_.first_query(), heads * D, D, alive, share_.num_heads(), D};
            up::key_source<bf16, cache_view> keys{
                {keys_.data() + share_.first_key(), kv_heads * D, D, alive, share_.num_kv_heads(), D},
                cache_};
            keys.cached.data = cached_[static_cast<std::size_t>(layer)].data() + share_.first_key();
            if (!list_recorders_.empty()) {
                step.want_head_masses(list_recorders_[static_cast<std::size_t>(layer)]->masses());
            }
            up::selection kept;
            UNIPREFILL_TRY(kept_bound >= 0 ? step.decide(layer, q, keys, {}, batch_.batch().cached_lens,
                                                         kept_bound, kept, stream, reduction)
                                           : step.decide(layer, q, keys, {}, batch_.batch().cached_lens, kept,
                                                         stream, reduction));
            if (kept.identity == sparsifier_->selects(layer)) {
                return unexpected("a decision at a selecting layer, and at no other", layer);
            }
            if (!list_recorders_.empty()) {
                list_recorder& one = *list_recorders_[static_cast<std::size_t>(layer)];
                UNIPREFILL_TRY(one.make(step, device_, stream));
                if (recording) {
                    UNIPREFILL_TRY(one.record_faults(step.masses(), stream));
                }
            }
            if (recording && !kept.identity) {
                UNIPREFILL_TRY(recorders_[next]->record_decision(step.masses(), kept, stream));
            }
            UNIPREFILL_TRY(step.leave(kept, &tensor, 1, stream));
            const up::byte_rows& hidden = step.rows_of(tensor);
            transform_rows<><<<16, 256, 0, stream>>>(static_cast<std::int32_t*>(hidden.data),
                                                     step.rows().cu_seqlens + step.rows().num_requests,
                                                     layer);
            UNIPREFILL_TRY(up::cuda_result(cudaPeekAtLastError(), "transform_rows"));
            if (!kept.identity) {
                if (step.rows().num_rows != (kept_bound >= 0 ? std::min(kept_bound, alive) : alive)) {
                    return unexpected("as many rows as the host knows to be kept at most", layer);
                }
                if (recording) {
                    UNIPREFILL_TRY(recorders_[next]->record_rows(step.rows(), step.map(), hidden, stream));
                }
                ++next;
            }
        }
        return up::success();
    }

    /// What was recorded at each selecting layer.
    [[nodiscard]] std::vector<seen> recorded() const {
        std::vector<unsigned char> beyond(guard);
        check_cuda(cudaMemcpy(beyond.data(), memory_.data() + sparsifier_->workspace_bytes(), guard,
                              cudaMemcpyDeviceToHost),
                   "guard bytes");
        CHECK(std::all_of(beyond.begin(), beyond.end(), [](unsigned char byte) { return byte == 0xa5; }));
        std::vector<seen> all;
        for (const std::unique_ptr<recorder>& one : recorders_) {
            all.push_back(one->get());
        }
        return all;
    }
    /// Of each layer.
    [[nodiscard]] std::vector<seen_lists> recorded_lists(std::int32_t segments) const {
        std::vector<seen_lists> all;
        for (const std::unique_ptr<list_recorder>& one : list_recorders_) {
            all.push_back(one->get(segments));
        }
        return all;
    }
    [[nodiscard]] const up::limits& bounds() const { return bounds_; }
    [[nodiscard]] const std::vector<up::selecting_layer<rule>>& layers() const { return layers_; }
    [[nodiscard]] bool revives() const { return sparsifier_->options().mode == up::propagation::revive; }

  private:
    static constexpr std::size_t guard = 4096;

    static up::status unexpected(const char* expected, std::int32_t layer) {
        return up::failure(up::status_code::wrong_state, "the facade", expected, layer);
    }
    /// Queries and keys of the rows that are alive, all heads of them.
    up::status project(const up::prefill_step<policy, up::backend::cuda>& step, std::int32_t layer,
                       cudaStream_t stream) {
        const auto which = static_cast<std::size_t>(layer);
        const up::byte_rows from[] = {as_rows(all_queries_[which].data(), bounds_.max_rows, heads * D),
                                      as_rows(all_keys_[which].data(), bounds_.max_rows, kv_heads * D)};
        const up::byte_rows to[] = {as_rows(queries_.data(), bounds_.max_rows, heads * D),
                                    as_rows(keys_.data(), bounds_.max_rows, kv_heads * D)};
        return up::compact(step.map(), from, to, 2, {}, device_, stream);
    }

    up::cuda_device device_;
    head_share share_;
    up::limits bounds_;
    std::vector<up::selecting_layer<rule>> layers_;
    device_array<rule> rules_;
    device_step<bf16> batch_;
    device_array<bf16> queries_, keys_;
    device_array<std::int32_t> working_, full_;
    std::vector<device_array<bf16>> all_queries_, all_keys_, cached_;
    cache_view cache_;
    std::vector<std::unique_ptr<recorder>> recorders_;
    std::vector<std::unique_ptr<list_recorder>> list_recorders_; // of each layer, where they are wanted
    std::unique_ptr<device_sparsifier> sparsifier_;
    device_array<unsigned char> memory_;
};

/// A reduction for the host that judges its masses by the device's, and then goes on with those.
struct take_over {
    const std::vector<std::int64_t>* device = nullptr;
    std::int64_t ranks = 1;        ///< that all have the same heads
    std::int64_t faulty_word = -1; ///< where one of them reports a fault
    std::int64_t num_masses = 0;   ///< fault words lie behind these
    std::int64_t one = 1;          ///< a probability of 1
    double* worst = nullptr;
    std::int64_t* wrong_words = nullptr;

    up::status operator()(std::int64_t* buffer, std::int64_t count, up::rank_reduction,
                          up::host_stream) const noexcept {
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t came = (*device)[static_cast<std::size_t>(i)];
            const std::int64_t mine =
                buffer[i] * ranks + (i == faulty_word ? up::fault_word(up::mass_fault::rank) : 0);
            if (i >= num_masses) {
                *wrong_words += came != mine ? 1 : 0;
            } else {
                const double allowed = 1e-5 * static_cast<double>(mine) + 1e-7 * N * static_cast<double>(one);
                *worst = std::max(*worst, std::abs(static_cast<double>(came - mine)) / allowed);
            }
            buffer[i] = came;
        }
        return up::success();
    }
};

/// Compares masses by head and lists of a layer of which the host has masses @p mine and fault words @p
/// faults: masses but for rounding, then the lists that the host makes of the device's, bit for bit. @return
/// the blocks that lists have
inline std::int64_t compare_lists(const up::limits& bounds, std::int32_t layer, const up::batch_view& rows,
                                  const std::vector<std::int64_t>& mine, const std::int64_t* faults,
                                  const seen_lists& came) {
    const auto one = static_cast<double>(std::int64_t{1} << up::mass_format::of(bounds).fraction_bits);
    const std::int64_t used = up::used_blocks(rows, G);
    double worst = 0;
    for (std::int64_t plane = 0; plane < 2 * bounds.num_heads; ++plane) {
        for (std::int64_t block = 0; block < used; ++block) {
            const auto at = static_cast<std::size_t>(plane * bounds.max_blocks() + block);
            const double allowed = 1e-5 * static_cast<double>(mine[at]) + 1e-7 * N * one;
            worst = std::max(worst, std::abs(static_cast<double>(came.masses[at] - mine[at])) / allowed);
        }
    }
    CHECK(worst < 1);
    CHECK(std::equal(faults, faults + rows.num_segments, came.faults.begin()));

    const lists_of_layer made = lists_of_layer::at(layer, bounds);
    up::workspace counting;
    static_cast<void>(up::block_lists::carve(counting, bounds, made.heads, up::memory_space::host));
    const guarded_buffer memory(counting.bytes_used());
    up::workspace pieces(memory.data(), counting.bytes_used());
    up::block_lists wanted = up::block_lists::carve(pieces, bounds, made.heads, up::memory_space::host);
    const up::block_lister<rule> lister(bounds);
    const guarded_buffer scratch(lister.workspace_bytes());
    std::vector<std::int64_t> masses = came.masses;
    require_ok(lister.run({masses.data(), masses.data() + bounds.num_heads * bounds.max_blocks(),
                           bounds.max_blocks(), bounds.num_heads},
                          came.faults.data(), rows, made.how, wanted,
                          {scratch.data(), lister.workspace_bytes()}));
    const std::int64_t lists = std::int64_t{rows.num_segments} * made.heads;
    REQUIRE(came.offsets.size() == static_cast<std::size_t>(lists) + 1);
    REQUIRE(std::equal(came.offsets.begin(), came.offsets.end(), wanted.offsets));
    REQUIRE(std::equal(came.blocks.begin(), came.blocks.end(), wanted.blocks));
    return wanted.offsets[lists];
}

/// Runs @p what on the host and compares what the device recorded. @return rows that are left at the end
/// @param lists  of each layer, or none
inline std::int32_t compare_with_host(const content& what, const device_engine& engine,
                                      const std::vector<seen>& recorded, std::int64_t ranks = 1,
                                      std::int64_t faulty_segment = -1,
                                      const std::vector<seen_lists>& lists = {}) {
    const up::limits& bounds = engine.bounds();
    std::vector<up::selecting_layer<rule>> layers = engine.layers();
    for (up::selecting_layer<rule>& one : layers) {
        one.per_request = one.per_request != nullptr ? what.rules.data() : nullptr;
    }
    const host_sparsifier sparsifier(
        bounds, {layers.data(),
                 static_cast<std::int32_t>(layers.size()),
                 engine.revives() ? up::propagation::revive : up::propagation::cumulative,
                 {}});
    const guarded_buffer memory(sparsifier.workspace_bytes());
    up::prefill_step<policy> step(sparsifier);
    require_ok(step.begin(what.batch(), {memory.data(), sparsifier.workspace_bytes()}));

    std::vector<std::int32_t> working = what.hidden, full = what.hidden;
    const up::row_tensor tensor{as_rows(working.data(), what.rows(), tensor_width),
                                as_rows(full.data(), what.rows(), tensor_width)};
    double worst = 0;
    std::int64_t wrong_words = 0;
    std::int64_t listed = 0, blocks = 0;
    std::size_t next = 0;
    const auto same = [](const auto& mine, const auto& came, std::int32_t count) {
        return std::equal(mine, mine + count, came.begin());
    };
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
        CAPTURE(layer);
        const auto which = static_cast<std::size_t>(layer);
        require_ok(step.enter(layer, &tensor, 1));
        const std::int32_t alive = step.rows().num_rows;
        std::vector<bf16> q(what.layers[which].queries.size()), k(what.layers[which].keys.size());
        require_ok(up::compact(step.map(), as_rows(what.layers[which].queries.data(), what.rows(), heads * D),
                               as_rows(q.data(), what.rows(), heads * D), {}));
        require_ok(up::compact(step.map(), as_rows(what.layers[which].keys.data(), what.rows(), kv_heads * D),
                               as_rows(k.data(), what.rows(), kv_heads * D), {}));
        take_over reduction;
        if (sparsifier.selects(layer)) {
            reduction.device = &recorded[next].masses;
            reduction.ranks = ranks;
            reduction.num_masses = 2 * bounds.max_blocks();
            reduction.faulty_word = faulty_segment >= 0 ? reduction.num_masses + faulty_segment : -1;
            reduction.one = ranks << up::mass_format::of(bounds).fraction_bits;
            reduction.worst = &worst;
            reduction.wrong_words = &wrong_words;
        }
        std::vector<std::int64_t> by_head;
        if (!lists.empty()) {
            by_head.resize(static_cast<std::size_t>(2 * bounds.num_heads * bounds.max_blocks()));
            step.want_head_masses({by_head.data(), by_head.data() + bounds.num_heads * bounds.max_blocks(),
                                   bounds.max_blocks(), bounds.num_heads});
        }
        up::selection kept;
        require_ok(
            step.decide(layer, up::head_rows<const bf16>{q.data(), heads * D, D, alive, heads, D},
                        up::key_source<bf16, cache_view>{{k.data(), kv_heads * D, D, alive, kv_heads, D},
                                                         what.cached[which].contiguous()},
                        {}, what.batch().cached_lens, kept, {}, reduction));
        if (!lists.empty()) {
            const up::batch_view entered = step.rows();
            listed += compare_lists(bounds, layer, entered, by_head, step.masses().faults, lists[which]);
            for (std::int32_t s = 0; s < entered.num_segments; ++s) {
                blocks += up::num_blocks(entered.segment_end(s) - entered.segment_begin(s), G) *
                          lists_of_layer::at(layer, bounds).heads;
            }
        }
        require_ok(step.leave(kept, &tensor, 1));
        const up::batch_view rows = step.rows();
        auto* const hidden = static_cast<std::int32_t*>(step.rows_of(tensor).data);
        for (std::int32_t i = 0; i < rows.num_rows * tensor_width; ++i) {
            hidden[i] = static_cast<std::int32_t>(3u * static_cast<std::uint32_t>(hidden[i]) +
                                                  static_cast<std::uint32_t>(layer));
        }
        if (!sparsifier.selects(layer)) {
            continue;
        }
        REQUIRE_FALSE(kept.identity);
        const seen& there = recorded[next++];
        const std::int32_t left = kept.cu_seqlens[kept.num_requests];
        CHECK(worst < 1);
        CHECK(wrong_words == 0);
        CHECK(same(kept.keep_bits, there.keep_bits,
                   static_cast<std::int32_t>((bounds.max_blocks() + 31) / 32)));
        CHECK(same(kept.cu_seqlens, there.cu_seqlens, kept.num_requests + 1));
        CHECK(same(kept.cu_segments, there.cu_segments, kept.num_segments + 1));
        CHECK(same(kept.kept_to_old, there.kept_to_old, left));
        CHECK(same(kept.old_to_kept, there.old_to_kept, alive));
        for (std::int32_t s = 0; s < kept.num_segments; ++s) {
            CAPTURE(s);
            const up::segment_outcome& mine = kept.outcomes[s];
            const up::segment_outcome& came = there.outcomes[static_cast<std::size_t>(s)];
            CHECK(std::string(up::to_string(came.reason)) == up::to_string(mine.reason));
            CHECK(came.rows == mine.rows);
            CHECK(came.kept == mine.kept);
            CHECK(came.total_mass == mine.total_mass);
            CHECK(came.dropped_mass == mine.dropped_mass);
        }
        CHECK(same(rows.cu_seqlens, there.rows_cu_seqlens, rows.num_requests + 1));
        CHECK(same(rows.cu_segments, there.rows_cu_segments, rows.num_segments + 1));
        CHECK(same(rows.positions, there.positions, left));
        if (const std::int32_t* const original = step.map().kept_to_old; original != nullptr) {
            CHECK(same(original, there.original_rows, left));
        }
        CHECK(same(hidden, there.hidden, left * tensor_width));
    }
    REQUIRE(next == recorded.size());
    CHECK((lists.empty() || (listed > 0 && listed < blocks)));
    return step.rows().num_rows;
}

} // namespace pipeline_test
