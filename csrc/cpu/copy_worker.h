// The copy worker: two native threads, one per direction, that move whole jobs of pages between
// the device pool and the host arena. No torch, no Python: nothing here ever needs the GIL.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace mtserve {

// Where the bytes are. A page of one layer is page_bytes long in both tiers. Page p of layer l is
// at layers[l] + p * page_bytes; host slot s is page s % pages_per_chunk of chunk
// s / pages_per_chunk, and a chunk is [num_layers][pages_per_chunk][page_bytes].
struct CopyLayout {
    std::vector<uint8_t*> layers;
    uint8_t* arena = nullptr;
    int64_t num_pages = 0;
    int64_t num_chunks = 0;
    int64_t pages_per_chunk = 0;
    int64_t page_bytes = 0;
};

enum class Direction : int64_t { kOnload = 0, kOffload = 1 };

enum class CopyError : int64_t { kNone = 0, kInjected = 1, kCancelled = 2 };

enum class WaitResult : int64_t { kLate = 0, kReady = 1, kFailed = 2, kUnknown = 3 };

// For tests: sleep before the job and before each unit (a layer of an onload, a page of an
// offload), and fail instead of copying unit fail_unit (negative: never). Without a fault an
// offload moves a few pages at a time.
struct Fault {
    int64_t job_delay_us = 0;
    int64_t unit_delay_us = 0;
    int64_t fail_unit = -1;

    bool is_set() const { return job_delay_us > 0 || unit_delay_us > 0 || fail_unit >= 0; }
};

struct Progress {
    int64_t handle;
    int64_t pages_done;  // whole pages in all layers; of an onload 0 until it is complete
    bool is_finished;    // nothing will touch the job's bytes any more
    CopyError error;
};

// All members may be called by any thread. The memory of the layout must outlive close().
class CopyWorker {
  public:
    // wake_fd: 8 bytes (a 64-bit 1) are written when poll has news, at most once between polls;
    // negative: nobody is told. units_done: two counters, per direction, raised after each unit
    // of a job, readable at any time without a call.
    CopyWorker(CopyLayout layout, int wake_fd, int64_t* units_done);
    ~CopyWorker();
    CopyWorker(const CopyWorker&) = delete;
    CopyWorker& operator=(const CopyWorker&) = delete;

    // Takes a whole job and returns its handle. Jobs of one direction run in order. Throws
    // std::runtime_error on an id that does not exist, and after close().
    int64_t submit(Direction direction, const int32_t* pages, const int32_t* slots, int64_t count,
                   Fault fault);

    // True: the job had not started and never will. It is forgotten; poll is silent about it.
    bool cancel(int64_t handle);

    // Blocks until the onload's pages are there in that layer, it failed, or the time passed.
    WaitResult wait_layer(int64_t handle, int64_t layer, double timeout_s);

    // Writes up to `capacity` entries, oldest news first, and returns how many.
    int64_t poll(Progress* out, int64_t capacity);

    // Forgets a finished job whose end was polled.
    void release(int64_t handle);

    // Drops jobs that have not started, waits for the others, stops the threads.
    void close();

  private:
    enum class State { kQueued, kRunning, kDone, kFailed, kCancelled };

    // Neighbouring pages whose bytes lie side by side in both tiers.
    struct Run {
        int64_t page;
        int64_t chunk;
        int64_t chunk_page;
        int64_t count;
    };

    // `runs`, `count`, `direction` and `fault` never change; the rest is guarded by mutex_.
    struct Job {
        int64_t handle;
        Direction direction;
        std::vector<Run> runs;
        int64_t count;
        Fault fault;
        State state = State::kQueued;
        CopyError error = CopyError::kNone;
        int64_t layers_done = 0;
        int64_t pages_done = 0;
        bool has_news = false;
    };

    struct Lane {
        std::deque<std::shared_ptr<Job>> queue;
        std::condition_variable has_work;
        std::thread thread;
    };

    void loop(Direction direction);
    CopyError onload(Job& job);
    CopyError offload(const std::shared_ptr<Job>& job);
    int64_t offload_group(const Fault& fault) const;  // pages that an offload moves at a time
    bool is_failed_unit(const Job& job, int64_t unit) const;
    void count_units(Direction direction, int64_t count);
    void report(const std::shared_ptr<Job>& job);  // the caller holds mutex_
    uint8_t* host_page(int64_t chunk, int64_t layer, int64_t chunk_page) const;

    const CopyLayout layout_;
    const int wake_fd_;
    int64_t* const units_done_;

    std::mutex mutex_;
    std::condition_variable layer_done_;
    std::array<Lane, 2> lanes_;
    std::unordered_map<int64_t, std::shared_ptr<Job>> jobs_;
    std::deque<std::shared_ptr<Job>> news_;
    int64_t next_handle_ = 0;
    bool is_wake_written_ = false;
    bool is_closed_ = false;
};

}  // namespace mtserve
