// Softmax attention of a tile of queries to tiles of keys, no score kept: Dao et al. 2022, arXiv:2205.14135, with the
// running maximum and sum of Milakov and Gimelshein 2018, arXiv:1805.02867.
//
// A tile of queries has kTile rows: tokens, each with the heads that share a head of keys. Scores lie with the rows in
// the lanes, S^T [keys][kTile]: the maximum, exp and the masks of a row need no sum over lanes, keys and values need no
// transpose, and every product is one of a broadcast number with a vector.
#pragma once
#include <math.h>

#include "rows.h"

namespace lintra {
namespace LINTRA_ISA {

constexpr i64 kTile = 64;  // rows, and keys, of a tile: four square operands of 64 features stay in the caches

// Accumulators of a block: as many as leave registers for a row of vectors and a broadcast.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr i64 kBlockRows = 8, kBlockVectors = 3;
#elif defined(__AVX2__)
constexpr i64 kBlockRows = 4, kBlockVectors = 3;
#else
constexpr i64 kBlockRows = 4, kBlockVectors = 2;
#endif

// The bounds of an index.
struct Range {
  i64 from, to;
};
inline i64 clamp(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }

// c[i] = [scale[i] c[i] +] sum_k a(i, k) b[k]; a(i, k) is a[k * a_step + i] if Across, else a[i * a_step + k].
template <class T>
struct Product {
  const T* a;
  i64 a_step;
  const T* b;
  i64 b_step;
  T* c;
  i64 c_step;
  const T* scale;  // absent: 1
};

template <class T, i64 N, bool Across, bool Add>
inline void multiply_block(const Product<T>& p, i64 row, i64 column, Range k) {
  constexpr i64 W = kLanes<T>;
  Vec<T> sums[kBlockRows][N] = {};
  T* c = p.c + row * p.c_step + column;
  const i64 step = p.a_step, b_step = p.b_step;
  const T* b = p.b + k.from * b_step + column;
  const T* a = Across ? p.a + k.from * step + row : p.a + row * step + k.from;
  const T* upper = a + 4 * step;  // two addresses and a step reach eight rows
  for (i64 left = k.to - k.from; left > 0; --left, b += b_step) {
    Vec<T> line[N];
    LINTRA_UNROLL
    for (i64 n = 0; n < N; ++n) line[n] = load(b + n * W);
    LINTRA_UNROLL
    for (i64 i = 0; i < kBlockRows; ++i) {
      const T x = Across ? a[i] : i < 4 ? a[i * step] : upper[(i - 4) * step];
      LINTRA_UNROLL
      for (i64 n = 0; n < N; ++n) sums[i][n] += line[n] * x;
    }
    a += Across ? step : 1;
    upper += Across ? 0 : 1;
  }
  LINTRA_UNROLL
  for (i64 i = 0; i < kBlockRows; ++i) {
    LINTRA_UNROLL
    for (i64 n = 0; n < N; ++n) {
      T* place = c + i * p.c_step + n * W;
      if (Add) sums[i][n] += p.scale ? load(place) * p.scale[row + i] : load(place);
      store(place, sums[i][n]);
    }
  }
}

// The columns of a few rows, in blocks of about the same width.
template <class T, bool Across, bool Add>
inline void multiply_rows(const Product<T>& p, i64 row, Range vectors, Range k) {
  constexpr i64 W = kLanes<T>;
  for (i64 n = vectors.from, left; (left = vectors.to - n) > 0;) {
    const i64 blocks = (left + kBlockVectors - 1) / kBlockVectors, width = (left + blocks - 1) / blocks;
    switch (width) {
      case 1: multiply_block<T, 1, Across, Add>(p, row, n * W, k); break;
      case 2: multiply_block<T, 2, Across, Add>(p, row, n * W, k); break;
      default: multiply_block<T, kBlockVectors, Across, Add>(p, row, n * W, k);
    }
    n += width;
  }
}

// Which rows of a tile see which keys: row i is at place (phase + i) / heads, and sees key j where
// low <= delta + place - j <= high, unless the key is hidden from all.
struct Sight {
  i64 rows, keys;
  i64 heads, phase, delta, low, high;
  const char* hidden;  // [keys], or absent

  bool full() const {
    return low <= delta + phase / heads - (keys - 1) && delta + (phase + rows - 1) / heads <= high;
  }
  bool sees(i64 row, i64 key) const {
    const i64 distance = delta + (phase + row) / heads - key;
    return low <= distance && distance <= high && !(hidden && hidden[key]);
  }
  // The rows that see some of the keys from..to, and the keys that some of the rows see.
  Range rows_of(i64 from, i64 to) const {
    return {clamp((low - delta + from) * heads - phase, 0, rows), clamp((high - delta + to) * heads - phase, 0, rows)};
  }
  Range keys_of(i64 from, i64 to) const {
    return {clamp(delta + (phase + from) / heads - high, 0, keys),
            clamp(delta + (phase + to - 1) / heads - low + 1, 0, keys)};
  }
};

// Rows of tokens, each with the heads that share a head of keys, in one order: row n is head n % heads of token n / heads.
struct TokenRows {
  const char* data;
  i64 token, head;  // bytes from one to the next
  i64 heads, width, dtype;
  const i64* order = nullptr;  // the tokens in the order of the rows; absent: as they lie

  const char* at(i64 row) const {
    const i64 place = row / heads;
    return data + (order ? order[place] : place) * token + row % heads * head;
  }
};

// Rows that come next, fetched a few at a time between other work: those of one head lie far apart, which defeats the
// hardware's prefetching.
struct Ahead {
  static constexpr i64 kTensors = 4, kRows = 2;  // rows at a time: the processor waits for few lines at once
  TokenRows tensors[kTensors];
  i64 count = 0, next = 0, end = 0;  // tensors, and rows

  void fetch() {
    for (i64 rows = kRows; rows > 0 && next < end; --rows, ++next)
      for (i64 i = 0; i < count; ++i) {
        const char* x = tensors[i].at(next);
        for (const char* last = x + tensors[i].width * element_size(tensors[i].dtype); x < last; x += 64)
          __builtin_prefetch(x, 0, 2);
      }
  }
};

// S^T [keys][kTile] = a rows^T, of the pairs that see each other and some around them. `ahead`: of rows and of keys.
template <class T>
inline void multiply_scores(const Sight& x, const T* keys, i64 step, const T* rows_t, i64 width, T* scores,
                            Ahead* ahead) {
  constexpr i64 W = kLanes<T>;
  const Product<T> p = {keys, step, rows_t, kTile, scores, kTile, nullptr};
  for (i64 j = 0; j < x.keys; j += kBlockRows) {
    const Range rows = x.rows_of(j, j + kBlockRows < x.keys ? j + kBlockRows : x.keys);
    multiply_rows<T, false, false>(p, j, {rows.from / W, (rows.to + W - 1) / W}, {0, width});
    ahead[0].fetch();
    ahead[1].fetch();
  }
}

// c [rows][columns] = scale c + P b, and c [keys][columns] += P^T b, for weights P^T [keys][kTile] that are 0 where a row
// does not see a key. `nonfinite`: b is not finite somewhere, and 0 times that is NaN.
template <class T>
inline void add_to_rows(const Sight& x, const Product<T>& p, i64 columns, bool nonfinite) {
  constexpr i64 W = kLanes<T>;
  for (i64 i = 0; i < x.rows; i += kBlockRows) {
    const i64 end = i + kBlockRows < x.rows ? i + kBlockRows : x.rows;
    const Range keys = x.keys_of(i, end);
    if (!nonfinite) {
      multiply_rows<T, true, true>(p, i, {0, columns / W}, keys);
      continue;
    }
    for (i64 row = i; row < end; ++row)
      for (i64 n = 0; n < columns; n += W) {
        Vec<T> sum = {};
        for (i64 j = keys.from; j < keys.to; ++j)
          if (x.sees(row, j)) sum += load(p.b + j * p.b_step + n) * p.a[j * p.a_step + row];
        T* c = p.c + row * p.c_step + n;
        sum += p.scale ? load(c) * p.scale[row] : load(c);
        store(c, sum);
      }
  }
}
template <class T>
inline void add_to_keys(const Sight& x, const Product<T>& p, i64 columns, bool nonfinite) {
  constexpr i64 W = kLanes<T>;
  for (i64 j = 0; j < x.keys; j += kBlockRows) {
    const i64 end = j + kBlockRows < x.keys ? j + kBlockRows : x.keys;
    const Range rows = x.rows_of(j, end);
    if (!nonfinite) {
      multiply_rows<T, false, true>(p, j, {0, columns / W}, rows);
      continue;
    }
    for (i64 key = j; key < end; ++key)
      for (i64 n = 0; n < columns; n += W) {
        Vec<T> sum = {};
        for (i64 row = rows.from; row < rows.to; ++row)
          if (x.sees(row, key)) sum += load(p.b + row * p.b_step + n) * p.a[key * p.a_step + row];
        T* c = p.c + key * p.c_step + n;
        store(c, load(c) + sum);
      }
  }
}

// Whether a vector of rows sees a key: only the places count.
template <class T>
struct SeenBy {
  static constexpr bool kMasked = true, kShared = false;
  const Sight& x;
  Mask<T> place;

  SeenBy(const Sight& x, i64 first) : x(x) {
    for (i64 i = 0; i < kLanes<T>; ++i) place[i] = typename Types<T>::Int((x.phase + first + i) / x.heads);
  }
  Mask<T> operator()(i64 key) const {
    const i64 most = x.phase / x.heads + kTile;
    const auto low = typename Types<T>::Int(clamp(x.low - x.delta + key, -1, most + 1));
    const auto high = typename Types<T>::Int(clamp(x.high - x.delta + key, -1, most + 1));
    return (place >= low) & (place <= high);
  }
};

// All rows see all keys.
template <class T>
struct SeenByAll {
  static constexpr bool kMasked = false, kShared = false;
  Mask<T> operator()(i64) const { return {}; }
};

// Tokens of two chunks of a sorted sequence: who sees whom follows from the tokens; and in how many of all rounds, each of
// which takes its share of the weight, from the chunks they are in there.
template <class T>
struct SeenSorted {
  typedef typename Types<T>::Int Int;
  static constexpr bool kMasked = true, kShared = true;
  static constexpr i64 kMost = 16;  // rounds
  struct Tokens {
    Int token[kTile];
    Int place[kMost][kTile], bucket[kMost][kTile];  // `place`: the chunk
  };
  struct Rule {
    i64 round, rounds;  // rounds: of which the shares are counted, or 1
    i64 chunks, look_back, width;
    bool causal, see_self, across_buckets, wrap;
  };
  const Rule& rule;
  const Tokens &rows, &keys;
  i64 first;

  Mask<T> rows_of(const Int* x) const {
    Mask<T> lanes;
    memcpy(&lanes, x + first, sizeof lanes);
    return lanes;
  }
  Mask<T> operator()(i64 j) const {
    const Mask<T> row = rows_of(rows.token);
    const Int key = keys.token[j];
    Mask<T> seen = rule.causal ? row > key : row != key;
    if (rule.see_self) seen |= row == key;
    if (!rule.across_buckets) seen &= rows_of(rows.bucket[rule.round]) == keys.bucket[rule.round][j];
    return seen;
  }
  // 1 / the number of rounds that see the pair.
  Vec<T> share(i64 j) const {
    Mask<T> count = Mask<T>{} + 1;
    for (i64 i = 0; i < rule.rounds; ++i) {
      if (i == rule.round) continue;
      Mask<T> distance = keys.place[i][j] + Int(rule.look_back) - rows_of(rows.place[i]);
      if (rule.wrap) {
        distance += (distance < 0) & Int(rule.chunks);
        distance -= (distance >= Int(rule.chunks)) & Int(rule.chunks);
      }
      Mask<T> seen = (distance >= 0) & (distance < Int(rule.width));
      if (!rule.across_buckets) seen &= rows_of(rows.bucket[i]) == keys.bucket[i][j];
      count -= seen;  // a true lane is -1
    }
    return T(1) / __builtin_convertvector(count, Vec<T>);
  }
};

// Calls f(key) for the keys that a vector of rows may see, and clears the weights of the others.
template <class T, class F>
LINTRA_INLINE void each_seen(const Sight& x, i64 first, T* weights, F&& f) {
  const i64 end = first + kLanes<T> < x.rows ? first + kLanes<T> : x.rows;
  Range keys = x.keys_of(first, end);
  if (keys.to < keys.from) keys.to = keys.from;
  for (i64 j = 0; j < keys.from; ++j) store(weights + j * kTile, Vec<T>{});
  for (i64 j = keys.from; j < keys.to; ++j) f(j);
  for (i64 j = keys.to; j < round_up(x.keys, kBlockRows); ++j) store(weights + j * kTile, Vec<T>{});
}

// `count` rows from `first` on, in whole vectors, zeros up to kTile rows -> whether all are finite.
template <class T>
bool read_tile(const TokenRows& rows, i64 first, i64 count, T scale, T* to, i64 step) {
  Vec<T> zeros{};
  for (i64 i = 0; i < count; ++i, to += step) {
    read_row(rows.at(first + i), to, rows.width, rows.dtype);
    clear_tail(to, rows.width, step);
    for (i64 n = 0; n < step; n += kLanes<T>) {
      const Vec<T> x = load(to + n) * scale;
      store(to + n, x);
      zeros += x * T(0);
    }
  }
  memset((void*)to, 0, size_t((kTile - count) * step) * sizeof(T));
  return sum<T>(zeros) == 0;
}

// [kTile][width] -> [width][kTile].
template <class T>
void transpose_tile(const T* rows, i64 step, T* to) {
  for (i64 i = 0; i < kTile; i += kLanes<T>)
    for (i64 n = 0; n < step; n += kLanes<T>) transpose(rows + i * step + n, step, to + n * kTile + i, kTile);
}

// The keys and values of one head of one sequence, read and widened kTile at a time when they are first needed.
template <class T>
struct KeyRows {
  enum { kRead = 1, kHidden = 2, kNonfiniteKeys = 4, kNonfiniteValues = 8 };
  TokenRows k, v;
  const char* visible;  // bytes, of which those of hidden keys are 0; or absent
  i64 visible_step, count;
  i64 d_step, e_step;
  Ahead* ahead;       // of k and v
  T *keys, *values;   // [count + kBlockRows][step]
  char *hidden, *state;  // [count], [tiles]

  // What is known of the keys from..to, all of which have been read then.
  int need(i64 from, i64 to) {
    int found = 0;
    for (i64 tile = from / kTile; tile * kTile < to; ++tile) {
      if (!state[tile]) state[tile] = char(read(tile * kTile, count < (tile + 1) * kTile ? count : (tile + 1) * kTile));
      found |= state[tile];
    }
    return found;
  }
  int read(i64 from, i64 to) {
    int found = kRead;
    Vec<T> key_zeros{}, value_zeros{};
    for (i64 j = from; j < to; ++j) {
      hidden[j] = visible && !visible[j * visible_step];
      if (hidden[j]) {
        found |= kHidden;
        memset((void*)(keys + j * d_step), 0, size_t(d_step) * sizeof(T));
        memset((void*)(values + j * e_step), 0, size_t(e_step) * sizeof(T));
        continue;
      }
      key_zeros += widen_row(k, j, keys + j * d_step, d_step);
      value_zeros += widen_row(v, j, values + j * e_step, e_step);
    }
    ahead->next = to, ahead->end = count < to + kTile ? count : to + kTile;
    return found | (sum<T>(key_zeros) == 0 ? 0 : kNonfiniteKeys) | (sum<T>(value_zeros) == 0 ? 0 : kNonfiniteValues);
  }
  // -> zeros, or NaN if a number is not finite.
  static Vec<T> widen_row(const TokenRows& rows, i64 j, T* to, i64 step) {
    Vec<T> zeros{};
    read_row(rows.at(j), to, rows.width, rows.dtype);
    clear_tail(to, rows.width, step);
    for (i64 n = 0; n < step; n += kLanes<T>) zeros += load(to + n) * T(0);
    return zeros;
  }
};

// A tile of rows as a forward pass goes over the keys.
template <class T>
struct ForwardTile {
  static constexpr i64 W = kLanes<T>;
  i64 d, e;           // widths of keys and values
  i64 d_step, e_step;  // padded to whole vectors
  T *q_t;              // [d][kTile], scaled
  T *scores;           // [kTile][kTile]
  T *o;                // [kTile][e_step]
  T *highest, *total, *fade;  // [kTile]

  void begin() {
    memset((void*)o, 0, size_t(kTile * e_step) * sizeof(T));
    for (i64 i = 0; i < kTile; ++i) highest[i] = -T(INFINITY), total[i] = 0;
  }

  // `make_seen(first row)` says who sees whom.
  template <class F>
  void attend(const Sight& x, const T* keys, const T* values, bool nonfinite, Ahead* ahead, F&& make_seen) {
    multiply_scores(x, keys, d_step, q_t, d, scores, ahead);
    for (i64 i = 0; i < x.rows; i += W) softmax_weights(x, i, make_seen(i));
    add_to_rows<T>(x, {scores, kTile, values, e_step, o, e_step, fade}, e_step, nonfinite);
  }

  // Scores -> weights relative to the largest score so far.
  template <class Seen>
  void softmax_weights(const Sight& x, i64 first, const Seen& seen) {
    T* column = scores + first;
    const Vec<T> least = splat(-T(INFINITY)), before = load(highest + first);
    Vec<T> most = before, sum{};
    each_seen(x, first, column, [&](i64 j) {
      Vec<T> score = load(column + j * kTile);
      if constexpr (Seen::kMasked) {
        score = x.hidden && x.hidden[j] ? least : select<T>(seen(j), score, least);
        store(column + j * kTile, score);
      }
      most = select<T>(score > most, score, most);
    });
    const Vec<T> base = select<T>(most == least, Vec<T>{}, most);
    each_seen(x, first, column, [&](i64 j) {
      Vec<T> weight = exp_below<T>(load(column + j * kTile) - base);
      if constexpr (Seen::kShared) {
        if (seen.rule.rounds > 1) weight *= seen.share(j);
      }
      store(column + j * kTile, weight);
      sum += weight;
    });
    const Vec<T> faded = exp_below<T>(before - base);
    store(highest + first, most);
    store(fade + first, faded);
    store(total + first, load(total + first) * faded + sum);
  }

  // The results of row i, in `row` [e_step] -> its log-sum-exp.
  T finish(i64 i, T* row) const {
    if (total[i] == 0) {
      memset((void*)row, 0, size_t(e_step) * sizeof(T));
      return -T(INFINITY);
    }
    const T inverse = 1 / total[i];
    for (i64 n = 0; n < e_step; n += W) store(row + n, load(o + i * e_step + n) * inverse);
    return highest[i] + T(log(total[i]));
  }
};

}  // namespace LINTRA_ISA
}  // namespace lintra
