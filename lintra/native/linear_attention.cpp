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
constexpr double kParallelWork = 1 << 20;
constexpr i64 kShortestSegment = 4;  // chunks

// A sweep cut into pieces of time. Causal: `parts` + 1 segments, the first half as long as the others. In a first round
// it is swept fully while the others, except the last, sum what they write, half the work of a full sweep:
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
    const i64 t = problem.queries(b), chunks = (t + kChunk - 1) / kChunk, pieces = 2 * parts + 1;
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
      share(problem.write_length(s, b), i, parts, &from, &to);
      if (i == 0) problem.start(pass, b, g, s, state(0));
      HeadSweep<T> head_sweep = {s, state(i)};
      problem.sweep_mode(&head_sweep, 1, from, to, kWrite, r);
    } else {
      segment(i, &from, &to);
      if (i == 0) problem.start(pass, b, g, s, state(0));
      const HeadSweep<T> head_sweep = {s, state(i)};
      sweep(&head_sweep, 1, from, to, i == 0 ? kRead | kWrite : kWrite, r);
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
      share(problem.read_length(s, b), i, parts, &from, &to);
      HeadSweep<T> head_sweep = {s, state(0)};
      problem.sweep_mode(&head_sweep, 1, from, to, kRead, r);
      if (i == 0) problem.finish(pass, b, g, s, state(0));
    } else {
      segment(i + 1, &from, &to);
      const HeadSweep<T> head_sweep = {s, shape.state_at(r.states, 0)};
      memcpy(head_sweep.state.sum, state(i).sum, size_t(shape.state()) * sizeof(T));
      sweep(&head_sweep, 1, from, to, kRead | kWrite, r);
      if (i + 1 == parts) problem.finish(pass, b, g, s, head_sweep.state);
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
  i64 split_jobs = jobs % threads, parts = split_jobs ? threads / split_jobs : 1;
  if (problem.packed() || parts < 2 || tokens / kChunk < kShortestSegment * (2 * parts + 1)) split_jobs = 0;
  const i64 whole_jobs = jobs - split_jobs;

  i64 scratch_size = 0, state_size = 0;
  for (i64 i = 0; i < count; ++i) {
    const i64 state = Shape::of(problem.make(passes[i], 0, 0)).template state_step<T>();
    state_size = state > state_size ? state : state_size;
  }
  // How many heads a task sweeps: as many as leave every thread the same number of tasks; of sequences of different
  // lengths, the same number of each.
  const i64 even = problem.packed() ? call.g : whole_jobs;
  i64 heads_together = kMaxHeads;
  while (heads_together > 1 && (call.g % heads_together || even % heads_together || even / heads_together % threads ||
                                heads_together * state_size * i64(sizeof(T)) > kMaxStateBytes))
    --heads_together;
  for (i64 i = 0; i < count; ++i) {
    const i64 size = Scratch<T>::layout(problem.make(passes[i], 0, 0), heads_together, nullptr, nullptr);
    scratch_size = size > scratch_size ? size : scratch_size;
  }
  const i64 tasks = whole_jobs / heads_together + split_jobs * parts, workers = threads < tasks ? threads : tasks;
  Memory scratch_memory, state_memory, split_memory;
  char* scratch = scratch_memory.get(workers * scratch_size * i64(sizeof(T)), false);
  char* states = state_memory.get(split_jobs * parts * state_size * i64(sizeof(T)), true);
  Split<T>* splits = (Split<T>*)split_memory.get(split_jobs * i64(sizeof(Split<T>)), false);
  if (!scratch || !states || !splits) return LINTRA_NO_MEMORY;

  auto job = [&](i64 i, Pass* pass, i64* b, i64* g) {
    *pass = passes[i / items];
    *b = i % items / call.g;
    *g = i % call.g;
  };
  auto buffers = [&](const Sweep<T>& s, i64 worker) {
    Scratch<T> r;
    Scratch<T>::layout(s, heads_together, (T*)scratch + worker * scratch_size, &r);
    return r;
  };
  for (i64 i = 0; i < split_jobs; ++i) {
    Pass pass;
    i64 b, g;
    job(whole_jobs + i, &pass, &b, &g);
    const Sweep<T> s = problem.make(pass, b, g);
    const Split<T> split = {problem, pass, b, g, parts, s, Shape::of(s), (T*)states + i * parts * state_size};
    memcpy((void*)(splits + i), &split, sizeof split);
  }
  parallel(launch, workers, tasks, problem.subnormals(), [&](i64 task, i64 worker) {
    if (task < whole_jobs / heads_together) {
      Pass pass;
      i64 b, g;
      job(task * heads_together, &pass, &b, &g);
      Scratch<T> r = buffers(problem.make(pass, b, g), worker);
      problem.sweep_heads(pass, b, g, heads_together, r);
    } else {
      const i64 part = task - whole_jobs / heads_together;
      const Split<T>& split = splits[part / parts];
      Scratch<T> r = buffers(split.s, worker);
      split.first_round(part % parts, r);
    }
  });
  for (i64 i = 0; i < split_jobs; ++i) splits[i].combine();
  parallel(launch, workers, split_jobs * parts, problem.subnormals(), [&](i64 task, i64 worker) {
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
  const i64 padded = round_up(f > e ? f : e, 16);
  const double work = 2.0 * double(items) * double(f) * double(e);
  const i64 workers = worker_count(work, kParallelWork, call.threads, items);
  Memory memory;
  T* rows = (T*)memory.get(workers * 4 * padded * i64(sizeof(T)), false);
  if (!rows) return LINTRA_NO_MEMORY;
  parallel(launch, workers, items, problem.subnormals(), [&](i64 item, i64 worker) {
    const Sweep<T> s = problem.make(kForward, item / call.g, item % call.g);
    T *k = rows + worker * 4 * padded, *v = k + padded, *q = v + padded, *y = q + padded;
    const bool real = s.write_tokens.real(0);
    T decay = 1, input = 1;
    memset(k, 0, size_t(padded) * sizeof(T));
    memset(v, 0, size_t(padded) * sizeof(T));
    if (real) {
      read_token(s.b, 0, k, padded);
      read_token(s.c, 0, v, padded);
      if (s.log_decay) decay = exp<T>(splat(scalar<T>(s.log_decay, 0, 0)))[0];
      if (s.log_input) input = exp<T>(splat(scalar<T>(s.log_input, 0, 0)))[0];
    }
    for (i64 i = 0; i < f; ++i) k[i] *= input;
    T* kv = (T*)call.kv_out + item * f * e;
    T* z = (T*)call.z_out + item * f;
    const T* kv_in = call.kv ? (const T*)call.kv + item * f * e : nullptr;
    const T* z_in = call.z ? (const T*)call.z + item * f : nullptr;
    if (!kv_in) {  // a fresh state: zeros stored first are in the cache when they are read
      memset(kv, 0, size_t(f * e) * sizeof(T));
      kv_in = kv;
    }
    for (i64 i = 0; i < f; ++i) z[i] = (z_in ? z_in[i] * decay : 0) + k[i];
    for (i64 head = 0; head < s.readers; ++head) {
      if (real)
        read_token(s.a, head, q, padded);
      else
        memset(q, 0, size_t(padded) * sizeof(T));
      if (head == 0)
        step_matrix(Step<T>{kv_in, k, v, q, kv, y, f, e, decay});
      else
        read_matrix(kv, q, y, f, e);
      T den = 1;
      if (s.normalize) {
        den = denominator(q, z, f, s.eps);
        divide_row(y, e, den);
      }
      if (!real) memset(y, 0, size_t(e) * sizeof(T));
      memcpy(s.den + head * s.den_head, &den, sizeof den);
      write_row(s.out.data + head * s.out.head, y, e, s.out.dtype);
      if (s.lost) write_lost(s.lost + head * s.out.head, y, e, s.out.dtype);
    }
  });
  return LINTRA_OK;
}

// d log_decay and d log_input from q . dq and k . dk. The gradient of a token's decay is <the state before it, the gradient
// of that state>, which is computed as such at checkpoints and, from there backwards, by adding the terms of tokens.
// In double; but the terms are of float32, and without checkpoints their roundings would add up over the sequence.
template <class T>
void weight_gradients(const Problem<T>& problem, lintra_launch launch) {
  const lintra_call& call = problem.call;
  const i64 size = problem.checkpoint_size();
  const double work = double(call.g) * double(lintra_rows(call)) * double(call.s) * double(call.f);
  const i64 items = call.b * call.g, workers = worker_count(work, kParallelWork, call.threads, items);
  parallel(launch, workers, items, Subnormals::kKept, [&](i64 item, i64) {
    const i64 b = item / call.g, g = item % call.g;
    const i64 first = problem.first_token(b, call.s), dots = problem.first_token(b, g, call.s);
    const T* states = problem.checkpoints(problem.states, b, g);
    const T* gradients = problem.checkpoints(problem.gradients, b, g);
    double total = problem.final_dots ? problem.final_dots[item] : 0;
    for (i64 token = problem.keys(b) - 1; token >= 0; --token) {
      const bool real = problem.mask(b).real(token);
      const double key = problem.key_dots[dots + token];
      const i64 at = (first + token) * call.g + g;
      if (call.dlog_input) ((T*)call.dlog_input)[at] = T(key);
      if (call.dlog_decay) {
        total += problem.query_dots[dots + token] - key;
        if (token % problem.checkpoint_interval == 0) {
          const i64 place = token / problem.checkpoint_interval * size;
          double sums[4] = {};  // one alone would wait for each addition
          for (i64 n = 0; n < size; ++n) sums[n % 4] += double(states[place + n]) * double(gradients[place + n]);
          total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
        ((T*)call.dlog_decay)[at] = real ? T(total) : T(0);
      }
    }
  });
}

template <class T>
int run_backward(const lintra_call& call, lintra_launch launch) {
  const i64 items = call.b * call.g;
  Problem<T> problem = {call, call.g ? call.h / call.g : 1};
  Memory memory, checkpoints;
  const bool wanted = call.dlog_decay || call.dlog_input;
  if (wanted) {
    const i64 rows = lintra_rows(call) * call.g;
    double* dots = (double*)memory.get((rows * (call.t + call.s) + items) * 8, true);
    if (!dots) return LINTRA_NO_MEMORY;
    problem.key_dots = dots;
    if (call.dlog_decay) {
      problem.query_dots = dots + rows * call.s;
      problem.final_dots = problem.query_dots + rows * call.t;
      // States and gradients are f / 4 numbers of T a token: a quarter of float32 keys, half of 16-bit ones.
      problem.checkpoint_interval = round_up(8 * (call.e + 1), kChunk);
      const i64 size = problem.checkpoint_size() * problem.checkpoint_count() * call.g;
      problem.states = (T*)checkpoints.get(2 * size * i64(sizeof(T)), false);
      if (!problem.states) return LINTRA_NO_MEMORY;
      problem.gradients = problem.states + size;
    }
  }
  const Pass passes[] = {kQueryGradient, kKeyGradient, kValueGradient};
  const int status = run(problem, passes, 3, launch);
  if (status == LINTRA_OK && wanted) weight_gradients(problem, launch);
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
