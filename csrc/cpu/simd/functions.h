// Functions of vectors, written once for all instruction sets. MTSERVE_ISA names the namespace.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

namespace mtserve::MTSERVE_ISA {

// A NaN stays one.
inline Vec clamp(Vec a, float low, float high) {
    return min(broadcast(high), max(broadcast(low), a));
}

// 2^x for x in [-126, 127], relative error below 5e-6: a hundredth of bfloat16's step and less.
inline Vec exp2_coarse(Vec x) {
    const Vec n = nearest(x);
    const Vec f = x - n;
    Vec p = fma(broadcast(9.6181291e-3f), f, broadcast(5.5504109e-2f));
    p = fma(p, f, broadcast(2.4022651e-1f));
    p = fma(p, f, broadcast(6.9314718e-1f));
    p = fma(p, f, broadcast(1.0f));
    return times_power_of_two(p, n);
}

// e^x for x in [-87, 88], relative error below 2e-7, coarse 5e-6; exp(0) is 1.
template <bool kIsCoarse>
inline Vec exp_bounded(Vec x) {
    constexpr float kLog2E = 1.44269504f;
    if constexpr (kIsCoarse) {
        return exp2_coarse(x * broadcast(kLog2E));
    } else {
        // Cephes, expf.
        const Vec n = nearest(x * broadcast(kLog2E));
        Vec r = fma(n, broadcast(-0.693359375f), x);
        r = fma(n, broadcast(2.12194440e-4f), r);
        Vec p = fma(broadcast(1.9875691500e-4f), r, broadcast(1.3981999507e-3f));
        p = fma(p, r, broadcast(8.3334519073e-3f));
        p = fma(p, r, broadcast(4.1665795894e-2f));
        p = fma(p, r, broadcast(1.6666665459e-1f));
        p = fma(p, r, broadcast(5.0000001201e-1f));
        p = fma(p * r, r, r) + broadcast(1.0f);
        return times_power_of_two(p, n);
    }
}

// x / (1 + e^-x); as of -87 where x is below it.
template <bool kIsCoarse>
inline Vec silu(Vec x) {
    const Vec bounded = max(broadcast(-87.0f), x);
    if constexpr (kIsCoarse) {
        const Vec e = exp2_coarse(max(broadcast(-126.0f), bounded * broadcast(-1.44269504f)));
        return bounded * reciprocal(e + broadcast(1.0f));
    } else {
        const Vec e = exp_bounded<false>(max(broadcast(-87.0f), broadcast(0.0f) - bounded));
        return bounded / (e + broadcast(1.0f));
    }
}

}  // namespace mtserve::MTSERVE_ISA
