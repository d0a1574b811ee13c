// Takes the place of the compiler's <immintrin.h> for kernels_avx512_bf16.cpp, so that a machine
// without AVX-512 runs its intrinsics in software: SIMDe's, and here those that SIMDe 0.7.4 lacks
// or computes with other roundings. Meanings: Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 2.

#pragma once

#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wconversion"
#include <simde/x86/avx512.h>
#pragma GCC diagnostic pop

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace mtserve_emulation {

template <class T, int kCount>
struct Lanes {
    T at[kCount];
};

// The lanes of a vector, and a vector of lanes.
template <class T, class Vector>
Lanes<T, sizeof(Vector) / sizeof(T)> lanes_of(Vector vector) {
    return std::bit_cast<Lanes<T, sizeof(Vector) / sizeof(T)>>(vector);
}

template <class Vector, class T, int kCount>
Vector vector_of(const Lanes<T, kCount>& lanes) {
    return std::bit_cast<Vector>(lanes);
}

inline float flushed(float x) {
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

inline float widened(uint16_t bf16) {
    return std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16);
}

// Nearest, ties to even; denormals become zeros, NaNs quiet ones.
inline uint16_t narrowed(float x) {
    const auto bits = std::bit_cast<uint32_t>(flushed(x));
    if (std::isnan(x)) {
        return static_cast<uint16_t>(bits >> 16 | 0x40u);
    }
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    const auto x = lanes_of<float>(a), y = lanes_of<float>(b);
    auto sum = lanes_of<float>(c);
    for (int i = 0; i < 16; ++i) {
        sum.at[i] = std::fma(x.at[i], y.at[i], sum.at[i]);
    }
    return vector_of<__m512>(sum);
}

// Two fused steps, the odd element first. Denormal inputs and results are zeros.
inline __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    const auto x = lanes_of<uint16_t>(a), y = lanes_of<uint16_t>(b);
    auto sum = lanes_of<float>(sums);
    for (int i = 0; i < 16; ++i) {
        for (int element = 2 * i + 1; element >= 2 * i; --element) {
            sum.at[i] = flushed(std::fma(flushed(widened(x.at[element])),
                                         flushed(widened(y.at[element])), flushed(sum.at[i])));
        }
    }
    return vector_of<__m512>(sum);
}

inline __m256bh cvtneps_pbh(__m512 a) {
    const auto from = lanes_of<float>(a);
    Lanes<uint16_t, 16> to;
    for (int i = 0; i < 16; ++i) {
        to.at[i] = narrowed(from.at[i]);
    }
    return vector_of<__m256bh>(to);
}

// The second operand's elements come first.
inline __m512bh cvtne2ps_pbh(__m512 a, __m512 b) {
    const auto late = lanes_of<float>(a), early = lanes_of<float>(b);
    Lanes<uint16_t, 32> to;
    for (int i = 0; i < 16; ++i) {
        to.at[i] = narrowed(early.at[i]);
        to.at[i + 16] = narrowed(late.at[i]);
    }
    return vector_of<__m512bh>(to);
}

// The nearest number of 14 significant bits: as far from 1 / a as the instruction may be, though
// its bits differ from one processor to another.
inline __m512 rcp14_ps(__m512 a) {
    auto lanes = lanes_of<float>(a);
    for (float& lane : lanes.at) {
        const auto bits = std::bit_cast<uint32_t>(1.0f / lane);
        lane = std::isfinite(1.0f / lane) ? std::bit_cast<float>((bits + 0x200u) & ~0x3ffu)
                                          : 1.0f / lane;
    }
    return vector_of<__m512>(lanes);
}

// Nearest, ties to even; what does not fit becomes the lowest integer.
inline __m512i cvtps_epi32(__m512 a) {
    const auto from = lanes_of<float>(a);
    Lanes<int32_t, 16> to;
    for (int i = 0; i < 16; ++i) {
        const float whole = std::nearbyint(from.at[i]);
        to.at[i] = whole >= -2147483648.0f && whole < 2147483648.0f ? static_cast<int32_t>(whole)
                                                                    : INT32_MIN;
    }
    return vector_of<__m512i>(to);
}

template <class T, class Vector>
__m512i widen_epi32(Vector narrow) {
    const auto from = lanes_of<T>(narrow);
    Lanes<int32_t, 16> to;
    for (int i = 0; i < 16; ++i) {
        to.at[i] = from.at[i];
    }
    return vector_of<__m512i>(to);
}

inline __m512 i32gather_ps(__m512i index, const void* base, int scale) {
    const auto from = lanes_of<int32_t>(index);
    Lanes<float, 16> to;
    for (int i = 0; i < 16; ++i) {
        const auto* source = static_cast<const char*>(base) + int64_t{from.at[i]} * scale;
        std::memcpy(&to.at[i], source, sizeof(float));
    }
    return vector_of<__m512>(to);
}

inline __m256 extractf32x8_ps(__m512 a, int half) {
    const auto from = lanes_of<float>(a);
    Lanes<float, 8> to;
    std::memcpy(to.at, from.at + 8 * half, sizeof to);
    return vector_of<__m256>(to);
}

inline float reduce_max_ps(__m512 a) {
    const auto lanes = lanes_of<float>(a);
    float largest = lanes.at[0];
    for (const float lane : lanes.at) {
        largest = largest > lane ? largest : lane;
    }
    return largest;
}

}  // namespace mtserve_emulation

using __mmask16 = simde__mmask16;

#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#undef _mm512_fmadd_ps
#undef _mm512_dpbf16_ps
#define _mm512_fmadd_ps mtserve_emulation::fmadd_ps
#define _mm512_dpbf16_ps mtserve_emulation::dpbf16_ps
#define _mm512_cvtneps_pbh mtserve_emulation::cvtneps_pbh
#define _mm512_cvtne2ps_pbh mtserve_emulation::cvtne2ps_pbh
#define _mm512_rcp14_ps mtserve_emulation::rcp14_ps
#define _mm512_cvtps_epi32 mtserve_emulation::cvtps_epi32
#define _mm512_cvtepu8_epi32 mtserve_emulation::widen_epi32<uint8_t>
#define _mm512_cvtepu16_epi32 mtserve_emulation::widen_epi32<uint16_t>
#define _mm512_i32gather_ps mtserve_emulation::i32gather_ps
#define _mm512_extractf32x8_ps mtserve_emulation::extractf32x8_ps
#define _mm512_reduce_max_ps mtserve_emulation::reduce_max_ps
