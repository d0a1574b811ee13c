#include "cpu/append.h"

#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/tasks.h"

namespace mtserve {
namespace {

constexpr int64_t kRowsOfTask = 128;

}  // namespace

void append_rows(const AppendArgs& args) {
    const int64_t tasks = (args.num_slots + kRowsOfTask - 1) / kRowsOfTask;
    run_tasks(tasks, num_threads(), [&](int64_t task) {
        const int64_t stop = std::min((task + 1) * kRowsOfTask, args.num_slots);
        for (int64_t i = task * kRowsOfTask; i < stop; ++i) {
            const int64_t row = args.row_of == nullptr ? i : args.row_of[i];
            const int64_t slot = args.slots[i];
            char* target = args.pages + slot / args.page_size * args.page_stride +
                           slot % args.page_size * args.token_stride;
            std::memcpy(target, args.rows + row * args.row_stride, args.row_bytes);
        }
    });
}

}  // namespace mtserve
