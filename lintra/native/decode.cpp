// One token of a whole decoder. Its phases follow each other without going back to Python: threads take shares of a phase
// as they come and wait for the last share of it. Compiled once per instruction set, as kernel.cpp is.
#include <sched.h>

#include "kernel.h"
#include "parallel.h"
#include "product.h"
#include "step.h"

LINTRA_DECLARE(LINTRA_ISA)

namespace lintra {
namespace LINTRA_ISA {

// Below about this many multiply-adds waking another thread costs more than it saves.
constexpr i64 kWorthThreads = 1 << 17;
constexpr i64 kShares = 4;  // of a phase, for each thread: one that comes late leaves its own to the others
constexpr i64 kSpins = 2000;  // about the length of a phase; then the core may be needed by whom one waits for
constexpr i64 kPhases = 7;    // of a layer, and at most three around them

LINTRA_INLINE void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The counters of one phase. Nothing depends on how many threads there are, or whether one of them ever comes.
struct Phase {
  alignas(64) i64 taken;
  alignas(64) i64 done;

  template <class F>
  void run(i64 n, i64 share, const F& task) {
    for (;;) {
      const i64 from = __atomic_fetch_add(&taken, share, __ATOMIC_RELAXED);
      if (from >= n) break;
      const i64 to = from + share < n ? from + share : n;
      for (i64 i = from; i < to; ++i) task(i);
      __atomic_fetch_add(&done, to - from, __ATOMIC_RELEASE);
    }
    for (i64 spins = 0; __atomic_load_n(&done, __ATOMIC_ACQUIRE) < n; ++spins)
      if (spins < kSpins)
        relax();
      else
        sched_yield();
  }
};

// Rows of whole panels, which the products fill. A power of two between rows would put them all into one set of the cache.
struct Rows {
  float* data;
  i64 step;

  float* row(i64 i) const { return data + i * step; }
  static i64 step_of(i64 width) { return round_up(width, kOutputs) + 16; }
};

struct Decoding {
  const lintra_decoder& call;
  i64 threads;
  Rows x, normed, qkv, heads, hidden;
  float* scratch;  // of each thread: k, v, q, y of one head
  i64 scratch_size;
  Phase* phases;
  i64 next_worker;

  static i64 wide(const lintra_decoder& call) { return round_up(call.d, 16); }

  static void work(void* context) {
    Decoding& all = *(Decoding*)context;
    const i64 worker = __atomic_fetch_add(&all.next_worker, 1, __ATOMIC_RELAXED);
    all.token(all.scratch + worker * all.scratch_size);
  }

  template <class F>
  void phase(Phase*& at, i64 n, const F& task) const {
    const i64 share = n / (threads * kShares);
    at++->run(n, share > 1 ? share : 1, task);
  }

  void token(float* own) const {
    Phase* at = phases;
    phase(at, call.b, [&](i64 b) { enter(b); });
    for (i64 i = 0; i < call.layers; ++i) layer(call.layer[i], at, own);
    if (call.norm.weight) phase(at, call.b, [&](i64 b) { norm(call.norm, x.row(b), normed.row(b)); });
    const Rows out = {call.params, round_up(call.head.outputs, kOutputs)};
    product(at, call.head, call.norm.weight ? normed : x, out, keep);
  }

  void layer(const lintra_layer& layer, Phase*& at, float* own) const {
    const Rows& seen = call.norm_first ? normed : x;
    auto norms = [&](const lintra_norm& which) {
      phase(at, call.b, [&](i64 b) { norm(which, x.row(b), seen.row(b)); });
    };
    if (call.norm_first) norms(layer.norm_mix);
    product(at, layer.inward, seen, qkv, keep);
    phase(at, call.b * call.g, [&](i64 item) { attend(layer, item / call.g, item % call.g, own); });
    product(at, layer.outward, heads, x, add);
    norms(call.norm_first ? layer.norm_feed : layer.norm_mix);
    if (call.gated)
      gated_product(at, layer.up, seen, hidden);
    else
      product(at, layer.up, seen, hidden, [](float* to, Vec<float> y) { store(to, gelu(y)); });
    product(at, layer.down, hidden, x, add);
    if (!call.norm_first) norms(layer.norm_feed);
  }

  static LINTRA_INLINE void keep(float* to, Vec<float> y) { store(to, y); }
  static LINTRA_INLINE void add(float* to, Vec<float> y) { store(to, load(to) + y); }

  void enter(i64 b) const {
    float* row = x.row(b);
    memset(row, 0, size_t(round_up(call.c, kOutputs)) * sizeof(float));
    memcpy(row, call.x + b * call.c, size_t(call.c) * sizeof(float));
  }

  // Beyond its width a row is 0, and so is the norm's weight.
  void norm(const lintra_norm& norm, const float* from, float* to) const {
    constexpr i64 W = kLanes<float>;
    const i64 n = call.c, whole = round_up(n, W);
    Vec<float> total{};
    for (i64 i = 0; norm.bias && i < whole; i += W) total += load(from + i);
    const float mean = sum<float>(total) / float(n);
    Vec<float> squares{};
    for (i64 i = 0; i < whole; i += W) {
      const Vec<float> off = select<float>(iota<float>() < int32_t(n - i), load(from + i) - mean, Vec<float>{});
      squares += off * off;
    }
    const float scale = 1 / __builtin_sqrtf(sum<float>(squares) / float(n) + float(call.norm_eps));
    for (i64 i = 0; i < round_up(n, kOutputs); i += W) {
      const Vec<float> y = (load(from + i) - mean) * scale * load(norm.weight + i);
      store(to + i, norm.bias ? y + load(norm.bias + i) : y);
    }
  }

  // Tiles of about as many rows each.
  template <class F>
  void each_tile(const F& f) const {
    const i64 tiles = (call.b + kTileRows - 1) / kTileRows;
    for (i64 i = 0; i < tiles; ++i) {
      const i64 from = call.b * i / tiles;
      f(from, call.b * (i + 1) / tiles - from);
    }
  }

  // write(place, values) for a panel of outputs of each row.
  template <class F>
  void product(Phase*& at, const lintra_map& map, const Rows& from, const Rows& to, const F& write) const {
    phase(at, round_up(map.outputs, kOutputs) / kOutputs, [&](i64 panel) {
      alignas(64) float y[kTileRows * kOutputs];
      each_tile([&](i64 first, i64 rows) {
        apply_panel(map, call.dtype, panel, from.row(first), from.step, rows, y);
        for (i64 r = 0; r < rows; ++r)
          for (i64 n = 0; n < kOutputs; n += kLanes<float>)
            write(to.row(first + r) + panel * kOutputs + n, load(y + r * kOutputs + n));
      });
    });
  }

  void gated_product(Phase*& at, const lintra_map& map, const Rows& from, const Rows& to) const {
    phase(at, round_up(map.outputs, kOutputs) / kOutputs / 2, [&](i64 pair) {
      alignas(64) float gate[kTileRows * kOutputs], y[kTileRows * kOutputs];
      each_tile([&](i64 first, i64 rows) {
        apply_panel(map, call.dtype, 2 * pair, from.row(first), from.step, rows, gate);
        apply_panel(map, call.dtype, 2 * pair + 1, from.row(first), from.step, rows, y);
        for (i64 r = 0; r < rows; ++r)
          for (i64 n = 0; n < kOutputs; n += kLanes<float>)
            store(to.row(first + r) + pair * kOutputs + n,
                  silu(load(gate + r * kOutputs + n)) * load(y + r * kOutputs + n));
      });
    });
  }

  // The state of one key head, and what its query heads read.
  void attend(const lintra_layer& layer, i64 b, i64 g, float* own) const {
    const i64 d = call.d, group = call.h / call.g, item = b * call.g + g;
    float *k = own, *v = k + wide(call), *q = v + wide(call), *y = q + wide(call);
    const float *queries = qkv.row(b), *keys = queries + call.h * d, *values = keys + call.g * d;
    float *kv = layer.kv + item * d * d, *z = layer.z + item * d;
    read(keys + g * d, k, call.feature_map);
    read(values + g * d, v, LINTRA_IDENTITY);
    for (i64 i = 0; i < d; ++i) z[i] += k[i];
    for (i64 head = g * group; head < (g + 1) * group; ++head) {
      read(queries + head * d, q, call.feature_map);
      if (head == g * group)
        step_matrix(Step<float>{kv, k, v, q, kv, y, d, d, 1.0f});
      else
        read_matrix(kv, q, y, d, d);
      if (call.normalize) divide_row(y, d, sum_of_weights(q, z, d, float(call.eps)));
      memcpy(heads.row(b) + head * d, y, size_t(d) * sizeof(float));
    }
  }
  void read(const float* from, float* to, i64 map) const {
    memcpy(to, from, size_t(call.d) * sizeof(float));
    apply_feature_map(to, call.d, map);
  }
};

int decode(const lintra_decoder& call, lintra_launch launch) {
  if (call.b == 0) return LINTRA_OK;
  const i64 attended = (call.h + 2 * call.g) * call.d, mixed = call.h * call.d;
  const double layer = double(call.c) * double(attended + mixed + (2 + call.gated) * call.hidden);
  const double work = double(call.b) * double(call.layers) * layer;
  const i64 threads = work < kWorthThreads ? 1 : call.threads, phases = kPhases * call.layers + 3;
  const i64 widths[] = {call.c, call.c, attended, mixed, call.hidden};
  i64 size = 0;
  for (i64 width : widths) size += call.b * Rows::step_of(width);
  const i64 scratch_size = 4 * Decoding::wide(call) + 16;
  Memory memory, counters;
  // Zeros: what stands beyond a row's width meets weights of 0, and must not be NaN.
  float* rows = (float*)memory.get((size + threads * scratch_size) * i64(sizeof(float)), true);
  Phase* phase = (Phase*)counters.get(phases * i64(sizeof(Phase)), true);
  if (!rows || !phase) return LINTRA_NO_MEMORY;
  auto next = [&](i64 width) {
    const Rows found = {rows, Rows::step_of(width)};
    rows += call.b * found.step;
    return found;
  };
  Decoding all = {call,           threads,          next(call.c),      next(call.c), next(attended),
                  next(mixed),    next(call.hidden), nullptr,           scratch_size, phase,
                  0};
  all.scratch = rows;
  if (threads == 1)
    Decoding::work(&all);
  else
    launch(Decoding::work, &all, threads);
  return LINTRA_OK;
}

}  // namespace LINTRA_ISA
}  // namespace lintra
