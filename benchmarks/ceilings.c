// What this machine can do at most: FMAs in registers, reading memory, copying memory; and how much
// of each core goes to others meanwhile. Compiled and called by ceilings.py; x86-64 only.
//
// Every function that measures returns seconds from the first thread's start to the last one's end.
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { kSse2 = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };
enum { kMaxThreads = 256 };

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// threads: start together, report when they began and ended

typedef struct {
    void (*work)(void* argument, int thread, int num_threads);
    void* argument;
    int thread;
    int num_threads;
    pthread_barrier_t* barrier;
    double start_s;
    double stop_s;
} Task;

static void* run_task(void* pointer) {
    Task* task = pointer;
    pthread_barrier_wait(task->barrier);
    task->start_s = now_s();
    task->work(task->argument, task->thread, task->num_threads);
    task->stop_s = now_s();
    return NULL;
}

static double run_threads(void (*work)(void*, int, int), void* argument, int num_threads) {
    pthread_t threads[kMaxThreads];
    Task tasks[kMaxThreads];
    pthread_barrier_t barrier;
    if (num_threads < 1 || num_threads > kMaxThreads) return -1.0;
    pthread_barrier_init(&barrier, NULL, (unsigned)num_threads);
    for (int i = 0; i < num_threads; ++i) {
        tasks[i] = (Task){work, argument, i, num_threads, &barrier, 0.0, 0.0};
        if (pthread_create(&threads[i], NULL, run_task, &tasks[i]) != 0) __builtin_trap();
    }
    double first_s = 1e300;
    double last_s = 0.0;
    for (int i = 0; i < num_threads; ++i) {
        pthread_join(threads[i], NULL);
        if (tasks[i].start_s < first_s) first_s = tasks[i].start_s;
        if (tasks[i].stop_s > last_s) last_s = tasks[i].stop_s;
    }
    pthread_barrier_destroy(&barrier);
    return last_s - first_s;
}

// FMAs: many independent sums in registers, no memory

#define REPEAT12(one) \
    one(0) one(1) one(2) one(3) one(4) one(5) one(6) one(7) one(8) one(9) one(10) one(11)
#define REPEAT24(one) \
    REPEAT12(one)     \
    one(12) one(13) one(14) one(15) one(16) one(17) one(18) one(19) one(20) one(21) one(22) one(23)

static volatile float sink;

static void fma_sse2(long rounds) {
    const __m128 factor = _mm_set1_ps(0.999f);
    const __m128 term = _mm_set1_ps(0.001f);
#define START(i) __m128 sum##i = _mm_set1_ps(1.0f + 0.01f * i);
#define ROUND(i) sum##i = _mm_add_ps(_mm_mul_ps(sum##i, factor), term);
#define STOP(i) total = _mm_add_ps(total, sum##i);
    REPEAT12(START)
    for (long round = 0; round < rounds; ++round) {
        REPEAT12(ROUND)
    }
    __m128 total = _mm_setzero_ps();
    REPEAT12(STOP)
#undef START
#undef ROUND
#undef STOP
    sink = _mm_cvtss_f32(total);
}

__attribute__((target("avx2,fma"))) static void fma_avx2(long rounds) {
    const __m256 factor = _mm256_set1_ps(0.999f);
    const __m256 term = _mm256_set1_ps(0.001f);
#define START(i) __m256 sum##i = _mm256_set1_ps(1.0f + 0.01f * i);
#define ROUND(i) sum##i = _mm256_fmadd_ps(sum##i, factor, term);
#define STOP(i) total = _mm256_add_ps(total, sum##i);
    REPEAT12(START)
    for (long round = 0; round < rounds; ++round) {
        REPEAT12(ROUND)
    }
    __m256 total = _mm256_setzero_ps();
    REPEAT12(STOP)
#undef START
#undef ROUND
#undef STOP
    sink = _mm256_cvtss_f32(total);
}

__attribute__((target("avx512f"))) static void fma_avx512(long rounds) {
    const __m512 factor = _mm512_set1_ps(0.999f);
    const __m512 term = _mm512_set1_ps(0.001f);
#define START(i) __m512 sum##i = _mm512_set1_ps(1.0f + 0.01f * i);
#define ROUND(i) sum##i = _mm512_fmadd_ps(sum##i, factor, term);
#define STOP(i) total = _mm512_add_ps(total, sum##i);
    REPEAT24(START)
    for (long round = 0; round < rounds; ++round) {
        REPEAT24(ROUND)
    }
    __m512 total = _mm512_setzero_ps();
    REPEAT24(STOP)
#undef START
#undef ROUND
#undef STOP
    sink = _mm512_cvtss_f32(total);
}

__attribute__((target("avx512f,avx512bf16"))) static void fma_avx512_bf16(long rounds) {
    const __m512bh left = (__m512bh)_mm512_set1_epi16(0x3f80);   // 1.0
    const __m512bh right = (__m512bh)_mm512_set1_epi16(0x3780);  // 2 ** -16
#define START(i) __m512 sum##i = _mm512_set1_ps(1.0f + 0.01f * i);
#define ROUND(i) sum##i = _mm512_dpbf16_ps(sum##i, left, right);
#define STOP(i) total = _mm512_add_ps(total, sum##i);
    REPEAT24(START)
    for (long round = 0; round < rounds; ++round) {
        REPEAT24(ROUND)
    }
    __m512 total = _mm512_setzero_ps();
    REPEAT24(STOP)
#undef START
#undef ROUND
#undef STOP
    sink = _mm512_cvtss_f32(total);
}

typedef struct {
    int isa;
    long rounds;
} FmaWork;

static void fma_work(void* argument, int thread, int num_threads) {
    const FmaWork* work = argument;
    (void)thread;
    (void)num_threads;
    if (work->isa == kSse2) fma_sse2(work->rounds);
    if (work->isa == kAvx2) fma_avx2(work->rounds);
    if (work->isa == kAvx512) fma_avx512(work->rounds);
    if (work->isa == kAvx512Bf16) fma_avx512_bf16(work->rounds);
}

int ceilings_has(int isa) {
    __builtin_cpu_init();
    if (isa == kSse2) return 1;
    if (isa == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == kAvx512) return __builtin_cpu_supports("avx512f") != 0;
    if (isa == kAvx512Bf16) return __builtin_cpu_supports("avx512bf16") != 0;
    return 0;
}

// Floating point operations of one round of one thread: sums * lanes * (multiply and add).
long ceilings_fma_flops(int isa) {
    if (isa == kSse2) return 12 * 4 * 2;
    if (isa == kAvx2) return 12 * 8 * 2;
    if (isa == kAvx512) return 24 * 16 * 2;
    return 24 * 32 * 2;
}

double ceilings_fma_s(int isa, long rounds, int num_threads) {
    FmaWork work = {isa, rounds};
    return run_threads(fma_work, &work, num_threads);
}

// memory

typedef struct {
    const uint8_t* bytes;
    long count;
} ReadWork;

typedef uint64_t Vector __attribute__((vector_size(32)));

__attribute__((target_clones("avx2", "default"))) static void read_work(void* argument, int thread,
                                                                        int num_threads) {
    const ReadWork* work = argument;
    const long share = work->count / num_threads / 256;
    const Vector* at = (const Vector*)(work->bytes + thread * share * 256);
    Vector a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};
    for (long i = 0; i < share; ++i, at += 8) {
        a += at[0];
        b += at[1];
        c += at[2];
        d += at[3];
        e += at[4];
        f += at[5];
        g += at[6];
        h += at[7];
    }
    const Vector total = a + b + c + d + e + f + g + h;
    sink = (float)(total[0] + total[1] + total[2] + total[3]);
}

// `bytes` is aligned to 32; every thread sums a share of it.
double ceilings_read_s(const uint8_t* bytes, long count, int num_threads) {
    ReadWork work = {bytes, count};
    return run_threads(read_work, &work, num_threads);
}

// memcpy of pieces of `piece` bytes, one after another, by the calling thread.
double ceilings_copy_s(uint8_t* const* to, const uint8_t* const* from, long num_pieces,
                       long piece) {
    const double start_s = now_s();
    for (long i = 0; i < num_pieces; ++i) memcpy(to[i], from[i], (size_t)piece);
    return now_s() - start_s;
}

// jitter

typedef struct {
    double seconds;
    double gap_s;
    const int* cpus;
    double* lost_s;
    double* longest_s;
} JitterWork;

static void jitter_work(void* argument, int thread, int num_threads) {
    const JitterWork* work = argument;
    (void)num_threads;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(work->cpus[thread], &set);
    sched_setaffinity(0, sizeof(set), &set);
    double lost_s = 0.0;
    double longest_s = 0.0;
    const double end_s = now_s() + work->seconds;
    for (double last_s = now_s(); last_s < end_s;) {
        const double next_s = now_s();
        const double gap_s = next_s - last_s;
        if (gap_s > work->gap_s) lost_s += gap_s;
        if (gap_s > longest_s) longest_s = gap_s;
        last_s = next_s;
    }
    work->lost_s[thread] = lost_s;
    work->longest_s[thread] = longest_s;
}

// One thread on each of the CPUs reads the clock for so long. Gaps above gap_s are time that the
// core did something else: their sum and the longest, per CPU.
double ceilings_jitter_s(const int* cpus, int num_cpus, double seconds, double gap_s,
                         double* lost_s, double* longest_s) {
    JitterWork work = {seconds, gap_s, cpus, lost_s, longest_s};
    return run_threads(jitter_work, &work, num_cpus);
}
