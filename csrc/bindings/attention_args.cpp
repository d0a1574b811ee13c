#include "bindings/attention_args.h"

#include <algorithm>

namespace mtserve::bindings {
namespace {

constexpr int64_t kMost = int64_t{1} << 28;  // keys, heads, dimensions: four times it is an int

ScalarType storage_type(const AttentionArgs& args) {
    return args.is_bf16 ? ScalarType::BFloat16 : ScalarType::Float;
}

HeadRows head_rows(const Tensor& rows, ScalarType dtype, int64_t num_rows, int64_t heads,
                   int64_t width, const char* name) {
    STD_TORCH_CHECK(rows.is_cpu() && rows.dim() == 3 && rows.scalar_type() == dtype, name,
                    " must be three-dimensional, on the CPU and of the pages' dtype");
    STD_TORCH_CHECK(rows.size(0) == num_rows && rows.size(1) == heads && rows.size(2) == width,
                    name, " has the shape [", rows.size(0), ", ", rows.size(1), ", ", rows.size(2),
                    "], not [", num_rows, ", ", heads, ", ", width, "]");
    STD_TORCH_CHECK(num_rows == 0 || (rows.stride(2) == 1 && rows.stride(1) == width), name,
                    "'s heads must stand one after another");
    return {rows.const_data_ptr(), rows.stride(0)};
}

PageRows page_rows(const Tensor& pages, const char* name) {
    STD_TORCH_CHECK(pages.is_cpu() && pages.dim() == 4, name,
                    " must be four-dimensional and on the CPU");
    for (int64_t axis = 1; axis < 4; ++axis) {
        STD_TORCH_CHECK(pages.size(axis) <= kMost, name, " has ", pages.size(axis),
                        " elements on axis ", axis, ", more than ", kMost);
    }
    STD_TORCH_CHECK(pages.stride(3) == 1 && pages.stride(2) == pages.size(3), name,
                    "'s heads must stand one after another");
    return {pages.const_data_ptr(), pages.stride(0), pages.stride(1)};
}

}  // namespace

void check_row_indptr(const Tensor& row_indptr, int64_t num_rows) {
    const int64_t requests = row_indptr.numel() - 1;
    STD_TORCH_CHECK(requests >= 0, "row_indptr is empty");
    const auto* indptr = values_of<int32_t>(row_indptr);
    STD_TORCH_CHECK(indptr[0] == 0 && indptr[requests] == num_rows, "row_indptr must go from 0 to ",
                    num_rows);
    for (int64_t request = 0; request < requests; ++request) {
        STD_TORCH_CHECK(indptr[request] <= indptr[request + 1], "row_indptr must not fall");
    }
}

void set_pages(AttentionArgs& args, const Tensor& k_pages, const Tensor& v_pages) {
    args.k_pages = page_rows(k_pages, "k_pages");
    args.v_pages = page_rows(v_pages, "v_pages");
    const ScalarType dtype = k_pages.scalar_type();
    STD_TORCH_CHECK((dtype == ScalarType::Float || dtype == ScalarType::BFloat16) &&
                        v_pages.scalar_type() == dtype,
                    "pages must be float32 or bfloat16, both alike");
    STD_TORCH_CHECK(k_pages.size(0) == v_pages.size(0) && k_pages.size(1) == v_pages.size(1) &&
                        k_pages.size(2) == v_pages.size(2),
                    "k_pages and v_pages must have the same pages, slots and heads");
    STD_TORCH_CHECK(k_pages.size(2) > 0, "pages must have at least one head");
    args.is_bf16 = dtype == ScalarType::BFloat16;
    args.page_size = static_cast<int>(k_pages.size(1));
    args.num_pages = k_pages.size(0);
    args.num_kv_heads = static_cast<int>(k_pages.size(2));
    args.qk_dim = static_cast<int>(k_pages.size(3));
    args.v_dim = static_cast<int>(v_pages.size(3));
}

void set_rows(AttentionArgs& args, const Tensor& q, const Tensor& k, const Tensor& v) {
    STD_TORCH_CHECK(q.dim() == 3, "q must be three-dimensional");
    const ScalarType dtype = storage_type(args);
    const int64_t rows = q.size(0), heads = q.size(1);
    STD_TORCH_CHECK(heads >= args.num_kv_heads && heads % args.num_kv_heads == 0, heads,
                    " heads cannot share ", args.num_kv_heads, " key/value heads");
    args.num_rows = rows;
    args.num_heads = static_cast<int>(heads);
    args.q = head_rows(q, dtype, rows, heads, args.qk_dim, "q");
    args.k = head_rows(k, dtype, rows, args.num_kv_heads, args.qk_dim, "k");
    args.v = head_rows(v, dtype, rows, args.num_kv_heads, args.v_dim, "v");
}

void set_step(AttentionArgs& args, const StepTensors& step) {
    const int64_t rows = args.num_rows;
    check_vector(step.row_indptr, ScalarType::Int, "row_indptr");
    check_vector(step.kv_lo, ScalarType::Int, "kv_lo");
    check_vector(step.kv_hi, ScalarType::Int, "kv_hi");
    check_length(step.kv_lo, rows, "kv_lo");
    check_length(step.kv_hi, rows, "kv_hi");
    check_row_indptr(step.row_indptr, rows);
    const int64_t requests = step.row_indptr.numel() - 1;
    check_matrix(step.block_table, ScalarType::Int, requests, -1, "block_table");
    check_values<int32_t>(step.block_table, 0, args.num_pages, "block_table");
    args.max_blocks = step.block_table.size(1);
    check_values<int32_t>(step.kv_lo, 0, int64_t{1} << 31, "kv_lo");
    const int64_t num_keys = std::min(args.max_blocks * args.page_size, kMost);
    check_values<int32_t>(step.kv_hi, 0, num_keys + 1, "kv_hi");
    args.row_indptr = values_of<int32_t>(step.row_indptr);
    args.num_requests = static_cast<int>(requests);
    args.block_table = values_of<int32_t>(step.block_table);
    args.kv_lo = values_of<int32_t>(step.kv_lo);
    args.kv_hi = values_of<int32_t>(step.kv_hi);
    if (step.suffix_of_row.numel() == 0) {
        return;
    }
    check_vector(step.suffix_of_row, ScalarType::Int, "suffix_of_row");
    check_length(step.suffix_of_row, rows, "suffix_of_row");
    check_matrix(step.chains, ScalarType::Int, step.chains.size(0), -1, "chains");
    check_values<int32_t>(step.suffix_of_row, -1, step.chains.size(0), "suffix_of_row");
    check_values<int32_t>(step.chains, -1, rows, "chains");
    args.suffix_of_row = values_of<int32_t>(step.suffix_of_row);
    args.chains = values_of<int32_t>(step.chains);
    args.num_suffix = step.chains.size(0);
    args.max_chain = static_cast<int>(step.chains.size(1));
}

void set_bias(AttentionArgs& args, const BiasTensors& bias) {
    if (!bias.position) {
        return;
    }
    STD_TORCH_CHECK(
        bias.time && bias.row_position && bias.buckets && bias.chain_buckets && bias.chain_distance,
        "a bias needs all of its tensors");
    check_vector(*bias.position, ScalarType::Float, "position");
    check_vector(*bias.time, ScalarType::Float, "time");
    check_vector(*bias.row_position, ScalarType::Long, "row_position");
    check_length(*bias.time, 129, "time");
    check_length(*bias.row_position, args.num_rows, "row_position");
    check_matrix(*bias.buckets, ScalarType::Byte, args.num_rows, -1, "buckets");
    check_values<uint8_t>(*bias.buckets, 0, 129, "buckets");
    if (args.suffix_of_row != nullptr) {
        const int64_t suffixes = args.num_suffix, links = args.max_chain;
        check_matrix(*bias.chain_buckets, ScalarType::Byte, suffixes, links, "chain_buckets");
        check_values<uint8_t>(*bias.chain_buckets, 0, 129, "chain_buckets");
        check_matrix(*bias.chain_distance, ScalarType::Long, suffixes, links, "chain_distance");
    }
    const int64_t reach = (bias.position->numel() - 2 * kTile - 1) / 2;  // longest distance
    STD_TORCH_CHECK(reach >= 0 && bias.position->numel() == 2 * (reach + kTile) + 1,
                    "position must have an odd number of weights and ", kTile,
                    " more on each side");
    const auto* position = values_of<int64_t>(*bias.row_position);
    int64_t last_key = 0;
    for (int64_t row = 0; row < args.num_rows; ++row) {
        if (args.kv_lo[row] < args.kv_hi[row]) {
            const int64_t least = args.kv_hi[row] - 1 - reach, most = args.kv_lo[row] + reach;
            STD_TORCH_CHECK(least <= position[row] && position[row] <= most, "row ", row,
                            " sees a key farther away than ", reach);
            last_key = args.kv_hi[row] > last_key ? args.kv_hi[row] : last_key;
        }
    }
    STD_TORCH_CHECK(bias.buckets->size(1) % kTile == 0 && bias.buckets->size(1) >= last_key,
                    "buckets must have a multiple of ", kTile, " columns, at least ", last_key);
    args.bias.position = values_of<float>(*bias.position) + reach + kTile;
    args.bias.reach = reach;
    args.bias.time = values_of<float>(*bias.time);
    args.bias.row_position = position;
    args.bias.buckets = values_of<uint8_t>(*bias.buckets);
    args.bias.bucket_stride = bias.buckets->size(1);
    args.bias.chain_buckets = values_of<uint8_t>(*bias.chain_buckets);
    args.bias.chain_distance = values_of<int64_t>(*bias.chain_distance);
}

}  // namespace mtserve::bindings
