#include "cpu/isa.h"

#include <cstdlib>
#include <stdexcept>

namespace mtserve {
namespace {

Isa best_isa() {
    Isa best = Isa::kBase;
    for (const Isa isa : kAllIsas) {
        if (machine_has(isa)) {
            best = isa;
        }
    }
    return best;
}

Isa choose() {
    const char* name = std::getenv("ENGINE_CPU_ISA");
    if (name == nullptr || *name == '\0') {
        return best_isa();
    }
    for (const Isa isa : kAllIsas) {
        if (isa_name(isa) != std::string(name)) {
            continue;
        }
        if (!machine_has(isa)) {
            throw std::runtime_error(std::string("ENGINE_CPU_ISA is ") + name +
                                     ", which this machine lacks: its best is " +
                                     isa_name(best_isa()) + "; name that, or unset it");
        }
        return isa;
    }
    throw std::runtime_error(std::string("ENGINE_CPU_ISA is ") + name +
                             ": name base, avx2 or avx512_bf16, or unset it");
}

}  // namespace

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::kBase:
            return "base";
        case Isa::kAvx2:
            return "avx2";
        case Isa::kAvx512Bf16:
            return "avx512_bf16";
    }
    return "unknown";
}

bool machine_has(Isa isa) {
#if defined(__x86_64__)
    switch (isa) {
        case Isa::kBase:
            return true;
        case Isa::kAvx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        case Isa::kAvx512Bf16:
#if defined(MTSERVE_EMULATES_AVX512)
            return machine_has(Isa::kAvx2);
#else
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512bf16");
#endif
    }
    return false;
#else
    return isa == Isa::kBase;
#endif
}

Isa chosen_isa() {
    static const Isa isa = choose();
    return isa;
}

}  // namespace mtserve
