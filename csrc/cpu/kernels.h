// The kernels of each instruction set, and those of the chosen one.

#pragma once

#include "cpu/attention.h"
#include "cpu/rows.h"

namespace mtserve {

struct Kernels {
    AttentionKernels attention;
    RowKernels rows;
};

const Kernels& base_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_bf16_kernels();
#endif

// Of chosen_isa().
const Kernels& kernels();

}  // namespace mtserve
