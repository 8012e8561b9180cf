// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The layer loop of layer_loop.cpp on a CUDA device, recorded once as a CUDA graph and replayed for prompts
// of other lengths: how many rows are alive is known to the device alone.

#include <uniprefill/core/exceptions.hpp>
#include <uniprefill/uniprefill.cuh>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <numeric>
#include <vector>

namespace up = uniprefill;
using up::bfloat16;
using up::throw_if_failed;

namespace {

constexpr int num_layers = 6;
constexpr int num_heads = 8;
constexpr int num_kv_heads = 2;
constexpr int head_dim = 64;
constexpr int hidden_size = 512;
using policy = up::default_policy<64, 128, head_dim>;

void check(cudaError_t code) {
    throw_if_failed(up::cuda_result(code, "the CUDA runtime"));
}

/// Device memory of an engine.
template <class T>
class device_buffer {
  public:
    explicit device_buffer(std::size_t count)
        : size_(count * sizeof(T)) {
        check(cudaMalloc(&data_, size_));
        check(cudaMemset(data_, 0, size_));
    }
    device_buffer(const device_buffer&) = delete;
    device_buffer& operator=(const device_buffer&) = delete;
    ~device_buffer() { cudaFree(data_); }
    void set(const std::vector<T>& values) const {
        check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    T* data() const { return data_; }
    std::size_t size() const { return size_; } ///< bytes

  private:
    T* data_ = nullptr;
    std::size_t size_;
};

/// Projections of a toy: every eighth block draws attention. A kernel of an engine takes the number of rows
/// from the device.
template <class = void>
__global__ void project(up::batch_view rows, int layer, bfloat16* q, bfloat16* k) {
    const int alive = rows.cu_seqlens[rows.num_requests];
    for (int row = static_cast<int>(blockIdx.x); row < alive; row += static_cast<int>(gridDim.x)) {
        const float weight = rows.positions[row] / 64 % 8 == layer % 8 ? 0.5f : 0.02f;
        for (int i = static_cast<int>(threadIdx.x); i < num_heads * head_dim;
             i += static_cast<int>(blockDim.x)) {
            q[row * num_heads * head_dim + i] = up::from_float<bfloat16>(1.0f);
            if (i < num_kv_heads * head_dim) {
                k[row * num_kv_heads * head_dim + i] = up::from_float<bfloat16>(weight);
            }
        }
    }
}
void project_qkv(const up::batch_view& rows, int layer, bfloat16* q, bfloat16* k, cudaStream_t stream) {
    project<><<<128, 256, 0, stream>>>(rows, layer, q, k);
    check(cudaGetLastError());
}

/// A toy has nothing to attend to: it notes how many rows came this far.
template <class = void>
__global__ void note(up::batch_view rows, int* length) {
    *length = rows.cu_seqlens[rows.num_requests];
}

/// What an engine holds for prompts of up to so many tokens.
struct arrays {
    explicit arrays(int most_tokens)
        : tokens(most_tokens)
        , tags(1)
        , cu_seqlens(2)
        , positions(rows())
        , hidden(rows() * hidden_size)
        , q(rows() * num_heads * head_dim)
        , k(rows() * num_kv_heads * head_dim)
        , lengths(num_layers) {
        std::vector<int> ascending(rows());
        std::iota(ascending.begin(), ascending.end(), 0);
        positions.set(ascending);
        tags.set({up::request_tag::prefill});
    }
    [[nodiscard]] std::size_t rows() const { return static_cast<std::size_t>(tokens); }

    int tokens;
    device_buffer<up::request_tag> tags;
    device_buffer<int> cu_seqlens, positions;
    device_buffer<bfloat16> hidden, q, k;
    device_buffer<int> lengths; ///< rows that each layer leaves
};

using cuda_sparsifier = up::prefill_sparsifier<policy, up::backend::cuda>;

void attend_and_mlp(const up::batch_view& rows, int* length, cudaStream_t stream) {
    note<><<<1, 1, 0, stream>>>(rows, length);
    check(cudaGetLastError());
}

/// Puts a prefill through all layers onto @p stream.
void prefill(const arrays& engine, const cuda_sparsifier& sparsifier, const device_buffer<std::byte>& memory,
             cudaStream_t stream) {
    const up::cuda_device& device = sparsifier.device();
    up::batch_view batch;
    batch.space = up::memory_space::device;
    batch.num_requests = batch.num_segments = 1;
    batch.num_rows = engine.tokens;
    batch.tags = engine.tags.data();
    batch.cu_seqlens = engine.cu_seqlens.data();
    batch.positions = engine.positions.data();
    bfloat16* const q = engine.q.data();
    bfloat16* const k = engine.k.data();
    bfloat16* const hidden = engine.hidden.data();
    int* const lengths = engine.lengths.data();

    // [begin docs/cuda.md: prefill]
    up::prefill_step<policy, up::backend::cuda> step(sparsifier);
    throw_if_failed(step.begin(batch, {memory.data(), memory.size()}, stream));
    const up::row_tensor rows{up::as_byte_rows(hidden, engine.tokens, hidden_size), {}};
    for (int layer = 0; layer < num_layers; ++layer) {
        project_qkv(step.rows(), layer, q, k, stream);
        const int bound = step.rows().num_rows; // an upper bound: the number itself is on the device
        const up::head_rows<const bfloat16> queries{q, 512, head_dim, bound, num_heads, head_dim};
        const up::head_rows<const bfloat16> keys{k, 128, head_dim, bound, num_kv_heads, head_dim};
        up::selection kept;
        throw_if_failed(
            step.decide(layer, queries, up::key_source<bfloat16>{keys}, {}, nullptr, kept, stream));
        throw_if_failed(step.leave(kept, &rows, 1, stream));
        const up::byte_rows q_rows = up::as_byte_rows(q, bound, 512);
        throw_if_failed(up::compact(kept, q_rows, q_rows, step.scratch(), device, stream));
        attend_and_mlp(step.rows(), lengths + layer, stream); // kept queries, all keys of the layer
    }
    // [end docs/cuda.md]
}

/// Whether prompts of several lengths lose rows, all by one graph.
bool run() {
    const arrays engine(4096);
    up::limits limits;
    limits.max_rows = engine.tokens;
    limits.num_layers = num_layers;
    limits.num_heads = num_heads;
    limits.num_kv_heads = num_kv_heads;
    limits.head_dim = head_dim;
    // [begin docs/cuda.md: plan]
    const up::selecting_layer<up::selection_rule> layers[] = {{2, up::selection_rule::top_p(0.98)},
                                                              {4, up::selection_rule::top_p(0.95)}};
    up::cuda_device device;
    throw_if_failed(up::cuda_device::current(device));
    const cuda_sparsifier sparsifier(limits, {layers, 2}, device); // owns nothing
    throw_if_failed(sparsifier.prepare<bfloat16>());
    // [end docs/cuda.md]
    const device_buffer<std::byte> memory(sparsifier.workspace_bytes());

    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamCreate(&stream));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    prefill(engine, sparsifier, memory, stream);
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    bool all_lose_rows = true;
    for (const int tokens : {4096, 1500, 3000}) {
        engine.cu_seqlens.set({0, tokens});
        check(cudaGraphLaunch(executable, stream));
        check(cudaStreamSynchronize(stream));
        std::vector<int> lengths(num_layers);
        check(
            cudaMemcpy(lengths.data(), engine.lengths.data(), engine.lengths.size(), cudaMemcpyDeviceToHost));
        std::printf("prompt of %d tokens, rows after each layer:", tokens);
        for (const int length : lengths) {
            std::printf(" %d", length);
        }
        std::printf("\n");
        all_lose_rows = all_lose_rows && lengths.front() == tokens && lengths.back() < tokens;
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return all_lose_rows;
}

} // namespace

int main() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("skipped: no CUDA device\n");
        return 77;
    }
    try {
        return run() ? 0 : 1;
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "cuda_layer_loop: %s\n", failure.what());
        return 2;
    }
}
