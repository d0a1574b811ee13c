#include "cpu/attention.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/tasks.h"

namespace mtserve {
namespace {

// Products below which starting a second thread costs more than it saves.
constexpr double kSmallWork = 2e6;
constexpr int kMinQueryRows = 24;
constexpr int kFewRows = 24;
constexpr int kTasksPerThread = 4;

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};

// Memory of one thread, kept from call to call; grows to the largest size asked for.
class Scratch {
  public:
    char* take(int64_t bytes) {
        if (bytes > size_) {
            const int64_t rounded = (bytes + 4095) / 4096 * 4096;
            memory_.reset(static_cast<char*>(std::aligned_alloc(4096, rounded)));
            size_ = memory_ ? rounded : 0;
            if (!memory_) {
                throw std::bad_alloc();
            }
        }
        return memory_.get();
    }

  private:
    std::unique_ptr<char, Free> memory_;
    int64_t size_ = 0;
};

thread_local Scratch scratch;

double block_work(const AttentionArgs& args, const QueryBlock& block) {
    return static_cast<double>(block.num_sums()) * (block.hi - block.lo) *
           (args.qk_dim + args.v_dim);
}

// Heads of a block that has so many rows.
int heads_at_once(const AttentionArgs& args, int num_rows) {
    return num_rows > kFewRows ? 1 : std::min(args.num_heads, kMaxSums / num_rows);
}

// Rows [first, stop) and the keys that some of them see; no heads yet.
QueryBlock rows_block(const AttentionArgs& args, int request, int first, int stop) {
    QueryBlock block{request, first, stop, 0, 0, 0, 0};
    for (int row = first; row < stop; ++row) {
        if (args.kv_lo[row] < args.kv_hi[row]) {
            const bool is_first = block.hi == 0;
            block.lo = is_first ? args.kv_lo[row] : std::min(block.lo, args.kv_lo[row]);
            block.hi = std::max(block.hi, args.kv_hi[row]);
        }
    }
    return block;
}

// Rows of every request in blocks of at most max_rows, for all heads; the most work first.
std::vector<QueryBlock> cut_blocks(const AttentionArgs& args, int max_rows) {
    std::vector<QueryBlock> blocks;
    for (int request = 0; request < args.num_requests; ++request) {
        const int stop = args.row_indptr[request + 1];
        for (int first = args.row_indptr[request]; first < stop; first += max_rows) {
            QueryBlock block = rows_block(args, request, first, std::min(first + max_rows, stop));
            const int heads = heads_at_once(args, block.num_rows());
            for (; block.first_head < args.num_heads; block.first_head += heads) {
                block.num_heads = std::min(heads, args.num_heads - block.first_head);
                blocks.push_back(block);
            }
        }
    }
    std::stable_sort(blocks.begin(), blocks.end(), [&](const auto& a, const auto& b) {
        return block_work(args, a) > block_work(args, b);
    });
    return blocks;
}

// A range's sums at `memory`, and the bytes they take.
RangeSums sums_at(char* memory, int64_t num_sums, int64_t acc_width) {
    auto* floats = reinterpret_cast<float*>(memory);
    return {floats, floats + num_sums * acc_width, floats + num_sums * (acc_width + 1)};
}

int64_t sums_bytes(int64_t num_sums, int64_t acc_width) {
    return (num_sums * (acc_width + 2) * 4 + 63) / 64 * 64;
}

void clear(RangeSums sums, int64_t num_sums, int64_t acc_width) {
    std::fill_n(sums.acc, num_sums * acc_width, 0.0f);
    std::fill_n(sums.top, num_sums, kLowestTop);
    std::fill_n(sums.total, num_sums, 0.0f);
}

struct RangeBounds {
    int first;
    int stop;
};

int num_ranges(const QueryBlock& block) {
    return block.lo < block.hi ? (block.hi - 1) / kRange - block.lo / kRange + 1 : 0;
}

RangeBounds nth_range(const QueryBlock& block, int nth) {
    const int begin = (block.lo / kRange + nth) * kRange;
    return {std::max(begin, block.lo), std::min(begin + kRange, block.hi)};
}

bool are_finite(const float* values, int64_t count) {
    constexpr uint32_t kExponent = 0x7f800000;
    bool is_found = false;
    for (int64_t i = 0; i < count; ++i) {  // without a branch, so that it runs in vectors
        is_found |= (std::bit_cast<uint32_t>(values[i]) & kExponent) == kExponent;
    }
    return !is_found;
}

void run_block(const AttentionArgs&, const AttentionKernels&, const QueryBlock&);

// Write a block's rows. A value that one row sees enters the sums of the others with the weight
// zero; where it is infinite or NaN that is no longer nothing, so every row is computed alone.
void finish_block(const AttentionArgs& args, const AttentionKernels& kernel,
                  const QueryBlock& block, RangeSums total) {
    const int64_t num_values = block.num_sums() * kernel.padded_v_dim(args);
    if (block.num_rows() == 1 || are_finite(total.acc, num_values)) {
        kernel.finish_block(args, block, total);
        return;
    }
    for (int row = block.first; row < block.stop; ++row) {
        QueryBlock alone = rows_block(args, block.request, row, row + 1);
        alone.first_head = block.first_head;
        alone.num_heads = block.num_heads;
        run_block(args, kernel, alone);
    }
}

// One block from its first key to its last row of output.
void run_block(const AttentionArgs& args, const AttentionKernels& kernel, const QueryBlock& block) {
    const int64_t sums = block.num_sums(), width = kernel.padded_v_dim(args);
    const int64_t bytes = sums_bytes(sums, width);
    char* memory = scratch.take(2 * bytes + kernel.workspace_bytes(args));
    const RangeSums total = sums_at(memory, sums, width);
    const RangeSums range = sums_at(memory + bytes, sums, width);
    char* workspace = memory + 2 * bytes;
    clear(total, sums, width);
    if (block.lo < block.hi) {
        kernel.prepare_block(args, block, workspace);
    }
    for (int nth = 0; nth < num_ranges(block); ++nth) {
        const auto [first, stop] = nth_range(block, nth);
        kernel.sum_range(args, block, first, stop, workspace, range);
        kernel.merge_range(args, static_cast<int>(sums), total, range);
    }
    finish_block(args, kernel, block, total);
}

// Few blocks with many keys: every range is a task of its own, and the ranges of a block are added
// in order afterwards.
void run_ranges(const AttentionArgs& args, const AttentionKernels& kernel,
                const std::vector<QueryBlock>& blocks, int threads) {
    struct Task {
        int block;
        int nth;
    };
    const int64_t width = kernel.padded_v_dim(args);
    std::vector<Task> tasks;
    std::vector<int64_t> first_task;
    for (size_t i = 0; i < blocks.size(); ++i) {
        first_task.push_back(static_cast<int64_t>(tasks.size()));
        for (int nth = 0; nth < num_ranges(blocks[i]); ++nth) {
            tasks.push_back({static_cast<int>(i), nth});
        }
    }
    const int64_t bytes = sums_bytes(kMaxSums, width);
    Scratch all;
    char* ranges = all.take(std::max<int64_t>(1, static_cast<int64_t>(tasks.size())) * bytes);
    const auto sums_of = [&](int64_t task, const QueryBlock& block) {
        return sums_at(ranges + task * bytes, block.num_sums(), width);
    };
    run_tasks(static_cast<int64_t>(tasks.size()), threads, [&](int64_t i) {
        const QueryBlock& block = blocks[tasks[i].block];
        char* workspace = scratch.take(kernel.workspace_bytes(args));
        const auto [first, stop] = nth_range(block, tasks[i].nth);
        kernel.prepare_block(args, block, workspace);
        kernel.sum_range(args, block, first, stop, workspace, sums_of(i, block));
    });
    run_tasks(static_cast<int64_t>(blocks.size()), threads, [&](int64_t i) {
        const QueryBlock& block = blocks[i];
        const int sums = block.num_sums();
        const RangeSums total = sums_at(scratch.take(bytes), sums, width);
        clear(total, sums, width);
        for (int nth = 0; nth < num_ranges(block); ++nth) {
            kernel.merge_range(args, sums, total, sums_of(first_task[i] + nth, block));
        }
        finish_block(args, kernel, block, total);
    });
}

}  // namespace

void attend(const AttentionArgs& args) {
    const AttentionKernels& kernel = kernels().attention;
    int max_rows = kMaxSums;
    std::vector<QueryBlock> blocks = cut_blocks(args, max_rows);
    double work = 0;
    int64_t ranges = 0;
    for (const QueryBlock& block : blocks) {
        work += block_work(args, block);
        ranges += num_ranges(block);
    }
    const int threads = work < kSmallWork ? 1 : num_threads();
    const auto wanted = static_cast<size_t>(kTasksPerThread) * threads;
    while (threads > 1 && blocks.size() < wanted && max_rows > kMinQueryRows) {
        max_rows /= 2;
        blocks = cut_blocks(args, max_rows);
    }
    if (threads > 1 && blocks.size() < wanted && ranges > static_cast<int64_t>(blocks.size())) {
        run_ranges(args, kernel, blocks, threads);
        return;
    }
    run_tasks(static_cast<int64_t>(blocks.size()), threads,
              [&](int64_t i) { run_block(args, kernel, blocks[i]); });
}

}  // namespace mtserve
