// Functions of vectors, written once for all instruction sets. MTSERVE_ISA names the namespace.

#pragma once

#ifndef MTSERVE_ISA
#error "include from a kernels_*.cpp"
#endif

namespace mtserve::MTSERVE_ISA {

inline Vec clamp(Vec a, float low, float high) {
    return min(max(a, broadcast(low)), broadcast(high));
}

// e^x for x in [-87, 88], relative error below 2e-7; exp(0) is 1. With kCoarse below 5e-5, which is
// a hundredth of bfloat16's step. Method: Cephes, expf.
template <bool kCoarse>
inline Vec exp_bounded(Vec x) {
    const Vec n = nearest(x * broadcast(1.44269504f));
    Vec r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Vec p;
    if constexpr (kCoarse) {
        p = fma(broadcast(4.1665795e-2f), r, broadcast(1.6666665e-1f));
    } else {
        p = fma(broadcast(1.9875691500e-4f), r, broadcast(1.3981999507e-3f));
        p = fma(p, r, broadcast(8.3334519073e-3f));
        p = fma(p, r, broadcast(4.1665795894e-2f));
        p = fma(p, r, broadcast(1.6666665459e-1f));
    }
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p * r, r, r) + broadcast(1.0f);
    return p * power_of_two(n);
}

// x / (1 + e^-x).
template <bool kCoarse>
inline Vec silu(Vec x) {
    const Vec e = exp_bounded<kCoarse>(clamp(broadcast(0.0f) - x, -87.0f, 88.0f));
    if constexpr (kCoarse) {
        return x * reciprocal(e + broadcast(1.0f));
    } else {
        return x / (e + broadcast(1.0f));
    }
}

}  // namespace mtserve::MTSERVE_ISA
