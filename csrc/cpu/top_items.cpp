#include "cpu/top_items.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/tasks.h"

namespace mtserve {
namespace {

constexpr int64_t kItemsOfBlock = 1024;
constexpr int64_t kTasksPerThread = 4;

struct Candidate {
    float score;
    int64_t id;
};

// The order of an answer. Total, so the best k do not depend on how the catalogue is cut.
bool is_better(const Candidate& a, const Candidate& b) {
    const float a_rank = std::isnan(a.score) ? -INFINITY : a.score;
    const float b_rank = std::isnan(b.score) ? -INFINITY : b.score;
    return a_rank != b_rank ? a_rank > b_rank : a.id < b.id;
}

// The best k candidates seen so far, the worst of them on top.
class BestItems {
  public:
    explicit BestItems(int64_t k) : k_(k) {}

    bool would_take(const Candidate& candidate) const {
        return static_cast<int64_t>(heap_.size()) < k_ || is_better(candidate, heap_.front());
    }

    void take(const Candidate& candidate) {
        if (static_cast<int64_t>(heap_.size()) == k_) {
            std::pop_heap(heap_.begin(), heap_.end(), is_better);
            heap_.back() = candidate;
        } else {
            heap_.push_back(candidate);
        }
        std::push_heap(heap_.begin(), heap_.end(), is_better);
    }

    const std::vector<Candidate>& candidates() const { return heap_; }

  private:
    int64_t k_;
    std::vector<Candidate> heap_;
};

}  // namespace

int64_t top_items(const TopArgs& args) {
    if (args.top_k == 0) {
        return 0;
    }
    std::vector<int64_t> excluded(args.excluded, args.excluded + args.num_excluded);
    std::sort(excluded.begin(), excluded.end());
    const ScoreKernel kernel = kernels().score;
    const int64_t blocks = (args.table.num_items + kItemsOfBlock - 1) / kItemsOfBlock;
    const int64_t tasks = std::min(blocks, kTasksPerThread * num_threads());
    std::vector<BestItems> found(tasks, BestItems(args.top_k));
    run_tasks(tasks, num_threads(), [&](int64_t task) {
        float scores[kItemsOfBlock];
        const int64_t stop_block = blocks * (task + 1) / tasks;
        for (int64_t block = blocks * task / tasks; block < stop_block; ++block) {
            const int64_t first = block * kItemsOfBlock;
            const int64_t stop = std::min(first + kItemsOfBlock, args.table.num_items);
            kernel(args.table, args.user, first, stop, scores);
            for (int64_t item = first; item < stop; ++item) {
                const Candidate candidate{scores[item - first], args.item_ids[item]};
                if (found[task].would_take(candidate) &&
                    !std::binary_search(excluded.begin(), excluded.end(), item)) {
                    found[task].take(candidate);
                }
            }
        }
    });
    std::vector<Candidate> best;
    for (const BestItems& part : found) {
        best.insert(best.end(), part.candidates().begin(), part.candidates().end());
    }
    const auto count = std::min(args.top_k, static_cast<int64_t>(best.size()));
    std::partial_sort(best.begin(), best.begin() + count, best.end(), is_better);
    for (int64_t i = 0; i < count; ++i) {
        args.ids[i] = best[i].id;
        args.scores[i] = best[i].score;
    }
    return count;
}

}  // namespace mtserve
