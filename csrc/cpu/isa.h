// Which instructions the kernels use: found once at run time, or forced by ENGINE_CPU_ISA.

#pragma once

#include <string>

namespace mtserve {

enum class Isa { kBase, kAvx2, kAvx512Bf16 };

// Each is better than those before it.
constexpr Isa kAllIsas[] = {Isa::kBase, Isa::kAvx2, Isa::kAvx512Bf16};

// base | avx2 | avx512_bf16
const char* isa_name(Isa isa);

bool machine_has(Isa isa);

// The best one of this machine, or the one that ENGINE_CPU_ISA names. Throws std::runtime_error
// when that name is unknown or the machine lacks it.
Isa chosen_isa();

}  // namespace mtserve
