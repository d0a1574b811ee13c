#include "cpu/rows.h"

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/tasks.h"

namespace mtserve {
namespace {

// Values below which starting a second thread costs more than it saves.
constexpr int64_t kValuesOfTask = 16384;

template <class Args>
void run_rows(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t num_rows,
              int64_t width) {
    const int64_t rows_of_task = std::max<int64_t>(1, kValuesOfTask / std::max<int64_t>(1, width));
    const int64_t tasks = (num_rows + rows_of_task - 1) / rows_of_task;
    run_tasks(tasks, num_threads(), [&](int64_t task) {
        const int64_t first = task * rows_of_task;
        kernel(args, first, std::min(first + rows_of_task, num_rows));
    });
}

}  // namespace

void norm_rows(const NormArgs& args, int64_t num_rows) {
    run_rows(kernels().rows.norm, args, num_rows, args.width);
}

void silu_rows(const SiluArgs& args, int64_t num_rows) {
    run_rows(kernels().rows.silu, args, num_rows, args.width);
}

void gate_rows(const GateArgs& args, int64_t num_rows) {
    run_rows(kernels().rows.gate, args, num_rows, args.num_groups * args.group_width);
}

void add_rows(const AddArgs& args, int64_t num_rows) {
    run_rows(kernels().rows.add, args, num_rows, args.width);
}

}  // namespace mtserve
