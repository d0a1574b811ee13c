#include "copy_worker.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace mtserve {

namespace {

// Bytes of one layer that an offload moves at a time: enough for the full bandwidth of memory,
// little enough that pages are reported soon.
constexpr int64_t kOffloadGroupBytes = 256 << 10;

void check_ids(const char* name, const int32_t* ids, int64_t count, int64_t bound) {
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= bound) {
            throw std::runtime_error("copy job: " + std::string(name) + "[" + std::to_string(i) +
                                     "] is " + std::to_string(ids[i]) + ", but only [0, " +
                                     std::to_string(bound) + ") exist");
        }
    }
}

void sleep_us(int64_t microseconds) {
    if (microseconds > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    }
}

}  // namespace

CopyWorker::CopyWorker(CopyLayout layout, int wake_fd, int64_t* units_done)
    : layout_(std::move(layout)), wake_fd_(wake_fd), units_done_(units_done) {
    for (const Direction direction : {Direction::kOnload, Direction::kOffload}) {
        lanes_[static_cast<size_t>(direction)].thread =
            std::thread([this, direction] { loop(direction); });
    }
}

CopyWorker::~CopyWorker() {
    close();
}

int64_t CopyWorker::submit(Direction direction, const int32_t* pages, const int32_t* slots,
                           int64_t count, Fault fault) {
    check_ids("pages", pages, count, layout_.num_pages);
    check_ids("host_slots", slots, count, layout_.num_chunks * layout_.pages_per_chunk);

    auto job = std::make_shared<Job>();
    job->direction = direction;
    job->count = count;
    job->fault = fault;
    const int64_t longest = direction == Direction::kOnload ? count : offload_group(fault);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t chunk = slots[i] / layout_.pages_per_chunk;
        const int64_t chunk_page = slots[i] % layout_.pages_per_chunk;
        if (!job->runs.empty()) {
            Run& last = job->runs.back();
            if (last.count < longest && pages[i] == last.page + last.count && chunk == last.chunk &&
                chunk_page == last.chunk_page + last.count) {
                ++last.count;
                continue;
            }
        }
        job->runs.push_back({pages[i], chunk, chunk_page, 1});
    }

    Lane& lane = lanes_[static_cast<size_t>(direction)];
    const std::lock_guard lock(mutex_);
    if (is_closed_) {
        throw std::runtime_error("copy job submitted after close");
    }
    job->handle = next_handle_++;
    jobs_.emplace(job->handle, job);
    lane.queue.push_back(job);
    lane.has_work.notify_one();
    return job->handle;
}

bool CopyWorker::cancel(int64_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = jobs_.find(handle);
    if (found == jobs_.end() || found->second->state != State::kQueued) {
        return false;
    }
    const std::shared_ptr<Job> job = found->second;
    auto& queue = lanes_[static_cast<size_t>(job->direction)].queue;
    queue.erase(std::find(queue.begin(), queue.end(), job));
    job->state = State::kCancelled;
    jobs_.erase(found);
    layer_done_.notify_all();
    return true;
}

WaitResult CopyWorker::wait_layer(int64_t handle, int64_t layer, double timeout_s) {
    // A day stands for "for ever": larger numbers overflow the clock's range.
    const std::chrono::duration<double> timeout(std::clamp(timeout_s, 0.0, 86400.0));
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration_cast<std::chrono::steady_clock::duration>(timeout);
    std::unique_lock lock(mutex_);
    const auto found = jobs_.find(handle);
    if (found == jobs_.end()) {
        return WaitResult::kUnknown;
    }
    const std::shared_ptr<Job> job = found->second;
    layer_done_.wait_until(lock, deadline, [&] {
        return job->layers_done > layer ||
               (job->state != State::kQueued && job->state != State::kRunning);
    });
    if (job->state == State::kFailed || job->state == State::kCancelled) {
        return WaitResult::kFailed;
    }
    if (job->layers_done > layer) {
        return WaitResult::kReady;
    }
    // An offload has no layers to wait for; an onload that is still under way is late.
    return job->state == State::kDone ? WaitResult::kFailed : WaitResult::kLate;
}

int64_t CopyWorker::poll(Progress* out, int64_t capacity) {
    const std::lock_guard lock(mutex_);
    is_wake_written_ = false;
    int64_t count = 0;
    while (count < capacity && !news_.empty()) {
        const std::shared_ptr<Job> job = std::move(news_.front());
        news_.pop_front();
        job->has_news = false;
        const bool is_finished = job->state == State::kDone || job->state == State::kFailed;
        out[count++] = {job->handle, job->pages_done, is_finished, job->error};
    }
    return count;
}

void CopyWorker::release(int64_t handle) {
    const std::lock_guard lock(mutex_);
    jobs_.erase(handle);
}

void CopyWorker::close() {
    {
        const std::lock_guard lock(mutex_);
        is_closed_ = true;
        for (Lane& lane : lanes_) {
            for (const auto& job : lane.queue) {
                job->state = State::kCancelled;
                jobs_.erase(job->handle);
            }
            lane.queue.clear();
            lane.has_work.notify_all();
        }
        layer_done_.notify_all();
    }
    for (Lane& lane : lanes_) {
        if (lane.thread.joinable()) {
            lane.thread.join();
        }
    }
}

void CopyWorker::loop(Direction direction) {
    Lane& lane = lanes_[static_cast<size_t>(direction)];
    std::unique_lock lock(mutex_);
    while (true) {
        lane.has_work.wait(lock, [&] { return is_closed_ || !lane.queue.empty(); });
        if (lane.queue.empty()) {
            return;
        }
        const std::shared_ptr<Job> job = std::move(lane.queue.front());
        lane.queue.pop_front();
        job->state = State::kRunning;
        lock.unlock();

        sleep_us(job->fault.job_delay_us);
        const CopyError error = direction == Direction::kOnload ? onload(*job) : offload(job);

        lock.lock();
        job->error = error;
        job->state = error == CopyError::kNone ? State::kDone : State::kFailed;
        if (direction == Direction::kOnload && error == CopyError::kNone) {
            job->pages_done = job->count;
        }
        report(job);
        layer_done_.notify_all();
    }
}

CopyError CopyWorker::onload(Job& job) {
    for (size_t layer = 0; layer < layout_.layers.size(); ++layer) {
        sleep_us(job.fault.unit_delay_us);
        if (is_failed_unit(job, static_cast<int64_t>(layer))) {
            return CopyError::kInjected;
        }
        for (const Run& run : job.runs) {
            std::memcpy(layout_.layers[layer] + run.page * layout_.page_bytes,
                        host_page(run.chunk, static_cast<int64_t>(layer), run.chunk_page),
                        static_cast<size_t>(run.count * layout_.page_bytes));
        }
        count_units(job.direction, 1);
        const std::lock_guard lock(mutex_);
        job.layers_done = static_cast<int64_t>(layer) + 1;
        layer_done_.notify_all();
    }
    return CopyError::kNone;
}

CopyError CopyWorker::offload(const std::shared_ptr<Job>& job) {
    const std::vector<Run>& runs = job->runs;
    const int64_t group = offload_group(job->fault);
    int64_t done = 0;
    for (size_t begin = 0; begin < runs.size();) {
        int64_t count = runs[begin].count;
        size_t end = begin + 1;
        while (end < runs.size() && count + runs[end].count <= group) {
            count += runs[end++].count;
        }
        sleep_us(job->fault.unit_delay_us);
        if (is_failed_unit(*job, done)) {
            return CopyError::kInjected;
        }
        // Layers outside, pages inside: the pages of a group are neighbours in the arena.
        for (size_t layer = 0; layer < layout_.layers.size(); ++layer) {
            for (size_t i = begin; i < end; ++i) {
                std::memcpy(
                    host_page(runs[i].chunk, static_cast<int64_t>(layer), runs[i].chunk_page),
                    layout_.layers[layer] + runs[i].page * layout_.page_bytes,
                    static_cast<size_t>(runs[i].count * layout_.page_bytes));
            }
        }
        begin = end;
        done += count;
        count_units(job->direction, count);
        const std::lock_guard lock(mutex_);
        job->pages_done = done;
        if (done < job->count) {
            report(job);
        }
    }
    return CopyError::kNone;
}

int64_t CopyWorker::offload_group(const Fault& fault) const {
    return fault.is_set() ? 1 : std::max<int64_t>(1, kOffloadGroupBytes / layout_.page_bytes);
}

bool CopyWorker::is_failed_unit(const Job& job, int64_t unit) const {
    return unit == job.fault.fail_unit;
}

void CopyWorker::count_units(Direction direction, int64_t count) {
    __atomic_fetch_add(units_done_ + static_cast<int64_t>(direction), count, __ATOMIC_RELEASE);
}

void CopyWorker::report(const std::shared_ptr<Job>& job) {
    if (job->has_news) {
        news_.erase(std::find(news_.begin(), news_.end(), job));
    }
    job->has_news = true;
    news_.push_back(job);
    if (wake_fd_ >= 0 && !is_wake_written_) {
        const uint64_t one = 1;
        // A full pipe is as good as a written one, and a closed one has nobody left to wake.
        [[maybe_unused]] const ssize_t written = ::write(wake_fd_, &one, sizeof(one));
        is_wake_written_ = true;
    }
}

uint8_t* CopyWorker::host_page(int64_t chunk, int64_t layer, int64_t chunk_page) const {
    const auto num_layers = static_cast<int64_t>(layout_.layers.size());
    return layout_.arena + ((chunk * num_layers + layer) * layout_.pages_per_chunk + chunk_page) *
                               layout_.page_bytes;
}

}  // namespace mtserve
