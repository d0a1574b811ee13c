// Valgrind's client requests for instruction_jobs.py; outside of valgrind they do nothing.
#include <valgrind/callgrind.h>

void callgrind_start(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

// Stops counting and writes a dump with what was counted since callgrind_start.
void callgrind_stop(void) {
    CALLGRIND_STOP_INSTRUMENTATION;
    CALLGRIND_DUMP_STATS;
}
