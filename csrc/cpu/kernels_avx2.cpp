// The kernels, compiled for avx2. Everything stands in a namespace of its own, so that the linker
// never takes a function of one instruction set for that of another.

#include "cpu/kernels.h"
#include "cpu/simd/avx2.h"

#define MTSERVE_ISA avx2
#include "cpu/attention_kernel.h"
#include "cpu/embedding_kernel.h"
#include "cpu/row_kernels.h"
#include "cpu/top_items_kernel.h"

namespace mtserve {

const Kernels& avx2_kernels() {
    static constexpr Kernels kernels = {avx2::kAttentionKernels, avx2::kRowKernels,
                                        avx2::embed_rows, avx2::score_items};
    return kernels;
}

}  // namespace mtserve
