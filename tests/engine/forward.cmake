# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors

# Tests of the forward pass: examples/engine/model and reading.
uniprefill_add_test(engine_forward SOURCES forward_test.cpp small_model.cpp LIBS engine_model engine_test_gguf uniprefill_oracle)
uniprefill_add_test(engine_end_decision SOURCES end_decision_test.cpp small_model.cpp LIBS engine_model engine_test_gguf uniprefill_oracle)
uniprefill_add_test(engine_step_plan SOURCES step_plan_test.cpp LIBS engine_model)
# The real model; skipped without UNIPREFILL_MODEL.
uniprefill_add_test(engine_ground_truth SOURCES ground_truth_test.cpp LIBS engine_reading LABELS model PLAIN_ONLY TIMEOUT 900)
