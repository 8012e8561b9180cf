# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors

uniprefill_add_test(engine_cpu_ops SOURCES cpu_ops_test.cpp LIBS engine_cpu)
