// The kernels, compiled for avx512_bf16. Everything stands in a namespace of its own, so that the
// linker never takes a function of one instruction set for that of another.

#include "cpu/kernels.h"
#include "cpu/simd/avx512_bf16.h"

#define MTSERVE_ISA avx512_bf16
#include "cpu/attention_kernel.h"
#include "cpu/embedding_kernel.h"
#include "cpu/row_kernels.h"
#include "cpu/top_items_kernel.h"

namespace mtserve {

const Kernels& avx512_bf16_kernels() {
    static constexpr Kernels kernels = {avx512_bf16::kAttentionKernels, avx512_bf16::kRowKernels,
                                        avx512_bf16::embed_rows, avx512_bf16::score_items};
    return kernels;
}

}  // namespace mtserve
