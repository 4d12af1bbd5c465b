// Scalar functions of the CPU backend, written so that the loops around them become vector code: for float without
// branches, tables or calls (a few rare functions call the C library); for double, which serves checks, by the
// C library throughout. Infinities, zeros and NaN go through as in torch: no fast-math needed. So do subnormal numbers, unless the caller
// has them flushed, as calls of whole rules do.
//
// The polynomials and quotients are minimax fits in relative error; the bound of each is given beside it.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef real
#define real float
#endif

#define FN static inline __attribute__((always_inline))

namespace native {

FN int32_t bits_of(float x) {
    int32_t i;
    std::memcpy(&i, &x, sizeof i);
    return i;
}

FN float from_bits(int32_t i) {
    float x;
    std::memcpy(&x, &i, sizeof x);
    return x;
}

// 2^n for -126 <= n <= 127, zero for n = -127.
FN float power_of_two(int32_t n) { return from_bits((n + 127) << 23); }

// x = count * ln 2 + rest with |rest| <= 0.3466, for |x| up to about 10^4; shortly: e^x = 2^count * (1 + grown).
struct Split {
    int32_t count;
    float grown;  // e^rest - 1
};

FN Split split_exp(float x) {
    // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits. The high part of ln 2 has 15 bits
    // so that its product with the count is exact.
    const float shifted = x * 1.44269504f + 12582912.0f;
    const float whole = shifted - 12582912.0f;
    const float rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
    float q = 0.0013870663f;  // (e^r - 1 - r) / r^2: 1.4e-8 of e^r - 1
    q = q * rest + 0.00836626f;
    q = q * rest + 0.041667435f;
    q = q * rest + 0.16666546f;
    q = q * rest + 0.49999997f;
    return {bits_of(shifted) - 0x4B400000, rest + rest * rest * q};
}

// The scaling is in two steps because 2^count may itself leave the range of float.
FN float exp_of(float x) {
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const Split s = split_exp(x);
    const int32_t half = s.count >> 1;
    const float scale = power_of_two(half);
    return (scale + scale * s.grown) * power_of_two(s.count - half);
}

// e^x for x <= 0. Results below the normal range become zero: at -88 the count is -127, whose scale is zero.
FN float exp_of_negative(float x) {
    const Split s = split_exp(x < -88.0f ? -88.0f : x);
    const float scale = power_of_two(s.count);
    return scale + scale * s.grown;
}

FN float expm1_of(float x) {
    x = x < -20.0f ? -20.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const Split s = split_exp(x);
    const float scale = power_of_two(s.count - (s.count > 126));
    const float last = s.count > 126 ? 2.0f : 1.0f;
    const float value = scale * s.grown + (scale - 1.0f / last);
    return x == 0.0f ? x : value * last;
}

// log(1 + f) for -0.293 <= f <= 0.415.
FN float log_near_one(float f) {
    float q = -0.076343074f;  // (log(1 + f) - f + f^2 / 2) / f^3: 6e-9 of log(1 + f)
    q = q * f + 0.12761362f;
    q = q * f + -0.13159929f;
    q = q * f + 0.14201707f;
    q = q * f + -0.16623397f;
    q = q * f + 0.20001237f;
    q = q * f + -0.2500082f;
    q = q * f + 0.3333333f;
    return f + f * f * (f * q - 0.5f);
}

FN float log_of(float x) {
    const bool tiny = x < 1.17549435e-38f;
    const float scaled = tiny ? x * 8388608.0f : x;
    // Counted from the bits of sqrt(1/2), so that the mantissa lands between sqrt(1/2) and sqrt(2).
    const int32_t above = bits_of(scaled) - 0x3F3504F3;
    const int32_t count = above >> 23;
    const float mantissa = from_bits(bits_of(scaled) - (count << 23));
    const float whole = float(count) - (tiny ? 23.0f : 0.0f);
    const float near = log_near_one(mantissa - 1.0f);
    const float sum = whole * 0.693145752f + (near + whole * 1.42860677e-6f);
    const float positive = x < INFINITY ? sum : x;  // infinity and NaN return themselves
    return x > 0.0f ? positive : x == 0.0f ? -INFINITY : x < 0.0f ? NAN : x;
}

// The rounding error of 1 + x is made good to first order.
FN float log1p_of(float x) {
    const float near = 1.0f + x;
    const float slip = x - (near - 1.0f);
    const float value = log_of(near) + slip / near;
    const float inside = x < INFINITY ? value : x;
    return x == 0.0f ? x : x > -1.0f ? inside : x == -1.0f ? -INFINITY : NAN;
}

// expm1(2x) / (expm1(2x) + 2) for x >= 0, with the sign put back.
FN float tanh_of(float x) {
    const float size = std::fabs(x);
    const float bounded = size > 10.0f ? 10.0f : size;
    const Split s = split_exp(2.0f * bounded);
    const float scale = power_of_two(s.count);
    const float t = scale * s.grown + (scale - 1.0f);
    return std::copysign(t / (t + 2.0f), x);
}

// 1 / (1 + e^-x) as a quotient without cancellation on either side: with e = e^-|x|, top is 1 or e.
FN float sigmoid_of(float x) {
    const float e = exp_of_negative(-std::fabs(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

FN float silu_of(float x) { return x * sigmoid_of(x); }

FN float silu_slope_of(float x) {
    const float e = exp_of_negative(-std::fabs(x));
    const float part = 1.0f / (1.0f + e);
    const float up = (x < 0.0f ? e : 1.0f) * part;
    const float down = (x < 0.0f ? 1.0f : e) * part;
    return up * (1.0f + x * down);
}

// max(x, 0) + log(1 + e^-|x|); the argument of the logarithm is halved where it is large.
FN float softplus_of(float x) {
    const float e = exp_of_negative(-std::fabs(x));
    const bool large = e > 0.41421356f;
    const float near = log_near_one(large ? 0.5f * e - 0.5f : e) + (large ? 0.69314718f : 0.0f);
    const float value = (x < 0.0f ? 0.0f : x) + near;
    return x > 20.0f ? x : value;
}

// tail(y) / bell(y) of the normal distribution for 0 <= y <= 14.6: 6e-9.
FN float tail_quotient(float y) {
    float p = 0.0041238815f;
    p = p * y + 0.040684137f;
    p = p * y + 0.183386f;
    p = p * y + 0.43849832f;
    p = p * y + 0.5f;
    float q = 0.01033692f;
    q = q * y + 0.101986386f;
    q = q * y + 0.46986893f;
    q = q * y + 1.2031294f;
    q = q * y + 1.6748817f;
    q = q * y + 1.0f;
    return p / q;
}

// The normal distribution: the probability below -|x|, and e^(-x^2 / 2). The tail is the bell times a smooth
// quotient, so it keeps its relative accuracy far out. The bell needs the rounding error of x^2: `high` has 12
// bits, so its square is exact, and the rest of x^2 is small.
struct Normal {
    float tail, bell;
};

FN Normal normal_of(float x) {
    const float size = std::fabs(x);
    const float y = size > 14.6f ? 14.6f : size;
    const float power = y * y * -0.5f;
    const float high = from_bits(bits_of(y) & ~0xFFF);
    const float slip = (high * high * -0.5f - power) - (y - high) * (y + high) * 0.5f;
    const float plain = exp_of_negative(power);
    const float bell = plain + plain * slip;
    return {bell * tail_quotient(y), bell};
}

FN float erf_of(float x) {
    const float size = std::fabs(x);
    const float y = size > 4.0f ? 4.0f : size;
    const float z = y * y;
    float p = -0.00055607135f;  // erf(y) / y - 1 in y^2, for y up to 1: 5e-8 of erf(y)
    p = p * z + 0.004900096f;
    p = p * z + -0.026696226f;
    p = p * z + 0.11279643f;
    p = p * z + -0.37612256f;
    p = p * z + 0.12837915f;
    const float far = 1.0f - 2.0f * exp_of_negative(-z) * tail_quotient(1.41421356f * y);
    return std::copysign(y > 1.0f ? far : y + y * p, x);
}

FN float gelu_of(float x) {
    const Normal n = normal_of(x);
    return x * (x < 0.0f ? n.tail : 1.0f - n.tail);
}

FN float gelu_slope_of(float x) {
    const Normal n = normal_of(x);
    return (x < 0.0f ? n.tail : 1.0f - n.tail) + x * n.bell * 0.39894228f;
}

FN float sinh_of(float x) {
    const float size = std::fabs(x);
    const float t = expm1_of(size > 89.5f ? 89.5f : size);
    const float half = exp_of(0.5f * size);
    const float value = size > 20.0f ? 0.5f * half * half : 0.5f * (t + t / (t + 1.0f));
    return std::copysign(value, x);
}

FN float cosh_of(float x) {
    const float half = exp_of(0.5f * std::fabs(x));
    const float grown = half * half;
    return 0.5f * half * half + 0.5f / grown;
}

FN double exp_of(double x) { return std::exp(x); }
FN double expm1_of(double x) { return std::expm1(x); }
FN double log_of(double x) { return std::log(x); }
FN double log1p_of(double x) { return std::log1p(x); }
FN double tanh_of(double x) { return std::tanh(x); }
FN double erf_of(double x) { return std::erf(x); }
FN double sinh_of(double x) { return std::sinh(x); }
FN double cosh_of(double x) { return std::cosh(x); }
FN double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }
FN double silu_of(double x) { return x / (1.0 + std::exp(-x)); }
FN double softplus_of(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }
FN double gelu_of(double x) { return 0.5 * x * std::erfc(x * -0.70710678118654752440); }

FN double silu_slope_of(double x) {
    const double s = sigmoid_of(x);
    return s * (1.0 + x * (1.0 - s));
}

FN double gelu_slope_of(double x) {
    return 0.5 * std::erfc(x * -0.70710678118654752440) + x * std::exp(-0.5 * x * x) * 0.39894228040143267794;
}

}  // namespace native

FN real fn_exp(real x) { return native::exp_of(x); }
FN real fn_log(real x) { return native::log_of(x); }
FN real fn_log1p(real x) { return native::log1p_of(x); }
FN real fn_expm1(real x) { return native::expm1_of(x); }
FN real fn_tanh(real x) { return native::tanh_of(x); }
FN real fn_sigmoid(real x) { return native::sigmoid_of(x); }
FN real fn_erf(real x) { return native::erf_of(x); }
FN real fn_gelu(real x) { return native::gelu_of(x); }
FN real fn_gelu_slope(real x) { return native::gelu_slope_of(x); }
FN real fn_silu(real x) { return native::silu_of(x); }
FN real fn_silu_slope(real x) { return native::silu_slope_of(x); }
FN real fn_softplus(real x) { return native::softplus_of(x); }
FN real fn_sinh(real x) { return native::sinh_of(x); }
FN real fn_cosh(real x) { return native::cosh_of(x); }
FN real fn_sin(real x) { return std::sin(x); }
FN real fn_cos(real x) { return std::cos(x); }
FN real fn_atan(real x) { return std::atan(x); }
FN real fn_pow(real a, real b) { return std::pow(a, b); }

FN real fn_sqrt(real x) { return std::sqrt(x); }
FN real fn_rsqrt(real x) { return real(1) / std::sqrt(x); }
FN real fn_reciprocal(real x) { return real(1) / x; }
FN real fn_abs(real x) { return std::fabs(x); }
FN real fn_square(real x) { return x * x; }
FN real fn_floor(real x) { return std::floor(x); }
FN real fn_ceil(real x) { return std::ceil(x); }
FN real fn_round(real x) { return std::nearbyint(x); }  // half to even in the default rounding mode
FN real fn_sign(real x) { return real(x > 0) - real(x < 0); }

// A NaN in either operand is the result: no comparison with it holds.
FN real fn_maximum(real a, real b) { return a > b || a != a ? a : b; }
FN real fn_minimum(real a, real b) { return a < b || a != a ? a : b; }

FN real fn_gt(real a, real b) { return a > b ? real(1) : real(0); }
FN real fn_ge(real a, real b) { return a >= b ? real(1) : real(0); }
FN real fn_lt(real a, real b) { return a < b ? real(1) : real(0); }
FN real fn_le(real a, real b) { return a <= b ? real(1) : real(0); }
FN real fn_eq(real a, real b) { return a == b ? real(1) : real(0); }
FN real fn_where(real flag, real a, real b) { return flag != 0 ? a : b; }

#undef FN
