#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "cpu/time_buckets.h"
#include "native/attention_problem.h"
#include "native/check.h"
#include "native/threads.h"

namespace mtserve::native_tests {

int test_time_buckets() {
    constexpr int kProblems = 20;
    for (int seed = 0; seed < kProblems; ++seed) {
        Random random(seed);
        const Flush flush = seed % 2 == 0 ? Flush::kEnd : Flush::kStart;
        const int requests = any_of(random, 1, 3), keys = any_of(random, 0, 70);
        const int64_t stride = (keys + 63) / 64 * 64;
        Guarded<int64_t> edges(kNumEdges, flush);
        for (int64_t i = 0; i < kNumEdges; ++i) {
            edges[i] = static_cast<int64_t>(std::ceil(std::exp(0.301 * static_cast<double>(i))));
        }
        Guarded<int32_t> row_indptr(requests + 1, flush);
        row_indptr[0] = 0;
        for (int64_t i = 0; i < requests; ++i) {
            row_indptr[i + 1] = row_indptr[i] + any_of(random, 0, 40);
        }
        const int64_t rows = row_indptr[requests];
        Guarded<int64_t> next_time(rows, flush), key_time(requests * keys, flush);
        for (Guarded<int64_t>* times : {&next_time, &key_time}) {
            for (int64_t i = 0; i < times->size(); ++i) {
                (*times)[i] = static_cast<int64_t>(random() >> any_of(random, 2, 63));
            }
        }
        Guarded<uint8_t> buckets(rows * stride, flush);
        set_num_threads(3);
        time_buckets({next_time.get(), key_time.get(), row_indptr.get(), edges.get(), requests,
                      keys, stride, buckets.get()});
        for (int64_t request = 0; request < requests; ++request) {
            for (int64_t row = row_indptr[request]; row < row_indptr[request + 1]; ++row) {
                for (int64_t key = 0; key < stride; ++key) {
                    int64_t expected = 0;
                    if (key < keys) {
                        const int64_t apart =
                            std::abs(next_time[row] - key_time[request * keys + key]);
                        expected = std::count_if(edges.get(), edges.get() + kNumEdges,
                                                 [&](int64_t edge) { return edge <= apart; });
                    }
                    check(buckets[row * stride + key] == expected,
                          "time bucket of seed " + std::to_string(seed));
                }
            }
        }
    }
    return kProblems;
}

}  // namespace mtserve::native_tests
