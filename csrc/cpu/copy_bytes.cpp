#include "copy_bytes.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mtserve {

void stream_bytes(uint8_t* target, const uint8_t* source, size_t num_bytes) {
#if defined(__SSE2__)
    if (reinterpret_cast<uintptr_t>(target) % sizeof(__m128i) == 0) {
        const size_t block = 4 * sizeof(__m128i);  // a cache line
        const size_t whole = num_bytes / block * block;
        for (size_t at = 0; at < whole; at += block) {
            const auto* from = reinterpret_cast<const __m128i*>(source + at);
            auto* to = reinterpret_cast<__m128i*>(target + at);
            const __m128i a = _mm_loadu_si128(from);
            const __m128i b = _mm_loadu_si128(from + 1);
            const __m128i c = _mm_loadu_si128(from + 2);
            const __m128i d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a);
            _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c);
            _mm_stream_si128(to + 3, d);
        }
        std::memcpy(target + whole, source + whole, num_bytes - whole);
        _mm_sfence();  // the stores must be visible before the copy is reported as done
        return;
    }
#endif
    std::memcpy(target, source, num_bytes);
}

}  // namespace mtserve
