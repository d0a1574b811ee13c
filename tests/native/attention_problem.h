// Random problems of attention, ragged in every way that AttentionArgs allows.
//
// Whatever no row may read is a NaN, an index out of bounds, or guarded memory: slots that no row
// of the request sees, block tables behind the last page, new keys in no chain, the gaps of
// strides.

#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cpu/attention.h"
#include "native/guarded.h"

namespace mtserve::native_tests {

using Random = std::mt19937_64;

// Of [low, high].
inline int any_of(Random& random, int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
}

float widened(uint16_t bf16);

// Numbers in the problem's dtype; bytes never written are NaN.
struct Numbers {
    bool is_bf16 = false;
    Guarded<uint16_t> halves;
    Guarded<float> floats;

    Numbers() = default;
    Numbers(bool bf16, int64_t count, Flush flush);

    void set(int64_t at, float value);  // rounded to the dtype
    float get(int64_t at) const { return is_bf16 ? widened(halves[at]) : floats[at]; }
    const void* memory() const;
};

// Owns everything that args points at.
struct AttentionProblem {
    AttentionArgs args;
    Numbers q, k, v, k_pages, v_pages;
    Guarded<int32_t> block_table, row_indptr, kv_lo, kv_hi, suffix_of_row, chains;
    Guarded<float> position, time;
    Guarded<int64_t> row_position, chain_distance;
    Guarded<uint8_t> buckets, chain_buckets;
    Guarded<float> out, lse;

    std::string description() const;
};

// The problem of a seed. args.out and args.lse are set and hold NaN.
AttentionProblem random_problem(uint64_t seed);

}  // namespace mtserve::native_tests
