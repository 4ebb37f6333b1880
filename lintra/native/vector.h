// Vectors of the widest registers this translation unit may use, as GNU vector extensions: the same source becomes
// SSE2, AVX2, AVX-512 or NEON code. Everything lives in a namespace named after the instruction set: an inline function
// shared between translation units would be kept once by the linker, possibly in a form this machine cannot run.
#pragma once
#include <stdint.h>
#include <string.h>

#include "abi.h"

#if defined(__AVX512F__)
#define LINTRA_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define LINTRA_VECTOR_BYTES 32
#else
#define LINTRA_VECTOR_BYTES 16
#endif

#define LINTRA_INLINE inline __attribute__((always_inline))
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define LINTRA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LINTRA_UNROLL _Pragma("GCC unroll 16")
#endif

namespace lintra {
namespace LINTRA_ISA {

template <class T>
struct Types;
template <>
struct Types<float> {
  typedef float V __attribute__((vector_size(LINTRA_VECTOR_BYTES)));
  typedef int32_t I __attribute__((vector_size(LINTRA_VECTOR_BYTES)));
  typedef int32_t Int;
};
template <>
struct Types<double> {
  typedef double V __attribute__((vector_size(LINTRA_VECTOR_BYTES)));
  typedef int64_t I __attribute__((vector_size(LINTRA_VECTOR_BYTES)));
  typedef int64_t Int;
};
template <class T>
using Vec = typename Types<T>::V;
template <class T>
using Mask = typename Types<T>::I;

template <class T>
constexpr i64 kLanes = LINTRA_VECTOR_BYTES / i64(sizeof(T));

constexpr i64 kChunk = 16;  // tokens; long enough to amortise the state's traffic, short enough that the
                            // chunk x chunk products stay a fifth of the work at 64 x 64

constexpr i64 round_up(i64 n, i64 unit) { return (n + unit - 1) / unit * unit; }

template <class T>
LINTRA_INLINE Vec<T> load(const T* p) {
  Vec<T> x;
  memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
LINTRA_INLINE void store(T* p, Vec<T> x) {
  memcpy(p, &x, sizeof x);
}
// Past the caches, to an address that is a multiple of the vector's size: for data not read again soon. `stream_end`
// makes it visible to other threads.
template <class T>
LINTRA_INLINE void stream(T* p, Vec<T> x) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)p, (__m512i)x);
#elif defined(__AVX2__)
  _mm256_stream_si256((__m256i*)p, (__m256i)x);
#else
  store(p, x);
#endif
}
LINTRA_INLINE void stream_end() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}
template <class T>
LINTRA_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // x - 0 is x for every x, -0 and NaN included; x + 0 is not
}
template <class T>
LINTRA_INLINE Vec<T> select(Mask<T> mask, Vec<T> yes, Vec<T> no) {
  return mask ? yes : no;
}

// The larger (smaller) of a bound and x, and NaN where x is: instructions that compilers do not make of a comparison.
#if LINTRA_VECTOR_BYTES == 64
LINTRA_INLINE Vec<float> at_least(float low, Vec<float> x) {
  return (Vec<float>)_mm512_maskz_max_ps(-1, (__m512)splat(low), (__m512)x);
}
LINTRA_INLINE Vec<double> at_least(double low, Vec<double> x) {
  return (Vec<double>)_mm512_maskz_max_pd(-1, (__m512d)splat(low), (__m512d)x);
}
LINTRA_INLINE Vec<float> at_most(float high, Vec<float> x) {
  return (Vec<float>)_mm512_maskz_min_ps(-1, (__m512)splat(high), (__m512)x);
}
LINTRA_INLINE Vec<double> at_most(double high, Vec<double> x) {
  return (Vec<double>)_mm512_maskz_min_pd(-1, (__m512d)splat(high), (__m512d)x);
}
#elif LINTRA_VECTOR_BYTES == 32
LINTRA_INLINE Vec<float> at_least(float low, Vec<float> x) { return _mm256_max_ps(splat(low), x); }
LINTRA_INLINE Vec<double> at_least(double low, Vec<double> x) { return _mm256_max_pd(splat(low), x); }
LINTRA_INLINE Vec<float> at_most(float high, Vec<float> x) { return _mm256_min_ps(splat(high), x); }
LINTRA_INLINE Vec<double> at_most(double high, Vec<double> x) { return _mm256_min_pd(splat(high), x); }
#else
template <class T>
LINTRA_INLINE Vec<T> at_least(T low, Vec<T> x) {
  return select<T>(x < low, splat(low), x);
}
template <class T>
LINTRA_INLINE Vec<T> at_most(T high, Vec<T> x) {
  return select<T>(x > high, splat(high), x);
}
#endif

// 0, 1, 2, ... as integers.
template <class T>
LINTRA_INLINE Mask<T> iota() {
  Mask<T> x;
  for (i64 i = 0; i < kLanes<T>; ++i) x[i] = typename Types<T>::Int(i);
  return x;
}

template <class T>
LINTRA_INLINE T sum(Vec<T> x) {
  T total = 0;
  for (i64 i = 0; i < kLanes<T>; ++i) total += x[i];
  return total;
}

template <class T>
struct Exp;  // constants of exp: below `low` the result is 0, above `high` infinite, in the type's own rounding
template <>
struct Exp<float> {
  static constexpr float low = -104.0f, high = 89.0f, magic = 12582912.0f;  // 1.5 * 2^23
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr int bias = 127, mantissa = 23, degree = 7;
};
template <>
struct Exp<double> {
  static constexpr double low = -746.0, high = 710.0, magic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
  static constexpr int bias = 1023, mantissa = 52, degree = 13;
};

#if LINTRA_VECTOR_BYTES == 64
// p * 2^n for whole n. (The masked forms: the plain ones read an undefined register, and GCC warns.)
LINTRA_INLINE Vec<float> scale_by_power(Vec<float> p, Vec<float> n) {
  return (Vec<float>)_mm512_maskz_scalef_ps(-1, (__m512)p, (__m512)n);
}
LINTRA_INLINE Vec<double> scale_by_power(Vec<double> p, Vec<double> n) {
  return (Vec<double>)_mm512_maskz_scalef_pd(-1, (__m512d)p, (__m512d)n);
}
#endif

// exp(x) to about 1 unit in the last place: x = n ln 2 + r, and the Taylor series in |r| <= 0.35, whose first dropped
// term is below a tenth of that unit. NaN stays NaN.
template <class T>
LINTRA_INLINE Vec<T> exp_below(Vec<T> x) {  // for x <= high
  using E = Exp<T>;
  using V = Vec<T>;
  x = at_least(E::low, x);
  V shifted = x * T(1.4426950408889634) + E::magic;
  V n = shifted - E::magic;
  V r = x - n * E::ln2_high;
  r = r - n * E::ln2_low;
  T factorial = 1;
  T coefficient[E::degree + 1];
  LINTRA_UNROLL
  for (int i = 2; i <= E::degree; ++i) coefficient[i] = 1 / (factorial *= T(i));
  V p = splat(coefficient[E::degree]);
  LINTRA_UNROLL
  for (int i = E::degree - 1; i >= 2; --i) p = p * r + coefficient[i];
  p = (p * r * r + r) + T(1);
#if LINTRA_VECTOR_BYTES == 64
  return scale_by_power(p, n);
#else
  using I = Mask<T>;
  I bits = (I)shifted - (I)splat(E::magic);  // the low bits of n + magic are those of the integer n
  I half = bits >> 1;  // in two steps, so that subnormal results are reached
  p = p * (V)((half + E::bias) << E::mantissa);
  return p * (V)((bits - half + E::bias) << E::mantissa);
#endif
}

template <class T>
LINTRA_INLINE Vec<T> exp(Vec<T> x) {
  return exp_below<T>(at_most(Exp<T>::high, x));
}

template <class T>
LINTRA_INLINE Vec<T> sigmoid(Vec<T> x) {
  return T(1) / (T(1) + exp<T>(-x));
}
template <class T>
LINTRA_INLINE Vec<T> silu(Vec<T> x) {
  return x / (T(1) + exp<T>(-x));
}

// Interleaves the lower (upper) halves of two vectors.
template <i64... I>
struct Indices {};
template <i64 N, i64... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <i64... I>
struct Count<0, I...> {
  using type = Indices<I...>;
};
template <class T, i64 Offset, i64... I>
LINTRA_INLINE Vec<T> interleave(Vec<T> a, Vec<T> b, Indices<I...>) {
  constexpr i64 W = kLanes<T>;
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (Offset + I / 2 + (I % 2) * W)...);
#else
  return __builtin_shuffle(a, b, Mask<T>{typename Types<T>::Int(Offset + I / 2 + (I % 2) * W)...});
#endif
}

// Transposes a square of kLanes rows: each round interleaves row i with row i + W/2, and log2 W rounds move the index
// of the row into the lanes.
template <class T>
LINTRA_INLINE void transpose(const T* from, i64 from_step, T* to, i64 to_step) {
  constexpr i64 W = kLanes<T>;
  using All = typename Count<W>::type;
  Vec<T> rows[W], next[W];
  LINTRA_UNROLL
  for (i64 i = 0; i < W; ++i) rows[i] = load(from + i * from_step);
  LINTRA_UNROLL
  for (i64 width = 1; width < W; width *= 2) {
    LINTRA_UNROLL
    for (i64 i = 0; i < W / 2; ++i) {
      next[2 * i] = interleave<T, 0>(rows[i], rows[i + W / 2], All{});
      next[2 * i + 1] = interleave<T, W / 2>(rows[i], rows[i + W / 2], All{});
    }
    LINTRA_UNROLL
    for (i64 i = 0; i < W; ++i) rows[i] = next[i];
  }
  LINTRA_UNROLL
  for (i64 i = 0; i < W; ++i) store(to + i * to_step, rows[i]);
}

}  // namespace LINTRA_ISA
}  // namespace lintra
