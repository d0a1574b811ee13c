// The exact top-k of one user over the whole catalogue.

#pragma once

#include <cstdint>

namespace mtserve {

struct ItemTable {
    const void* rows = nullptr;  // [num_items, width]
    int64_t num_items = 0;
    int64_t width = 0;
    bool is_bf16 = false;
    const float* norms = nullptr;  // [num_items], a score is divided by it; null: it is not
};

// scores[i] = user . item first + i, for items [first, stop), with one instruction set. The bits
// depend on user and item only.
using ScoreKernel = void (*)(const ItemTable&, const float* user, int64_t first, int64_t stop,
                             float* scores);

struct TopArgs {
    ItemTable table;
    const int64_t* item_ids = nullptr;  // [num_items], no id twice
    const float* user = nullptr;        // [width]
    const int64_t* excluded = nullptr;  // items that are left out, any order
    int64_t num_excluded = 0;
    int64_t top_k = 0;
    int64_t* ids = nullptr;  // [top_k]
    float* scores = nullptr;
};

// The largest scores, descending; equal scores: the lower id first; NaN last. Returns how many
// there are, at most top_k.
int64_t top_items(const TopArgs& args);

}  // namespace mtserve
