// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/commands.hpp"

namespace engine {

cpu::arithmetic product_arithmetic(arithmetic chosen) {
    switch (chosen) {
    case arithmetic::automatic:
        return cpu::arithmetic::automatic;
    case arithmetic::fp32:
        return cpu::arithmetic::fp32;
    case arithmetic::bf16:
        return cpu::arithmetic::bf16;
    case arithmetic::bf16x3:
        return cpu::arithmetic::bf16x3;
    }
    return cpu::arithmetic::automatic;
}

} // namespace engine
