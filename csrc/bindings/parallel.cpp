// torch's own threads, so that kernels and torch's operators share one pool.

#include "cpu/parallel.h"

#include <torch/csrc/stable/ops.h>

namespace mtserve {

int num_threads() {
    return static_cast<int>(torch::stable::get_num_threads());
}

void run_on_threads(int count, void (*fn)(void*), void* context) {
    torch::stable::parallel_for(0, count, 1, [fn, context](int64_t first, int64_t stop) {
        for (int64_t i = first; i < stop; ++i) {
            fn(context);
        }
    });
}

}  // namespace mtserve
