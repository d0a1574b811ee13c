// Vectors of 16 floats: AVX-512 F, BW, DQ, VL and BF16. The functions are described in base.h.

#pragma once

#define MTSERVE_HAS_BF16_PAIRS

// GCC 12 takes the undefined vectors of its own header for mistakes.
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

namespace mtserve::avx512_bf16 {

struct Vec {
    static constexpr int kWidth = 16;
    __m512 lanes;
};

// 24 sums, 4 panel vectors and a broadcast fit in 32 registers.
constexpr int kMicroRows = 6;
constexpr int kPanelVecs = 4;

inline Vec broadcast(float value) {
    return {_mm512_set1_ps(value)};
}

inline Vec load(const float* source) {
    return {_mm512_loadu_ps(source)};
}

inline void store(float* target, Vec vec) {
    _mm512_storeu_ps(target, vec.lanes);
}

inline Vec load_bf16(const uint16_t* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

inline void store_bf16(uint16_t* target, Vec vec) {
    const __m256bh bits = _mm512_cvtneps_pbh(vec.lanes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), (__m256i)bits);
}

inline Vec operator+(Vec a, Vec b) {
    return {_mm512_add_ps(a.lanes, b.lanes)};
}

inline Vec operator-(Vec a, Vec b) {
    return {_mm512_sub_ps(a.lanes, b.lanes)};
}

inline Vec operator*(Vec a, Vec b) {
    return {_mm512_mul_ps(a.lanes, b.lanes)};
}

inline Vec operator/(Vec a, Vec b) {
    return {_mm512_div_ps(a.lanes, b.lanes)};
}

inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)};
}

inline Vec max(Vec a, Vec b) {
    return {_mm512_max_ps(a.lanes, b.lanes)};
}

inline Vec min(Vec a, Vec b) {
    return {_mm512_min_ps(a.lanes, b.lanes)};
}

// Within 2^-14 of 1 / a.
inline Vec reciprocal(Vec a) {
    return {_mm512_rcp14_ps(a.lanes)};
}

inline Vec nearest(Vec a) {
    return {_mm512_roundscale_ps(a.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

inline Vec times_power_of_two(Vec a, Vec n) {
    return {_mm512_scalef_ps(a.lanes, n.lanes)};
}

inline Vec keep_lanes(Vec a, int first, int stop, Vec other) {
    const uint32_t below = first <= 0 ? 0u : first >= 16 ? 0xffffu : (1u << first) - 1u;
    const uint32_t until = stop <= 0 ? 0u : stop >= 16 ? 0xffffu : (1u << stop) - 1u;
    const auto kept = static_cast<__mmask16>(until & ~below);
    return {_mm512_mask_blend_ps(kept, other.lanes, a.lanes)};
}

inline float sum_lanes(Vec a) {
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(a.lanes), _mm512_extractf32x8_ps(a.lanes, 1));
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

inline float max_lanes(Vec a) {
    return _mm512_reduce_max_ps(a.lanes);
}

inline Vec look_up(const float* table, const uint8_t* index) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(index));
    return {_mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), table, 4)};
}

inline void transpose_words(const uint32_t* const rows[], uint32_t* target, int64_t stride) {
    __m512i in[16];
    for (int i = 0; i < 16; ++i) {
        in[i] = _mm512_loadu_si512(rows[i]);
    }
    __m512i pairs[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    // fours[4 b + w]: word w of each quarter, rows 4 b .. 4 b + 3.
    __m512i fours[16];
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int word = 0; word < 4; ++word) {
        const __m512i low = _mm512_shuffle_i32x4(fours[word], fours[word + 4], 0x88);
        const __m512i low_odd = _mm512_shuffle_i32x4(fours[word], fours[word + 4], 0xdd);
        const __m512i high = _mm512_shuffle_i32x4(fours[word + 8], fours[word + 12], 0x88);
        const __m512i high_odd = _mm512_shuffle_i32x4(fours[word + 8], fours[word + 12], 0xdd);
        _mm512_storeu_si512(target + word * stride, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_storeu_si512(target + (word + 4) * stride,
                            _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
        _mm512_storeu_si512(target + (word + 8) * stride, _mm512_shuffle_i32x4(low, high, 0xdd));
        _mm512_storeu_si512(target + (word + 12) * stride,
                            _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
    }
}

// Products of bfloat16 pairs, summed in float32: sum + a0 * b0 + a1 * b1 in each lane.
inline Vec dot_pairs(Vec sum, uint32_t pair, const uint32_t* pairs) {
    const __m512i a = _mm512_set1_epi32(static_cast<int>(pair));
    const __m512i b = _mm512_loadu_si512(pairs);
    return {_mm512_dpbf16_ps(sum.lanes, (__m512bh)a, (__m512bh)b)};
}

// 32 values as bfloat16, in order.
inline void store_bf16_pair(uint16_t* target, Vec low, Vec high) {
    _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(high.lanes, low.lanes));
}

// Words of two rows of 32 bfloat16 [low | high halves interleaved], in order: (a0 b0) (a1 b1) ...
inline void interleave_rows(const uint16_t* a, const uint16_t* b, uint32_t* target) {
    const __m512i even = _mm512_loadu_si512(a);
    const __m512i odd = _mm512_loadu_si512(b);
    const __m512i low = _mm512_unpacklo_epi16(even, odd);
    const __m512i high = _mm512_unpackhi_epi16(even, odd);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(target, _mm512_permutex2var_epi64(low, first, high));
    _mm512_storeu_si512(target + 16, _mm512_permutex2var_epi64(low, second, high));
}

}  // namespace mtserve::avx512_bf16
