// The HSTU layer: what stands around attention, and a whole layer in one call. The formulas are
// those of engine/models/hstu/layers.py.
//
// Rows run in blocks, so that what a linear reads and writes stays in the cache. Shapes: T rows,
// D hidden size, H heads, A qk_dim, V v_dim, P = H * (2 V + 2 A); a row of `projected` is
// [U | V | Q | K].

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bindings/append.h"
#include "bindings/attention_args.h"
#include "bindings/linear.h"
#include "cpu/attention.h"
#include "cpu/rows.h"

namespace {

using namespace mtserve;
using namespace mtserve::bindings;
using std::optional;

constexpr int64_t kBlockRows = 1024;

// A norm and the linear behind it: [norm weight, norm bias, linear weight, linear bias].
struct Half {
    Norm norm;
    LinearTensors linear;
};

const float* vector_or_null(const optional<Tensor>& values, int64_t length, const char* name) {
    if (!values) {
        return nullptr;
    }
    check_vector(*values, ScalarType::Float, name);
    check_length(*values, length, name);
    return values_of<float>(*values);
}

Half half_of(const std::vector<optional<Tensor>>& tensors, int64_t norm_width, double eps,
             bool is_packed) {
    STD_TORCH_CHECK(
        tensors.size() == 4 && tensors[2] && tensors[0].has_value() == tensors[1].has_value(),
        "give the norm's weight and bias, and the linear's");
    const Norm norm{vector_or_null(tensors[0], norm_width, "norm weight"),
                    vector_or_null(tensors[1], norm_width, "norm bias"), static_cast<float>(eps)};
    return {norm, {*tensors[2], tensors[3], is_packed}};
}

bool is_bf16(const Tensor& tensor) {
    const ScalarType dtype = tensor.scalar_type();
    STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                    "rows and weights must be float32 or bfloat16");
    return dtype == ScalarType::BFloat16;
}

// Rows of a contiguous matrix from `row` and `column` on.
RowsIn rows_in(const Tensor& matrix, int64_t row, int64_t column = 0) {
    const int64_t stride = matrix.size(1);
    const auto* values = static_cast<const char*>(matrix.const_data_ptr());
    return {values + (row * stride + column) * matrix.element_size(), stride, is_bf16(matrix)};
}

RowsOut rows_out(const Tensor& matrix, int64_t row) {
    const int64_t stride = matrix.size(1);
    auto* values = static_cast<char*>(matrix.mutable_data_ptr());
    return {values + row * stride * matrix.element_size(), stride, is_bf16(matrix)};
}

// What a linear reads, one block at a time.
class LinearInput {
  public:
    LinearInput(const Tensor& x, int64_t width, const LinearTensors& linear)
        : rows_(torch::stable::new_empty(x, {filled_rows(std::min(x.size(0), kBlockRows)), width},
                                         linear.weight.scalar_type())) {}

    RowsOut rows() const { return rows_out(rows_, 0); }

    // The first num_rows, written by the caller, and zeros up to a number that oneDNN knows.
    Tensor filled(int64_t num_rows) {
        const int64_t filled = filled_rows(num_rows);
        const int64_t row_bytes = rows_.size(1) * rows_.element_size();
        std::memset(static_cast<char*>(rows_.mutable_data_ptr()) + num_rows * row_bytes, 0,
                    (filled - num_rows) * row_bytes);
        return torch::stable::narrow(rows_, 0, 0, filled);
    }

  private:
    Tensor rows_;
};

void check_result(const Tensor& result, int64_t width) {
    STD_TORCH_CHECK(result.dim() == 2 && result.size(1) == width && result.is_contiguous(),
                    "a linear gave rows of ", result.size(result.dim() - 1), ", not of ", width);
}

// projected = the linear of normed x, SiLU on its first silu_width columns.
class Projection {
  public:
    Projection(const Half& half, int64_t silu_width, const Tensor& x, const Tensor& projected)
        : half_(half),
          silu_width_(silu_width),
          x_(x),
          projected_(projected),
          normed_(x, x.size(1), half.linear) {
        STD_TORCH_CHECK(silu_width >= 0 && silu_width <= projected.size(1), "silu_width is ",
                        silu_width, " of ", projected.size(1), " columns");
    }

    void run(int64_t first, int64_t num_rows) {
        norm_rows({rows_in(x_, first), normed_.rows(), half_.norm, x_.size(1)}, num_rows);
        const Tensor result = linear(normed_.filled(num_rows), half_.linear);
        const int64_t width = projected_.size(1);
        check_result(result, width);
        silu_rows({rows_in(result, 0), rows_out(projected_, first), silu_width_, width}, num_rows);
    }

  private:
    Half half_;
    int64_t silu_width_;
    Tensor x_;
    Tensor projected_;
    LinearInput normed_;
};

GateForm form_named(const std::string& name) {
    if (name == "product") {
        return GateForm::kProduct;
    }
    STD_TORCH_CHECK(name == "attended" || name == "normed", "no gate has the form ", name);
    return name == "attended" ? GateForm::kAttended : GateForm::kNormed;
}

// x = the linear of gated attended rows, plus x with a residual.
class Output {
  public:
    Output(const Half& half, GateArgs gate, bool has_residual, const Tensor& x,
           const Tensor& projected, const Tensor& attended)
        : half_(half),
          gate_(gate),
          has_residual_(has_residual),
          x_(x),
          projected_(projected),
          attended_(attended),
          gated_(x, gate.num_groups * gate.group_width * (gate.form == GateForm::kProduct ? 1 : 3),
                 half.linear) {}

    void run(int64_t first, int64_t num_rows) {
        gate_.u = rows_in(projected_, first);
        gate_.attended = rows_in(attended_, first);
        gate_.out = gated_.rows();
        gate_rows(gate_, num_rows);
        const Tensor result = linear(gated_.filled(num_rows), half_.linear);
        check_result(result, x_.size(1));
        const RowsIn x = has_residual_ ? rows_in(x_, first) : RowsIn{};
        add_rows({rows_in(result, 0), x, rows_out(x_, first), x_.size(1)}, num_rows);
    }

  private:
    Half half_;
    GateArgs gate_;
    bool has_residual_;
    Tensor x_;
    Tensor projected_;
    Tensor attended_;
    LinearInput gated_;
};

// fn(first, num_rows) for all rows.
template <class Fn>
void each_block(int64_t num_rows, const Fn& fn) {
    for (int64_t first = 0; first < num_rows; first += kBlockRows) {
        fn(first, std::min(kBlockRows, num_rows - first));
    }
}

void check_rows(const Tensor& x, const Tensor& projected) {
    check_matrix(x, x.scalar_type(), x.size(0), -1, "x");
    check_matrix(projected, x.scalar_type(), x.size(0), -1, "projected");
}

void hstu_project(Tensor x, std::vector<optional<Tensor>> input, bool is_packed, double eps,
                  int64_t silu_width, Tensor projected) {
    check_rows(x, projected);
    Projection projection(half_of(input, x.size(1), eps, is_packed), silu_width, x, projected);
    each_block(x.size(0), [&](int64_t first, int64_t count) { projection.run(first, count); });
}

// Where a layer's parts of `projected` begin.
struct Columns {
    int64_t v;
    int64_t q;
    int64_t k;
    int64_t end;
};

Columns columns_of(const AttentionArgs& args) {
    const int64_t v_width = static_cast<int64_t>(args.num_heads) * args.v_dim;
    const int64_t qk_width = static_cast<int64_t>(args.num_heads) * args.qk_dim;
    return {v_width, 2 * v_width, 2 * v_width + qk_width, 2 * v_width + 2 * qk_width};
}

// Columns of `projected` from `column` on to the slots of pages.
void append(const Tensor& projected, int64_t column, const Tensor& append_rows, const Tensor& slots,
            const Tensor& pages) {
    AppendArgs args = append_args(slots, pages);
    args.rows = static_cast<const char*>(rows_in(projected, 0, column).values);
    args.row_stride = projected.size(1) * static_cast<int64_t>(projected.element_size());
    check_vector(append_rows, ScalarType::Long, "append_rows");
    check_length(append_rows, args.num_slots, "append_rows");
    check_values<int64_t>(append_rows, 0, projected.size(0), "append_rows");
    args.row_of = values_of<int64_t>(append_rows);
    mtserve::append_rows(args);
}

// The attention of a layer whose rows stand in `projected`. step: row_indptr, kv_lo, kv_hi,
// block_table, suffix_of_row, chains, append_rows, slots. bias: none, or the six of BiasTensors.
AttentionArgs attention_of(const Tensor& projected, const Tensor& attended, const Tensor& k_pages,
                           const Tensor& v_pages, const std::vector<Tensor>& step,
                           const std::vector<Tensor>& bias) {
    AttentionArgs args;
    set_pages(args, k_pages, v_pages);
    STD_TORCH_CHECK(k_pages.scalar_type() == projected.scalar_type(),
                    "pages must have the dtype of the rows");
    args.num_rows = projected.size(0);
    args.num_heads = args.num_kv_heads;
    const Columns columns = columns_of(args);
    STD_TORCH_CHECK(projected.size(1) == columns.end, "projected has ", projected.size(1),
                    " columns, not ", columns.end);
    check_matrix(attended, ScalarType::Float, args.num_rows, columns.v, "attended");
    const auto part = [&](int64_t column) {
        const RowsIn rows = rows_in(projected, 0, column);
        return HeadRows{rows.values, rows.stride};
    };
    args.q = part(columns.q);
    args.k = part(columns.k);
    args.v = part(columns.v);
    STD_TORCH_CHECK(step.size() == 8, "a step has 8 tensors, not ", step.size());
    set_step(args, {step[0], step[1], step[2], step[3], step[4], step[5]});
    STD_TORCH_CHECK(bias.empty() || bias.size() == 6, "a bias has 6 tensors, not ", bias.size());
    if (!bias.empty()) {
        set_bias(args, {bias[0], bias[1], bias[2], bias[3], bias[4], bias[5]});
    }
    args.out = mutable_values_of<float>(attended);
    return args;
}

void hstu_layer(Tensor x, Tensor projected, Tensor attended, Tensor k_pages, Tensor v_pages,
                std::vector<Tensor> step, std::vector<Tensor> bias, double alpha, double scale,
                std::vector<optional<Tensor>> output, std::string form, bool is_group_norm,
                bool has_residual, std::vector<optional<Tensor>> next_input, bool is_packed,
                double eps, int64_t silu_width) {
    check_rows(x, projected);
    AttentionArgs args = attention_of(projected, attended, k_pages, v_pages, step, bias);
    args.alpha = static_cast<float>(alpha);
    args.scale = static_cast<float>(scale);
    GateArgs gate;
    gate.form = form_named(form);
    gate.is_per_group = is_group_norm;
    gate.num_groups = is_group_norm ? args.num_heads : 1;
    gate.group_width = columns_of(args).v / gate.num_groups;
    const int64_t norm_width = is_group_norm ? gate.num_groups : gate.group_width;
    const Half half = half_of(output, norm_width, eps, is_packed);
    gate.norm = half.norm;
    STD_TORCH_CHECK(!is_group_norm || gate.norm.weight != nullptr, "a group norm has weights");
    Output to_x(half, gate, has_residual, x, projected, attended);
    optional<Projection> to_next;
    if (!next_input.empty()) {
        to_next.emplace(half_of(next_input, x.size(1), eps, is_packed), silu_width, x, projected);
    }

    append(projected, columns_of(args).k, step[6], step[7], k_pages);
    append(projected, columns_of(args).v, step[6], step[7], v_pages);
    attend(args);
    each_block(args.num_rows, [&](int64_t first, int64_t count) {
        to_x.run(first, count);
        if (to_next) {
            to_next->run(first, count);
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(engine, library) {
    library.def(
        "hstu_project(Tensor x, Tensor?[] input, bool is_packed, float eps, int silu_width, "
        "Tensor(a!) projected) -> ()");
    library.def(
        "hstu_layer(Tensor(a!) x, Tensor(b!) projected, Tensor(c!) attended, Tensor(d!) k_pages, "
        "Tensor(e!) v_pages, Tensor[] step, Tensor[] bias, float alpha, float scale, "
        "Tensor?[] output, str form, bool is_group_norm, bool has_residual, "
        "Tensor?[] next_input, bool is_packed, float eps, int silu_width) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(engine, CPU, library) {
    library.impl("hstu_project", TORCH_BOX(&hstu_project));
    library.impl("hstu_layer", TORCH_BOX(&hstu_layer));
}

// A prepacked weight among the arguments.
STABLE_TORCH_LIBRARY_IMPL(engine, MkldnnCPU, library) {
    library.impl("hstu_project", TORCH_BOX(&hstu_project));
    library.impl("hstu_layer", TORCH_BOX(&hstu_layer));
}
