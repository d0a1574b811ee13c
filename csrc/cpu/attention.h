// Attention of query rows over history pages and suffix chains. See
// engine/attention_backends/base.py for the meaning of the fields, and attention_kernel.h for the
// order of every sum.
//
// Shapes: T rows, R requests, H heads, K kv heads, A qk_dim, V v_dim, S page_size, N suffix rows.

#pragma once

#include <cstdint>
#include <limits>

namespace mtserve {

// Rows of one head that stand `stride` elements apart: row r, head h, is at values + r * stride +
// h * width. float or bfloat16 bits, as AttentionArgs says.
struct HeadRows {
    const void* values = nullptr;
    int64_t stride = 0;
};

// K or V of a layer's pages: token t of page p is at values + p * page_stride + t * token_stride.
struct PageRows {
    const void* values = nullptr;
    int64_t page_stride = 0;
    int64_t token_stride = 0;
};

// The `research` bias. `position` points at the weight of distance 0 and may be read kTile places
// beyond the distances of visible keys, on both sides.
struct AttentionBias {
    const float* position = nullptr;
    const float* time = nullptr;            // [129]
    const int64_t* row_position = nullptr;  // [T]
    const uint8_t* buckets = nullptr;       // [T, bucket_stride], time bucket of row and key
    int64_t bucket_stride = 0;
    const uint8_t* chain_buckets = nullptr;   // [N, max_chain]
    const int64_t* chain_distance = nullptr;  // [N, max_chain], key's less row's position
    int64_t reach = 0;                        // `position` has weights of [-reach, reach]
};

struct AttentionArgs {
    bool is_bf16 = false;
    bool is_softmax = false;
    int num_heads = 0;
    int num_kv_heads = 0;
    int qk_dim = 0;
    int v_dim = 0;
    float alpha = 1.0f;
    float scale = 1.0f;  // on the result
    HeadRows q;          // [T, H, A]
    HeadRows k;          // [T, K, A], new keys, read by suffix rows only
    HeadRows v;          // [T, K, V]
    PageRows k_pages;
    PageRows v_pages;
    int page_size = 0;
    int64_t num_pages = 0;
    int64_t num_rows = 0;
    int64_t num_suffix = 0;
    const int32_t* block_table = nullptr;  // [R, max_blocks]
    int64_t max_blocks = 0;
    const int32_t* row_indptr = nullptr;  // [R + 1]
    int num_requests = 0;
    const int32_t* kv_lo = nullptr;          // [T]
    const int32_t* kv_hi = nullptr;          // [T]
    const int32_t* suffix_of_row = nullptr;  // [T], -1: none; null: no row has one
    const int32_t* chains = nullptr;         // [N, max_chain], rows read, -1: none
    int max_chain = 0;
    AttentionBias bias;
    float* out = nullptr;  // [T, H, V]
    float* lse = nullptr;  // [T, H], softmax only, may be null
};

// Rows [first, stop) of one request in `num_heads` heads. Many rows take one head at a time, few
// rows all heads, so that a token's keys, which stand one head after another, are read in one go.
struct QueryBlock {
    int request;
    int first;
    int stop;
    int lo;  // history positions [lo, hi) that some row sees
    int hi;
    int first_head;
    int num_heads;

    int num_rows() const { return stop - first; }

    // Rows of all heads: head by head.
    int num_sums() const { return num_rows() * num_heads; }
};

constexpr int kTile = 64;      // keys of a tile, at positions [64 k, 64 k + 64)
constexpr int kRange = 1024;   // keys summed before they are added to the total
constexpr int kMaxSums = 192;  // rows times heads of a block

// Where no score was seen. Finite, so that its distance to any score has an exponential.
constexpr float kLowestTop = std::numeric_limits<float>::lowest();

// Sums over one range of keys, of a block's rows in every head: acc [sums, padded v_dim], top and
// total [sums].
struct RangeSums {
    float* acc;
    float* top;    // softmax: largest score, at least kLowestTop
    float* total;  // softmax: sum of exp(score - top)
};

// What attention needs of one instruction set.
struct AttentionKernels {
    // Floats of RangeSums::acc for a row.
    int64_t (*padded_v_dim)(const AttentionArgs&);
    // Bytes that prepare_block and add_range may use.
    int64_t (*workspace_bytes)(const AttentionArgs&);
    // Convert the block's queries into the workspace.
    void (*prepare_block)(const AttentionArgs&, const QueryBlock&, char* workspace);
    // Set the sums of the keys [first, stop), which lie in one range.
    void (*sum_range)(const AttentionArgs&, const QueryBlock&, int first, int stop, char* workspace,
                      RangeSums);
    // Add a range's sums to the running ones, in order of the ranges.
    void (*merge_range)(const AttentionArgs&, int num_sums, RangeSums total, RangeSums range);
    // Add the suffix part, normalise, scale, and write the rows of out and lse.
    void (*finish_block)(const AttentionArgs&, const QueryBlock&, RangeSums total);
};

// All rows, on torch's threads. Bits do not depend on their number.
void attend(const AttentionArgs& args);

}  // namespace mtserve
