// One token: the recurrence itself. The state is read once and the new one written once: that is the time it takes.
#pragma once
#include "rows.h"

namespace lintra {
namespace LINTRA_ISA {

// A token's decays, key, value and query: next = decay state + k v^T and y = q next. By the delta rule v is
// beta (v - what the decayed state has under k). `next` may be `state`.
template <class T>
struct Step {
  const T *state, *k, *v, *q;
  T *next, *y;
  i64 f, e;
  T decay = 1;
  const T* decays = nullptr;  // one for each row of the state, instead of `decay`
  T beta = 0;
  bool delta = false, streamed = false;  // streamed: `next` is not `state`, and its rows begin at whole vectors

  T kept(i64 row) const { return decays ? decays[row] : decay; }
};

// Vectors of columns that are computed at once, in registers: whole rows of 128 numbers with AVX-512, so that the state is
// read as it lies.
constexpr i64 kStepVectors = LINTRA_VECTOR_BYTES == 64 ? 8 : 4;

// N vectors of columns: they stay in the first two levels of the cache between the two passes of the delta rule.
template <class T, i64 N>
inline void step_columns(const Step<T>& s, i64 column) {
  constexpr i64 W = kLanes<T>;
  Vec<T> v[N], y[N] = {};
  LINTRA_UNROLL
  for (i64 n = 0; n < N; ++n) v[n] = load(s.v + column + n * W);
  if (s.delta) {
    Vec<T> found[2][N] = {};  // of even and odd rows: twice the sums in flight
    for (i64 i = 0; i < s.f; ++i) {
      const T weight = s.kept(i) * s.k[i];
      LINTRA_UNROLL
      for (i64 n = 0; n < N; ++n) found[0][n] += load(s.state + i * s.e + column + n * W) * weight;
      if (++i == s.f) break;
      const T next = s.kept(i) * s.k[i];
      LINTRA_UNROLL
      for (i64 n = 0; n < N; ++n) found[1][n] += load(s.state + i * s.e + column + n * W) * next;
    }
    LINTRA_UNROLL
    for (i64 n = 0; n < N; ++n) v[n] = (v[n] - (found[0][n] + found[1][n])) * s.beta;
  }
  for (i64 i = 0; i < s.f; ++i) {
    const T* from = s.state + i * s.e + column;
    T* to = s.next + i * s.e + column;
    LINTRA_UNROLL
    for (i64 n = 0; n < N; ++n) {
      const Vec<T> x = load(from + n * W) * s.kept(i) + v[n] * s.k[i];
      y[n] += x * s.q[i];
      if (s.streamed)
        stream(to + n * W, x);
      else
        store(to + n * W, x);
    }
  }
  LINTRA_UNROLL
  for (i64 n = 0; n < N; ++n) store(s.y + column + n * W, y[n]);
}

template <class T>
inline void step_matrix(const Step<T>& s) {
  constexpr i64 W = kLanes<T>;
  i64 column = 0;
  for (; column + kStepVectors * W <= s.e; column += kStepVectors * W) step_columns<T, kStepVectors>(s, column);
  for (; column + 4 * W <= s.e; column += 4 * W) step_columns<T, 4>(s, column);
  for (; column + 2 * W <= s.e; column += 2 * W) step_columns<T, 2>(s, column);
  for (; column + W <= s.e; column += W) step_columns<T, 1>(s, column);
  for (; column < s.e; ++column) {
    T v = s.v[column], y = 0;
    if (s.delta) {
      T found = 0;
      for (i64 i = 0; i < s.f; ++i) found += s.state[i * s.e + column] * s.kept(i) * s.k[i];
      v = (v - found) * s.beta;
    }
    for (i64 i = 0; i < s.f; ++i) {
      const T x = s.state[i * s.e + column] * s.kept(i) + v * s.k[i];
      s.next[i * s.e + column] = x;
      y += x * s.q[i];
    }
    s.y[column] = y;
  }
}

// Further heads that read the same state.
template <class T>
inline void read_matrix(const T* state, const T* q, T* y, i64 f, i64 e) {
  memset(y, 0, size_t(e) * sizeof(T));
  for (i64 i = 0; i < f; ++i) {
    i64 n = 0;
    for (; n + kLanes<T> <= e; n += kLanes<T>) store(y + n, load(y + n) + load(state + i * e + n) * q[i]);
    for (; n < e; ++n) y[n] += state[i * e + n] * q[i];
  }
}

// The denominator of one query: the sum of the weights of all keys.
template <class T>
inline T denominator(const T* q, const T* z, i64 f, T eps) {
  Vec<T> dot{};
  i64 i = 0;
  for (; i + kLanes<T> <= f; i += kLanes<T>) dot += load(q + i) * load(z + i);
  T den = sum<T>(dot) + eps;
  for (; i < f; ++i) den += q[i] * z[i];
  return den;
}

// 0 where there is nothing to divide by.
template <class T>
inline void divide_row(T* y, i64 e, T den) {
  for (i64 n = 0; n < e; ++n) y[n] = den == 0 ? 0 : y[n] / den;  // not times 1 / den, which overflows where den is subnormal
}

}  // namespace LINTRA_ISA
}  // namespace lintra
