#include "bindings/linear.h"

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>
#include <string>
#include <vector>

namespace mtserve::bindings {

using torch::stable::detail::from;
using torch::stable::detail::to;

int64_t filled_rows(int64_t num_rows) {
    int64_t step = 1;
    while (num_rows - 1 >= 16 * step) {
        step *= 2;
    }
    const int64_t filled = (num_rows + step - 1) / step * step;
    return filled < 2 ? 2 : filled;
}

Tensor linear(const Tensor& rows, const LinearTensors& tensors) {
    if (tensors.is_packed) {
        std::array<StableIValue, 6> stack{from(rows),
                                          from(tensors.weight),
                                          from(tensors.bias),
                                          from(std::string("none")),
                                          from(std::vector<std::optional<double>>()),
                                          from(std::optional<std::string>(""))};
        STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("mkldnn::_linear_pointwise", "",
                                                            stack.data(), TORCH_ABI_VERSION));
        return to<Tensor>(stack[0]);
    }
    std::array<StableIValue, 3> stack{from(rows), from(tensors.weight), from(tensors.bias)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
    return to<Tensor>(stack[0]);
}

}  // namespace mtserve::bindings
