// Scratch memory for tests: full of NaN, new for every call, and followed by a page that may not be touched. Compiled in front of
// emitted code.
#pragma once
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace std {

// `size` bytes that end where the page begins; how many were mapped lies in front of them, in a page of its own.
static inline void* poisoned_alloc(size_t, size_t size) {
    const size_t page = sysconf(_SC_PAGESIZE), inner = (size + page - 1) / page * page, whole = inner + 2 * page;
    char* const first = static_cast<char*>(mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (first == MAP_FAILED) return nullptr;
    *reinterpret_cast<size_t*>(first) = whole;
    memset(first + page, 0xFF, inner);  // every byte set: a NaN in float and in double
    mprotect(first + page + inner, page, PROT_NONE);
    return first + page + inner - size;
}

static inline void poisoned_free(void* data) {
    const size_t page = sysconf(_SC_PAGESIZE);
    char* const first = reinterpret_cast<char*>(reinterpret_cast<size_t>(data) / page * page) - page;
    munmap(first, *reinterpret_cast<size_t*>(first));
}

}  // namespace std

#define aligned_alloc poisoned_alloc
#define free poisoned_free
#define KEPT_BYTES 0
