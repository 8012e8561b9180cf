# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors

# Tests of what bench/quality asks for and how it judges; the programs themselves are built with the benches.
uniprefill_add_test(
    quality_passkeys
    SOURCES passkeys_test.cpp
            quality_rules_test.cpp
            ${PROJECT_SOURCE_DIR}/bench/quality/passkey_prompt.cpp
            ${PROJECT_SOURCE_DIR}/bench/quality/rules.cpp
            ${PROJECT_SOURCE_DIR}/bench/quality/sign_test.cpp
    LIBS engine_reading)
target_include_directories(uniprefill_test_quality_passkeys PRIVATE ${PROJECT_SOURCE_DIR}/bench)
