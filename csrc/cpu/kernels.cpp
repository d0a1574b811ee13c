#include "cpu/kernels.h"

#include "cpu/isa.h"

namespace mtserve {

const Kernels& kernels() {
#if defined(__x86_64__)
    switch (chosen_isa()) {
        case Isa::kBase:
            return base_kernels();
        case Isa::kAvx2:
            return avx2_kernels();
        case Isa::kAvx512Bf16:
            return avx512_bf16_kernels();
    }
#endif
    return base_kernels();
}

}  // namespace mtserve
