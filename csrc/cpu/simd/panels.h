// Matrix products over packed panels, and the operands they take. MTSERVE_ISA names the namespace.
//
// A *word* is what one lane multiplies in one step: a float, or with AVX-512 BF16 a pair of
// bfloat16. A panel is [steps][kPanelWidth] words, contiguous.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

#include <cstring>

#include "cpu/simd/functions.h"

namespace mtserve::MTSERVE_ISA {

constexpr int kPanelWidth = kPanelVecs * Vec::kWidth;
constexpr int kPanelsAtOnce = kPanelVecs >= 4 ? 1 : 2;  // so that one row has enough sums under way
static_assert(kTile % (kPanelWidth * kPanelsAtOnce) == 0);

inline int64_t padded_width(int width) {
    return (width + kPanelWidth - 1) / kPanelWidth * kPanelWidth;
}

// Memory of floats, and of bfloat16, as vectors.
struct FloatSource {
    using Value = float;

    static Vec load(const float* source) { return MTSERVE_ISA::load(source); }

    static void store(float* target, Vec vec) { MTSERVE_ISA::store(target, vec); }
};

struct Bf16Source {
    using Value = uint16_t;

    static Vec load(const uint16_t* source) { return load_bf16(source); }

    static void store(uint16_t* target, Vec vec) { store_bf16(target, vec); }
};

// The first `count` < kWidth values, zeros behind them.
template <class Source>
inline Vec load_some(const typename Source::Value* source, int64_t count) {
    typename Source::Value values[Vec::kWidth] = {};
    std::memcpy(values, source, count * sizeof *source);
    return Source::load(values);
}

template <class Source>
inline void store_some(typename Source::Value* target, Vec vec, int64_t count) {
    typename Source::Value values[Vec::kWidth];
    Source::store(values, vec);
    std::memcpy(target, values, count * sizeof *target);
}

inline float exp_scalar(float x) {
    float lanes[Vec::kWidth];
    store(lanes, exp_bounded<false>(clamp(broadcast(x), -87.0f, 88.0f)));
    return lanes[0];
}

inline float silu_scalar(float x) {
    float lanes[Vec::kWidth];
    store(lanes, silu<false>(broadcast(x)));
    return lanes[0];
}

// The product of two rows; lanes first, then across them.
template <class Source>
inline float dot_rows(const typename Source::Value* a, const typename Source::Value* b,
                      int64_t width) {
    Vec sum = broadcast(0.0f);
    int64_t i = 0;
    for (; i + Vec::kWidth <= width; i += Vec::kWidth) {
        sum = fma(Source::load(a + i), Source::load(b + i), sum);
    }
    if (i < width) {
        sum = fma(load_some<Source>(a + i, width - i), load_some<Source>(b + i, width - i), sum);
    }
    return sum_lanes(sum);
}

// acc += weight * row; acc is padded to whole vectors.
template <class Source>
inline void add_scaled(float weight, const typename Source::Value* row, int64_t width, float* acc) {
    const Vec factor = broadcast(weight);
    int64_t i = 0;
    for (; i + Vec::kWidth <= width; i += Vec::kWidth) {
        store(acc + i, fma(factor, Source::load(row + i), load(acc + i)));
    }
    if (i < width) {
        store(acc + i, fma(factor, load_some<Source>(row + i, width - i), load(acc + i)));
    }
}

inline void scale_row(const float* source, float factor, int64_t width, float* target) {
    int64_t i = 0;
    for (; i + Vec::kWidth <= width; i += Vec::kWidth) {
        store(target + i, load(source + i) * broadcast(factor));
    }
    if (i < width) {
        store_some<FloatSource>(target + i, load(source + i) * broadcast(factor), width - i);
    }
}

// Words [first, first + kWidth) of each of kWidth rows of `num_words`, transposed to
// target[word * stride + row]. Words past the end of the rows are zeros.
inline void transpose_part(const void* const rows[], int64_t row_bytes, int64_t first_word,
                           uint32_t* target, int64_t stride) {
    const uint32_t* starts[Vec::kWidth];
    uint32_t tails[Vec::kWidth][Vec::kWidth];
    const int64_t left = row_bytes - 4 * first_word;
    for (int i = 0; i < Vec::kWidth; ++i) {
        const char* start = static_cast<const char*>(rows[i]) + 4 * first_word;
        if (left >= 4 * Vec::kWidth) {
            starts[i] = reinterpret_cast<const uint32_t*>(start);
        } else {
            std::memset(tails[i], 0, sizeof tails[i]);
            std::memcpy(tails[i], start, left);
            starts[i] = tails[i];
        }
    }
    transpose_words(starts, target, stride);
}

// acc += sum over keys [first, stop) of weights[key] * rows[key], in order of the keys: the bits of
// multiply_panel, without packed values.
template <class Source, class Stream>
inline void add_weighted_rows(const float* weights, const void* const rows[], int first, int stop,
                              int width, float* acc, Stream& stream) {
    constexpr int kVecs = 8;
    int column = 0;
    for (; column + kVecs * Vec::kWidth <= width; column += kVecs * Vec::kWidth) {
        Vec sums[kVecs];
#pragma GCC unroll 8
        for (int vec = 0; vec < kVecs; ++vec) {
            sums[vec] = load(acc + column + vec * Vec::kWidth);
        }
        for (int key = first; key < stop; ++key) {
            const auto* row = static_cast<const typename Source::Value*>(rows[key]) + column;
            const Vec weight = broadcast(weights[key]);
            stream.advance();
#pragma GCC unroll 8
            for (int vec = 0; vec < kVecs; ++vec) {
                sums[vec] = fma(weight, Source::load(row + vec * Vec::kWidth), sums[vec]);
            }
        }
#pragma GCC unroll 8
        for (int vec = 0; vec < kVecs; ++vec) {
            store(acc + column + vec * Vec::kWidth, sums[vec]);
        }
    }
    for (int key = first; column < width && key < stop; ++key) {
        const auto* row = static_cast<const typename Source::Value*>(rows[key]) + column;
        add_scaled<Source>(weights[key], row, width - column, acc + column);
    }
}

// Floats: one dimension (or key) a step.
struct FloatWords {
    using Word = float;
    static constexpr int kPerWord = 1;
    static constexpr int kStoreVecs = 1;
    static constexpr bool kHasDirectValues = true;

    static Vec multiply(Vec sum, float a, const float* b) {
        return fma(broadcast(a), load(b), sum);
    }

    static void store_weights(float* weights, int column, const Vec* values) {
        store(weights + column, values[0]);
    }
};

// float32 K and V.
struct FloatOperand : FloatWords {
    using Source = FloatSource;
    static constexpr bool kIsCoarse = false;

    static void pack_row(const float* row, int width, float* words) {
        std::memcpy(words, row, width * sizeof(float));
    }

    template <class Stream>
    static void pack_keys(const void* const rows[], int num_keys, int width, int64_t num_words,
                          float* panels, Stream& stream) {
        float block[Vec::kWidth * Vec::kWidth];
        for (int key = 0; key < num_keys; key += Vec::kWidth) {
            float* column =
                panels + key / kPanelWidth * num_words * kPanelWidth + key % kPanelWidth;
            for (int64_t word = 0; word < num_words; word += Vec::kWidth) {
                stream.advance();
                const int64_t count = num_words - word;
                if (count >= Vec::kWidth) {
                    transpose_part(rows + key, 4 * width, word,
                                   reinterpret_cast<uint32_t*>(column + word * kPanelWidth),
                                   kPanelWidth);
                    continue;
                }
                transpose_part(rows + key, 4 * width, word, reinterpret_cast<uint32_t*>(block),
                               Vec::kWidth);
                for (int64_t i = 0; i < count; ++i) {
                    store(column + (word + i) * kPanelWidth, load(block + i * Vec::kWidth));
                }
            }
        }
    }

    template <class Stream>
    static void pack_values(const void* const rows[], int num_keys, int width, float* panels,
                            Stream& stream) {
        pack_value_rows<Source>(rows, num_keys, width, panels, stream);
    }

    template <class Stream>
    static void add_values(const float* weights, const void* const rows[], int first, int stop,
                           int width, float* acc, Stream& stream) {
        add_weighted_rows<Source>(weights, rows, first, stop, width, acc, stream);
    }

    // Rows of values -> panels of floats, zeros beyond the width.
    template <class From, class Stream>
    static void pack_value_rows(const void* const rows[], int num_keys, int width, float* panels,
                                Stream& stream) {
        const int64_t panel_floats = int64_t{kPanelWidth} * num_keys;
        for (int key = 0; key < num_keys; ++key, panels += kPanelWidth) {
            stream.advance();
            const auto* row = static_cast<const typename From::Value*>(rows[key]);
            for (int column = 0; column < padded_width(width); column += Vec::kWidth) {
                const int count = width - column;
                store(panels + column / kPanelWidth * panel_floats + column % kPanelWidth,
                      count >= Vec::kWidth ? From::load(row + column)
                      : count > 0          ? load_some<From>(row + column, count)
                                           : broadcast(0.0f));
            }
        }
    }
};

#if defined(MTSERVE_HAS_BF16_PAIRS)

// bfloat16 K and V, multiplied in pairs: two dimensions (or keys) a step.
struct Bf16Operand {
    using Source = Bf16Source;
    using Word = uint32_t;
    static constexpr int kPerWord = 2;
    static constexpr int kStoreVecs = 2;
    static constexpr bool kHasDirectValues = false;
    static constexpr bool kIsCoarse = true;

    static Vec multiply(Vec sum, uint32_t a, const uint32_t* b) { return dot_pairs(sum, a, b); }

    static void store_weights(uint32_t* weights, int column, const Vec* values) {
        store_bf16_pair(reinterpret_cast<uint16_t*>(weights) + column, values[0], values[1]);
    }

    static void pack_row(const uint16_t* row, int width, uint32_t* words) {
        words[(width - 1) / 2] = 0;
        std::memcpy(words, row, width * sizeof(uint16_t));
    }

    template <class Stream>
    static void pack_keys(const void* const rows[], int num_keys, int width, int64_t num_words,
                          uint32_t* panels, Stream& stream) {
        uint32_t block[Vec::kWidth * Vec::kWidth];
        for (int key = 0; key < num_keys; key += Vec::kWidth) {
            uint32_t* column =
                panels + key / kPanelWidth * num_words * kPanelWidth + key % kPanelWidth;
            for (int64_t word = 0; word < num_words; word += Vec::kWidth) {
                stream.advance();
                const int64_t count = num_words - word;
                if (count >= Vec::kWidth) {
                    transpose_part(rows + key, 2 * width, word, column + word * kPanelWidth,
                                   kPanelWidth);
                    continue;
                }
                transpose_part(rows + key, 2 * width, word, block, Vec::kWidth);
                for (int64_t i = 0; i < count; ++i) {
                    std::memcpy(column + (word + i) * kPanelWidth, block + i * Vec::kWidth,
                                4 * Vec::kWidth);
                }
            }
        }
    }

    template <class Stream>
    static void pack_values(const void* const rows[], int num_keys, int width, uint32_t* panels,
                            Stream& stream) {
        constexpr int kPart = 2 * Vec::kWidth;
        const int64_t panel_words = int64_t{kPanelWidth} * (num_keys / 2);
        for (int key = 0; key < num_keys; key += 2, panels += kPanelWidth) {
            stream.advance();
            stream.advance();
            const auto* even = static_cast<const uint16_t*>(rows[key]);
            const auto* odd = static_cast<const uint16_t*>(rows[key + 1]);
            for (int column = 0; column < padded_width(width); column += kPart) {
                uint32_t* target =
                    panels + column / kPanelWidth * panel_words + column % kPanelWidth;
                const int count = width - column;
                if (count >= kPart) {
                    interleave_rows(even + column, odd + column, target);
                    continue;
                }
                uint16_t tails[2][kPart] = {};
                if (count > 0) {
                    std::memcpy(tails[0], even + column, count * sizeof(uint16_t));
                    std::memcpy(tails[1], odd + column, count * sizeof(uint16_t));
                }
                interleave_rows(tails[0], tails[1], target);
            }
        }
    }
};

#else

// bfloat16 K and V, widened when they are packed.
struct Bf16Operand : FloatWords {
    using Source = Bf16Source;
    static constexpr bool kIsCoarse = true;

    static void pack_row(const uint16_t* row, int width, float* words) {
        int i = 0;
        for (; i + Vec::kWidth <= width; i += Vec::kWidth) {
            store(words + i, load_bf16(row + i));
        }
        if (i < width) {
            store_some<FloatSource>(words + i, load_some<Source>(row + i, width - i), width - i);
        }
    }

    template <class Stream>
    static void pack_keys(const void* const rows[], int num_keys, int width, int64_t num_words,
                          float* panels, Stream& stream) {
        uint32_t pairs[Vec::kWidth * Vec::kWidth];
        for (int key = 0; key < num_keys; key += Vec::kWidth) {
            float* column =
                panels + key / kPanelWidth * num_words * kPanelWidth + key % kPanelWidth;
            for (int64_t first = 0; first < num_words; first += 2 * Vec::kWidth) {
                stream.advance();
                transpose_part(rows + key, 2 * width, first / 2, pairs, Vec::kWidth);
                float* target = column + first * kPanelWidth;
                const int64_t left = num_words - first;
                if (left >= 2 * Vec::kWidth) {
#pragma GCC unroll 16
                    for (int i = 0; i < 2 * Vec::kWidth; ++i) {
                        store(target + i * kPanelWidth, widened(pairs, i));
                    }
                    continue;
                }
                for (int i = 0; i < left; ++i) {
                    store(target + i * kPanelWidth, widened(pairs, i));
                }
            }
        }
    }

    template <class Stream>
    static void pack_values(const void* const rows[], int num_keys, int width, float* panels,
                            Stream& stream) {
        FloatOperand::pack_value_rows<Source>(rows, num_keys, width, panels, stream);
    }

    template <class Stream>
    static void add_values(const float* weights, const void* const rows[], int first, int stop,
                           int width, float* acc, Stream& stream) {
        add_weighted_rows<Source>(weights, rows, first, stop, width, acc, stream);
    }

  private:
    // Dimension i of transposed pairs.
    static Vec widened(const uint32_t* pairs, int i) {
        return half_words(pairs + i / 2 * Vec::kWidth, i % 2 == 1);
    }
};

#endif

// c (+)= a @ panel for kRows rows: c[r][0..kPanelWidth) from a[r][0..steps).
template <class Operand, int kRows, bool kAdds>
inline void multiply_rows(const typename Operand::Word* a, int64_t a_stride,
                          const typename Operand::Word* panel, int64_t steps, float* c,
                          int64_t c_stride) {
    Vec sums[kRows][kPanelVecs];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int vec = 0; vec < kPanelVecs; ++vec) {
            sums[row][vec] = kAdds ? load(c + row * c_stride + vec * Vec::kWidth) : broadcast(0.0f);
        }
    }
    for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int vec = 0; vec < kPanelVecs; ++vec) {
                sums[row][vec] = Operand::multiply(sums[row][vec], a[row * a_stride + step],
                                                   panel + vec * Vec::kWidth);
            }
        }
        panel += kPanelWidth;
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int vec = 0; vec < kPanelVecs; ++vec) {
            store(c + row * c_stride + vec * Vec::kWidth, sums[row][vec]);
        }
    }
}

// c = a @ panels for one row, whose sums in one panel are too few to keep the machine busy: panels
// side by side. c has the panels' columns one after another.
template <class Operand, int kPanels>
inline void multiply_row(const typename Operand::Word* a, const typename Operand::Word* panels,
                         int64_t steps, float* c) {
    Vec sums[kPanels][kPanelVecs];
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma GCC unroll 4
        for (int vec = 0; vec < kPanelVecs; ++vec) {
            sums[panel][vec] = broadcast(0.0f);
        }
    }
    for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 8
        for (int panel = 0; panel < kPanels; ++panel) {
#pragma GCC unroll 4
            for (int vec = 0; vec < kPanelVecs; ++vec) {
                sums[panel][vec] = Operand::multiply(
                    sums[panel][vec], a[step],
                    panels + (panel * steps + step) * kPanelWidth + vec * Vec::kWidth);
            }
        }
    }
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma GCC unroll 4
        for (int vec = 0; vec < kPanelVecs; ++vec) {
            store(c + panel * kPanelWidth + vec * Vec::kWidth, sums[panel][vec]);
        }
    }
}

// The last rows, fewer than kMicroRows.
template <class Operand, bool kAdds, int kRows = kMicroRows - 1>
inline void multiply_last_rows(int num_rows, const typename Operand::Word* a, int64_t a_stride,
                               const typename Operand::Word* panel, int64_t steps, float* c,
                               int64_t c_stride) {
    if constexpr (kRows > 0) {
        if (num_rows == kRows) {
            multiply_rows<Operand, kRows, kAdds>(a, a_stride, panel, steps, c, c_stride);
        } else {
            multiply_last_rows<Operand, kAdds, kRows - 1>(num_rows, a, a_stride, panel, steps, c,
                                                          c_stride);
        }
    }
}

// c (+)= a @ panel for any number of rows. A row's bits do not depend on their number.
template <class Operand, bool kAdds>
void multiply_panel(const typename Operand::Word* a, int64_t a_stride,
                    const typename Operand::Word* panel, int64_t steps, int num_rows, float* c,
                    int64_t c_stride) {
    int row = 0;
    for (; row + kMicroRows <= num_rows; row += kMicroRows) {
        multiply_rows<Operand, kMicroRows, kAdds>(a + row * a_stride, a_stride, panel, steps,
                                                  c + row * c_stride, c_stride);
    }
    multiply_last_rows<Operand, kAdds>(num_rows - row, a + row * a_stride, a_stride, panel, steps,
                                       c + row * c_stride, c_stride);
}

// c = a @ panels for panels that follow each other, [num_panels][steps][kPanelWidth].
template <class Operand>
void multiply_panels(const typename Operand::Word* a, int64_t a_stride,
                     const typename Operand::Word* panels, int64_t steps, int num_rows,
                     int num_panels, float* c, int64_t c_stride) {
    int panel = 0;
    if (num_rows == 1) {
        for (; panel + kPanelsAtOnce <= num_panels; panel += kPanelsAtOnce) {
            multiply_row<Operand, kPanelsAtOnce>(a, panels + panel * steps * kPanelWidth, steps,
                                                 c + panel * kPanelWidth);
        }
    }
    for (; panel < num_panels; ++panel) {
        multiply_panel<Operand, false>(a, a_stride, panels + panel * steps * kPanelWidth, steps,
                                       num_rows, c + panel * kPanelWidth, c_stride);
    }
}

}  // namespace mtserve::MTSERVE_ISA
