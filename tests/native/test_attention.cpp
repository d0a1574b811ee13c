#include <cmath>
#include <cstring>

#include "native/check.h"
#include "native/naive_attention.h"
#include "native/threads.h"

namespace mtserve::native_tests {
namespace {

// Relative errors, as root of mean squares: of sums in float32, and of weights that were rounded to
// bfloat16.
constexpr double kFloatError = 2e-6;
constexpr double kBf16Error = 5e-3;

double relative_error(const Guarded<float>& values, const std::vector<double>& exact) {
    double squares = 0, errors = 0;
    for (int64_t i = 0; i < values.size(); ++i) {
        if (std::isinf(exact[i])) {
            check(values[i] == static_cast<float>(exact[i]), "a row that sees nothing");
            continue;
        }
        const double error = values[i] - exact[i];
        squares += exact[i] * exact[i];
        errors += error * error;
    }
    return errors == 0 ? 0 : std::sqrt(errors / squares);
}

std::vector<uint32_t> bits_of(const Guarded<float>& values) {
    std::vector<uint32_t> bits(values.size());
    if (!bits.empty()) {
        std::memcpy(bits.data(), values.get(), bits.size() * sizeof(float));
    }
    return bits;
}

}  // namespace

int test_attention(int num_problems) {
    for (int seed = 0; seed < num_problems; ++seed) {
        AttentionProblem problem = random_problem(seed);
        const std::string name = "seed " + std::to_string(seed) + ", " + problem.description();
        const AttentionArgs& args = problem.args;
        set_num_threads(1);
        attend(args);
        const Exact exact = naive_attention(problem);
        const double allowed = args.is_bf16 ? kBf16Error : kFloatError;
        const double error = relative_error(problem.out, exact.out);
        check(error <= allowed, name + ": error " + std::to_string(error));
        if (args.is_softmax) {
            const double lse_error = relative_error(problem.lse, exact.lse);
            check(lse_error <= allowed, name + ": error of lse " + std::to_string(lse_error));
        }
        const std::vector<uint32_t> out = bits_of(problem.out), lse = bits_of(problem.lse);
        set_num_threads(3);
        attend(args);
        check(bits_of(problem.out) == out && bits_of(problem.lse) == lse,
              name + ": bits differ with three threads");
    }
    return num_problems;
}

}  // namespace mtserve::native_tests
