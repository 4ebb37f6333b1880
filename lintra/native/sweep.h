// The recurrence itself, over a range of tokens:
//
//   state_t = decay_t state_{t-1} + b_t c_t^T        out_t = a_t^T state_t
//
// with `a` read by some heads and `b`, `c` written by some. The forward pass and each gradient is one such sweep with
// the roles exchanged:
//
//   forward   a = phi(q)    b = phi(k)   c = v        -> y       forwards in time
//   dq        a = [dn, dd]  b = [v, 1]   c = phi(k)   -> dq      forwards
//   dk        a = [v, 1]    b = [dn, dd] c = phi(q)   -> dk      backwards
//   dv        a = phi(k)    b = phi(q)   c = dn       -> dv      backwards
//
// where dn = dy / den and dd = -(dy . y) / den are the gradients of numerator and denominator. Chunks of tokens turn it
// into small dense products; only the state goes from chunk to chunk.
#pragma once
#include "blocks.h"
#include "rows.h"

namespace lintra {
namespace LINTRA_ISA {

struct Output {
  char* data;
  i64 token, head;  // bytes
  i64 dtype;
};

template <class T>
struct Sweep {
  Operand a, b, c;
  i64 readers, writers;  // heads that read and write one state
  i64 inner, outer;      // columns of a and b; of c and out
  bool backwards;        // keys read and queries write
  bool causal;           // tokens see each other within a chunk

  Tokens read_tokens, write_tokens;
  const char *log_decay, *log_input;  // of the keys, type T; 0: none
  i64 log_decay_token, log_input_token;

  Output out;
  char* lost;         // forward: what `out` loses to rounding, laid out like it; 0: not wanted
  bool denominators;  // forward: keep z, and write the denominators to `den`
  bool normalize;     // and divide by them
  T eps;
  char* den;
  i64 den_token, den_head;
  Operand features;   // of out's tokens, when a feature map has to be differentiated or `dots` is wanted
  bool chain;         // multiply by the slope of features.map
  double* dots;       // dots[token] += out . features over the reading heads; 0: not wanted
  T* checkpoints;           // the state before each token at a multiple of the interval; 0: not wanted
  i64 checkpoint_interval;  // tokens from one to the next: whole chunks

  bool weighted() const { return log_decay || log_input; }
};

enum Mode { kRead = 1, kWrite = 2 };

// The running sum, [inner][outer] in panels, and its row sums z [inner] where a denominator is kept.
template <class T>
struct State {
  T *sum, *z;
};

template <class T>
constexpr i64 kPanelWidth = kPanel * kLanes<T>;

struct Shape {  // padded sizes of the buffers of a sweep
  i64 inner, outer, rows, b_step, c_step;
  template <class T>
  static Shape of(const Sweep<T>& s) {
    constexpr i64 W = kLanes<T>;
    Shape shape;
    shape.inner = round_up(s.inner, W > kRows ? W : kRows);
    shape.outer = round_up(s.outer, W);
    shape.rows = round_up(s.inner, kRows);
    shape.b_step = spread_step<T>(shape.inner);
    shape.c_step = spread_step<T>(shape.outer);
    return shape;
  }
  i64 state() const { return rows * outer + inner; }  // elements of sum and z together
  template <class T>
  i64 state_step() const {
    return round_up(state(), 64 / i64(sizeof(T)));
  }
  template <class T>
  State<T> state_at(T* states, i64 i) const {
    T* memory = states + i * state_step<T>();
    return {memory, memory + rows * outer};
  }
};

// The buffers of one chunk, cut from one piece of memory.
template <class T>
struct Scratch {
  T *a, *at, *b, *c, *scores, *y, *spare, *features, *weights;
  T *early, *late, *steps;  // per token of the chunk: see chunk_weights
  T* states;

  // Of `states` states; returns the size in elements.
  static i64 layout(const Sweep<T>& s, i64 states, T* memory, Scratch* scratch) {
    const Shape shape = Shape::of(s);
    const i64 writers = s.writers * kChunk;
    const i64 wide = (shape.b_step > shape.c_step ? shape.b_step : shape.c_step) + kLanes<T>;
    T* sizes = memory;
    auto take = [&](i64 n) {
      T* at = sizes;
      sizes += round_up(n, 64 / i64(sizeof(T)));
      return at;
    };
    Scratch r;
    r.a = take(kChunk * shape.b_step);
    r.at = take(shape.inner * kChunk);
    r.b = take(writers * shape.b_step);
    r.c = take(writers * shape.c_step);
    r.scores = take(writers * kChunk);
    r.y = take(kChunk * shape.c_step);
    r.spare = take(wide);
    r.features = take(kChunk * shape.c_step);
    r.weights = take(kChunk * kChunk);
    r.early = take(kChunk);
    r.late = take(kChunk);
    r.steps = take(kChunk);
    r.states = take(states * shape.state_step<T>());
    if (scratch) *scratch = r;
    return sizes - memory;
  }
};

// The decay and input weights of a chunk of `count` tokens from `start`.
//   early[i] = exp(decays of tokens ..i), the weight at i of the state before the chunk
//   late[j]  = exp(decays of tokens j+1.. + log_input[j]), the weight of token j after the chunk
//   weights[writer][reader] = exp(decays between + log_input of the key)
// Returns early of the last token. Sums of decays run from the near end, so nothing cancels and a decay of -inf, which
// empties the state, gives 0 and not NaN; products of steps <= 1 cannot overflow where a difference of sums could.
template <class T>
T chunk_weights(const Sweep<T>& s, i64 start, i64 count, Scratch<T>& r) {
  T inputs[kChunk];
  double total = 0;
  for (i64 i = 0; i < kChunk; ++i) {
    const bool real = i < count && (s.backwards ? s.read_tokens : s.write_tokens).real(start + i);
    r.steps[i] = real && s.log_decay ? scalar<T>(s.log_decay, s.log_decay_token, start + i) : T(0);
    inputs[i] = real && s.log_input ? scalar<T>(s.log_input, s.log_input_token, start + i) : T(0);
    total += double(r.steps[i]);
    r.early[i] = T(total);
  }
  double after = 0;
  for (i64 j = kChunk - 1; j >= 0; --j) {
    r.late[j] = T(after + double(inputs[j]));
    after += double(r.steps[j]);
  }
  for (i64 i = 0; i < kChunk; i += kLanes<T>) {
    store(r.early + i, exp<T>(load(r.early + i)));
    store(r.late + i, exp<T>(load(r.late + i)));
    store(r.steps + i, exp<T>(load(r.steps + i)));
    store(inputs + i, exp<T>(load(inputs + i)));
  }
  if (s.causal) {
    T row[kChunk] = {};
    for (i64 n = 0; n < kChunk; ++n) {
      const i64 i = s.backwards ? n : kChunk - 1 - n;
      const i64 step = s.backwards ? i : i + 1;  // the decay between this writer and the one before in this loop
      T* weights = r.weights + i * kChunk;
      if (n > 0)
        for (i64 j = 0; j < kChunk; j += kLanes<T>) store(row + j, load(row + j) * r.steps[step]);
      row[i] = 1;
      for (i64 j = 0; j < kChunk; j += kLanes<T>) {
        Vec<T> weight = s.backwards ? load(inputs + j) : splat(inputs[i]);
        store(weights + j, load(row + j) * weight);
      }
    }
  }
  return r.early[kChunk - 1];
}

// scores[writer][reader] of the chunk, weighted, and 0 where the reader comes before the writer (after, backwards).
template <class T>
void chunk_scores(const Sweep<T>& s, const Shape& shape, i64 count, const Scratch<T>& r) {
  constexpr i64 W = kLanes<T>;
  for (i64 j = 0; j < s.writers * kChunk; j += kScoreRows) {
    const i64 token = j % kChunk;
    if (token >= count) continue;
    for (i64 i = 0; i < count; i += W) {
      if (s.backwards ? i >= token + kScoreRows : i + W <= token) continue;
      score_block(r.b + j * shape.b_step, shape.b_step, r.at + i, s.inner, r.scores + j * kChunk + i);
    }
  }
  const Mask<T> lanes = iota<T>();
  for (i64 j = 0; j < s.writers * kChunk; ++j) {
    const typename Types<T>::Int token = j % kChunk;
    for (i64 i = 0; i < kChunk; i += W) {
      Vec<T> score = load(r.scores + j * kChunk + i);
      if (s.weighted()) score *= load(r.weights + token * kChunk + i);
      const Mask<T> reader = lanes + typename Types<T>::Int(i);
      const Mask<T> seen = s.backwards ? reader <= token : reader >= token;
      store(r.scores + j * kChunk + i, select<T>(seen, score, Vec<T>{}));
    }
  }
}

// The denominators of the chunk's readers, without eps, into `den`.
template <class T>
void chunk_denominators(const Sweep<T>& s, const T* z, const Scratch<T>& r, T* den) {
  for (i64 i = 0; i < kChunk; i += kLanes<T>) {
    Vec<T> sums[4] = {};
    i64 k = 0;
    for (; k + 4 <= s.inner; k += 4) {
      LINTRA_UNROLL
      for (i64 n = 0; n < 4; ++n) sums[n] += load(r.at + (k + n) * kChunk + i) * z[k + n];
    }
    for (; k < s.inner; ++k) sums[0] += load(r.at + k * kChunk + i) * z[k];
    Vec<T> total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (s.weighted()) total *= load(r.early + i);
    if (s.causal)
      for (i64 j = 0; j < s.writers * kChunk; ++j) total += load(r.scores + j * kChunk + i);
    store(den + i, total);
  }
}

template <class T>
void read_chunk(const Sweep<T>& s, const Shape& shape, i64 start, i64 count, State<T> state, Scratch<T>& r, i64 head) {
  read_rows(s.a, s.read_tokens, start, count, head, r.a, shape.b_step, shape.inner, r.spare);
  transpose_chunk(r.a, shape.b_step, s.inner, r.at);
  if (s.causal) chunk_scores(s, shape, count, r);

  const T* scales = s.backwards ? r.late : r.early;
  Read<T> read;
  read.writers = s.causal ? s.writers : 0;
  read.c_step = read.y_step = shape.c_step;
  for (i64 column = 0; column < shape.outer; column += kPanelWidth<T>) {
    const i64 vectors = (shape.outer - column < kPanelWidth<T> ? shape.outer - column : kPanelWidth<T>) / kLanes<T>;
    const i64 fit = kStateBlockBytes / (vectors * LINTRA_VECTOR_BYTES);
    const i64 piece = (s.inner + (s.inner + fit - 1) / fit - 1) / ((s.inner + fit - 1) / fit);
    for (i64 k = 0; k < s.inner; k += piece) {
      for (i64 i = 0; i < count; i += kRows) {
        read.at = r.at + k * kChunk + i;
        read.rows = s.inner - k < piece ? s.inner - k : piece;
        read.state = state.sum + column * shape.rows + k * vectors * kLanes<T>;
        read.scale = s.weighted() ? scales + i : nullptr;
        read.scores = r.scores + i;
        read.c = r.c + column;
        read.first_reader = i;
        read.backwards = s.backwards;
        read.from = s.backwards ? i : 0;
        read.to = s.backwards || i + kRows > count ? count : i + kRows;
        read.y = r.y + i * shape.c_step + column;
        read.first = k == 0;
        read.last = k + piece >= s.inner;
        read_panel(read, vectors);
      }
    }
  }
}

// Writes the chunk's rows of y to the caller's tensor.
template <class T>
void write_out(const Sweep<T>& s, const Shape& shape, i64 start, i64 count, State<T> state, Scratch<T>& r, i64 head) {
  constexpr i64 W = kLanes<T>;
  T den[kChunk], inverse[kChunk];
  if (s.normalize) chunk_denominators(s, state.z, r, den);
  if (s.denominators) {
    for (i64 i = 0; i < kChunk; i += W) {
      const Vec<T> total = s.normalize ? load(den + i) + s.eps : splat(T(1));
      store(den + i, total);
      store(inverse + i, select<T>(total == Vec<T>{}, total, T(1) / total));
    }
    for (i64 i = 0; i < count; ++i)
      memcpy(s.den + (start + i) * s.den_token + head * s.den_head, den + i, sizeof(T));
  }
  if (s.chain || s.dots) {
    read_rows(s.features, s.read_tokens, start, count, head, r.features, shape.c_step, shape.outer, r.spare);
    T dots[kChunk * W], sums[kChunk];
    for (i64 i = 0; i < count; ++i) {
      T *x = r.features + i * shape.c_step, *y = r.y + i * shape.c_step;
      Vec<T> dot{};
      for (i64 n = 0; n < shape.outer; n += W) {
        dot += load(x + n) * load(y + n);
        if (s.chain) store(y + n, load(y + n) * feature_slope<T>(load(x + n), s.features.map));
      }
      store(dots + i * W, dot);
    }
    if (s.dots) {
      sum_lanes(dots, sums);
      for (i64 i = 0; i < count; ++i)
        if (s.read_tokens.real(start + i)) s.dots[start + i] += double(sums[i]);
    }
  }
  const i64 first = start * s.out.token + head * s.out.head;
  for (i64 i = 0; i < count; ++i) {
    T* y = r.y + i * shape.c_step;
    if (s.normalize)
      for (i64 n = 0; n < shape.outer; n += W)  // 1 / den overflows where den is subnormal
        store(y + n, inverse[i] - inverse[i] == 0 ? load(y + n) * inverse[i] : load(y + n) / den[i]);
    if (!s.read_tokens.real(start + i) || (s.normalize && den[i] == 0))
      memset(y, 0, size_t(shape.outer) * sizeof(T));
    const i64 place = first + i * s.out.token;
    write_row(s.out.data + place, y, s.outer, s.out.dtype);
    if (s.lost) write_lost(s.lost + place, y, s.outer, s.out.dtype);
  }
}

// Prefetches the rows of the next chunk, a few at a time while the present one is worked on.
template <class T>
struct Prefetcher {
  const Sweep<T>& s;
  int mode;
  i64 token, end;

  void fetch(i64 tokens) {
    for (; tokens > 0 && token < end; --tokens, ++token) {
      if (mode & kRead)
        for (i64 head = 0; head < s.readers; ++head) {
          prefetch_row(s.a, token, head);
          const char* out = s.out.data + token * s.out.token + head * s.out.head;
          for (i64 i = 0; i < s.outer * element_size(s.out.dtype); i += 64) __builtin_prefetch(out + i, 1, 2);
          if (s.chain || s.dots) prefetch_row(s.features, token, head);
        }
      if (mode & kWrite)
        for (i64 head = 0; head < s.writers; ++head) {
          prefetch_row(s.b, token, head);
          prefetch_row(s.c, token, head);
        }
    }
  }
};

template <class T>
void write_chunk(const Sweep<T>& s, const Shape& shape, i64 count, T decay, State<T> state, Scratch<T>& r,
                 Prefetcher<T>& prefetcher) {
  if (s.weighted()) {
    const T* scales = s.backwards ? r.early : r.late;
    for (i64 j = 0; j < s.writers * kChunk; ++j)
      for (i64 k = 0; k < shape.inner; k += kLanes<T>) {
        T* b = r.b + j * shape.b_step + k;
        store(b, load(b) * scales[j % kChunk]);
      }
  }
  Write<T> write;
  write.decay = decay;
  write.b_step = shape.b_step;
  write.c_step = shape.c_step;
  write.writers = s.writers;
  write.count = count;
  const i64 blocks = shape.rows / kRows * ((shape.outer + kPanelWidth<T> - 1) / kPanelWidth<T>);
  for (i64 column = 0; column < shape.outer; column += kPanelWidth<T>) {
    const i64 vectors = (shape.outer - column < kPanelWidth<T> ? shape.outer - column : kPanelWidth<T>) / kLanes<T>;
    for (i64 k = 0; k < shape.rows; k += kRows) {
      write.state = state.sum + column * shape.rows + k * vectors * kLanes<T>;
      write.b = r.b + k;
      write.c = r.c + column;
      write_panel(write, vectors);
      prefetcher.fetch((kChunk + blocks - 1) / blocks);
    }
  }
  if (!s.denominators) return;
  for (i64 k = 0; k < shape.inner; k += kLanes<T>) {
    Vec<T> sum = {};
    for (i64 j = 0; j < s.writers * kChunk; ++j) sum += load(r.b + j * shape.b_step + k);
    store(state.z + k, load(state.z + k) * decay + sum);
  }
}

// The state of one key-value head and the sweep over it.
template <class T>
struct HeadSweep {
  Sweep<T> sweep;
  State<T> state;
};

// At most this many heads are swept together, with this many bytes of states (half of a small second-level cache).
constexpr i64 kMaxHeads = 8, kMaxStateBytes = 256 * 1024;

template <class T>
void sweep_chunk(const HeadSweep<T>& head_sweep, const Shape& shape, i64 start, i64 count, int mode, Scratch<T>& r,
                 Prefetcher<T>& prefetcher) {
  const Sweep<T>& s = head_sweep.sweep;
  const T decay = s.weighted() ? chunk_weights(s, start, count, r) : T(1);
  if (s.causal || mode & kWrite)
    for (i64 head = 0; head < s.writers; ++head) {
      T *b = r.b + head * kChunk * shape.b_step, *c = r.c + head * kChunk * shape.c_step;
      read_rows(s.b, s.write_tokens, start, count, head, b, shape.b_step, shape.inner, r.spare);
      read_rows(s.c, s.write_tokens, start, count, head, c, shape.c_step, shape.outer, r.spare);
    }
  if (!(mode & kWrite)) prefetcher.fetch(kChunk);
  if (mode & kRead)
    for (i64 head = 0; head < s.readers; ++head) {
      read_chunk(s, shape, start, count, head_sweep.state, r, head);
      write_out(s, shape, start, count, head_sweep.state, r, head);
    }
  if (mode & kWrite) write_chunk(s, shape, count, decay, head_sweep.state, r, prefetcher);
}

// Saves the state before token `start`: the sum of earlier tokens, or backwards that of later ones.
template <class T>
void save_checkpoint(const HeadSweep<T>& head_sweep, const Shape& shape, i64 start) {
  const Sweep<T>& s = head_sweep.sweep;
  if (s.checkpoints && start % s.checkpoint_interval == 0)
    memcpy(s.checkpoints + start / s.checkpoint_interval * shape.state(), head_sweep.state.sum,
           size_t(shape.state()) * sizeof(T));
}

// Sweeps tokens from..to of some heads, which differ only in the addresses of their rows, and updates their states.
// Neighbouring heads share pages and, where rows are short, cache lines: sweeping them together, chunk by chunk, uses
// each while it is in the cache.
template <class T>
void sweep(const HeadSweep<T>* heads, i64 head_count, i64 from, i64 to, int mode, Scratch<T>& r) {
  const Shape shape = Shape::of(heads[0].sweep);
  const i64 chunks = (to - from + kChunk - 1) / kChunk;
  for (i64 n = 0; n < chunks; ++n) {
    const bool backwards = heads[0].sweep.backwards;
    const i64 start = from + (backwards ? chunks - 1 - n : n) * kChunk;
    const i64 count = to - start < kChunk ? to - start : kChunk;
    for (i64 i = 0; i < head_count; ++i) {
      i64 next = start;
      if (i + 1 == head_count) next = n + 1 == chunks ? to : backwards ? start - kChunk : start + kChunk;
      Prefetcher<T> prefetcher = {heads[(i + 1) % head_count].sweep, mode, next,
                                  next + kChunk < to ? next + kChunk : to};
      const bool kept = mode == (kRead | kWrite);  // of a sum of its own the state is not that of the sequence
      if (kept && !backwards) save_checkpoint(heads[i], shape, start);
      sweep_chunk(heads[i], shape, start, count, mode, r, prefetcher);
      if (kept && backwards) save_checkpoint(heads[i], shape, start);
    }
  }
}

}  // namespace LINTRA_ISA
}  // namespace lintra
