// Products of a few rows with packed weights (lintra_map). One row is bound by reading the weights; many share each of
// them in registers.
#pragma once
#include "rows.h"

namespace lintra {
namespace LINTRA_ISA {

constexpr i64 kOutputs = LINTRA_PANEL, kWordBytes = 4;

// Accumulators that leave registers for the weights and a broadcast, and the rows that share a weight.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr i64 kAccumulators = 24;
#else
constexpr i64 kAccumulators = 12;
#endif
constexpr i64 kTileRows = kAccumulators / 2;

// A word of weights holds kCount inputs of one output; `part` takes one of them out of a vector of words.
struct Float32 {
  static constexpr i64 kCount = 1;
  template <i64 I>
  static LINTRA_INLINE Vec<float> part(Bits words) {
    return (Vec<float>)words;
  }
};
struct Bfloat16 {
  static constexpr i64 kCount = 2;
  template <i64 I>
  static LINTRA_INLINE Vec<float> part(Bits words) {
    return (Vec<float>)(I == 0 ? words << 16 : words & 0xffff0000u);
  }
};
struct Int8 {
  static constexpr i64 kCount = 4;
  template <i64 I>
  static LINTRA_INLINE Vec<float> part(Bits words) {
    return __builtin_convertvector((Mask<float>)(words << (24 - 8 * I)) >> 24, Vec<float>);
  }
};

// How many vectors of a panel go together with R rows.
template <i64 R>
constexpr i64 vectors_with() {
  i64 n = kOutputs / kLanes<float>;
  while (n > 2 && n * R > kAccumulators) n /= 2;
  return n;
}

// The I-th input of each word: sums[r] += w[I] x[r].
template <class Kind, i64 I, i64 R, i64 N>
LINTRA_INLINE void add_part(const Bits (&words)[N], const float* const* x, i64 step, i64 k, Vec<float> (&sums)[R][N]) {
  if constexpr (I < Kind::kCount) {
    Vec<float> w[N];
    LINTRA_UNROLL
    for (i64 n = 0; n < N; ++n) w[n] = Kind::template part<I>(words[n]);
    LINTRA_UNROLL
    for (i64 r = 0; r < R; ++r) {
      const float value = x[r / 4][r % 4 * step + k + I];
      LINTRA_UNROLL
      for (i64 n = 0; n < N; ++n) sums[r][n] += w[n] * value;
    }
    add_part<Kind, I + 1, R, N>(words, x, step, k, sums);
  }
}

// sums[r][o] = sum_k panel[k][o] x[r][k] for R rows `step` apart. Every sum is taken in the order of k, so that a row
// gives the same however many go with it.
template <class Kind, i64 R>
void multiply_rows(const char* panel, i64 words, const float* x, i64 step, float* sums) {
  constexpr i64 W = kLanes<float>, N = vectors_with<R>();
  const float* rows[] = {x, x + 4 * step, x + 8 * step};  // three addresses and a step reach twelve rows
  for (i64 first = 0; first < kOutputs; first += N * W) {
    Vec<float> totals[R][N] = {};
    const char* from = panel + first * kWordBytes;
    for (i64 k = 0; k < words * Kind::kCount; k += Kind::kCount, from += kOutputs * kWordBytes) {
      Bits word[N];
      LINTRA_UNROLL
      for (i64 n = 0; n < N; ++n) memcpy(&word[n], from + n * W * kWordBytes, sizeof word[n]);
      add_part<Kind, 0, R, N>(word, rows, step, k, totals);
    }
    LINTRA_UNROLL
    for (i64 r = 0; r < R; ++r) {
      LINTRA_UNROLL
      for (i64 n = 0; n < N; ++n) store(sums + r * kOutputs + first + n * W, totals[r][n]);
    }
  }
}

template <class Kind, i64 R = kTileRows>
void multiply(i64 rows, const char* panel, i64 words, const float* x, i64 step, float* sums) {
  if constexpr (R > 1) {
    if (rows < R) return multiply<Kind, R - 1>(rows, panel, words, x, step, sums);
  }
  multiply_rows<Kind, R>(panel, words, x, step, sums);
}

// The words that hold all inputs of one output.
inline i64 words_of(const lintra_map& map, i64 dtype) {
  const i64 count = dtype == LINTRA_INT8 ? Int8::kCount : dtype == LINTRA_BFLOAT16 ? Bfloat16::kCount : Float32::kCount;
  return (map.inputs + count - 1) / count;
}

// One panel of outputs of up to kTileRows rows of x -> y[r][kOutputs].
inline void apply_panel(const lintra_map& map, i64 dtype, i64 panel, const float* x, i64 step, i64 rows, float* y) {
  constexpr i64 W = kLanes<float>;
  const i64 words = words_of(map, dtype);
  const char* weights = map.panels + panel * words * kOutputs * kWordBytes;
  if (dtype == LINTRA_INT8)
    multiply<Int8>(rows, weights, words, x, step, y);
  else if (dtype == LINTRA_BFLOAT16)
    multiply<Bfloat16>(rows, weights, words, x, step, y);
  else
    multiply<Float32>(rows, weights, words, x, step, y);
  for (i64 n = 0; n < kOutputs; n += W) {
    const Vec<float> bias = load(map.bias + panel * kOutputs + n);
    const Vec<float> scale = map.scale ? load(map.scale + panel * kOutputs + n) : splat(1.0f);
    for (i64 r = 0; r < rows; ++r) store(y + r * kOutputs + n, load(y + r * kOutputs + n) * scale + bias);
  }
}

// x Phi(x), Hendrycks and Gimpel 2016, arXiv:1606.08415, with erfc as t exp(-z^2 + p(t)), t = 1 / (1 + z / 2), after Press
// et al., Numerical Recipes, section 6.2: within 1.2e-7 of itself for every z >= 0. Below -13 it is 0: soon results would be
// subnormal, and an operation on one of those takes as long as a hundred others.
LINTRA_INLINE Vec<float> gelu(Vec<float> x) {
  constexpr float p[] = {-1.26551223f, 1.00002368f,  0.37409196f, 0.09678418f,  -0.18628806f,
                         0.27886807f,  -1.13520398f, 1.48851587f, -0.82215223f, 0.17087277f};
  x = select<float>(x < splat(-13.0f), Vec<float>{}, x);
  const Mask<float> positive = x > Vec<float>{};
  const Vec<float> z = select<float>(positive, x, -x) * 0.70710678f;
  const Vec<float> t = 1.0f / (z * 0.5f + 1.0f);
  Vec<float> series = splat(p[9]);
  LINTRA_UNROLL
  for (int i = 8; i >= 0; --i) series = series * t + p[i];
  // x times the smaller share, which is 0 above 13, so that infinity stays one.
  const Vec<float> tail = at_most(13.0f, x) * 0.5f * t * exp_below<float>(series - z * z);
  return select<float>(positive, x - tail, tail);
}

LINTRA_INLINE Vec<float> relu(Vec<float> x) { return at_least(0.0f, x); }

}  // namespace LINTRA_ISA
}  // namespace lintra
