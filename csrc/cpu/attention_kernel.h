// The attention kernel of one instruction set. MTSERVE_ISA names it and the namespace.
//
// What fixes a row's bits, whatever its neighbours, pages, pieces and threads:
//   - a score is one sum over the head's dimensions in ascending order, in one lane;
//   - a tile is 64 keys at an absolute position; a range is 1024; within a range a row's values are
//     added key after key (bfloat16 with AVX-512: pair after pair at even positions);
//   - ranges are added in ascending order, then the suffix chain, ancestors first;
//   - a key that a row does not see has the weight zero, and adding it changes nothing, so it does
//     not matter which hidden keys are computed (values that are not finite: see attention.cpp).
// Keys that no row of the block sees are never read: zeros stand for them.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

#include <cmath>
#include <cstring>

#include "cpu/attention.h"
#include "cpu/attention_sums.h"
#include "cpu/attention_tiles.h"
#include "cpu/simd/panels.h"

namespace mtserve::MTSERVE_ISA {

// The functions of AttentionKernels for one kind of operand.
template <class Operand>
struct Attention {
    using Source = typename Operand::Source;

    static void prepare_block(const AttentionArgs& args, const QueryBlock& block, char* memory) {
        const Workspace<Operand> space = carve<Operand>(args, memory);
        auto* words = space.queries;
        for (int head = block.first_head; head < block.first_head + block.num_heads; ++head) {
            for (int row = block.first; row < block.stop; ++row, words += space.q_words) {
                Operand::pack_row(head_row<Source>(args.q, row, head, args.qk_dim), args.qk_dim,
                                  words);
            }
        }
    }

    static void sum_range(const AttentionArgs& args, const QueryBlock& block, int first, int stop,
                          char* memory, RangeSums sums) {
        const Workspace<Operand> space = carve<Operand>(args, memory);
        const int num_sums = block.num_sums();
        std::memset(sums.acc, 0, num_sums * space.v_panels * kPanelWidth * sizeof(float));
        if (args.is_softmax) {
            for (int i = 0; i < num_sums; ++i) {
                sums.top[i] = kLowestTop;
                sums.total[i] = 0.0f;
            }
        }
        TileSum<Operand> sum(args, block, space, sums);
        TileRows rows[2];
        Tile tile = next_tile(args, block, first / kTile * kTile, first, stop);
        find_tile_rows<Source>(args, block, tile, rows[0]);
        for (int turn = 0; tile.seen != 0; turn ^= 1) {
            const Tile next = next_tile(args, block, tile.first + kTile, first, stop);
            find_tile_rows<Source>(args, block, next, rows[turn ^ 1]);
            sum.add(tile, rows[turn], next, rows[turn ^ 1]);
            tile = next;
        }
    }

    static void finish_block(const AttentionArgs& args, const QueryBlock& block, RangeSums total) {
        const int64_t width = padded_width(args.v_dim);
        int place = 0;
        for (int head = block.first_head; head < block.first_head + block.num_heads; ++head) {
            for (int row = block.first; row < block.stop; ++row, ++place) {
                float* acc = total.acc + place * width;
                const int32_t suffix = args.suffix_of_row == nullptr ? -1 : args.suffix_of_row[row];
                if (args.is_softmax) {
                    finish_softmax(args, head, row, suffix, acc, total.top[place],
                                   total.total[place]);
                } else if (suffix >= 0) {
                    add_silu_chain(args, head, row, suffix, acc);
                }
                float* out =
                    args.out + (static_cast<int64_t>(row) * args.num_heads + head) * args.v_dim;
                scale_row(acc, args.scale, args.v_dim, out);
            }
        }
    }

  private:
    static float chain_score(const AttentionArgs& args, int head, int row, int32_t suffix, int link,
                             int32_t key_row) {
        const int kv_head = head / (args.num_heads / args.num_kv_heads);
        const float dot =
            dot_rows<Source>(head_row<Source>(args.q, row, head, args.qk_dim),
                             head_row<Source>(args.k, key_row, kv_head, args.qk_dim), args.qk_dim);
        const float score = dot * args.alpha;
        const AttentionBias& bias = args.bias;
        if (bias.position == nullptr) {
            return score;
        }
        const int64_t at = static_cast<int64_t>(suffix) * args.max_chain + link;
        int64_t distance = bias.chain_distance[at];
        distance = distance < -bias.reach ? -bias.reach : distance;
        distance = distance > bias.reach ? bias.reach : distance;
        return score + (bias.position[distance] + bias.time[bias.chain_buckets[at]]);
    }

    static const typename Source::Value* chain_value(const AttentionArgs& args, int head,
                                                     int32_t key_row) {
        const int kv_head = head / (args.num_heads / args.num_kv_heads);
        return head_row<Source>(args.v, key_row, kv_head, args.v_dim);
    }

    static void add_silu_chain(const AttentionArgs& args, int head, int row, int32_t suffix,
                               float* acc) {
        const int32_t* chain = args.chains + static_cast<int64_t>(suffix) * args.max_chain;
        for (int link = 0; link < args.max_chain; ++link) {
            if (chain[link] < 0) {
                continue;
            }
            const float score = chain_score(args, head, row, suffix, link, chain[link]);
            add_scaled<Source>(silu_scalar(score), chain_value(args, head, chain[link]), args.v_dim,
                               acc);
        }
    }

    static void finish_softmax(const AttentionArgs& args, int head, int row, int32_t suffix,
                               float* acc, float top, float total) {
        const int64_t width = padded_width(args.v_dim);
        const int32_t* chain =
            suffix < 0 ? nullptr : args.chains + static_cast<int64_t>(suffix) * args.max_chain;
        for (int link = 0; chain != nullptr && link < args.max_chain; ++link) {
            if (chain[link] < 0) {
                continue;
            }
            const float score = chain_score(args, head, row, suffix, link, chain[link]);
            if (score > top) {
                const float factor = exp_scalar(top - score);
                for (int64_t i = 0; i < width; i += Vec::kWidth) {
                    store(acc + i, load(acc + i) * broadcast(factor));
                }
                total *= factor;
                top = score;
            }
            const float weight = exp_scalar(score - top);
            total += weight;
            add_scaled<Source>(weight, chain_value(args, head, chain[link]), args.v_dim, acc);
        }
        const bool is_seen = total != 0.0f;
        if (is_seen) {
            for (int64_t i = 0; i < width; i += Vec::kWidth) {
                store(acc + i, load(acc + i) / broadcast(total));
            }
        }
        if (args.lse != nullptr) {
            args.lse[static_cast<int64_t>(row) * args.num_heads + head] =
                is_seen ? top + std::log(total) : -INFINITY;
        }
    }
};

inline void merge_range(const AttentionArgs& args, int num_sums, RangeSums total, RangeSums range) {
    const int64_t width = padded_width(args.v_dim);
    if (!args.is_softmax) {
        for (int64_t i = 0; i < num_sums * width; i += Vec::kWidth) {
            store(total.acc + i, load(total.acc + i) + load(range.acc + i));
        }
        return;
    }
    for (int row = 0; row < num_sums; ++row) {
        if (range.total[row] == 0.0f) {  // it sees none of the keys
            continue;
        }
        const float top = range.top[row] > total.top[row] ? range.top[row] : total.top[row];
        const float before = exp_scalar(total.top[row] - top);
        const float added = exp_scalar(range.top[row] - top);
        float* acc = total.acc + row * width;
        const float* more = range.acc + row * width;
        for (int64_t i = 0; i < width; i += Vec::kWidth) {
            store(acc + i,
                  fma(load(more + i), broadcast(added), load(acc + i) * broadcast(before)));
        }
        total.total[row] = total.total[row] * before + range.total[row] * added;
        total.top[row] = top;
    }
}

inline int64_t padded_v_dim(const AttentionArgs& args) {
    return padded_width(args.v_dim);
}

inline int64_t workspace_bytes(const AttentionArgs& args) {
    return args.is_bf16 ? carve<Bf16Operand>(args, nullptr).bytes
                        : carve<FloatOperand>(args, nullptr).bytes;
}

inline void prepare_block(const AttentionArgs& args, const QueryBlock& block, char* memory) {
    args.is_bf16 ? Attention<Bf16Operand>::prepare_block(args, block, memory)
                 : Attention<FloatOperand>::prepare_block(args, block, memory);
}

inline void sum_range(const AttentionArgs& args, const QueryBlock& block, int first, int stop,
                      char* memory, RangeSums sums) {
    args.is_bf16 ? Attention<Bf16Operand>::sum_range(args, block, first, stop, memory, sums)
                 : Attention<FloatOperand>::sum_range(args, block, first, stop, memory, sums);
}

inline void finish_block(const AttentionArgs& args, const QueryBlock& block, RangeSums total) {
    args.is_bf16 ? Attention<Bf16Operand>::finish_block(args, block, total)
                 : Attention<FloatOperand>::finish_block(args, block, total);
}

constexpr AttentionKernels kAttentionKernels = {
    padded_v_dim, workspace_bytes, prepare_block, sum_range, merge_range, finish_block,
};

}  // namespace mtserve::MTSERVE_ISA
