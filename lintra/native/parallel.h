// Tasks over threads, and working memory.
#pragma once
#include <stdlib.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "kernel.h"
#include "vector.h"

namespace lintra {
namespace LINTRA_ISA {

// Memory from malloc: no exception may cross the C interface. Aligned to a cache line.
struct Memory {
  void* raw = nullptr;
  ~Memory() { free(raw); }
  char* get(i64 bytes, bool zero) {
    raw = zero ? calloc(size_t(bytes) + 64, 1) : malloc(size_t(bytes) + 64);
    return raw ? (char*)(((uintptr_t)raw + 63) & ~(uintptr_t)63) : nullptr;
  }
};

// On x86 an operation with a subnormal result takes as long as a hundred others, and what decays, or is far below the
// largest score, comes to such results in the end.
enum class Subnormals { kKept, kFlushed };

// While it lives, results of this thread that would be subnormal are 0, if they are to be flushed.
struct FlushSubnormals {
#if defined(__x86_64__)
  static constexpr unsigned kFlush = 0x8000;
  const unsigned before = _mm_getcsr();
  explicit FlushSubnormals(Subnormals results) {
    if (results == Subnormals::kFlushed) _mm_setcsr(before | kFlush);
  }
  ~FlushSubnormals() { _mm_setcsr((_mm_getcsr() & ~kFlush) | (before & kFlush)); }
#else
  explicit FlushSubnormals(Subnormals) {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
};

// How many of a call's threads share its tasks: one where its work, of any unit, is too little to wake another.
inline i64 worker_count(double work, double least, i64 threads, i64 tasks) {
  return work < least ? 1 : threads < tasks ? threads : tasks;
}

// Runs f(task, worker) for every task below n; a worker takes the next task when it is done with one. The result of a
// task must not depend on the worker.
template <class F>
struct Parallel {
  const F& f;
  i64 n;
  Subnormals results;
  i64 next_task, next_worker;

  static void work(void* context) {
    Parallel& p = *(Parallel*)context;
    const FlushSubnormals flush(p.results);
    const i64 worker = __atomic_fetch_add(&p.next_worker, 1, __ATOMIC_RELAXED);
    for (;;) {
      const i64 task = __atomic_fetch_add(&p.next_task, 1, __ATOMIC_RELAXED);
      if (task >= p.n) return;
      p.f(task, worker);
    }
  }
};
template <class F>
void parallel(lintra_launch launch, i64 threads, i64 n, Subnormals results, const F& f) {
  Parallel<F> p{f, n, results, 0, 0};
  if (threads > n) threads = n;
  if (threads <= 1)
    Parallel<F>::work(&p);
  else
    launch(Parallel<F>::work, &p, threads);
}

}  // namespace LINTRA_ISA
}  // namespace lintra
