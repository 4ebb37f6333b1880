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
//
// recurrence_gradients.h has the way back.
#pragma once
#include "state.h"

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
  T *missing, *written, *y;   // V - (G K) S; N; results, [readers][C][e or f]
  StateRead<T>* reads;
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
    c.y = take(r.readers * kChunk * wide);
    c.reads = (StateRead<T>*)take(all * i64(sizeof(StateRead<T>) / sizeof(T)));
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

  void read_chunk(i64 number, bool queries) {
    start = number * kChunk;
    count = r.tokens - start < kChunk ? r.tokens - start : kChunk;
    const i64 rows = shape.rows();
    read_rows(r.k, r.real, start, count, 0, c.k, c.f_step, rows, (T*)nullptr);
    read_rows(r.v, r.real, start, count, 0, c.v, c.e_step, shape.columns(), (T*)nullptr);
    for (i64 head = 0; queries && head < r.readers; ++head) {
      T* q = c.q + head * keys;
      read_rows(r.q, r.real, start, count, (r.first_reader + head) / r.readers_per_query, q, c.f_step, rows, (T*)nullptr);
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
        chunk_products(c.k, c.f_step, qt, r.f, c.p + head * square);
      }
      transpose_chunk(c.k, c.f_step, width, c.kt);
      if (r.beta) chunk_products(c.k, c.f_step, c.kt, r.f, c.keys);
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

};

}  // namespace LINTRA_ISA
}  // namespace lintra
