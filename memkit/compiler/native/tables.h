// Constants of the CPU backend that go on and on evenly, written as runs.

#pragma once
#include <initializer_list>

namespace native {

// `count` numbers that start with `first` and rise by `step`.
template <class T>
struct Run {
    T first;
    long count = 1, step = 0;
};

// N numbers, used like an array.
template <class T, long N>
struct Table {
    T numbers[N] = {};

    constexpr Table(std::initializer_list<Run<T>> runs) {
        long at = 0;
        for (const Run<T>& run : runs)
            for (long i = 0; i < run.count; i++) numbers[at++] = run.first + T(i * run.step);
    }

    constexpr operator const T*() const { return numbers; }
};

}  // namespace native

using native::Table;
