// Pages <-> one layer of a chunk, on the calling thread.
#pragma once

#include <cstdint>

namespace mtserve {

// chunk[first + i] = pages[page_ids[i]] for i in [0, count); rows are row_bytes long.
// The caller has checked every id and that first + count fits.
void gather_pages(const uint8_t* pages, const int32_t* page_ids, int64_t count, int64_t row_bytes,
                  uint8_t* chunk, int64_t first);

// pages[page_ids[i]] = chunk[first + i].
void scatter_pages(const uint8_t* chunk, int64_t first, const int32_t* page_ids, int64_t count,
                   int64_t row_bytes, uint8_t* pages);

}  // namespace mtserve
