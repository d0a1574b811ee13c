// Time buckets of the `research` bias: see engine/attention_backends/bias.py.

#pragma once

#include <cstdint>

namespace mtserve {

constexpr int kNumEdges = 128;

// Rows [row_indptr[r], row_indptr[r + 1]) belong to request r, whose keys have key_time[r].
struct BucketArgs {
    const int64_t* row_next_time;  // [T]
    const int64_t* key_time;       // [R, num_keys]
    const int32_t* row_indptr;     // [R + 1]
    const int64_t* edges;          // [kNumEdges], ascending
    int64_t num_requests;
    int64_t num_keys;
    int64_t stride;    // of a row of buckets, at least num_keys; 0 behind num_keys
    uint8_t* buckets;  // [T, stride]
};

// buckets[row, key] = how many edges are at most |row_next_time[row] - key_time[key]|,
// which is 2^63 - 1 where an int64 cannot say it.
void time_buckets(const BucketArgs& args);

}  // namespace mtserve
