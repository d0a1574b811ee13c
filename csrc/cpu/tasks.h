// Tasks in order of their number, each taken by the next thread that is free.

#pragma once

#include <atomic>
#include <cstdint>

#include "cpu/parallel.h"

namespace mtserve {

// fn(task) for task in [0, count), by at most max_threads. Which thread runs a task must not
// matter.
template <class Fn>
void run_tasks(int64_t count, int max_threads, const Fn& fn) {
    struct Context {
        const Fn& fn;
        int64_t count;
        std::atomic<int64_t> next{0};
    } context{fn, count};
    const auto work = [](void* pointer) {
        auto& shared = *static_cast<Context*>(pointer);
        for (int64_t task = shared.next++; task < shared.count; task = shared.next++) {
            shared.fn(task);
        }
    };
    const int64_t threads = count < max_threads ? count : max_threads;
    if (threads <= 1) {
        work(&context);
    } else {
        run_on_threads(static_cast<int>(threads), work, &context);
    }
}

}  // namespace mtserve
