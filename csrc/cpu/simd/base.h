// Vectors of 4 floats in GCC's portable notation: any machine.

#pragma once

#include <cstdint>
#include <cstring>

namespace mtserve::base {

struct Vec {
    static constexpr int kWidth = 4;
    typedef float Lanes __attribute__((vector_size(16)));
    Lanes lanes;
};

typedef int32_t IntLanes __attribute__((vector_size(16)));
typedef uint32_t UintLanes __attribute__((vector_size(16)));

// Rows of a micro-kernel and vectors of its panel: 8 sums, 2 panel vectors and a product fit in 16
// registers.
constexpr int kMicroRows = 4;
constexpr int kPanelVecs = 2;

inline Vec broadcast(float value) {
    return {Vec::Lanes{value, value, value, value}};
}

inline Vec load(const float* source) {
    Vec vec;
    std::memcpy(&vec.lanes, source, sizeof vec.lanes);
    return vec;
}

inline void store(float* target, Vec vec) {
    std::memcpy(target, &vec.lanes, sizeof vec.lanes);
}

inline Vec load_bf16(const uint16_t* source) {
    uint16_t bits[4];
    std::memcpy(bits, source, sizeof bits);
    const UintLanes wide = {bits[0], bits[1], bits[2], bits[3]};
    return {reinterpret_cast<Vec::Lanes>(wide << 16)};
}

// Rounds to nearest even; a NaN stays one.
inline void store_bf16(uint16_t* target, Vec vec) {
    const UintLanes bits = reinterpret_cast<UintLanes>(vec.lanes);
    const UintLanes rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const UintLanes is_nan = reinterpret_cast<UintLanes>(vec.lanes != vec.lanes);
    const UintLanes result = (rounded & ~is_nan) | (((bits >> 16) | 0x40u) & is_nan);
    for (int i = 0; i < 4; ++i) {
        target[i] = static_cast<uint16_t>(result[i]);
    }
}

inline Vec operator+(Vec a, Vec b) {
    return {a.lanes + b.lanes};
}

inline Vec operator-(Vec a, Vec b) {
    return {a.lanes - b.lanes};
}

inline Vec operator*(Vec a, Vec b) {
    return {a.lanes * b.lanes};
}

inline Vec operator/(Vec a, Vec b) {
    return {a.lanes / b.lanes};
}

// a * b + c, rounded twice here.
inline Vec fma(Vec a, Vec b, Vec c) {
    return {a.lanes * b.lanes + c.lanes};
}

// The larger; b where either is NaN.
inline Vec max(Vec a, Vec b) {
    return {a.lanes > b.lanes ? a.lanes : b.lanes};
}

inline Vec min(Vec a, Vec b) {
    return {a.lanes < b.lanes ? a.lanes : b.lanes};
}

inline Vec reciprocal(Vec a) {
    return broadcast(1.0f) / a;
}

// The nearest integers, for |a| < 2^22.
inline Vec nearest(Vec a) {
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23
    return (a + magic) - magic;
}

// a * 2^n for integers n in [-126, 127].
inline Vec times_power_of_two(Vec a, Vec n) {
    const IntLanes exponent = __builtin_convertvector(n.lanes, IntLanes);
    return {a.lanes * reinterpret_cast<Vec::Lanes>((exponent + 127) << 23)};
}

// Lanes [first, stop) of a, elsewhere `other`.
inline Vec keep_lanes(Vec a, int first, int stop, Vec other) {
    const IntLanes lane = {0, 1, 2, 3};
    const IntLanes kept = (lane >= first) & (lane < stop);
    return {kept ? a.lanes : other.lanes};
}

inline float sum_lanes(Vec a) {
    return (a.lanes[0] + a.lanes[2]) + (a.lanes[1] + a.lanes[3]);
}

inline float max_lanes(Vec a) {
    const float low = a.lanes[0] > a.lanes[1] ? a.lanes[0] : a.lanes[1];
    const float high = a.lanes[2] > a.lanes[3] ? a.lanes[2] : a.lanes[3];
    return low > high ? low : high;
}

inline Vec look_up(const float* table, const uint8_t* index) {
    return {Vec::Lanes{table[index[0]], table[index[1]], table[index[2]], table[index[3]]}};
}

// The low or the high half of each word, a bfloat16, as float.
inline Vec half_words(const uint32_t* words, bool is_high) {
    UintLanes bits;
    std::memcpy(&bits, words, sizeof bits);
    return {reinterpret_cast<Vec::Lanes>(is_high ? bits & 0xffff0000u : bits << 16)};
}

// Word j of each of the kWidth rows goes to target + j * stride, as one vector.
inline void transpose_words(const uint32_t* const rows[], uint32_t* target, int64_t stride) {
    for (int word = 0; word < 4; ++word) {
        for (int row = 0; row < 4; ++row) {
            uint32_t value;
            std::memcpy(&value, rows[row] + word, sizeof value);
            target[word * stride + row] = value;
        }
    }
}

}  // namespace mtserve::base
