// Copies of pages that are written once and not read soon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mtserve {

// memcpy whose stores go past the caches, so that an offload neither reads the lines it is about
// to overwrite nor drives the step's data out of the caches. Where the processor has no such
// stores, or the target is not aligned to 16 bytes, a plain memcpy.
void stream_bytes(uint8_t* target, const uint8_t* source, size_t num_bytes);

}  // namespace mtserve
