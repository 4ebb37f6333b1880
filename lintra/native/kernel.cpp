// The passes over all samples and heads: which operands each sweep has, and how sweeps are shared between threads.
// Compiled once per instruction set, with LINTRA_ISA naming the namespace.
#include "kernel.h"

#include <stdlib.h>

#include "step.h"
#include "sweep.h"

LINTRA_DECLARE(LINTRA_ISA)

namespace lintra {
namespace LINTRA_ISA {

// Below about this many multiply-adds waking another thread costs more than it saves.
constexpr i64 kParallelWork = 1 << 20;
constexpr i64 kShortestSegment = 4;  // chunks

// Memory from malloc: no exception may cross the C interface. Aligned to a cache line.
struct Memory {
  void* raw = nullptr;
  ~Memory() { free(raw); }
  char* get(i64 bytes, bool zero) {
    raw = zero ? calloc(size_t(bytes) + 64, 1) : malloc(size_t(bytes) + 64);
    return raw ? (char*)(((uintptr_t)raw + 63) & ~(uintptr_t)63) : nullptr;
  }
};

// Runs f(task, worker) for every task below n; a worker takes the next task when it is done with one. The result of a
// task must not depend on the worker.
template <class F>
struct Parallel {
  const F& f;
  i64 n;
  i64 next_task, next_worker;

  static void work(void* context) {
    Parallel& p = *(Parallel*)context;
    const i64 worker = __atomic_fetch_add(&p.next_worker, 1, __ATOMIC_RELAXED);
    for (;;) {
      const i64 task = __atomic_fetch_add(&p.next_task, 1, __ATOMIC_RELAXED);
      if (task >= p.n) return;
      p.f(task, worker);
    }
  }
};
template <class F>
void parallel(lintra_launch launch, i64 threads, i64 n, const F& f) {
  Parallel<F> p{f, n, 0, 0};
  if (threads > n) threads = n;
  if (threads <= 1)
    Parallel<F>::work(&p);
  else
    launch(Parallel<F>::work, &p, threads);
}

enum Pass { kForward, kQueryGradient, kKeyGradient, kValueGradient };

template <class T>
struct Problem {
  const lintra_call& call;
  i64 group;            // query heads per key head
  double* query_dots;   // [b g t]: q . dq and
  double* key_dots;     // [b g s]: k . dk, for the gradients of log_decay and log_input
  double* ends;         // [b g]: <gradient of the final state, final state>

  static constexpr i64 kSize = sizeof(T);

  Operand operand(Operand::Kind kind, const lintra_tensor& x, i64 b, i64 head, i64 width, i64 map) const {
    const i64 size = element_size(call.dtype);
    Operand o = {};
    o.kind = kind;
    o.x = x.data + (b * x.b + head * x.h) * size;
    o.token = x.t * size;
    o.head = x.h * size;
    o.width = width;
    o.dtype = call.dtype;
    o.map = map;
    return o;
  }
  Operand query(i64 b, i64 g) const {
    return operand(Operand::plain, call.q, b, g * group, call.f, call.feature_map);
  }
  Operand key(i64 b, i64 g) const { return operand(Operand::plain, call.k, b, g, call.f, call.feature_map); }
  Operand value(Operand::Kind kind, i64 b, i64 g) const {
    return operand(kind, call.v, b, g, call.e, LINTRA_IDENTITY);
  }
  Operand gradient(Operand::Kind kind, i64 b, i64 g) const {
    const i64 size = element_size(call.dtype), head = g * group;
    Operand o = operand(kind, call.dy, b, head, call.e, LINTRA_IDENTITY);
    if (call.normalize) {
      o.y = (const char*)call.y + (b * call.t * call.h + head) * call.e * size;
      o.y_token = call.h * call.e * size;
      o.y_head = call.e * size;
      o.den = (const char*)call.den + (b * call.t * call.h + head) * kSize;
      o.den_token = call.h * kSize;
      o.den_head = kSize;
    }
    return o;
  }
  Output output(void* data, i64 b, i64 tokens, i64 head, i64 heads, i64 width) const {
    const i64 size = element_size(call.dtype);
    return {(char*)data + (b * tokens * heads + head) * width * size, heads * width * size, width * size, call.dtype};
  }
  Tokens mask(i64 b) const {
    return {call.mask.data ? call.mask.data + b * call.mask.b : nullptr, call.mask.t};
  }
  const char* per_key(const lintra_tensor& x, i64 b, i64 g) const {
    return x.data ? x.data + (b * x.b + g * x.h) * kSize : nullptr;
  }

  Sweep<T> make(Pass pass, i64 b, i64 g) const {
    Sweep<T> s = {};
    s.backwards = pass == kKeyGradient || pass == kValueGradient;
    s.causal = call.causal;
    s.readers = s.backwards ? 1 : group;
    s.writers = s.backwards ? group : 1;
    s.inner = pass == kForward || pass == kValueGradient ? call.f : call.e + 1;
    s.outer = pass == kForward || pass == kValueGradient ? call.e : call.f;
    if (s.causal || s.backwards) s.read_tokens = mask(b);
    if (s.causal || !s.backwards) s.write_tokens = mask(b);
    s.log_decay = per_key(call.log_decay, b, g);
    s.log_input = per_key(call.log_input, b, g);
    s.log_decay_token = call.log_decay.t * kSize;
    s.log_input_token = call.log_input.t * kSize;
    switch (pass) {
      case kForward:
        s.a = query(b, g);
        s.b = key(b, g);
        s.c = value(Operand::plain, b, g);
        s.out = output(call.y, b, call.t, g * group, call.h, call.e);
        s.denominators = true;
        s.normalize = call.normalize;
        s.eps = T(call.eps);
        s.den = (char*)call.den + (b * call.t * call.h + g * group) * kSize;
        s.den_token = call.h * kSize;
        s.den_head = kSize;
        break;
      case kQueryGradient:
        s.a = gradient(Operand::extended, b, g);
        s.b = value(Operand::ones, b, g);
        s.c = key(b, g);
        s.out = output(call.dq, b, call.t, g * group, call.h, call.f);
        s.features = query(b, g);
        s.chain = call.feature_map != LINTRA_IDENTITY;
        s.dots = query_dots ? query_dots + (b * call.g + g) * call.t : nullptr;
        break;
      case kKeyGradient:
        s.a = value(Operand::ones, b, g);
        s.b = gradient(Operand::extended, b, g);
        s.c = query(b, g);
        s.out = output(call.dk, b, call.s, g, call.g, call.f);
        s.features = key(b, g);
        s.chain = call.feature_map != LINTRA_IDENTITY;
        s.dots = key_dots ? key_dots + (b * call.g + g) * call.s : nullptr;
        break;
      case kValueGradient:
        s.a = key(b, g);
        s.b = query(b, g);
        s.c = gradient(Operand::gradient, b, g);
        s.out = output(call.dv, b, call.s, g, call.g, call.e);
        break;
    }
    return s;
  }

  // Elements of a state in panels, from and to the caller's kv [f e] and z [f]; the sweeps of dq and dk hold the
  // transpose with z as its last row.
  template <class F>
  void each_element(const Sweep<T>& s, bool transposed, F&& f) const {
    const Shape shape = Shape::of(s);
    for (i64 column = 0; column < s.outer; column += kPanelWidth<T>) {
      const i64 left = shape.outer - column, width = left < kPanelWidth<T> ? left : kPanelWidth<T>;
      const i64 end = column + width < s.outer ? column + width : s.outer;
      for (i64 k = 0; k < s.inner; ++k) {
        const i64 at = column * shape.rows + k * width - column;
        for (i64 n = column; n < end; ++n) f(at + n, transposed ? n : k, transposed ? k : n);
      }
    }
  }
  void start(Pass pass, i64 b, i64 g, const Sweep<T>& s, State<T> state) const {
    const Shape shape = Shape::of(s);
    memset(state.sum, 0, size_t(shape.state()) * kSize);
    const i64 item = b * call.g + g, e = call.e;
    const T* kv = (const T*)(s.backwards ? call.dkv : call.kv);
    const T* z = (const T*)(s.backwards ? call.dz : call.z);
    if (kv) kv += item * call.f * e;
    if (z) z += item * call.f;
    if (!kv && !z) return;
    const bool transposed = pass == kQueryGradient || pass == kKeyGradient;
    each_element(s, transposed, [&](i64 at, i64 i, i64 n) {
      if (n < e ? kv != nullptr : z != nullptr) state.sum[at] = n < e ? kv[i * e + n] : z[i];
    });
    if (pass == kForward && z) memcpy(state.z, z, size_t(call.f) * kSize);
  }
  void finish(Pass pass, i64 b, i64 g, const Sweep<T>& s, State<T> state) const {
    const i64 item = b * call.g + g, e = call.e, f = call.f;
    if (pass == kQueryGradient) {
      if (!ends) return;
      const T* dkv = call.dkv ? (const T*)call.dkv + item * f * e : nullptr;
      const T* dz = call.dz ? (const T*)call.dz + item * f : nullptr;
      double total = 0;
      each_element(s, true, [&](i64 at, i64 i, i64 n) {
        const double gradient = n < e ? (dkv ? dkv[i * e + n] : 0) : (dz ? dz[i] : 0);
        total += gradient * double(state.sum[at]);
      });
      ends[item] = total;
      return;
    }
    T* kv = (T*)(pass == kForward ? call.kv_out : call.dkv_in) + item * f * e;
    T* z = (T*)(pass == kForward ? call.z_out : call.dz_in) + item * f;
    if (pass == kForward) memcpy(z, state.z, size_t(f) * kSize);
    each_element(s, pass == kKeyGradient, [&](i64 at, i64 i, i64 n) {
      if (pass != kKeyGradient)
        kv[i * e + n] = state.sum[at];
      else if (n == e)
        z[i] = state.sum[at];
    });
  }

  // One mode of a bidirectional sweep. Weights belong to keys: they apply where the keys are.
  void one_way(Lane<T>* lanes, i64 count, i64 from, i64 to, int mode, Scratch<T>& r) const {
    Lane<T> plain[kLanesTogether];
    for (i64 i = 0; i < count; ++i) {
      plain[i] = lanes[i];
      if ((mode == kRead) != lanes[i].sweep.backwards) plain[i].sweep.log_input = nullptr;
    }
    sweep(plain, count, from, to, mode, r);
  }
  i64 written(const Sweep<T>& s) const { return s.backwards ? call.t : call.s; }
  i64 read(const Sweep<T>& s) const { return s.backwards ? call.s : call.t; }

  // The whole of time for `count` key heads from g.
  void whole(Pass pass, i64 b, i64 g, i64 count, Scratch<T>& r) const {
    Lane<T> lanes[kLanesTogether];
    for (i64 i = 0; i < count; ++i) {
      lanes[i].sweep = make(pass, b, g + i);
      lanes[i].state = Shape::of(lanes[i].sweep).state_at(r.states, i);
      start(pass, b, g + i, lanes[i].sweep, lanes[i].state);
    }
    if (call.causal) {
      sweep(lanes, count, 0, call.t, kRead | kWrite, r);
    } else {
      one_way(lanes, count, 0, written(lanes[0].sweep), kWrite, r);
      one_way(lanes, count, 0, read(lanes[0].sweep), kRead, r);
    }
    for (i64 i = 0; i < count; ++i) finish(pass, b, g + i, lanes[i].sweep, lanes[i].state);
  }

  T decay_over(const Sweep<T>& s, i64 from, i64 to) const {
    if (!s.log_decay) return 1;
    double total = 0;
    for (i64 token = from; token < to; ++token)
      if (s.read_tokens.real(token)) total += double(scalar<T>(s.log_decay, s.log_decay_token, token));
    return exp<T>(splat(T(total)))[0];
  }
};

// A sweep cut into pieces of time. Causal: `parts` + 1 segments, the first half as long as the others. In a first round
// it is swept as it stands while the others but the last sum what they write, which is half the work of a full sweep:
// all take the same time. Then each segment's starting state is known, and a second round sweeps them.
// Bidirectional: the first round sums the pieces, the second reads the total.
template <class T>
struct Split {
  const Problem<T>& problem;
  Pass pass;
  i64 b, g, parts;
  Sweep<T> s;
  Shape shape;
  T* states;  // [parts] states

  State<T> state(i64 part) const { return shape.state_at(states, part); }

  void segment(i64 i, i64* from, i64* to) const {
    const i64 t = problem.call.t, chunks = (t + kChunk - 1) / kChunk, pieces = 2 * parts + 1;
    auto bound = [&](i64 piece) {
      const i64 token = chunks * piece / pieces * kChunk;
      return piece == pieces || token > t ? t : token;
    };
    const i64 first = i == 0 ? 0 : bound(2 * i - 1), last = bound(2 * i + 1);
    *from = s.backwards ? t - last : first;
    *to = s.backwards ? t - first : last;
  }
  static void share(i64 n, i64 i, i64 parts, i64* from, i64* to) {
    const i64 chunks = (n + kChunk - 1) / kChunk;
    *from = chunks * i / parts * kChunk;
    *to = i + 1 == parts ? n : chunks * (i + 1) / parts * kChunk;
  }

  void first_round(i64 i, Scratch<T>& r) const {
    i64 from, to;
    if (!s.causal) {
      share(problem.written(s), i, parts, &from, &to);
      if (i == 0) problem.start(pass, b, g, s, state(0));
      Lane<T> lane = {s, state(i)};
      problem.one_way(&lane, 1, from, to, kWrite, r);
    } else {
      segment(i, &from, &to);
      if (i == 0) problem.start(pass, b, g, s, state(0));
      const Lane<T> lane = {s, state(i)};
      sweep(&lane, 1, from, to, i == 0 ? kRead | kWrite : kWrite, r);
    }
  }
  void combine() const {
    for (i64 i = 1; i < parts; ++i) {
      i64 from = 0, to = 0;
      if (s.causal) segment(i, &from, &to);
      const T decay = problem.decay_over(s, from, to);
      T* into = s.causal ? state(i).sum : state(0).sum;
      const T* add = s.causal ? state(i - 1).sum : state(i).sum;
      for (i64 n = 0; n < shape.state(); ++n) into[n] = into[n] + decay * add[n];
    }
  }
  void second_round(i64 i, Scratch<T>& r) const {
    i64 from, to;
    if (!s.causal) {
      share(problem.read(s), i, parts, &from, &to);
      Lane<T> lane = {s, state(0)};
      problem.one_way(&lane, 1, from, to, kRead, r);
      if (i == 0) problem.finish(pass, b, g, s, state(0));
    } else {
      segment(i + 1, &from, &to);
      const Lane<T> lane = {s, shape.state_at(r.states, 0)};
      memcpy(lane.state.sum, state(i).sum, size_t(shape.state()) * sizeof(T));
      sweep(&lane, 1, from, to, kRead | kWrite, r);
      if (i + 1 == parts) problem.finish(pass, b, g, s, lane.state);
    }
  }
};

// All sweeps of `passes` over all samples and key heads.
template <class T>
int run(const Problem<T>& problem, const Pass* passes, i64 count, lintra_launch launch) {
  const lintra_call& call = problem.call;
  const i64 items = call.b * call.g, jobs = items * count;
  if (jobs == 0) return LINTRA_OK;
  const i64 tokens = call.t > call.s ? call.t : call.s;
  const double work = double(jobs) * double(tokens) * double(call.f) * double(call.e) * 2;
  const i64 threads = work < kParallelWork ? 1 : call.threads;

  // Jobs that do not go evenly over the threads are cut in time.
  i64 rest = jobs % threads, parts = rest ? threads / rest : 1;
  if (parts < 2 || tokens / kChunk < kShortestSegment * (2 * parts + 1)) rest = 0;
  const i64 uncut = jobs - rest;

  i64 scratch_size = 0, state_size = 0;
  for (i64 i = 0; i < count; ++i) {
    const i64 state = Shape::of(problem.make(passes[i], 0, 0)).template state_step<T>();
    state_size = state > state_size ? state : state_size;
  }
  // Heads taken together: as many as leave every thread the same number of tasks.
  i64 together = kLanesTogether;
  while (together > 1 && (call.g % together || uncut % together || uncut / together % threads ||
                          together * state_size * i64(sizeof(T)) > kStatesBytes))
    --together;
  for (i64 i = 0; i < count; ++i) {
    const i64 size = Scratch<T>::layout(problem.make(passes[i], 0, 0), together, nullptr, nullptr);
    scratch_size = size > scratch_size ? size : scratch_size;
  }
  const i64 tasks = uncut / together + rest * parts, workers = threads < tasks ? threads : tasks;
  Memory scratch_memory, state_memory, split_memory;
  char* scratch = scratch_memory.get(workers * scratch_size * i64(sizeof(T)), false);
  char* states = state_memory.get(rest * parts * state_size * i64(sizeof(T)), true);
  Split<T>* splits = (Split<T>*)split_memory.get(rest * i64(sizeof(Split<T>)), false);
  if (!scratch || !states || !splits) return LINTRA_NO_MEMORY;

  auto job = [&](i64 i, Pass* pass, i64* b, i64* g) {
    *pass = passes[i / items];
    *b = i % items / call.g;
    *g = i % call.g;
  };
  auto buffers = [&](const Sweep<T>& s, i64 worker) {
    Scratch<T> r;
    Scratch<T>::layout(s, together, (T*)scratch + worker * scratch_size, &r);
    return r;
  };
  for (i64 i = 0; i < rest; ++i) {
    Pass pass;
    i64 b, g;
    job(uncut + i, &pass, &b, &g);
    const Sweep<T> s = problem.make(pass, b, g);
    const Split<T> split = {problem, pass, b, g, parts, s, Shape::of(s), (T*)states + i * parts * state_size};
    memcpy((void*)(splits + i), &split, sizeof split);
  }
  parallel(launch, workers, tasks, [&](i64 task, i64 worker) {
    if (task < uncut / together) {
      Pass pass;
      i64 b, g;
      job(task * together, &pass, &b, &g);
      Scratch<T> r = buffers(problem.make(pass, b, g), worker);
      problem.whole(pass, b, g, together, r);
    } else {
      const i64 part = task - uncut / together;
      const Split<T>& split = splits[part / parts];
      Scratch<T> r = buffers(split.s, worker);
      split.first_round(part % parts, r);
    }
  });
  for (i64 i = 0; i < rest; ++i) splits[i].combine();
  parallel(launch, workers, rest * parts, [&](i64 task, i64 worker) {
    const Split<T>& split = splits[task / parts];
    Scratch<T> r = buffers(split.s, worker);
    split.second_round(task % parts, r);
  });
  return LINTRA_OK;
}

template <class T>
void read_token(const Operand& o, i64 head, T* row, i64 padded) {
  read_row(o.x + head * o.head, row, o.width, o.dtype);
  apply_feature_map(row, o.width, o.map);
  for (i64 i = o.width; i < padded; ++i) row[i] = 0;
}

// One token for every sample and head.
template <class T>
int run_step(const Problem<T>& problem, lintra_launch launch) {
  const lintra_call& call = problem.call;
  const i64 f = call.f, e = call.e, items = call.b * call.g;
  const i64 wide = round_up(f > e ? f : e, 16);
  const i64 threads = double(items) * double(f) * double(e) * 2 < kParallelWork ? 1 : call.threads;
  const i64 workers = threads < items ? threads : items;
  Memory memory;
  T* rows = (T*)memory.get(workers * 4 * wide * i64(sizeof(T)), false);
  if (!rows) return LINTRA_NO_MEMORY;
  parallel(launch, workers, items, [&](i64 item, i64 worker) {
    const Sweep<T> s = problem.make(kForward, item / call.g, item % call.g);
    T *k = rows + worker * 4 * wide, *v = k + wide, *q = v + wide, *y = q + wide;
    const bool real = s.write_tokens.real(0);
    T decay = 1, input = 1;
    memset(k, 0, size_t(wide) * sizeof(T));
    memset(v, 0, size_t(wide) * sizeof(T));
    if (real) {
      read_token(s.b, 0, k, wide);
      read_token(s.c, 0, v, wide);
      if (s.log_decay) decay = exp<T>(splat(scalar<T>(s.log_decay, 0, 0)))[0];
      if (s.log_input) input = exp<T>(splat(scalar<T>(s.log_input, 0, 0)))[0];
    }
    for (i64 i = 0; i < f; ++i) k[i] *= input;
    T* kv = (T*)call.kv_out + item * f * e;
    T* z = (T*)call.z_out + item * f;
    const T* kv_in = call.kv ? (const T*)call.kv + item * f * e : nullptr;
    const T* z_in = call.z ? (const T*)call.z + item * f : nullptr;
    if (!kv_in) {  // a fresh state: zeros written first are in the cache when they are read
      memset(kv, 0, size_t(f * e) * sizeof(T));
      kv_in = kv;
    }
    for (i64 i = 0; i < f; ++i) z[i] = (z_in ? z_in[i] * decay : 0) + k[i];
    for (i64 head = 0; head < s.readers; ++head) {
      if (real)
        read_token(s.a, head, q, wide);
      else
        memset(q, 0, size_t(wide) * sizeof(T));
      if (head == 0)
        step_matrix(Step<T>{kv_in, k, v, q, kv, y, f, e, decay});
      else
        read_matrix(kv, q, y, f, e);
      T den = 1;
      if (s.normalize) {
        Vec<T> dot{};
        i64 i = 0;
        for (; i + kLanes<T> <= f; i += kLanes<T>) dot += load(q + i) * load(z + i);
        den = sum<T>(dot) + s.eps;
        for (; i < f; ++i) den += q[i] * z[i];
        const T inverse = den == 0 ? 0 : 1 / den;
        for (i64 n = 0; n < e; ++n) y[n] *= inverse;
      }
      if (!real || den == 0) memset(y, 0, size_t(e) * sizeof(T));
      memcpy(s.den + head * s.den_head, &den, sizeof den);
      write_row(s.out.data + head * s.out.head, y, e, s.out.dtype);
    }
  });
  return LINTRA_OK;
}

// d log_decay and d log_input from q . dq, k . dk and the final state. In double: the scan runs over the whole sequence.
template <class T>
void weight_gradients(const Problem<T>& problem) {
  const lintra_call& call = problem.call;
  for (i64 item = 0; item < call.b * call.g; ++item) {
    const i64 b = item / call.g, g = item % call.g;
    double total = problem.ends ? problem.ends[item] : 0;
    for (i64 token = call.s - 1; token >= 0; --token) {
      const bool real = problem.mask(b).real(token);
      const double key = problem.key_dots[item * call.s + token];
      const i64 at = (b * call.s + token) * call.g + g;
      if (call.dlog_input) ((T*)call.dlog_input)[at] = T(key);
      if (call.dlog_decay) {
        total += problem.query_dots[item * call.s + token] - key;
        ((T*)call.dlog_decay)[at] = real ? T(total) : T(0);
      }
    }
  }
}

template <class T>
int run_backward(const lintra_call& call, lintra_launch launch) {
  const i64 items = call.b * call.g;
  Problem<T> problem = {call, call.g ? call.h / call.g : 1, nullptr, nullptr, nullptr};
  Memory memory;
  const bool wanted = call.dlog_decay || call.dlog_input;
  if (wanted) {
    double* dots = (double*)memory.get(items * (call.t + call.s + 1) * 8, true);
    if (!dots) return LINTRA_NO_MEMORY;
    problem.key_dots = dots;
    if (call.dlog_decay) {
      problem.query_dots = dots + items * call.s;
      problem.ends = problem.query_dots + items * call.t;
    }
  }
  const Pass passes[] = {kQueryGradient, kKeyGradient, kValueGradient};
  const int status = run(problem, passes, 3, launch);
  if (status == LINTRA_OK && wanted) weight_gradients(problem);
  return status;
}

int forward(const lintra_call& call, lintra_launch launch) {
  const i64 group = call.g ? call.h / call.g : 1;
  const Pass pass = kForward;
  const bool step = call.causal && call.t == 1;
  if (call.dtype == LINTRA_FLOAT64) {
    const Problem<double> problem = {call, group, nullptr, nullptr, nullptr};
    return step ? run_step(problem, launch) : run(problem, &pass, 1, launch);
  }
  const Problem<float> problem = {call, group, nullptr, nullptr, nullptr};
  return step ? run_step(problem, launch) : run(problem, &pass, 1, launch);
}

int backward(const lintra_call& call, lintra_launch launch) {
  return call.dtype == LINTRA_FLOAT64 ? run_backward<double>(call, launch) : run_backward<float>(call, launch);
}

}  // namespace LINTRA_ISA
}  // namespace lintra
