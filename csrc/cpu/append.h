// The copy of new keys or values to their slots in the pages.

#pragma once

#include <cstdint>

namespace mtserve {

// Distances are bytes. Slot s is token s % page_size of page s / page_size.
struct AppendArgs {
    const char* rows = nullptr;
    int64_t row_stride = 0;
    int64_t row_bytes = 0;
    const int64_t* row_of = nullptr;  // [num_slots], the row that each slot takes; null: in order
    const int64_t* slots = nullptr;   // [num_slots]
    int64_t num_slots = 0;
    char* pages = nullptr;
    int64_t page_stride = 0;
    int64_t token_stride = 0;
    int64_t page_size = 0;
};

// On torch's threads. No slot comes twice.
void append_rows(const AppendArgs& args);

}  // namespace mtserve
