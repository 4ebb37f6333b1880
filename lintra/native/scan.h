// The selective scan of Mamba (Gu and Dao 2023, arXiv:2312.00752, section 3.2 and algorithm 2) over a tile of tokens:
//
//   delta_t = softplus(dt_t + bias)       w_t = delta_t u_t        a_t = exp(delta_t A)
//   x_t = a_t x_{t-1} + w_t B_t           y_t = C_t . x_t + D u_t        out_t = y_t silu(z_t)
//
// Backwards, from the gradient e_t of y_t and with g_t that of x_t,
//
//   g_t = a_{t+1} g_{t+1} + C_t e_t       h_t = g_t a_t x_{t-1}
//   dA = sum_t h_t delta_t                dB_t = sum g_t w_t       dC_t = sum x_t e_t        (sums over channels)
//   ddelta_t = h_t . A + (g_t . B_t) u_t  du_t = (g_t . B_t) delta_t + D e_t
//
// Lanes are channels: a token's numbers of kLanes channels are a vector, and so is one state of these channels. A few
// states at a time stay in registers while the tokens of a tile go by, so that what is read for a token is one vector
// each of delta and u; the exponential is most of the work. Tiles are [vectors of channels][tokens][lanes].
#pragma once
#include "rows.h"

namespace lintra {
namespace LINTRA_ISA {

constexpr i64 kScanChannels = 64;  // channels of a tile: whole lines of the cache in every row of the tensors
constexpr i64 kScanStates = LINTRA_VECTOR_BYTES == 64 ? 8 : 4;  // that stay in registers, beside the constants of exp

template <class T>
constexpr i64 kScanVectors = kScanChannels / kLanes<T>;

// log(1 + exp(x)) to about 2 units in the last place, also where it is small: with y = exp(-|x|) at most 1,
// log(1 + y) = 2 artanh(s), s = y / (2 + y) at most 1/3, by its series, whose terms fall by 9.
template <class T>
LINTRA_INLINE Vec<T> softplus(Vec<T> x) {
  constexpr int terms = sizeof(T) == 8 ? 17 : 8;
  const Vec<T> zero{}, y = exp_below<T>(select<T>(x > zero, -x, x)), s = y / (y + T(2)), square = s * s;
  Vec<T> series = splat(T(1) / T(2 * terms - 1));
  LINTRA_UNROLL
  for (int i = terms - 2; i >= 0; --i) series = series * square + T(1) / T(2 * i + 1);
  return select<T>(x < zero, zero, x) + T(2) * s * series;
}

// The tensors of the tile that comes next, in rows of contiguous channels `steps` bytes apart. Each row is a few lines
// in a page of its own, which the processor does not predict: a line at a time is prefetched while this tile is at work.
struct NextTile {
  i64 count;
  const char* rows[7];
  i64 steps[7];

  LINTRA_INLINE void prefetch(i64 token, i64 byte) const {
    for (i64 j = 0; j < count; ++j) __builtin_prefetch(rows[j] + token * steps[j] + byte, 0, 2);
  }
};

// The numbers of `count` tokens and `channels` channels from `x` on, between a tensor and a tile with room for `room`
// tokens, a multiple of kChunk unless channels are contiguous. Lanes beyond the channels are 0.
template <class T>
void read_tile(const char* x, const lintra_tensor& tensor, i64 count, i64 channels, i64 dtype, T* tile, i64 room) {
  constexpr i64 W = kLanes<T>;
  const i64 size = element_size(dtype), step = tensor.t * size, channel = tensor.h * size;
  for (i64 v = 0; v * W < channels; ++v) {
    const i64 lanes = channels - v * W < W ? channels - v * W : W;
    T* to = tile + v * room * W;
    if (tensor.h == 1) {
      for (i64 i = 0; i < count; ++i) {
        if (lanes < W) store(to + i * W, Vec<T>{});
        read_row(x + i * step + v * W * size, to + i * W, lanes, dtype);
      }
      continue;
    }
    T rows[W * kChunk] = {};  // time is contiguous
    for (i64 i = 0; i < count; i += kChunk) {
      const i64 n = count - i < kChunk ? count - i : kChunk;
      for (i64 lane = 0; lane < lanes; ++lane)
        read_row(x + (v * W + lane) * channel + i * size, rows + lane * kChunk, n, dtype);
      for (i64 j = 0; j < kChunk; j += W) transpose(rows + j, kChunk, to + (i + j) * W, W);
    }
  }
}
template <class T>
void write_tile(const T* tile, i64 room, char* x, const lintra_tensor& tensor, i64 count, i64 channels, i64 dtype) {
  constexpr i64 W = kLanes<T>;
  const i64 size = element_size(dtype), step = tensor.t * size, channel = tensor.h * size;
  for (i64 v = 0; v * W < channels; ++v) {
    const i64 lanes = channels - v * W < W ? channels - v * W : W;
    const T* from = tile + v * room * W;
    if (tensor.h == 1) {
      for (i64 i = 0; i < count; ++i) write_row(x + i * step + v * W * size, from + i * W, lanes, dtype);
      continue;
    }
    T rows[W * kChunk];
    for (i64 i = 0; i < count; i += kChunk) {
      const i64 n = count - i < kChunk ? count - i : kChunk;
      for (i64 j = 0; j < kChunk; j += W) transpose(from + (i + j) * W, W, rows + j, kChunk);
      for (i64 lane = 0; lane < lanes; ++lane)
        write_row(x + (v * W + lane) * channel + i * size, rows + lane * kChunk, n, dtype);
    }
  }
}

// Numbers [channels][n] of the caller and vectors [vectors of channels][n] of states.
template <class T>
void load_channels(const T* from, i64 channels, i64 n, T* to) {
  constexpr i64 W = kLanes<T>;
  for (i64 c = 0; c < channels; ++c)
    for (i64 k = 0; k < n; ++k) to[(c / W * n + k) * W + c % W] = from[c * n + k];
}
template <class T>
void store_channels(const T* from, i64 channels, i64 n, T* to) {
  constexpr i64 W = kLanes<T>;
  for (i64 c = 0; c < channels; ++c)
    for (i64 k = 0; k < n; ++k) to[c * n + k] = from[(c / W * n + k) * W + c % W];
}

// The first `left` numbers of a vector, if that are not all.
template <class T>
LINTRA_INLINE Vec<T> load_some(const T* p, i64 left) {
  if (left >= kLanes<T>) return load(p);
  Vec<T> x{};
  memcpy(&x, p, size_t(left) * sizeof(T));
  return x;
}
template <class T>
LINTRA_INLINE void store_some(T* p, Vec<T> x, i64 left) {
  if (left >= kLanes<T>) return store(p, x);
  memcpy(p, &x, size_t(left) * sizeof(T));
}

// One vector of channels over the tokens of a tile. B and C are [tokens][n], from the first of the states on.
template <class T>
struct ScanTile {
  i64 count, n;
  const T *delta, *u, *B, *C;
  const NextTile* next;  // may be absent
  i64 next_byte;         // of the vector in its rows
};

// K states from x [K], which is left as it is after the tile; y [tokens] receives their part of the sum. With Keep,
// states [tokens + 1][K] and decays [tokens][K] are what scan_gradients reads.
template <class T, i64 K, bool Keep>
void scan_states(const ScanTile<T>& tile, const T* A, T* x, T* y, T* states, T* decays) {
  constexpr i64 W = kLanes<T>;
  Vec<T> s[K];
  LINTRA_UNROLL
  for (i64 k = 0; k < K; ++k) {
    s[k] = load(x + k * W);
    if (Keep) store(states + k * W, s[k]);
  }
  for (i64 i = 0; i < tile.count; ++i) {
    const Vec<T> delta = load(tile.delta + i * W), w = delta * load(tile.u + i * W);
    const T *B = tile.B + i * tile.n, *C = tile.C + i * tile.n;
    Vec<T> sum = load(y + i * W);
    if (tile.next) tile.next->prefetch(i, tile.next_byte);
    LINTRA_UNROLL
    for (i64 k = 0; k < K; ++k) {
      const Vec<T> a = exp<T>(delta * load(A + k * W));
      s[k] = a * s[k] + w * B[k];
      sum += s[k] * C[k];
      if (Keep) {
        store(decays + (i * K + k) * W, a);
        store(states + ((i + 1) * K + k) * W, s[k]);
      }
    }
    store(y + i * W, sum);
  }
  LINTRA_UNROLL
  for (i64 k = 0; k < K; ++k) store(x + k * W, s[k]);
}

// What a tile adds to the gradients: of A [K], of delta by way of the decays [tokens], of w [tokens], of B and C
// [K][room] with the channels in the lanes. e is the gradient of y [tokens], `gradient` that of the state after the
// tile [K], which becomes that of the state before.
template <class T>
struct ScanGradients {
  T *gradient, *A, *delta, *w, *B, *C;
  const T* e;
  i64 room;
};

template <class T, i64 K>
void scan_gradients(const ScanTile<T>& tile, const T* A, const T* states, const T* decays, ScanGradients<T> d) {
  constexpr i64 W = kLanes<T>;
  Vec<T> g[K], dA[K];
  LINTRA_UNROLL
  for (i64 k = 0; k < K; ++k) g[k] = load(d.gradient + k * W), dA[k] = Vec<T>{};
  for (i64 i = tile.count - 1; i >= 0; --i) {
    const Vec<T> delta = load(tile.delta + i * W), w = delta * load(tile.u + i * W), e = load(d.e + i * W);
    const T *B = tile.B + i * tile.n, *C = tile.C + i * tile.n;
    Vec<T> dw = load(d.w + i * W), ddelta = load(d.delta + i * W);
    LINTRA_UNROLL
    for (i64 k = 0; k < K; ++k) {
      T *dB = d.B + (k * d.room + i) * W, *dC = d.C + (k * d.room + i) * W;
      const Vec<T> now = g[k] + e * C[k];
      store(dC, load(dC) + e * load(states + ((i + 1) * K + k) * W));
      store(dB, load(dB) + now * w);
      dw += now * B[k];
      g[k] = now * load(decays + (i * K + k) * W);
      const Vec<T> h = g[k] * load(states + (i * K + k) * W);
      dA[k] += h * delta;
      ddelta += h * load(A + k * W);
    }
    store(d.w + i * W, dw);
    store(d.delta + i * W, ddelta);
  }
  LINTRA_UNROLL
  for (i64 k = 0; k < K; ++k) {
    store(d.gradient + k * W, g[k]);
    store(d.A + k * W, load(d.A + k * W) + dA[k]);
  }
}

// One token of a block of channels: delta and u [channels], A and the states before it [channels][n], B and C [n] and
// zeros up to a whole vector. With Tied, A is the decays [channels], each that of all states of its channel.
template <class T>
struct StepTile {
  i64 channels, n;
  const T *delta, *u, *A, *B, *C, *state;
};

// The states after the token, and C . x as vectors [channels] whose lanes are to be summed. With Whole, n fills vectors.
template <class T, bool Whole, bool Tied>
void step_states(const StepTile<T>& tile, T* to, T* sums) {
  constexpr i64 W = kLanes<T>;
  for (i64 i = 0; i < tile.channels; ++i) {
    const T delta = tile.delta[i], w = delta * tile.u[i];
    const Vec<T> decay = Tied ? splat(tile.A[i]) : Vec<T>{};
    Vec<T> sum{};
    for (i64 k = 0; k < tile.n; k += W) {
      const i64 left = Whole ? W : tile.n - k, at = i * tile.n + k;
      const Vec<T> a = Tied ? decay : exp<T>(load_some(tile.A + at, left) * delta);
      const Vec<T> x = a * load_some(tile.state + at, left) + load(tile.B + k) * w;
      sum += x * load(tile.C + k);
      store_some(to + at, x, left);
    }
    store(sums + i * W, sum);
  }
}

// Calls f with as many states at a time as fit, as a constant: f(first state, constant K).
template <i64 K>
struct States {
  static constexpr i64 count = K;
};
template <i64 K = kScanStates, class F>
LINTRA_INLINE void each_states(i64 n, F&& f, i64 first = 0) {
  for (; first + K <= n; first += K) f(first, States<K>{});
  if constexpr (K > 1) each_states<K / 2>(n, f, first);
}

}  // namespace LINTRA_ISA
}  // namespace lintra
