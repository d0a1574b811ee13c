// Scores of one instruction set. MTSERVE_ISA names it and the namespace.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

#include "cpu/row_kernels.h"
#include "cpu/top_items.h"

namespace mtserve::MTSERVE_ISA {

// Four sums at a time, then the rest: enough of them to keep up with memory.
template <class Source>
inline float score_item(const float* user, const typename Source::Value* row, int64_t width) {
    Vec sums[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
    constexpr int64_t kStep = 4 * Vec::kWidth;
    int64_t i = 0;
    for (; i + kStep <= width; i += kStep) {
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            const int64_t at = i + part * Vec::kWidth;
            sums[part] = fma(load(user + at), Source::load(row + at), sums[part]);
        }
    }
    for (; i < width; i += Vec::kWidth) {
        const int64_t count = width - i < Vec::kWidth ? width - i : Vec::kWidth;
        sums[0] = fma(load_count<FloatSource>(user + i, count), load_count<Source>(row + i, count),
                      sums[0]);
    }
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

inline void score_items(const ItemTable& table, const float* user, int64_t first, int64_t stop,
                        float* scores) {
    with_source(table.is_bf16, [&](auto source) {
        using Source = decltype(source);
        const auto* rows = static_cast<const typename Source::Value*>(table.rows);
        for (int64_t item = first; item < stop; ++item) {
            const float dot = score_item<Source>(user, rows + item * table.width, table.width);
            scores[item - first] = table.norms == nullptr ? dot : dot / table.norms[item];
        }
    });
}

}  // namespace mtserve::MTSERVE_ISA
