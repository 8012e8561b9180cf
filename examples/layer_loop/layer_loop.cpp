// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The library inside the layer loop of an engine that already has one. The engine here is a toy: its
// projections are noise that depends on the row, and its attention does nothing. What the loop does with the
// library is the real thing.

#include <uniprefill/core/exceptions.hpp>
#include <uniprefill/uniprefill.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

namespace up = uniprefill;
using up::throw_if_failed;

namespace {

constexpr int num_layers = 6;
constexpr int num_heads = 8;
constexpr int num_kv_heads = 2;
constexpr int head_dim = 32;
constexpr int hidden_size = 64;

/// Memory aligned as the library wants it.
class aligned_buffer {
  public:
    explicit aligned_buffer(std::size_t bytes)
        : data_(::operator new(bytes, alignment))
        , bytes_(bytes) {}
    void* data() const { return data_.get(); }
    std::size_t size() const { return bytes_; }

  private:
    static constexpr std::align_val_t alignment{up::workspace::alignment};
    struct release {
        void operator()(void* memory) const { ::operator delete(memory, alignment); }
    };
    std::unique_ptr<void, release> data_;
    std::size_t bytes_;
};

/// Projections of a toy: every eighth token draws attention.
void project_qkv(const up::batch_view& rows, int layer, std::vector<float>& q, std::vector<float>& k) {
    for (int row = 0; row < rows.num_rows; ++row) {
        const int position = rows.positions[row];
        const float weight = position / 64 % 8 == layer % 8 ? 2.0f : 0.1f;
        std::fill_n(q.begin() + std::ptrdiff_t{row} * num_heads * head_dim, num_heads * head_dim, 1.0f);
        std::fill_n(k.begin() + std::ptrdiff_t{row} * num_kv_heads * head_dim, num_kv_heads * head_dim,
                    weight);
    }
}

void attend_and_mlp(const up::batch_view&, const std::vector<float>&, std::vector<float>&) {}

/// The rows that the last layer holds of a prompt of @p tokens tokens, the only request of its step.
int prefill(const int tokens) {
    std::vector<int> positions(static_cast<std::size_t>(tokens));
    std::iota(positions.begin(), positions.end(), 0);
    const std::vector<int> cu_seqlens{0, tokens};
    const std::vector<up::request_tag> tags{up::request_tag::prefill};
    const std::vector<int> request_ids{0};
    std::vector<float> hidden(positions.size() * hidden_size);
    std::vector<float> q(positions.size() * num_heads * head_dim);
    std::vector<float> k(positions.size() * num_kv_heads * head_dim);

    up::limits limits;
    limits.max_rows = tokens;
    limits.num_layers = num_layers;
    limits.num_heads = num_heads;
    limits.num_kv_heads = num_kv_heads;
    limits.head_dim = head_dim;

    // The ledger's memory, and which layers hold the same rows.
    const std::vector<int> selecting{2, 4};
    std::vector<int> layer_sets(num_layers);
    up::ledger_limits bounds;
    bounds.max_tokens = tokens + 1000;
    bounds.num_layers = num_layers;
    throw_if_failed(
        up::cumulative_layer_sets(selecting.data(), 2, num_layers, layer_sets.data(), bounds.num_sets));
    const aligned_buffer state(up::drop_ledger<>::state_bytes(bounds));
    up::drop_ledger<> ledger;
    throw_if_failed(ledger.bind(bounds, layer_sets.data(), state.data(), state.size()));
    throw_if_failed(ledger.admit(0));

    // [begin README]
    const up::selecting_layer<up::selection_rule> layers[] = {{2, up::selection_rule::top_p(0.98)},
                                                              {4, up::selection_rule::top_p(0.95)}};
    const up::prefill_sparsifier<> sparsifier(limits, {layers, 2}); // owns nothing, needs no device
    const aligned_buffer memory(sparsifier.workspace_bytes());      // the engine's memory
    up::batch_view batch;                                           // the engine's own arrays
    batch.num_requests = batch.num_segments = 1;
    batch.num_rows = tokens;
    batch.tags = tags.data();
    batch.cu_seqlens = cu_seqlens.data();
    batch.positions = positions.data();

    up::prefill_step<> step(sparsifier);
    throw_if_failed(step.begin(batch, {memory.data(), memory.size()}));
    const up::row_tensor rows{up::as_byte_rows(hidden.data(), tokens, hidden_size), {}};
    up::ledger_step ledger_step;
    throw_if_failed(ledger.begin_step(batch, request_ids.data(), ledger_step));
    for (int layer = 0; layer < num_layers; ++layer) {
        project_qkv(step.rows(), layer, q, k);                           // positions come from step.rows()
        throw_if_failed(ledger.append(ledger_step, layer, step.rows())); // lengths and slots of this layer
        const int alive = step.rows().num_rows;
        const up::head_rows<const float> queries{q.data(), 256, head_dim, alive, num_heads, head_dim};
        const up::head_rows<const float> keys{k.data(), 64, head_dim, alive, num_kv_heads, head_dim};
        up::selection kept; // "keep all" where a layer doesn't select
        throw_if_failed(step.decide(layer, queries, up::key_source<float>{keys}, {}, nullptr, kept));
        throw_if_failed(step.leave(kept, &rows, 1)); // hidden states: kept rows to the front
        throw_if_failed(up::compact(kept, up::as_byte_rows(q.data(), alive, 256),
                                    up::as_byte_rows(q.data(), alive, 256), {}));
        attend_and_mlp(step.rows(), q, hidden); // kept queries, all keys of the layer
    }
    throw_if_failed(ledger.commit_step(ledger_step));
    // [end README]

    up::held_rows held;
    for (int layer = 0; layer < num_layers; ++layer) {
        throw_if_failed(ledger.rows_of(0, layer, held));
        std::printf("layer %d holds %d of %d positions\n", layer, held.length(), tokens);
    }
    return held.length();
}

} // namespace

int main() {
    constexpr int tokens = 2048;
    try {
        return prefill(tokens) < tokens ? 0 : 1;
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "layer_loop: %s\n", failure.what());
        return 2;
    }
}
