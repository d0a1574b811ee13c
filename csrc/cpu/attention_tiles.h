// Tiles of keys as a block of rows sees them: which keys, where they stand, and what is read next.
// MTSERVE_ISA names the namespace.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

#include <cstring>

#include "cpu/attention.h"
#include "cpu/simd/panels.h"

namespace mtserve::MTSERVE_ISA {

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

}  // namespace mtserve::MTSERVE_ISA
