// The input stage of one instruction set. MTSERVE_ISA names it and the namespace. Products are
// rounded before they are added, so that every instruction set gives the same bits.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

#include <cstring>

#include "cpu/embedding.h"
#include "cpu/row_kernels.h"

namespace mtserve::MTSERVE_ISA {

// sums += factor * row, over `width` values.
template <class Source>
inline void add_product(float* sums, float factor, const typename Source::Value* row,
                        int64_t width) {
    each_vector(width, [&](int64_t i, int64_t count) {
        const Vec product = broadcast(factor) * load_count<Source>(row + i, count);
        store_count<FloatSource>(sums + i, load_count<FloatSource>(sums + i, count) + product,
                                 count);
    });
}

inline float dense_value(int64_t bits) {
    const auto low = static_cast<uint32_t>(bits);
    float value;
    std::memcpy(&value, &low, sizeof value);
    return value;
}

// sums [width of the row] += what the term adds; `spare` is as long.
template <class Source>
inline void add_term(const EmbeddingTerm& term, const int64_t* record, float* sums, float* spare) {
    const auto* table = static_cast<const typename Source::Value*>(term.table);
    float* target = sums + term.offset;
    if (term.num_dense == 0) {
        const int64_t row = record[term.column];
        if (row >= 0) {
            add_product<Source>(target, 1.0f, table + row * term.width, term.width);
        }
        return;
    }
    std::memset(spare, 0, term.width * sizeof(float));
    for (int64_t i = 0; i < term.num_dense; ++i) {
        add_product<Source>(spare, dense_value(record[term.column + i]), table + i * term.width,
                            term.width);
    }
    add_product<FloatSource>(target, 1.0f, spare, term.width);
}

template <class Source>
inline void embed_row(const EmbeddingArgs& args, int64_t row, float* sums) {
    const int64_t* record = args.records + row * args.num_columns;
    auto* out = static_cast<typename Source::Value*>(args.out) + row * args.width;
    float* others = sums + args.width;
    float* spare = others + args.width;
    std::memset(sums, 0, 2 * args.width * sizeof(float));
    for (int64_t i = 0; i < args.num_scaled; ++i) {
        add_term<Source>(args.terms[i], record, sums, spare);
    }
    for (int64_t i = args.num_scaled; i < args.num_terms; ++i) {
        add_term<Source>(args.terms[i], record, others, spare);
    }
    each_vector(args.width, [&](int64_t i, int64_t count) {
        const Vec scaled = load_count<FloatSource>(sums + i, count) * broadcast(args.scale);
        const Vec other = load_count<FloatSource>(others + i, count);
        store_count<Source>(out + i, scaled + other, count);
    });
}

inline void embed_rows(const EmbeddingArgs& args, int64_t first, int64_t stop, float* sums) {
    with_source(args.is_bf16, [&](auto source) {
        for (int64_t row = first; row < stop; ++row) {
            embed_row<decltype(source)>(args, row, sums);
        }
    });
}

}  // namespace mtserve::MTSERVE_ISA
