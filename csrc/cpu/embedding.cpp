#include "cpu/embedding.h"

#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/tasks.h"

namespace mtserve {
namespace {

constexpr int64_t kRowsOfTask = 64;

}  // namespace

void embed_rows(const EmbeddingArgs& args, int64_t num_rows) {
    const EmbedKernel kernel = kernels().embed;
    const int64_t tasks = (num_rows + kRowsOfTask - 1) / kRowsOfTask;
    run_tasks(tasks, num_threads(), [&](int64_t task) {
        std::vector<float> sums(3 * args.width);
        const int64_t first = task * kRowsOfTask;
        kernel(args, first, std::min(first + kRowsOfTask, num_rows), sums.data());
    });
}

}  // namespace mtserve
