// The sums of a block over one tile. MTSERVE_ISA names the namespace.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

#include <cstring>

#include "cpu/attention.h"
#include "cpu/attention_tiles.h"
#include "cpu/attention_weights.h"
#include "cpu/simd/panels.h"

namespace mtserve::MTSERVE_ISA {

constexpr int kGroupRows = 24;  // rows that skip hidden keys together
constexpr int kDirectRows = 3;  // so few rows take their values straight from the pages
constexpr int kMaxGroups = (kMaxSums + kGroupRows - 1) / kGroupRows;
static_assert(kGroupRows % kMicroRows == 0);
static_assert(kTile % kPanelWidth == 0);

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

}  // namespace mtserve::MTSERVE_ISA
