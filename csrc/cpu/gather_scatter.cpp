#include "gather_scatter.h"

#include <cstddef>
#include <cstring>

namespace mtserve {

namespace {

// Length of the run of consecutive ids that begins at `start`.
int64_t run_length(const int32_t* page_ids, int64_t start, int64_t count) {
    int64_t length = 1;
    while (start + length < count && page_ids[start + length] == page_ids[start] + length) {
        ++length;
    }
    return length;
}

}  // namespace

void gather_pages(const uint8_t* pages, const int32_t* page_ids, int64_t count, int64_t row_bytes,
                  uint8_t* chunk, int64_t first) {
    for (int64_t i = 0; i < count;) {
        const int64_t length = run_length(page_ids, i, count);
        std::memcpy(chunk + (first + i) * row_bytes, pages + page_ids[i] * row_bytes,
                    static_cast<size_t>(length * row_bytes));
        i += length;
    }
}

void scatter_pages(const uint8_t* chunk, int64_t first, const int32_t* page_ids, int64_t count,
                   int64_t row_bytes, uint8_t* pages) {
    for (int64_t i = 0; i < count;) {
        const int64_t length = run_length(page_ids, i, count);
        std::memcpy(pages + page_ids[i] * row_bytes, chunk + (first + i) * row_bytes,
                    static_cast<size_t>(length * row_bytes));
        i += length;
    }
}

}  // namespace mtserve
