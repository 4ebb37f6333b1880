// Recurrences whose state forgets every key feature at a rate of its own, or whose tokens write by the delta rule:
//
//   S_t = D_t S_{t-1} + k_t n_t^T        y_t = S_t^T q_t
//   n_t = v_t                                   the sum
//   n_t = beta_t (v_t - (D_t S_{t-1})^T k_t)    the delta rule
//
// D_t is a number or a diagonal, at most 1. A chunk of C tokens after the state S becomes small dense products. With
// L_ts = D_{s+1} ... D_t and G_t = D_1 ... D_t, products of decays and never quotients,
//
//   P_ts = q_t . L_ts k_s          s <= t
//   A_ts = beta_t k_t . L_ts k_s   s < t
//   (I + A) N = beta (V - (G K) S)        N = V for the sum
//   Y  = (G Q) S + P N
//   S' = G_C S + (L_C K)^T N
//
// The system is the WY form of Yang et al. 2024, arXiv:2406.06484, section 3, with decay arXiv:2412.06464, per feature
// Kimi Team 2025, arXiv:2510.26692; solved by substitution, since chunks are short. Backwards, from dY and dS',
//
//   dN = P^T dY + (L_C K) dS'         dP = dY N^T
//   X = (I + A)^{-T} dN               dA = -X N^T         dV = beta X, or dN for the sum
//   dS = G_C dS' + (G Q)^T dY - (beta G K)^T X
//
// and the gradients of rows follow from those of P, A, G Q, G K and L_C K. The gradient of the decay of token u sums the
// terms of all pairs s < u <= t that it lies between: none of them has to cancel another.
#pragma once
#include "blocks.h"
#include "rows.h"

namespace lintra {
namespace LINTRA_ISA {

// One state, or some columns of it, over one sequence.
template <class T>
struct Recurrence {
  Operand q, k, v, dy;
  i64 readers, readers_per_query;  // heads that read the state, and those that have one query
  i64 first_reader;                // of all heads
  i64 f, e;                        // e: of these columns
  i64 tokens;
  Tokens real;
  const char *log_decay, *beta;  // type T; beta == 0: the sum
  i64 log_decay_token, beta_token;
  bool per_feature;
  T scale;
  char* y;
  i64 y_token, y_head;  // bytes, as in Operand
  // Gradients, type T: rows `*_token` elements apart.
  T *dq, *dk, *dv, *dlog_decay, *dbeta;
  i64 dq_token, dk_token, dv_token, dlog_decay_token, dbeta_token;
};

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

// A row's step: not a whole number of pages, which would put all rows of a column in one set of the cache.
template <class T>
constexpr i64 row_step(i64 n) {
  const i64 padded = round_up(n, kLanes<T> > kRows ? kLanes<T> : kRows);
  return padded + (padded % (1024 / i64(sizeof(T))) == 0 ? 64 / i64(sizeof(T)) : 0);
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

// [C][n] -> [n][C].
template <class T>
void transpose_chunk(const T* rows, i64 step, i64 n, T* to) {
  for (i64 i = 0; i < kChunk; i += kLanes<T>)
    for (i64 k = 0; k < n; k += kLanes<T>) transpose(rows + i * step + k, step, to + k * kChunk + i, kChunk);
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
void chunk_products(const T* b, i64 b_step, const T* at, i64 width, i64 count, T* scores) {
  for (i64 s = 0; s < count; s += kScoreRows)
    for (i64 t = 0; t < count; t += kLanes<T>)
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
void mix_rows(const T* weights, const T* x, i64 step, T* out, i64 width, i64 count) {
  constexpr i64 W = kLanes<T>;
  for (i64 n = 0; n < width; n += 2 * W) {
    const bool two = n + W < width;
    for (i64 i = 0; i < count; ++i) {
      Vec<T> a = load(out + i * step + n), b = two ? load(out + i * step + n + W) : Vec<T>{};
      const i64 from = Transposed ? i : 0, to = Transposed ? count : i + 1;
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

// The buffers of one chunk. Rows of f elements are f_step apart, those of e elements e_step.
template <class T>
struct ChunkBuffers {
  i64 f_step, e_step;
  T *q, *k, *v;               // q: [readers][C][f]
  T *decay, *early, *late;    // D, G, L_C: [C][f] per feature, otherwise [C]
  T *last;                    // G_C of every row of the state
  T *between;                 // L_ts [s][t], a number each
  T *faded;                   // L_ts k_s of one s, [t][f]
  T *dots;                    // [C] vectors
  T *p, *keys, *a;            // P of every reader, k_t . L_ts k_s and A, [s][t]
  T *beta;
  T *scaled;                  // rows that write, [readers + 1][C][f]
  T *rates;                   // [C] numbers
  T *kt, *qt, *at;            // transposes: of keys and of every reader's queries, times G where it is of features,
                              // [f][C], and of other rows
  T *missing, *written, *y;   // V - (G K) S; N; results, [readers + 1][C][e or f]
  StateRead<T>* reads;
  T *spare;
  // Backwards.
  T *dy, *dn;                 // dY [readers][C][e], and behind it dN, then X
  T *dp, *da;                 // [readers][s][t], [s][t]
  T *dq, *dk, *part;          // [C][f]
  T *ddecay;                  // [C][f] per feature, otherwise [C]
  T *ends;                    // <row of S, row of dS'>
  T *state, *gradient, *state_t, *gradient_t, *states;  // panels; states: one for each chunk between two checkpoints

  static i64 layout(const Recurrence<T>& r, bool backward, i64 states, T* memory, ChunkBuffers* buffers) {
    const StateShape<T> shape = {r.f, r.e};
    T* at = memory;
    auto take = [&](i64 n) {
      T* from = at;
      at += round_up(n, 64 / i64(sizeof(T)));
      return from;
    };
    ChunkBuffers c;
    c.f_step = row_step<T>(r.f);
    c.e_step = row_step<T>(r.e);
    const i64 wide = c.f_step > c.e_step ? c.f_step : c.e_step, all = r.readers + 1;
    const i64 keys = kChunk * c.f_step, values = kChunk * c.e_step, square = kChunk * kChunk;
    c.q = take(r.readers * keys);
    c.k = take(keys);
    c.v = take(values);
    c.decay = take(keys);
    c.early = take(keys);
    c.late = take(keys);
    c.last = take(c.f_step);
    c.between = take(square);
    c.faded = take(keys);
    c.dots = take(kChunk * kLanes<T>);
    c.p = take(r.readers * square);
    c.keys = take(square);
    c.a = take(square);
    c.beta = take(kChunk);
    c.scaled = take(all * keys);
    c.rates = take(kChunk);
    c.kt = take(kChunk * c.f_step);
    c.qt = take(r.readers * kChunk * c.f_step);
    c.at = take(kChunk * wide);
    c.missing = take(values);
    c.written = take(values);
    c.y = take(all * kChunk * wide);
    c.reads = (StateRead<T>*)take(all * i64(sizeof(StateRead<T>) / sizeof(T)));
    c.spare = take(wide + kLanes<T>);
    c.state = take(shape.size());
    if (backward) {
      c.dy = take(all * values);
      c.dn = c.dy + r.readers * values;
      c.dp = take(r.readers * square);
      c.da = take(square);
      c.dq = take(keys);
      c.dk = take(keys);
      c.part = take(keys);
      c.ddecay = take(keys);
      c.ends = take(c.f_step);
      c.gradient = take(shape.size());
      c.state_t = take(shape.transposed().size());
      c.gradient_t = take(shape.transposed().size());
      c.states = take(states * shape.size());
    }
    if (buffers) *buffers = c;
    return at - memory;
  }
};

// The recurrence over the chunks of a sequence.
template <class T>
struct Sequence {
  static constexpr i64 W = kLanes<T>, kSize = sizeof(T);
  const Recurrence<T>& r;
  ChunkBuffers<T> c;
  const StateShape<T> shape = {r.f, r.e};
  const i64 width = round_up(r.f, W), square = kChunk * kChunk, keys = kChunk * c.f_step, values = kChunk * c.e_step;
  i64 start = 0, count = 0;  // of the chunk
  i64 fetched = 0, fetch_end = 0;
  bool fetch_queries = false, fetch_gradients = false;

  i64 chunk_count() const { return (r.tokens + kChunk - 1) / kChunk; }

  // to = rows * factors, for C rows of f elements; the factors are rows too, or a number each.
  void scale_rows(const T* rows, const T* factors, T* to) const {
    const i64 step = c.f_step, n = width;
    const bool per_feature = r.per_feature;
    for (i64 t = 0; t < kChunk; ++t, rows += step, to += step) {
      if (per_feature)
        for (i64 i = 0; i < n; i += W) store(to + i, load(rows + i) * load(factors + t * step + i));
      else
        for (i64 i = 0; i < n; i += W) store(to + i, load(rows + i) * factors[t]);
    }
  }

  // Rows are far apart, one head of many: those of the next chunk are fetched a few at a time, while this one is
  // worked on.
  void fetch_from(i64 number, bool queries, bool gradients) {
    fetched = number < 0 || number >= chunk_count() ? r.tokens : number * kChunk;
    fetch_end = fetched + kChunk < r.tokens ? fetched + kChunk : r.tokens;
    fetch_queries = queries;
    fetch_gradients = gradients;
  }
  void fetch(i64 tokens) {
    for (; tokens > 0 && fetched < fetch_end; --tokens, ++fetched) {
      prefetch_row(r.k, fetched, 0);
      prefetch_row(r.v, fetched, 0);
      if (r.per_feature) prefetch<0>(r.log_decay + fetched * r.log_decay_token, r.f * kSize);
      if (!fetch_queries) continue;
      for (i64 head = 0; head < r.readers; ++head) {
        prefetch_row(r.q, fetched, (r.first_reader + head) / r.readers_per_query);
        if (!fetch_gradients) {
          prefetch<1>(r.y + fetched * r.y_token + head * r.y_head, r.e * element_size(r.q.dtype));
          continue;
        }
        prefetch_row(r.dy, fetched, head);
        prefetch<1>(r.dq + fetched * r.dq_token + head * r.f, r.f * kSize);
      }
      if (!fetch_gradients) continue;
      prefetch<1>(r.dk + fetched * r.dk_token, r.f * kSize);
      prefetch<1>(r.dv + fetched * r.dv_token, r.e * kSize);
      if (r.per_feature && r.dlog_decay) prefetch<1>(r.dlog_decay + fetched * r.dlog_decay_token, r.f * kSize);
    }
  }
  template <int Write>
  static void prefetch(const void* row, i64 bytes) {
    for (i64 i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)row + i, Write, 2);
  }

  void read_chunk(i64 number, bool queries) {
    start = number * kChunk;
    count = r.tokens - start < kChunk ? r.tokens - start : kChunk;
    const i64 rows = shape.rows();
    read_rows(r.k, r.real, start, count, 0, c.k, c.f_step, rows, c.spare);
    read_rows(r.v, r.real, start, count, 0, c.v, c.e_step, shape.columns(), c.spare);
    for (i64 head = 0; queries && head < r.readers; ++head) {
      T* q = c.q + head * keys;
      read_rows(r.q, r.real, start, count, (r.first_reader + head) / r.readers_per_query, q, c.f_step, rows, c.spare);
      for (i64 i = 0; i < kChunk * c.f_step; i += W) store(q + i, load(q + i) * r.scale);
    }
    for (i64 t = 0; t < kChunk; ++t) {
      const bool real = t < count && r.real.real(start + t);
      c.beta[t] = real && r.beta ? scalar<T>(r.beta, r.beta_token, start + t) : T(0);
      if (!r.per_feature) {
        c.decay[t] = real && r.log_decay ? scalar<T>(r.log_decay, r.log_decay_token, start + t) : T(0);
        continue;
      }
      T* row = c.decay + t * c.f_step;
      if (real) memcpy(row, r.log_decay + (start + t) * r.log_decay_token, size_t(r.f) * sizeof(T));
      if (real) clear_tail(row, r.f, width);
      else memset(row, 0, size_t(width) * sizeof(T));
    }
    decays();
  }

  // D from its logarithm, G and L_C, and L where it is a number.
  void decays() {
    if (r.per_feature) {
      for (i64 n = 0; n < width; n += W) {
        Vec<T> product = splat(T(1));
        for (i64 t = 0; t < kChunk; ++t) {
          T* row = c.decay + t * c.f_step + n;
          store(row, exp<T>(load(row)));
          store(c.early + t * c.f_step + n, product = product * load(row));
        }
        store(c.last + n, product);
        product = splat(T(1));
        for (i64 t = kChunk - 1; t >= 0; --t) {
          store(c.late + t * c.f_step + n, product);
          product *= load(c.decay + t * c.f_step + n);
        }
      }
      return;
    }
    for (i64 t = 0; t < kChunk; t += W) store(c.decay + t, exp<T>(load(c.decay + t)));
    T product = 1;
    for (i64 t = 0; t < kChunk; ++t) c.early[t] = product *= c.decay[t];
    for (i64 s = 0; s < kChunk; ++s) {
      T* row = c.between + s * kChunk;
      product = 1;
      for (i64 t = 0; t < s; ++t) row[t] = 0;
      for (i64 t = s; t < kChunk; ++t) row[t] = product = t == s ? T(1) : product * c.decay[t];
      c.late[s] = product;
    }
    for (i64 n = 0; n < shape.rows(); ++n) c.last[n] = c.early[kChunk - 1];
  }

  // L_ts k_s for t = s and later.
  void fade(i64 s) {
    const i64 step = c.f_step, n = width;
    const T *key = c.k + s * step, *decay = c.decay;
    T* faded = c.faded;
    for (i64 i = 0; i < n; i += W) {
      Vec<T> row = load(key + i);
      store(faded + s * step + i, row);
      for (i64 t = s + 1; t < kChunk; ++t) store(faded + t * step + i, row = row * load(decay + t * step + i));
    }
  }
  void faded_dots(i64 s, const T* rows, T* scores) {
    const i64 step = c.f_step, n = width;
    const T* faded = c.faded;
    Vec<T> dots[kChunk] = {};
    for (i64 t = s; t < kChunk; ++t) {
      Vec<T> even{}, odd{};
      i64 i = 0;
      for (; i + W < n; i += 2 * W) {
        even += load(rows + t * step + i) * load(faded + t * step + i);
        odd += load(rows + t * step + i + W) * load(faded + t * step + i + W);
      }
      if (i < n) even += load(rows + t * step + i) * load(faded + t * step + i);
      dots[t] = even + odd;
    }
    sum_lanes((const T*)dots, scores);
  }

  // P and A.
  void scores(bool queries) {
    const i64 readers = queries ? r.readers : 0;
    if (r.per_feature) {
      for (i64 s = 0; s < kChunk; ++s) {
        fade(s);
        for (i64 head = 0; head < readers; ++head)
          faded_dots(s, c.q + head * keys, c.p + head * square + s * kChunk);
        if (r.beta) faded_dots(s, c.k, c.keys + s * kChunk);
      }
    } else {
      for (i64 head = 0; head < readers; ++head) {
        T* qt = c.qt + head * keys;
        transpose_chunk(c.q + head * keys, c.f_step, width, qt);
        chunk_products(c.k, c.f_step, qt, r.f, kChunk, c.p + head * square);
      }
      transpose_chunk(c.k, c.f_step, width, c.kt);
      if (r.beta) chunk_products(c.k, c.f_step, c.kt, r.f, kChunk, c.keys);
    }
    const T* between = r.per_feature ? nullptr : c.between;
    for (i64 head = 0; head < readers; ++head) mask_scores(c.p + head * square, between, false);
    if (!r.beta) return;
    mask_scores(c.keys, between, true);
    for (i64 s = 0; s < kChunk; ++s)
      for (i64 t = 0; t < kChunk; t += W)
        store(c.a + s * kChunk + t, load(c.keys + s * kChunk + t) * load(c.beta + t));
  }

  // (G K) S of the delta rule, and (G Q) S.
  void read(bool queries) {
    i64 n = 0;
    const T* scale = r.per_feature ? nullptr : c.early;
    if (r.beta) {
      if (r.per_feature) transpose_scaled(c.k, c.kt);
      c.reads[n++] = {c.kt, scale, c.missing};
    }
    for (i64 head = 0; queries && head < r.readers; ++head) {
      if (r.per_feature) transpose_scaled(c.q + head * keys, c.qt + head * keys);
      c.reads[n++] = {c.qt + head * keys, scale, c.y + head * values};
    }
    read_state(c.reads, n, c.state, shape, c.e_step);
  }
  void transpose_scaled(const T* rows, T* to) {
    scale_rows(rows, c.early, c.scaled);
    transpose_chunk(c.scaled, c.f_step, width, to);
  }

  // What the tokens write, N, and for the delta rule what was missing.
  void solve() {
    if (!r.beta) {
      memcpy(c.written, c.v, size_t(values) * sizeof(T));
      return;
    }
    for (i64 n = 0; n < shape.columns(); n += W) {
      Vec<T> written[kChunk];
      for (i64 t = 0; t < kChunk; ++t) {
        const i64 at = t * c.e_step + n;
        const Vec<T> missing = load(c.v + at) - load(c.missing + at);
        store(c.missing + at, missing);
        Vec<T> x = missing * c.beta[t];
        for (i64 s = 0; s < t; ++s) x -= written[s] * c.a[s * kChunk + t];
        store(c.written + at, written[t] = x);
      }
    }
  }

  void write_out() {
    for (i64 head = 0; head < r.readers; ++head) {
      T* rows = c.y + head * values;
      read_chunk_values(c.p + head * square, c.written, rows, shape, c.e_step, count);
      char* y = r.y + start * r.y_token + head * r.y_head;
      for (i64 t = 0; t < count; ++t, y += r.y_token, rows += c.e_step) {
        if (!r.real.real(start + t)) memset(rows, 0, size_t(shape.columns()) * sizeof(T));
        write_row(y, rows, r.e, r.q.dtype);
      }
    }
  }

  void write_in() {
    scale_rows(c.k, c.late, c.scaled);
    write_state(c.state, shape, c.last, c.scaled, c.f_step, c.written, c.e_step, 1, count);
  }

  // From the state in `state` to that after the sequence; `checkpoint` takes the state before every token at a multiple
  // of the interval.
  template <class F>
  void forward(i64 interval, F&& checkpoint) {
    for (i64 i = 0; i < chunk_count(); ++i) {
      if (i * kChunk % interval == 0) checkpoint(i * kChunk / interval, c.state);
      read_chunk(i, true);
      fetch_from(i + 1, true, false);
      fetch(3);
      scores(true);
      fetch(3);
      read(true);
      fetch(3);
      solve();
      fetch(3);
      write_out();
      write_in();
      fetch(kChunk);
    }
  }

  // The gradients of all rows, from the gradient of the state after the sequence to that of the state before.
  template <class F>
  void backward(i64 interval, F&& checkpoint) {
    const i64 chunks = chunk_count(), step = interval / kChunk;
    for (i64 first = (chunks - 1) / step * step; first >= 0 && chunks; first -= step) {
      const i64 end = first + step < chunks ? first + step : chunks;
      checkpoint(first / step, c.state);
      for (i64 i = first; i < end; ++i) {
        memcpy(c.states + (i - first) * shape.size(), c.state, size_t(shape.size()) * sizeof(T));
        if (i + 1 == end) break;
        read_chunk(i, false);
        fetch_from(i + 1, i + 2 == end, i + 2 == end);
        fetch(5);
        scores(false);
        fetch(5);
        read(false);
        solve();
        fetch(kChunk);
        write_in();
      }
      T* state = c.state;
      for (i64 i = end - 1; i >= first; --i) {
        c.state = c.states + (i - first) * shape.size();
        chunk_gradients(i);
      }
      c.state = state;
    }
  }

  void chunk_gradients(i64 number) {
    read_chunk(number, true);
    for (i64 head = 0; head < r.readers; ++head)
      read_rows(r.dy, r.real, start, count, head, c.dy + head * values, c.e_step, shape.columns(), c.spare);
    fetch_from(number - 1, true, true);
    fetch(2);
    scores(true);
    fetch(2);
    read(false);
    solve();
    fetch(2);
    transpose_state(c.state, shape, c.state_t);
    transpose_state(c.gradient, shape, c.gradient_t);
    fetch(2);
    written_gradients();
    fetch(2);
    if (r.dlog_decay) memset(c.ddecay, 0, size_t(r.per_feature ? keys : kChunk) * sizeof(T));
    key_gradients();
    fetch(2);
    solve_gradients();
    fetch(2);
    for (i64 head = 0; head < r.readers; ++head) query_gradients(head);
    fetch(kChunk);
    pair_gradients();
    write_gradients();
    state_gradients();
  }

  // dN = P^T dY + (L_C K) dS'.
  void written_gradients() {
    const T* at = c.kt;
    if (r.per_feature) {
      scale_rows(c.k, c.late, c.scaled);
      transpose_chunk(c.scaled, c.f_step, width, c.at);
      at = c.at;
    }
    read_state<T>(at, c.gradient, shape, r.per_feature ? nullptr : c.late, c.dn, c.e_step);
    for (i64 head = 0; head < r.readers; ++head)
      mix_rows<T, true>(c.p + head * square, c.dy + head * values, c.e_step, c.dn, shape.columns(), kChunk);
  }

  // X, dA, dbeta, and what the keys that read the state add to dK.
  void solve_gradients() {
    if (!r.beta) return;
    for (i64 n = 0; n < shape.columns(); n += W) {
      Vec<T> x[kChunk];
      for (i64 s = kChunk - 1; s >= 0; --s) {
        const i64 at = s * c.e_step + n;
        Vec<T> total = load(c.dn + at);
        for (i64 t = s + 1; t < kChunk; ++t) total -= x[t] * c.a[s * kChunk + t];
        store(c.dn + at, x[s] = total);
      }
    }
    transpose_chunk(c.dn, c.e_step, shape.columns(), c.at);
    chunk_products(c.written, c.e_step, c.at, r.e, kChunk, c.da);
    mask_scores<T>(c.da, nullptr, true);
    T sums[kChunk];
    for (i64 t = 0; t < kChunk; ++t) {
      Vec<T> dot{};
      for (i64 n = 0; n < shape.columns(); n += W)
        dot += load(c.dn + t * c.e_step + n) * load(c.missing + t * c.e_step + n);
      store(c.dots + t * W, dot);
    }
    sum_lanes(c.dots, sums);
    for (i64 s = 0; s < kChunk; ++s)
      for (i64 t = 0; t < kChunk; t += W) {
        T* da = c.da + s * kChunk + t;
        store(da, -load(da));
        store(sums + t, load(sums + t) + load(da) * load(c.keys + s * kChunk + t));
      }
    for (i64 t = 0; t < count; ++t) r.dbeta[(start + t) * r.dbeta_token] = r.real.real(start + t) ? sums[t] : T(0);
    for (i64 t = 0; t < kChunk; ++t) c.rates[t] = r.per_feature ? c.beta[t] : c.beta[t] * c.early[t];
    read_state<T>(c.at, c.state_t, shape.transposed(), c.rates, c.y, c.f_step);
    if (r.per_feature) scale_rows(c.y, c.early, c.y);
    if (r.dlog_decay) add_decay_terms(c.y, c.k, -1, false);
    for (i64 i = 0; i < keys; i += W) store(c.dk + i, load(c.dk + i) - load(c.y + i));
  }

  // Adds `rows` times `x` to the gradients of the decays that the tokens stand behind (up to their own), or, `before`,
  // of those of later tokens.
  void add_decay_terms(const T* rows, const T* x, T sign, bool before) {
    for (i64 t = 0; t < kChunk; ++t) {
      Vec<T> dot{};
      for (i64 n = 0; n < width; n += W) {
        const i64 at = t * c.f_step + n;
        const Vec<T> term = load(rows + at) * load(x + at) * sign;
        if (r.per_feature)
          store(c.part + at, term);
        else
          dot += term;
      }
      if (!r.per_feature) store(c.dots + t * W, dot);
    }
    if (r.per_feature) {
      for (i64 n = 0; n < width; n += W) {
        Vec<T> total{};
        for (i64 i = 0; i < kChunk; ++i) {
          const i64 at = (before ? i : kChunk - 1 - i) * c.f_step + n;
          if (before) store(c.ddecay + at, load(c.ddecay + at) + total);
          total += load(c.part + at);
          if (!before) store(c.ddecay + at, load(c.ddecay + at) + total);
        }
      }
      return;
    }
    T sums[kChunk], total = 0;
    sum_lanes(c.dots, sums);
    for (i64 i = 0; i < kChunk; ++i) {
      const i64 t = before ? i : kChunk - 1 - i;
      if (before) c.ddecay[t] += total;
      total += sums[t];
      if (!before) c.ddecay[t] += total;
    }
  }

  // dK of what the keys write.
  void key_gradients() {
    transpose_chunk(c.written, c.e_step, shape.columns(), c.at);
    const T* scale = r.per_feature ? nullptr : c.late;
    read_state<T>(c.at, c.gradient_t, shape.transposed(), scale, c.dk, c.f_step);
    if (r.per_feature) scale_rows(c.dk, c.late, c.dk);
    if (r.dlog_decay) add_decay_terms(c.dk, c.k, 1, true);
  }

  // dQ of one reader, all of it.
  void query_gradients(i64 head) {
    transpose_chunk(c.dy + head * values, c.e_step, shape.columns(), c.at);
    T* dp = c.dp + head * square;
    chunk_products(c.written, c.e_step, c.at, r.e, kChunk, dp);
    mask_scores<T>(dp, nullptr, false);
    const T* scale = r.per_feature ? nullptr : c.early;
    read_state<T>(c.at, c.state_t, shape.transposed(), scale, c.dq, c.f_step);
    if (r.per_feature) scale_rows(c.dq, c.early, c.dq);
    if (r.dlog_decay) add_decay_terms(c.dq, c.q + head * keys, 1, false);
    if (r.per_feature) {
      T* to = c.dq;
      const T* faded = c.faded;
      const i64 step = c.f_step, n = width;
      for (i64 s = 0; s < kChunk; ++s) {
        fade(s);
        for (i64 t = s; t < kChunk; ++t) {
          const T weight = dp[s * kChunk + t];
          for (i64 at = t * step; at < t * step + n; at += W) store(to + at, load(to + at) + load(faded + at) * weight);
        }
      }
    } else {
      T weights[kChunk * kChunk];
      for (i64 i = 0; i < square; i += W) store(weights + i, load(dp + i) * load(c.between + i));
      mix_rows<T, false>(weights, c.k, c.f_step, c.dq, width, kChunk);
      mix_rows<T, true>(weights, c.q + head * keys, c.f_step, c.dk, width, kChunk);
      if (r.dlog_decay) add_pair_terms(dp, c.p + head * square);
    }
    T* dq = r.dq + head * r.f + start * r.dq_token;
    for (i64 t = 0; t < count; ++t, dq += r.dq_token) {
      T* row = c.dq + t * c.f_step;
      for (i64 n = 0; n < width; n += W)
        store(row + n, r.real.real(start + t) ? load(row + n) * r.scale : Vec<T>{});
      memcpy(dq, row, size_t(r.f) * sizeof(T));
    }
  }

  // The terms of pairs of tokens, gradient times score, of decays that are numbers.
  void add_pair_terms(const T* gradients, const T* scores) {
    for (i64 s = 0; s < kChunk; ++s) {
      T later = 0;
      for (i64 t = kChunk - 1; t > s; --t) {
        later += gradients[s * kChunk + t] * scores[s * kChunk + t];
        c.ddecay[t] += later;
      }
    }
  }

  // dK of the pairs; per feature, with the decays' share.
  void pair_gradients() {
    T* weights = c.a;  // of keys that read: beta dA, and L where it is a number; A itself is not needed any more
    if (r.beta) {
      if (!r.per_feature && r.dlog_decay) add_pair_terms(c.da, c.a);
      for (i64 s = 0; s < kChunk; ++s)
        for (i64 t = 0; t < kChunk; t += W) {
          const i64 at = s * kChunk + t;
          const Vec<T> weight = load(c.da + at) * load(c.beta + t);
          store(weights + at, r.per_feature ? weight : weight * load(c.between + at));
        }
    }
    if (!r.per_feature) {
      if (!r.beta) return;
      memcpy(c.part, c.k, size_t(keys) * sizeof(T));
      mix_rows<T, false>(weights, c.part, c.f_step, c.dk, width, kChunk);
      mix_rows<T, true>(weights, c.part, c.f_step, c.dk, width, kChunk);
      return;
    }
    const i64 step = c.f_step, n = width, readers = r.readers;
    const T *decay = c.decay, *faded = c.faded, *q = c.q, *k = c.k, *dp = c.dp;
    T *dk = c.dk, *ddecay = c.ddecay;
    const bool delta = r.beta, decays = r.dlog_decay;
    for (i64 s = 0; s < kChunk; ++s) {
      fade(s);
      for (i64 i = 0; i < n; i += W) {
        Vec<T> total{};  // sum over t' >= t of L_t't (dP q + beta dA k)
        for (i64 t = kChunk - 1; t >= s; --t) {
          const i64 at = t * step + i, pair = s * kChunk + t;
          if (t + 1 < kChunk) total *= load(decay + at + step);
          for (i64 head = 0; head < readers; ++head) total += load(q + head * keys + at) * dp[head * square + pair];
          if (t == s) break;
          if (delta) {
            total += load(k + at) * weights[pair];
            store(dk + at, load(dk + at) + load(faded + at) * weights[pair]);
          }
          if (decays) store(ddecay + at, load(ddecay + at) + load(faded + at) * total);
        }
        store(dk + s * step + i, load(dk + s * step + i) + total);
      }
    }
  }

  void write_gradients() {
    // G_C <S, dS'>, of every decay of the chunk.
    if (r.dlog_decay) {
      for (i64 n = 0; n < shape.rows(); ++n) c.ends[n] = 0;
      shape.each_panel([&](i64 column, i64 panel) {
        for (i64 i = 0; i < r.f; ++i) {
          const i64 at = column * shape.rows() + i * panel;
          Vec<T> dot{};
          for (i64 n = 0; n < panel; n += W) dot += load(c.state + at + n) * load(c.gradient + at + n);
          c.ends[i] += sum<T>(dot) * c.last[i];
        }
      });
      T total = 0;
      for (i64 n = 0; n < r.f; ++n) total += c.ends[n];
      for (i64 t = 0; t < count; ++t) {
        T* to = r.dlog_decay + (start + t) * r.dlog_decay_token;
        const bool real = r.real.real(start + t);
        if (!r.per_feature) to[0] = real ? c.ddecay[t] + total : T(0);
        for (i64 n = 0; r.per_feature && n < r.f; ++n) to[n] = real ? c.ddecay[t * c.f_step + n] + c.ends[n] : T(0);
      }
    }
    for (i64 t = 0; r.beta && t < count; ++t)  // dV = dR = beta X
      for (i64 n = 0; n < shape.columns(); n += W)
        store(c.missing + t * c.e_step + n, load(c.dn + t * c.e_step + n) * c.beta[t]);
    const T* dv = r.beta ? c.missing : c.dn;
    for (i64 t = 0; t < count; ++t) {
      T *key = r.dk + (start + t) * r.dk_token, *value = r.dv + (start + t) * r.dv_token;
      if (r.real.real(start + t)) {
        memcpy(key, c.dk + t * c.f_step, size_t(r.f) * sizeof(T));
        memcpy(value, dv + t * c.e_step, size_t(r.e) * sizeof(T));
      } else {
        memset(key, 0, size_t(r.f) * sizeof(T));
        memset(value, 0, size_t(r.e) * sizeof(T));
      }
    }
  }

  // dS = G_C dS' + (G Q)^T dY - (G K)^T dR.
  void state_gradients() {
    for (i64 head = 0; head < r.readers; ++head) scale_rows(c.q + head * keys, c.early, c.scaled + head * keys);
    if (r.beta) {  // -beta G K, of X
      T* rows = c.scaled + r.readers * keys;
      for (i64 t = 0; t < kChunk; ++t) {
        const T rate = r.per_feature ? -c.beta[t] : -c.rates[t];
        for (i64 i = t * c.f_step; i < t * c.f_step + width; i += W) store(rows + i, load(c.k + i) * rate);
      }
      if (r.per_feature) scale_rows(rows, c.early, rows);
    }
    write_state(c.gradient, shape, c.last, c.scaled, c.f_step, c.dy, c.e_step, r.readers + (r.beta != nullptr), count);
  }
};

}  // namespace LINTRA_ISA
}  // namespace lintra
