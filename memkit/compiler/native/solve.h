// Unit-triangular systems, and what surrounds emitted steps.
#pragma once
#include <cmath>

#if defined(__clang__)
#define IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define IVDEP _Pragma("GCC ivdep")
#endif
#define MEMKIT_PRAGMA(x) _Pragma(#x)
#define SUM(name) MEMKIT_PRAGMA(omp simd reduction(+ : name))

extern "C" {
void product(long M, long N, long K, const real* A, long am, long ak, const real* B, long bk, long bn, real* C, long cm, long cn, int add,
             real* room);
void product_upper(long M, long N, long K, const real* A, long am, long ak, const real* B, long bk, long bn, real* C, long cm, long cn,
                   int add, real* room);  // for a result that is symmetric
void product_half(long M, long N, long K, const real* A, long am, long ak, const real* B, long bk, long bn, real* C, long cm, long cn,
                  int add, real* room);  // of which the entries above the diagonal will do, as more is added
// to[i, j] = from[j, i], j < rows, i < columns
void turned(long rows, long columns, const real* from, long from_row, real* to, long to_row);
// the sum of a[i, j] b[i, j], i < rows, j < columns
real inner(long rows, long columns, const real* a, long a_row, const real* b, long b_row);
long product_room(void);
}

// x with (I - low) x = b, in the place of b. low [n, n] holds the system's entries below the diagonal, negated; back: its transpose.
// x has n rows, xr apart, of m entries, xc apart. Blocks of 16 rows take in all rows solved before as one product.
static void solve(long n, long m, const real* low, long ld, real* x, long xr, long xc, int back, real* room) {
    const long block = 16, blocks = (n + block - 1) / block;
    for (long i = 0; i < blocks; ++i) {
        const long first = (back ? blocks - 1 - i : i) * block, end = first + block < n ? first + block : n;
        if (i && back) product(end - first, m, n - end, low + end * ld + first, 1, ld, x + end * xr, xr, xc, x + first * xr, xr, xc, 1, room);
        if (i && !back) product(end - first, m, first, low + first * ld, ld, 1, x, xr, xc, x + first * xr, xr, xc, 1, room);
        for (long step = 1; step < end - first; ++step) {
            const long r = back ? end - 1 - step : first + step;
            for (long j = 0; j < step; ++j) {
                const long c = back ? end - 1 - j : first + j;
                const real factor = back ? low[c * ld + r] : low[r * ld + c];
                IVDEP for (long s = 0; s < m; ++s) x[r * xr + s * xc] += factor * x[c * xr + s * xc];
            }
        }
    }
}
