// The gradients of recurrence.h, which has the formulas.
#pragma once
#include "recurrence.h"

namespace lintra {
namespace LINTRA_ISA {

template <class T>
struct SequenceGradients : Sequence<T> {
  using Sequence<T>::W;
  using Sequence<T>::r;
  using Sequence<T>::c;
  using Sequence<T>::shape;
  using Sequence<T>::width;
  using Sequence<T>::square;
  using Sequence<T>::keys;
  using Sequence<T>::values;
  using Sequence<T>::start;
  using Sequence<T>::count;
  using Sequence<T>::chunk_count;
  using Sequence<T>::scale_rows;
  using Sequence<T>::fetch_from;
  using Sequence<T>::fetch;
  using Sequence<T>::read_chunk;
  using Sequence<T>::fade;
  using Sequence<T>::scores;
  using Sequence<T>::read;
  using Sequence<T>::solve;
  using Sequence<T>::write_in;

  SequenceGradients(const Recurrence<T>& r, const ChunkBuffers<T>& c) : Sequence<T>{r, c} {}

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
      read_rows(r.dy, r.real, start, count, head, c.dy + head * values, c.e_step, shape.columns(), (T*)nullptr);
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
      mix_rows<T, true>(c.p + head * square, c.dy + head * values, c.e_step, c.dn, shape.columns());
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
    chunk_products(c.written, c.e_step, c.at, r.e, c.da);
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

  // Adds `rows` times `x` to the gradients of the decays before the tokens (up to their own), or, `before`,
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
    chunk_products(c.written, c.e_step, c.at, r.e, dp);
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
      mix_rows<T, false>(weights, c.k, c.f_step, c.dq, width);
      mix_rows<T, true>(weights, c.q + head * keys, c.f_step, c.dk, width);
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
      mix_rows<T, false>(weights, c.k, c.f_step, c.dk, width);
      mix_rows<T, true>(weights, c.k, c.f_step, c.dk, width);
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

  // dS = G_C dS' + (G Q)^T dY - (beta G K)^T X.
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
