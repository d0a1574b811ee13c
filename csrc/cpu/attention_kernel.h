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
#include "cpu/simd/functions.h"
#include "cpu/simd/panels.h"

namespace mtserve::MTSERVE_ISA {

constexpr int kGroupRows = 24;  // rows that skip hidden keys together
constexpr int kDirectRows = 3;  // so few rows take their values straight from the pages
constexpr int kMaxGroups = (kMaxSums + kGroupRows - 1) / kGroupRows;
static_assert(kGroupRows % kMicroRows == 0);
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
    Word* queries;    // [sums, q_words]
    Word* keys;       // [panels of a part][q_words][kPanelWidth]
    Word* values;     // [v_panels][words of a part][kPanelWidth]
    float* scores;    // [sums, kTile]
    Word* weights;    // [sums, tile words]; the scores themselves where words are floats
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
    space.queries = reinterpret_cast<Word*>(take(kMaxSums * space.q_words * sizeof(Word)));
    space.keys = reinterpret_cast<Word*>(take(kTile * space.q_words * sizeof(Word)));
    space.values =
        reinterpret_cast<Word*>(take(space.v_panels * kTileWords * kPanelWidth * sizeof(Word)));
    space.scores = reinterpret_cast<float*>(take(kMaxSums * kTile * sizeof(float)));
    if constexpr (Operand::kPerWord == 1) {
        space.weights = reinterpret_cast<Word*>(space.scores);
    } else {
        space.weights = reinterpret_cast<Word*>(take(kMaxSums * kTileWords * sizeof(Word)));
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

// Where a tile's keys and values stand, first head. Only those that some row sees have a place.
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

// A tile and its seen keys; none: there are no more tiles.
struct Tile {
    int first;
    uint64_t seen;
};

// The first tile from `tile_first` on, up to `stop`, with a key that some row sees.
inline Tile next_tile(const AttentionArgs& args, const QueryBlock& block, int tile_first, int first,
                      int stop) {
    for (; tile_first < stop; tile_first += kTile) {
        const uint64_t seen = seen_keys(args, block, tile_first, larger(tile_first, first),
                                        smaller(tile_first + kTile, stop));
        if (seen != 0) {
            return {tile_first, seen};
        }
    }
    return {stop, 0};
}

template <class Source>
void find_tile_rows(const AttentionArgs& args, const QueryBlock& block, Tile tile, TileRows& rows) {
    using Value = typename Source::Value;
    const int32_t* table = args.block_table + block.request * args.max_blocks;
    const auto* keys = static_cast<const Value*>(args.k_pages.values);
    const auto* values = static_cast<const Value*>(args.v_pages.values);
    int64_t slot = tile.first / args.page_size;
    int64_t offset = tile.first % args.page_size;
    for (int i = 0; i < kTile; ++i) {
        if ((tile.seen >> i) & 1) {
            const int64_t page = table[slot];
            rows.keys[i] =
                keys + page * args.k_pages.page_stride + offset * args.k_pages.token_stride;
            rows.values[i] =
                values + page * args.v_pages.page_stride + offset * args.v_pages.token_stride;
        }
        if (++offset == args.page_size) {
            offset = 0;
            ++slot;
        }
    }
}

// Keys [first, stop) of a tile.
struct Part {
    int first;
    int stop;
};

// One head's rows of a part: `rows` moved by `bytes`, or the row of zeros.
inline void find_part_rows(const void* const* rows, Tile tile, Part part, int64_t bytes,
                           const void* zero_row, const void** found) {
    for (int i = part.first; i < part.stop; ++i) {
        found[i - part.first] =
            (tile.seen >> i) & 1 ? static_cast<const char*>(rows[i]) + bytes : zero_row;
    }
}

// What is read next: `bytes` of each seen row of a part. Lines are asked for a few at a time,
// between pieces of the present work, because the machine can wait for few of them at once.
class Stream {
  public:
    Stream(const void* const* rows, Tile tile, Part part, int64_t first_byte, int64_t bytes)
        : rows_(rows), tile_(tile), part_(part), first_byte_(first_byte), bytes_(bytes) {}

    void advance() {
        constexpr int kLines = 4;
        constexpr int64_t kLineBytes = 64;
        for (int i = 0; i < kLines && part_.first < part_.stop; ++i) {
            if ((tile_.seen >> part_.first) & 1) {
                const char* row = static_cast<const char*>(rows_[part_.first]) + first_byte_;
                __builtin_prefetch(row + at_, 0, 2);
                at_ += kLineBytes;
            } else {
                at_ = bytes_;
            }
            if (at_ >= bytes_) {
                at_ = 0;
                ++part_.first;
            }
        }
    }

  private:
    const void* const* rows_;
    Tile tile_;
    Part part_;
    int64_t first_byte_;
    int64_t bytes_;
    int64_t at_ = 0;
};

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
        highest = max(score, highest);  // a NaN is passed over here, and weighed below
    }
    const float seen_top = max_lanes(highest);
    const float top = seen_top > *row_top ? seen_top : *row_top;
    if (top > *row_top) {
        const float factor = exp_scalar(*row_top - top);
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

// The keys of a tile that some row of a group sees; none: first >= stop.
inline Part group_part(const AttentionArgs& args, int first_row, int stop_row, int tile_first) {
    Part part{kTile, 0};
    for (int row = first_row; row < stop_row; ++row) {
        const RowSpan seen = row_span(args, row, tile_first);
        if (seen.first < seen.stop) {
            part.first = smaller(part.first, seen.first);
            part.stop = larger(part.stop, seen.stop);
        }
    }
    return part;
}

// A block against one tile, in all heads: scores, weights, values. While it is computed, the next
// tile's rows are on their way to the cache.
template <class Operand>
class TileSum {
  public:
    TileSum(const AttentionArgs& args, const QueryBlock& block, const Workspace<Operand>& space,
            RangeSums sums)
        : args_(args), block_(block), space_(space), sums_(sums) {}

    void add(Tile tile, const TileRows& rows, Tile next, const TileRows& next_rows) {
        num_groups_ = 0;
        for (int row = block_.first; row < block_.stop; row += kGroupRows) {
            const int stop = smaller(row + kGroupRows, block_.stop);
            groups_[num_groups_++] = {row - block_.first, stop - block_.first,
                                      group_part(args_, row, stop, tile.first)};
        }
        // Heads share a token's row, so with several heads a part is read for all of them before
        // the next one; with one head and many rows larger parts are better.
        constexpr int kKeysAtOnce = kPanelWidth * kPanelsAtOnce;
        const int values_at_once = block_.num_heads > 1 ? kKeysAtOnce : kTile;
        for (int first = 0; first < kTile; first += kKeysAtOnce) {
            const Part part{first, first + kKeysAtOnce};
            const bool is_last = part.stop == kTile;
            Stream coming = is_last ? values_coming(rows, tile, {0, values_at_once})
                                    : keys_coming(rows, tile, after(part));
            multiply_keys(tile, rows, part, coming);
        }
        for (int head = 0; head < block_.num_heads; ++head) {
            for (int group = 0; group < num_groups_; ++group) {
                weigh(groups_[group], head * block_.num_rows(), tile.first);
            }
        }
        for (int first = 0; first < kTile; first += values_at_once) {
            const Part part{first, first + values_at_once};
            const bool is_last = part.stop == kTile;
            Stream coming = is_last ? keys_coming(next_rows, next, {0, kKeysAtOnce})
                                    : values_coming(rows, tile, after(part));
            add_values(tile, rows, part, coming);
        }
    }

  private:
    using Word = typename Operand::Word;
    using Value = typename Operand::Source::Value;
    static constexpr int kTileWords = kTile / Operand::kPerWord;

    // Rows [first, stop) of the block, and the keys that some of them see.
    struct Group {
        int first;
        int stop;
        Part seen;
    };

    static Part after(Part part) { return {part.stop, 2 * part.stop - part.first}; }

    Stream keys_coming(const TileRows& rows, Tile tile, Part part) const {
        return {rows.keys, tile, part, key_bytes(0), key_bytes(block_.num_heads) - key_bytes(0)};
    }

    Stream values_coming(const TileRows& rows, Tile tile, Part part) const {
        return {rows.values, tile, part, value_bytes(0),
                value_bytes(block_.num_heads) - value_bytes(0)};
    }

    // Bytes before the block's `nth` head in a token's keys; of all its heads for num_heads.
    int64_t kv_head(int nth) const {
        const int heads_per_kv = args_.num_heads / args_.num_kv_heads;
        return nth < block_.num_heads ? (block_.first_head + nth) / heads_per_kv
                                      : (block_.first_head + nth - 1) / heads_per_kv + 1;
    }

    int64_t key_bytes(int nth) const { return kv_head(nth) * args_.qk_dim * sizeof(Value); }

    int64_t value_bytes(int nth) const { return kv_head(nth) * args_.v_dim * sizeof(Value); }

    void multiply_keys(Tile tile, const TileRows& rows, Part part, Stream& coming) {
        const void* found[kTile];
        for (int head = 0; head < block_.num_heads; ++head) {
            find_part_rows(rows.keys, tile, part, key_bytes(head), space_.zero_row, found);
            Operand::pack_keys(found, part.stop - part.first, args_.qk_dim, space_.q_words,
                               space_.keys, coming);
            for (int i = 0; i < num_groups_; ++i) {
                const Group& group = groups_[i];
                if (group.seen.first >= part.stop || group.seen.stop <= part.first) {
                    continue;
                }
                const int64_t place = head * block_.num_rows() + group.first;
                multiply_panels<Operand>(space_.queries + place * space_.q_words, space_.q_words,
                                         space_.keys, space_.q_words, group.stop - group.first,
                                         (part.stop - part.first) / kPanelWidth,
                                         space_.scores + place * kTile + part.first, kTile);
            }
        }
    }

    // Scores of a group -> weights, in whole panels.
    void weigh(const Group& group, int head_place, int tile_first) {
        if (group.seen.first >= group.seen.stop) {
            return;
        }
        const int first = group.seen.first / kPanelWidth * kPanelWidth;
        const int stop = (group.seen.stop + kPanelWidth - 1) / kPanelWidth * kPanelWidth;
        const int64_t acc_width = space_.v_panels * kPanelWidth;
        for (int i = group.first; i < group.stop; ++i) {
            const int row = block_.first + i;
            const int64_t place = head_place + i;
            float* scores = space_.scores + place * kTile;
            Word* weights = space_.weights + place * kTileWords;
            const RowSpan seen = row_span(args_, row, tile_first);
            if (seen.first >= seen.stop) {
                std::memset(weights + first / Operand::kPerWord, 0,
                            (stop - first) / Operand::kPerWord * sizeof(Word));
                continue;
            }
            RowBias of_row{};
            const RowBias* bias = nullptr;
            if (args_.bias.position != nullptr) {
                of_row = row_bias(args_, row, tile_first);
                bias = &of_row;
            }
            if (args_.is_softmax) {
                softmax_weights<Operand>(args_, scores, weights, first, stop, seen, bias,
                                         sums_.acc + place * acc_width, acc_width,
                                         sums_.top + place, sums_.total + place);
            } else {
                silu_weights<Operand>(args_, scores, weights, first, stop, seen, bias);
            }
        }
    }

    void add_values(Tile tile, const TileRows& rows, Part part, Stream& coming) {
        const void* found[kTile];
        for (int head = 0; head < block_.num_heads; ++head) {
            find_part_rows(rows.values, tile, part, value_bytes(head), space_.zero_row, found);
            if constexpr (Operand::kHasDirectValues) {
                if (block_.num_rows() <= kDirectRows) {
                    add_direct_values(found, part, head, coming);
                    continue;
                }
            }
            Operand::pack_values(found, part.stop - part.first, args_.v_dim, space_.values, coming);
            add_packed_values(part, head);
        }
    }

    void add_direct_values(const void* const* found, Part part, int head, Stream& coming) {
        const int64_t acc_width = space_.v_panels * kPanelWidth;
        const Part seen = groups_[0].seen;
        const int first = larger(seen.first, part.first), stop = smaller(seen.stop, part.stop);
        for (int row = 0; row < block_.num_rows(); ++row) {
            const int64_t place = head * block_.num_rows() + row;
            Operand::add_values(space_.weights + place * kTileWords + part.first, found,
                                first - part.first, stop - part.first, args_.v_dim,
                                sums_.acc + place * acc_width, coming);
        }
    }

    void add_packed_values(Part part, int head) {
        const int64_t acc_width = space_.v_panels * kPanelWidth;
        const int part_words = (part.stop - part.first) / Operand::kPerWord;
        for (int i = 0; i < num_groups_; ++i) {
            const Group& group = groups_[i];
            const int first = larger(group.seen.first, part.first) / Operand::kPerWord;
            const int stop =
                (smaller(group.seen.stop, part.stop) + Operand::kPerWord - 1) / Operand::kPerWord;
            if (first >= stop) {
                continue;
            }
            const int64_t place = head * block_.num_rows() + group.first;
            const int skipped = first - part.first / Operand::kPerWord;
            for (int64_t panel = 0; panel < space_.v_panels; ++panel) {
                multiply_panel<Operand, true>(
                    space_.weights + place * kTileWords + first, kTileWords,
                    space_.values + (panel * part_words + skipped) * kPanelWidth, stop - first,
                    group.stop - group.first, sums_.acc + place * acc_width + panel * kPanelWidth,
                    acc_width);
            }
        }
    }

    const AttentionArgs& args_;
    const QueryBlock& block_;
    const Workspace<Operand>& space_;
    const RangeSums sums_;
    Group groups_[kMaxGroups];
    int num_groups_ = 0;
};

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
