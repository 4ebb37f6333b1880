// The selective scan of scan.h over all sequences and channels, shared between threads. Compiled once per instruction
// set, with LINTRA_ISA naming the namespace.
#include "scan.h"

#include "kernel.h"
#include "parallel.h"

LINTRA_DECLARE(LINTRA_ISA)

namespace lintra {
namespace LINTRA_ISA {

constexpr double kParallelScan = 1 << 16;  // exponentials below which waking a thread costs more than it saves

// A block of channels of one group, and the tokens of its sequence.
struct ScanItem {
  lintra_sequence sequence;
  i64 group, part;  // the block's number within the group
  i64 channel, channels;
};

// Working memory of one thread. Per channel and state [vectors][n][lanes], per channel [vectors][lanes], and tiles.
template <class T>
struct ScanBuffers {
  T *A, *state, *D, *bias;
  T *u, *delta, *z, *y, *B, *C;
  T *gradient, *dA, *dD, *dbias, *tile_dD, *tile_dbias;  // from here on of the backward
  T *slope, *e, *dw, *ddelta;
  T *states, *decays, *dB, *dC;

  static i64 layout(i64 n, i64 room, bool backward, T* memory, ScanBuffers* to) {
    constexpr i64 W = kLanes<T>;
    i64 used = 0;
    auto take = [&](i64 size, auto&... x) {
      ((x = memory ? memory + used : nullptr, used += round_up(size, 64 / i64(sizeof(T)))), ...);
    };
    ScanBuffers unused, &c = to ? *to : unused;
    const i64 all = kScanChannels * n, tile = kScanChannels * room;
    take(all, c.A, c.state);
    take(kScanChannels, c.D, c.bias);
    take(tile, c.u, c.delta, c.z, c.y);
    take(room * n, c.B, c.C);
    if (!backward) return used;
    take(all, c.gradient, c.dA);
    take(kScanChannels, c.dD, c.dbias, c.tile_dD, c.tile_dbias);
    take(tile, c.slope, c.e, c.dw, c.ddelta);
    take((room + 1) * kScanStates * W, c.states);
    take(room * kScanStates * W, c.decays, c.dB, c.dC);
    return used;
  }
};

template <class T>
struct ScanCall {
  const lintra_scan& call;
  static constexpr i64 kSize = sizeof(T), W = kLanes<T>;

  i64 parts() const { return (call.c / call.g + kScanChannels - 1) / kScanChannels; }
  i64 room() const { return round_up(call.t < call.interval ? call.t : call.interval, kChunk); }
  ScanItem item(i64 i) const {
    ScanItem x;
    const i64 width = call.c / call.g;
    x.part = i % parts();
    x.group = i / parts() % call.g;
    x.sequence = lintra_sequence_of(call, i / parts() / call.g);
    const i64 left = width - x.part * kScanChannels;
    x.channel = x.group * width + x.part * kScanChannels;
    x.channels = left < kScanChannels ? left : kScanChannels;
    return x;
  }
  i64 vectors(const ScanItem& at) const { return (at.channels + W - 1) / W; }

  // The first number of a tensor [b t c] for the block, at a token of its sequence.
  char* place(const lintra_tensor& x, const ScanItem& at, i64 token) const {
    return x.data + (at.sequence.row * x.b + (at.sequence.first + token) * x.t + at.channel * x.h) * element_size(call.dtype);
  }
  bool real(const ScanItem& at, i64 token) const {
    return !call.mask.data || call.mask.data[at.sequence.row * call.mask.b + (at.sequence.first + token) * call.mask.t];
  }
  // Padded tokens are 0 in every tile, delta among them: they neither decay the state nor add to it.
  void clear_padding(const ScanItem& at, i64 token, i64 count, T* tile) const {
    if (!call.mask.data) return;
    for (i64 i = 0; i < count; ++i)
      if (!real(at, token + i))
        for (i64 v = 0; v < kScanVectors<T>; ++v) store(tile + (v * room() + i) * W, Vec<T>{});
  }
  // The tile that comes after this one, which the backward reaches from behind.
  NextTile next_tile(const ScanItem& at, i64 token) const {
    NextTile next = {};
    const i64 from = token + (call.du.data ? -call.interval : call.interval);
    if (from < 0 || from >= at.sequence.tokens) return next;
    const lintra_tensor& y = call.du.data ? call.dy : call.y;
    const lintra_tensor tensors[] = {call.u, call.dt, call.z, y, call.du, call.ddt, call.dz};
    for (const lintra_tensor& x : tensors)
      if (x.data && x.h == 1) {
        next.rows[next.count] = place(x, at, from);
        next.steps[next.count++] = x.t * element_size(call.dtype);
      }
    return next;
  }
  void read(const lintra_tensor& x, const ScanItem& at, i64 token, i64 count, T* tile) const {
    read_tile(place(x, at, token), x, count, at.channels, call.dtype, tile, room());
    clear_padding(at, token, count, tile);
  }
  void write(const T* tile, const lintra_tensor& x, const ScanItem& at, i64 token, i64 count) const {
    write_tile(tile, room(), place(x, at, token), x, count, at.channels, call.dtype);
  }
  void read_states(const lintra_tensor& x, const ScanItem& at, i64 token, i64 count, T* to) const {
    for (i64 i = 0; i < count; ++i, to += call.n) {
      const i64 from = at.sequence.row * x.b + (at.sequence.first + token + i) * x.t + at.group * x.h;
      if (real(at, token + i))
        read_row(x.data + from * element_size(call.dtype), to, call.n, call.dtype);
      else
        memset((void*)to, 0, size_t(call.n) * kSize);
    }
  }

  // f(place in a tile, place in a vector of channels) for every vector of a tile.
  template <class F>
  LINTRA_INLINE void each_vector(const ScanItem& at, i64 count, F&& f) const {
    for (i64 v = 0; v < vectors(at); ++v)
      for (i64 i = 0; i < count; ++i) f((v * room() + i) * W, v * W);
  }

  // u, delta and what is before the sum over states of y, D u; with `slope`, the derivative of delta by dt.
  void read_inputs(const ScanItem& at, i64 token, i64 count, ScanBuffers<T>& c, T* slope) const {
    read(call.u, at, token, count, c.u);
    read(call.dt, at, token, count, c.delta);
    read_states(call.B, at, token, count, c.B);
    read_states(call.C, at, token, count, c.C);
    each_vector(at, count, [&](i64 i, i64 channel) {
      const Vec<T> dt = load(c.delta + i) + load(c.bias + channel);
      store(c.delta + i, call.softplus ? softplus<T>(dt) : dt);
      if (slope) store(slope + i, call.softplus ? sigmoid<T>(dt) : splat(T(1)));
      store(c.y + i, load(c.u + i) * load(c.D + channel));
    });
    clear_padding(at, token, count, c.delta);
    if (slope) clear_padding(at, token, count, slope);
  }

  void load_vector(const void* from, const ScanItem& at, i64 n, T* to) const {
    if (from) load_channels((const T*)from + at.channel * n, at.channels, n, to);
  }
  i64 state_place(const ScanItem& at) const { return (at.sequence.number * call.c + at.channel) * call.n; }
  // Checkpoints hold whole blocks, as the working memory has them.
  T* checkpoint(const ScanItem& at, i64 number) const {
    const i64 blocks = call.g * parts();
    number += lintra_first_checkpoint(call, at.sequence, call.interval);
    return (T*)call.checkpoints + (number * blocks + at.group * parts() + at.part) * kScanChannels * call.n;
  }
  size_t state_bytes() const { return size_t(kScanChannels * call.n * kSize); }

  template <class F>
  int each_item(bool backward, i64 room, lintra_launch launch, F&& f) const {
    const i64 n = call.b * call.g * parts();
    if (!n) return LINTRA_OK;
    const double work = double(lintra_rows(call)) * double(call.t) * double(call.c) * double(call.n);
    const i64 workers = worker_count(work, kParallelScan, call.threads, n);
    const i64 size = ScanBuffers<T>::layout(call.n, room, backward, nullptr, nullptr);
    Memory memory;
    T* buffers = (T*)memory.get(workers * size * kSize, true);
    if (!buffers) return LINTRA_NO_MEMORY;
    parallel(launch, workers, n, Subnormals::kFlushed, [&](i64 i, i64 worker) {
      const ScanItem at = item(i);
      T* mine = buffers + worker * size;
      ScanBuffers<T> c;
      ScanBuffers<T>::layout(call.n, room, backward, mine, &c);
      f(at, c);
    });
    return LINTRA_OK;
  }

  template <class... Rows>
  static void clear(size_t bytes, Rows*... rows) {
    (memset((void*)rows, 0, bytes), ...);
  }
  // The weights, 0 in lanes beyond the channels: no block before may leave there what sums over lanes would meet.
  void start(const ScanItem& at, ScanBuffers<T>& c) const {
    clear(state_bytes(), c.A);
    clear(kScanChannels * kSize, c.D, c.bias);
    load_vector(call.A, at, call.n, c.A);
    load_vector(call.D, at, 1, c.D);
    load_vector(call.dt_bias, at, 1, c.bias);
  }

  int forward(lintra_launch launch) const {
    return each_item(false, room(), launch, [&](const ScanItem& at, ScanBuffers<T>& c) {
      start(at, c);
      clear(state_bytes(), c.state);
      if (call.state) load_channels((const T*)call.state + state_place(at), at.channels, call.n, c.state);
      for (i64 token = 0; token < at.sequence.tokens; token += call.interval) {
        const i64 left = at.sequence.tokens - token, count = left < call.interval ? left : call.interval;
        if (call.checkpoints) memcpy((void*)checkpoint(at, token / call.interval), c.state, state_bytes());
        read_inputs(at, token, count, c, nullptr);
        const NextTile next = next_tile(at, token);
        for (i64 v = 0; v < vectors(at); ++v)
          each_states(call.n, [&](i64 first, auto states) {
            const ScanTile<T> tile = tile_of(c, v, first, count, next);
            const i64 at_state = (v * call.n + first) * W;
            scan_states<T, states.count, false>(tile, c.A + at_state, c.state + at_state, c.y + v * room() * W, nullptr,
                                                nullptr);
          });
        if (call.z.data) {
          read(call.z, at, token, count, c.z);
          each_vector(at, count, [&](i64 i, i64) {
            const Vec<T> z = load(c.z + i);
            store(c.y + i, load(c.y + i) * silu<T>(z));
          });
        }
        clear_padding(at, token, count, c.y);
        write(c.y, call.y, at, token, count);
      }
      store_channels(c.state, at.channels, call.n, (T*)call.state_out + state_place(at));
    });
  }

  // One token for every sequence, where lanes are states: a state is read and written as it lies, once.
  int step(lintra_launch launch) const {
    return each_item(false, 1, launch, [&](const ScanItem& at, ScanBuffers<T>& c) {
      const i64 n = call.n, channels = at.channels;
      T* to = (T*)call.state_out + state_place(at);
      const T* from = call.state ? (const T*)call.state + state_place(at) : nullptr;
      const bool here = real(at, 0);
      if (!from) memset((void*)to, 0, size_t(channels * n) * kSize);
      if (!here && from && from != to) memcpy((void*)to, from, size_t(channels * n) * kSize);
      if (here)
        step_block(at, from ? from : to, to, c);
      else
        clear(kScanChannels * kSize, c.y);
      write_tile(c.y, 1, place(call.y, at, 0), call.y, 1, channels, call.dtype);
    });
  }

  void step_block(const ScanItem& at, const T* from, T* to, ScanBuffers<T>& c) const {
    const i64 n = call.n;
    auto read_one = [&](const lintra_tensor& x, T* row) {
      if (x.data) read_tile(place(x, at, 0), x, 1, at.channels, call.dtype, row, 1);
    };
    read_one(call.u, c.u);
    read_one(call.dt, c.delta);
    read_one(call.z, c.z);
    load_vector(call.D, at, 1, c.D);
    load_vector(call.dt_bias, at, 1, c.bias);
    read_states(call.B, at, 0, 1, c.B);
    read_states(call.C, at, 0, 1, c.C);
    for (i64 i = 0; i < at.channels; i += W) {
      const Vec<T> dt = load(c.delta + i) + load(c.bias + i);
      store(c.delta + i, call.softplus ? softplus<T>(dt) : dt);
    }
    T sums[kScanChannels * W];
    for (i64 i = at.channels; i < round_up(at.channels, kChunk); ++i) store(sums + i * W, Vec<T>{});
    if (call.tied) {
      load_vector(call.A, at, 1, c.A);
      for (i64 i = 0; i < at.channels; i += W) store(c.A + i, exp<T>(load(c.A + i) * load(c.delta + i)));
    }
    const T* A = call.tied ? c.A : (const T*)call.A + at.channel * n;
    const StepTile<T> tile = {at.channels, n, c.delta, c.u, A, c.B, c.C, from};
    if (n % W == 0)
      call.tied ? step_states<T, true, true>(tile, to, sums) : step_states<T, true, false>(tile, to, sums);
    else
      call.tied ? step_states<T, false, true>(tile, to, sums) : step_states<T, false, false>(tile, to, sums);
    for (i64 i = 0; i < at.channels; i += kChunk) sum_lanes(sums + i * W, c.y + i);
    for (i64 i = 0; i < at.channels; i += W) {
      Vec<T> y = load(c.y + i) + load(c.u + i) * load(c.D + i);
      const Vec<T> z = load(c.z + i);
      store(c.y + i, call.z.data ? y * silu<T>(z) : y);
    }
  }

  ScanTile<T> tile_of(const ScanBuffers<T>& c, i64 v, i64 first, i64 count, const NextTile& next) const {
    const i64 start = v * room() * W, byte = v * W * element_size(call.dtype);
    const NextTile* ahead = first == 0 && next.count ? &next : nullptr;
    return {count, call.n, c.delta + start, c.u + start, c.B + first, c.C + first, ahead, byte};
  }

  int backward(lintra_launch launch) const {
    return each_item(true, room(), launch, [&](const ScanItem& at, ScanBuffers<T>& c) {
      start(at, c);
      clear(state_bytes(), c.gradient, c.dA);
      clear(kScanChannels * kSize, c.dD, c.dbias);
      if (call.dstate) load_channels((const T*)call.dstate + state_place(at), at.channels, call.n, c.gradient);
      const i64 tiles = (at.sequence.tokens + call.interval - 1) / call.interval;
      for (i64 number = tiles - 1; number >= 0; --number) {
        const i64 token = number * call.interval, left = at.sequence.tokens - token;
        backward_tile(at, token, left < call.interval ? left : call.interval, c);
      }
      const i64 channels = at.sequence.number * call.c + at.channel;
      store_channels(c.gradient, at.channels, call.n, (T*)call.dstate_in + state_place(at));
      store_channels(c.dA, at.channels, call.n, (T*)call.dA + state_place(at));
      if (call.dD) store_channels(c.dD, at.channels, 1, (T*)call.dD + channels);
      if (call.ddt_bias) store_channels(c.dbias, at.channels, 1, (T*)call.ddt_bias + channels);
    });
  }

  void backward_tile(const ScanItem& at, i64 token, i64 count, ScanBuffers<T>& c) const {
    memcpy((void*)c.state, checkpoint(at, token / call.interval), state_bytes());
    read_inputs(at, token, count, c, c.slope);
    read(call.dy, at, token, count, c.e);
    if (call.z.data) {  // afterwards z holds what y is multiplied by to get its gradient
      read(call.z, at, token, count, c.z);
      each_vector(at, count, [&](i64 i, i64) {
        const Vec<T> z = load(c.z + i), s = sigmoid<T>(z), dy = load(c.e + i);
        store(c.e + i, dy * (z * s));
        store(c.z + i, dy * (s * (T(1) + z * (T(1) - s))));
      });
    }
    clear(size_t(kScanChannels * room() * kSize), c.dw, c.ddelta);
    clear(kScanChannels * kSize, c.tile_dD, c.tile_dbias);  // token by token, the whole sum would round each of them
    const NextTile next = next_tile(at, token);
    each_states(call.n, [&](i64 first, auto states) {
      backward_states<states.count>(at, token, count, first, next, c);
    });
    each_vector(at, count, [&](i64 i, i64 channel) {
      const Vec<T> u = load(c.u + i), e = load(c.e + i), dw = load(c.dw + i);
      const Vec<T> ddt = (load(c.ddelta + i) + dw * u) * load(c.slope + i);
      store(c.tile_dD + channel, load(c.tile_dD + channel) + e * u);
      store(c.tile_dbias + channel, load(c.tile_dbias + channel) + ddt);
      store(c.dw + i, dw * load(c.delta + i) + e * load(c.D + channel));
      store(c.ddelta + i, ddt);
      store(c.z + i, load(c.z + i) * load(c.y + i));
    });
    for (i64 i = 0; i < kScanChannels; i += W) {
      store(c.dD + i, load(c.dD + i) + load(c.tile_dD + i));
      store(c.dbias + i, load(c.dbias + i) + load(c.tile_dbias + i));
    }
    write(c.dw, call.du, at, token, count);
    write(c.ddelta, call.ddt, at, token, count);
    if (call.z.data) write(c.z, call.dz, at, token, count);
  }

  // The gradients by way of K states, for all channels of the block, whose sums are dB and dC.
  template <i64 K>
  void backward_states(const ScanItem& at, i64 token, i64 count, i64 first, const NextTile& next,
                       ScanBuffers<T>& c) const {
    clear(size_t(K * room() * W * kSize), c.dB, c.dC);
    for (i64 v = 0; v < vectors(at); ++v) {
      const ScanTile<T> tile = tile_of(c, v, first, count, next);
      const i64 state = (v * call.n + first) * W, start = v * room() * W;
      scan_states<T, K, true>(tile, c.A + state, c.state + state, c.y + start, c.states, c.decays);
      const ScanGradients<T> d = {c.gradient + state, c.dA + state, c.ddelta + start, c.dw + start,
                                  c.dB,               c.dC,         c.e + start,      room()};
      scan_gradients<T, K>(tile, c.A + state, c.states, c.decays, d);
    }
    const i64 row = (at.part * lintra_rows(call) + at.sequence.row) * call.t + at.sequence.first + token;
    for (i64 k = 0; k < K; ++k)
      for (i64 i = 0; i < count; i += kChunk) {
        T dB[kChunk], dC[kChunk];
        sum_lanes(c.dB + (k * room() + i) * W, dB);
        sum_lanes(c.dC + (k * room() + i) * W, dC);
        for (i64 j = 0; j < kChunk && i + j < count; ++j) {
          const i64 to = ((row + i + j) * call.g + at.group) * call.n + first + k;
          ((T*)call.dB)[to] = dB[j];
          ((T*)call.dC)[to] = dC[j];
        }
      }
  }
};

int scan_forward(const lintra_scan& call, lintra_launch launch) {
  const bool step = call.t == 1 && !call.cu_seqlens && !call.checkpoints;
  if (call.dtype == LINTRA_FLOAT64) {
    const ScanCall<double> run = {call};
    return step ? run.step(launch) : run.forward(launch);
  }
  const ScanCall<float> run = {call};
  return step ? run.step(launch) : run.forward(launch);
}

int scan_backward(const lintra_scan& call, lintra_launch launch) {
  if (call.dtype == LINTRA_FLOAT64) return ScanCall<double>{call}.backward(launch);
  return ScanCall<float>{call}.backward(launch);
}

}  // namespace LINTRA_ISA
}  // namespace lintra
