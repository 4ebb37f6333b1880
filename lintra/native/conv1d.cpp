// The short causal convolution of every channel with itself: y_t = act(bias + sum_j weight[j] x_{t-width+1+j}), where
// the inputs before the first token come from the state. Only real tokens count. Compiled once per instruction set, with
// LINTRA_ISA naming the namespace.
//
// Channels go in blocks through time, the last `width` inputs of a block in a ring of rows: all that is read twice stays in
// the first-level cache. The backward goes forward in time too: with dpre_t, the gradient before the activation, known, so
// is the gradient of the input width - 1 tokens earlier, sum_j weight[j] dpre_{t-j}.
#include "kernel.h"
#include "parallel.h"
#include "rows.h"

LINTRA_DECLARE(LINTRA_ISA)

namespace lintra {
namespace LINTRA_ISA {

constexpr i64 kChannels = 128;              // of a block: two pages of rows, and a whole number of cache lines
constexpr i64 kAhead = 6;                   // tokens that rows are fetched ahead
constexpr i64 kRecent = 128;                // tokens whose gradients are summed before they are added to the whole sum
constexpr double kParallelWork = 1 << 16;  // inputs below which waking a thread costs more than it saves

// The derivative of silu, x sigmoid(x).
template <class T>
LINTRA_INLINE Vec<T> silu_slope(Vec<T> x) {
  const Vec<T> s = sigmoid<T>(x);
  return s * (T(1) + x * (T(1) - s));
}

// The last `width` rows of a block of channels, the oldest first.
template <class T>
struct Ring {
  T** rows;
  i64 width;
  T* next() const {  // the place of a new row, which was that of the oldest
    T* row = rows[0];
    for (i64 j = 1; j < width; ++j) rows[j - 1] = rows[j];
    return rows[width - 1] = row;
  }
};

template <class T>
struct Conv1d {
  const lintra_conv1d& call;
  static constexpr i64 kSize = sizeof(T);

  i64 blocks() const { return (call.c + kChannels - 1) / kChannels; }

  // A block of channels of one sequence, and a worker's rows of it.
  struct Block {
    i64 column, columns, vectors;  // vectors: of elements, whole
    T *weight, *bias, *zero;       // [width][kChannels] [kChannels] [kChannels]
    Ring<T> inputs, dpre;
    T *sums, *recent, *spare;  // of the gradients of the weights and the bias [width + 1][kChannels]; of late ones
  };
  i64 scratch() const { return (5 * call.width + 5) * kChannels; }
  i64 all_sums() const { return (call.width + 1) * kChannels; }

  Block block(i64 i, T* rows, T** pointers) const {
    Block x;
    x.column = i * kChannels;
    x.columns = call.c - x.column < kChannels ? call.c - x.column : kChannels;
    x.vectors = round_up(x.columns, kLanes<T>);
    auto take = [&](i64 n) {
      T* begin = rows;
      rows += n * kChannels;
      return begin;
    };
    x.weight = take(call.width);
    x.bias = take(1);
    x.zero = take(1);
    x.spare = take(1);
    x.sums = take(call.width + 1);
    x.recent = take(call.width + 1);
    x.inputs = {pointers, call.width};
    x.dpre = {pointers + call.width, call.width};
    for (i64 j = 0; j < 2 * call.width; ++j) pointers[j] = take(1);
    memset((void*)x.weight, 0, size_t(scratch()) * kSize);  // lanes beyond the last channel are computed too
    for (i64 j = 0; j < call.width; ++j)
      memcpy(x.weight + j * kChannels, (const T*)call.weight + j * call.c + x.column, size_t(x.columns) * kSize);
    if (call.bias) memcpy(x.bias, (const T*)call.bias + x.column, size_t(x.columns) * kSize);
    return x;
  }

  struct Sequence : lintra_sequence {
    Tokens real;
  };
  Sequence sequence(i64 i) const {
    const lintra_sequence s = lintra_sequence_of(call, i);
    return {s, {call.mask.data ? call.mask.data + s.row * call.mask.b : nullptr, call.mask.t}};
  }

  void read(const lintra_tensor& x, const Sequence& s, i64 t, const Block& at, T* row) const {
    const i64 place = s.row * x.b + (s.first + t) * x.t + at.column, size = element_size(call.dtype);
    const char* from = x.data + place * size;
    if (t + kAhead < s.tokens) prefetch<0>(from + kAhead * x.t * size, at.columns * size);  // rows are pages apart
    read_row(from, row, at.columns, call.dtype);
  }
  void write(void* y, const Sequence& s, i64 t, const Block& at, const T* row) const {
    const i64 place = (s.row * call.t + s.first + t) * call.c + at.column, size = element_size(call.dtype);
    char* to = (char*)y + place * size;
    if (t + kAhead < s.tokens) prefetch<1>(to + kAhead * call.c * size, at.columns * size);
    write_row(to, row, at.columns, call.dtype);
  }
  // Row k of a state [n width-1 c].
  i64 state_row(const Sequence& s, i64 k, const Block& at) const {
    return (s.number * (call.width - 1) + k) * call.c + at.column;
  }
  void begin(const Sequence& s, const Block& at) const {
    for (i64 k = 0; k + 1 < call.width; ++k) {
      const T* from = call.state ? (const T*)call.state + state_row(s, k, at) : at.zero;
      memcpy(at.inputs.rows[k + 1], from, size_t(at.columns) * kSize);
    }
  }

  // bias + sum_j weight[j] rows[j], of one vector.
  template <i64 W>
  LINTRA_INLINE Vec<T> convolve(const Block& at, i64 i) const {
    const i64 width = W ? W : call.width;
    Vec<T> sum = load(at.bias + i);
    LINTRA_UNROLL
    for (i64 j = 0; j < width; ++j) sum += load(at.weight + j * kChannels + i) * load(at.inputs.rows[j] + i);
    return sum;
  }

  template <i64 W>
  void forward(const Sequence& s, const Block& at) const {
    begin(s, at);
    for (i64 t = 0; t < s.tokens; ++t) {
      if (!s.real.real(t)) {
        write(call.y, s, t, at, at.zero);
        continue;
      }
      read(call.x, s, t, at, at.inputs.next());
      for (i64 i = 0; i < at.vectors; i += kLanes<T>) {
        const Vec<T> pre = convolve<W>(at, i);
        store(at.spare + i, call.silu ? silu<T>(pre) : pre);
      }
      write(call.y, s, t, at, at.spare);
    }
    for (i64 k = 0; k + 1 < call.width; ++k)
      memcpy((T*)call.state_out + state_row(s, k, at), at.inputs.rows[k + 1], size_t(at.columns) * kSize);
  }

  template <i64 W>
  void backward(const Sequence& s, const Block& at, i64* places) const {
    const i64 width = W ? W : call.width, before = width - 1;
    begin(s, at);
    for (i64 j = 0; j < width; ++j) memset((void*)at.dpre.rows[j], 0, size_t(kChannels) * kSize);
    // Inputs are numbered: `before` of the state, then the real tokens. The gradient of number i, whose place is known:
    auto emit = [&](i64 i, const T* more) {
      T* to = i < before && call.dstate_in ? (T*)call.dstate_in + state_row(s, i, at) : nullptr;
      if (i < before && !to) return;
      for (i64 c = 0; c < at.vectors; c += kLanes<T>) {
        Vec<T> sum{};
        LINTRA_UNROLL
        for (i64 j = 0; j < width; ++j) sum += load(at.weight + j * kChannels + c) * load(at.dpre.rows[before - j] + c);
        store(at.spare + c, sum);
      }
      for (i64 c = 0; more && c < at.columns; ++c) at.spare[c] += more[c];
      if (to)
        memcpy(to, at.spare, size_t(at.columns) * kSize);
      else
        write(call.dx, s, places[i % width], at, at.spare);
    };
    i64 seen = 0;
    for (i64 t = 0; t < s.tokens; ++t) {
      if (!s.real.real(t)) {
        write(call.dx, s, t, at, at.zero);
        continue;
      }
      read(call.x, s, t, at, at.inputs.next());
      T* dpre = at.dpre.next();
      read(call.dy, s, t, at, dpre);
      for (i64 i = 0; i < at.vectors; i += kLanes<T>) {
        Vec<T> d = load(dpre + i);
        if (call.silu) {
          d *= silu_slope<T>(convolve<W>(at, i));
          store(dpre + i, d);
        }
        LINTRA_UNROLL
        for (i64 j = 0; j < width; ++j) {
          T* sum = at.recent + j * kChannels + i;
          store(sum, load(sum) + d * load(at.inputs.rows[j] + i));
        }
        T* sum = at.recent + width * kChannels + i;
        store(sum, load(sum) + d);
      }
      if (seen % kRecent == kRecent - 1) add_recent(at);
      places[(before + seen) % width] = t;
      emit(seen++, nullptr);
    }
    add_recent(at);
    for (i64 k = 0; k < before; ++k) {
      memset((void*)at.dpre.next(), 0, size_t(kChannels) * kSize);
      emit(seen + k, call.dstate ? (const T*)call.dstate + state_row(s, k, at) : nullptr);
    }
  }

  // Token by token, each would be rounded to the digits of the whole sum.
  void add_recent(const Block& at) const {
    for (i64 i = 0; i < all_sums(); i += kLanes<T>) {
      store(at.sums + i, load(at.sums + i) + load(at.recent + i));
      store(at.recent + i, Vec<T>{});
    }
  }

  // f(sequence, block) for all of them; sequences go in as many groups as there are sums of gradients.
  template <class F>
  int each(lintra_launch launch, i64 groups, F&& f) const {
    if (!call.b || !call.c) return LINTRA_OK;
    const i64 n = groups * blocks();
    const double work = double(lintra_rows(call)) * double(call.t) * double(call.c);
    const i64 workers = worker_count(work, kParallelWork, call.threads, n);
    const i64 rows = scratch() * kSize, pointers = 2 * call.width * i64(sizeof(T*)), places = call.width * i64(sizeof(i64));
    const i64 size = round_up(rows + pointers + places, 64);
    Memory memory;
    char* buffers = memory.get(workers * size, false);
    if (!buffers) return LINTRA_NO_MEMORY;
    parallel(launch, workers, n, Subnormals::kKept, [&](i64 i, i64 worker) {
      char* mine = buffers + worker * size;
      const i64 group = i / blocks();
      const Block at = block(i % blocks(), (T*)mine, (T**)(mine + rows));
      f(group, call.b * group / groups, call.b * (group + 1) / groups, at, (i64*)(mine + rows + pointers));
    });
    return LINTRA_OK;
  }

  template <i64 W>
  int forward(lintra_launch launch) const {
    return each(launch, call.b, [&](i64, i64 from, i64 to, const Block& at, i64*) {
      for (i64 i = from; i < to; ++i) forward<W>(sequence(i), at);
    });
  }

  template <i64 W>
  int backward(lintra_launch launch) const {
    return each(launch, call.groups, [&](i64 group, i64 from, i64 to, const Block& at, i64* places) {
      for (i64 i = from; i < to; ++i) backward<W>(sequence(i), at, places);
      for (i64 j = 0; j < call.width; ++j)
        memcpy((T*)call.dweight + (group * call.width + j) * call.c + at.column, at.sums + j * kChannels,
               size_t(at.columns) * kSize);
      const T* bias = at.sums + call.width * kChannels;
      memcpy((T*)call.dbias + group * call.c + at.column, bias, size_t(at.columns) * kSize);
    });
  }

  // The widths of the models that have one are unrolled.
  int run(bool gradients, lintra_launch launch) const {
    switch (call.width) {
      case 2: return gradients ? backward<2>(launch) : forward<2>(launch);
      case 3: return gradients ? backward<3>(launch) : forward<3>(launch);
      case 4: return gradients ? backward<4>(launch) : forward<4>(launch);
      default: return gradients ? backward<0>(launch) : forward<0>(launch);
    }
  }
};

int conv1d(const lintra_conv1d& call, bool gradients, lintra_launch launch) {
  if (call.dtype == LINTRA_FLOAT64) return Conv1d<double>{call}.run(gradients, launch);
  return Conv1d<float>{call}.run(gradients, launch);
}

}  // namespace LINTRA_ISA
}  // namespace lintra
