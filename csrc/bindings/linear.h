// torch's linear layers, called from native code. See engine/models/linear.py.

#pragma once

#include <optional>

#include "bindings/checks.h"

namespace mtserve::bindings {

struct LinearTensors {
    Tensor weight;  // [out, in]; prepacked for oneDNN, or plain
    std::optional<Tensor> bias;
    bool is_packed = false;
};

// A number of rows that oneDNN has prepared already, most likely; never one. The same as
// filled_rows of engine/models/linear.py.
int64_t filled_rows(int64_t num_rows);

// rows [n, in] in the weight's dtype, n as filled_rows says -> [n, out].
Tensor linear(const Tensor& rows, const LinearTensors& tensors);

}  // namespace mtserve::bindings
