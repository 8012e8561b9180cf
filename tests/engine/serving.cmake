# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors

# Tests of examples/engine/serving.
uniprefill_add_test(engine_serving SOURCES serve_test.cpp small_model.cpp LIBS engine_serving engine_test_gguf uniprefill_oracle)
