// The chain of page hashes that verifies a user's state: see engine/block_manager/fingerprint.py.

#pragma once

#include <cstdint>

extern "C" {

// hashes[i] = XXH3_64(page i), seeded with the hash before (the first with `seed`).
//
// records: num_pages * page_bytes bytes. page_bytes: above 240; XXH3 hashes shorter ones otherwise.
// hashes: num_pages of them.
void mtserve_hash_chain(const void* records, int64_t num_pages, int64_t page_bytes, uint64_t seed,
                        uint64_t* hashes);
}
