// Threads in teams: a team takes one head after another, its members share the work of every step and wait for each other.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

constexpr long LARGE_PAGE = 1L << 21;  // bytes

// Large new arrays are touched for the first time here: in large pages, where the system has them, that costs a fifth.
extern "C" void in_large_pages(void* first, long bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    char* const start = reinterpret_cast<char*>((reinterpret_cast<long>(first) + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE);
    const long count = (static_cast<char*>(first) + bytes - start) / LARGE_PAGE * LARGE_PAGE;
    if (count > 0) madvise(start, count, MADV_HUGEPAGE);  // advice: nothing depends on it
#else
    (void)first, (void)bytes;
#endif
}

constexpr long PARTS = 64;  // members of a team at most

struct Team {
    long members;
    std::atomic<long> arrived{0}, turn{0};

    explicit Team(long count) : members(count) {}

    // Returns once every member of the team is here.
    void wait() {
        if (members == 1) return;
        const long now = turn.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
            arrived.store(0, std::memory_order_relaxed);
            turn.store(now + 1, std::memory_order_release);
            return;
        }
        for (long spins = 0; turn.load(std::memory_order_acquire) == now; ++spins) {
            if (spins < 4096) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            } else {
                std::this_thread::yield();  // a core may be busy with something else
            }
        }
    }
};

// Where a member's part of `size` entries begins: at a whole vector.
static inline long part(long size, long member, long members) {
    if (member == members) return size;
    const long begin = size * member / members / 16 * 16;
    return begin < size ? begin : size;
}

// The same at any entry.
static inline long exact_part(long size, long member, long members) { return size * member / members; }

static inline long fewer(long a, long b) { return a < b ? a : b; }

static inline long later(long a, long b) { return a > b ? a : b; }

static inline long above(long a) { return a > 0 ? a : 0; }

#ifndef KEPT_BYTES
#define KEPT_BYTES (1L << 25)  // the largest scratch memory that waits for the next call
#endif

struct Block {
    long numbers;
    real* data;

    explicit Block(long count) : numbers(count) {
        // In large pages where it can fill one: the rows of a wide matrix lie in many small ones.
        const long bytes = numbers * sizeof(real), page = bytes < LARGE_PAGE ? 64 : LARGE_PAGE;
        data = static_cast<real*>(std::aligned_alloc(page, (bytes / page + 1) * page));
        if (!data) throw std::bad_alloc();
        if (page == LARGE_PAGE) in_large_pages(data, (bytes / page + 1) * page);
    }
    ~Block() { std::free(data); }
    Block(const Block&) = delete;
};

// Fresh memory is slow when it is first touched: what a call leaves in its slot, the next one takes from there.
static std::atomic<Block*> spare[64];

struct Scratch {
    std::unique_ptr<Block> block;
    const long slot;

    Scratch(long numbers, long where) : slot(where % 64) {
        block.reset(spare[slot].exchange(nullptr));
        if (block && block->numbers >= numbers) return;
        block.reset();
        block.reset(new Block(numbers));
    }
    ~Scratch() {
        if (block->numbers * long(sizeof(real)) <= KEPT_BYTES) block.reset(spare[slot].exchange(block.release()));
    }
    Scratch(const Scratch&) = delete;
    real* data() const { return block->data; }
};

// While one lives, its thread takes numbers below the smallest normal one for 0. Many processors take far longer for each of them, and
// memory that forgets is full of them.
class FlushSubnormals {
#if defined(__SSE2__)
    static constexpr unsigned BOTH = 0x8040;  // of results and of operands
    const unsigned before = __builtin_ia32_stmxcsr();

public:
    FlushSubnormals() { __builtin_ia32_ldmxcsr(before | BOTH); }
    ~FlushSubnormals() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
    static constexpr unsigned long BOTH = 1UL << 24;
    unsigned long before;

public:
    FlushSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" ::"r"(before | BOTH));
    }
    ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#else
public:
    FlushSubnormals() {}  // nothing to set
#endif
    FlushSubnormals(const FlushSubnormals&) = delete;
};

// The most members of a team, with so many heads and threads.
static inline long members_of(long G, long threads) { return G < 1 || threads <= G ? 1 : fewer((threads + G - 1) / G, PARTS); }

// body(g, mine, room, team, member) for every head g. Returns 0, or 1 where memory ran out.
template <class Body>
static int for_heads(long G, long threads, long numbers, long room, Body body) {
    threads = fewer(threads < 1 ? 1 : threads, PARTS * (G < 1 ? 1 : G));
    const long teams = threads < G ? threads : G;
    if (teams == 0) return 0;
    std::vector<std::unique_ptr<Team>> team;
    std::vector<std::unique_ptr<Scratch>> mine, rooms;
    try {
        for (long i = 0; i < teams; ++i) {
            team.emplace_back(new Team(threads / teams + (i < threads % teams)));
            mine.emplace_back(new Scratch(numbers, 2 * i));
        }
        for (long i = 0; i < threads; ++i) rooms.emplace_back(new Scratch(room, 2 * i + 1));
    } catch (const std::bad_alloc&) {
        return 1;
    }
    auto work = [&](long who) {
        const FlushSubnormals flush;
        long i = 0, first = 0;
        while (who >= first + team[i]->members) first += team[i++]->members;
        for (long g = i; g < G; g += teams) {
            body(g, mine[i]->data(), rooms[who]->data(), *team[i], who - first);
            team[i]->wait();
        }
    };
#if defined(_OPENMP)  // the threads that torch has, since others would compete with these
#pragma omp parallel num_threads(int(threads))
    {
        const long who = omp_get_thread_num();  // the same thread, call after call, has what it left in its cache
        if (omp_get_num_threads() == threads) {
            work(who);
        } else if (who == 0) {  // fewer came than were asked for, and members would wait for ever
            const FlushSubnormals flush;
            Team alone(1);
            for (long g = 0; g < G; ++g) body(g, mine[0]->data(), rooms[0]->data(), alone, 0L);
        }
    }
#else
    std::vector<std::thread> others;
    for (long who = 1; who < threads; ++who) others.emplace_back(work, who);
    work(0);
    for (auto& t : others) t.join();
#endif
    return 0;
}
