// XXH3_64bits_withSeed of inputs above 240 bytes, after the specification in xxHash's
// doc/xxhash_spec.md (version 0.2.0). The tests compare it with the xxhash package.

#include "cpu/fingerprint.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

namespace {

constexpr int kPairs = 4;  // of words in a stripe
constexpr int64_t kStripeBytes = 16 * kPairs;
constexpr int kSecretWords = 24;
constexpr int kStripesPerBlock = 16;

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F,
                   kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63,
                   kPrime64_5 = 0x27D4EB2F165667C5;

__extension__ using Wide = unsigned __int128;
using Pair = uint64_t __attribute__((vector_size(16)));
using Secret = std::array<uint64_t, kSecretWords>;

constexpr Secret kSecret = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};

Secret secret_of(uint64_t seed) {
    Secret secret = kSecret;
    for (int i = 0; i < kSecretWords; i += 2) {
        secret[i] += seed;
        secret[i + 1] -= seed;
    }
    return secret;
}

Pair pair_at(const std::byte* from) {
    Pair pair;
    std::memcpy(&pair, from, sizeof(pair));
    return pair;
}

// The product of both halves of each word.
Pair product_of_halves(Pair words) {
#ifdef __SSE2__
    const auto whole = std::bit_cast<__m128i>(words);
    return std::bit_cast<Pair>(_mm_mul_epu32(whole, _mm_srli_epi64(whole, 32)));
#else
    return (words & 0xFFFFFFFF) * (words >> 32);
#endif
}

// The accumulators in two parts: acc[i] = products[i] + words[i ^ 1], which `fold` puts together.
struct Accumulators {
    Pair products[kPairs] = {{kPrime32_3, kPrime64_1},
                             {kPrime64_2, kPrime64_3},
                             {kPrime64_4, kPrime32_2},
                             {kPrime64_5, kPrime32_1}};
    Pair words[kPairs] = {};

    void add(const std::byte* stripe, const std::byte* secret) {
        for (int i = 0; i < kPairs; ++i) {
            const Pair input = pair_at(stripe + 16 * i);
            words[i] += input;
            products[i] += product_of_halves(input ^ pair_at(secret + 16 * i));
        }
    }

    void fold() {
        for (int i = 0; i < kPairs; ++i) {
            products[i] += Pair{words[i][1], words[i][0]};
            words[i] = Pair{};
        }
    }

    void scramble(const std::byte* secret) {
        fold();
        for (int i = 0; i < kPairs; ++i) {
            const Pair mixed = products[i] ^ (products[i] >> 47) ^ pair_at(secret + 16 * i);
            products[i] = mixed * kPrime32_1;
        }
    }

    uint64_t merge(const std::byte* secret, uint64_t length) {
        fold();
        uint64_t hash = length * kPrime64_1;
        for (int i = 0; i < kPairs; ++i) {
            const Pair factors = products[i] ^ pair_at(secret + 16 * i);
            const Wide product = Wide{factors[0]} * factors[1];
            hash += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
        }
        hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9;
        return hash ^ (hash >> 32);
    }
};

uint64_t hash_of(const std::byte* page, int64_t num_bytes, uint64_t seed) {
    const Secret words = secret_of(seed);
    const auto* secret = reinterpret_cast<const std::byte*>(words.data());
    const std::byte* last_secret = secret + sizeof(Secret) - kStripeBytes;
    // All whole stripes that begin before the last byte's, then the last 64 bytes.
    int64_t num_stripes = (num_bytes - 1) / kStripeBytes;
    const std::byte* stripe = page;
    Accumulators sums;
    for (; num_stripes >= kStripesPerBlock; num_stripes -= kStripesPerBlock) {
        for (int i = 0; i < kStripesPerBlock; ++i, stripe += kStripeBytes) {
            sums.add(stripe, secret + 8 * i);
        }
        sums.scramble(last_secret);
    }
    for (int i = 0; i < num_stripes; ++i, stripe += kStripeBytes) {
        sums.add(stripe, secret + 8 * i);
    }
    // 7 and 11 (bytes) are the specification's.
    sums.add(page + num_bytes - kStripeBytes, last_secret - 7);
    return sums.merge(secret + 11, static_cast<uint64_t>(num_bytes));
}

}  // namespace

void mtserve_hash_chain(const void* records, int64_t num_pages, int64_t page_bytes, uint64_t seed,
                        uint64_t* hashes) {
    const auto* page = static_cast<const std::byte*>(records);
    for (int64_t i = 0; i < num_pages; ++i, page += page_bytes) {
        seed = hashes[i] = hash_of(page, page_bytes, seed);
    }
}
