// The exported functions: they choose the instruction set and start threads. Compiled for the oldest processor, since
// it runs before anything is known about this one.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernel.h"

#define LINTRA_EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__)
LINTRA_DECLARE(baseline)
LINTRA_DECLARE(avx2)
LINTRA_DECLARE(avx512)
#elif defined(__aarch64__)
LINTRA_DECLARE(neon)
#else
LINTRA_DECLARE(baseline)
#endif

namespace {

typedef int (*Kernel)(const lintra_call&, lintra_launch);
typedef int (*Conv1dKernel)(const lintra_conv1d&, bool, lintra_launch);
typedef int (*Conv1dStepKernel)(const lintra_conv1d_step&, lintra_launch);
typedef int (*RecurrenceKernel)(const lintra_recurrence&, lintra_launch);
typedef int (*ScanKernel)(const lintra_scan&, lintra_launch);
typedef int (*SoftmaxKernel)(const lintra_softmax&, lintra_launch);
struct Kernels {
  Kernel forward, backward;
  RecurrenceKernel recurrence_forward, recurrence_backward;
  Conv1dKernel conv1d;
  Conv1dStepKernel conv1d_step;
  ScanKernel scan_forward, scan_backward;
  SoftmaxKernel softmax_forward, softmax_backward;
  int (*decode)(const lintra_decoder&, lintra_launch);
};
#define LINTRA_KERNELS(isa)                                                                          \
  {lintra::isa::forward, lintra::isa::backward, lintra::isa::recurrence_forward, lintra::isa::recurrence_backward, \
   lintra::isa::conv1d, lintra::isa::conv1d_step, lintra::isa::scan_forward, lintra::isa::scan_backward, lintra::isa::softmax_forward, \
   lintra::isa::softmax_backward, lintra::isa::decode}

#if defined(__x86_64__)
// Of the runtime's build for AVX2; not all compilers' __builtin_cpu_supports knows its name.
bool has_f16c() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// The build for an instruction set, empty where this library or this processor lacks it.
Kernels kernels(i64 isa) {
#if defined(__x86_64__)
  switch (isa) {
    case LINTRA_BASELINE: return LINTRA_KERNELS(baseline);
    case LINTRA_AVX2:
      // Asked once: the instruction is trapped where the machine is a virtual one.
      static const bool f16c = has_f16c();
      if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c) return LINTRA_KERNELS(avx2);
      break;
    case LINTRA_AVX512:
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return LINTRA_KERNELS(avx512);
      break;
  }
#elif defined(__aarch64__)
  if (isa == LINTRA_NEON) return LINTRA_KERNELS(neon);
#else
  if (isa == LINTRA_BASELINE) return LINTRA_KERNELS(baseline);
#endif
  return {};
}

// In a compiled graph nothing else checks these values.
template <class Call>
bool valid_cu_seqlens(const Call& c) {
  if (!c.cu_seqlens) return true;
  if (c.b < 0 || c.mask.data || c.cu_seqlens[0] != 0 || c.cu_seqlens[c.b] != c.t) return false;
  for (i64 i = 0; i < c.b; ++i)
    if (c.cu_seqlens[i] > c.cu_seqlens[i + 1]) return false;
  return true;
}

// The loader's caller has checked all this with messages; here it only keeps a mistake from reaching memory.
bool plausible(const lintra_call& c) {
  const bool sizes = c.b >= 0 && c.t >= 0 && c.s >= 0 && c.g > 0 && c.h > 0 && c.f > 0 && c.e > 0 && c.h % c.g == 0;
  const bool dtype = c.dtype >= LINTRA_FLOAT32 && c.dtype <= LINTRA_FLOAT16;
  const bool square = c.t == c.s || !(c.causal || c.cu_seqlens);
  return sizes && dtype && square && c.threads > 0 && (c.causal || !c.log_decay.data) && valid_cu_seqlens(c);
}

bool plausible(const lintra_recurrence& c) {
  const bool sizes = c.b >= 0 && c.t >= 0 && c.g > 0 && c.f > 0 && c.e > 0 && c.parts > 0 && c.query_heads > 0 &&
                     c.key_heads > 0 && c.value_heads > 0;
  if (!sizes || c.h % c.g || c.h % c.query_heads || c.g % c.key_heads || c.g % c.value_heads) return false;
  const bool dtype = c.dtype >= LINTRA_FLOAT32 && c.dtype <= LINTRA_FLOAT16;
  return dtype && c.threads > 0 && c.interval >= 16 && c.interval % 16 == 0 && valid_cu_seqlens(c);
}

bool plausible(const lintra_conv1d& c) {
  const bool sizes = c.b >= 0 && c.t >= 0 && c.c >= 0 && c.width > 0 && c.groups >= 0 && c.groups <= c.b;
  const bool dtype = c.dtype >= LINTRA_FLOAT32 && c.dtype <= LINTRA_FLOAT16;
  return sizes && dtype && c.threads > 0 && valid_cu_seqlens(c);
}

bool plausible(const lintra_conv1d_step& c) {
  const bool sizes = c.b >= 0 && c.t >= 0 && c.c >= 0 && c.width > 0 && c.length > 0 && c.length >= c.width - 1;
  return sizes && c.dtype >= LINTRA_FLOAT32 && c.dtype <= LINTRA_FLOAT16 && c.threads > 0;
}

// Whether a tensor [b t c] is laid out as the scan reads it.
bool scannable(const lintra_tensor& x, i64 t) { return !x.data || x.h == 1 || (x.t == 1 && t > 1); }

bool plausible(const lintra_scan& c) {
  const bool sizes = c.b >= 0 && c.t >= 0 && c.c > 0 && c.g > 0 && c.n > 0 && c.c % c.g == 0;
  const bool dtype = c.dtype >= LINTRA_FLOAT32 && c.dtype <= LINTRA_FLOAT16;
  if (!sizes || !dtype || c.threads <= 0 || c.interval < 16 || c.interval % 16) return false;
  if (c.tied && (c.t != 1 || c.cu_seqlens || c.checkpoints)) return false;
  const lintra_tensor tensors[] = {c.u, c.dt, c.z, c.y, c.dy, c.du, c.ddt, c.dz};
  for (const lintra_tensor& x : tensors)
    if (!scannable(x, c.t)) return false;
  return valid_cu_seqlens(c);
}

bool valid_lists(const lintra_softmax& c) {
  if (c.t % c.unit || c.s % c.unit || (c.entries && c.b && c.t && !(c.blocks.data && c.listed.data))) return false;
  const i64 n = c.t / c.unit, m = c.s / c.unit;
  for (i64 row = 0; row < c.b; ++row)
    for (i64 block = 0; block < n; ++block) {
      const i64* own = (const i64*)c.own.data;
      if (own && (own += row * c.own.b + block * c.own.t, *own < 0 || *own >= m)) return false;
      for (i64 head = 0; head < c.g; ++head) {
        const i64* list = (const i64*)c.blocks.data + row * c.blocks.b + block * c.blocks.t + head * c.blocks.h;
        for (i64 i = 0; i < c.entries; ++i)
          if (list[i] < 0 || list[i] >= m) return false;
      }
    }
  return true;
}

bool valid_order(const lintra_softmax& c) {
  if (c.t != c.s || c.h != c.g || c.rounds < 1 || c.rounds > 16 || !(c.token && c.place && c.bucket)) return false;
  const i64 n = (c.t + c.unit - 1) / c.unit * c.unit;
  for (i64 i = 0; i < c.b * c.h * c.rounds; ++i) {
    const char* visible = c.visible.data ? c.visible.data + i / (c.h * c.rounds) * c.visible.b : nullptr;
    i64 real = 0;
    for (i64 j = 0; j < c.t; ++j) real += !visible || visible[j * c.visible.t];
    for (i64 j = 0; j < real; ++j)
      if (c.token[i * n + j] < 0 || c.token[i * n + j] >= c.t) return false;
  }
  return true;
}

bool plausible(const lintra_softmax& c) {
  const i64 most = i64(1) << 30;  // places are numbers of 32 bits in float32's lanes
  const bool sizes = c.b >= 0 && c.t >= 0 && c.s >= 0 && c.g > 0 && c.h > 0 && c.h % c.g == 0 && c.d > 0 && c.e > 0;
  const bool reach = c.before >= 0 && c.after >= 0 && c.dilation > 0 && c.unit > 0 && c.entries >= 0 && c.s < most &&
                     c.h < most && c.unit < most && c.before < most && c.after < most;
  const bool dtype = c.dtype >= LINTRA_FLOAT32 && c.dtype <= LINTRA_FLOAT16;
  if (!sizes || !reach || !dtype || c.threads <= 0) return false;
  if (c.kind == LINTRA_BAND) return c.t <= c.s;
  if (c.dilation != 1) return false;
  if (c.kind == LINTRA_SORTED) return valid_order(c);
  return c.kind == LINTRA_SEGMENTS ? c.t == c.s || c.t <= c.unit : c.kind == LINTRA_BLOCKS && valid_lists(c);
}

bool plausible(const lintra_decoder& c) {
  const bool sizes = c.b >= 0 && c.layers >= 0 && c.c > 0 && c.g > 0 && c.h > 0 && c.d > 0 && c.hidden > 0 && c.h % c.g == 0;
  const bool dtype = c.dtype == LINTRA_FLOAT32 || c.dtype == LINTRA_BFLOAT16 || c.dtype == LINTRA_INT8;
  return sizes && dtype && c.threads > 0;
}

// Threads. OpenMP workers spin for a while after each of PyTorch's parallel regions and would compete with threads of
// our own for the cores, so its team is used when the loader has found it.
typedef void (*OpenMP)(void (*)(void*), void*, unsigned, unsigned);
OpenMP openmp = nullptr;
pid_t openmp_process = 0;

void launch_openmp(void (*work)(void*), void* context, i64 threads) { openmp(work, context, unsigned(threads), 0); }

struct ThreadStart {
  void (*work)(void*);
  void* context;
};
void* thread_main(void* start) {
  ((ThreadStart*)start)->work(((ThreadStart*)start)->context);
  return nullptr;
}

// Threads created for one call. Where the system refuses more, the existing ones do all the work.
void launch_threads(void (*work)(void*), void* context, i64 threads) {
  ThreadStart start = {work, context};
  pthread_t* others = (pthread_t*)malloc(size_t(threads) * sizeof(pthread_t));
  i64 started = 0;
  while (others && started < threads - 1 && pthread_create(&others[started], nullptr, thread_main, &start) == 0)
    ++started;
  work(context);
  for (i64 i = 0; i < started; ++i) pthread_join(others[i], nullptr);
  free(others);
}

lintra_launch launcher() {
  // A forked child inherits the team's records but not its threads: waking them would wait for ever.
  return openmp && getpid() == openmp_process ? launch_openmp : launch_threads;
}

// Fresh memory costs a page fault per 4 KB, a tenth to a quarter of the time of a long sequence; pages of 2 MB make that
// negligible. Not for small tensors: the advice outlives them, for whatever the allocator puts there next.
void prefer_huge_pages(void* data, i64 elements, i64 dtype) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t huge = uintptr_t(1) << 21, size = dtype == LINTRA_FLOAT64 ? 8 : dtype == LINTRA_FLOAT32 ? 4 : 2;
  const uintptr_t bytes = uintptr_t(elements) * size;
  const uintptr_t from = ((uintptr_t)data + huge - 1) & ~(huge - 1), to = ((uintptr_t)data + bytes) & ~(huge - 1);
  if (bytes >= 2 * huge) madvise((void*)from, to - from, MADV_HUGEPAGE);
#endif
}

}  // namespace

LINTRA_EXPORT i64 lintra_abi(void) { return LINTRA_ABI; }
LINTRA_EXPORT i64 lintra_call_size(void) { return sizeof(lintra_call); }
LINTRA_EXPORT i64 lintra_recurrence_size(void) { return sizeof(lintra_recurrence); }
LINTRA_EXPORT i64 lintra_conv1d_size(void) { return sizeof(lintra_conv1d); }
LINTRA_EXPORT i64 lintra_conv1d_step_size(void) { return sizeof(lintra_conv1d_step); }
LINTRA_EXPORT i64 lintra_scan_size(void) { return sizeof(lintra_scan); }
LINTRA_EXPORT i64 lintra_softmax_size(void) { return sizeof(lintra_softmax); }
LINTRA_EXPORT i64 lintra_decoder_size(void) { return sizeof(lintra_decoder); }
LINTRA_EXPORT i64 lintra_layer_size(void) { return sizeof(lintra_layer); }
LINTRA_EXPORT i64 lintra_usable(i64 isa) { return kernels(isa).forward != nullptr; }

// The address of GOMP_parallel, or 0 for threads of the library's own.
LINTRA_EXPORT void lintra_use_openmp(void* gomp_parallel) {
  openmp = (OpenMP)gomp_parallel;
  openmp_process = getpid();
}

LINTRA_EXPORT int lintra_forward(const lintra_call* call) {
  const Kernel kernel = kernels(call->isa).forward;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  prefer_huge_pages(call->y, lintra_rows(*call) * call->t * call->h * call->e, call->dtype);
  return kernel(*call, launcher());
}
LINTRA_EXPORT int lintra_backward(const lintra_call* call) {
  const Kernel kernel = kernels(call->isa).backward;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  prefer_huge_pages(call->dq, lintra_rows(*call) * call->t * call->h * call->f, call->dtype);
  prefer_huge_pages(call->dk, lintra_rows(*call) * call->s * call->g * call->f, call->dtype);
  prefer_huge_pages(call->dv, lintra_rows(*call) * call->s * call->g * call->e, call->dtype);
  return kernel(*call, launcher());
}
LINTRA_EXPORT int lintra_recurrence_forward(const lintra_recurrence* call) {
  const RecurrenceKernel kernel = kernels(call->isa).recurrence_forward;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  prefer_huge_pages(call->y, lintra_rows(*call) * call->t * call->h * call->e, call->dtype);
  return kernel(*call, launcher());
}
LINTRA_EXPORT int lintra_recurrence_backward(const lintra_recurrence* call) {
  const RecurrenceKernel kernel = kernels(call->isa).recurrence_backward;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  const i64 tokens = lintra_rows(*call) * call->t, dtype = call->dtype == LINTRA_FLOAT64 ? LINTRA_FLOAT64 : LINTRA_FLOAT32;
  prefer_huge_pages(call->dq, call->parts * tokens * call->h * call->f, dtype);
  prefer_huge_pages(call->dk, call->parts * tokens * call->g * call->f, dtype);
  prefer_huge_pages(call->dv, tokens * call->g * call->e, dtype);
  return kernel(*call, launcher());
}
LINTRA_EXPORT int lintra_conv1d_forward(const lintra_conv1d* call) {
  const Conv1dKernel kernel = kernels(call->isa).conv1d;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  prefer_huge_pages(call->y, lintra_rows(*call) * call->t * call->c, call->dtype);
  return kernel(*call, false, launcher());
}
LINTRA_EXPORT int lintra_conv1d_backward(const lintra_conv1d* call) {
  const Conv1dKernel kernel = kernels(call->isa).conv1d;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  prefer_huge_pages(call->dx, lintra_rows(*call) * call->t * call->c, call->dtype);
  return kernel(*call, true, launcher());
}
LINTRA_EXPORT int lintra_conv1d_step_forward(const lintra_conv1d_step* call) {
  const Conv1dStepKernel kernel = kernels(call->isa).conv1d_step;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  return kernel(*call, launcher());
}
LINTRA_EXPORT int lintra_scan_forward(const lintra_scan* call) {
  const ScanKernel kernel = kernels(call->isa).scan_forward;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  prefer_huge_pages(call->y.data, lintra_rows(*call) * call->t * call->c, call->dtype);
  return kernel(*call, launcher());
}
LINTRA_EXPORT int lintra_scan_backward(const lintra_scan* call) {
  const ScanKernel kernel = kernels(call->isa).scan_backward;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  const lintra_tensor gradients[] = {call->du, call->ddt, call->dz};
  for (const lintra_tensor& x : gradients)
    prefer_huge_pages(x.data, x.data ? lintra_rows(*call) * call->t * call->c : 0, call->dtype);
  return kernel(*call, launcher());
}
LINTRA_EXPORT int lintra_softmax_forward(const lintra_softmax* call) {
  const SoftmaxKernel kernel = kernels(call->isa).softmax_forward;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  const i64 dtype = call->dtype == LINTRA_FLOAT64 ? LINTRA_FLOAT64 : LINTRA_FLOAT32;
  prefer_huge_pages(call->o, call->b * call->t * call->h * call->e, dtype);
  return kernel(*call, launcher());
}
LINTRA_EXPORT int lintra_softmax_backward(const lintra_softmax* call) {
  const SoftmaxKernel kernel = kernels(call->isa).softmax_backward;
  if (!kernel || !plausible(*call)) return LINTRA_BAD_CALL;
  prefer_huge_pages(call->dq, call->b * call->t * call->h * call->d, call->dtype);
  prefer_huge_pages(call->dk, call->b * call->s * call->g * call->d, call->dtype);
  prefer_huge_pages(call->dv, call->b * call->s * call->g * call->e, call->dtype);
  return kernel(*call, launcher());
}
LINTRA_EXPORT int lintra_decode(const lintra_decoder* call) {
  const auto decode = kernels(call->isa).decode;
  return decode && plausible(*call) ? decode(*call, launcher()) : LINTRA_BAD_CALL;
}
