// Checked slots and pages -> AppendArgs.

#pragma once

#include "bindings/checks.h"
#include "cpu/append.h"

namespace mtserve::bindings {

// Slots [n] of pages [P, S, K, width], whose heads stand one after another. The rows are left to
// the caller.
inline AppendArgs append_args(const Tensor& slots, const Tensor& pages) {
    STD_TORCH_CHECK(pages.is_cpu() && pages.dim() == 4,
                    "pages must be four-dimensional and on the CPU");
    check_vector(slots, ScalarType::Long, "slots");
    check_values<int64_t>(slots, 0, pages.size(0) * pages.size(1), "slots");
    STD_TORCH_CHECK(
        slots.numel() == 0 || (pages.stride(3) == 1 && pages.stride(2) == pages.size(3)),
        "the heads of pages must stand one after another");
    const int64_t bytes = pages.element_size();
    AppendArgs args;
    args.row_bytes = pages.size(2) * pages.size(3) * bytes;
    args.slots = values_of<int64_t>(slots);
    args.num_slots = slots.numel();
    args.pages = static_cast<char*>(pages.mutable_data_ptr());
    args.page_stride = pages.stride(0) * bytes;
    args.token_stride = pages.stride(1) * bytes;
    args.page_size = pages.size(1);
    return args;
}

}  // namespace mtserve::bindings
