#include "native/naive_attention.h"

#include <algorithm>
#include <cmath>

namespace mtserve::native_tests {
namespace {

// What a row reads: score and value.
struct Link {
    double score;
    const Numbers* values;
    int64_t at;
};

double dot(const Numbers& a, int64_t a_at, const Numbers& b, int64_t b_at, int width) {
    double sum = 0;
    for (int i = 0; i < width; ++i) {
        sum += static_cast<double>(a.get(a_at + i)) * b.get(b_at + i);
    }
    return sum;
}

std::vector<Link> links_of(const AttentionProblem& problem, int request, int64_t row, int head) {
    const AttentionArgs& args = problem.args;
    const AttentionBias& bias = args.bias;
    const int kv_head = head / (args.num_heads / args.num_kv_heads);
    const int64_t k_head = int64_t{kv_head} * args.qk_dim, v_head = int64_t{kv_head} * args.v_dim;
    const int64_t query = row * args.q.stride + int64_t{head} * args.qk_dim;
    std::vector<Link> links;
    for (int64_t key = args.kv_lo[row]; key < args.kv_hi[row]; ++key) {
        const int64_t page = args.block_table[request * args.max_blocks + key / args.page_size];
        const int64_t token = key % args.page_size;
        const int64_t k_at =
            page * args.k_pages.page_stride + token * args.k_pages.token_stride + k_head;
        const int64_t v_at =
            page * args.v_pages.page_stride + token * args.v_pages.token_stride + v_head;
        double score = args.alpha * dot(problem.q, query, problem.k_pages, k_at, args.qk_dim);
        if (bias.position != nullptr) {
            score += bias.position[key - bias.row_position[row]];
            score += bias.time[bias.buckets[row * bias.bucket_stride + key]];
        }
        links.push_back({score, &problem.v_pages, v_at});
    }
    const int64_t suffix = args.suffix_of_row == nullptr ? -1 : args.suffix_of_row[row];
    for (int64_t at = suffix * args.max_chain; suffix >= 0 && at < (suffix + 1) * args.max_chain;
         ++at) {
        const int64_t key_row = args.chains[at];
        if (key_row < 0) {
            continue;
        }
        const int64_t k_at = key_row * args.k.stride + k_head;
        double score = args.alpha * dot(problem.q, query, problem.k, k_at, args.qk_dim);
        if (bias.position != nullptr) {
            score += bias.position[std::clamp(bias.chain_distance[at], -bias.reach, bias.reach)];
            score += bias.time[bias.chain_buckets[at]];
        }
        links.push_back({score, &problem.v, key_row * args.v.stride + v_head});
    }
    return links;
}

}  // namespace

Exact naive_attention(const AttentionProblem& problem) {
    const AttentionArgs& args = problem.args;
    Exact exact;
    for (int request = 0; request < args.num_requests; ++request) {
        for (int64_t row = args.row_indptr[request]; row < args.row_indptr[request + 1]; ++row) {
            for (int head = 0; head < args.num_heads; ++head) {
                const std::vector<Link> links = links_of(problem, request, row, head);
                double top = -INFINITY, total = 0;
                for (const Link& link : links) {
                    top = std::max(top, link.score);
                }
                std::vector<double> sums(args.v_dim, 0.0);
                for (const Link& link : links) {
                    const double weight = args.is_softmax
                                              ? std::exp(link.score - top)
                                              : link.score / (1.0 + std::exp(-link.score));
                    total += weight;
                    for (int i = 0; i < args.v_dim; ++i) {
                        sums[i] += weight * link.values->get(link.at + i);
                    }
                }
                const bool is_divided = args.is_softmax && !links.empty();
                for (const double sum : sums) {
                    exact.out.push_back(args.scale * (is_divided ? sum / total : sum));
                }
                exact.lse.push_back(links.empty() ? -INFINITY : top + std::log(total));
            }
        }
    }
    return exact;
}

}  // namespace mtserve::native_tests
