# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors

# Tests of examples/engine/cuda.
if(uniprefill_has_cuda AND TARGET CUDA::cublasLt)
    uniprefill_add_gpu_test(engine_operators SOURCES gpu_operators_test.cpp LIBS engine_cuda)
    uniprefill_add_gpu_test(engine_linear SOURCES gpu_linear_test.cpp LIBS engine_cuda)
    uniprefill_add_gpu_test(engine_hybrid SOURCES gpu_hybrid_test.cpp LIBS engine_cuda)
    uniprefill_add_gpu_test(engine_windows SOURCES gpu_windows_test.cpp wide_model.cpp
                            LIBS engine_cuda engine_test_gguf)
    # UNIPREFILL_MODEL names the real model's file, for the one case that needs it.
    uniprefill_add_gpu_test(engine SOURCES gpu_engine_test.cpp wide_model.cpp LIBS engine_cuda engine_test_gguf
                            TIMEOUT 900)
endif()
