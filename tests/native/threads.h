// Threads of the test program: how many run_on_threads uses.

#pragma once

namespace mtserve::native_tests {

void set_num_threads(int count);

}  // namespace mtserve::native_tests
