// From scores to weights: alpha, bias, and the score function. MTSERVE_ISA names the namespace.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

#include <cmath>

#include "cpu/attention.h"
#include "cpu/attention_tiles.h"
#include "cpu/simd/functions.h"
#include "cpu/simd/panels.h"

namespace mtserve::MTSERVE_ISA {

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

}  // namespace mtserve::MTSERVE_ISA
