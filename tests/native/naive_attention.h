// Attention in double precision, one row and key after the other.

#pragma once

#include <vector>

#include "native/attention_problem.h"

namespace mtserve::native_tests {

struct Exact {
    std::vector<double> out;  // [T, H, V]
    std::vector<double> lse;  // [T, H], softmax only
};

Exact naive_attention(const AttentionProblem& problem);

}  // namespace mtserve::native_tests
