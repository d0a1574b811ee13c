// Memory with a page that must not be touched on both sides.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace mtserve::native_tests {

// Which guard the values touch: a read of one value too many, on that side, ends the program.
enum class Flush { kStart, kEnd };

// `count` values whose bytes are all ones: a NaN for floats and bfloat16, -1 for integers.
template <class T>
class Guarded {
  public:
    Guarded() = default;

    Guarded(int64_t count, Flush flush) : count_(count) {
        const int64_t page = sysconf(_SC_PAGESIZE);
        const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
        const int64_t inner = (bytes + page - 1) / page * page;
        mapped_ = inner + 2 * page;
        void* memory =
            mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            throw std::bad_alloc();
        }
        base_ = static_cast<char*>(memory);
        if (inner > 0 && mprotect(base_ + page, inner, PROT_READ | PROT_WRITE) != 0) {
            throw std::bad_alloc();
        }
        std::memset(base_ + page, 0xff, inner);
        values_ = reinterpret_cast<T*>(base_ + page + (flush == Flush::kEnd ? inner - bytes : 0));
    }

    Guarded(Guarded&& other) noexcept { swap(other); }

    Guarded& operator=(Guarded&& other) noexcept {
        swap(other);
        return *this;
    }

    ~Guarded() {
        if (base_ != nullptr) {
            munmap(base_, mapped_);
        }
    }

    T& operator[](int64_t i) { return values_[i]; }
    const T& operator[](int64_t i) const { return values_[i]; }
    T* get() { return values_; }
    const T* get() const { return values_; }
    int64_t size() const { return count_; }

  private:
    void swap(Guarded& other) {
        std::swap(base_, other.base_);
        std::swap(values_, other.values_);
        std::swap(mapped_, other.mapped_);
        std::swap(count_, other.count_);
    }

    char* base_ = nullptr;
    T* values_ = nullptr;
    int64_t mapped_ = 0;
    int64_t count_ = 0;
};

}  // namespace mtserve::native_tests
