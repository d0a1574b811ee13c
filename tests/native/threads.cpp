#include "native/threads.h"

#include <thread>
#include <vector>

#include "cpu/parallel.h"

namespace mtserve {
namespace {

int threads_of_tests = 1;

}  // namespace

namespace native_tests {

void set_num_threads(int count) {
    threads_of_tests = count;
}

}  // namespace native_tests

int num_threads() {
    return threads_of_tests;
}

void run_on_threads(int count, void (*fn)(void*), void* context) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) {
        threads.emplace_back(fn, context);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

}  // namespace mtserve
