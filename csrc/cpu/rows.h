// Row-wise functions around attention: norms, SiLU, gates, residuals. What a row becomes depends on
// that row alone: not on how many there are, where it stands, or threads.

#pragma once

#include <cstdint>

namespace mtserve {

// Rows of float32 or bfloat16, `stride` elements apart.
struct RowsIn {
    const void* values = nullptr;
    int64_t stride = 0;
    bool is_bf16 = false;
};

struct RowsOut {
    void* values = nullptr;
    int64_t stride = 0;
    bool is_bf16 = false;
};

// (x - mean) / sqrt(variance + eps) * weight + bias; null: without the affine part.
struct Norm {
    const float* weight = nullptr;
    const float* bias = nullptr;
    float eps = 0.0f;
};

struct NormArgs {
    RowsIn x;
    RowsOut out;
    Norm norm;
    int64_t width = 0;
};

// SiLU of the first silu_width values of a row; the others are copied.
struct SiluArgs {
    RowsIn x;
    RowsOut out;
    int64_t silu_width = 0;
    int64_t width = 0;
};

// What the output linear reads. n is the normed a.
enum class GateForm {
    kProduct,   // u * n
    kAttended,  // [u, a, u * n]
    kNormed,    // [u, n, u * n]
};

// Rows of num_groups * group_width values, normed in each group. With is_per_group, weight and bias
// have one value a group.
struct GateArgs {
    RowsIn u;
    RowsIn attended;  // float32
    RowsOut out;
    Norm norm;
    int64_t num_groups = 1;
    int64_t group_width = 0;
    bool is_per_group = false;
    GateForm form = GateForm::kProduct;
};

// out = y + x; x may be null, and may be out.
struct AddArgs {
    RowsIn y;
    RowsIn x;
    RowsOut out;
    int64_t width = 0;
};

// Rows [first, stop), with one instruction set.
struct RowKernels {
    void (*norm)(const NormArgs&, int64_t first, int64_t stop);
    void (*silu)(const SiluArgs&, int64_t first, int64_t stop);
    void (*gate)(const GateArgs&, int64_t first, int64_t stop);
    void (*add)(const AddArgs&, int64_t first, int64_t stop);
};

// Rows [0, num_rows), on torch's threads.
void norm_rows(const NormArgs& args, int64_t num_rows);
void silu_rows(const SiluArgs& args, int64_t num_rows);
void gate_rows(const GateArgs& args, int64_t num_rows);
void add_rows(const AddArgs& args, int64_t num_rows);

}  // namespace mtserve
