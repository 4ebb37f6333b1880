// The recurrences of recurrence.h over all sequences and states, shared between threads. Compiled once per instruction
// set, with LINTRA_ISA naming the namespace.
#include "recurrence_gradients.h"

#include "kernel.h"
#include "parallel.h"
#include "step.h"

LINTRA_DECLARE(LINTRA_ISA)

namespace lintra {
namespace LINTRA_ISA {

constexpr double kParallelWork = 1 << 18;  // multiply-adds below which waking a thread costs more than it saves
constexpr i64 kStreamed = 1 << 23;         // bytes of new states above which they go past the caches

// The columns of one state and the tokens of its sequence.
struct StateItem {
  lintra_sequence sequence;
  i64 state, part;
  i64 column, columns;
};

template <class T>
struct RecurrenceCall {
  const lintra_recurrence& call;
  static constexpr i64 kSize = sizeof(T);

  i64 items() const { return call.b * call.g * call.parts; }
  StateItem item(i64 i) const {
    StateItem x;
    x.part = i % call.parts;
    x.state = i / call.parts % call.g;
    x.sequence = lintra_sequence_of(call, i / call.parts / call.g);
    const i64 line = 64 / kSize, lines = (call.e + line - 1) / line;  // parts share no line of the cache
    const i64 from = lines * x.part / call.parts * line, to = lines * (x.part + 1) / call.parts * line;
    x.column = from;
    x.columns = (to < call.e ? to : call.e) - from;
    return x;
  }

  const char* address(const lintra_tensor& x, const StateItem& at, i64 head, i64 size) const {
    return x.data ? x.data + (at.sequence.row * x.b + at.sequence.first * x.t + head * x.h) * size : nullptr;
  }
  Operand operand(const lintra_tensor& x, const StateItem& at, i64 head, i64 width) const {
    return tensor_rows(address(x, at, head, element_size(call.dtype)), x, width, call.dtype);
  }
  // Rows of a contiguous tensor [b t heads width].
  i64 element(const StateItem& at, i64 head, i64 heads, i64 width) const {
    return ((at.sequence.row * call.t + at.sequence.first) * heads + head) * width;
  }
  // The same of a tensor with an axis of parts before.
  T* gradient(void* x, const StateItem& at, i64 head, i64 heads, i64 width) const {
    if (!x) return nullptr;
    return (T*)x + at.part * lintra_rows(call) * call.t * heads * width + element(at, head, heads, width);
  }

  Recurrence<T> make(const StateItem& at) const {
    const i64 size = element_size(call.dtype), group = call.h / call.g, e = at.columns;
    const i64 first = at.state * group, rates = call.per_feature ? call.f : 1;
    Recurrence<T> r = {};
    r.q = operand(call.q, at, 0, call.f);
    r.k = operand(call.k, at, at.state / (call.g / call.key_heads), call.f);
    r.v = operand(call.v, at, at.state / (call.g / call.value_heads), e);
    r.v.x += at.column * size;
    r.readers = group;
    r.readers_per_query = call.h / call.query_heads;
    r.first_reader = first;
    r.f = call.f;
    r.e = e;
    r.tokens = at.sequence.tokens;
    r.real = {address(call.mask, at, 0, 1), call.mask.t};
    r.log_decay = address(call.log_decay, at, at.state, kSize);
    r.log_decay_token = call.log_decay.t * kSize;
    r.beta = address(call.beta, at, at.state, kSize);
    r.beta_token = call.beta.t * kSize;
    r.per_feature = call.per_feature;
    r.scale = T(call.scale);
    if (call.y) r.y = (char*)call.y + (element(at, first, call.h, call.e) + at.column) * size;
    r.y_token = call.h * call.e * size;
    r.y_head = call.e * size;
    if (!call.dq) return r;
    r.dy = operand(call.dy, at, first, e);
    r.dy.x += at.column * size;
    r.dq = gradient(call.dq, at, first, call.h, call.f);
    r.dk = gradient(call.dk, at, at.state, call.g, call.f);
    r.dlog_decay = gradient(call.dlog_decay, at, at.state, call.g, rates);
    r.dbeta = gradient(call.dbeta, at, at.state, call.g, 1);
    r.dv = (T*)call.dv + element(at, at.state, call.g, call.e) + at.column;
    r.dq_token = call.h * call.f;
    r.dk_token = call.g * call.f;
    r.dlog_decay_token = call.g * rates;
    r.dbeta_token = call.g;
    r.dv_token = call.g * call.e;
    return r;
  }

  i64 state_place(const StateItem& at) const { return (at.sequence.number * call.g + at.state) * call.f * call.e + at.column; }
  // The checkpoint before the first token.
  T* checkpoint(const StateItem& at) const {
    const i64 number = lintra_first_checkpoint(call, at.sequence, call.interval);
    return (T*)call.checkpoints + (number * call.g + at.state) * call.f * call.e + at.column;
  }
  i64 checkpoint_step() const { return call.g * call.f * call.e; }

  void load(const void* states, const StateItem& at, StateShape<T> shape, T* to) const {
    if (states) load_state((const T*)states + state_place(at), call.e, shape, to);
  }

  template <class F>
  int each_item(bool backward, lintra_launch launch, F&& f) const {
    if (!items()) return LINTRA_OK;
    const double work = double(lintra_rows(call)) * double(call.t) * double(call.h) * double(call.f) * double(call.e);
    const i64 n = items(), workers = worker_count(work, kParallelWork, call.threads, n);
    StateItem widest = {};
    widest.columns = call.e;
    const i64 size = ChunkBuffers<T>::layout(make(widest), backward, call.interval / kChunk, nullptr, nullptr);
    Memory memory;
    char* buffers = memory.get(workers * size * kSize, true);  // what pads rows and states has to be finite
    if (!buffers) return LINTRA_NO_MEMORY;
    parallel(launch, workers, n, Subnormals::kFlushed, [&](i64 i, i64 worker) {
      const StateItem at = item(i);
      const Recurrence<T> r = make(at);
      ChunkBuffers<T> c;
      T* mine = (T*)buffers + worker * size;
      ChunkBuffers<T>::layout(r, backward, call.interval / kChunk, mine, &c);
      if (call.parts > 1) memset((void*)mine, 0, size_t(size) * kSize);  // parts may differ in width, and so in layout
      const size_t state = size_t(StateShape<T>{r.f, r.e}.size()) * kSize;  // of the item before, its padding too
      memset((void*)c.state, 0, state);
      if (backward) memset((void*)c.gradient, 0, state);
      SequenceGradients<T> sequence(r, c);
      f(at, sequence);
    });
    return LINTRA_OK;
  }

  int forward(lintra_launch launch) const {
    return each_item(false, launch, [&](const StateItem& at, SequenceGradients<T>& sequence) {
      const StateShape<T> shape = sequence.shape;
      T* state = sequence.c.state;
      load(call.state, at, shape, state);
      sequence.forward(call.interval, [&](i64 number, const T* now) {
        if (call.checkpoints) store_state(now, shape, checkpoint(at) + number * checkpoint_step(), call.e);
      });
      store_state(state, shape, (T*)call.state_out + state_place(at), call.e);
    });
  }

  int backward(lintra_launch launch) const {
    return each_item(true, launch, [&](const StateItem& at, SequenceGradients<T>& sequence) {
      const StateShape<T> shape = sequence.shape;
      load(call.dstate, at, shape, sequence.c.gradient);
      sequence.backward(call.interval, [&](i64 number, T* to) {
        load_state(checkpoint(at) + number * checkpoint_step(), call.e, shape, to);
      });
      store_state(sequence.c.gradient, shape, (T*)call.dstate_in + state_place(at), call.e);
    });
  }

  // One token for every sequence and state; `state` and `state_out` may be the same. Columns go by blocks that stay in
  // the first-level cache between the two passes of the delta rule: the state is read and written once.
  int step(lintra_launch launch) const {
    const i64 n = call.b * call.g, f = call.f, e = call.e;
    if (!n) return LINTRA_OK;
    const double work = 2.0 * double(n) * double(f) * double(e);
    const i64 workers = worker_count(work, kParallelWork, call.threads, n);
    const i64 wide = round_up(f > e ? f : e, 16);
    Memory memory;
    T* rows = (T*)memory.get(workers * 5 * wide * kSize, true);
    const bool aligned = (uintptr_t)call.state_out % LINTRA_VECTOR_BYTES == 0 && e % kLanes<T> == 0;
    const bool streamed = aligned && call.h == call.g && n * f * e * kSize > kStreamed;
    if (!rows) return LINTRA_NO_MEMORY;
    parallel(launch, workers, n, Subnormals::kFlushed, [&](i64 i, i64 worker) {
      StateItem at = {};
      at.sequence = lintra_sequence_of(call, i / call.g);
      at.state = i % call.g;
      at.columns = e;
      const Recurrence<T> r = make(at);
      T *k = rows + worker * 5 * wide, *v = k + wide, *q = v + wide, *y = q + wide, *decay = y + wide;
      T* to = (T*)call.state_out + state_place(at);
      const T* from = call.state ? (const T*)call.state + state_place(at) : nullptr;
      if (!from) {
        memset(to, 0, size_t(f * e) * kSize);
        from = to;
      }
      if (!r.real.real(0)) {
        if (to != from) memcpy(to, from, size_t(f * e) * kSize);
        memset(y, 0, size_t(e) * kSize);
        for (i64 head = 0; head < r.readers; ++head) write_row(r.y + head * r.y_head, y, e, call.dtype);
        return;
      }
      auto read = [&](const Operand& o, i64 head, T* row) {
        read_row(o.x + head * o.head, row, o.width, o.dtype);
        for (i64 j = o.width; j < wide; ++j) row[j] = 0;
      };
      read(r.k, 0, k);
      read(r.v, 0, v);
      for (i64 j = 0; j < f; ++j)
        decay[j] = r.log_decay ? scalar<T>(r.log_decay, kSize, r.per_feature ? j : 0) : T(0);
      for (i64 j = 0; j < f; j += kLanes<T>) store(decay + j, exp<T>(lintra::LINTRA_ISA::load(decay + j)));
      const T beta = r.beta ? scalar<T>(r.beta, 0, 0) : T(0);
      for (i64 head = 0; head < r.readers; ++head) {
        const i64 query = (r.first_reader + head) / r.readers_per_query;
        read(r.q, query, q);
        for (i64 j = 0; j < f; ++j) q[j] *= r.scale;
        if (head == 0) {
          const bool past = streamed && from != to;
          const Step<T> token = {from, k, v, q, to, y, f, e, T(1), decay, beta, r.beta != nullptr, past};
          step_matrix(token);
          if (token.streamed) stream_end();
        } else {
          read_matrix(to, q, y, f, e);
        }
        write_row(r.y + head * r.y_head, y, e, call.dtype);
      }
    });
    return LINTRA_OK;
  }
};

int recurrence_forward(const lintra_recurrence& call, lintra_launch launch) {
  const bool step = call.t == 1 && !call.cu_seqlens && !call.checkpoints;
  if (call.dtype == LINTRA_FLOAT64) {
    const RecurrenceCall<double> run = {call};
    return step ? run.step(launch) : run.forward(launch);
  }
  const RecurrenceCall<float> run = {call};
  return step ? run.step(launch) : run.forward(launch);
}

int recurrence_backward(const lintra_recurrence& call, lintra_launch launch) {
  if (call.dtype == LINTRA_FLOAT64) return RecurrenceCall<double>{call}.backward(launch);
  return RecurrenceCall<float>{call}.backward(launch);
}

}  // namespace LINTRA_ISA
}  // namespace lintra
