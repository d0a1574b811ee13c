// The attention kernel of one instruction set. MTSERVE_ISA names it and the namespace.
//
// What fixes a row's bits, whatever its neighbours, pages, pieces and threads:
//   - a score is one sum over the head's dimensions in ascending order, in one lane;
//   - a tile is 64 keys at an absolute position; a range is 1024; within a range a row's values are
//     added key after key (bfloat16 with AVX-512: pair after pair at even positions);
//   - ranges are added in ascending order, then the suffix chain, ancestors first;
//   - a key that a row does not see has the weight zero, and adding it changes nothing, so it does
//     not matter which hidden keys are computed.
// Keys that no row of the block sees are never read: zeros stand for them.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

#include <cmath>
#include <cstring>

#include "cpu/attention.h"
#include "cpu/simd/functions.h"
#include "cpu/simd/panels.h"

namespace mtserve::MTSERVE_ISA {

constexpr int kGroupRows = 24;  // rows whose scores stay in the first cache
static_assert(kGroupRows % kMicroRows == 0 && kMaxQueryRows % kGroupRows == 0);
static_assert(kTile % kPanelWidth == 0);

inline int smaller(int a, int b) {
    return a < b ? a : b;
}

inline int larger(int a, int b) {
    return a > b ? a : b;
}

// Where a block's operands stand. Owned by one thread, laid out by `carve`.
template <class Operand>
struct Workspace {
    using Word = typename Operand::Word;
    Word* queries;    // [rows, q_words]
    Word* keys;       // [kTile / kPanelWidth][q_words][kPanelWidth]
    Word* values;     // [v_panels][tile words][kPanelWidth]
    float* scores;    // [kGroupRows, kTile]
    Word* weights;    // [kGroupRows, tile words]; the scores themselves where words are floats
    char* zero_row;   // a key or value row of zeros
    int64_t q_words;  // steps of a score
    int64_t v_panels;
    int64_t bytes;
};

template <class Operand>
Workspace<Operand> carve(const AttentionArgs& args, char* memory) {
    using Word = typename Operand::Word;
    Workspace<Operand> space{};
    space.q_words = (args.qk_dim + Operand::kPerWord - 1) / Operand::kPerWord;
    space.v_panels = (args.v_dim + kPanelWidth - 1) / kPanelWidth;
    char* next = memory;
    const auto take = [&next](int64_t bytes) {
        char* taken = next;
        next += (bytes + 63) / 64 * 64;
        return taken;
    };
    constexpr int64_t kTileWords = kTile / Operand::kPerWord;
    space.queries = reinterpret_cast<Word*>(take(kMaxQueryRows * space.q_words * sizeof(Word)));
    space.keys = reinterpret_cast<Word*>(take(kTile * space.q_words * sizeof(Word)));
    space.values =
        reinterpret_cast<Word*>(take(space.v_panels * kTileWords * kPanelWidth * sizeof(Word)));
    space.scores = reinterpret_cast<float*>(take(kGroupRows * kTile * sizeof(float)));
    if constexpr (Operand::kPerWord == 1) {
        space.weights = reinterpret_cast<Word*>(space.scores);
    } else {
        space.weights = reinterpret_cast<Word*>(take(kGroupRows * kTileWords * sizeof(Word)));
    }
    const int64_t row_bytes = 4 * larger(args.qk_dim, args.v_dim);
    space.zero_row = take(row_bytes);
    if (memory != nullptr) {
        std::memset(space.zero_row, 0, row_bytes);
    }
    space.bytes = next - memory;
    return space;
}

template <class Source>
inline const typename Source::Value* head_row(const HeadRows& rows, int64_t row, int head,
                                              int width) {
    return static_cast<const typename Source::Value*>(rows.values) + row * rows.stride +
           static_cast<int64_t>(head) * width;
}

// Rows of a tile's keys, one head; unseen ones are the row of zeros.
struct TileRows {
    const void* keys[kTile];
    const void* values[kTile];
};

// Bit i: some row of the block sees the key first + i. [first, stop) is the part of a tile that
// lies in the block's [lo, hi).
inline uint64_t seen_keys(const AttentionArgs& args, const QueryBlock& block, int tile_first,
                          int first, int stop) {
    const auto bits = [tile_first](int from, int to) {
        const uint64_t below_to = to - tile_first >= 64 ? ~0ull : (1ull << (to - tile_first)) - 1;
        return below_to & ~((1ull << (from - tile_first)) - 1);
    };
    uint64_t seen = 0;
    for (int row = block.first; row < block.stop; ++row) {
        const int from = larger(args.kv_lo[row], first), to = smaller(args.kv_hi[row], stop);
        if (from == first && to == stop) {
            return bits(first, stop);
        }
        if (from < to) {
            seen |= bits(from, to);
        }
    }
    return seen;
}

template <class Source>
void find_tile_rows(const AttentionArgs& args, const QueryBlock& block, int tile_first,
                    uint64_t seen, const void* zero_row, TileRows& rows) {
    using Value = typename Source::Value;
    const int kv_head = block.head / (args.num_heads / args.num_kv_heads);
    const int32_t* table = args.block_table + block.request * args.max_blocks;
    const auto* keys = static_cast<const Value*>(args.k_pages.values) + kv_head * args.qk_dim;
    const auto* values = static_cast<const Value*>(args.v_pages.values) + kv_head * args.v_dim;
    int64_t slot = tile_first / args.page_size;
    int64_t offset = tile_first % args.page_size;
    for (int i = 0; i < kTile; ++i) {
        if ((seen >> i) & 1) {
            const int64_t page = table[slot];
            rows.keys[i] =
                keys + page * args.k_pages.page_stride + offset * args.k_pages.token_stride;
            rows.values[i] =
                values + page * args.v_pages.page_stride + offset * args.v_pages.token_stride;
        } else {
            rows.keys[i] = rows.values[i] = zero_row;
        }
        if (++offset == args.page_size) {
            offset = 0;
            ++slot;
        }
    }
}

// A row's view of a tile: it sees the keys [first, stop) of it.
struct RowSpan {
    int first;
    int stop;
};

inline RowSpan row_span(const AttentionArgs& args, int row, int tile_first) {
    return {larger(args.kv_lo[row] - tile_first, 0), smaller(args.kv_hi[row] - tile_first, kTile)};
}

// The score of column c's vector with alpha and bias, ready for the score function.
struct RowBias {
    const float* position;  // of the tile's first key
    const float* time;
    const uint8_t* buckets;
};

inline RowBias row_bias(const AttentionArgs& args, int row, int tile_first) {
    const AttentionBias& bias = args.bias;
    return {bias.position + (tile_first - bias.row_position[row]), bias.time,
            bias.buckets + row * bias.bucket_stride + tile_first};
}

inline Vec biased_score(const AttentionArgs& args, const float* scores, int column,
                        const RowBias* bias) {
    Vec score = load(scores + column) * broadcast(args.alpha);
    if (bias != nullptr) {
        score =
            score + (load(bias->position + column) + look_up(bias->time, bias->buckets + column));
    }
    return score;
}

// Scores of one row in the columns [first, stop) -> SiLU weights; zero where the row sees nothing.
template <class Operand>
void silu_weights(const AttentionArgs& args, float* scores, typename Operand::Word* weights,
                  int first, int stop, RowSpan span, const RowBias* bias) {
    constexpr int kStep = Operand::kStoreVecs * Vec::kWidth;
    for (int column = first; column < stop; column += kStep) {
        Vec out[Operand::kStoreVecs];
#pragma GCC unroll 4
        for (int i = 0; i < Operand::kStoreVecs; ++i) {
            const int at = column + i * Vec::kWidth;
            const Vec weight = silu<Operand::kIsCoarse>(biased_score(args, scores, at, bias));
            const bool is_seen = span.first <= at && span.stop >= at + Vec::kWidth;
            out[i] = is_seen ? weight
                             : keep_lanes(weight, span.first - at, span.stop - at, broadcast(0.0f));
        }
        Operand::store_weights(weights, column, out);
    }
}

// The same for softmax: weights exp(score - top). Raises the row's top to what it sees here, and
// scales its sums accordingly.
template <class Operand>
void softmax_weights(const AttentionArgs& args, float* scores, typename Operand::Word* weights,
                     int first, int stop, RowSpan span, const RowBias* bias, float* acc,
                     int64_t acc_width, float* row_top, float* row_total) {
    constexpr int kStep = Operand::kStoreVecs * Vec::kWidth;
    Vec highest = broadcast(-INFINITY);
    for (int column = first; column < stop; column += Vec::kWidth) {
        const Vec score = keep_lanes(biased_score(args, scores, column, bias), span.first - column,
                                     span.stop - column, broadcast(-INFINITY));
        store(scores + column, score);
        highest = max(highest, score);
    }
    const float seen_top = max_lanes(highest);
    const float top = seen_top > *row_top ? seen_top : *row_top;
    if (top > *row_top) {
        const float factor = *row_top == -INFINITY ? 0.0f : exp_scalar(*row_top - top);
        for (int64_t i = 0; i < acc_width; i += Vec::kWidth) {
            store(acc + i, load(acc + i) * broadcast(factor));
        }
        *row_total *= factor;
        *row_top = top;
    }
    Vec sum = broadcast(0.0f);
    for (int column = first; column < stop; column += kStep) {
        Vec out[Operand::kStoreVecs];
#pragma GCC unroll 4
        for (int i = 0; i < Operand::kStoreVecs; ++i) {
            const int at = column + i * Vec::kWidth;
            const Vec below = clamp(load(scores + at) - broadcast(top), -87.0f, 0.0f);
            out[i] = keep_lanes(exp_bounded<Operand::kIsCoarse>(below), span.first - at,
                                span.stop - at, broadcast(0.0f));
            sum = sum + out[i];
        }
        Operand::store_weights(weights, column, out);
    }
    *row_total += sum_lanes(sum);
}

// Tile columns that a group of rows has to compute, and those it adds up.
struct GroupSpan {
    int first;
    int stop;
};

inline GroupSpan group_span(const AttentionArgs& args, int first_row, int num_rows,
                            int tile_first) {
    GroupSpan span{kTile, 0};
    for (int row = first_row; row < first_row + num_rows; ++row) {
        const RowSpan seen = row_span(args, row, tile_first);
        if (seen.first < seen.stop) {
            span.first = smaller(span.first, seen.first);
            span.stop = larger(span.stop, seen.stop);
        }
    }
    return span;
}

// One group of rows against one packed tile.
template <class Operand>
void add_tile(const AttentionArgs& args, const Workspace<Operand>& space, const QueryBlock& block,
              int first_row, int num_rows, int tile_first, RangeSums sums) {
    using Word = typename Operand::Word;
    constexpr int kTileWords = kTile / Operand::kPerWord;
    const GroupSpan span = group_span(args, first_row, num_rows, tile_first);
    if (span.first >= span.stop) {
        return;
    }
    const int place = first_row - block.first;  // of the group in the block
    const int first_panel = span.first / kPanelWidth;
    const int stop_panel = (span.stop + kPanelWidth - 1) / kPanelWidth;
    const int64_t acc_width = space.v_panels * kPanelWidth;
    for (int panel = first_panel; panel < stop_panel; ++panel) {
        multiply_panel<Operand, false>(space.queries + place * space.q_words, space.q_words,
                                       space.keys + panel * space.q_words * kPanelWidth,
                                       space.q_words, num_rows, space.scores + panel * kPanelWidth,
                                       kTile);
    }
    const int first = first_panel * kPanelWidth, stop = stop_panel * kPanelWidth;
    for (int i = 0; i < num_rows; ++i) {
        const int row = first_row + i;
        float* scores = space.scores + i * kTile;
        Word* weights = space.weights + i * kTileWords;
        const RowSpan seen = row_span(args, row, tile_first);
        if (seen.first >= seen.stop) {
            std::memset(weights + first / Operand::kPerWord, 0,
                        (stop - first) / Operand::kPerWord * sizeof(Word));
            continue;
        }
        RowBias of_row{};
        const RowBias* bias = nullptr;
        if (args.bias.position != nullptr) {
            of_row = row_bias(args, row, tile_first);
            bias = &of_row;
        }
        if (args.is_softmax) {
            softmax_weights<Operand>(args, scores, weights, first, stop, seen, bias,
                                     sums.acc + (place + i) * acc_width, acc_width,
                                     sums.top + place + i, sums.total + place + i);
        } else {
            silu_weights<Operand>(args, scores, weights, first, stop, seen, bias);
        }
    }
    const int first_word = span.first / Operand::kPerWord;
    const int num_words = (span.stop + Operand::kPerWord - 1) / Operand::kPerWord - first_word;
    for (int64_t panel = 0; panel < space.v_panels; ++panel) {
        multiply_panel<Operand, true>(
            space.weights + first_word, kTileWords,
            space.values + (panel * kTileWords + first_word) * kPanelWidth, num_words, num_rows,
            sums.acc + place * acc_width + panel * kPanelWidth, acc_width);
    }
}

// The functions of AttentionKernels for one kind of operand.
template <class Operand>
struct Attention {
    using Source = typename Operand::Source;

    static void prepare_block(const AttentionArgs& args, const QueryBlock& block, char* memory) {
        const Workspace<Operand> space = carve<Operand>(args, memory);
        for (int row = block.first; row < block.stop; ++row) {
            Operand::pack_row(head_row<Source>(args.q, row, block.head, args.qk_dim), args.qk_dim,
                              space.queries + (row - block.first) * space.q_words);
        }
    }

    static void sum_range(const AttentionArgs& args, const QueryBlock& block, int first, int stop,
                          char* memory, RangeSums sums) {
        const Workspace<Operand> space = carve<Operand>(args, memory);
        const int num_rows = block.stop - block.first;
        std::memset(sums.acc, 0, num_rows * space.v_panels * kPanelWidth * sizeof(float));
        if (args.is_softmax) {
            for (int i = 0; i < num_rows; ++i) {
                sums.top[i] = -INFINITY;
                sums.total[i] = 0.0f;
            }
        }
        TileRows rows;
        for (int tile = first / kTile * kTile; tile < stop; tile += kTile) {
            const int seen_first = larger(tile, first), seen_stop = smaller(tile + kTile, stop);
            const uint64_t seen = seen_keys(args, block, tile, seen_first, seen_stop);
            if (seen == 0) {
                continue;
            }
            find_tile_rows<Source>(args, block, tile, seen, space.zero_row, rows);
            Operand::pack_keys(rows.keys, args.qk_dim, space.q_words, space.keys);
            Operand::pack_values(rows.values, args.v_dim, space.values);
            for (int row = block.first; row < block.stop; row += kGroupRows) {
                add_tile<Operand>(args, space, block, row, smaller(kGroupRows, block.stop - row),
                                  tile, sums);
            }
        }
    }

    static void finish_block(const AttentionArgs& args, const QueryBlock& block, RangeSums total) {
        const int64_t width = padded_width(args.v_dim);
        for (int row = block.first; row < block.stop; ++row) {
            const int place = row - block.first;
            float* acc = total.acc + place * width;
            const int32_t suffix = args.suffix_of_row == nullptr ? -1 : args.suffix_of_row[row];
            if (args.is_softmax) {
                finish_softmax(args, block, row, suffix, acc, total.top[place], total.total[place]);
            } else if (suffix >= 0) {
                add_silu_chain(args, block, row, suffix, acc);
            }
            float* out =
                args.out + (static_cast<int64_t>(row) * args.num_heads + block.head) * args.v_dim;
            scale_row(acc, args.scale, args.v_dim, out);
        }
    }

  private:
    static float chain_score(const AttentionArgs& args, const QueryBlock& block, int row,
                             int32_t suffix, int link, int32_t key_row) {
        const int kv_head = block.head / (args.num_heads / args.num_kv_heads);
        const float dot =
            dot_rows<Source>(head_row<Source>(args.q, row, block.head, args.qk_dim),
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

    static const typename Source::Value* chain_value(const AttentionArgs& args,
                                                     const QueryBlock& block, int32_t key_row) {
        const int kv_head = block.head / (args.num_heads / args.num_kv_heads);
        return head_row<Source>(args.v, key_row, kv_head, args.v_dim);
    }

    static void add_silu_chain(const AttentionArgs& args, const QueryBlock& block, int row,
                               int32_t suffix, float* acc) {
        const int32_t* chain = args.chains + static_cast<int64_t>(suffix) * args.max_chain;
        for (int link = 0; link < args.max_chain; ++link) {
            if (chain[link] < 0) {
                continue;
            }
            const float score = chain_score(args, block, row, suffix, link, chain[link]);
            add_scaled<Source>(silu_scalar(score), chain_value(args, block, chain[link]),
                               args.v_dim, acc);
        }
    }

    static void finish_softmax(const AttentionArgs& args, const QueryBlock& block, int row,
                               int32_t suffix, float* acc, float top, float total) {
        const int64_t width = padded_width(args.v_dim);
        const int32_t* chain =
            suffix < 0 ? nullptr : args.chains + static_cast<int64_t>(suffix) * args.max_chain;
        for (int link = 0; chain != nullptr && link < args.max_chain; ++link) {
            if (chain[link] < 0) {
                continue;
            }
            const float score = chain_score(args, block, row, suffix, link, chain[link]);
            if (score > top) {
                const float factor = top == -INFINITY ? 0.0f : exp_scalar(top - score);
                for (int64_t i = 0; i < width; i += Vec::kWidth) {
                    store(acc + i, load(acc + i) * broadcast(factor));
                }
                total *= factor;
                top = score;
            }
            const float weight = exp_scalar(score - top);
            total += weight;
            add_scaled<Source>(weight, chain_value(args, block, chain[link]), args.v_dim, acc);
        }
        const bool is_seen = total > 0.0f || total != total;
        if (is_seen) {
            for (int64_t i = 0; i < width; i += Vec::kWidth) {
                store(acc + i, load(acc + i) / broadcast(total));
            }
        }
        if (args.lse != nullptr) {
            args.lse[static_cast<int64_t>(row) * args.num_heads + block.head] =
                is_seen ? top + std::log(total) : -INFINITY;
        }
    }
};

inline void merge_range(const AttentionArgs& args, int num_rows, RangeSums total, RangeSums range) {
    const int64_t width = padded_width(args.v_dim);
    if (!args.is_softmax) {
        for (int64_t i = 0; i < num_rows * width; i += Vec::kWidth) {
            store(total.acc + i, load(total.acc + i) + load(range.acc + i));
        }
        return;
    }
    for (int row = 0; row < num_rows; ++row) {
        if (range.top[row] == -INFINITY) {
            continue;
        }
        const float top = range.top[row] > total.top[row] ? range.top[row] : total.top[row];
        const float before = total.top[row] == -INFINITY ? 0.0f : exp_scalar(total.top[row] - top);
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
