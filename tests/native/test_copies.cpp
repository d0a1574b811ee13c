#include <algorithm>
#include <numeric>
#include <thread>

#include "cpu/copy_worker.h"
#include "cpu/gather_scatter.h"
#include "native/attention_problem.h"
#include "native/check.h"

namespace mtserve::native_tests {
namespace {

constexpr int kLayers = 3, kPages = 40, kChunks = 5, kPagesPerChunk = 8;

// Two tiers whose device pages hold numbers that tell layer, page and byte apart.
struct Tiers {
    std::vector<Guarded<uint8_t>> layers;
    Guarded<uint8_t> arena;
    Guarded<int64_t> units_done;
    CopyLayout layout;

    Tiers(int64_t page_bytes, Flush flush)
        : arena(kChunks * kLayers * kPagesPerChunk * page_bytes, flush), units_done(2, flush) {
        units_done[0] = units_done[1] = 0;
        layout.arena = arena.get();
        layout.num_pages = kPages;
        layout.num_chunks = kChunks;
        layout.pages_per_chunk = kPagesPerChunk;
        layout.page_bytes = page_bytes;
        for (int layer = 0; layer < kLayers; ++layer) {
            layers.emplace_back(kPages * page_bytes, flush);
            for (int64_t i = 0; i < layers.back().size(); ++i) {
                layers.back()[i] = expected(layer, i / page_bytes, i % page_bytes);
            }
            layout.layers.push_back(layers.back().get());
        }
    }

    static uint8_t expected(int layer, int64_t page, int64_t byte) {
        return static_cast<uint8_t>(31 * layer + 7 * page + byte);
    }

    void clear_page(int64_t page) {
        for (Guarded<uint8_t>& layer : layers) {
            std::memset(layer.get() + page * layout.page_bytes, 0, layout.page_bytes);
        }
    }

    // Page `page` of every layer holds what page `origin` held at first.
    void check_page(int64_t page, int64_t origin) const {
        for (int layer = 0; layer < kLayers; ++layer) {
            for (int64_t byte = 0; byte < layout.page_bytes; ++byte) {
                check(
                    layers[layer][page * layout.page_bytes + byte] == expected(layer, origin, byte),
                    "a page came back with other bytes");
            }
        }
    }
};

// Waits until the job's end was polled; returns its last news.
Progress end_of(CopyWorker& worker, int64_t handle) {
    while (true) {
        Progress news;
        if (worker.poll(&news, 1) == 0) {
            std::this_thread::yield();
        } else if (news.handle == handle && news.is_finished) {
            worker.release(handle);
            return news;
        }
    }
}

// Pages out, cleared, and back to other pages.
void round_trip(int seed) {
    Random random(seed);
    Tiers tiers(any_of(random, 1, 300), seed % 2 == 0 ? Flush::kEnd : Flush::kStart);
    CopyWorker worker(tiers.layout, -1, tiers.units_done.get());
    std::vector<int32_t> pages(kPages), slots(kChunks * kPagesPerChunk);
    std::iota(pages.begin(), pages.end(), 0);
    std::iota(slots.begin(), slots.end(), 0);
    if (seed % 3 != 0) {
        std::shuffle(pages.begin(), pages.end(), random);
        std::shuffle(slots.begin(), slots.end(), random);
    }
    const int count = any_of(random, 1, kPages / 2);
    int64_t handle = worker.submit(Direction::kOffload, pages.data(), slots.data(), count, {});
    const Progress out = end_of(worker, handle);
    check(out.error == CopyError::kNone && out.pages_done == count, "an offload ended early");
    for (int i = 0; i < count; ++i) {
        tiers.clear_page(pages[i]);
    }
    const int32_t* targets = pages.data() + count;
    handle = worker.submit(Direction::kOnload, targets, slots.data(), count, {});
    for (int layer = 0; layer < kLayers; ++layer) {
        check(worker.wait_layer(handle, layer, 60.0) == WaitResult::kReady, "a layer is late");
    }
    check(end_of(worker, handle).pages_done == count, "an onload ended early");
    for (int i = 0; i < count; ++i) {
        tiers.check_page(targets[i], pages[i]);
    }
}

// Threads submit, cancel, wait and poll at once, and the worker is closed under way.
void close_under_way(int seed) {
    Tiers tiers(64, Flush::kEnd);
    CopyWorker worker(tiers.layout, -1, tiers.units_done.get());
    const auto use = [&worker](int first, Direction direction) {
        std::vector<int32_t> ids(kPages / 2);
        std::iota(ids.begin(), ids.end(), first);
        const Fault slow{.job_delay_us = 0, .unit_delay_us = 20, .fail_unit = first == 0 ? 2 : -1};
        try {
            for (int i = 0; i < 30; ++i) {
                const auto count = static_cast<int64_t>(ids.size());
                const int64_t job = worker.submit(direction, ids.data(), ids.data(), count, slow);
                worker.wait_layer(job, 1, i % 3 == 0 ? 1e-3 : 0.0);
                if (i % 4 == 0) {
                    worker.cancel(job);
                }
                Progress news[3];
                worker.poll(news, 3);
                worker.release(job);
            }
        } catch (const std::runtime_error&) {
            return;  // closed
        }
    };
    std::thread onloads(use, 0, Direction::kOnload);
    std::thread offloads(use, kPages / 2, Direction::kOffload);
    std::this_thread::sleep_for(std::chrono::microseconds(500 * seed));
    worker.close();
    onloads.join();
    offloads.join();
}

void gather_and_scatter(int seed) {
    Random random(seed);
    const Flush flush = seed % 2 == 0 ? Flush::kEnd : Flush::kStart;
    const int64_t bytes = any_of(random, 1, 100), count = any_of(random, 1, 8);
    Guarded<int32_t> ids(count, flush);
    ids[0] = any_of(random, 0, 1);
    for (int64_t i = 1; i < count; ++i) {
        ids[i] = ids[i - 1] + any_of(random, 1, 2);
    }
    const int64_t num_pages = ids[count - 1] + 1;
    Guarded<uint8_t> pages(num_pages * bytes, flush), back(num_pages * bytes, flush);
    for (int64_t i = 0; i < pages.size(); ++i) {
        pages[i] = static_cast<uint8_t>(any_of(random, 0, 254));
    }
    const int64_t first = any_of(random, 0, 2);
    Guarded<uint8_t> chunk((first + count) * bytes, flush);
    gather_pages(pages.get(), ids.get(), count, bytes, chunk.get(), first);
    scatter_pages(chunk.get(), first, ids.get(), count, bytes, back.get());
    std::vector<bool> is_listed(num_pages, false);
    for (int64_t i = 0; i < count; ++i) {
        is_listed[ids[i]] = true;
    }
    for (int64_t i = 0; i < pages.size(); ++i) {
        check(back[i] == (is_listed[i / bytes] ? pages[i] : 0xff), "scatter of gather");
    }
}

}  // namespace

int test_copies() {
    constexpr int kRounds = 20;
    for (int seed = 0; seed < kRounds; ++seed) {
        round_trip(seed);
        close_under_way(seed % 10);
        gather_and_scatter(seed);
    }
    return kRounds;
}

}  // namespace mtserve::native_tests
