// The kernels, compiled for base. Everything stands in a namespace of its own, so that the linker
// never takes a function of one instruction set for that of another.

#include "cpu/kernels.h"
#include "cpu/simd/base.h"

#define MTSERVE_ISA base
#include "cpu/attention_kernel.h"
#include "cpu/embedding_kernel.h"
#include "cpu/row_kernels.h"
#include "cpu/top_items_kernel.h"

namespace mtserve {

const Kernels& base_kernels() {
    static constexpr Kernels kernels = {base::kAttentionKernels, base::kRowKernels,
                                        base::embed_rows, base::score_items};
    return kernels;
}

}  // namespace mtserve
