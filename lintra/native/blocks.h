// Register-blocked products on the small buffers of one chunk. Each keeps its whole result in registers and has enough
// independent multiply-adds in flight (at least latency times ports, 8 on current cores) to be bound by them.
#pragma once
#include "vector.h"

namespace lintra {
namespace LINTRA_ISA {

// A panel is a strip of the state, as many vectors wide as the registers allow: 16 registers leave room for 4 x 3
// accumulators, 32 for 4 x 4. Panels lie one after the other, rows of a panel contiguous, so that a block of rows is a
// contiguous piece of memory whatever the width of the state (no aliasing in the cache at powers of two).
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr i64 kPanel = 4, kScoreRows = 16;
#else
constexpr i64 kPanel = 3, kScoreRows = 8;
#endif
constexpr i64 kRows = 4;  // tokens, or rows of the state, of an accumulator block

// Bytes of the state held in the first-level cache while all tokens of a chunk pass over it.
constexpr i64 kStateBlockBytes = 20 * 1024;

// The step of rows of so many elements: not a whole number of pages, which would put all rows of a column in one set of
// the cache.
template <class T>
constexpr i64 spread_step(i64 elements) {
  return elements + (elements % (1024 / i64(sizeof(T))) == 0 ? 64 / i64(sizeof(T)) : 0);
}

// [C][n] -> [n][C].
template <class T>
void transpose_chunk(const T* rows, i64 step, i64 n, T* to) {
  for (i64 i = 0; i < kChunk; i += kLanes<T>)
    for (i64 k = 0; k < n; k += kLanes<T>) transpose(rows + i * step + k, step, to + k * kChunk + i, kChunk);
}

// scores[j][i] = sum_k b[j][k] at[k][i], for kScoreRows j and one vector of i.
template <class T>
inline void score_block(const T* b, i64 b_step, const T* at, i64 width, T* scores) {
  Vec<T> sums[kScoreRows] = {};
  for (i64 k = 0; k < width; ++k) {
    Vec<T> a = load(at + k * kChunk);
    LINTRA_UNROLL
    for (i64 j = 0; j < kScoreRows; ++j) sums[j] += a * b[j * b_step + k];
  }
  LINTRA_UNROLL
  for (i64 j = 0; j < kScoreRows; ++j) store(scores + j * kChunk, sums[j]);
}

// What the readers of a chunk find: y[i] = scale[i] (a[i] . state) + sum_j scores[j][i] c[j], for kRows readers i and
// one panel. The contraction over the state's rows comes in pieces; `first` and `last` mark the ends.
template <class T>
struct Read {
  const T *at, *state, *scale;  // at: [rows][kChunk], from the first reader of the block
  i64 rows;
  const T *scores, *c;  // scores: [writers * kChunk][kChunk]
  i64 c_step, writers, from, to;  // tokens from..to of each writer are seen
  i64 first_reader;               // the token of the first reader
  bool backwards;
  T* y;
  i64 y_step;
  bool first, last;
};

template <class T, i64 N>
inline void read_block(const Read<T>& r) {
  constexpr i64 W = kLanes<T>;
  Vec<T> sums[kRows][N] = {};
  if (!r.first) {
    LINTRA_UNROLL
    for (i64 i = 0; i < kRows; ++i) {
      LINTRA_UNROLL
      for (i64 n = 0; n < N; ++n) sums[i][n] = load(r.y + i * r.y_step + n * W);
    }
  }
  const T* a = r.at;
  const T* state = r.state;
  for (i64 k = 0; k < r.rows; ++k, a += kChunk, state += N * W) {
    Vec<T> row[N];
    LINTRA_UNROLL
    for (i64 n = 0; n < N; ++n) row[n] = load(state + n * W);
    LINTRA_UNROLL
    for (i64 i = 0; i < kRows; ++i) {
      LINTRA_UNROLL
      for (i64 n = 0; n < N; ++n) sums[i][n] += row[n] * a[i];
    }
  }
  if (r.last && r.scale) {
    LINTRA_UNROLL
    for (i64 i = 0; i < kRows; ++i) {
      LINTRA_UNROLL
      for (i64 n = 0; n < N; ++n) sums[i][n] *= r.scale[i];
    }
  }
  if (r.last) {
    for (i64 w = 0; w < r.writers; ++w) {
      const T* score = r.scores + (w * kChunk + r.from) * kChunk;
      const T* c = r.c + (w * kChunk + r.from) * r.c_step;
      for (i64 j = r.from; j < r.to; ++j, score += kChunk, c += r.c_step) {
        Vec<T> row[N];
        LINTRA_UNROLL
        for (i64 n = 0; n < N; ++n) row[n] = load(c + n * W);
        const i64 own = j - r.first_reader;
        if (own >= 0 && own < kRows) {  // not 0 * c where c is not seen: it may be infinite or NaN
          const i64 begin = r.backwards ? 0 : own, end = r.backwards ? own + 1 : kRows;
          LINTRA_UNROLL
          for (i64 i = 0; i < kRows; ++i)
            if (i >= begin && i < end) {
              LINTRA_UNROLL
              for (i64 n = 0; n < N; ++n) sums[i][n] += row[n] * score[i];
            }
          continue;
        }
        LINTRA_UNROLL
        for (i64 i = 0; i < kRows; ++i) {
          LINTRA_UNROLL
          for (i64 n = 0; n < N; ++n) sums[i][n] += row[n] * score[i];
        }
      }
    }
  }
  LINTRA_UNROLL
  for (i64 i = 0; i < kRows; ++i) {
    LINTRA_UNROLL
    for (i64 n = 0; n < N; ++n) store(r.y + i * r.y_step + n * W, sums[i][n]);
  }
}

// What the writers of a chunk leave: state[k] = decay state[k] + sum_j b[j][k] c[j], for kRows rows k of one panel.
template <class T>
struct Write {
  T* state;
  T decay = 1;
  const T* decays = nullptr;  // one for each of the rows, instead of `decay`
  const T *b, *c;
  i64 b_step, c_step, writers, count;  // the first `count` tokens of each writer are real
};

template <class T, i64 N>
inline void write_block(const Write<T>& w) {
  constexpr i64 W = kLanes<T>;
  Vec<T> sums[kRows][N] = {};  // of the chunk first: token by token, a large state would round each of them
  for (i64 writer = 0; writer < w.writers; ++writer) {
    const T* b = w.b + writer * kChunk * w.b_step;
    const T* c = w.c + writer * kChunk * w.c_step;
    for (i64 j = 0; j < w.count; ++j, b += w.b_step, c += w.c_step) {
      Vec<T> row[N];
      LINTRA_UNROLL
      for (i64 n = 0; n < N; ++n) row[n] = load(c + n * W);
      LINTRA_UNROLL
      for (i64 k = 0; k < kRows; ++k) {
        LINTRA_UNROLL
        for (i64 n = 0; n < N; ++n) sums[k][n] += row[n] * b[k];
      }
    }
  }
  LINTRA_UNROLL
  for (i64 k = 0; k < kRows; ++k) {
    LINTRA_UNROLL
    for (i64 n = 0; n < N; ++n) {
      T* state = w.state + (k * N + n) * W;
      store(state, load(state) * (w.decays ? w.decays[k] : w.decay) + sums[k][n]);
    }
  }
}

template <class T>
inline void read_panel(const Read<T>& r, i64 vectors) {
  switch (vectors) {
    case 1: return read_block<T, 1>(r);
    case 2: return read_block<T, 2>(r);
    case 3: return read_block<T, 3>(r);
    default: return read_block<T, kPanel>(r);
  }
}
template <class T>
inline void write_panel(const Write<T>& w, i64 vectors) {
  switch (vectors) {
    case 1: return write_block<T, 1>(w);
    case 2: return write_block<T, 2>(w);
    case 3: return write_block<T, 3>(w);
    default: return write_block<T, kPanel>(w);
  }
}

}  // namespace LINTRA_ISA
}  // namespace lintra
