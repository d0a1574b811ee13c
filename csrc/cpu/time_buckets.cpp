#include "cpu/time_buckets.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/tasks.h"

namespace mtserve {
namespace {

constexpr int64_t kRowsOfTask = 16;

// Edges grow by a constant factor, so that between two powers of two there are two or three: a
// search begins at the power below.
class EdgeSearch {
  public:
    explicit EdgeSearch(const int64_t* edges) : edges_(edges) {
        first_[0] = 0;
        for (int bits = 1; bits < 64; ++bits) {
            const int64_t least = int64_t{1} << (bits - 1);
            first_[bits] =
                static_cast<uint8_t>(std::upper_bound(edges, edges + kNumEdges, least) - edges);
        }
    }

    uint8_t bucket(int64_t seconds) const {
        if (seconds <= 0) {
            return 0;
        }
        int bucket = first_[64 - __builtin_clzll(seconds)];
        while (bucket < kNumEdges && edges_[bucket] <= seconds) {
            ++bucket;
        }
        return static_cast<uint8_t>(bucket);
    }

  private:
    const int64_t* edges_;
    uint8_t first_[64];
};

// Times that are farther apart than an int64 can say are as far apart as it can.
int64_t seconds_between(int64_t a, int64_t b) {
    int64_t apart;
    return __builtin_sub_overflow(std::max(a, b), std::min(a, b), &apart) ? INT64_MAX : apart;
}

}  // namespace

void time_buckets(const BucketArgs& args) {
    const EdgeSearch search(args.edges);
    struct Rows {
        int64_t request;
        int64_t first;
        int64_t stop;
    };
    std::vector<Rows> tasks;
    for (int64_t request = 0; request < args.num_requests; ++request) {
        const int64_t stop = args.row_indptr[request + 1];
        for (int64_t row = args.row_indptr[request]; row < stop; row += kRowsOfTask) {
            tasks.push_back({request, row, std::min(row + kRowsOfTask, stop)});
        }
    }
    run_tasks(static_cast<int64_t>(tasks.size()), num_threads(), [&](int64_t i) {
        const int64_t* key_time = args.key_time + tasks[i].request * args.num_keys;
        for (int64_t row = tasks[i].first; row < tasks[i].stop; ++row) {
            uint8_t* buckets = args.buckets + row * args.stride;
            for (int64_t key = 0; key < args.num_keys; ++key) {
                buckets[key] =
                    search.bucket(seconds_between(args.row_next_time[row], key_time[key]));
            }
            std::memset(buckets + args.num_keys, 0, args.stride - args.num_keys);
        }
    });
}

}  // namespace mtserve
