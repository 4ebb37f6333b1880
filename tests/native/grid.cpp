// The kernels over a grid of shapes, in a build with sanitizers. Every tensor is a piece of memory by itself, of exactly
// its size, so that a read or a write beyond its end is seen. Prints the number of calls.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <vector>

#include "../../lintra/native/abi.h"

extern "C" {
i64 lintra_usable(i64 isa);
int lintra_forward(const lintra_call* call);
int lintra_backward(const lintra_call* call);
int lintra_recurrence_forward(const lintra_recurrence* call);
int lintra_recurrence_backward(const lintra_recurrence* call);
int lintra_conv1d_forward(const lintra_conv1d* call);
int lintra_conv1d_backward(const lintra_conv1d* call);
int lintra_conv1d_step_forward(const lintra_conv1d_step* call);
int lintra_scan_forward(const lintra_scan* call);
int lintra_scan_backward(const lintra_scan* call);
int lintra_softmax_forward(const lintra_softmax* call);
int lintra_softmax_backward(const lintra_softmax* call);
}

namespace {

std::vector<std::unique_ptr<char[]>> memory;
uint32_t seed = 1;
i64 calls = 0;

i64 size_of(i64 dtype) { return dtype == LINTRA_FLOAT64 ? 8 : dtype == LINTRA_FLOAT32 ? 4 : 2; }
i64 sums(i64 dtype) { return dtype == LINTRA_FLOAT64 ? LINTRA_FLOAT64 : LINTRA_FLOAT32; }

double uniform() {
  seed = seed * 1664525 + 1013904223;
  return double(seed >> 8) / (1 << 24);
}

// n numbers between low and high; of 16 bits, of either kind, something between 2^-16 and 2.
char* numbers(i64 n, i64 dtype, double low, double high) {
  memory.emplace_back(new char[size_t(n * size_of(dtype))]);
  char* data = memory.back().get();
  for (i64 i = 0; i < n; ++i) {
    const double x = low + (high - low) * uniform();
    const float single = float(x);
    const uint16_t half = uint16_t(0x3800 | (uint32_t(x * 1e4) & 0x81ff));
    if (dtype == LINTRA_FLOAT64) memcpy(data + 8 * i, &x, 8);
    if (dtype == LINTRA_FLOAT32) memcpy(data + 4 * i, &single, 4);
    if (size_of(dtype) == 2) memcpy(data + 2 * i, &half, 2);
  }
  return data;
}
lintra_tensor tensor(char* data, i64 t, i64 h, i64 width) { return {data, t * h * width, h * width, width}; }
lintra_tensor mask(i64 b, i64 t) {
  char* data = numbers(b * t, LINTRA_BFLOAT16, 0, 1);
  memory.emplace_back(new char[size_t(b * t)]);
  char* bytes = memory.back().get();
  for (i64 i = 0; i < b * t; ++i) bytes[i] = data[2 * i] & 1;
  return {bytes, t, 1, 0};
}

struct Shape {
  i64 isa, threads, dtype, b, t, h, g, f, e;
  bool masked, packed;
};

// Two sequences in one row, the first with a third of its tokens.
const i64* bounds(const Shape& x) {
  memory.emplace_back(new char[3 * sizeof(i64)]);
  i64* places = (i64*)memory.back().get();
  places[0] = 0;
  places[1] = x.t / 3;
  places[2] = x.t;
  return places;
}

void expect(int status) {
  ++calls;
  if (status != LINTRA_OK) {
    fprintf(stderr, "status %d\n", status);
    exit(1);
  }
}

void sum(const Shape& x, bool causal, bool normalize, i64 map, bool decays) {
  memory.clear();
  const i64 s = causal ? x.t : x.t + 3, rows = x.packed ? 1 : x.b, n = x.packed ? 2 : x.b, wide = sums(x.dtype);
  lintra_call c = {};
  c.isa = x.isa, c.threads = x.threads, c.dtype = x.dtype, c.causal = causal, c.normalize = normalize;
  c.feature_map = map, c.b = n, c.t = x.t, c.s = s, c.h = x.h, c.g = x.g, c.f = x.f, c.e = x.e, c.eps = 1e-6;
  c.q = tensor(numbers(rows * x.t * x.h * x.f, x.dtype, 0, 1), x.t, x.h, x.f);
  c.k = tensor(numbers(rows * s * x.g * x.f, x.dtype, 0, 1), s, x.g, x.f);
  c.v = tensor(numbers(rows * s * x.g * x.e, x.dtype, -1, 1), s, x.g, x.e);
  if (decays) {
    c.log_decay = tensor(numbers(rows * s * x.g, wide, -1, 0), s, x.g, 1);
    c.log_input = tensor(numbers(rows * s * x.g, wide, -1, 0), s, x.g, 1);
  }
  if (x.masked) c.mask = mask(rows, s);
  if (x.packed) c.cu_seqlens = bounds(x);
  c.kv = numbers(n * x.g * x.f * x.e, wide, 0, 1);
  c.z = numbers(n * x.g * x.f, wide, 0, 1);
  c.y = numbers(rows * x.t * x.h * x.e, x.dtype, 0, 0);
  c.den = numbers(rows * x.t * x.h, wide, 0, 0);
  if (normalize && size_of(x.dtype) == 2) c.lost = numbers(rows * x.t * x.h * x.e, x.dtype, 0, 0);
  c.kv_out = numbers(n * x.g * x.f * x.e, wide, 0, 0);
  c.z_out = numbers(n * x.g * x.f, wide, 0, 0);
  expect(lintra_forward(&c));
  c.dy = tensor(numbers(rows * x.t * x.h * x.e, x.dtype, -1, 1), x.t, x.h, x.e);
  c.dkv = numbers(n * x.g * x.f * x.e, wide, 0, 1);
  c.dz = numbers(n * x.g * x.f, wide, 0, 1);
  c.dq = numbers(rows * x.t * x.h * x.f, x.dtype, 0, 0);
  c.dk = numbers(rows * s * x.g * x.f, x.dtype, 0, 0);
  c.dv = numbers(rows * s * x.g * x.e, x.dtype, 0, 0);
  if (decays) {
    c.dlog_decay = numbers(rows * s * x.g, wide, 0, 0);
    c.dlog_input = numbers(rows * s * x.g, wide, 0, 0);
  }
  c.dkv_in = numbers(n * x.g * x.f * x.e, wide, 0, 0);
  c.dz_in = numbers(n * x.g * x.f, wide, 0, 0);
  expect(lintra_backward(&c));
}

void recurrence(const Shape& x, int decay, bool delta, i64 parts, i64 key_heads) {
  memory.clear();
  const i64 rows = x.packed ? 1 : x.b, n = x.packed ? 2 : x.b, wide = sums(x.dtype), rates = decay == 2 ? x.f : 1;
  lintra_recurrence c = {};
  c.isa = x.isa, c.threads = x.threads, c.dtype = x.dtype, c.b = n, c.t = x.t, c.h = x.h, c.g = x.g;
  c.query_heads = x.h, c.key_heads = key_heads, c.value_heads = x.g, c.f = x.f, c.e = x.e;
  c.parts = parts, c.per_feature = decay == 2, c.interval = 32, c.scale = 0.5;
  c.q = tensor(numbers(rows * x.t * x.h * x.f, x.dtype, -1, 1), x.t, x.h, x.f);
  c.k = tensor(numbers(rows * x.t * key_heads * x.f, x.dtype, -0.1, 0.1), x.t, key_heads, x.f);
  c.v = tensor(numbers(rows * x.t * x.g * x.e, x.dtype, -1, 1), x.t, x.g, x.e);
  if (decay) c.log_decay = tensor(numbers(rows * x.t * x.g * rates, wide, -1, 0), x.t, x.g, rates);
  if (delta) c.beta = tensor(numbers(rows * x.t * x.g, wide, 0, 1), x.t, x.g, 1);
  if (x.masked) c.mask = mask(rows, x.t);
  if (x.packed) c.cu_seqlens = bounds(x);
  const i64 state = x.g * x.f * x.e, kept = x.packed ? x.t / c.interval + n : n * (x.t / c.interval + 1);
  c.state = numbers(n * state, wide, 0, 1);
  c.y = numbers(rows * x.t * x.h * x.e, x.dtype, 0, 0);
  c.state_out = numbers(n * state, wide, 0, 0);
  expect(lintra_recurrence_forward(&c));
  c.checkpoints = numbers(kept * state, wide, 0, 0);
  expect(lintra_recurrence_forward(&c));
  c.dy = tensor(numbers(rows * x.t * x.h * x.e, x.dtype, -1, 1), x.t, x.h, x.e);
  c.dstate = numbers(n * state, wide, 0, 1);
  c.dq = numbers(parts * rows * x.t * x.h * x.f, wide, 0, 0);
  c.dk = numbers(parts * rows * x.t * x.g * x.f, wide, 0, 0);
  if (decay) c.dlog_decay = numbers(parts * rows * x.t * x.g * rates, wide, 0, 0);
  if (delta) c.dbeta = numbers(parts * rows * x.t * x.g, wide, 0, 0);
  c.dv = numbers(rows * x.t * x.g * x.e, wide, 0, 0);
  c.dstate_in = numbers(n * state, wide, 0, 0);
  expect(lintra_recurrence_backward(&c));
}

void conv1d(const Shape& x, i64 width, bool full) {
  memory.clear();
  const i64 rows = x.packed ? 1 : x.b, n = x.packed ? 2 : x.b, wide = sums(x.dtype), c = x.g * x.f, last = width - 1;
  lintra_conv1d call = {};
  call.isa = x.isa, call.threads = x.threads, call.dtype = x.dtype, call.b = n, call.t = x.t, call.c = c;
  call.width = width, call.silu = full, call.groups = 1 + x.b / 2;
  call.x = tensor(numbers(rows * x.t * c, x.dtype, -1, 1), x.t, 1, c);
  if (x.masked) call.mask = mask(rows, x.t);
  if (x.packed) call.cu_seqlens = bounds(x);
  call.weight = numbers(width * c, wide, -1, 1);
  if (full) call.bias = numbers(c, wide, -1, 1);
  if (full) call.state = numbers(n * last * c, wide, -1, 1);
  call.y = numbers(rows * x.t * c, x.dtype, 0, 0);
  call.state_out = numbers(n * last * c, wide, 0, 0);
  expect(lintra_conv1d_forward(&call));
  call.dy = tensor(numbers(rows * x.t * c, x.dtype, -1, 1), x.t, 1, c);
  if (full) call.dstate = numbers(n * last * c, wide, -1, 1);
  call.dx = numbers(rows * x.t * c, x.dtype, 0, 0);
  call.dweight = numbers(call.groups * width * c, wide, 0, 0);
  call.dbias = numbers(call.groups * c, wide, 0, 0);
  if (full) call.dstate_in = numbers(n * last * c, wide, 0, 0);
  expect(lintra_conv1d_backward(&call));
}

// A buffer with more room than is needed or, if `full`, none; in circles; the second sequence, of two or more, has no row.
void conv1d_step(const Shape& x, i64 width, bool full) {
  memory.clear();
  const i64 wide = sums(x.dtype), c = x.g * x.f, length = full ? width - 1 + (width == 1) : width + 2;
  lintra_conv1d_step call = {};
  call.isa = x.isa, call.threads = x.threads, call.dtype = x.dtype, call.b = x.b, call.t = x.t, call.c = c;
  call.width = width, call.length = length, call.silu = full;
  call.x = numbers(x.b * x.t * c, x.dtype, -1, 1);
  call.x_b = x.t * c, call.x_t = full ? c : 1, call.x_c = full ? 1 : x.t;
  call.buffer = numbers(x.b * c * length, x.dtype, -1, 1);
  call.buffer_row = c * length, call.buffer_c = full ? 1 : length, call.buffer_l = full ? c : 1;
  memory.emplace_back(new char[size_t(x.b) * sizeof(i64)]);
  i64* rows = (i64*)memory.back().get();
  for (i64 i = 0; i < x.b; ++i) rows[i] = i == 1 ? -1 : x.b - 1 - i;
  if (x.masked) call.rows = rows;
  if (x.packed) call.starts = rows;
  call.weight = numbers(width * c, wide, -1, 1);
  if (full) call.bias = numbers(c, wide, -1, 1);
  call.y = numbers(x.b * x.t * c, x.dtype, 0, 0);
  expect(lintra_conv1d_step_forward(&call));
}

// A tensor [b t c] with contiguous channels or, if it has several tokens, contiguous time.
lintra_tensor lanes(char* data, i64 t, i64 c, bool time) {
  return time && t > 1 ? lintra_tensor{data, t * c, 1, t} : lintra_tensor{data, t * c, c, 1};
}

void selective_scan(const Shape& x, bool whole, bool time) {
  memory.clear();
  const i64 rows = x.packed ? 1 : x.b, m = x.packed ? 2 : x.b, wide = sums(x.dtype), c = x.h * x.e, n = x.f;
  const i64 tokens = rows * x.t * c, written = rows * x.t * x.g * n, parts = (c / x.g + 63) / 64;
  auto like = [&](double low, double high) { return lanes(numbers(tokens, x.dtype, low, high), x.t, c, time); };
  lintra_scan s = {};
  s.isa = x.isa, s.threads = x.threads, s.dtype = x.dtype, s.b = m, s.t = x.t, s.c = c, s.g = x.g, s.n = n;
  s.softplus = whole, s.interval = 32;
  s.u = like(-1, 1), s.dt = like(0, 1);
  s.B = tensor(numbers(written, x.dtype, -1, 1), x.t, x.g, n);
  s.C = tensor(numbers(written, x.dtype, -1, 1), x.t, x.g, n);
  s.A = numbers(c * n, wide, -1, 0);
  if (whole) s.z = like(-1, 1), s.D = numbers(c, wide, 0, 1), s.dt_bias = numbers(c, wide, 0, 1);
  if (x.masked) s.mask = mask(rows, x.t);
  if (x.packed) s.cu_seqlens = bounds(x);
  s.state = numbers(m * c * n, wide, 0, 1);
  s.y = like(0, 0);
  s.state_out = numbers(m * c * n, wide, 0, 0);
  expect(lintra_scan_forward(&s));
  const i64 kept = x.packed ? x.t / s.interval + m : m * (x.t / s.interval + 1);
  s.checkpoints = numbers(kept * x.g * parts * 64 * n, wide, 0, 0);
  expect(lintra_scan_forward(&s));
  s.dy = like(-1, 1);
  s.dstate = numbers(m * c * n, wide, 0, 1);
  s.du = like(0, 0), s.ddt = like(0, 0);
  if (whole) s.dz = like(0, 0), s.dD = numbers(m * c, wide, 0, 0), s.ddt_bias = numbers(m * c, wide, 0, 0);
  s.dA = numbers(m * c * n, wide, 0, 0);
  s.dB = numbers(parts * written, wide, 0, 0);
  s.dC = numbers(parts * written, wide, 0, 0);
  s.dstate_in = numbers(m * c * n, wide, 0, 0);
  expect(lintra_scan_backward(&s));
}

// A band whose queries are the last t of t + 3 places, segments, blocks of 5 places, and sorted chunks.
void softmax(const Shape& x, i64 kind, i64 reach, i64 dilation) {
  memory.clear();
  const i64 unit = kind == LINTRA_BLOCKS ? 5 : 7, t = kind == LINTRA_BLOCKS ? (x.t + 4) / 5 * 5 : x.t;
  const i64 s = kind == LINTRA_BAND ? t + 3 : kind == LINTRA_BLOCKS ? t + 10 : t, wide = sums(x.dtype);
  lintra_softmax c = {};
  c.isa = x.isa, c.threads = x.threads, c.dtype = x.dtype, c.kind = kind, c.b = x.b, c.t = t, c.s = s;
  c.h = x.h, c.g = x.g, c.d = x.f, c.e = x.e, c.before = reach, c.after = reach / 2, c.dilation = dilation, c.unit = unit;
  c.scale = 0.5;
  c.q = tensor(numbers(x.b * t * x.h * x.f, x.dtype, -1, 1), t, x.h, x.f);
  c.k = tensor(numbers(x.b * s * x.g * x.f, x.dtype, -1, 1), s, x.g, x.f);
  c.v = tensor(numbers(x.b * s * x.g * x.e, x.dtype, -1, 1), s, x.g, x.e);
  if (x.masked) c.visible = mask(x.b, s);
  if (kind == LINTRA_BLOCKS) {
    const i64 n = t / unit, m = s / unit;
    c.entries = 3;
    memory.emplace_back(new char[size_t(x.b * x.g * n * c.entries * 8)]);
    i64* blocks = (i64*)memory.back().get();
    memory.emplace_back(new char[size_t(x.b * x.g * n * c.entries)]);
    char* listed = memory.back().get();
    for (i64 i = 0; i < x.b * x.g * n * c.entries; ++i) blocks[i] = i64(uniform() * double(m)), listed[i] = uniform() < 0.7;
    c.blocks = {(char*)blocks, x.g * n * c.entries, c.entries, n * c.entries};
    c.listed = c.blocks;
    c.listed.data = listed;
    if (reach > 5) {
      memory.emplace_back(new char[size_t(x.b * n * 8)]);
      i64* own = (i64*)memory.back().get();
      for (i64 i = 0; i < x.b * n; ++i) own[i] = i % m;
      c.own = {(char*)own, n, 1, 0};
    }
  }
  if (kind == LINTRA_SORTED) {
    c.g = x.h, c.rounds = 1 + reach % 3, c.rule = reach + x.t, c.before = reach % 4, c.after = reach % 2;
    c.k = tensor(numbers(x.b * t * x.h * x.f, x.dtype, -1, 1), t, x.h, x.f);
    c.v = tensor(numbers(x.b * t * x.h * x.e, x.dtype, -1, 1), t, x.h, x.e);
    const i64 n = (t + unit - 1) / unit * unit, all = x.b * x.h * c.rounds;
    memory.emplace_back(new char[size_t(all * n * 8)]);
    i64* token = (i64*)memory.back().get();
    memory.emplace_back(new char[size_t(all * n * 4)]);
    int32_t* place = (int32_t*)memory.back().get();
    memory.emplace_back(new char[size_t(all * n * 4)]);
    int32_t* bucket = (int32_t*)memory.back().get();
    for (i64 i = 0; i < all; ++i) {  // the visible tokens from the last to the first, then the others
      const char* visible = c.visible.data ? c.visible.data + i / (x.h * c.rounds) * s : nullptr;
      i64 front = 0, back = n;
      for (i64 j = n - 1; j >= 0; --j) {
        const i64 at = j < t && (!visible || visible[j]) ? front++ : --back;
        token[i * n + at] = j, place[i * n + j] = int32_t(at / unit), bucket[i * n + j] = int32_t(j % 3);
      }
    }
    c.token = token, c.place = place, c.bucket = bucket;
  }
  c.o = numbers(x.b * t * x.h * x.e, wide, 0, 0);
  c.logsumexp = numbers(x.b * t * x.h, wide, 0, 0);
  expect(lintra_softmax_forward(&c));
  c.dO = tensor(numbers(x.b * t * x.h * x.e, wide, -1, 1), t, x.h, x.e);
  if (x.masked) c.dlogsumexp = numbers(x.b * t * x.h, wide, -1, 1);
  c.dq = numbers(x.b * t * x.h * x.f, x.dtype, 0, 0);
  c.dk = numbers(x.b * s * c.g * x.f, x.dtype, 0, 0);
  c.dv = numbers(x.b * s * c.g * x.e, x.dtype, 0, 0);
  expect(lintra_softmax_backward(&c));
}

}  // namespace

int main() {
  const i64 tokens[] = {1, 5, 16, 50, 70}, heads[][2] = {{1, 1}, {4, 2}}, widths[][2] = {{1, 1}, {4, 3}, {17, 33}, {64, 40}};
  for (i64 isa = 0; isa < LINTRA_ISA_COUNT; ++isa) {
    if (!lintra_usable(isa)) continue;
    for (i64 dtype : {LINTRA_FLOAT32, LINTRA_FLOAT64, LINTRA_BFLOAT16, LINTRA_FLOAT16})
      for (i64 t : tokens)
        for (auto& head : heads)
          for (auto& width : widths)
            for (int kind = 0; kind < 3; ++kind) {
              const Shape x = {isa, 1 + kind, dtype, 2, t, head[0], head[1], width[0], width[1], kind == 1, kind == 2};
              for (i64 wide : {1, 3, 4, 9}) conv1d(x, wide, wide != 3), conv1d_step(x, wide, wide != 3);
              for (int decay = 0; decay < 3; ++decay)
                for (bool delta : {false, true})
                  recurrence(x, decay, delta, width[1] > 32 ? 2 : 1, decay == 1 ? 1 : x.g);
              for (bool whole : {false, true})
                for (bool time : {false, true}) selective_scan(x, whole, time);
              for (i64 reach : {0, 9, 200})
                for (i64 kind = 0; kind < 4; ++kind) softmax(x, kind, reach, kind ? 1 : 1 + reach % 4);
              if (t == 70 && head[0] == 1) softmax({isa, 2, dtype, 1, 1300, 2, 1, width[0], width[1], kind == 1, false}, kind, 60, 1);
              for (bool causal : {false, true})
                for (bool normalize : {false, true})
                  if (causal || !x.packed) sum(x, causal, normalize, t % 3, causal && normalize);
            }
  }
  printf("%lld\n", (long long)calls);
}
