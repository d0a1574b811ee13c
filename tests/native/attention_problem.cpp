#include "native/attention_problem.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

namespace mtserve::native_tests {
namespace {

constexpr int kNumPageSizes = 4;
constexpr int kPageSizes[kNumPageSizes] = {1, 7, 32, 64};
constexpr int kNumWidths = 10;
constexpr int kWidths[kNumWidths] = {1, 2, 5, 8, 15, 17, 33, 64, 65, 128};
constexpr int kNumTimes = 129;

uint16_t narrowed(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float normal(Random& random) {
    return std::normal_distribution<float>()(random);
}

// One request: its rows, and how many keys its history has.
struct Request {
    int rows;
    int keys;
};

std::vector<Request> random_requests(Random& random) {
    std::vector<Request> requests(any_of(random, 1, 4));
    const bool is_long = any_of(random, 0, 5) == 0;  // several ranges, several threads
    for (Request& request : requests) {
        request.rows = any_of(random, 0, 9) == 0 ? 0 : any_of(random, 1, is_long ? 60 : 30);
        request.keys = is_long ? any_of(random, 1000, 3300) : any_of(random, 0, 200);
    }
    return requests;
}

class Builder {
  public:
    explicit Builder(uint64_t seed) : random_(seed) {
        flush_ = seed % 2 == 0 ? Flush::kEnd : Flush::kStart;
    }

    AttentionProblem build() {
        set_sizes();
        set_intervals();
        set_pages();
        set_suffix();
        set_rows();
        if (any_of(random_, 0, 2) == 0) {
            set_bias();
        }
        AttentionArgs& args = problem_.args;
        problem_.out = Guarded<float>(args.num_rows * args.num_heads * args.v_dim, flush_);
        args.out = problem_.out.get();
        if (args.is_softmax) {
            problem_.lse = Guarded<float>(args.num_rows * args.num_heads, flush_);
            args.lse = problem_.lse.get();
        }
        return std::move(problem_);
    }

  private:
    void set_sizes() {
        AttentionArgs& args = problem_.args;
        requests_ = random_requests(random_);
        args.is_bf16 = any_of(random_, 0, 1) == 1;
        args.is_softmax = any_of(random_, 0, 1) == 1;
        args.num_kv_heads = any_of(random_, 1, 2);
        args.num_heads = args.num_kv_heads * any_of(random_, 1, 2);
        args.qk_dim = kWidths[any_of(random_, 0, kNumWidths - 1)];
        args.v_dim = kWidths[any_of(random_, 0, kNumWidths - 1)];
        args.page_size = kPageSizes[any_of(random_, 0, kNumPageSizes - 1)];
        args.alpha = 1.0f / static_cast<float>(1 + args.qk_dim / 16);
        args.scale = any_of(random_, 0, 1) == 1 ? 1.0f : 0.25f;
        args.num_requests = static_cast<int>(requests_.size());
        problem_.row_indptr = Guarded<int32_t>(args.num_requests + 1, flush_);
        problem_.row_indptr[0] = 0;
        for (int i = 0; i < args.num_requests; ++i) {
            problem_.row_indptr[i + 1] = problem_.row_indptr[i] + requests_[i].rows;
        }
        args.row_indptr = problem_.row_indptr.get();
        args.num_rows = problem_.row_indptr[args.num_requests];
    }

    // Causal, whole, empty and arbitrary intervals.
    void set_intervals() {
        AttentionArgs& args = problem_.args;
        problem_.kv_lo = Guarded<int32_t>(args.num_rows, flush_);
        problem_.kv_hi = Guarded<int32_t>(args.num_rows, flush_);
        seen_.resize(requests_.size());
        for (int i = 0; i < args.num_requests; ++i) {
            const auto [rows, keys] = requests_[i];
            const int kind = any_of(random_, 0, 3);
            seen_[i].assign(keys, false);
            for (int row = 0; row < rows; ++row) {
                int lo = 0, hi = std::max(0, keys - rows + row + 1);
                if (kind == 1) {
                    hi = keys;
                } else if (kind == 2) {
                    lo = any_of(random_, 0, keys);
                    hi = any_of(random_, 0, keys);
                } else if (kind == 3) {
                    lo = std::max(0, hi - 29);
                }
                problem_.kv_lo[args.row_indptr[i] + row] = lo;
                problem_.kv_hi[args.row_indptr[i] + row] = hi;
                for (int key = lo; key < hi; ++key) {
                    seen_[i][key] = true;
                }
            }
        }
        args.kv_lo = problem_.kv_lo.get();
        args.kv_hi = problem_.kv_hi.get();
    }

    void set_pages() {
        AttentionArgs& args = problem_.args;
        int64_t used = 0, longest = 0;
        for (const Request& request : requests_) {
            const int64_t blocks = (request.keys + args.page_size - 1) / args.page_size;
            used += blocks;
            longest = std::max(longest, blocks);
        }
        args.max_blocks = longest + 1;
        args.num_pages = used + 2;
        std::vector<int32_t> order(args.num_pages);
        for (int64_t i = 0; i < args.num_pages; ++i) {
            order[i] = static_cast<int32_t>(i);
        }
        std::shuffle(order.begin(), order.end(), random_);
        const int64_t gap = any_of(random_, 0, 1) * 3;
        args.k_pages.token_stride = args.num_kv_heads * args.qk_dim;
        args.v_pages.token_stride = args.num_kv_heads * args.v_dim;
        args.k_pages.page_stride = args.page_size * args.k_pages.token_stride + gap;
        args.v_pages.page_stride = args.page_size * args.v_pages.token_stride + gap;
        problem_.k_pages =
            Numbers(args.is_bf16, args.num_pages * args.k_pages.page_stride - gap, flush_);
        problem_.v_pages =
            Numbers(args.is_bf16, args.num_pages * args.v_pages.page_stride - gap, flush_);
        problem_.block_table = Guarded<int32_t>(args.num_requests * args.max_blocks, flush_);
        int64_t next = 0;
        for (int i = 0; i < args.num_requests; ++i) {
            for (int key = 0; key < requests_[i].keys; ++key) {
                const int64_t at = i * args.max_blocks + key / args.page_size;
                if (key % args.page_size == 0) {
                    problem_.block_table[at] = order[next++];
                }
                if (seen_[i][key]) {
                    const int64_t page = problem_.block_table[at], token = key % args.page_size;
                    fill(problem_.k_pages,
                         page * args.k_pages.page_stride + token * args.k_pages.token_stride,
                         args.k_pages.token_stride);
                    fill(problem_.v_pages,
                         page * args.v_pages.page_stride + token * args.v_pages.token_stride,
                         args.v_pages.token_stride);
                }
            }
        }
        args.k_pages.values = problem_.k_pages.memory();
        args.v_pages.values = problem_.v_pages.memory();
        args.block_table = problem_.block_table.get();
    }

    void set_suffix() {
        AttentionArgs& args = problem_.args;
        is_read_.assign(args.num_rows, false);
        if (args.num_rows == 0 || any_of(random_, 0, 2) == 0) {
            return;
        }
        std::vector<int32_t> rows;
        for (int32_t row = 0; row < args.num_rows; ++row) {
            if (any_of(random_, 0, 1) == 1) {
                rows.push_back(row);
            }
        }
        args.max_chain = any_of(random_, 0, 6);
        args.num_suffix = static_cast<int64_t>(rows.size());
        problem_.suffix_of_row = Guarded<int32_t>(args.num_rows, flush_);
        problem_.chains = Guarded<int32_t>(args.num_suffix * args.max_chain, flush_);
        for (int64_t i = 0; i < args.num_suffix; ++i) {
            problem_.suffix_of_row[rows[i]] = static_cast<int32_t>(i);
            for (int link = 0; link < args.max_chain; ++link) {
                const int row = any_of(random_, -2, rows[i]);
                problem_.chains[i * args.max_chain + link] = std::max(row, -1);
                if (row >= 0) {
                    is_read_[row] = true;
                }
            }
        }
        args.suffix_of_row = problem_.suffix_of_row.get();
        args.chains = problem_.chains.get();
    }

    void set_rows() {
        AttentionArgs& args = problem_.args;
        const int64_t gap = any_of(random_, 0, 1) * 5;
        const std::vector<bool> all(args.num_rows, true);
        problem_.q = rows_of(args.num_heads * args.qk_dim, gap, all, args.q);
        problem_.k = rows_of(args.num_kv_heads * args.qk_dim, gap, is_read_, args.k);
        problem_.v = rows_of(args.num_kv_heads * args.v_dim, gap, is_read_, args.v);
    }

    Numbers rows_of(int64_t width, int64_t gap, const std::vector<bool>& is_filled,
                    HeadRows& rows) {
        const auto count = static_cast<int64_t>(is_filled.size());
        rows.stride = width + gap;
        Numbers numbers(problem_.args.is_bf16, std::max<int64_t>(0, count * rows.stride - gap),
                        flush_);
        for (int64_t row = 0; row < count; ++row) {
            if (is_filled[row]) {
                fill(numbers, row * rows.stride, width);
            }
        }
        rows.values = numbers.memory();
        return numbers;
    }

    void set_bias() {
        AttentionArgs& args = problem_.args;
        const AttentionProblem& problem = problem_;
        problem_.row_position = Guarded<int64_t>(args.num_rows, flush_);
        int64_t reach = 0, last_key = 0;
        for (int64_t row = 0; row < args.num_rows; ++row) {
            const int64_t lo = problem.kv_lo[row], hi = problem.kv_hi[row];
            const int64_t at = hi + any_of(random_, -3, 9);
            problem_.row_position[row] = at;
            if (lo < hi) {
                reach = std::max({reach, std::abs(at - lo), std::abs(hi - 1 - at)});
                last_key = std::max(last_key, hi);
            }
        }
        args.bias.reach = reach;
        args.bias.bucket_stride = (last_key + kTile - 1) / kTile * kTile;
        problem_.position = Guarded<float>(2 * (reach + kTile) + 1, flush_);
        for (int64_t distance = -reach; distance <= reach; ++distance) {
            problem_.position[reach + kTile + distance] = normal(random_);
        }
        problem_.time = Guarded<float>(kNumTimes, flush_);
        for (int64_t i = 0; i < kNumTimes; ++i) {
            problem_.time[i] = normal(random_);
        }
        const int64_t links = args.num_suffix * args.max_chain;
        problem_.buckets = any_buckets(args.num_rows * args.bias.bucket_stride);
        problem_.chain_buckets = any_buckets(links);
        problem_.chain_distance = Guarded<int64_t>(links, flush_);
        for (int64_t i = 0; i < links; ++i) {
            problem_.chain_distance[i] = any_of(random_, -5, 5);
        }
        args.bias.position = problem_.position.get() + reach + kTile;
        args.bias.time = problem_.time.get();
        args.bias.row_position = problem_.row_position.get();
        args.bias.buckets = problem_.buckets.get();
        args.bias.chain_buckets = problem_.chain_buckets.get();
        args.bias.chain_distance = problem_.chain_distance.get();
    }

    Guarded<uint8_t> any_buckets(int64_t count) {
        Guarded<uint8_t> buckets(count, flush_);
        for (int64_t i = 0; i < count; ++i) {
            buckets[i] = static_cast<uint8_t>(any_of(random_, 0, kNumTimes - 1));
        }
        return buckets;
    }

    void fill(Numbers& numbers, int64_t first, int64_t count) {
        for (int64_t i = first; i < first + count; ++i) {
            numbers.set(i, normal(random_));
        }
    }

    Random random_;
    Flush flush_;
    AttentionProblem problem_;
    std::vector<Request> requests_;
    std::vector<std::vector<bool>> seen_;
    std::vector<bool> is_read_;
};

}  // namespace

float widened(uint16_t bf16) {
    return std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16);
}

Numbers::Numbers(bool bf16, int64_t count, Flush flush) : is_bf16(bf16) {
    if (bf16) {
        halves = Guarded<uint16_t>(count, flush);
    } else {
        floats = Guarded<float>(count, flush);
    }
}

void Numbers::set(int64_t at, float value) {
    if (is_bf16) {
        halves[at] = narrowed(value);
    } else {
        floats[at] = value;
    }
}

const void* Numbers::memory() const {
    return is_bf16 ? static_cast<const void*>(halves.get()) : floats.get();
}

std::string AttentionProblem::description() const {
    std::string text = args.is_softmax ? "softmax" : "silu";
    text += args.is_bf16 ? " bfloat16" : " float32";
    for (const auto& [name, value] :
         {std::pair<const char*, int64_t>{"requests", args.num_requests},
          {"rows", args.num_rows},
          {"heads", args.num_heads},
          {"kv heads", args.num_kv_heads},
          {"qk", args.qk_dim},
          {"v", args.v_dim},
          {"page", args.page_size},
          {"chain", args.max_chain},
          {"reach", args.bias.reach}}) {
        text += std::string(" ") + name + " " + std::to_string(value);
    }
    return text;
}

AttentionProblem random_problem(uint64_t seed) {
    return Builder(seed).build();
}

}  // namespace mtserve::native_tests
