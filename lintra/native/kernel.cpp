// The passes over all samples and heads, shared between threads. Compiled once per instruction set, with LINTRA_ISA
// naming the namespace.
#include "kernel.h"

#include "parallel.h"
#include "problem.h"
#include "step.h"

LINTRA_DECLARE(LINTRA_ISA)

namespace lintra {
namespace LINTRA_ISA {

// Below about this many multiply-adds waking another thread costs more than it saves.
constexpr i64 kParallelWork = 1 << 20;
constexpr i64 kShortestSegment = 4;  // chunks

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
    const i64 t = problem.stretch(b).t, chunks = (t + kChunk - 1) / kChunk, pieces = 2 * parts + 1;
    auto bound = [&](i64 piece) {  // backwards the pieces come from the end; all cut between chunks
      const i64 chunk = chunks * piece / pieces, token = (s.backwards ? chunks - chunk : chunk) * kChunk;
      return token < t ? token : t;
    };
    const i64 first = i == 0 ? bound(0) : bound(2 * i - 1), last = bound(2 * i + 1);
    *from = s.backwards ? last : first;
    *to = s.backwards ? first : last;
  }
  static void share(i64 n, i64 i, i64 parts, i64* from, i64* to) {
    const i64 chunks = (n + kChunk - 1) / kChunk;
    *from = chunks * i / parts * kChunk;
    *to = i + 1 == parts ? n : chunks * (i + 1) / parts * kChunk;
  }

  void first_round(i64 i, Scratch<T>& r) const {
    i64 from, to;
    if (!s.causal) {
      share(problem.written(s, b), i, parts, &from, &to);
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
      share(problem.read(s, b), i, parts, &from, &to);
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
  const double all = double(tokens) * double(lintra_rows(call));
  const double work = double(count) * double(call.g) * all * double(call.f) * double(call.e) * 2;
  const i64 threads = work < kParallelWork ? 1 : call.threads;

  // Jobs that do not go evenly over the threads are cut in time.
  i64 rest = jobs % threads, parts = rest ? threads / rest : 1;
  if (problem.packed() || parts < 2 || tokens / kChunk < kShortestSegment * (2 * parts + 1)) rest = 0;
  const i64 uncut = jobs - rest;

  i64 scratch_size = 0, state_size = 0;
  for (i64 i = 0; i < count; ++i) {
    const i64 state = Shape::of(problem.make(passes[i], 0, 0)).template state_step<T>();
    state_size = state > state_size ? state : state_size;
  }
  // Heads taken together: as many as leave every thread the same number of tasks; of sequences of different lengths,
  // the same number of each.
  const i64 even = problem.packed() ? call.g : uncut;
  i64 together = kLanesTogether;
  while (together > 1 && (call.g % together || even % together || even / together % threads ||
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
        den = sum_of_weights(q, z, f, s.eps);
        divide_row(y, e, den);
      }
      if (!real) memset(y, 0, size_t(e) * sizeof(T));
      memcpy(s.den + head * s.den_head, &den, sizeof den);
      write_row(s.out.data + head * s.out.head, y, e, s.out.dtype);
    }
  });
  return LINTRA_OK;
}

// d log_decay and d log_input from q . dq and k . dk. The decay of a token has for its gradient <the state before it,
// that state's gradient>, which is computed as such at marks, and from there on back summed up of what tokens add to it.
// In double; but the terms are of float32, and without marks their roundings would add up over the whole sequence.
template <class T>
void weight_gradients(const Problem<T>& problem) {
  const lintra_call& call = problem.call;
  const i64 size = problem.marked_size();
  for (i64 item = 0; item < call.b * call.g; ++item) {
    const i64 b = item / call.g, g = item % call.g;
    const i64 first = problem.token(b, call.s), dots = problem.token(b, g, call.s);
    const T* states = problem.marked(problem.states, b, g);
    const T* gradients = problem.marked(problem.gradients, b, g);
    double total = problem.ends ? problem.ends[item] : 0;
    for (i64 token = problem.stretch(b).s - 1; token >= 0; --token) {
      const bool real = problem.mask(b).real(token);
      const double key = problem.key_dots[dots + token];
      const i64 at = (first + token) * call.g + g;
      if (call.dlog_input) ((T*)call.dlog_input)[at] = T(key);
      if (call.dlog_decay) {
        total += problem.query_dots[dots + token] - key;
        if (token % problem.mark == 0) {
          const i64 place = token / problem.mark * size;
          total = 0;
          for (i64 n = 0; n < size; ++n) total += double(states[place + n]) * double(gradients[place + n]);
        }
        ((T*)call.dlog_decay)[at] = real ? T(total) : T(0);
      }
    }
  }
}

template <class T>
int run_backward(const lintra_call& call, lintra_launch launch) {
  const i64 items = call.b * call.g;
  Problem<T> problem = {call, call.g ? call.h / call.g : 1};
  Memory memory, marked;
  const bool wanted = call.dlog_decay || call.dlog_input;
  if (wanted) {
    const i64 rows = lintra_rows(call) * call.g;
    double* dots = (double*)memory.get((rows * (call.t + call.s) + items) * 8, true);
    if (!dots) return LINTRA_NO_MEMORY;
    problem.key_dots = dots;
    if (call.dlog_decay) {
      problem.query_dots = dots + rows * call.s;
      problem.ends = problem.query_dots + rows * call.t;
      // A quarter of the memory of the keys.
      problem.mark = round_up(8 * (call.e + 1), kChunk);
      const i64 size = problem.marked_size() * problem.marks() * call.g;
      problem.states = (T*)marked.get(2 * size * i64(sizeof(T)), false);
      if (!problem.states) return LINTRA_NO_MEMORY;
      problem.gradients = problem.states + size;
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
  const bool step = call.causal && call.t == 1 && !call.cu_seqlens;
  if (call.dtype == LINTRA_FLOAT64) {
    const Problem<double> problem = {call, group};
    return step ? run_step(problem, launch) : run(problem, &pass, 1, launch);
  }
  const Problem<float> problem = {call, group};
  return step ? run_step(problem, launch) : run(problem, &pass, 1, launch);
}

int backward(const lintra_call& call, lintra_launch launch) {
  return call.dtype == LINTRA_FLOAT64 ? run_backward<double>(call, launch) : run_backward<float>(call, launch);
}

}  // namespace LINTRA_ISA
}  // namespace lintra
