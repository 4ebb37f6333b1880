// A state in panels (blocks.h) and the products of a chunk's rows with it and with each other.
#pragma once
#include "blocks.h"
#include "rows.h"

namespace lintra {
namespace LINTRA_ISA {

// Padded sizes: rows and columns of a state in panels, and the steps of rows of f and of e elements.
template <class T>
struct StateShape {
  i64 f, e;
  static constexpr i64 W = kLanes<T>, kUnit = W > kRows ? W : kRows;

  i64 rows() const { return round_up(f, kUnit); }
  i64 columns() const { return round_up(e, W); }
  i64 size() const { return round_up(rows() * columns(), 64 / i64(sizeof(T))); }
  StateShape transposed() const { return {e, f}; }

  i64 panel_width(i64 column) const {
    const i64 left = columns() - column, width = kPanel * W;
    return left < width ? left : width;
  }
  template <class F>
  void each_panel(F&& f) const {
    for (i64 column = 0; column < columns(); column += kPanel * W) f(column, panel_width(column));
  }
};

// The step of rows of n elements.
template <class T>
constexpr i64 row_step(i64 n) {
  return spread_step<T>(round_up(n, kLanes<T> > kRows ? kLanes<T> : kRows));
}

template <class T>
void load_state(const T* from, i64 step, StateShape<T> shape, T* to) {
  shape.each_panel([&](i64 column, i64 width) {
    const i64 count = shape.e - column < width ? shape.e - column : width;
    for (i64 i = 0; i < shape.f; ++i)
      memcpy(to + column * shape.rows() + i * width, from + i * step + column, size_t(count) * sizeof(T));
  });
}
template <class T>
void store_state(const T* from, StateShape<T> shape, T* to, i64 step) {
  shape.each_panel([&](i64 column, i64 width) {
    const i64 count = shape.e - column < width ? shape.e - column : width;
    for (i64 i = 0; i < shape.f; ++i)
      memcpy(to + i * step + column, from + column * shape.rows() + i * width, size_t(count) * sizeof(T));
  });
}
// Rows of `to` beyond the columns of `from` stay as they are.
template <class T>
void transpose_state(const T* from, StateShape<T> shape, T* to) {
  constexpr i64 W = kLanes<T>;
  const StateShape<T> other = shape.transposed();
  for (i64 i = 0; i < other.columns(); i += W) {
    const i64 panel = i / (kPanel * W) * (kPanel * W), other_width = other.panel_width(panel);
    T* into = to + panel * other.rows() + i - panel;
    shape.each_panel([&](i64 column, i64 width) {
      for (i64 n = 0; n < width; n += W)
        transpose(from + column * shape.rows() + i * width + n, width, into + (column + n) * other_width, other_width);
    });
  }
}

// Rows of a chunk that read a state: y[i] = scale[i] (x[i] . state), with at the transpose of x. scale may be 0: all 1.
template <class T>
struct StateRead {
  const T *at, *scale;
  T* y;
};

// All of them take a piece of the state from the first-level cache before the next piece is read.
template <class T>
void read_state(const StateRead<T>* reads, i64 n, const T* state, StateShape<T> shape, i64 step) {
  Read<T> read = {};
  read.y_step = step;
  shape.each_panel([&](i64 column, i64 width) {
    const i64 vectors = width / kLanes<T>;
    const i64 pieces = (shape.f * vectors * LINTRA_VECTOR_BYTES + kStateBlockBytes - 1) / kStateBlockBytes;
    const i64 piece = (shape.f + pieces - 1) / pieces;
    for (i64 k = 0; k < shape.f; k += piece) {
      read.rows = shape.f - k < piece ? shape.f - k : piece;
      read.state = state + column * shape.rows() + k * width;
      read.first = k == 0;
      read.last = k + piece >= shape.f;
      for (i64 r = 0; r < n; ++r)
        for (i64 i = 0; i < kChunk; i += kRows) {
          read.at = reads[r].at + k * kChunk + i;
          read.scale = reads[r].scale ? reads[r].scale + i : nullptr;
          read.y = reads[r].y + i * step + column;
          read_panel(read, vectors);
        }
    }
  });
}
template <class T>
void read_state(const T* at, const T* state, StateShape<T> shape, const T* scale, T* y, i64 step) {
  const StateRead<T> read = {at, scale, y};
  read_state(&read, 1, state, shape, step);
}

// y[i] += sum_{j <= i} scores[j][i] c[j].
template <class T>
void read_chunk_values(const T* scores, const T* c, T* y, StateShape<T> shape, i64 step, i64 count) {
  Read<T> read = {};
  read.y_step = read.c_step = step;
  read.writers = 1;
  read.last = true;
  shape.each_panel([&](i64 column, i64 width) {
    for (i64 i = 0; i < count; i += kRows) {
      read.scores = scores + i;
      read.c = c + column;
      read.first_reader = i;
      read.to = i + kRows > count ? count : i + kRows;
      read.y = y + i * step + column;
      read_panel(read, width / kLanes<T>);
    }
  });
}

// state = diag(decays) state + sum over writers and tokens of b c^T.
template <class T>
void write_state(T* state, StateShape<T> shape, const T* decays, const T* b, i64 b_step, const T* c, i64 c_step,
                 i64 writers, i64 count) {
  Write<T> write;
  write.b_step = b_step;
  write.c_step = c_step;
  write.writers = writers;
  write.count = count;
  shape.each_panel([&](i64 column, i64 width) {
    for (i64 k = 0; k < shape.rows(); k += kRows) {
      write.state = state + column * shape.rows() + k * width;
      write.decays = decays + k;
      write.b = b + k;
      write.c = c + column;
      write_panel(write, width / kLanes<T>);
    }
  });
}

// scores[s][t] = a_t . b_s for all tokens of a chunk, with at the transpose of a.
template <class T>
void chunk_products(const T* b, i64 b_step, const T* at, i64 width, T* scores) {
  for (i64 s = 0; s < kChunk; s += kScoreRows)
    for (i64 t = 0; t < kChunk; t += kLanes<T>)
      score_block(b + s * b_step, b_step, at + t, width, scores + s * kChunk + t);
}

// scores[s][t], 0 unless s <= t, or s < t if `strict`, times weights[s][t] if there are any.
template <class T>
void mask_scores(T* scores, const T* weights, bool strict) {
  const Mask<T> lanes = iota<T>();
  for (i64 s = 0; s < kChunk; ++s)
    for (i64 t = 0; t < kChunk; t += kLanes<T>) {
      Vec<T> score = load(scores + s * kChunk + t);
      if (weights) score *= load(weights + s * kChunk + t);
      const Mask<T> seen = lanes + typename Types<T>::Int(t) >= typename Types<T>::Int(s + strict);
      store(scores + s * kChunk + t, select<T>(seen, score, Vec<T>{}));
    }
}

// out[t] += sum_{s <= t} weights[s][t] x[s], or, transposed, out[s] += sum_{t >= s} weights[s][t] x[t].
template <class T, bool Transposed>
void mix_rows(const T* weights, const T* x, i64 step, T* out, i64 width) {
  constexpr i64 W = kLanes<T>;
  for (i64 n = 0; n < width; n += 2 * W) {
    const bool two = n + W < width;
    for (i64 i = 0; i < kChunk; ++i) {
      Vec<T> a = load(out + i * step + n), b = two ? load(out + i * step + n + W) : Vec<T>{};
      const i64 from = Transposed ? i : 0, to = Transposed ? kChunk : i + 1;
      for (i64 j = from; j < to; ++j) {
        const T weight = Transposed ? weights[i * kChunk + j] : weights[j * kChunk + i];
        a += load(x + j * step + n) * weight;
        if (two) b += load(x + j * step + n + W) * weight;
      }
      store(out + i * step + n, a);
      if (two) store(out + i * step + n + W, b);
    }
  }
}

}  // namespace LINTRA_ISA
}  // namespace lintra
