// Rows of tokens between the caller's tensors (any strides, any element type) and small aligned buffers of the sum
// type.
#pragma once
#include "vector.h"

namespace lintra {
namespace LINTRA_ISA {

// float16 and bfloat16 go through integer arithmetic: no compiler support for the types is needed, and each rounds to
// nearest even, keeps infinities and NaN, and float16 its subnormals.
typedef uint32_t Bits __attribute__((vector_size(LINTRA_VECTOR_BYTES)));
typedef uint16_t Half __attribute__((vector_size(LINTRA_VECTOR_BYTES / 2)));

LINTRA_INLINE Bits choose(Bits mask, Bits yes, Bits no) { return (mask & yes) | (~mask & no); }

LINTRA_INLINE Vec<float> widen(Half x, i64 dtype) {
  Bits bits = __builtin_convertvector(x, Bits);
  if (dtype == LINTRA_BFLOAT16) return (Vec<float>)(bits << 16);
  Bits magnitude = (bits & 0x7fff) << 13;
  Bits normal = magnitude + 0x38000000u;  // moves the exponent bias from 15 to 127
  // Of a subnormal, with the exponent of 2^-14 and less what that adds: no float is subnormal on the way, which a
  // processor that flushes those would take for 0.
  Vec<float> subnormal = (Vec<float>)(magnitude + 0x38800000u) - 0x1p-14f;
  Bits out = choose((Bits)(magnitude < 0x00800000u), (Bits)subnormal, normal);
  out = choose((Bits)(magnitude >= 0x0f800000u), magnitude | 0x7f800000u, out);
  return (Vec<float>)(out | (bits & 0x8000) << 16);
}

LINTRA_INLINE Half narrow(Vec<float> x, i64 dtype) {
  Bits bits = (Bits)x, sign = bits & 0x80000000u, magnitude = bits ^ sign;
  Bits nan = (Bits)(magnitude > 0x7f800000u);
  if (dtype == LINTRA_BFLOAT16) {
    Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(choose(nan, (sign >> 16) | 0x7fc0, rounded), Half);
  }
  Bits normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1)) >> 13;  // 0xc8000000: -112 in the exponent field
  Vec<float> shifted = (Vec<float>)magnitude + 0.5f;  // 0.5 has the units of float16's subnormals in its last place
  Bits small = (Bits)shifted - 0x3f000000u;
  Bits large = choose(nan, Bits{} + 0x7e00, Bits{} + 0x7c00);
  Bits out = choose((Bits)(magnitude < 0x38800000u), small, normal);
  out = choose((Bits)(magnitude >= 0x47800000u), large, out);
  return __builtin_convertvector(out | sign >> 16, Half);
}

constexpr i64 element_size(i64 dtype) { return dtype == LINTRA_FLOAT64 ? 8 : dtype == LINTRA_FLOAT32 ? 4 : 2; }

LINTRA_INLINE void read_row(const char* from, float* to, i64 n, i64 dtype) {
  if (dtype == LINTRA_FLOAT32) {
    i64 i = 0;
    for (; i + kLanes<float> <= n; i += kLanes<float>) store(to + i, load((const float*)from + i));
    for (; i < n; ++i) memcpy(to + i, from + 4 * i, 4);
    return;
  }
  constexpr i64 W = kLanes<float>;
  Half x;
  i64 i = 0;
  for (; i + W <= n; i += W) {
    memcpy(&x, from + 2 * i, sizeof x);
    store(to + i, widen(x, dtype));
  }
  if (i < n) {
    uint16_t rest[W] = {};
    for (i64 j = i; j < n; ++j) memcpy(rest + (j - i), from + 2 * j, 2);
    memcpy(&x, rest, sizeof x);
    Vec<float> wide = widen(x, dtype);
    for (i64 j = i; j < n; ++j) to[j] = wide[j - i];
  }
}
LINTRA_INLINE void read_row(const char* from, double* to, i64 n, i64) { memcpy(to, from, size_t(n) * 8); }

LINTRA_INLINE void write_row(char* to, const float* from, i64 n, i64 dtype) {
  constexpr i64 W = kLanes<float>;
  i64 i = 0;
  if (dtype == LINTRA_FLOAT32) {
    for (; i + W <= n; i += W) store((float*)to + i, load(from + i));
    for (; i < n; ++i) memcpy(to + 4 * i, from + i, 4);
    return;
  }
  for (; i < n; i += W) {  // `from` is padded to whole vectors
    Half x = narrow(load(from + i), dtype);
    i64 count = n - i < W ? n - i : W;
    if (count == W)
      memcpy(to + 2 * i, &x, sizeof x);
    else
      memcpy(to + 2 * i, &x, size_t(count) * 2);
  }
}
LINTRA_INLINE void write_row(char* to, const double* from, i64 n, i64) { memcpy(to, from, size_t(n) * 8); }

// What write_row loses of each number, rounded itself: 0 where it is not finite.
LINTRA_INLINE void write_lost(char* to, const float* from, i64 n, i64 dtype) {
  constexpr i64 W = kLanes<float>;
  for (i64 i = 0; i < n; i += W) {
    const Vec<float> x = load(from + i), lost = x - widen(narrow(x, dtype), dtype);
    const Half y = narrow(select<float>(lost - lost == Vec<float>{}, lost, Vec<float>{}), dtype);
    memcpy(to + 2 * i, &y, size_t(n - i < W ? n - i : W) * 2);
  }
}
LINTRA_INLINE void write_lost(char*, const double*, i64, i64) {}

// In place, for n elements in whole vectors.
template <class T>
LINTRA_INLINE void apply_feature_map(T* x, i64 n, i64 map) {
  const Vec<T> zero{};
  if (map == LINTRA_RELU)
    for (i64 i = 0; i < n; i += kLanes<T>) store(x + i, at_least(T(0), load(x + i)));
  if (map == LINTRA_EXP)
    for (i64 i = 0; i < n; i += kLanes<T>) store(x + i, exp<T>(load(x + i)));
  if (map == LINTRA_ELU_PLUS_ONE)
    for (i64 i = 0; i < n; i += kLanes<T>) {  // without the cancellation of expm1(x) + 1 at large negative x
      const Vec<T> value = load(x + i);
      const Mask<T> positive = value > zero;
      store(x + i, select<T>(positive, value + T(1), exp_below<T>(at_most(T(0), value))));
    }
}

// The derivative of the feature map from its value: elu+1 has min(phi, 1), relu has 1 where phi > 0, exp has phi.
template <class T>
LINTRA_INLINE Vec<T> feature_slope(Vec<T> phi, i64 map) {
  const Vec<T> zero{}, one = splat(T(1));
  if (map == LINTRA_EXP) return phi;
  if (map == LINTRA_RELU) return select<T>(phi > zero, one, zero);
  return select<T>(phi > one, one, phi);
}

// One operand of a sweep and how its rows are computed. Steps count bytes.
struct Operand {
  enum Kind {
    plain,     // features or values: x, through the feature map
    ones,      // [x, 1]: values whose last column sums the weights
    gradient,  // dy / den
    extended,  // [dy / den, -(dy . y) / den]: the gradient of [numerator, denominator]
  };
  Kind kind;
  const char* x;
  i64 token, head;  // steps of x
  i64 width;        // elements in a row of x
  i64 dtype, map;
  const char *y, *den;  // gradients only; den == 0: no denominator, its gradient is 0
  const char* lost;     // like y, what is to be added to it; 0: nothing
  i64 y_token, y_head, den_token, den_head;

  i64 columns() const { return width + (kind == ones || kind == extended); }
};

// Rows of a tensor, of which x is the first.
inline Operand tensor_rows(const char* x, const lintra_tensor& tensor, i64 width, i64 dtype) {
  const i64 size = element_size(dtype);
  Operand o = {};
  o.x = x;
  o.token = tensor.t * size;
  o.head = tensor.h * size;
  o.width = width;
  o.dtype = dtype;
  return o;
}

// Which tokens of a sequence are real.
struct Tokens {
  const char* mask;  // bytes; 0: all are
  i64 step;

  bool real(i64 token) const { return !mask || mask[token * step]; }
};

// The number of a token, `step` bytes from that of the next.
template <class T>
inline T scalar(const char* data, i64 step, i64 token) {
  T x;
  memcpy(&x, data + token * step, sizeof x);
  return x;
}

// The sums of kChunk vectors, one per token.
template <class T>
LINTRA_INLINE void sum_lanes(const T* vectors, T* sums) {
  constexpr i64 W = kLanes<T>;
  T columns[W * W];
  for (i64 i = 0; i < kChunk; i += W) {
    transpose(vectors + i * W, W, columns, W);
    Vec<T> total = load(columns);
    for (i64 n = 1; n < W; ++n) total += load(columns + n * W);
    store(sums + i, total);
  }
}

// Zeros from element n to `padded`, a whole number of vectors.
template <class T>
LINTRA_INLINE void clear_tail(T* row, i64 n, i64 padded) {
  constexpr i64 W = kLanes<T>;
  i64 i = n / W * W;
  if (i < n) {
    store(row + i, select<T>(iota<T>() < typename Types<T>::Int(n - i), load(row + i), Vec<T>{}));
    i += W;
  }
  for (; i < padded; i += W) store(row + i, Vec<T>{});
}

// The rows of a chunk of `count` tokens from `start`, `step` apart, each padded with zeros up to `padded` elements;
// rows of padding and beyond `count` are 0. `spare` holds one row.
template <class T>
void read_rows(const Operand& o, Tokens tokens, i64 start, i64 count, i64 head, T* rows, i64 step, i64 padded,
               T* spare) {
  constexpr i64 W = kLanes<T>;
  const i64 n = o.width, padded_n = round_up(n, W);
  const char* x = o.x + start * o.token + head * o.head;
  for (i64 i = 0; i < count; ++i, x += o.token) read_row(x, rows + i * step, n, o.dtype);
  if (o.map != LINTRA_IDENTITY) apply_feature_map(rows, (count - 1) * step + padded_n, o.map);

  T last[kChunk];  // the column after the width
  for (i64 i = 0; i < kChunk; ++i) last[i] = o.kind == Operand::ones;
  if (o.den) {
    T dots[kChunk * W], inverse[kChunk];
    for (i64 i = 0; i < count; ++i) {
      T den, *row = rows + i * step;
      memcpy(&den, o.den + (start + i) * o.den_token + head * o.den_head, sizeof den);
      inverse[i] = den == 0 ? 0 : 1 / den;
      clear_tail(row, n, padded_n);
      if (o.kind == Operand::extended) {
        const char* const parts[] = {o.y, o.lost};
        Vec<T> dot{};
        for (const char* part : parts) {
          if (!part) continue;
          read_row(part + (start + i) * o.y_token + head * o.y_head, spare, n, o.dtype);
          clear_tail(spare, n, padded_n);
          for (i64 k = 0; k < n; k += W) dot -= load(row + k) * load(spare + k);
        }
        store(dots + i * W, dot * inverse[i]);
      }
      for (i64 k = 0; k < n; k += W) store(row + k, load(row + k) * inverse[i]);
    }
    if (o.kind == Operand::extended) sum_lanes(dots, last);
  }
  for (i64 i = 0; i < kChunk; ++i) {
    T* row = rows + i * step;
    if (i >= count || !tokens.real(start + i)) {
      memset(row, 0, size_t(padded) * sizeof(T));
      continue;
    }
    clear_tail(row, n, padded);
    if (o.columns() > n) row[n] = last[i];
  }
}

// Prefetches a row, to be read or, with Write = 1, written.
template <int Write>
LINTRA_INLINE void prefetch(const void* row, i64 bytes) {
  for (i64 i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)row + i, Write, 2);
}

// Prefetches a token's row: rows of one head lie far apart, which defeats the hardware's prefetching.
LINTRA_INLINE void prefetch_row(const Operand& o, i64 token, i64 head) {
  const i64 bytes = o.width * element_size(o.dtype);
  const char* x = o.x + token * o.token + head * o.head;
  for (const char* end = x + bytes; x < end; x += 64) __builtin_prefetch(x, 0, 2);
  if (o.kind != Operand::extended || !o.y) return;
  const char* const parts[] = {o.y, o.lost};
  for (const char* part : parts) {
    if (!part) continue;
    const char* y = part + token * o.y_token + head * o.y_head;
    for (const char* end = y + bytes; y < end; y += 64) __builtin_prefetch(y, 0, 2);
  }
}

}  // namespace LINTRA_ISA
}  // namespace lintra
