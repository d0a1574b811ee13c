// From records to rows: table look-ups and dense projections, summed in float32. See
// engine/models/hstu/embedding.py.

#pragma once

#include <cstdint>

namespace mtserve {

// What one table adds to the output columns [offset, offset + width) of a row: the table row that
// the record's column names (nothing if negative), or with num_dense the sum of so many float
// columns times their table rows.
struct EmbeddingTerm {
    const void* table = nullptr;  // [rows, width], of the output's dtype
    int64_t width = 0;
    int64_t column = 0;
    int64_t num_dense = 0;
    int64_t offset = 0;
};

// out = (sum of the first num_scaled terms) * scale + (sum of the others), in the terms' order.
struct EmbeddingArgs {
    const int64_t* records = nullptr;  // [T, num_columns]; a float column has its bits
    int64_t num_columns = 0;
    const EmbeddingTerm* terms = nullptr;
    int64_t num_terms = 0;
    int64_t num_scaled = 0;
    float scale = 1.0f;
    int64_t width = 0;
    bool is_bf16 = false;
    void* out = nullptr;  // [T, width]
};

// Rows [first, stop) with one instruction set; `sums` [3, width] is scratch.
using EmbedKernel = void (*)(const EmbeddingArgs&, int64_t first, int64_t stop, float* sums);

// Rows [0, num_rows), on torch's threads.
void embed_rows(const EmbeddingArgs& args, int64_t num_rows);

}  // namespace mtserve
