// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/dense_attention.hpp"

// cuDNN is opened when it is asked for: the program starts without it, and without a driver.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cudnn.h>
#include <cudnn_frontend.h>

#include <dlfcn.h>

#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace cudnn_frontend {

void* cudnn_dlhandle = nullptr;

} // namespace cudnn_frontend

namespace engine::cuda {

namespace fe = cudnn_frontend;
using uniprefill::bfloat16;
using uniprefill::head_rows;

namespace {

enum uid : std::int64_t { q_uid = 1, k_uid, v_uid, out_uid };

void check(cudnnStatus_t code, const char* what) {
    if (code != CUDNN_STATUS_SUCCESS) {
        throw error(std::string("cuDNN, ") + what, "success", fe::detail::get_error_string(code));
    }
}

void check(fe::error_object result, const char* what) {
    if (result.is_bad())
        throw error(std::string("cuDNN, ") + what, "success", printable(result.get_message(), 300));
}

bool open_library() {
    if (fe::cudnn_dlhandle == nullptr) {
        // The frontend opens a CUDA runtime as well, and would take the oldest that it finds.
        const std::string runtime = "libcudart.so." + std::to_string(CUDART_VERSION / 1000);
        setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", runtime.c_str(), 0);
        fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW);
    }
    return fe::cudnn_dlhandle != nullptr;
}

/// A graph holds for one number of rows and these strides.
struct sizes {
    std::int64_t rows, q_stride, k_stride, v_stride, out_stride, window;
    bool operator<(const sizes& other) const {
        return std::tie(rows, q_stride, k_stride, v_stride, out_stride, window) <
               std::tie(other.rows, other.q_stride, other.k_stride, other.v_stride, other.out_stride,
                        other.window);
    }
};

} // namespace

struct dense_attention::state {
    ~state() {
        graphs.clear();
        if (handle != nullptr) fe::detail::destroy_handle(handle);
    }
    std::shared_ptr<fe::graph::Graph> graph_for(const sizes& wanted);

    cudnnHandle_t handle = nullptr;
    std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
    std::map<sizes, std::shared_ptr<fe::graph::Graph>> graphs;
    /// The last is for the graph that needs most: graphs run one after another. Those before stay, since CUDA
    /// graphs that were recorded hold their addresses.
    std::vector<device_array<std::byte>> workspaces;
};

std::shared_ptr<fe::graph::Graph> dense_attention::state::graph_for(const sizes& wanted) {
    if (const auto known = graphs.find(wanted); known != graphs.end()) return known->second;
    auto graph = std::make_shared<fe::graph::Graph>();
    graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    const auto dims = [&](std::int64_t count) {
        return std::vector<std::int64_t>{1, count, wanted.rows, head_dim};
    };
    const auto strides = [&](std::int64_t row) {
        return std::vector<std::int64_t>{row * wanted.rows, head_dim, row, 1};
    };
    const auto input = [&](const char* name, uid id, std::int64_t count, std::int64_t row) {
        return graph->tensor(fe::graph::Tensor_attributes()
                                 .set_name(name)
                                 .set_uid(id)
                                 .set_dim(dims(count))
                                 .set_stride(strides(row)));
    };
    auto options = fe::graph::SDPA_attributes()
                       .set_name("attention")
                       .set_generate_stats(false)
                       .set_causal_mask(true)
                       .set_attn_scale(1.0f / std::sqrt(static_cast<float>(head_dim)));
    if (wanted.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(wanted.window));
    auto [out, statistics] =
        graph->sdpa(input("q", q_uid, heads, wanted.q_stride), input("k", k_uid, kv_heads, wanted.k_stride),
                    input("v", v_uid, kv_heads, wanted.v_stride), options);
    out->set_output(true).set_uid(out_uid).set_dim(dims(heads)).set_stride(strides(wanted.out_stride));
    check(graph->build(handle, {fe::HeurMode_t::A}), "attention of this size");
    std::int64_t bytes = 0;
    check(graph->get_workspace_size(bytes), "workspace");
    if (workspaces.empty() || static_cast<std::size_t>(bytes) > workspaces.back().size()) {
        workspaces.emplace_back(static_cast<std::size_t>(bytes));
    }
    graphs[wanted] = graph;
    return graph;
}

dense_attention::dense_attention(std::int32_t heads, std::int32_t kv_heads, std::int32_t head_dim)
    : state_(std::make_unique<state>()) {
    state_->heads = heads;
    state_->kv_heads = kv_heads;
    state_->head_dim = head_dim;
    if (!open_library())
        throw error("--attention cudnn", "libcudnn.so.9 where libraries are looked for", "none");
    check(fe::detail::create_handle(&state_->handle), "start");
}

dense_attention::~dense_attention() = default;

void dense_attention::run(const head_rows<const bfloat16>& q, const head_rows<const bfloat16>& k,
                          const head_rows<const bfloat16>& v, const head_rows<bfloat16>& out,
                          std::int32_t window, cudaStream_t on) {
    const std::int64_t head_dim = state_->head_dim;
    if (q.head_stride != head_dim || k.head_stride != head_dim || v.head_stride != head_dim ||
        out.head_stride != head_dim || k.num_rows != q.num_rows || v.num_rows != q.num_rows ||
        out.num_rows != q.num_rows) {
        throw error("attention", "heads side by side and as many keys as queries", "something else");
    }
    if (q.num_rows == 0) return;
    const auto graph =
        state_->graph_for({q.num_rows, q.row_stride, k.row_stride, v.row_stride, out.row_stride, window});
    check(fe::detail::set_stream(state_->handle, on), "stream");
    std::unordered_map<std::int64_t, void*> arrays = {{q_uid, const_cast<bfloat16*>(q.data)},
                                                      {k_uid, const_cast<bfloat16*>(k.data)},
                                                      {v_uid, const_cast<bfloat16*>(v.data)},
                                                      {out_uid, out.data}};
    check(graph->execute(state_->handle, arrays, state_->workspaces.back().data()), "attention");
}

bool dense_attention::can(const head_rows<const bfloat16>& q, const head_rows<const bfloat16>& k,
                          const head_rows<const bfloat16>& v, const head_rows<bfloat16>& out,
                          std::int32_t window) {
    try {
        static_cast<void>(state_->graph_for(
            {q.num_rows, q.row_stride, k.row_stride, v.row_stride, out.row_stride, window}));
        return true;
    } catch (const error&) {
        return false;
    }
}

bool dense_attention::built() {
    return true;
}

std::string dense_attention::library() {
    if (!open_library()) return "cuDNN not found";
    const std::size_t version = fe::detail::get_backend_version();
    return "cuDNN " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100) + ", frontend " + std::to_string(CUDNN_FRONTEND_MAJOR_VERSION) +
           "." + std::to_string(CUDNN_FRONTEND_MINOR_VERSION) + "." +
           std::to_string(CUDNN_FRONTEND_PATCH_VERSION);
}

} // namespace engine::cuda
