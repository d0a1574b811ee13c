// The kernels of each instruction set, and those of the chosen one.

#pragma once

#include "cpu/attention.h"
#include "cpu/embedding.h"
#include "cpu/rows.h"
#include "cpu/top_items.h"

namespace mtserve {

struct Kernels {
    AttentionKernels attention;
    RowKernels rows;
    EmbedKernel embed;
    ScoreKernel score;
};

const Kernels& base_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_bf16_kernels();
#endif

// Of chosen_isa().
const Kernels& kernels();

}  // namespace mtserve
