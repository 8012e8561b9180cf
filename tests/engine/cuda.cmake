# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors

# Tests of examples/engine/cuda.
if(uniprefill_has_cuda AND TARGET CUDA::cublasLt)
    uniprefill_add_gpu_test(engine_operators SOURCES gpu_operators_test.cpp LIBS engine_cuda)
    # UNIPREFILL_MODEL names the real model's file, for the one case that needs it.
    uniprefill_add_gpu_test(engine SOURCES gpu_engine_test.cpp wide_model.cpp LIBS engine_cuda engine_test_gguf
                            TIMEOUT 900)
endif()
