// The row kernels of one instruction set. MTSERVE_ISA names it and the namespace.
//
// A row is taken vector after vector from its first value on; what is left over at its end is
// computed as a vector too. Statistics are float32: one sum in each lane, then across them.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

#include <type_traits>

#include "cpu/rows.h"
#include "cpu/simd/functions.h"
#include "cpu/simd/panels.h"

namespace mtserve::MTSERVE_ISA {

// fn(i, count) for all vectors of a row: values [i, i + count).
template <class Fn>
inline void each_vector(int64_t width, const Fn& fn) {
    int64_t i = 0;
    for (; i + Vec::kWidth <= width; i += Vec::kWidth) {
        fn(i, Vec::kWidth);
    }
    if (i < width) {
        fn(i, width - i);
    }
}

template <class Source>
inline Vec load_count(const typename Source::Value* source, int64_t count) {
    return count == Vec::kWidth ? Source::load(source) : load_some<Source>(source, count);
}

template <class Source>
inline void store_count(typename Source::Value* target, Vec vec, int64_t count) {
    if (count == Vec::kWidth) {
        Source::store(target, vec);
    } else {
        store_some<Source>(target, vec, count);
    }
}

template <class Source>
inline const typename Source::Value* row_of(const RowsIn& rows, int64_t row) {
    return static_cast<const typename Source::Value*>(rows.values) + row * rows.stride;
}

template <class Source>
inline typename Source::Value* row_of(const RowsOut& rows, int64_t row) {
    return static_cast<typename Source::Value*>(rows.values) + row * rows.stride;
}

// fn(source) with the source type of float32 or bfloat16 memory.
template <class Fn>
inline void with_source(bool is_bf16, const Fn& fn) {
    if (is_bf16) {
        fn(Bf16Source{});
    } else {
        fn(FloatSource{});
    }
}

#define MTSERVE_INLINE __attribute__((always_inline))

struct Moments {
    Vec mean;
    Vec scale;  // 1 / sqrt(variance + eps)
};

template <class Source>
inline Moments moments(const typename Source::Value* row, int64_t width, float eps) {
    Vec sum = broadcast(0.0f);
    each_vector(width, [&](int64_t i, int64_t count)
                           MTSERVE_INLINE { sum = sum + load_count<Source>(row + i, count); });
    const auto num_values = static_cast<float>(width);
    const Vec mean = broadcast(sum_lanes(sum) / num_values);
    Vec squares = broadcast(0.0f);
    each_vector(width, [&](int64_t i, int64_t count) MTSERVE_INLINE {
        Vec apart = load_count<Source>(row + i, count) - mean;
        if (count < Vec::kWidth) {
            apart = keep_lanes(apart, 0, static_cast<int>(count), broadcast(0.0f));
        }
        squares = fma(apart, apart, squares);
    });
    const float variance = sum_lanes(squares) / num_values;
    return {mean, broadcast(1.0f / __builtin_sqrtf(variance + eps))};
}

// Values [at, at + count) of a row, normed.
inline Vec normed(Vec x, const Moments& of_row, const Norm& norm, int64_t at, int64_t count) {
    const Vec standard = (x - of_row.mean) * of_row.scale;
    if (norm.weight == nullptr) {
        return standard;
    }
    return fma(standard, load_count<FloatSource>(norm.weight + at, count),
               load_count<FloatSource>(norm.bias + at, count));
}

inline void norm_rows(const NormArgs& args, int64_t first, int64_t stop) {
    with_source(args.x.is_bf16, [&](auto in) {
        with_source(args.out.is_bf16, [&](auto out) {
            using In = decltype(in);
            using Out = decltype(out);
            for (int64_t row = first; row < stop; ++row) {
                const auto* x = row_of<In>(args.x, row);
                auto* target = row_of<Out>(args.out, row);
                const Moments of_row = moments<In>(x, args.width, args.norm.eps);
                each_vector(args.width, [&](int64_t i, int64_t count) MTSERVE_INLINE {
                    const Vec value = load_count<In>(x + i, count);
                    store_count<Out>(target + i, normed(value, of_row, args.norm, i, count), count);
                });
            }
        });
    });
}

inline void silu_rows(const SiluArgs& args, int64_t first, int64_t stop) {
    with_source(args.x.is_bf16, [&](auto in) {
        with_source(args.out.is_bf16, [&](auto out) {
            using In = decltype(in);
            using Out = decltype(out);
            for (int64_t row = first; row < stop; ++row) {
                const auto* x = row_of<In>(args.x, row);
                auto* target = row_of<Out>(args.out, row);
                each_vector(args.silu_width, [&](int64_t i, int64_t count) MTSERVE_INLINE {
                    const Vec value = load_count<In>(x + i, count);
                    store_count<Out>(target + i, silu<std::is_same_v<Out, Bf16Source>>(value),
                                     count);
                });
                const auto* rest = x + args.silu_width;
                auto* rest_target = target + args.silu_width;
                each_vector(
                    args.width - args.silu_width, [&](int64_t i, int64_t count) MTSERVE_INLINE {
                        store_count<Out>(rest_target + i, load_count<In>(rest + i, count), count);
                    });
            }
        });
    });
}

template <class In, class Out>
inline void gate_row(const GateArgs& args, int64_t row) {
    const float* attended = row_of<FloatSource>(args.attended, row);
    const auto* u = row_of<In>(args.u, row);
    auto* out = row_of<Out>(args.out, row);
    const int64_t width = args.num_groups * args.group_width;
    const bool is_joined = args.form != GateForm::kProduct;
    auto* product = is_joined ? out + 2 * width : out;
    for (int64_t group = 0; group < args.num_groups; ++group) {
        const int64_t start = group * args.group_width;
        const Moments of_group =
            moments<FloatSource>(attended + start, args.group_width, args.norm.eps);
        each_vector(args.group_width, [&](int64_t i, int64_t count) MTSERVE_INLINE {
            const int64_t at = start + i;
            const Vec a = load_count<FloatSource>(attended + at, count);
            const Vec gate = load_count<In>(u + at, count);
            Vec n;
            if (args.is_per_group) {
                n = fma((a - of_group.mean) * of_group.scale, broadcast(args.norm.weight[group]),
                        broadcast(args.norm.bias[group]));
            } else {
                n = normed(a, of_group, args.norm, at, count);
            }
            if (is_joined) {
                store_count<Out>(out + at, gate, count);
                store_count<Out>(out + width + at, args.form == GateForm::kAttended ? a : n, count);
            }
            store_count<Out>(product + at, gate * n, count);
        });
    }
}

inline void gate_rows(const GateArgs& args, int64_t first, int64_t stop) {
    with_source(args.u.is_bf16, [&](auto in) {
        with_source(args.out.is_bf16, [&](auto out) {
            for (int64_t row = first; row < stop; ++row) {
                gate_row<decltype(in), decltype(out)>(args, row);
            }
        });
    });
}

template <class Y, class X>
inline void add_row(const AddArgs& args, int64_t row) {
    const auto* y = row_of<Y>(args.y, row);
    const auto* x = args.x.values == nullptr ? nullptr : row_of<X>(args.x, row);
    auto* out = row_of<X>(args.out, row);
    each_vector(args.width, [&](int64_t i, int64_t count) MTSERVE_INLINE {
        Vec sum = load_count<Y>(y + i, count);
        if (x != nullptr) {
            sum = sum + load_count<X>(x + i, count);
        }
        store_count<X>(out + i, sum, count);
    });
}

inline void add_rows(const AddArgs& args, int64_t first, int64_t stop) {
    with_source(args.y.is_bf16, [&](auto y) {
        with_source(args.out.is_bf16, [&](auto x) {
            for (int64_t row = first; row < stop; ++row) {
                add_row<decltype(y), decltype(x)>(args, row);
            }
        });
    });
}

#undef MTSERVE_INLINE

constexpr RowKernels kRowKernels = {norm_rows, silu_rows, gate_rows, add_rows};

}  // namespace mtserve::MTSERVE_ISA
