// Attention, and the copy of new keys and values to their slots.

#include "cpu/attention.h"

#include <torch/csrc/stable/library.h>

#include "bindings/append.h"
#include "bindings/attention_args.h"
#include "cpu/isa.h"
#include "cpu/time_buckets.h"

namespace {

using mtserve::bindings::ScalarType;
using mtserve::bindings::Tensor;
using std::optional;

void attention(Tensor q, Tensor k, Tensor v, Tensor k_pages, Tensor v_pages, Tensor row_indptr,
               Tensor kv_lo, Tensor kv_hi, Tensor block_table, Tensor suffix_of_row, Tensor chains,
               optional<Tensor> bias_position, optional<Tensor> bias_time,
               optional<Tensor> row_position, optional<Tensor> buckets,
               optional<Tensor> chain_buckets, optional<Tensor> chain_distance, double alpha,
               double scale, bool is_softmax, Tensor out, optional<Tensor> lse) {
    mtserve::AttentionArgs args;
    mtserve::bindings::set_pages(args, k_pages, v_pages);
    mtserve::bindings::set_rows(args, q, k, v);
    const mtserve::bindings::StepTensors step{row_indptr,  kv_lo,         kv_hi,
                                              block_table, suffix_of_row, chains};
    mtserve::bindings::set_step(args, step);
    const mtserve::bindings::BiasTensors bias{bias_position, bias_time,     row_position,
                                              buckets,       chain_buckets, chain_distance};
    mtserve::bindings::set_bias(args, bias);
    args.is_softmax = is_softmax;
    args.alpha = static_cast<float>(alpha);
    args.scale = static_cast<float>(scale);
    STD_TORCH_CHECK(out.is_cpu() && out.is_contiguous() && out.scalar_type() == ScalarType::Float,
                    "out must be float32, contiguous and on the CPU");
    mtserve::bindings::check_length(out, args.num_rows * args.num_heads * args.v_dim, "out");
    args.out = static_cast<float*>(out.mutable_data_ptr());
    if (lse) {
        STD_TORCH_CHECK(
            lse->is_cpu() && lse->is_contiguous() && lse->scalar_type() == ScalarType::Float,
            "lse must be float32, contiguous and on the CPU");
        mtserve::bindings::check_length(*lse, args.num_rows * args.num_heads, "lse");
        args.lse = static_cast<float*>(lse->mutable_data_ptr());
    }
    mtserve::attend(args);
}

// Rows [n, K, width] to slots of pages [P, S, K, width].
void write_rows(const Tensor& rows, const Tensor& slots, const Tensor& pages, const char* name) {
    mtserve::AppendArgs args = mtserve::bindings::append_args(slots, pages);
    STD_TORCH_CHECK(rows.is_cpu() && rows.dim() == 3 && rows.scalar_type() == pages.scalar_type(),
                    name, " must be three-dimensional, on the CPU and of the pages' dtype");
    STD_TORCH_CHECK(rows.size(0) == slots.numel() && rows.size(1) == pages.size(2) &&
                        rows.size(2) == pages.size(3),
                    name, " does not fit its slots and pages");
    STD_TORCH_CHECK(slots.numel() == 0 || (rows.stride(2) == 1 && rows.stride(1) == rows.size(2)),
                    name, "'s heads must stand one after another");
    args.rows = static_cast<const char*>(rows.const_data_ptr());
    args.row_stride = rows.stride(0) * static_cast<int64_t>(rows.element_size());
    mtserve::append_rows(args);
}

void append_kv(Tensor k, Tensor v, Tensor slots, Tensor k_pages, Tensor v_pages) {
    write_rows(k, slots, k_pages, "k");
    write_rows(v, slots, v_pages, "v");
}

void time_buckets(Tensor row_next_time, Tensor key_time, Tensor row_indptr, Tensor edges,
                  Tensor buckets) {
    using namespace mtserve::bindings;
    check_vector(row_next_time, ScalarType::Long, "row_next_time");
    check_vector(row_indptr, ScalarType::Int, "row_indptr");
    check_vector(edges, ScalarType::Long, "edges");
    check_length(edges, mtserve::kNumEdges, "edges");
    const int64_t rows = row_next_time.numel(), requests = row_indptr.numel() - 1;
    check_row_indptr(row_indptr, rows);
    check_matrix(key_time, ScalarType::Long, requests, -1, "key_time");
    check_matrix(buckets, ScalarType::Byte, rows, -1, "buckets");
    STD_TORCH_CHECK(buckets.size(1) >= key_time.size(1), "buckets has ", buckets.size(1),
                    " columns for ", key_time.size(1), " keys");
    mtserve::time_buckets({values_of<int64_t>(row_next_time), values_of<int64_t>(key_time),
                           values_of<int32_t>(row_indptr), values_of<int64_t>(edges), requests,
                           key_time.size(1), buckets.size(1), mutable_values_of<uint8_t>(buckets)});
}

std::string cpu_isa() {
    return mtserve::isa_name(mtserve::chosen_isa());
}

// Those of the machine, with spaces between them, the best one last.
std::string machine_isas() {
    std::string names;
    for (const mtserve::Isa isa : mtserve::kAllIsas) {
        if (mtserve::machine_has(isa)) {
            names += (names.empty() ? "" : " ") + std::string(mtserve::isa_name(isa));
        }
    }
    return names;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(engine, library) {
    library.def(
        "attention(Tensor q, Tensor k, Tensor v, Tensor k_pages, Tensor v_pages, "
        "Tensor row_indptr, Tensor kv_lo, Tensor kv_hi, Tensor block_table, Tensor suffix_of_row, "
        "Tensor chains, Tensor? bias_position, Tensor? bias_time, Tensor? row_position, "
        "Tensor? buckets, Tensor? chain_buckets, Tensor? chain_distance, float alpha, float scale, "
        "bool is_softmax, Tensor(a!) out, Tensor(b!)? lse) -> ()");
    library.def(
        "append_kv(Tensor k, Tensor v, Tensor slots, Tensor(a!) k_pages, Tensor(b!) v_pages) -> "
        "()");
    library.def(
        "time_buckets(Tensor row_next_time, Tensor key_time, Tensor row_indptr, Tensor edges, "
        "Tensor(a!) buckets) -> ()");
    library.def("cpu_isa() -> str");
    library.def("machine_isas() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(engine, CPU, library) {
    library.impl("attention", TORCH_BOX(&attention));
    library.impl("append_kv", TORCH_BOX(&append_kv));
    library.impl("time_buckets", TORCH_BOX(&time_buckets));
}

STABLE_TORCH_LIBRARY_IMPL(engine, CompositeExplicitAutograd, library) {
    library.impl("cpu_isa", TORCH_BOX(&cpu_isa));
    library.impl("machine_isas", TORCH_BOX(&machine_isas));
}
