// Decoding of one token. Its phases follow each other without going back to Python: threads take shares of a phase as
// they come and wait for its last share. Compiled once per instruction set, as linear_attention.cpp is.
#include <sched.h>

#include "kernel.h"
#include "parallel.h"
#include "product.h"
#include "step.h"

LINTRA_DECLARE(LINTRA_ISA)

namespace lintra {
namespace LINTRA_ISA {

// Below about this many multiply-adds waking another thread costs more than it saves.
constexpr i64 kMinParallelWork = 1 << 17;
constexpr i64 kSharesPerWorker = 4;  // of a worker's part of a phase: the others take those of a late worker
constexpr i64 kSpins = 2000;  // about the length of a phase; then another worker may need the core
constexpr i64 kPhases = 7;    // of a layer, and at most two after the last

LINTRA_INLINE void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A worker's part of one phase, in a cache line of its own: passing a line from core to core takes as long as a share.
struct alignas(64) Part {
  i64 taken;  // of its tasks, by any worker
  i64 done;   // of all tasks, by this worker; written once
};

// Every worker takes shares of its own part, then of the others'. Nothing depends on how many workers there are, or
// whether one of them ever comes: only what was taken is waited for.
template <class F>
void run_phase(Part* parts, i64 workers, i64 worker, i64 n, const F& task) {
  auto first = [&](i64 part) { return (n * part + workers - 1) / workers; };
  const i64 wanted = n / (workers * kSharesPerWorker), share = wanted > 1 ? wanted : 1;
  i64 done = 0;
  for (i64 i = 0; i < workers; ++i) {
    const i64 part = (worker + i) % workers, begin = first(part), size = first(part + 1) - begin;
    while (__atomic_load_n(&parts[part].taken, __ATOMIC_RELAXED) < size) {
      const i64 from = __atomic_fetch_add(&parts[part].taken, share, __ATOMIC_RELAXED);
      const i64 to = from + share < size ? from + share : size;
      for (i64 at = from; at < to; ++at, ++done) task(begin + at);
    }
  }
  __atomic_store_n(&parts[worker].done, done, __ATOMIC_RELEASE);
  for (i64 other = 0, spins = 0; done < n; ++spins) {
    for (done = 0, other = 0; other < workers; ++other) done += __atomic_load_n(&parts[other].done, __ATOMIC_ACQUIRE);
    if (spins < kSpins)
      relax();
    else
      sched_yield();
  }
}

// Rows padded to whole panels, which the products fill. A power of two as stride would put them all into one cache set.
struct Rows {
  float* data;
  i64 step;

  float* row(i64 i) const { return data + i * step; }
  static i64 row_stride(i64 width) { return round_up(width, kOutputs) + 16; }
};

// The view of one thread: all but the last three members are the same in every thread.
struct Worker {
  const lintra_decoder& call;
  i64 threads;
  Rows x, normed, qkv, heads, hidden;
  i64 index;
  float* scratch;    // k, v, q, y of one head
  Part* next_phase;  // [threads]

  static i64 padded_dim(const lintra_decoder& call) { return round_up(call.d, 16); }

  template <class F>
  void phase(i64 n, const F& task) {
    run_phase(next_phase, threads, index, n, task);
    next_phase += threads;
  }

  void decode_token() {
    for (i64 i = 0; i < call.layers; ++i) run_layer(call.layer[i]);
    if (call.norm.weight) phase(call.b, [&](i64 b) { norm(call.norm, x.row(b), normed.row(b)); });
    const Rows out = {call.params, round_up(call.head.outputs, kOutputs)};
    product(call.head, call.norm.weight ? normed : x, out, assign);
  }

  void run_layer(const lintra_layer& layer) {
    const Rows& input = call.norm_first ? normed : x;
    auto norms = [&](const lintra_norm& which) {
      phase(call.b, [&](i64 b) { norm(which, x.row(b), input.row(b)); });
    };
    if (call.norm_first) norms(layer.attn_norm);
    product(layer.qkv_proj, input, qkv, assign);
    phase(call.b * call.g, [&](i64 item) { attend(layer, item / call.g, item % call.g); });
    product(layer.out_proj, heads, x, accumulate);
    norms(call.norm_first ? layer.mlp_norm : layer.attn_norm);
    if (call.activation == LINTRA_MLP_SWIGLU)
      gated_product(layer.up, input, hidden);
    else if (call.activation == LINTRA_MLP_GELU)
      product(layer.up, input, hidden, [](float* to, Vec<float> y) { store(to, gelu(y)); });
    else
      product(layer.up, input, hidden, [](float* to, Vec<float> y) { store(to, relu(y)); });
    product(layer.down, hidden, x, accumulate);
    if (!call.norm_first) norms(layer.mlp_norm);
  }

  static LINTRA_INLINE void assign(float* to, Vec<float> y) { store(to, y); }
  static LINTRA_INLINE void accumulate(float* to, Vec<float> y) { store(to, load(to) + y); }

  // Beyond its width a row is 0, and so is the norm's weight.
  void norm(const lintra_norm& norm, const float* from, float* to) const {
    constexpr i64 W = kLanes<float>;
    const i64 n = call.c, padded = round_up(n, W);
    Vec<float> total{};
    for (i64 i = 0; norm.bias && i < padded; i += W) total += load(from + i);
    const float mean = sum<float>(total) / float(n);
    Vec<float> squares{};
    for (i64 i = 0; i < padded; i += W) {
      const Vec<float> off = select<float>(iota<float>() < int32_t(n - i), load(from + i) - mean, Vec<float>{});
      squares += off * off;
    }
    const float scale = 1 / __builtin_sqrtf(sum<float>(squares) / float(n) + float(call.norm_eps));
    for (i64 i = 0; i < round_up(n, kOutputs); i += W) {
      const Vec<float> y = (load(from + i) - mean) * scale * load(norm.weight + i);
      store(to + i, norm.bias ? y + load(norm.bias + i) : y);
    }
  }

  // Calls f(first, rows) for tiles of nearly equal size.
  template <class F>
  void each_tile(const F& f) const {
    const i64 tiles = (call.b + kTileRows - 1) / kTileRows;
    for (i64 i = 0; i < tiles; ++i) {
      const i64 from = call.b * i / tiles;
      f(from, call.b * (i + 1) / tiles - from);
    }
  }

  // Calls write(to, values) for a panel of outputs of each row.
  template <class F>
  void product(const lintra_map& map, const Rows& from, const Rows& to, const F& write) {
    phase(round_up(map.outputs, kOutputs) / kOutputs, [&](i64 panel) {
      alignas(64) float y[kTileRows * kOutputs];
      each_tile([&](i64 first, i64 rows) {
        apply_panel(map, call.dtype, panel, from.row(first), from.step, rows, y);
        for (i64 r = 0; r < rows; ++r)
          for (i64 n = 0; n < kOutputs; n += kLanes<float>)
            write(to.row(first + r) + panel * kOutputs + n, load(y + r * kOutputs + n));
      });
    });
  }

  void gated_product(const lintra_map& map, const Rows& from, const Rows& to) {
    phase(round_up(map.outputs, kOutputs) / kOutputs / 2, [&](i64 pair) {
      alignas(64) float gate[kTileRows * kOutputs], y[kTileRows * kOutputs];
      each_tile([&](i64 first, i64 rows) {
        apply_panel(map, call.dtype, 2 * pair, from.row(first), from.step, rows, gate);
        apply_panel(map, call.dtype, 2 * pair + 1, from.row(first), from.step, rows, y);
        for (i64 r = 0; r < rows; ++r)
          for (i64 n = 0; n < kOutputs; n += kLanes<float>)
            store(to.row(first + r) + pair * kOutputs + n,
                  silu<float>(load(gate + r * kOutputs + n)) * load(y + r * kOutputs + n));
      });
    });
  }

  // Updates the state of one key-value head and computes the output of its query heads.
  void attend(const lintra_layer& layer, i64 b, i64 g) const {
    const i64 d = call.d, group = call.h / call.g, item = b * call.g + g;
    float *k = scratch, *v = k + padded_dim(call), *q = v + padded_dim(call), *y = q + padded_dim(call);
    const float *queries = qkv.row(b), *keys = queries + call.h * d, *values = keys + call.g * d;
    float *kv = layer.kv + item * d * d, *z = layer.z + item * d;
    load_features(keys + g * d, k, call.feature_map);
    load_features(values + g * d, v, LINTRA_IDENTITY);
    for (i64 i = 0; i < d; ++i) z[i] += k[i];
    for (i64 head = g * group; head < (g + 1) * group; ++head) {
      load_features(queries + head * d, q, call.feature_map);
      if (head == g * group)
        step_matrix(Step<float>{kv, k, v, q, kv, y, d, d, 1.0f});
      else
        read_matrix(kv, q, y, d, d);
      if (call.normalize) divide_row(y, d, denominator(q, z, d, float(call.eps)));
      memcpy(heads.row(b) + head * d, y, size_t(d) * sizeof(float));
    }
  }
  void load_features(const float* from, float* to, i64 map) const {
    memcpy(to, from, size_t(call.d) * sizeof(float));
    apply_feature_map(to, call.d, map);
  }
};

struct Team {
  const Worker& prototype;
  i64 joined;
  float* scratch;
  i64 scratch_size;

  static void work(void* context) {
    Team& team = *(Team*)context;
    Worker worker = team.prototype;
    worker.index = __atomic_fetch_add(&team.joined, 1, __ATOMIC_RELAXED);
    worker.scratch = team.scratch + worker.index * team.scratch_size;
    worker.decode_token();
  }
};

int decode(const lintra_decoder& call, lintra_launch launch) {
  if (call.b == 0) return LINTRA_OK;
  const i64 qkv_width = (call.h + 2 * call.g) * call.d, heads_width = call.h * call.d;
  const i64 maps = call.activation == LINTRA_MLP_SWIGLU ? 3 : 2;  // of the MLP
  const double layer = double(call.c) * double(qkv_width + heads_width + maps * call.hidden);
  const double work = double(call.b) * (double(call.layers) * layer + double(call.c) * double(call.head.outputs));
  const i64 threads = work < kMinParallelWork ? 1 : call.threads, parts = (kPhases * call.layers + 2) * threads;
  const i64 widths[] = {call.c, call.c, qkv_width, heads_width, call.hidden};
  i64 size = 0;
  for (i64 width : widths) size += call.b * Rows::row_stride(width);
  const i64 scratch_size = 4 * Worker::padded_dim(call) + 16;
  Memory memory, counters;
  // Zeros: the padding of a row is multiplied by weights of 0, and must not be NaN.
  float* rows = (float*)memory.get((size + threads * scratch_size) * i64(sizeof(float)), true);
  Part* part = (Part*)counters.get(parts * i64(sizeof(Part)), true);
  if (!rows || !part) return LINTRA_NO_MEMORY;
  Rows buffers[5];
  for (i64 i = 0; i < 5; ++i) {
    buffers[i] = {rows, Rows::row_stride(widths[i])};
    rows += call.b * buffers[i].step;
  }
  for (i64 b = 0; b < call.b; ++b) memcpy(buffers[0].row(b), call.x + b * call.c, size_t(call.c) * sizeof(float));
  const Worker prototype = {call,       threads,    buffers[0], buffers[1], buffers[2],
                            buffers[3], buffers[4], 0,          nullptr,    part};
  Team team = {prototype, 0, rows, scratch_size};
  if (threads == 1)
    Team::work(&team);
  else
    launch(Team::work, &team, threads);
  return LINTRA_OK;
}

}  // namespace LINTRA_ISA
}  // namespace lintra
