// torch.ops.engine: thin bindings on torch's stable ABI, a file for each subject. Checks stand
// here, work in cpu/. torch releases the GIL around every operator.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace mtserve::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_vector(const Tensor& tensor, ScalarType dtype, const char* name) {
    STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
    STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous(), name,
                    " must be one-dimensional and contiguous");
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " has the wrong dtype");
}

inline void check_length(const Tensor& tensor, int64_t length, const char* name) {
    STD_TORCH_CHECK(tensor.numel() == length, name, " has ", tensor.numel(), " elements, not ",
                    length);
}

// A matrix [rows, columns], contiguous; columns < 0: any.
inline void check_matrix(const Tensor& tensor, ScalarType dtype, int64_t rows, int64_t columns,
                         const char* name) {
    STD_TORCH_CHECK(tensor.is_cpu() && tensor.dim() == 2 && tensor.is_contiguous(), name,
                    " must be two-dimensional, contiguous and on the CPU");
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " has the wrong dtype");
    STD_TORCH_CHECK(tensor.size(0) == rows && (columns < 0 || tensor.size(1) == columns), name,
                    " has the shape [", tensor.size(0), ", ", tensor.size(1), "], not [", rows,
                    ", ", columns, "]");
}

template <class T>
const T* values_of(const Tensor& tensor) {
    return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* mutable_values_of(const Tensor& tensor) {
    return static_cast<T*>(tensor.mutable_data_ptr());
}

// Every value lies in [low, high); the first that does not is named.
template <class T>
void check_values(const Tensor& tensor, int64_t low, int64_t high, const char* name) {
    const T* values = values_of<T>(tensor);
    const int64_t count = tensor.numel();
    bool is_outside = false;
    for (int64_t i = 0; i < count; ++i) {  // without a branch, so that it runs in vectors
        is_outside |= values[i] < low || values[i] >= high;
    }
    for (int64_t i = 0; is_outside && i < count; ++i) {
        STD_TORCH_CHECK(values[i] >= low && values[i] < high, name, "[", i, "] is ",
                        static_cast<int64_t>(values[i]), ", but only [", low, ", ", high,
                        ") exist");
    }
}

}  // namespace mtserve::bindings
