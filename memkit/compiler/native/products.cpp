// Matrix products of the CPU backend: C[m,n] = (add ? C[m,n] : 0) + sum over k of A[m,k] * B[k,n].
//
// One register tile does the arithmetic: it keeps a few rows of a few vectors of C, reads the "vector operand" V with unit stride along
// the vectors and the "scalar operand" S one number at a time, so S may have any strides. Either A or B can be S (the transposed problem
// exchanges them). What does not fit a layout is repacked: V into panels of whole vectors, C by a transposition on store. An estimate of
// the cycles picks the cheapest way for each call.

#include <algorithm>
#include <cstring>
#include <utility>

#ifndef real
#define real float
#endif

// The size of a vector register, and how many of them hold sums: 24 of 32, or 12 of 16.
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define ACCUMULATORS 24
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#define ACCUMULATORS 12
#elif defined(__aarch64__)
#define VECTOR_BYTES 16
#define ACCUMULATORS 24
#else
#define VECTOR_BYTES 16
#define ACCUMULATORS 12
#endif

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define HIDE(pointer) asm("" : "+r"(pointer))

namespace {

typedef real vec __attribute__((vector_size(VECTOR_BYTES)));
typedef real loose_vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));
typedef real four __attribute__((vector_size(4 * sizeof(real))));
typedef real loose_four __attribute__((vector_size(4 * sizeof(real)), aligned(sizeof(real)), may_alias));

constexpr long W = VECTOR_BYTES / sizeof(real);  // numbers in a vector
constexpr int WIDEST = 8;                        // vectors across the widest tile
constexpr int WIDE = ACCUMULATORS == 24 ? 3 : 2; // vectors across a tile of many rows
constexpr int TALLEST = ACCUMULATORS == 24 ? 16 : 12;
constexpr long ROOM = 65536;                     // numbers of packed operand held at a time
constexpr long ASIDE = 2048;                     // numbers of C collected before they are placed
constexpr long DEEPEST = 512;                    // products summed in registers before C is touched
constexpr long PAGE = 4096 / sizeof(real);       // numbers in a page of memory
constexpr long LINE = 64 / sizeof(real);         // numbers in a line of the cache
constexpr long NEAR = 16384;                     // numbers of an operand that the nearest cache keeps
constexpr long FAR = 131072;                     // numbers of one that no cache of a core may hold beside the rest
constexpr long SHALLOW = 32;                     // of such an operand, rows that are read side by side: the processor foresees so many

constexpr int most_rows(int vectors) {
    return ACCUMULATORS / vectors < 1 ? 1 : ACCUMULATORS / vectors < TALLEST ? ACCUMULATORS / vectors : TALLEST;
}

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE vec load(const real* p) { return *(const loose_vec*)p; }
INLINE void store(real* p, vec v) { *(loose_vec*)p = v; }
INLINE four load_four(const real* p) { return *(const loose_four*)p; }
INLINE void store_four(real* p, four v) { *(loose_four*)p = v; }

// Split `count` into as few pieces of at most `most` as possible, of nearly equal size.
struct Pieces {
    long number, size, longer;
    // At least one piece, be it empty.
    Pieces(long count, long most) : number(count > 0 ? (count + most - 1) / most : 1), size(count / number), longer(count % number) {}
    long operator[](long i) const { return size + (i < longer); }
};

struct Problem {
    long M, N, K;
    const real* S;  // [M, K], strides sm, sk
    long sm, sk;
    const real* V;  // [K, N]
    long vk, vn;
    real* C;
    long cm, cn;
    bool add, upper;
};

// How one tile leaves the registers. Direct: rows of C take whole vectors; the last vector of a row starts at `last`, so that it
// overlaps its neighbour when the row is no multiple of W. Else the sums go to a buffer, laid out the same way.
struct Leave {
    bool direct, add;
    long last;
    real* C;
    long cm;
};

INLINE void transpose_fours(four& a, four& b, four& c, four& d) {
#if defined(__clang__) || __GNUC__ >= 12
    four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    four ba = __builtin_shufflevector(a, b, 2, 6, 3, 7), dc = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    a = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    b = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    c = __builtin_shufflevector(ba, dc, 0, 1, 4, 5);
    d = __builtin_shufflevector(ba, dc, 2, 3, 6, 7);
#else
    four e = {a[0], b[0], c[0], d[0]}, f = {a[1], b[1], c[1], d[1]}, g = {a[2], b[2], c[2], d[2]}, h = {a[3], b[3], c[3], d[3]};
    a = e, b = f, c = g, d = h;
#endif
}

template <bool ADD>
INLINE void transpose_square(const real* from, long from_row, real* to, long to_row) {
    four x[4];
    UNROLL for (int r = 0; r < 4; r++) x[r] = load_four(from + r * from_row);
    transpose_fours(x[0], x[1], x[2], x[3]);
    UNROLL for (int r = 0; r < 4; r++) store_four(to + r * to_row, ADD ? load_four(to + r * to_row) + x[r] : x[r]);
}

// to[j * to_row + i] = from[i * from_row + j], or added to it, for i < rows and j < columns. It goes by blocks of 16 x 16, which use whole
// cache lines on both sides, of squares of 4 x 4. Squares that overlap their neighbours cover the rest, unless it must not be added twice.
template <bool ADD>
void transpose(long rows, long columns, const real* from, long from_row, real* to, long to_row) {
    const bool overlap = !ADD && rows >= 4 && columns >= 4;
    const long square_rows = overlap ? rows : rows & ~3L, square_columns = overlap ? columns : columns & ~3L;
    for (long i0 = 0; i0 < square_rows; i0 += 16)
        for (long j0 = 0; j0 < square_columns; j0 += 16)
            for (long j1 = j0, j2 = smaller(j0 + 16, square_columns); j1 < j2; j1 += 4)
                for (long i1 = i0, i2 = smaller(i0 + 16, square_rows); i1 < i2; i1 += 4) {
                    const long i = smaller(i1, square_rows - 4), j = smaller(j1, square_columns - 4);
                    transpose_square<ADD>(from + i * from_row + j, from_row, to + j * to_row + i, to_row);
                }
    if (overlap) return;
    for (long i = 0; i < rows; i++)
        for (long j = i < square_rows ? square_columns : 0; j < columns; j++) {
            real* t = to + j * to_row + i;
            *t = ADD ? *t + from[i * from_row + j] : from[i * from_row + j];
        }
}

// c[j] = s[j], or added to it, for j < columns. The last four overlap those before them: their sum is taken first.
template <bool ADD>
INLINE void place_row(long columns, const real* s, real* c) {
    if (columns < 4) {
        for (long j = 0; j < columns; j++) c[j] = ADD ? c[j] + s[j] : s[j];
        return;
    }
    const long end = columns - 4;
    const four last = ADD ? load_four(c + end) + load_four(s + end) : load_four(s + end);
    for (long j = 0; j < end; j += 4) store_four(c + j, ADD ? load_four(c + j) + load_four(s + j) : load_four(s + j));
    store_four(c + end, last);
}

// Place a tile of sums that could not be stored directly.
template <bool ADD>
void finish(long rows, long columns, const real* sums, long row, real* C, long cm, long cn) {
    if (cm == 1 && cn != 1) return transpose<ADD>(rows, columns, sums, row, C, cn);
    for (long i = 0; i < rows; i++) {
        const real* s = sums + i * row;
        real* c = C + i * cm;
        if (cn == 1) place_row<ADD>(columns, s, c);
        else for (long j = 0; j < columns; j++) c[j * cn] = ADD ? c[j * cn] + s[j] : s[j];
    }
}

// Ask for the rows of C that a tile will leave in, which lie too far apart for the processor to foresee.
template <int R, int Q>
INLINE void fetch_rows(const Leave& leave) {
    const real* c = leave.C;
    UNROLL for (int r = 0; r < R; r++, c += leave.cm) {
        for (long q = 0; q < Q * W; q += LINE) __builtin_prefetch(c + q, 1);
        __builtin_prefetch(c + leave.last + W - 1, 1);
    }
}

// One pointer serves three rows of S, by the addresses p, p + sm and p + 2 sm; the relation between the pointers is hidden from the
// compiler, which would otherwise keep a separate offset for each row and run out of registers.
template <int R, int Q>
void tile(long K, const real* S, long sm, long sk, const real* V, long vk, const Leave& leave, real* aside) {
    const long last = leave.last;
    vec sum[R][Q];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int q = 0; q < Q; q++) sum[r][q] = vec{};
    const real* rows[(R + 2) / 3];
    UNROLL for (int i = 0; i < (R + 2) / 3; i++) {
        rows[i] = S + 3 * i * sm;
        HIDE(rows[i]);
    }
    if (leave.direct) fetch_rows<R, Q>(leave);
    for (long k = 0; k < K; k++, V += vk) {
        vec v[Q];
        UNROLL for (int q = 0; q < Q; q++) v[q] = load(V + (q < Q - 1 ? q * W : last));
        UNROLL for (int r = 0; r < R; r++) {
            const vec s = rows[r / 3][r % 3 * sm] - vec{};
            UNROLL for (int q = 0; q < Q; q++) sum[r][q] += s * v[q];
        }
        UNROLL for (int i = 0; i < (R + 2) / 3; i++) rows[i] += sk;
    }
    if (!leave.direct) {
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int q = 0; q < Q; q++) store(aside + r * Q * W + (q < Q - 1 ? q * W : last), sum[r][q]);
        return;
    }
    // A row is read before it is written: the last vector may overlap the one before it, with the same sums.
    real* c = leave.C;
    UNROLL for (int r = 0; r < R; r++, c += leave.cm) {
        vec fresh[Q];
        UNROLL for (int q = 0; q < Q; q++) fresh[q] = leave.add ? load(c + (q < Q - 1 ? q * W : last)) + sum[r][q] : sum[r][q];
        UNROLL for (int q = 0; q < Q; q++) store(c + (q < Q - 1 ? q * W : last), fresh[q]);
    }
}

typedef void (*Tile)(long, const real*, long, long, const real*, long, const Leave&, real*);

struct Tiles {
    Tile at[WIDEST + 1][TALLEST + 1] = {};
    template <int Q, int... R>
    void column(std::integer_sequence<int, R...>) {
        ((at[Q][R + 1] = tile<R + 1, Q>), ...);
    }
    template <int... Q>
    void every(std::integer_sequence<int, Q...>) {
        (column<Q + 1>(std::make_integer_sequence<int, most_rows(Q + 1)>()), ...);
    }
    Tiles() { every(std::make_integer_sequence<int, WIDEST>()); }
};

const Tiles tiles;

// panel[k][j] = V[k][j] for j < columns; from there to `width`, any numbers. Rows of V with others after them can be read beyond their end.
void pack(long K, long columns, const real* V, long vk, long vn, real* panel, long width) {
    if (vk == 1 && vn != 1) {
        transpose<false>(columns, K, V, vn, panel, width);
    } else if (vn == 1) {
        long k = 0;
        if (width == W) for (; k < K && k * vk + W <= (K - 1) * vk + columns; k++) store(panel + k * W, load(V + k * vk));
        for (; k < K; k++) std::memcpy(panel + k * width, V + k * vk, columns * sizeof(real));
    } else {
        for (long k = 0; k < K; k++)
            for (long j = 0; j < columns; j++) panel[k * width + j] = V[k * vk + j * vn];
    }
}

// Few rows want wide tiles, many rows want tiles tall enough to reuse each vector they load.
int choose_width(long M, long vectors, bool upper) {
    if (upper) return 1;
    int best = 1;
    for (int q = 2; q <= WIDEST && q <= vectors; q++)
        if (most_rows(q) >= smaller(M, most_rows(WIDE))) best = q;
    return best;
}

// All rows of C for one panel of columns [n, n + columns). Tiles that are not stored directly are collected to place many rows at once.
// ahead: what a later panel will read, which is asked for between the tiles; or null.
void panel(const Problem& p, long n, long columns, int vectors, const real* V, long vk, Leave leave, const real* ahead) {
    alignas(64) real space[ASIDE + W];
    real* aside = space + W;  // a last vector that overlaps nothing in its panel starts up to W before it
    const long row = vectors * W;
    const Pieces rows(p.M, most_rows(vectors));
    long done = 0, ready = 0;  // rows of C that are finished, and rows that are computed
    for (long i = 0; i < rows.number; i++) {
        if (p.upper && ready >= n + columns) break;
        leave.C = p.C + ready * p.cm + n * p.cn;
        if (ahead)
            for (long k = p.K * i / rows.number; k < p.K * (i + 1) / rows.number; k++)
                for (long j = 0; j < row; j += LINE) __builtin_prefetch(ahead + k * vk + j, 0, 2);
        tiles.at[vectors][rows[i]](p.K, p.S + ready * p.sm, p.sm, p.sk, V, vk, leave, aside + (ready - done) * row);
        ready += rows[i];
        if (leave.direct) continue;
        const bool full = (ready - done + rows[0]) * row > ASIDE;
        if (!full && i + 1 < rows.number && !(p.upper && ready >= n + columns)) continue;
        real* C = p.C + done * p.cm + n * p.cn;
        (leave.add ? finish<true> : finish<false>)(ready - done, columns, aside, row, C, p.cm, p.cn);
        done = ready;
    }
}

// The product with vectors along n, at most DEEPEST deep.
void along_columns(Problem p, real* room) {
    const long vectors = (p.N + W - 1) / W;
    const bool packed = p.vn != 1 || p.N < W;
    const bool fetched = !packed && p.K * p.N > NEAR && p.M >= TALLEST;  // fewer rows take too little time to hide anything
    const Pieces widths(vectors, choose_width(p.M, vectors, p.upper));
    for (long i = 0, n = 0; i < widths.number; n += widths[i] * W, i++) {
        const int q = int(widths[i]);
        const long columns = smaller(q * W, p.N - n), missing = q * W - columns;
        const real* V = p.V + n * p.vn;
        // The vector that overlaps the panel before this one, which is stored already, must not add to C what it shares with it.
        const bool direct = p.cn == 1 && p.N >= W && !(missing && (packed || (p.add && q == 1)));
        const Leave leave = {direct, p.add, (q - 1) * W - (packed ? 0 : missing), nullptr, p.cm};
        if (packed) pack(p.K, columns, V, p.vk, p.vn, room, q * W);
        const real* ahead = fetched && n + 3 * q * W <= p.N ? V + 2 * q * W : nullptr;
        panel(p, n, columns, q, packed ? room : V, packed ? q * W : p.vk, leave, ahead);
    }
}

INLINE four halve(vec v) {
    union { vec v; four f[W / 4 ? W / 4 : 1]; real lane[W]; } u = {v};
    if (W < 4) return four{u.lane[0], u.lane[W - 1], 0, 0};
    four sum = u.f[0];
    for (long i = 1; i < W / 4; i++) sum += u.f[i];
    return sum;
}

// R rows of S times V, both with unit stride along k, four columns at a time: vectors of partial sums over k.
template <int R>
void dot_rows(const Problem& p, const real* s, real* C) {
    for (long n = 0; n < p.N; n += 4) {
        const long columns = smaller(4, p.N - n);
        const real* v[4];
        for (int j = 0; j < 4; j++) v[j] = p.V + (n + (j < columns ? j : 0)) * p.vn;
        vec sum[R][4];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int j = 0; j < 4; j++) sum[r][j] = vec{};
        long k = 0;
        for (; k + W <= p.K; k += W) {
            vec along[4];
            UNROLL for (int j = 0; j < 4; j++) along[j] = load(v[j] + k);
            UNROLL for (int r = 0; r < R; r++) {
                const vec row = load(s + r * p.sm + k);
                UNROLL for (int j = 0; j < 4; j++) sum[r][j] += row * along[j];
            }
        }
        UNROLL for (int r = 0; r < R; r++) {
            four x[4];
            UNROLL for (int j = 0; j < 4; j++) x[j] = halve(sum[r][j]);
            transpose_fours(x[0], x[1], x[2], x[3]);
            four total = (x[0] + x[1]) + (x[2] + x[3]);
            for (long t = k; t < p.K; t++) total += s[r * p.sm + t] * four{v[0][t], v[1][t], v[2][t], v[3][t]};
            real* to = C + r * p.cm + n * p.cn;
            for (int j = 0; j < columns; j++, to += p.cn) *to = p.add ? *to + total[j] : total[j];
        }
    }
}

// Several sums at a time: each waits for the one before it.
real inner_product(long rows, long columns, const real* a, long a_row, const real* b, long b_row) {
    constexpr int Q = 8;
    vec sum[Q];
    UNROLL for (int q = 0; q < Q; q++) sum[q] = vec{};
    real rest = 0;
    for (long i = 0; i < rows; i++, a += a_row, b += b_row) {
        long j = 0;
        for (; j + Q * W <= columns; j += Q * W)
            UNROLL for (int q = 0; q < Q; q++) sum[q] += load(a + j + q * W) * load(b + j + q * W);
        for (; j + W <= columns; j += W) sum[0] += load(a + j) * load(b + j);
        for (; j < columns; j++) rest += a[j] * b[j];
    }
    UNROLL for (int q = 1; q < Q; q++) sum[0] += sum[q];
    for (long j = 0; j < W; j++) rest += sum[0][j];
    return rest;
}

// The product for few rows when V has unit stride along k. Rows of S that have not are copied.
void along_depth(Problem p, real* room) {
    static constexpr decltype(&dot_rows<1>) dots[] = {dot_rows<1>, dot_rows<2>, dot_rows<3>, dot_rows<4>};
    if (p.sk != 1) {
        for (long m = 0; m < p.M; m++)
            for (long k = 0; k < p.K; k++) room[m * p.K + k] = p.S[m * p.sm + k * p.sk];
        p.S = room, p.sm = p.K, p.sk = 1;
    }
    for (long m = 0; m < p.M; m += 4) dots[smaller(4, p.M - m) - 1](p, p.S + m * p.sm, p.C + m * p.cm);
}

Problem exchanged(const Problem& p) {
    return {p.N, p.M, p.K, p.V, p.vn, p.vk, p.S, p.sk, p.sm, p.C, p.cn, p.cm, p.add, p.upper};
}

// Estimated cycles, fitted to measurements: the multiply-adds, the loads of V, the tiles, repacking V, placing C.
double cost_of_columns(const Problem& p) {
    const double M = double(p.M), N = double(p.N), K = double(p.K);
    const long vectors = (p.N + W - 1) / W;
    const Pieces widths(vectors, choose_width(p.M, vectors, p.upper));
    const double tiles = double(widths.number * Pieces(p.M, most_rows(int(widths[0]))).number);
    double cost = 138 + (M + 0.8) * double(vectors) * K + 42 * tiles;
    if (p.vn != 1) cost += N * K * (p.vk == 1 ? 0.37 : 1.5);
    else if (p.N < W) cost += 1.8 * K;
    if (p.cn != 1) cost += M * N * (p.cm == 1 ? 0.43 : 1.5);
    else if (p.N < W) cost += 3.4 * M;
    return cost;
}

double cost_of_depth(const Problem& p) {
    const double M = double(p.M), K = double(p.K), quads = double((p.N + 3) / 4);
    if (p.vk != 1 || p.M * smaller(p.K, DEEPEST) > ROOM) return 1e300;
    return 178 + 5.5 * M * quads * K / W + 23 * M * quads + (p.sk == 1 ? 0 : 1.1 * M * K);
}

// The lower half of a symmetric result from its upper half, by blocks that stay in cache.
void mirror(long N, real* C, long cm, long cn) {
    for (long i = 0; i < N; i += 16)
        for (long j = i; j < N; j += 16) {
            const long high = smaller(16, N - i), wide = smaller(16, N - j);
            const real* from = C + i * cm + j * cn;
            real* to = C + j * cm + i * cn;
            if (j > i && cn == 1) transpose<false>(high, wide, from, cm, to, cm);
            else if (j > i && cm == 1) transpose<false>(wide, high, from, cn, to, cn);
            else if (high == 16 && cn == 1)
                for (long r = 0; r < 16; r += 4) {
                    for (long c = r + 4; c < 16; c += 4) transpose_square<false>(from + r * cm + c, cm, to + c * cm + r, cm);
                    for (long d = r + 1; d < r + 4; d++)
                        for (long c = r; c < d; c++) to[d * cm + c] = from[c * cm + d];
                }
            else
                for (long r = 0; r < high; r++)
                    for (long c = j > i ? 0 : r + 1; c < wide; c++) to[c * cm + r * cn] = from[r * cm + c * cn];
        }
}

// Whether V is read where it lies, too large for a cache, in rows long enough to be foreseen; and C, read once more for every piece of the
// depth, is small beside it.
bool in_far_rows(const Problem& p) {
    return p.vn == 1 && p.N >= PAGE && p.K * p.N > FAR && p.M <= p.K && p.M <= 6 * TALLEST;
}

void compute(Problem p, real* room) {
    if (p.M <= 0 || p.N <= 0) return;
    const Problem x = exchanged(p);
    const double costs[] = {cost_of_columns(p), cost_of_columns(x), cost_of_depth(p), cost_of_depth(x)};
    const long best = p.upper ? p.cn != 1 : std::min_element(costs, costs + 4) - costs;  // the same half whenever more is added
    if (best % 2) p = x;
    const Pieces depths(p.K, best < 2 && in_far_rows(p) ? SHALLOW : DEEPEST);
    for (long i = 0; i < depths.number; i++) {
        Problem piece = p;
        piece.K = depths[i];
        (best < 2 ? along_columns : along_depth)(piece, room);
        p.S += depths[i] * p.sk;
        p.V += depths[i] * p.vk;
        p.add = true;
    }
}

}  // namespace

extern "C" {

// Numbers of scratch one call needs.
long product_room(void) { return ROOM; }

void product(long M, long N, long K, const real* A, long am, long ak, const real* B, long bk, long bn, real* C, long cm, long cn, int add,
             real* room) {
    compute({M, N, K, A, am, ak, B, bk, bn, C, cm, cn, add != 0, false}, room);
}

// The same for a result that will be symmetric, once more is added: what lies below the diagonal may be anything.
void product_half(long M, long N, long K, const real* A, long am, long ak, const real* B, long bk, long bn, real* C, long cm, long cn,
                  int add, real* room) {
    compute({M, N, K, A, am, ak, B, bk, bn, C, cm, cn, add != 0, true}, room);
}

// The same for a result known to be symmetric: tiles below the diagonal are copied from above it.
void product_upper(long M, long N, long K, const real* A, long am, long ak, const real* B, long bk, long bn, real* C, long cm, long cn,
                   int add, real* room) {
    product_half(M, N, K, A, am, ak, B, bk, bn, C, cm, cn, add, room);
    cn == 1 ? mirror(N, C, cm, cn) : mirror(N, C, cn, cm);
}

// The sum of a[i, j] * b[i, j] for i < rows and j < columns, both with unit stride along j.
real inner(long rows, long columns, const real* a, long a_row, const real* b, long b_row) {
    if (a_row == columns && b_row == columns) columns *= rows, rows = 1;
    return inner_product(rows, columns, a, a_row, b, b_row);
}

// to[i * to_row + j] = from[j * from_row + i] for j < rows and i < columns.
void turned(long rows, long columns, const real* from, long from_row, real* to, long to_row) {
    transpose<false>(rows, columns, from, from_row, to, to_row);
}
}
