// A test fails by throwing what went wrong.

#pragma once

#include <stdexcept>
#include <string>

namespace mtserve::native_tests {

inline void check(bool holds, const std::string& message) {
    if (!holds) {
        throw std::runtime_error(message);
    }
}

// Each throws at the first fault and returns how many problems it ran.
int test_attention(int num_problems);
int test_copies();
int test_time_buckets();

}  // namespace mtserve::native_tests
