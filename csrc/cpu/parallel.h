// Work on several threads. The binding of a library says how: see bindings/parallel.cpp.

#pragma once

#include <cstdint>

namespace mtserve {

// Threads that run_on_threads may use.
int num_threads();

// Call fn(context) on up to `count` threads at once, and return when all calls have ended.
void run_on_threads(int count, void (*fn)(void*), void* context);

}  // namespace mtserve
