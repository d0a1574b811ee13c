// Vectors of 8 floats: AVX2 and FMA. The functions are described in base.h.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace mtserve::avx2 {

struct Vec {
    static constexpr int kWidth = 8;
    __m256 lanes;
};

// 12 sums, 2 panel vectors and a broadcast fit in 16 registers.
constexpr int kMicroRows = 6;
constexpr int kPanelVecs = 2;

inline Vec broadcast(float value) {
    return {_mm256_set1_ps(value)};
}

inline Vec load(const float* source) {
    return {_mm256_loadu_ps(source)};
}

inline void store(float* target, Vec vec) {
    _mm256_storeu_ps(target, vec.lanes);
}

inline Vec load_bf16(const uint16_t* source) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}

inline void store_bf16(uint16_t* target, Vec vec) {
    const __m256i bits = _mm256_castps_si256(vec.lanes);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 is_nan = _mm256_cmp_ps(vec.lanes, vec.lanes, _CMP_UNORD_Q);
    const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
    const __m256i high = _mm256_srli_epi32(chosen, 16);
    const __m256i packed =
        _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(packed));
}

inline Vec operator+(Vec a, Vec b) {
    return {_mm256_add_ps(a.lanes, b.lanes)};
}

inline Vec operator-(Vec a, Vec b) {
    return {_mm256_sub_ps(a.lanes, b.lanes)};
}

inline Vec operator*(Vec a, Vec b) {
    return {_mm256_mul_ps(a.lanes, b.lanes)};
}

inline Vec operator/(Vec a, Vec b) {
    return {_mm256_div_ps(a.lanes, b.lanes)};
}

inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lanes, b.lanes, c.lanes)};
}

inline Vec max(Vec a, Vec b) {
    return {_mm256_max_ps(a.lanes, b.lanes)};
}

inline Vec min(Vec a, Vec b) {
    return {_mm256_min_ps(a.lanes, b.lanes)};
}

inline Vec reciprocal(Vec a) {
    return broadcast(1.0f) / a;
}

inline Vec nearest(Vec a) {
    return {_mm256_round_ps(a.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

inline Vec times_power_of_two(Vec a, Vec n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.lanes), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(a.lanes, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}

inline Vec keep_lanes(Vec a, int first, int stop, Vec other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i kept = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                             _mm256_cmpgt_epi32(_mm256_set1_epi32(stop), lane));
    return {_mm256_blendv_ps(other.lanes, a.lanes, _mm256_castsi256_ps(kept))};
}

inline float sum_lanes(Vec a) {
    const __m128 half =
        _mm_add_ps(_mm256_castps256_ps128(a.lanes), _mm256_extractf128_ps(a.lanes, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

inline float max_lanes(Vec a) {
    const __m128 half =
        _mm_max_ps(_mm256_castps256_ps128(a.lanes), _mm256_extractf128_ps(a.lanes, 1));
    const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}

inline Vec look_up(const float* table, const uint8_t* index) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(index));
    return {_mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(bytes), 4)};
}

inline Vec half_words(const uint32_t* words, bool is_high) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    return {_mm256_castsi256_ps(is_high ? _mm256_and_si256(bits, _mm256_set1_epi32(~0xffff))
                                        : _mm256_slli_epi32(bits, 16))};
}

inline void transpose_words(const uint32_t* const rows[], uint32_t* target, int64_t stride) {
    __m256 in[8];
    for (int i = 0; i < 8; ++i) {
        in[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i]));
    }
    __m256 pairs[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(in[i], in[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(in[i], in[i + 1]);
    }
    __m256 fours[8];
    for (int i = 0; i < 8; i += 4) {
        fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    float* words = reinterpret_cast<float*>(target);
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(words + i * stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
        _mm256_storeu_ps(words + (i + 4) * stride,
                         _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
}

}  // namespace mtserve::avx2
