// Copy workers, and the copies of pages to and from a chunk.

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "bindings/checks.h"
#include "cpu/copy_worker.h"
#include "cpu/gather_scatter.h"

namespace {

using mtserve::CopyLayout;
using mtserve::CopyWorker;
using mtserve::bindings::check_vector;
using mtserve::bindings::ScalarType;
using mtserve::bindings::Tensor;

// Open workers by number. Never destroyed: a worker left open at exit must not be joined by a
// static destructor, when its thread may already be gone.
struct Registry {
    std::mutex mutex;
    std::unordered_map<int64_t, std::shared_ptr<CopyWorker>> workers;
    int64_t next = 0;
};

Registry& registry() {
    static auto* instance = new Registry;
    return *instance;
}

std::shared_ptr<CopyWorker> find_worker(int64_t worker) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = all.workers.find(worker);
    STD_TORCH_CHECK(found != all.workers.end(), "no copy worker has the number ", worker);
    return found->second;
}

int64_t copy_open(Tensor layers, int64_t arena, int64_t num_pages, int64_t num_chunks,
                  int64_t pages_per_chunk, int64_t page_bytes, int64_t wake_fd, Tensor units_done) {
    check_vector(layers, ScalarType::Long, "layers");
    check_vector(units_done, ScalarType::Long, "units_done");
    STD_TORCH_CHECK(units_done.numel() == 2, "units_done must have 2 elements, not ",
                    units_done.numel());
    STD_TORCH_CHECK(layers.numel() >= 1 && num_pages >= 1 && num_chunks >= 0 &&
                        pages_per_chunk >= 1 && page_bytes >= 1,
                    "copy_open needs at least one layer, page, page per chunk and byte per page");
    CopyLayout layout;
    const auto* addresses = static_cast<const int64_t*>(layers.const_data_ptr());
    for (int64_t layer = 0; layer < layers.numel(); ++layer) {
        layout.layers.push_back(reinterpret_cast<uint8_t*>(addresses[layer]));
    }
    layout.arena = reinterpret_cast<uint8_t*>(arena);
    layout.num_pages = num_pages;
    layout.num_chunks = num_chunks;
    layout.pages_per_chunk = pages_per_chunk;
    layout.page_bytes = page_bytes;
    auto worker =
        std::make_shared<CopyWorker>(std::move(layout), static_cast<int>(wake_fd),
                                     static_cast<int64_t*>(units_done.mutable_data_ptr()));
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    all.workers.emplace(all.next, std::move(worker));
    return all.next++;
}

int64_t copy_submit(int64_t worker, int64_t direction, Tensor pages, Tensor host_slots,
                    int64_t job_delay_us, int64_t unit_delay_us, int64_t fail_unit) {
    check_vector(pages, ScalarType::Int, "pages");
    check_vector(host_slots, ScalarType::Int, "host_slots");
    STD_TORCH_CHECK(pages.numel() == host_slots.numel(), "a copy job of ", pages.numel(),
                    " pages has ", host_slots.numel(), " host_slots");
    STD_TORCH_CHECK(direction == 0 || direction == 1,
                    "direction must be 0 (onload) or 1 "
                    "(offload), not ",
                    direction);
    return find_worker(worker)->submit(static_cast<mtserve::Direction>(direction),
                                       static_cast<const int32_t*>(pages.const_data_ptr()),
                                       static_cast<const int32_t*>(host_slots.const_data_ptr()),
                                       pages.numel(), {job_delay_us, unit_delay_us, fail_unit});
}

bool copy_cancel(int64_t worker, int64_t handle) {
    return find_worker(worker)->cancel(handle);
}

int64_t copy_wait_layer(int64_t worker, int64_t handle, int64_t layer, double timeout_s) {
    return static_cast<int64_t>(find_worker(worker)->wait_layer(handle, layer, timeout_s));
}

int64_t copy_poll(int64_t worker, Tensor progress) {
    STD_TORCH_CHECK(progress.is_cpu() && progress.scalar_type() == ScalarType::Long &&
                        progress.dim() == 2 && progress.size(1) == 4 && progress.is_contiguous(),
                    "progress must be int64 [n, 4], contiguous, on the CPU");
    constexpr int64_t kBatch = 64;
    mtserve::Progress entries[kBatch];
    auto* row = static_cast<int64_t*>(progress.mutable_data_ptr());
    const int64_t capacity = progress.size(0) < kBatch ? progress.size(0) : kBatch;
    const int64_t count = find_worker(worker)->poll(entries, capacity);
    for (int64_t i = 0; i < count; ++i, row += 4) {
        row[0] = entries[i].handle;
        row[1] = entries[i].pages_done;
        row[2] = entries[i].is_finished ? 1 : 0;
        row[3] = static_cast<int64_t>(entries[i].error);
    }
    return count;
}

void copy_release(int64_t worker, int64_t handle) {
    find_worker(worker)->release(handle);
}

void copy_close(int64_t worker) {
    find_worker(worker)->close();
}

void copy_free(int64_t worker) {
    Registry& all = registry();
    std::shared_ptr<CopyWorker> last;  // destroyed, and so joined, after the lock is gone
    const std::lock_guard lock(all.mutex);
    const auto found = all.workers.find(worker);
    if (found != all.workers.end()) {
        last = std::move(found->second);
        all.workers.erase(found);
    }
}

struct Rows {
    int64_t count;
    int64_t row_bytes;
};

// Pages [P, B] and a layer of a chunk [C, B] of one dtype, and ids that all exist.
Rows check_rows(const Tensor& pages, const Tensor& page_ids, const Tensor& chunk, int64_t first) {
    check_vector(page_ids, ScalarType::Int, "page_ids");
    for (const Tensor* rows : {&pages, &chunk}) {
        STD_TORCH_CHECK(rows->is_cpu() && rows->dim() == 2 && rows->is_contiguous(),
                        "pages and chunk must be two-dimensional, contiguous and on the CPU");
    }
    STD_TORCH_CHECK(pages.scalar_type() == chunk.scalar_type() && pages.size(1) == chunk.size(1),
                    "a page and a row of the chunk must have one dtype and width; widths are ",
                    pages.size(1), " and ", chunk.size(1));
    const int64_t count = page_ids.numel();
    STD_TORCH_CHECK(first >= 0 && first <= chunk.size(0) - count, count, " rows from ", first,
                    " on do not fit in a chunk of ", chunk.size(0));
    const auto* ids = static_cast<const int32_t*>(page_ids.const_data_ptr());
    for (int64_t i = 0; i < count; ++i) {
        STD_TORCH_CHECK(ids[i] >= 0 && ids[i] < pages.size(0), "page_ids[", i, "] is ", ids[i],
                        ", but only [0, ", pages.size(0), ") exist");
    }
    return {count, pages.size(1) * static_cast<int64_t>(pages.element_size())};
}

void gather_pages(Tensor pages, Tensor page_ids, Tensor chunk, int64_t first) {
    const Rows rows = check_rows(pages, page_ids, chunk, first);
    mtserve::gather_pages(static_cast<const uint8_t*>(pages.const_data_ptr()),
                          static_cast<const int32_t*>(page_ids.const_data_ptr()), rows.count,
                          rows.row_bytes, static_cast<uint8_t*>(chunk.mutable_data_ptr()), first);
}

void scatter_pages(Tensor chunk, int64_t first, Tensor page_ids, Tensor pages) {
    const Rows rows = check_rows(pages, page_ids, chunk, first);
    mtserve::scatter_pages(static_cast<const uint8_t*>(chunk.const_data_ptr()), first,
                           static_cast<const int32_t*>(page_ids.const_data_ptr()), rows.count,
                           rows.row_bytes, static_cast<uint8_t*>(pages.mutable_data_ptr()));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(engine, library) {
    library.def(
        "copy_open(Tensor layers, int arena, int num_pages, int num_chunks, int pages_per_chunk, "
        "int page_bytes, int wake_fd, Tensor(a!) units_done) -> int");
    library.def(
        "copy_submit(int worker, int direction, Tensor pages, Tensor host_slots, "
        "int job_delay_us, int unit_delay_us, int fail_unit) -> int");
    library.def("copy_cancel(int worker, int handle) -> bool");
    library.def("copy_wait_layer(int worker, int handle, int layer, float timeout_s) -> int");
    library.def("copy_poll(int worker, Tensor(a!) progress) -> int");
    library.def("copy_release(int worker, int handle) -> ()");
    library.def("copy_close(int worker) -> ()");
    library.def("copy_free(int worker) -> ()");
    library.def("gather_pages(Tensor pages, Tensor page_ids, Tensor(a!) chunk, int first) -> ()");
    library.def("scatter_pages(Tensor chunk, int first, Tensor page_ids, Tensor(a!) pages) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(engine, CPU, library) {
    library.impl("copy_open", TORCH_BOX(&copy_open));
    library.impl("copy_submit", TORCH_BOX(&copy_submit));
    library.impl("copy_poll", TORCH_BOX(&copy_poll));
    library.impl("gather_pages", TORCH_BOX(&gather_pages));
    library.impl("scatter_pages", TORCH_BOX(&scatter_pages));
}

// Operators without tensor arguments have no device to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(engine, CompositeExplicitAutograd, library) {
    library.impl("copy_cancel", TORCH_BOX(&copy_cancel));
    library.impl("copy_wait_layer", TORCH_BOX(&copy_wait_layer));
    library.impl("copy_release", TORCH_BOX(&copy_release));
    library.impl("copy_close", TORCH_BOX(&copy_close));
    library.impl("copy_free", TORCH_BOX(&copy_free));
}
