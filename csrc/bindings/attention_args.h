// Checked tensors -> AttentionArgs. Every index that a kernel follows is checked here.

#pragma once

#include <optional>

#include "bindings/checks.h"
#include "cpu/attention.h"

namespace mtserve::bindings {

// The rows of a step, the same for every layer: see engine/attention_backends/base.py.
struct StepTensors {
    Tensor row_indptr;     // int32 [R + 1]
    Tensor kv_lo;          // int32 [T]
    Tensor kv_hi;          // int32 [T]
    Tensor block_table;    // int32 [R, max_blocks]
    Tensor suffix_of_row;  // int32 [T], or empty: no row has a suffix part
    Tensor chains;         // int32 [N, max_chain]
};

struct BiasTensors {
    std::optional<Tensor> position;        // float32 [kTile + 2 n - 1 + kTile]
    std::optional<Tensor> time;            // float32 [129]
    std::optional<Tensor> row_position;    // int64 [T]
    std::optional<Tensor> buckets;         // uint8 [T, stride], stride a multiple of kTile
    std::optional<Tensor> chain_buckets;   // uint8 [N, max_chain]
    std::optional<Tensor> chain_distance;  // int64 [N, max_chain], key's less row's position
};

// Offsets of requests: from 0 to num_rows, never falling.
void check_row_indptr(const Tensor& row_indptr, int64_t num_rows);

// K and V of one layer's pages, [P, S, K, A] and [P, S, K, V], strided.
void set_pages(AttentionArgs& args, const Tensor& k_pages, const Tensor& v_pages);

// q, k, v: [T, H, A], [T, K, A], [T, K, V]; rows may be apart, a row's heads are not.
void set_rows(AttentionArgs& args, const Tensor& q, const Tensor& k, const Tensor& v);

// After set_pages and set_rows. The tensors must outlive args.
void set_step(AttentionArgs& args, const StepTensors& step);

// After set_step.
void set_bias(AttentionArgs& args, const BiasTensors& bias);

}  // namespace mtserve::bindings
