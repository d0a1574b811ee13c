// native_tests isas: the instruction sets of this machine, one a line.
// native_tests [N]: run everything with the one that ENGINE_CPU_ISA names, attention on N problems.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "cpu/isa.h"
#include "native/check.h"

int main(int count, char** arguments) {
    using namespace mtserve;
    const std::string argument = count > 1 ? arguments[1] : "60";
    if (argument == "isas") {
        for (const Isa isa : kAllIsas) {
            if (machine_has(isa)) {
                std::puts(isa_name(isa));
            }
        }
        return 0;
    }
    try {
        const int attention = native_tests::test_attention(std::atoi(argument.c_str()));
        const int copies = native_tests::test_copies();
        const int buckets = native_tests::test_time_buckets();
        std::printf("%s: attention %d, copies %d, time buckets %d\n", isa_name(chosen_isa()),
                    attention, copies, buckets);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", isa_name(chosen_isa()), error.what());
        return 1;
    }
    return 0;
}
