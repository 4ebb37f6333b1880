// See lintra_runtime.h. Compile with -O3 -ffp-contract=fast -fno-math-errno, and the instruction set named: the vectors
// below are as wide as the registers of the instruction set that is compiled for.
#include "lintra_runtime.h"

#include "lintra_audio.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the files hold little-endian numbers, which are read in place"
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VECTOR 64
#elif defined(__AVX2__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
#define INLINE static inline __attribute__((always_inline))
#define OUTLINE static __attribute__((noinline))  // functions whose inlined copies would make the WebAssembly a tenth larger
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vf __attribute__((vector_size(VECTOR)));
typedef int32_t vi __attribute__((vector_size(VECTOR)));
typedef uint32_t vu __attribute__((vector_size(VECTOR)));
typedef float quad __attribute__((vector_size(16)));

// Sums are taken in 16 lanes whatever the registers, always in the same order: instruction sets differ by whether a
// multiplication is rounded before it is added, and by nothing else.
enum { LANES = 16, W = VECTOR / 4, PARTS = LANES / W };

// Rows of a matrix that are summed at once, far apart, so that the processor fetches each ahead as a stream of its own.
// Of fewer it waits for memory, and of more their sums do not fit into its registers.
enum { ROWS = PARTS == 4 ? 3 : PARTS == 2 ? 4 : 8 };

// Several tokens go through the weights in one pass, which reads them from memory once: TILE rows times COLUMNS tokens
// are summed at once, a register of each: 8 to 24 of 16 or 32.
enum { TOKENS = 16, COLUMNS = 4 };
#if defined(__aarch64__)
enum { TILE = 4 };
#else
enum { TILE = PARTS == 1 ? 6 : PARTS == 2 ? 3 : 2 };
#endif

// Of weights of 8 bits the sums are integers, of which a register or two hold LANES. BLOCK columns are summed before
// they become a float: 512 * 2^7 * (2^15 - 1) < 2^31.
enum { PIECE = VECTOR < 32 ? 16 : 32, PIECES = 2 * LANES / PIECE, BLOCK = 512 };
typedef int16_t shorts __attribute__((vector_size(PIECE)));
typedef int32_t pairs __attribute__((vector_size(PIECE)));

enum { HEADER = 320, HEADER_2 = 384, FRAMES_HEADER = 64, KIND_RECORD = 128, STATE_HEADER = 64 };
enum { AXES = 8, LOOKBACKS = 32, STAGES = 2, KINDS = 16, KEPT_TOKENS = 1 << 24 };
enum { FLOAT32, FLOAT16, INT8 };
enum { GELU, SWIGLU, RELU_MLP };
enum { PRE, POST };
enum { LAYER_NORM, RMS_NORM };
enum { NO_POSITION, SINUSOIDAL, CONCATENATED, LEARNED, ROTARY };
enum { IDENTITY, ELU_PLUS_ONE, RELU, SQUARED_RELU, TRIGONOMETRIC, ARC_COSINE };
enum { NO_DECAY, FIXED, GATED, PER_HEAD, PER_FEATURE };
enum { ADDED, DELTA, STEPPED, KEPT };
enum { NO_HEAD_NORM, PLAIN_HEADS, WEIGHTED_HEADS, ALL_HEADS };
enum { NO_GATE, SILU, SIGMOID };
enum { NO_DENOMINATOR, SUM, BOUNDED };
enum { LOGITS, MIXTURE };
enum { TOKEN_INPUT, FRAME_INPUT };
enum { GIVEN, FILTERBANK };

#define HEAD_EPS 1e-6f  // EPS of lintra/ops/norms.py

#define MODEL_MAGIC "lintraRT"
#define STATE_MAGIC "lintraST"
#define LAST_POSITION 0xffffffffu

// Rows of weights in the file, at a distance from where their section begins.
typedef struct {
  uint64_t at, scale;  // scale: of INT8 alone
  uint32_t rows, columns, kind;
} table;

// Where a layer's weights lie, from where the layer begins.
typedef struct {
  table qkv_proj, gate_down, gate_proj, decay_down, decay_proj, beta_proj, out_proj, up, down;
  uint64_t qkv_bias, gate_down_bias, gate_bias, decay_down_bias, decay_bias, beta_bias, out_bias, up_bias, down_bias;
  uint64_t attn_norm_weight, attn_norm_bias, mlp_norm_weight, mlp_norm_bias, decay, rates, head_norm_weight, skip;
  table conv;
  uint64_t conv_bias;
  table projection;
  uint64_t bytes;
} layer_map;

// A mechanism and its sizes, in which layers may differ.
typedef struct {
  uint32_t heads, kv_heads, projections;
  uint32_t feature_map, decay, denominator, head_norm, head_gate;
  float eps;
  uint32_t conv, unit_keys, update, decay_rank, gate_rank, skip;
  float scale, beta_scale;
  uint32_t window;  // tokens that a query sees of those that are KEPT; 0: all
  // Derived from these.
  uint32_t layers;  // of this kind
  uint32_t inner, sums, features, qkv_width;
  uint64_t kv_floats, layer_floats;  // of the state: of a key-value head, and of a layer
  uint64_t kept_floats;              // of the keys and values of a token; 0 where none are kept
  layer_map map;
} layer_kind;

struct lrt_model {
  const char *file;
  uint32_t checksum, version;
  uint32_t weights, vocabulary, start, layers, width, hidden;
  uint32_t activation, norm_order, norm_kind, final_norm;
  uint32_t position, axes, axis[AXES], lookbacks, lookback[LOOKBACKS];
  uint32_t output, components;
  float norm_eps;
  uint32_t input, inputs, subsampled, stages, names_bytes, spaced, audio;  // of frames from `inputs` on
  lrt_features_config features_config;
  uint32_t dim, kinds;
  layer_kind kind[KINDS];
  // Derived from these.
  uint32_t embedding_width, symbols, params, max_lookback, max_positions;
  table embedding, lookback_embedding[LOOKBACKS], axis_embedding[AXES], head;
  table stage[STAGES], input_proj;
  uint64_t frame_mean, frame_scale, stage_bias[STAGES], input_bias, names;
  uint64_t edge_floats;  // of the frames before, in the state
  uint64_t frequencies, final_weight, final_bias, head_bias;
  uint64_t kinds_offset, layers_offset, head_offset;  // in the file
  uint64_t layers_floats, state_floats;  // of all layers, and with `recent` and the frames before; without what is kept
};

// Followed in memory by the state (`recent`, then for each layer kv, z and n of its key-value heads and the last inputs
// of its convolution, then for each stage the last frame that went in), scratch buffers, and what grows with the tokens:
// for each layer that keeps them the keys of each key-value head, then the values, a row a token, in a ring where there is
// a window.
struct lrt_sequence {
  const lrt_model *model;
  const layer_kind *kind;  // of the layer that the tokens go through
  uint64_t generator, record;
  uint32_t seen, ready;  // ready: whether params are those of the last token
  uint32_t ended, symbol, before;  // symbol: the most probable one of the last frames, and of those before them
  uint32_t count;        // of tokens that go through the weights in this pass
  uint32_t room;         // in tokens
  uint32_t *recent;      // ring buffer of tokens
  float *state, *edges;
  float *rows, *gathered;  // rows: frames, and what becomes of them
  // Of the first of these tokens; those of the next one stand `record` floats behind.
  float *x, *normed, *qkv, *attn_out, *gates, *decays, *betas, *gate_low, *decay_low, *hidden, *sine, *cosine;
  int16_t *quantized;  // the input of a product with INT8 weights
  // Of one token after the other.
  float *k, *q, *rotated_k, *rotated_q, *v, *y, *unit, *keeps;
  float *params, *mixture, *scores, *sorted;
  float *kept, *shares;  // shares: the weights of the tokens that are kept
};

// Numbers.

INLINE uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }
INLINE uint64_t pad_to_lanes(uint64_t n) { return round_up(n, LANES); }

INLINE void copy(void *to, const void *from, uint64_t bytes) { __builtin_memcpy(to, from, (size_t)bytes); }
INLINE void clear(float *x, uint64_t from, uint64_t to) {
  for (uint64_t i = from; i < to; ++i) x[i] = 0;
}
INLINE uint32_t word_at(const char *from) {
  uint32_t x;
  copy(&x, from, 4);
  return x;
}
INLINE vf load(const float *from) {
  vf x;
  copy(&x, from, sizeof x);
  return x;
}
INLINE void store(float *to, vf x) { copy(to, &x, sizeof x); }
INLINE vf splat(float x) { return x - (vf){0}; }  // x + 0 would lose the sign of -0
INLINE vf blend(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf larger(vf a, vf b) { return blend(a > b, a, b); }

// Not __builtin_sqrtf where there is an instruction: unless told that nobody looks at errno, compilers call a library.
INLINE float square_root(float x) {
#if defined(__SSE2__)
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#elif defined(__aarch64__)
  return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0);
#else
  return __builtin_sqrtf(x);
#endif
}

INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__wasm_relaxed_simd__)
  return __builtin_wasm_relaxed_madd_f32x4(a, b, c);
#else
  return a * b + c;
#endif
}

// Lanes 0 .. 15 in halves: i with i + 8, then i + 4, i + 2, i + 1.
INLINE quad quarter_sums(const vf *x) {
  union {
    vf parts[PARTS];
    quad quads[4];
  } lanes;
  UNROLL
  for (int i = 0; i < PARTS; ++i) lanes.parts[i] = x[i];
  return (lanes.quads[0] + lanes.quads[2]) + (lanes.quads[1] + lanes.quads[3]);
}
INLINE float horizontal_sum(const vf *x) {
  const quad sums = quarter_sums(x);
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}
INLINE quad horizontal_sums(const vf x[4][PARTS]) {  // the same of four
#if defined(__AVX512F__)
  const __m512 a = (__m512)x[0][0], b = (__m512)x[1][0], c = (__m512)x[2][0], d = (__m512)x[3][0];
  const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
  __m512 sums = _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
  sums += _mm512_permute_ps(sums, 0x4e);
  sums += _mm512_permute_ps(sums, 0xb1);
  return (quad)_mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums));
#else
  const quad a = quarter_sums(x[0]), b = quarter_sums(x[1]), c = quarter_sums(x[2]), d = quarter_sums(x[3]);
  const quad s0 = {a[0], b[0], c[0], d[0]}, s1 = {a[1], b[1], c[1], d[1]};
  const quad s2 = {a[2], b[2], c[2], d[2]}, s3 = {a[3], b[3], c[3], d[3]};
  return (s0 + s2) + (s1 + s3);
#endif
}

// exp(x) to about 1 unit in the last place: x = n ln 2 + r and the Taylor series in |r| <= 0.35, whose first dropped term
// is below a tenth of that unit. NaN stays NaN, too small becomes 0.
OUTLINE vf exponential(vf x) {
  x = blend(x < -104.0f, splat(-104.0f), x);
  x = blend(x > 89.0f, splat(89.0f), x);
  const float magic = 12582912.0f;  // 1.5 2^23: added, it leaves the nearest integer in the low bits
  const vf shifted = x * 1.44269504f + magic, n = shifted - magic;
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = (p * r * r + r) + 1.0f;
  const vi bits = (vi)((vu)shifted - (vu)splat(magic)), half = bits >> 1;
  p = p * (vf)((vu)(half + 127) << 23);  // in two steps, so that subnormal results are reached
  return p * (vf)((vu)(bits - half + 127) << 23);
}

// ln x for normal x > 0: x = 2^n m, m in [sqrt(1/2), sqrt(2)), and ln m = 2 artanh((m - 1) / (m + 1)). NaN of
// NaN, whose bits are those of a number.
INLINE vf logarithm(vf x) {
  const vi n = ((vi)x - 0x3f3504f3) >> 23;
  const vf m = (vf)((vu)x - ((vu)n << 23)), s = (m - 1.0f) / (m + 1.0f), t = s * s;
  vf p = splat(1.0f / 9);
  p = p * t + 1.0f / 7;
  p = p * t + 1.0f / 5;
  p = p * t + 1.0f / 3;
  const vf k = __builtin_convertvector(n, vf);
  return blend(x == x, k * 0.693359375f + (s * t * p * 2.0f - k * 2.12194440e-4f + 2.0f * s), x);
}

INLINE vf log_sigmoid(vf x) {
  const vf size = blend(x < 0.0f, x, -x);
  return blend(x < 0.0f, x, (vf){0}) - logarithm(exponential(size) + 1.0f);
}

// 1 - exp(-x) for x >= 0, without taking the difference of near numbers.
INLINE vf one_minus_exp(vf x) {
  vf p = splat(-1.0f / 40320);
  p = p * x + 1.0f / 5040;
  p = p * x - 1.0f / 720;
  p = p * x + 1.0f / 120;
  p = p * x - 1.0f / 24;
  p = p * x + 1.0f / 6;
  p = p * x - 0.5f;
  p = p * x * x + x;
  return blend(x < 0.5f, p, 1.0f - exponential(-x));
}

// ln(1 + exp(x)), to a few units in its last place however small it is: ln(1 + e) = 2 artanh(e / (2 + e)).
INLINE vf softplus(vf x) {
  const vf e = exponential(blend(x > 0.0f, -x, x)), s = e / (e + 2.0f), t = s * s;
  vf p = splat(1.0f / 13);
  p = p * t + 1.0f / 11;
  p = p * t + 1.0f / 9;
  p = p * t + 1.0f / 7;
  p = p * t + 1.0f / 5;
  p = p * t + 1.0f / 3;
  return blend(x > 0.0f, x, (vf){0}) + (s * t * p * 2.0f + 2.0f * s);
}

INLINE vf sigmoid(vf x) { return 1.0f / (exponential(-x) + 1.0f); }

// x Phi(x), Hendrycks and Gimpel 2016, arXiv:1606.08415, with erfc as t exp(-z^2 + p(t)), t = 1 / (1 + z / 2), after Press
// et al., Numerical Recipes, section 6.2: within 1.2e-7 of itself for every z >= 0. Below -13 it is 0: soon results would be
// subnormal, and an operation on one of those takes as long as a hundred others.
INLINE vf gelu(vf x) {
  x = blend(x < -13.0f, (vf){0}, x);
  const vi positive = x > 0.0f;
  const vf z = blend(positive, x, -x) * 0.70710678f, t = 1.0f / (z * 0.5f + 1.0f);
  vf p = splat(0.17087277f);
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  // x times the smaller share, which is 0 above 13, so that infinity stays one.
  const vf tail = blend(x > 13.0f, splat(13.0f), x) * 0.5f * t * exponential(p - z * z);
  return blend(positive, x - tail, tail);
}

// sin and cos of an angle below 2^32 in size, to about 1e-13; NaN beyond. pi / 2 is taken off in three parts, of which the
// first two have 21 bits: their multiples are exact.
static void sin_cos(double angle, float *sine, float *cosine) {
  if (!(angle > -4294967296.0 && angle < 4294967296.0)) {
    *sine = *cosine = __builtin_nanf("");
    return;
  }
  const double magic = 6755399441055744.0;  // 1.5 2^52
  const double n = (angle * 0.63661977236758134 + magic) - magic;
  const double r = ((angle - n * 0x1.921fbp+0) - n * 0x1.5110bp-22) - n * 0x1.18469898cc517p-44, t = r * r;
  double s = 1.0 / 6227020800.0, c = -1.0 / 87178291200.0;
  s = s * t - 1.0 / 39916800;
  s = s * t + 1.0 / 362880;
  s = s * t - 1.0 / 5040;
  s = s * t + 1.0 / 120;
  s = s * t - 1.0 / 6;
  s = s * t * r + r;
  c = c * t + 1.0 / 479001600;
  c = c * t - 1.0 / 3628800;
  c = c * t + 1.0 / 40320;
  c = c * t - 1.0 / 720;
  c = c * t + 1.0 / 24;
  c = c * t - 0.5;
  c = c * t + 1;
  const int64_t quarter = (int64_t)n & 3;
  const double a = quarter & 1 ? c : s, b = quarter & 1 ? s : c;
  *sine = (float)(quarter & 2 ? -a : a);
  *cosine = (float)(quarter == 1 || quarter == 2 ? -b : b);
}

uint32_t lrt_checksum(const void *data, size_t bytes) {
  uint32_t tables[4][256];  // what a byte does, one to four bytes before the end
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t x = i;
    for (int bit = 0; bit < 8; ++bit) x = x & 1 ? 0xedb88320u ^ (x >> 1) : x >> 1;
    tables[0][i] = x;
  }
  for (int back = 1; back < 4; ++back)
    for (int i = 0; i < 256; ++i) {
      const uint32_t x = tables[back - 1][i];
      tables[back][i] = tables[0][x & 255] ^ (x >> 8);
    }
  const char *at = data;
  uint32_t sum = 0xffffffffu;
  for (; bytes >= 4; bytes -= 4, at += 4) {
    sum ^= word_at(at);
    sum = tables[3][sum & 255] ^ tables[2][sum >> 8 & 255] ^ tables[1][sum >> 16 & 255] ^ tables[0][sum >> 24];
  }
  for (; bytes; --bytes, ++at) sum = tables[0][(sum ^ (uint8_t)*at) & 255] ^ (sum >> 8);
  return ~sum;
}

// Weights.

INLINE uint64_t element_size(uint32_t kind) { return kind == FLOAT32 ? 4 : kind == FLOAT16 ? 2 : 1; }

// W weights as floats, of FLOAT32 or FLOAT16; `kind` is known when this is compiled.
INLINE vf widen(uint32_t kind, const char *from) {
  if (kind == FLOAT32) return load((const float *)from);
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vld1_f16((const __fp16 *)from));
#else
  typedef uint16_t halves __attribute__((vector_size(2 * W)));
  halves packed;
  copy(&packed, from, sizeof packed);
  const vu x = __builtin_convertvector(packed, vu), bits = (x & 0x7fffu) << 13;
  const vf normal = (vf)(bits + (112u << 23)), subnormal = (vf)(bits + (113u << 23)) - 0x1p-14f;
  const vi small = (vi)bits < 1 << 23;
  return (vf)((vi)blend(small, subnormal, normal) | (vi)((x & 0x8000u) << 16));
#endif
}

#if defined(__wasm_simd128__)
// LANES halves as floats; returns 0 where zeros or subnormal ones are among them. Whole registers take fewer steps than
// parts of them: the upper and the lower 16 bits of each float, put together.
INLINE int widen_normal(const char *from, vf *to) {
  typedef uint16_t halves __attribute__((vector_size(16)));
  typedef int8_t bytes __attribute__((vector_size(16)));
  uint16_t exponent = 0x7c00, others = 0x8fff, bias = 112 << 7;
  __asm__("" : "+r"(exponent), "+r"(others), "+r"(bias));  // no constants: V8 would materialise them in every iteration
  halves x[2];
  copy(x, from, sizeof x);
  if (__builtin_wasm_any_true_v128((bytes)(((x[0] & exponent) == 0) | ((x[1] & exponent) == 0)))) return 0;
  UNROLL
  for (int i = 0; i < 2; ++i) {
    const halves upper = ((halves)((shorts)x[i] >> 3) & others) + bias, lower = x[i] << 13;
    to[2 * i] = (vf)__builtin_shufflevector(lower, upper, 0, 8, 1, 9, 2, 10, 3, 11);
    to[2 * i + 1] = (vf)__builtin_shufflevector(lower, upper, 4, 12, 5, 13, 6, 14, 7, 15);
  }
  return 1;
}
#endif

// LANES weights as floats.
INLINE void widen_lanes(uint32_t kind, const char *from, vf *to) {
#if defined(__wasm_simd128__)
  if (kind == FLOAT16 && widen_normal(from, to)) return;
#endif
  UNROLL
  for (int i = 0; i < PARTS; ++i) to[i] = widen(kind, from + (uint64_t)(i * W) * element_size(kind));
}

// sums[r] = row r . x for `rows` rows, `stride` bytes apart, of `columns` weights, a multiple of LANES.
INLINE void dot_rows(uint32_t kind, int rows, const char *weights, uint64_t stride, const float *x, uint64_t columns,
                     float *sums) {
  vf totals[ROWS][PARTS];
  UNROLL
  for (int r = 0; r < rows; ++r) {
    UNROLL
    for (int i = 0; i < PARTS; ++i) totals[r][i] = (vf){0};
  }
  for (uint64_t at = 0; at < columns; at += LANES) {
    vf values[PARTS];
    UNROLL
    for (int i = 0; i < PARTS; ++i) values[i] = load(x + at + i * W);
    UNROLL
    for (int r = 0; r < rows; ++r) {
      vf row[PARTS];
      widen_lanes(kind, weights + (uint64_t)r * stride + at * element_size(kind), row);
      UNROLL
      for (int i = 0; i < PARTS; ++i) totals[r][i] = multiply_add(row[i], values[i], totals[r][i]);
    }
  }
  UNROLL
  for (int r = 0; r < rows; ++r) sums[r] = horizontal_sum(totals[r]);
}

// sums[r * COLUMNS + c] = row r . x[c] for TILE rows and COLUMNS vectors x_stride floats apart, each as dot_rows takes it.
INLINE void dot_tile(uint32_t kind, const char *weights, uint64_t stride, const float *x, uint64_t x_stride,
                     uint64_t columns, float *sums) {
  vf totals[TILE][COLUMNS][PARTS];
  for (int i = 0; i < PARTS; ++i) {
    vf part[TILE][COLUMNS];
    UNROLL
    for (int r = 0; r < TILE; ++r) {
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) part[r][c] = (vf){0};
    }
    for (uint64_t at = (uint64_t)(i * W); at < columns; at += LANES) {
      vf values[COLUMNS];
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) values[c] = load(x + (uint64_t)c * x_stride + at);
      UNROLL
      for (int r = 0; r < TILE; ++r) {
        const vf row = widen(kind, weights + (uint64_t)r * stride + at * element_size(kind));
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) part[r][c] = multiply_add(row, values[c], part[r][c]);
      }
    }
    UNROLL
    for (int r = 0; r < TILE; ++r) {
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) totals[r][c][i] = part[r][c];
    }
  }
  UNROLL
  for (int r = 0; r < TILE; ++r) {
    const quad found = horizontal_sums(totals[r]);
    copy(sums + r * COLUMNS, &found, sizeof found);
  }
}

// Quantizes x to integers of at most 32767; returns their scale, NaN or infinite where a number of x is. All are 0 where
// no number of x is above 1e-30.
static float quantize(const float *x, uint64_t columns, int16_t *to) {
  vi sizes = {0};  // as bits, of which NaN has the largest
  for (uint64_t at = 0; at < columns; at += W) {
    const vi size = (vi)load(x + at) & 0x7fffffff;
    sizes = (vi)blend(size > sizes, (vf)size, (vf)sizes);
  }
  int32_t most = 0;
  for (int i = 0; i < W; ++i) most = sizes[i] > most ? sizes[i] : most;
  float size;
  copy(&size, &most, 4);
  const int finite = size > 1e-30f && size <= __FLT_MAX__;
  const float inverse = 32767 / size, magic = 12582912.0f;  // as in exponential
  for (uint64_t at = 0; at < columns; at += W) {
    typedef int16_t narrow __attribute__((vector_size(2 * W)));
    const vu shifted = (vu)(load(x + at) * inverse + magic) - (vu)splat(magic);
    const narrow integers = __builtin_convertvector((vi)shifted & -finite, narrow);
    copy(to + at, &integers, sizeof integers);
  }
  return size / 32767;
}

INLINE int32_t horizontal_sum_pairs(pairs x) {
  typedef int32_t four __attribute__((vector_size(16)));
  union {
    pairs all;
    four parts[PIECE / 16];
  } lanes = {x};
  four sums = lanes.parts[0];
  if (PIECE > 16) sums += lanes.parts[PIECE / 16 - 1];
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

INLINE shorts widen_bytes(const char *from) {
#if defined(__AVX2__)
  return (shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#else
  typedef int8_t packed __attribute__((vector_size(PIECE / 2)));
  packed x;
  copy(&x, from, sizeof x);
  return __builtin_convertvector(x, shorts);
#endif
}

// The products of a and b, summed in pairs; which ones does not matter, since the sum of all is exact.
INLINE pairs multiply_pairs(shorts a, shorts b) {
#if defined(__AVX2__)
  return (pairs)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (pairs)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__wasm_simd128__)
  return __builtin_wasm_dot_s_i32x4_i16x8(a, b);
#elif defined(__aarch64__)
  return (pairs)vmlal_high_s16(vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b)), (int16x8_t)a,
                               (int16x8_t)b);
#else
  const pairs first = ((pairs)a << 16 >> 16) * ((pairs)b << 16 >> 16);
  return first + ((pairs)a >> 16) * ((pairs)b >> 16);
#endif
}

// dot_rows for INT8 weights and quantized x.
INLINE void dot_bytes(int rows, const char *weights, uint64_t stride, const int16_t *x, uint64_t columns, float *sums) {
  UNROLL
  for (int r = 0; r < rows; ++r) sums[r] = 0;
  for (uint64_t begin = 0; begin < columns; begin += BLOCK) {
    const uint64_t end = columns - begin < BLOCK ? columns : begin + BLOCK;
    pairs totals[ROWS];
    UNROLL
    for (int r = 0; r < rows; ++r) totals[r] = (pairs){0};
    for (uint64_t at = begin; at < end; at += LANES) {
      UNROLL
      for (int i = 0; i < PIECES; ++i) {
        shorts values;
        copy(&values, x + at + i * PIECE / 2, sizeof values);
        UNROLL
        for (int r = 0; r < rows; ++r)
          totals[r] += multiply_pairs(widen_bytes(weights + (uint64_t)r * stride + at + i * PIECE / 2), values);
      }
    }
    UNROLL
    for (int r = 0; r < rows; ++r) sums[r] += (float)horizontal_sum_pairs(totals[r]);
  }
}

// dot_tile for INT8 weights and quantized x, x_stride numbers apart.
INLINE void dot_bytes_tile(const char *weights, uint64_t stride, const int16_t *x, uint64_t x_stride, uint64_t columns,
                           float *sums) {
  UNROLL
  for (int r = 0; r < TILE * COLUMNS; ++r) sums[r] = 0;
  for (uint64_t begin = 0; begin < columns; begin += BLOCK) {
    const uint64_t end = columns - begin < BLOCK ? columns : begin + BLOCK;
    pairs totals[TILE][COLUMNS];
    UNROLL
    for (int r = 0; r < TILE; ++r) {
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) totals[r][c] = (pairs){0};
    }
    for (uint64_t at = begin; at < end; at += PIECE / 2) {
      shorts values[COLUMNS];
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) copy(&values[c], x + (uint64_t)c * x_stride + at, sizeof values[c]);
      UNROLL
      for (int r = 0; r < TILE; ++r) {
        const shorts row = widen_bytes(weights + (uint64_t)r * stride + at);
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) totals[r][c] += multiply_pairs(row, values[c]);
      }
    }
    UNROLL
    for (int r = 0; r < TILE; ++r) {
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) sums[r * COLUMNS + c] += (float)horizontal_sum_pairs(totals[r][c]);
    }
  }
}

// The arguments of a product of a matrix with the vectors of `count` tokens, `record` floats apart.
typedef struct {
  const table *map;
  const char *base;
  const float *bias, *x;     // bias may be null
  const int16_t *quantized;  // x for INT8, and
  float x_scale[TOKENS];     // its scales
  float *y;
  int add;  // to y, instead of overwriting it
  uint64_t record;
  uint32_t count;
} operands;

// y = scale sum + bias, of one row and token.
INLINE void finish_product(uint32_t kind, const operands *o, uint64_t row, uint32_t token, float sum) {
  float *y = o->y + token * o->record + row;
  if (kind == INT8) {
    sum *= o->x_scale[token] * ((const float *)(o->base + o->map->scale))[row];
    __asm__("" : "+r"(sum));  // rounded here: compilers would fuse it with the next sum for some processors only
  }
  if (o->bias) sum += o->bias[row];
  *y = o->add ? *y + sum : sum;
}

// Rows `first`, first + stride, ... of scale (W x) + bias for one token.
INLINE void matvec_rows(uint32_t kind, int rows, const operands *o, uint64_t first, uint64_t stride, uint32_t token) {
  const uint64_t columns = pad_to_lanes(o->map->columns), step = columns * element_size(kind);
  const char *weights = o->base + o->map->at + first * step;
  float sums[ROWS];
  if (kind == INT8)
    dot_bytes(rows, weights, stride * step, o->quantized + 2 * token * o->record, columns, sums);
  else
    dot_rows(kind, rows, weights, stride * step, o->x + token * o->record, columns, sums);
  UNROLL
  for (int r = 0; r < rows; ++r) finish_product(kind, o, first + (uint64_t)r * stride, token, sums[r]);
}

// TILE rows from `first` on for all tokens, COLUMNS at once: those behind the last are summed too, and left there.
INLINE void matmul_rows(uint32_t kind, const operands *o, uint64_t first) {
  const uint64_t columns = pad_to_lanes(o->map->columns), step = columns * element_size(kind);
  const char *weights = o->base + o->map->at + first * step;
  for (uint32_t token = 0; token < o->count; token += COLUMNS) {
    float sums[TILE * COLUMNS];
    const uint64_t at = token * o->record;
    if (kind == INT8)
      dot_bytes_tile(weights, step, o->quantized + 2 * at, 2 * o->record, columns, sums);
    else
      dot_tile(kind, weights, step, o->x + at, o->record, columns, sums);
    for (int r = 0; r < TILE; ++r)
      for (uint32_t c = 0; c < COLUMNS && token + c < o->count; ++c)
        finish_product(kind, o, first + (uint64_t)r, token + c, sums[r * COLUMNS + (int)c]);
  }
}

INLINE void matvec_kind(uint32_t kind, const operands *o) {
  const uint64_t rows = o->map->rows, stride = rows / ROWS;
  uint64_t row = 0;
  if (o->count > 1) {
    for (; row + TILE <= rows; row += TILE) matmul_rows(kind, o, row);
  } else {
    for (; row < stride; ++row) matvec_rows(kind, ROWS, o, row, stride, 0);
    row = stride * ROWS;
  }
  for (; row < rows; ++row)
    for (uint32_t token = 0; token < o->count; ++token) matvec_rows(kind, 1, o, row, 0, token);
}

// y = W x + bias for the tokens of this pass, with zeros after, or y += that.
static void matvec(const lrt_sequence *s, const table *map, const char *base, const float *bias, const float *x,
                   float *y, int add) {
  operands o = {.map = map, .base = base, .bias = bias, .x = x, .quantized = s->quantized, .y = y, .add = add,
                .record = s->record, .count = s->count};
  for (uint32_t i = 0; map->kind == INT8 && i < s->count; ++i)
    o.x_scale[i] = quantize(x + i * s->record, pad_to_lanes(map->columns), s->quantized + 2 * i * s->record);
  if (map->kind == FLOAT32)
    matvec_kind(FLOAT32, &o);
  else if (map->kind == FLOAT16)
    matvec_kind(FLOAT16, &o);
  else
    matvec_kind(INT8, &o);
  for (uint32_t i = 0; !add && i < s->count; ++i) clear(y + i * s->record, map->rows, pad_to_lanes(map->rows));
}

// Adds a row of a table, FLOAT32 or FLOAT16.
static void add_row(const table *map, const char *base, uint32_t row, float *x) {
  const uint64_t columns = pad_to_lanes(map->columns);
  const char *from = base + map->at + row * columns * element_size(map->kind);
  for (uint64_t i = 0; i < columns; i += W)
    store(x + i, load(x + i) + (map->kind == FLOAT32 ? widen(FLOAT32, from + 4 * i) : widen(FLOAT16, from + 2 * i)));
}

// The file. The header determines the sections; a walk finds where each begins and, given `base`, checks its contents.

typedef struct {
  const char *base;
  uint64_t at;
  int error;  // the first one
  char *to;   // where a copy with weights of FLOAT32 is written, if one is
} walk;

INLINE void fail(walk *w, int error) {
  if (!w->error) w->error = error;
}

// Moves past a section of the file and the zeros up to the next multiple of LRT_ALIGN; returns where it begins.
OUTLINE uint64_t section(walk *w, uint64_t bytes) {
  const uint64_t at = w->at;
  w->at += round_up(bytes, LRT_ALIGN);
  if (w->base)
    for (uint64_t i = at + bytes; i < w->at; ++i)
      if (w->base[i]) fail(w, LRT_BAD_PADDING);
  return at;
}

// Copies a section that begins at `at` and ends where the walk is.
static void copy_section(walk *w, uint64_t at) {
  if (!w->to) return;
  copy(w->to, w->base + at, w->at - at);
  w->to += w->at - at;
}

// Returns whether some of these are NaN or infinite.
OUTLINE int has_nonfinite(uint32_t kind, const char *from, uint64_t count) {
  uint32_t found = 0;
  if (kind == FLOAT32)
    for (uint64_t i = 0; i < count; ++i) found |= (word_at(from + 4 * i) & 0x7f800000u) == 0x7f800000u;
  if (kind == FLOAT16)
    for (uint64_t i = 0; i < count; ++i) {
      uint16_t x;
      copy(&x, from + 2 * i, 2);
      found |= (x & 0x7c00) == 0x7c00;
    }
  return found != 0;
}

// Checks rows of numbers and their padding; returns where they end.
OUTLINE uint64_t check_rows(walk *w, uint32_t kind, uint64_t at, uint64_t rows, uint64_t columns) {
  const uint64_t size = element_size(kind), step = pad_to_lanes(columns) * size;
  for (uint64_t row = 0; row < rows; ++row) {
    const char *from = w->base + at + row * step;
    if (has_nonfinite(kind, from, columns)) fail(w, LRT_BAD_NUMBER);
    for (uint64_t i = columns * size; i < step; ++i)
      if (from[i]) fail(w, LRT_BAD_PADDING);
  }
  return at + rows * step;
}

// A vector of numbers from least to most; -0 is not below 0.
static uint64_t bounded_vector(walk *w, uint64_t count, float least, float most) {
  const uint64_t at = section(w, pad_to_lanes(count) * 4);
  if (w->base) {
    check_rows(w, FLOAT32, at, 1, count);
    const float *x = (const float *)(w->base + at);
    for (uint64_t i = 0; i < count; ++i)
      if (!(x[i] >= least && x[i] <= most)) fail(w, LRT_BAD_NUMBER);
  }
  copy_section(w, at);
  return at;
}

static uint64_t vector(walk *w, uint64_t count) { return bounded_vector(w, count, -__FLT_MAX__, __FLT_MAX__); }

static table matrix(walk *w, uint32_t kind, uint32_t rows, uint32_t columns) {
  table map = {.rows = rows, .columns = columns, .kind = kind};
  if (kind == INT8) map.scale = bounded_vector(w, rows, 0, __FLT_MAX__);
  const uint64_t count = rows * pad_to_lanes(columns);
  map.at = section(w, count * element_size(kind));
  if (w->base) check_rows(w, kind, map.at, rows, columns);
  if (!w->to || kind != FLOAT16) {
    copy_section(w, map.at);
    return map;
  }
  for (uint64_t i = 0; i < count; i += W) store((float *)w->to + i, widen(FLOAT16, w->base + map.at + 2 * i));
  w->to += 4 * count;
  return map;
}

static uint64_t main_header(const lrt_model *m) { return m->version == 1 ? HEADER : HEADER_2; }

// Bytes before the kinds of layers beside the first.
static uint64_t fixed_headers(const lrt_model *m) {
  return main_header(m) + (m->input == FRAME_INPUT ? FRAMES_HEADER : 0);
}

// Bytes before the first section.
static uint64_t headers(const lrt_model *m) {
  if (m->version < 3) return fixed_headers(m);
  return fixed_headers(m) + (m->kinds - 1) * (uint64_t)KIND_RECORD + round_up(m->layers, LRT_ALIGN);
}

// Which kind of layer layer i is.
INLINE uint32_t kind_of(const lrt_model *m, uint32_t i) {
  return m->kinds > 1 ? (uint8_t)m->file[m->kinds_offset + i] : 0;
}

// A matrix of the model's weights and its bias.
static table linear(const lrt_model *m, walk *w, uint32_t rows, uint32_t columns, uint64_t *bias) {
  const table map = matrix(w, m->weights, rows, columns);
  *bias = vector(w, rows);
  return map;
}

// The names of the symbols, each followed by a 0.
static void walk_names(lrt_model *m, walk *w) {
  m->names = section(w, m->names_bytes);
  if (!w->base) return;
  copy_section(w, m->names);
  const char *names = w->base + m->names;
  uint32_t count = 0;
  for (uint32_t i = 0; i < m->names_bytes; ++i) {
    if (names[i]) continue;
    ++count;
    if (!i || !names[i - 1]) fail(w, LRT_BAD_NAMES);
  }
  if (count != m->vocabulary - 1 || names[m->names_bytes - 1]) fail(w, LRT_BAD_NAMES);
}

// What frames go through before the layers.
static void walk_frames(lrt_model *m, walk *w) {
  m->frame_mean = vector(w, m->inputs);
  m->frame_scale = vector(w, m->inputs);
  for (uint32_t i = 0; i < m->stages; ++i)
    m->stage[i] = linear(m, w, m->subsampled, 3 * (i ? m->subsampled : m->inputs), &m->stage_bias[i]);
  m->input_proj = linear(m, w, m->embedding_width, m->subsampled, &m->input_bias);
  walk_names(m, w);
}

static void walk_embeddings(lrt_model *m, walk *w) {
  const uint32_t kind = m->weights == FLOAT32 ? FLOAT32 : FLOAT16;  // a row is read at a time: int8 would gain nothing
  if (m->input == FRAME_INPUT)
    walk_frames(m, w);
  else
    m->embedding = matrix(w, kind, m->symbols, m->embedding_width);
  for (uint32_t i = 0; i < m->lookbacks; ++i)
    m->lookback_embedding[i] = matrix(w, kind, m->symbols, m->embedding_width);
  for (uint32_t i = 0; i < m->axes; ++i) m->axis_embedding[i] = matrix(w, kind, m->axis[i], m->width);
  if (m->position == SINUSOIDAL || m->position == CONCATENATED || m->position == ROTARY) {
    const uint64_t count = (m->position == ROTARY ? m->dim : m->embedding_width) / 2;
    m->frequencies = section(w, count * 8);
    for (uint64_t i = 0; w->base && i < count; ++i) {
      const double x = ((const double *)(w->base + m->frequencies))[i];
      if (!(x >= 0 && x <= 1)) fail(w, LRT_BAD_NUMBER);  // so that no angle reaches 2^32
    }
    copy_section(w, m->frequencies);
  }
}

static void walk_norm(const lrt_model *m, walk *w, uint64_t *weight, uint64_t *bias) {
  *weight = vector(w, m->width);
  *bias = m->norm_kind == LAYER_NORM ? vector(w, m->width) : 0;
}

static void walk_layer(const lrt_model *m, layer_kind *k, walk *w) {
  layer_map *l = &k->map;
  const uint32_t width = m->width, inner = k->inner, groups = k->kv_heads, features = groups * m->dim;
  walk_norm(m, w, &l->attn_norm_weight, &l->attn_norm_bias);
  l->qkv_proj = linear(m, w, k->qkv_width, width, &l->qkv_bias);
  if (k->conv) {
    l->conv = matrix(w, FLOAT32, k->conv, k->qkv_width);
    l->conv_bias = vector(w, k->qkv_width);
  }
  if (k->gate_rank) l->gate_down = linear(m, w, k->gate_rank, width, &l->gate_down_bias);
  if (k->head_gate) l->gate_proj = linear(m, w, inner, k->gate_rank ? k->gate_rank : width, &l->gate_bias);
  if (k->decay_rank) l->decay_down = linear(m, w, k->decay_rank, width, &l->decay_down_bias);
  if (k->decay == PER_FEATURE) l->decay_proj = linear(m, w, features, k->decay_rank, &l->decay_bias);
  if (k->decay == GATED || k->decay == PER_HEAD) l->decay_proj = linear(m, w, groups, width, &l->decay_bias);
  if (k->decay == FIXED) l->decay = bounded_vector(w, groups, 0, 1);
  if (k->decay == PER_HEAD || k->decay == PER_FEATURE) l->rates = bounded_vector(w, groups, 0, __FLT_MAX__);
  if (k->update == DELTA) l->beta_proj = linear(m, w, groups, width, &l->beta_bias);
  if (k->projections) l->projection = matrix(w, FLOAT32, groups * k->projections, m->dim);
  if (k->skip) l->skip = vector(w, k->heads);
  if (k->head_norm == WEIGHTED_HEADS) l->head_norm_weight = vector(w, m->dim);
  if (k->head_norm == ALL_HEADS) l->head_norm_weight = vector(w, inner);
  l->out_proj = linear(m, w, width, inner, &l->out_bias);
  if (m->hidden) {
    walk_norm(m, w, &l->mlp_norm_weight, &l->mlp_norm_bias);
    l->up = linear(m, w, m->hidden * (m->activation == SWIGLU ? 2 : 1), width, &l->up_bias);
    l->down = linear(m, w, width, m->hidden, &l->down_bias);
  }
  l->bytes = w->at;
}

static void walk_head(lrt_model *m, walk *w) {
  if (m->final_norm) walk_norm(m, w, &m->final_weight, &m->final_bias);
  m->head = linear(m, w, m->params, m->width, &m->head_bias);
}

// Finds where everything begins; returns the bytes of the file.
static uint64_t walk_file(lrt_model *m) {
  walk front = {.at = headers(m)}, back = {0};
  walk_embeddings(m, &front);
  m->layers_offset = m->head_offset = front.at;
  for (uint32_t i = 0; i < m->kinds; ++i) {
    walk layer = {0};
    walk_layer(m, &m->kind[i], &layer);
    m->head_offset += m->kind[i].layers * layer.at;
  }
  walk_head(m, &back);
  return m->head_offset + back.at;
}

// Checks the content of the file; `to`, where it is given, receives it with weights of FLOAT32.
static int walk_contents(lrt_model *m, char *to) {
  walk w = {.base = m->file, .at = headers(m), .to = to};
  walk_embeddings(m, &w);
  w.base = m->file + m->layers_offset;
  for (uint32_t i = 0; i < m->layers; ++i) {
    w.at = 0;
    walk_layer(m, &m->kind[kind_of(m, i)], &w);
    w.base += w.at;
  }
  w.base = m->file + m->head_offset;
  w.at = 0;
  walk_head(m, &w);
  return w.error;
}

typedef struct {
  const char *at;
  int error;
} reader;

OUTLINE uint32_t read_word(reader *r, uint32_t least, uint32_t most, int error) {
  const uint32_t x = word_at(r->at);
  r->at += 4;
  if (!r->error && (x < least || x > most)) r->error = error;
  return x;
}

static uint32_t read_enum(reader *r, uint32_t last) { return read_word(r, 0, last, LRT_UNKNOWN_KIND); }
static uint32_t read_size(reader *r, uint32_t least, uint32_t most) { return read_word(r, least, most, LRT_BAD_SIZES); }

OUTLINE float read_float(reader *r) {
  float x;
  copy(&x, r->at, 4);
  r->at += 4;
  if (!r->error && !(x >= 0 && x <= __FLT_MAX__)) r->error = LRT_BAD_NUMBER;
  return x;
}

// The fields of a kind of layers, in the three parts in which they stand in the header.
static void read_heads(reader *r, layer_kind *k) {
  k->heads = read_size(r, 1, 1 << 16);
  k->kv_heads = read_size(r, 1, 1 << 16);
  k->projections = read_size(r, 0, 1 << 15);
}

static void read_mechanism(reader *r, layer_kind *k, int first) {
  k->feature_map = read_enum(r, ARC_COSINE);
  k->decay = read_enum(r, first ? GATED : PER_FEATURE);
  k->denominator = read_enum(r, BOUNDED);
  k->head_norm = read_enum(r, first ? PLAIN_HEADS : ALL_HEADS);
  k->head_gate = read_enum(r, first ? SILU : SIGMOID);
}

static void read_additions(reader *r, layer_kind *k, uint32_t version) {
  k->conv = read_size(r, 0, 1 << 10);
  k->unit_keys = read_enum(r, 1);
  k->update = read_enum(r, version < 3 ? STEPPED : KEPT);
  k->decay_rank = read_size(r, 0, 1 << 16);
  k->gate_rank = read_size(r, 0, 1 << 16);
  k->skip = read_enum(r, 1);
  k->scale = read_float(r);
  k->beta_scale = read_float(r);
  if (version > 2) k->window = read_size(r, 0, KEPT_TOKENS);
}

// The fields, each within bounds that keep every product below within 64 bits.
static int read_header(lrt_model *m, const char *file) {
  reader r = {file + 24, LRT_OK};
  layer_kind *k = &m->kind[0];
  const int first = m->version == 1;
  m->weights = read_enum(&r, INT8);
  m->vocabulary = read_size(&r, 1, 1 << 24);
  m->start = read_enum(&r, 1);
  m->layers = read_size(&r, 1, 1 << 12);
  m->width = read_size(&r, 1, 1 << 16);
  read_heads(&r, k);
  m->hidden = read_size(&r, first, 1 << 20);
  m->activation = read_enum(&r, RELU_MLP);
  m->norm_order = read_enum(&r, POST);
  m->norm_kind = read_enum(&r, RMS_NORM);
  m->final_norm = read_enum(&r, 1);
  m->position = read_enum(&r, ROTARY);
  m->axes = read_size(&r, 0, AXES);
  for (uint32_t i = 0; i < AXES; ++i) m->axis[i] = read_size(&r, i < m->axes, i < m->axes ? 1 << 24 : 0);
  m->lookbacks = read_size(&r, 0, LOOKBACKS);
  for (uint32_t i = 0; i < LOOKBACKS; ++i)
    m->lookback[i] = read_size(&r, i < m->lookbacks, i < m->lookbacks ? 1 << 16 : 0);
  read_mechanism(&r, k, first);
  m->output = read_enum(&r, MIXTURE);
  m->components = read_size(&r, 0, 1 << 16);
  k->eps = read_float(&r);
  m->norm_eps = read_float(&r);
  while (r.at < file + HEADER - 4) read_word(&r, 0, 0, LRT_BAD_PADDING);
  m->input = read_enum(&r, FRAME_INPUT);
  m->kinds = k->layers = 1;
  k->scale = 1;
  if (first) return r.error;
  m->dim = read_size(&r, 1, 1 << 16);
  read_additions(&r, k, m->version);
  if (m->version > 2) m->kinds = read_size(&r, 1, KINDS);
  while (r.at < file + HEADER_2) read_word(&r, 0, 0, LRT_BAD_PADDING);
  return r.error;
}

// The kinds of layers beside the first, and which one each layer is; counts them.
static int read_kinds(lrt_model *m, const char *file) {
  const char *begin = file + fixed_headers(m);
  reader r = {begin, LRT_OK};
  m->kind[0].layers = m->layers;
  if (m->version < 3) return LRT_OK;
  for (uint32_t i = 1; i < m->kinds; ++i) {
    layer_kind *k = &m->kind[i];
    read_heads(&r, k);
    read_mechanism(&r, k, 0);
    k->eps = read_float(&r);
    read_additions(&r, k, m->version);
    while (r.at < begin + i * KIND_RECORD) read_word(&r, 0, 0, LRT_BAD_PADDING);
  }
  m->kinds_offset = (uint64_t)(r.at - file);
  m->kind[0].layers = 0;
  for (uint64_t i = 0; i < round_up(m->layers, LRT_ALIGN); ++i) {
    const uint8_t number = (uint8_t)r.at[i];
    if (i >= m->layers && number) return r.error ? r.error : LRT_BAD_PADDING;
    if (i < m->layers && number >= m->kinds) return r.error ? r.error : LRT_BAD_SIZES;
    if (i < m->layers) ++m->kind[number].layers;
  }
  for (uint32_t i = 0; i < m->kinds; ++i)
    if (!r.error && !m->kind[i].layers) r.error = LRT_BAD_SIZES;
  return r.error;
}

// The header behind the header of a model that reads frames.
static int read_frames_header(lrt_model *m, const char *file) {
  const char *begin = file + main_header(m);
  reader r = {begin, LRT_OK};
  lrt_features_config *c = &m->features_config;
  m->inputs = read_size(&r, 1, 1 << 16);
  m->subsampled = read_size(&r, 1, 1 << 16);
  m->stages = read_size(&r, 0, STAGES);
  m->names_bytes = read_size(&r, 2, 1 << 30);
  m->spaced = read_enum(&r, 1);
  m->audio = read_enum(&r, FILTERBANK);
  const uint32_t most = m->audio ? UINT32_MAX : 0;
  c->rate = read_size(&r, 0, most);
  c->frame = read_size(&r, 0, most);
  c->shift = read_size(&r, 0, most);
  c->low_hz = read_float(&r);
  c->high_hz = read_float(&r);
  c->bins = m->inputs;
  while (r.at < begin + FRAMES_HEADER) read_word(&r, 0, 0, LRT_BAD_PADDING);
  if (r.error) return r.error;
  if ((m->stages == 0 && m->subsampled != m->inputs) || m->start || m->lookbacks || m->output != LOGITS ||
      m->vocabulary < 2)
    return LRT_BAD_SIZES;
  if (m->audio == GIVEN) return c->low_hz == 0 && c->high_hz == 0 ? LRT_OK : LRT_BAD_SIZES;
  return lrt_features_valid(c) ? LRT_OK : LRT_BAD_SIZES;
}

// Checks the fields of a kind of layers against each other, and computes what follows from them.
static int derive_kind(const lrt_model *m, layer_kind *k) {
  const int projects = k->feature_map == TRIGONOMETRIC || k->feature_map == ARC_COSINE;
  if ((uint64_t)k->heads * m->dim > 1 << 18 || k->heads % k->kv_heads || (k->projections != 0) != projects)
    return LRT_BAD_SIZES;
  if ((k->decay_rank != 0) != (k->decay == PER_FEATURE) ||
      (k->decay == PER_FEATURE && (projects || k->denominator != NO_DENOMINATOR)) ||
      (k->gate_rank && !k->head_gate) || (k->update == STEPPED && k->decay != PER_HEAD) ||
      (k->update == DELTA && projects) || (k->update != ADDED && (k->denominator != NO_DENOMINATOR || k->decay == GATED)))
    return LRT_BAD_SIZES;
  if (k->update == KEPT ? k->feature_map != IDENTITY || k->decay != NO_DECAY || k->skip : k->window != 0)
    return LRT_BAD_SIZES;
  k->inner = k->heads * m->dim;
  k->sums = m->version == 1 || k->denominator != NO_DENOMINATOR;
  k->features = !projects ? m->dim : k->feature_map == TRIGONOMETRIC ? 2 * k->projections : k->projections;
  k->qkv_width = (k->heads + 2 * k->kv_heads) * m->dim;
  k->layer_floats = (k->conv > 1 ? k->conv - 1 : 0) * pad_to_lanes(k->qkv_width);
  if (k->update == KEPT) {
    k->kept_floats = 2 * k->kv_heads * pad_to_lanes(m->dim);
    return LRT_OK;
  }
  k->kv_floats = k->features * pad_to_lanes(m->dim);
  k->layer_floats += k->kv_heads * k->kv_floats;
  if (k->sums) k->layer_floats += k->kv_heads * pad_to_lanes(k->features) + pad_to_lanes(k->kv_heads);
  return LRT_OK;
}

// Checks the fields against each other and computes what follows from them.
static int derive(lrt_model *m) {
  if (m->version == 1) m->dim = m->width % m->kind[0].heads ? 0 : m->width / m->kind[0].heads;
  if (!m->dim || (m->position == LEARNED) != (m->axes != 0) || (m->lookbacks && !m->start) ||
      (m->output == MIXTURE) != (m->components != 0) || (m->output == MIXTURE && m->vocabulary < 2))
    return LRT_BAD_SIZES;
  m->embedding_width = m->position == CONCATENATED ? m->width / 2 : m->width;
  if ((m->position == SINUSOIDAL && m->width % 2) || (m->position == CONCATENATED && m->width % 4) ||
      (m->position == ROTARY && m->dim % 2))
    return LRT_BAD_SIZES;
  m->symbols = m->vocabulary + m->start;
  m->params = m->output == MIXTURE ? 3 * m->components : m->vocabulary;
  for (uint32_t i = 0; i < m->lookbacks; ++i)
    m->max_lookback = m->lookback[i] > m->max_lookback ? m->lookback[i] : m->max_lookback;
  uint64_t last = m->axes ? 1 : LAST_POSITION;
  for (uint32_t i = 0; i < m->axes; ++i) {
    last *= m->axis[i];
    if (last > LAST_POSITION) last = LAST_POSITION;
  }
  for (uint32_t i = 0; i < m->kinds; ++i) {
    layer_kind *k = &m->kind[i];
    const int error = derive_kind(m, k);
    if (error) return error;
    if (k->kept_floats && !k->window && last > KEPT_TOKENS) last = KEPT_TOKENS;
    m->layers_floats += k->layers * k->layer_floats;
  }
  m->max_positions = (uint32_t)last;
  m->edge_floats = m->stages ? pad_to_lanes(m->inputs) + (m->stages - 1) * pad_to_lanes(m->subsampled) : 0;
  m->state_floats = pad_to_lanes(m->max_lookback) + m->layers_floats + m->edge_floats;
  return LRT_OK;
}

// Rows of keys and values that a layer keeps of so many tokens.
static uint64_t kept_rows(const layer_kind *k, uint64_t tokens) {
  return !k->kept_floats ? 0 : k->window && k->window < tokens ? k->window : tokens;
}

// The floats of these rows in all layers.
OUTLINE uint64_t kept_floats(const lrt_model *m, uint64_t tokens) {
  uint64_t floats = 0;
  for (uint32_t i = 0; i < m->kinds; ++i)
    floats += m->kind[i].layers * kept_rows(&m->kind[i], tokens) * m->kind[i].kept_floats;
  return floats;
}

static float *carve(float *base, uint64_t *at, uint64_t floats) {
  float *const here = base ? base + *at : 0;
  *at += pad_to_lanes(floats);
  return here;
}

static uint64_t larger_of(uint64_t a, uint64_t b) { return a > b ? a : b; }

static uint64_t row_floats(const lrt_model *m) { return pad_to_lanes(larger_of(m->inputs, m->subsampled)); }

// Lays out the buffers of a sequence with room for so many tokens from `base` on (null: only counts); returns how many
// floats they take. More tokens need more after the others.
static uint64_t lay_out(lrt_sequence *s, const lrt_model *m, uint64_t tokens, float *base) {
  uint64_t at = 0, qkv = 0, inner = 0, decays = 0, groups = 0, gate_rank = 0, decay_rank = 0, features = 0, rows = 0;
  for (uint32_t i = 0; i < m->kinds; ++i) {
    const layer_kind *k = &m->kind[i];
    qkv = larger_of(qkv, k->qkv_width);
    inner = larger_of(inner, k->inner);
    decays = larger_of(decays, k->decay == PER_FEATURE ? k->kv_heads * m->dim : k->kv_heads);
    groups = larger_of(groups, k->kv_heads);
    gate_rank = larger_of(gate_rank, k->gate_rank);
    decay_rank = larger_of(decay_rank, k->decay_rank);
    features = larger_of(features, k->features);
    rows = larger_of(rows, kept_rows(k, tokens));
  }
  s->recent = (uint32_t *)carve(base, &at, m->max_lookback);
  s->state = carve(base, &at, m->layers_floats);
  s->edges = carve(base, &at, m->edge_floats);
  const uint64_t gathered = m->stages ? 3 * larger_of(m->inputs, m->subsampled) : 0;
  const uint64_t first = at, before = larger_of(gathered, m->subsampled), ranks = larger_of(decay_rank, gate_rank);
  const uint64_t within = larger_of(larger_of(m->hidden, m->width), larger_of(inner, ranks));
  const uint64_t inputs = larger_of(before, within);  // of a product
  s->x = carve(base, &at, m->width);
  s->normed = carve(base, &at, m->width);
  s->qkv = carve(base, &at, qkv);
  s->attn_out = carve(base, &at, inner);
  s->gates = carve(base, &at, inner);
  s->decays = carve(base, &at, decays + LANES);
  s->betas = carve(base, &at, groups);
  s->gate_low = carve(base, &at, gate_rank);
  s->decay_low = carve(base, &at, decay_rank);
  s->hidden = carve(base, &at, 2 * m->hidden + LANES);
  s->sine = carve(base, &at, m->dim);
  s->cosine = carve(base, &at, m->dim);
  s->quantized = (int16_t *)carve(base, &at, pad_to_lanes(inputs) / 2);
  if ((at - first) % (2 * LANES) == 0) at += LANES;  // or the tokens' numbers would compete for places in the cache
  s->record = at - first;
  at = first + (m->input == FRAME_INPUT ? 1 : TOKENS) * s->record;
  s->k = carve(base, &at, features);
  s->q = carve(base, &at, features);
  s->rotated_k = carve(base, &at, features);
  s->rotated_q = carve(base, &at, features);
  s->keeps = carve(base, &at, features);
  s->v = carve(base, &at, m->dim);
  s->y = carve(base, &at, m->dim);
  s->unit = carve(base, &at, m->dim);
  s->params = carve(base, &at, m->params);
  s->mixture = carve(base, &at, 4 * pad_to_lanes(m->components));
  s->scores = carve(base, &at, m->vocabulary);
  s->sorted = carve(base, &at, m->vocabulary);
  s->rows = carve(base, &at, (uint64_t)(1u << m->stages) * row_floats(m));
  s->gathered = carve(base, &at, gathered);
  s->shares = carve(base, &at, rows);
  s->kept = carve(base, &at, kept_floats(m, tokens));
  return at;
}

// The sequence as token i of this pass finds it.
static lrt_sequence at_token(const lrt_sequence *s, uint32_t i) {
  lrt_sequence one = *s;
  const uint64_t by = i * s->record;
  float **const buffers[] = {&one.x, &one.normed, &one.qkv, &one.attn_out, &one.gates, &one.decays, &one.betas,
                             &one.gate_low, &one.decay_low, &one.hidden, &one.sine, &one.cosine};
  for (uint64_t n = 0; n < sizeof buffers / sizeof *buffers; ++n) *buffers[n] += by;
  one.quantized += 2 * by;
  one.seen += i;
  one.count = 1;
  return one;
}

static int same_magic(const char *a, const char *b) {  // of the eight bytes of a magic
  return word_at(a) == word_at(b) && word_at(a + 4) == word_at(b + 4);
}

static size_t as_size_t(uint64_t bytes) { return bytes <= SIZE_MAX / 2 ? (size_t)bytes : 0; }

static int aligned(const void *at) { return (uintptr_t)at % LRT_ALIGN == 0; }

size_t lrt_model_size(void) { return (size_t)round_up(sizeof(lrt_model), LRT_ALIGN); }

// Checks the header and the checksum of a file or state. bad_magic: the error where it begins with other bytes.
static int check_file(const char *file, uint64_t size, const char *magic, uint64_t header, int bad_magic) {
  if (size < 8 || !same_magic(file, magic)) return bad_magic;
  if (size < 12) return LRT_WRONG_SIZE;
  if (word_at(file + 8) < 1 || word_at(file + 8) > LRT_FORMAT) return LRT_OTHER_VERSION;
  if (size < header) return LRT_WRONG_SIZE;
  uint64_t declared;
  copy(&declared, file + 16, 8);
  if (declared != size) return LRT_WRONG_SIZE;
  return word_at(file + 12) == lrt_checksum(file + 16, (size_t)(size - 16)) ? LRT_OK : LRT_DAMAGED;
}

int lrt_load(lrt_model *memory, size_t size, const void *data, size_t bytes) {
  const char *file = data;
  if (!aligned(memory) || !aligned(file)) return LRT_NOT_ALIGNED;
  if (size < sizeof(lrt_model)) return LRT_NO_ROOM;
  int error = check_file(file, bytes, MODEL_MAGIC, HEADER, LRT_NOT_A_MODEL);
  if (error) return error;
  lrt_model m = {.file = file, .checksum = word_at(file + 12), .version = word_at(file + 8)};
  if (m.version > 1 && bytes < HEADER_2) return LRT_WRONG_SIZE;
  error = read_header(&m, file);
  if (error) return error;
  if (bytes < headers(&m)) return LRT_WRONG_SIZE;
  if (m.input == FRAME_INPUT) error = read_frames_header(&m, file);
  if (!error) error = read_kinds(&m, file);
  if (!error) error = derive(&m);
  if (error) return error;
  if (walk_file(&m) != bytes) return LRT_WRONG_SIZE;
  error = walk_contents(&m, 0);
  if (error) return error;
  copy(memory, &m, sizeof m);
  return LRT_OK;
}

size_t lrt_float32_size(const lrt_model *model) {
  lrt_model m = *model;
  m.weights = FLOAT32;
  return model->weights == FLOAT16 ? as_size_t(walk_file(&m)) : 0;
}

int lrt_to_float32(const lrt_model *model, void *to, size_t size) {
  lrt_model m = *model;
  const uint64_t bytes = lrt_float32_size(model);
  char *file = to;
  if (!aligned(to)) return LRT_NOT_ALIGNED;
  if (!bytes || size != bytes) return LRT_WRONG_SIZE;
  const uint32_t weights = FLOAT32;
  copy(file, m.file, headers(&m));
  copy(file + 16, &bytes, 8);
  copy(file + 24, &weights, 4);
  walk_contents(&m, file + headers(&m));
  const uint32_t checksum = lrt_checksum(file + 16, (size_t)bytes - 16);
  copy(file + 12, &checksum, 4);
  return LRT_OK;
}

int lrt_fact(const lrt_model *m, int which) {
  switch (which) {
    case LRT_VOCABULARY: return (int)m->vocabulary;
    case LRT_START: return m->start ? (int)m->vocabulary : -1;
    case LRT_PARAMS: return (int)m->params;
    case LRT_COMPONENTS: return (int)m->components;
    case LRT_POSITIONS: return m->max_positions > INT32_MAX ? -1 : (int)m->max_positions;
    case LRT_LAYERS: return (int)m->layers;
    case LRT_WIDTH: return (int)m->width;
    case LRT_HEADS: return (int)m->kind[0].heads;
    case LRT_KV_HEADS: return (int)m->kind[0].kv_heads;
    case LRT_WEIGHTS: return m->weights == FLOAT32 ? 32 : m->weights == FLOAT16 ? 16 : 8;
    case LRT_INPUT: return (int)m->inputs;
    case LRT_SUBSAMPLE: return m->input == FRAME_INPUT ? 1 << m->stages : 0;
    case LRT_SPACED: return (int)m->spaced;
    default: return LRT_BAD_OPTION;
  }
}

const char *lrt_symbol(const lrt_model *m, uint32_t symbol) {
  if (m->input != FRAME_INPUT || !symbol || symbol >= m->vocabulary) return 0;
  const char *name = m->file + m->names;
  while (--symbol) {
    while (*name) ++name;
    ++name;
  }
  return name;
}

const lrt_features_config *lrt_features_of(const lrt_model *m) { return m->audio ? &m->features_config : 0; }

// Sequences.

#define SEQUENCE_BYTES round_up(sizeof(lrt_sequence), LRT_ALIGN)

static uint64_t sequence_bytes(const lrt_model *m, uint64_t tokens) {
  lrt_sequence unused;
  return SEQUENCE_BYTES + 4 * lay_out(&unused, m, tokens, 0);
}

size_t lrt_sequence_size(const lrt_model *m) { return lrt_sequence_size_for(m, m->max_positions); }

size_t lrt_sequence_size_for(const lrt_model *m, uint32_t tokens) {
  return as_size_t(sequence_bytes(m, tokens < m->max_positions ? tokens : m->max_positions));
}

// Lays out a sequence in so many bytes, which hold one of no token, with room for as many as they hold.
static void settle(lrt_sequence *s, size_t size, const lrt_model *m) {
  uint32_t least = 0, most = m->max_positions;
  if (sequence_bytes(m, most) <= size) least = most;
  while (most - least > 1) {
    const uint32_t middle = least + (most - least) / 2;
    *(sequence_bytes(m, middle) <= size ? &least : &most) = middle;
  }
  s->room = least;
  lay_out(s, m, least, (float *)((char *)s + SEQUENCE_BYTES));
}

int lrt_start(lrt_sequence *s, size_t size, const lrt_model *m) {
  const uint64_t needed = sequence_bytes(m, 0);
  if (!aligned(s)) return LRT_NOT_ALIGNED;
  if (size < needed) return LRT_NO_ROOM;
  __builtin_memset(s, 0, (size_t)needed);
  s->model = m;
  s->count = 1;
  settle(s, size, m);
  for (uint32_t i = 0; i < m->max_lookback; ++i) s->recent[i] = m->vocabulary;
  return LRT_OK;
}

// Copies what is kept of so many tokens, from where there is room for from_room of them to where there is for to_room.
OUTLINE void copy_kept(const lrt_model *m, uint32_t tokens, const char *from, uint32_t from_room, char *to,
                      uint32_t to_room) {
  const uint64_t row = pad_to_lanes(m->dim) * sizeof(float);
  for (uint32_t i = 0; i < m->layers; ++i) {
    const layer_kind *k = &m->kind[kind_of(m, i)];
    for (uint64_t left = k->kept_floats * sizeof(float); left; left -= row) {
      copy(to, from, kept_rows(k, tokens) * row);
      from += kept_rows(k, from_room) * row;
      to += kept_rows(k, to_room) * row;
    }
  }
}

int lrt_copy(lrt_sequence *to, size_t size, const lrt_sequence *from) {
  const lrt_model *m = from->model;
  if (!aligned(to)) return LRT_NOT_ALIGNED;
  if (size < sequence_bytes(m, from->seen)) return LRT_NO_ROOM;
  copy(to, from, sequence_bytes(m, 0));
  settle(to, size, m);
  copy_kept(m, from->seen, (const char *)from->kept, from->room, (char *)to->kept, to->room);
  return LRT_OK;
}

uint32_t lrt_room(const lrt_sequence *s) { return s->room; }

uint32_t lrt_seen(const lrt_sequence *s) { return s->seen; }

// The norm of n numbers, of LayerNorm where they are centred. Beyond them a row stays 0, as its weight and bias are.
static void norm_row(uint64_t n, float eps, int centred, const float *scale_of, const float *shift, const float *from,
                     float *to) {
  vf totals[PARTS] = {{0}}, squares[PARTS] = {{0}};
  for (uint64_t at = 0; centred && at < pad_to_lanes(n); at += LANES)
    for (int i = 0; i < PARTS; ++i) totals[i] += load(from + at + i * W);
  const float mean = horizontal_sum(totals) / (float)n;
  for (uint64_t at = 0; at < pad_to_lanes(n); at += LANES) {
    float tail[LANES];
    const float *here = from + at;
    if (at + LANES > n) {  // beyond the width there is nothing off the mean
      for (uint64_t i = 0; i < LANES; ++i) tail[i] = at + i < n ? here[i] : mean;
      here = tail;
    }
    for (int i = 0; i < PARTS; ++i) {
      const vf x = load(here + i * W) - mean;
      squares[i] = multiply_add(x, x, squares[i]);
    }
  }
  const float scale = 1 / square_root(horizontal_sum(squares) / (float)n + eps);
  for (uint64_t at = 0; at < pad_to_lanes(n); at += W) {
    const vf y = (load(from + at) - mean) * scale * load(scale_of + at);
    store(to + at, centred ? y + load(shift + at) : y);
  }
}

// Of the tokens of this pass.
OUTLINE void norm(const lrt_sequence *s, const char *base, uint64_t weight, uint64_t bias, const float *from,
                  float *to) {
  const lrt_model *m = s->model;
  for (uint64_t i = 0; i < s->count; ++i)
    norm_row(m->width, m->norm_eps, m->norm_kind == LAYER_NORM, (const float *)(base + weight),
             (const float *)(base + bias), from + i * s->record, to + i * s->record);
}

// Rotary embedding: rotates the pairs (i, i + d/2) by the angles of this position.
OUTLINE void apply_rope(const lrt_sequence *s, const float *from, float *to) {
  const uint32_t half = s->model->dim / 2;
  for (uint32_t i = 0; i < half; ++i) {
    const float a = from[i], b = from[i + half];
    to[i] = a * s->cosine[i] - b * s->sine[i];
    to[i + half] = a * s->sine[i] + b * s->cosine[i];
  }
}

// The sum of the squares of x [n], whose row is filled up with zeros.
OUTLINE float squared_length(const float *x, uint64_t n) {
  vf squares[PARTS] = {{0}};
  for (uint64_t at = 0; at < pad_to_lanes(n); at += LANES)
    for (int i = 0; i < PARTS; ++i) {
      const vf y = load(x + at + i * W);
      squares[i] = multiply_add(y, y, squares[i]);
    }
  return horizontal_sum(squares);
}

// to = the features of a query or key x [d] of key-value head g.
static void map_features(const lrt_sequence *s, const char *base, uint32_t g, const float *x, float *to) {
  const lrt_model *m = s->model;
  const layer_kind *kind = s->kind;
  copy(s->unit, x, m->dim * sizeof *x);
  clear(s->unit, m->dim, pad_to_lanes(m->dim));
  if (kind->unit_keys) {
    const float inverse = 1 / square_root(squared_length(s->unit, m->dim) + HEAD_EPS);
    for (uint64_t at = 0; at < pad_to_lanes(m->dim); at += W) store(s->unit + at, load(s->unit + at) * inverse);
  }
  if (!kind->projections) {
    for (uint64_t at = 0; at < pad_to_lanes(m->dim); at += W) {
      const vf y = load(s->unit + at);
      vf mapped = y;
      if (kind->feature_map == ELU_PLUS_ONE) mapped = blend(y > 0.0f, y + 1.0f, exponential(y));
      if (kind->feature_map == RELU) mapped = blend(y < 0.0f, (vf){0}, y);  // NaN stays
      if (kind->feature_map == SQUARED_RELU) mapped = blend(y < 0.0f, (vf){0}, y * y);
      store(to + at, mapped);
    }
    clear(to, m->dim, pad_to_lanes(m->dim));
    return;
  }
  if (m->position == ROTARY) apply_rope(s, s->unit, s->unit);
  const float length = square_root(squared_length(s->unit, m->dim)), inverse = 1 / (length < 1e-6f ? 1e-6f : length);
  for (uint64_t at = 0; at < pad_to_lanes(m->dim); at += W) store(s->unit + at, load(s->unit + at) * inverse);
  table rows = kind->map.projection;
  rows.rows = kind->projections;
  rows.at += (uint64_t)g * kind->projections * pad_to_lanes(m->dim) * sizeof(float);
  matvec(s, &rows, base, 0, s->unit, to, 0);
  for (uint32_t i = 0; i < kind->projections; ++i) {
    if (kind->feature_map == TRIGONOMETRIC)
      sin_cos(to[i], to + i, to + kind->projections + i);
    else
      to[i] = to[i] < 0 ? 0 : to[i];
  }
  clear(to, kind->features, pad_to_lanes(kind->features));
}

// Maps features into `to`; returns where they are, rotated by their position: in `rotated`, or in `to` where nothing is
// rotated now.
static const float *find_features(const lrt_sequence *s, const char *base, uint32_t g, const float *x, float *to,
                                  float *rotated) {
  map_features(s, base, g, x, to);
  if (s->model->position != ROTARY || s->kind->projections) return to;
  apply_rope(s, to, rotated);
  return rotated;
}

// y = q kv.
OUTLINE void read_state(const float *kv, const float *q, uint64_t features, uint64_t width, float *y) {
  for (uint64_t column = 0; column < width; column += LANES) {
    vf totals[PARTS] = {{0}};
    for (uint64_t i = 0; i < features; ++i) {
      UNROLL
      for (int n = 0; n < PARTS; ++n)
        totals[n] = multiply_add(load(kv + i * width + column + n * W), splat(q[i]), totals[n]);
    }
    for (int n = 0; n < PARTS; ++n) store(y + column + n * W, totals[n]);
  }
}

static float dot(const float *a, const float *b, uint64_t n) {
  vf totals[PARTS] = {{0}};
  for (uint64_t at = 0; at < pad_to_lanes(n); at += LANES)
    for (int i = 0; i < PARTS; ++i)
      totals[i] = multiply_add(load(a + at + i * W), load(b + at + i * W), totals[i]);
  return horizontal_sum(totals);
}

// Updates the state of a key-value head with its key and value; `keeps`, if given, has a decay for each feature.
static void write_state(const lrt_sequence *s, float keep, const float *keeps, float write, float *kv, float *z,
                        const float *k, const float *rotated) {
  const uint64_t width = pad_to_lanes(s->model->dim);
  for (uint64_t i = 0; i < s->kind->features; ++i) {
    const vf weight = splat(rotated[i] * write);
    if (z) z[i] = z[i] * keep + k[i] * write;
    const float kept = keeps ? keeps[i] : keep;
    for (uint64_t at = 0; at < width; at += W)
      store(kv + i * width + at, multiply_add(weight, load(s->v + at), load(kv + i * width + at) * kept));
  }
}

// The delta rule: s->v becomes beta times what is missing from what the state, decayed, already holds for the key.
static void find_missing(const lrt_sequence *s, float keep, const float *keeps, float beta, const float *kv,
                         const float *k) {
  const uint64_t features = s->kind->features, d = s->model->dim, width = pad_to_lanes(d);
  for (uint64_t i = 0; i < features; ++i) s->unit[i] = k[i] * (keeps ? keeps[i] : keep);
  read_state(kv, s->unit, features, width, s->y);
  for (uint64_t i = 0; i < d; ++i) s->v[i] = beta * (s->v[i] - s->y[i]);
}

// Applies the steps after the state to the output of a query head: skip, norm and gate.
OUTLINE void finish_head(const lrt_sequence *s, const char *base, uint32_t head) {
  const layer_kind *k = s->kind;
  const uint32_t d = s->model->dim;
  float *y = s->y;
  if (k->skip) {
    const float share = ((const float *)(base + k->map.skip))[head];
    for (uint32_t i = 0; i < d; ++i) y[i] += share * s->v[i];
  }
  if (k->head_norm == PLAIN_HEADS || k->head_norm == WEIGHTED_HEADS) {
    const float scale = 1 / square_root(squared_length(y, d) / (float)d + HEAD_EPS);
    for (uint32_t i = 0; i < d; ++i) y[i] *= scale;
  }
  if (k->head_norm == WEIGHTED_HEADS) {
    const float *weight = (const float *)(base + k->map.head_norm_weight);
    for (uint32_t i = 0; i < d; ++i) y[i] *= weight[i];
  }
  if (k->head_gate) {
    const float *gate = s->gates + head * d;
    for (uint32_t i = 0; i < d; ++i) y[i] *= gate[i];
  }
  copy(s->attn_out + head * d, y, d * sizeof *y);
}

// What a token lets a key-value head keep of its state, and take in of the token. PER_FEATURE: s->keeps.
static void find_decay(const lrt_sequence *s, const char *base, uint32_t g, float *keep, float *write) {
  const layer_kind *k = s->kind;
  const uint32_t d = s->model->dim;
  const float *rates = (const float *)(base + k->map.rates);
  *keep = *write = 1;
  if (k->decay == FIXED) *keep = ((const float *)(base + k->map.decay))[g] + 0.0f;  // -0 would get into the padding
  if (k->decay == GATED) {
    const float x = s->decays[g], logit = x < -60 ? -60 : x > 60 ? 60 : x;  // STEEPEST of lintra/attention/rfa.py
    *keep = sigmoid(splat(logit))[0];
    *write = sigmoid(splat(-logit))[0];
  }
  if (k->decay == PER_HEAD) {
    const vf step = softplus(splat(s->decays[g]));
    *keep = exponential(step * -rates[g])[0];
    if (k->update == STEPPED) *write = step[0];
  }
  if (k->decay == PER_FEATURE)
    for (uint64_t at = 0; at < pad_to_lanes(d); at += W)
      store(s->keeps + at, exponential(softplus(load(s->decays + g * d + at)) * -rates[g]));
}

// A key-value head with a state of one size, and the query heads that share it.
static void attend_head(const lrt_sequence *s, const char *base, float *state, uint32_t g) {
  const layer_kind *kind = s->kind;
  const uint32_t d = s->model->dim, group = kind->heads / kind->kv_heads;
  const uint64_t features = kind->features, width = pad_to_lanes(d);
  const float *queries = s->qkv, *keys = queries + kind->heads * d, *values = keys + kind->kv_heads * d;
  float *kv = state + g * kind->kv_floats, *const sums = state + kind->kv_heads * kind->kv_floats;
  float *z = kind->sums ? sums + g * pad_to_lanes(features) : 0;
  const float *keeps = kind->decay == PER_FEATURE ? s->keeps : 0;
  float keep, write, weights = 0;
  find_decay(s, base, g, &keep, &write);
  const float *k = find_features(s, base, g, keys + g * d, s->k, s->rotated_k);
  copy(s->v, values + g * d, d * sizeof *values);
  if (kind->update == DELTA)
    find_missing(s, keep, keeps, sigmoid(splat(s->betas[g]))[0] * kind->beta_scale, kv, k);
  write_state(s, keep, keeps, write, kv, z, s->k, k);
  if (z) {
    float *n = sums + kind->kv_heads * pad_to_lanes(features) + g;
    weights = *n = *n * keep + write;
  }
  for (uint32_t head = g * group; head < (g + 1) * group; ++head) {
    const float *q = find_features(s, base, g, queries + head * d, s->q, s->rotated_q);
    read_state(kv, q, features, width, s->y);
    float denominator = z ? dot(s->q, z, features) : 0;
    if (kind->denominator == SUM) denominator += kind->eps;
    if (kind->denominator == BOUNDED && !(denominator > kind->eps * weights)) denominator = kind->eps * weights;
    if (kind->denominator != NO_DENOMINATOR)
      for (uint32_t i = 0; i < d; ++i) s->y[i] = denominator == 0 ? 0 : s->y[i] / denominator;
    for (uint32_t i = 0; i < d; ++i) s->y[i] *= kind->scale;
    finish_head(s, base, head);
  }
}

// Replaces n numbers by exp(x - the largest of them), and the row's rest by 0; returns their sum.
static float exponentials(float *x, uint64_t n) {
  vf most = splat(-__builtin_inff()), totals[PARTS] = {{0}};
  for (uint64_t i = n; i < pad_to_lanes(n); ++i) x[i] = -__builtin_inff();
  for (uint64_t at = 0; at < n; at += W) most = larger(load(x + at), most);
  float top = most[0];
  for (int i = 1; i < W; ++i) top = most[i] > top ? most[i] : top;
  for (uint64_t at = 0; at < n; at += LANES)
    for (int i = 0; i < PARTS; ++i) {
      const vf y = exponential(load(x + at + i * W) - top);
      store(x + at + i * W, y);
      totals[i] += y;
    }
  return horizontal_sum(totals);
}

// A key-value head that keeps its keys and values, and the query heads that share it: softmax attention to the tokens up
// to this one, or to the last of them.
static void attend_kept(const lrt_sequence *s, const char *base, float *kept, uint32_t g) {
  const layer_kind *kind = s->kind;
  const uint32_t d = s->model->dim, group = kind->heads / kind->kv_heads;
  const uint64_t width = pad_to_lanes(d), rows = kept_rows(kind, s->room), row = s->seen % rows;
  const float *queries = s->qkv, *k = queries + (kind->heads + g) * d, *v = k + kind->kv_heads * d;
  float *keys = kept + g * rows * width, *values = keys + kind->kv_heads * rows * width;
  const table map = {.rows = (uint32_t)(s->seen < rows ? row + 1 : rows), .columns = d, .kind = FLOAT32};
  copy(keys + row * width, find_features(s, base, g, k, s->k, s->rotated_k), width * sizeof *keys);
  copy(values + row * width, v, d * sizeof *values);
  clear(values + row * width, d, width);
  for (uint32_t head = g * group; head < (g + 1) * group; ++head) {
    const float *q = find_features(s, base, g, queries + head * d, s->q, s->rotated_q);
    for (uint64_t i = 0; i < width; ++i) s->unit[i] = q[i] * kind->scale;
    matvec(s, &map, (const char *)keys, 0, s->unit, s->shares, 0);
    const float total = exponentials(s->shares, map.rows);
    read_state(values, s->shares, map.rows, width, s->y);
    for (uint32_t i = 0; i < d; ++i) s->y[i] /= total;
    finish_head(s, base, head);
  }
}

// The convolution of q, k and v with their last inputs, a ring at the end of the layer's state, and SiLU.
static void convolve(const lrt_sequence *s, const char *base, float *state) {
  const layer_kind *k = s->kind;
  const uint64_t channels = pad_to_lanes(k->qkv_width), last = k->conv - 1;
  float *ring = state + k->layer_floats - last * channels;
  const float *weight = (const float *)(base + k->map.conv.at), *bias = (const float *)(base + k->map.conv_bias);
  for (uint64_t at = 0; at < channels; at += W) {
    const vf x = load(s->qkv + at);
    vf sum = multiply_add(x, load(weight + last * channels + at), load(bias + at));
    for (uint64_t i = 0, row = last ? s->seen % last : 0; i < last; ++i, row = row + 1 < last ? row + 1 : 0)
      sum = multiply_add(load(ring + row * channels + at), load(weight + i * channels + at), sum);
    if (last) store(ring + s->seen % last * channels + at, x);
    store(s->qkv + at, sum * sigmoid(sum));
  }
}

// The numbers of the tokens of this pass that their heads take beside q, k and v.
static void project_extra(const lrt_sequence *s, const char *base, const float *input) {
  const layer_kind *k = s->kind;
  const layer_map *l = &k->map;
  if (k->gate_rank) matvec(s, &l->gate_down, base, (const float *)(base + l->gate_down_bias), input, s->gate_low, 0);
  if (k->head_gate) {
    const float *x = k->gate_rank ? s->gate_low : input;
    matvec(s, &l->gate_proj, base, (const float *)(base + l->gate_bias), x, s->gates, 0);
    for (uint32_t i = 0; i < s->count; ++i)
      for (uint64_t at = 0; at < k->inner; at += W) {
        float *gate = s->gates + i * s->record + at;
        const vf y = load(gate), share = sigmoid(y);
        store(gate, k->head_gate == SILU ? y * share : share);
      }
  }
  if (k->decay_rank)
    matvec(s, &l->decay_down, base, (const float *)(base + l->decay_down_bias), input, s->decay_low, 0);
  if (k->decay >= GATED)
    matvec(s, &l->decay_proj, base, (const float *)(base + l->decay_bias), k->decay_rank ? s->decay_low : input, s->decays, 0);
  if (k->update == DELTA)
    matvec(s, &l->beta_proj, base, (const float *)(base + l->beta_bias), input, s->betas, 0);
}

static void attention_layer(const lrt_sequence *s, const char *base, float *state, float *kept, const float *input,
                            float *to) {
  const layer_kind *k = s->kind;
  const layer_map *l = &k->map;
  matvec(s, &l->qkv_proj, base, (const float *)(base + l->qkv_bias), input, s->qkv, 0);
  project_extra(s, base, input);
  for (uint32_t i = 0; i < s->count; ++i) {
    const lrt_sequence one = at_token(s, i);
    if (k->conv) convolve(&one, base, state);
    for (uint32_t g = 0; g < k->kv_heads; ++g)
      if (k->update == KEPT)
        attend_kept(&one, base, kept, g);
      else
        attend_head(&one, base, state, g);
    if (k->head_norm == ALL_HEADS)
      norm_row(k->inner, HEAD_EPS, 0, (const float *)(base + l->head_norm_weight), 0, one.attn_out, one.attn_out);
    clear(one.attn_out, k->inner, pad_to_lanes(k->inner));  // where NaN would stay, or the heads of a wider layer
  }
  matvec(s, &l->out_proj, base, (const float *)(base + l->out_bias), s->attn_out, to, 1);
}

// The activation of a token's hidden units.
static void activate(const lrt_model *m, float *hidden) {
  const uint64_t n = m->hidden;
  if (m->activation == GELU) {
    for (uint64_t at = 0; at < n; at += W) store(hidden + at, gelu(load(hidden + at)));
  } else if (m->activation == RELU_MLP) {
    for (uint64_t at = 0; at < n; at += W) {
      const vf x = load(hidden + at);
      store(hidden + at, blend(x < 0.0f, splat(0.0f), x));
    }
  } else {
    for (uint64_t at = 0; at < n; at += W) {
      const vf gate = load(hidden + at), value = load(hidden + n + at);
      store(hidden + at, gate * sigmoid(gate) * value);  // in place: the gates up to here are read already
    }
  }
  clear(hidden, n, pad_to_lanes(n));
}

static void mlp(const lrt_sequence *s, const char *base, const float *input, float *to) {
  const layer_map *l = &s->kind->map;
  matvec(s, &l->up, base, (const float *)(base + l->up_bias), input, s->hidden, 0);
  for (uint32_t i = 0; i < s->count; ++i) activate(s->model, s->hidden + i * s->record);
  matvec(s, &l->down, base, (const float *)(base + l->down_bias), s->hidden, to, 1);
}

// s->x = the embeddings of a token, or of s->rows, of those `lookback` tokens before it, and of its position.
static void embed(const lrt_sequence *s, uint32_t token) {
  const lrt_model *m = s->model;
  const char *base = m->file;
  clear(s->x, 0, pad_to_lanes(m->width));
  if (m->input == FRAME_INPUT)
    matvec(s, &m->input_proj, base, (const float *)(base + m->input_bias), s->rows, s->x, 0);
  else
    add_row(&m->embedding, base, token, s->x);
  for (uint32_t i = 0; i < m->lookbacks; ++i)
    add_row(&m->lookback_embedding[i], base,
            s->recent[(s->seen + (uint64_t)m->max_lookback - m->lookback[i]) % m->max_lookback], s->x);
  for (uint32_t i = m->axes, rest = s->seen; i--; rest /= m->axis[i])
    add_row(&m->axis_embedding[i], base, rest % m->axis[i], s->x);
  if (m->position != SINUSOIDAL && m->position != CONCATENATED && m->position != ROTARY) return;
  const double *frequency = (const double *)(base + m->frequencies);
  if (m->position == ROTARY) {
    for (uint32_t i = 0; i < m->dim / 2; ++i) sin_cos(s->seen * frequency[i], s->sine + i, s->cosine + i);
    return;
  }
  float *to = m->position == CONCATENATED ? s->x + m->embedding_width : s->x;
  for (uint32_t i = 0; i < m->embedding_width / 2; ++i) {
    float sine, cosine;
    sin_cos(s->seen * frequency[i], &sine, &cosine);
    to[2 * i] += sine;
    to[2 * i + 1] += cosine;
  }
}

// Decodes up to TOKENS tokens, which are valid symbols at valid positions; computes params for the last where `last`.
static void decode_tokens(lrt_sequence *s, const uint32_t *tokens, uint32_t count, int last) {
  const lrt_model *m = s->model;
  const int pre = m->norm_order == PRE;
  for (uint32_t i = 0; i < count; ++i) {
    const lrt_sequence one = at_token(s, i);
    embed(&one, tokens[i]);
    if (m->max_lookback) s->recent[one.seen % m->max_lookback] = tokens[i];
  }
  s->count = count;
  const char *base = m->file + m->layers_offset;
  float *state = s->state, *kept = s->kept;
  for (uint32_t i = 0; i < m->layers; ++i) {
    const layer_kind *k = s->kind = &m->kind[kind_of(m, i)];
    const layer_map *l = &k->map;
    if (pre) norm(s, base, l->attn_norm_weight, l->attn_norm_bias, s->x, s->normed);
    attention_layer(s, base, state, kept, pre ? s->normed : s->x, s->x);
    if (!pre) norm(s, base, l->attn_norm_weight, l->attn_norm_bias, s->x, s->x);
    if (m->hidden) {
      if (pre) norm(s, base, l->mlp_norm_weight, l->mlp_norm_bias, s->x, s->normed);
      mlp(s, base, pre ? s->normed : s->x, s->x);
      if (!pre) norm(s, base, l->mlp_norm_weight, l->mlp_norm_bias, s->x, s->x);
    }
    base += l->bytes;
    state += k->layer_floats;
    kept += kept_rows(k, s->room) * k->kept_floats;
  }
  s->count = 1;
  if (last) {
    base = m->file + m->head_offset;
    const lrt_sequence one = at_token(s, count - 1);
    if (m->final_norm) norm(&one, base, m->final_weight, m->final_bias, one.x, one.normed);
    matvec(&one, &m->head, base, (const float *)(base + m->head_bias), m->final_norm ? one.normed : one.x, s->params, 0);
  }
  s->seen += count;
  s->ready = (uint32_t)last;
}

int lrt_prefill(lrt_sequence *s, const uint32_t *tokens, size_t count) {
  const lrt_model *m = s->model;
  if (m->input != TOKEN_INPUT) return LRT_OTHER_INPUT;
  for (size_t i = 0; i < count; ++i)
    if (tokens[i] >= m->symbols) return LRT_BAD_TOKEN;
  if (count > m->max_positions - s->seen) return LRT_TOO_LONG;
  if (count > s->room - s->seen) return LRT_FULL;
  for (size_t i = 0; i < count; i += TOKENS) {
    const size_t left = count - i;
    decode_tokens(s, tokens + i, left < TOKENS ? (uint32_t)left : TOKENS, left <= TOKENS);
  }
  return LRT_OK;
}

int lrt_step(lrt_sequence *s, uint32_t token) { return lrt_prefill(s, &token, 1); }

// Frames.

// A convolution over three frames, whose output j has read the frames 2j - 1, 2j and 2j + 1, and gelu. count: of frames in
// s->rows, which are replaced; returns how many they become.
static uint32_t subsample(const lrt_sequence *s, uint32_t stage, uint32_t count) {
  const lrt_model *m = s->model;
  const uint64_t n = stage ? m->subsampled : m->inputs, step = row_floats(m), bytes = n * sizeof(float);
  float *edge = s->edges + (stage ? pad_to_lanes(m->inputs) : 0);
  for (uint32_t i = 0; i < count; i += 2) {
    float *from = s->rows + i * step, *to = s->rows + i / 2 * step;
    clear(s->gathered, 2 * n, pad_to_lanes(3 * n));
    copy(s->gathered, i ? from - step : edge, bytes);
    copy(s->gathered + n, from, bytes);
    if (i + 1 < count) copy(s->gathered + 2 * n, from + step, bytes);
    if (!i) copy(edge, s->rows + (count - 1) * step, bytes);
    matvec(s, &m->stage[stage], m->file, (const float *)(m->file + m->stage_bias[stage]), s->gathered, to, 0);
    for (uint64_t at = 0; at < m->subsampled; at += W) store(to + at, gelu(load(to + at)));
    clear(to, m->subsampled, step);
  }
  return (count + 1) / 2;
}

static uint32_t most_probable(const lrt_sequence *s) {
  uint32_t best = 0;
  for (uint32_t i = 1; i < s->model->vocabulary; ++i) best = s->params[i] > s->params[best] ? i : best;
  return best;
}

int lrt_read(lrt_sequence *s, const float *frames, size_t count) {
  const lrt_model *m = s->model;
  const uint64_t n = m->inputs, step = row_floats(m);
  if (m->input != FRAME_INPUT) return LRT_OTHER_INPUT;
  if (!count || count > 1u << m->stages) return LRT_BAD_OPTION;
  if (s->ended) return LRT_ENDED;
  if (s->seen >= m->max_positions) return LRT_TOO_LONG;
  if (s->seen >= s->room) return LRT_FULL;
  if (has_nonfinite(FLOAT32, (const char *)frames, count * n)) return LRT_BAD_NUMBER;
  const float *mean = (const float *)(m->file + m->frame_mean);
  const float *scale = (const float *)(m->file + m->frame_scale);
  for (uint64_t row = 0; row < count; ++row) {
    float *to = s->rows + row * step;
    copy(to, frames + row * n, n * sizeof *frames);
    for (uint64_t i = 0; i < n; ++i) to[i] = (to[i] - mean[i]) * scale[i];
    clear(to, n, step);
  }
  uint32_t left = (uint32_t)count;
  for (uint32_t i = 0; i < m->stages; ++i) left = subsample(s, i, left);
  decode_tokens(s, &(uint32_t){0}, 1, 1);
  s->ended = count < 1u << m->stages;
  s->before = s->symbol;
  s->symbol = most_probable(s);
  return LRT_OK;
}

int lrt_new_symbol(const lrt_sequence *s) {
  if (s->model->input != FRAME_INPUT) return LRT_OTHER_INPUT;
  if (!s->ready) return LRT_NOTHING_READ;
  return s->symbol == s->before ? 0 : (int)s->symbol;
}

const float *lrt_params(const lrt_sequence *s) { return s->ready ? s->params : 0; }

// Sampling.

// lintra.nn.distributions.DiscretisedLogistics: the levels 0 .. n-1 stand on [-1, 1], each the mass of its interval under
// a mixture of logistic densities, which Salimans et al. 2017, arXiv:1701.05517, section 2.1 give. In logarithms:
// sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)).
static void mixture_scores(const lrt_sequence *s) {
  const lrt_model *m = s->model;
  const uint64_t count = m->components, step = pad_to_lanes(count), n = m->vocabulary;
  const float *logits = s->params, *mean = logits + count, *log_scale = mean + count, half = 1.0f / (float)(n - 1);
  float *weight = s->mixture, *inverse = weight + step, *half_width = inverse + step, *interior = half_width + step;
  float most = logits[0];
  for (uint64_t i = 0; i < count; ++i) most = logits[i] > most ? logits[i] : most;
  for (uint64_t i = 0; i < count; ++i) {
    weight[i] = logits[i] - most;
    inverse[i] = log_scale[i] < -7 ? 7 : log_scale[i] > 7 ? -7 : -log_scale[i];
  }
  for (uint64_t at = 0; at < count; at += W) {
    const vf scale = exponential(load(inverse + at)), wide = scale * half;
    store(inverse + at, scale);
    store(half_width + at, wide);
    store(interior + at, logarithm(one_minus_exp(wide * 2.0f)));
  }
  for (uint64_t at = 0; at < n; at += W) {
    float level[W];
    for (int i = 0; i < W; ++i) level[i] = (float)(at + (uint64_t)i);
    const vf here = load(level), centre = here * (2 * half) - 1.0f;
    const vi first = here == 0.0f, last = here == (float)(n - 1);
    vf top = splat(-__builtin_inff()), sum = {0};
    for (uint64_t i = 0; i < count; ++i) {
      const vf off = (centre - mean[i]) * inverse[i];
      const vf below = blend(last, (vf){0}, log_sigmoid(off + half_width[i]));
      const vf above = blend(first, (vf){0}, log_sigmoid(half_width[i] - off));
      const vf mass = below + above + blend(first | last, (vf){0}, splat(interior[i])) + weight[i];
      const vf higher = larger(mass, top);
      sum = sum * exponential(top - higher) + exponential(mass - higher);
      top = higher;
    }
    store(s->scores + at, top + logarithm(sum));
  }
}

// s->scores = the log-probabilities of all symbols, up to a common constant.
static void score(const lrt_sequence *s) {
  if (s->model->output == MIXTURE)
    mixture_scores(s);
  else
    copy(s->scores, s->params, s->model->vocabulary * sizeof(float));
}

static float largest(const float *x, uint64_t n) {
  float most = x[0];
  for (uint64_t i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// Replaces x by the weights exp((x - most) / temperature) of its softmax; returns their sum.
static double softmax_weights(float *x, uint64_t n, float most, float temperature) {
  for (uint64_t at = 0; at < n; at += W) store(x + at, exponential((load(x + at) - most) / temperature));
  double total = 0;
  for (uint64_t i = 0; i < n; ++i) total += x[i];
  return total;
}

const float *lrt_log_probs(lrt_sequence *s) {
  const uint64_t n = s->model->vocabulary;
  if (!s->ready) return 0;
  score(s);
  copy(s->sorted, s->scores, n * sizeof(float));
  const float most = largest(s->scores, n), total = (float)softmax_weights(s->sorted, n, most, 1);
  const float shift = most + logarithm(splat(total))[0];
  for (uint64_t i = 0; i < n; ++i) s->scores[i] -= shift;
  return s->scores;
}

// Sorts in ascending order: heapsort, which needs no memory and has no bad case.
static void sort(float *x, uint64_t n) {
  for (uint64_t begin = n / 2, end = n; end > 1;) {
    if (begin) {
      --begin;
    } else {
      --end;
      const float swap = x[0];
      x[0] = x[end];
      x[end] = swap;
    }
    for (uint64_t at = begin, child = 2 * at + 1; child < end; at = child, child = 2 * at + 1) {
      if (child + 1 < end && x[child] < x[child + 1]) ++child;
      if (x[at] >= x[child]) break;
      const float swap = x[at];
      x[at] = x[child];
      x[child] = swap;
    }
  }
}

// Keeps the largest of n weights that together hold the share top_p of `total`, zeroes the others; returns their sum.
static double keep_nucleus(const lrt_sequence *s, uint64_t n, double top_p, double total) {
  float *x = s->scores, *sorted = s->sorted;
  copy(sorted, x, n * sizeof(float));
  sort(sorted, n);
  uint64_t kept = 0, spare;
  for (double before = 0; kept < n && before < top_p * total; ++kept) before += sorted[n - 1 - kept];
  const float least = sorted[n - kept];
  for (spare = kept; spare && sorted[n - spare] == least;) --spare;
  double sum = 0;
  spare = kept - spare;  // of those as large as the last, so many
  for (uint64_t i = 0; i < n; ++i) {
    if (x[i] < least || (x[i] == least && !spare)) x[i] = 0;
    if (x[i] == least && spare) --spare;
    sum += x[i];
  }
  return sum;
}

int lrt_sample(lrt_sequence *s, double temperature, uint32_t top_k, double top_p, double uniform) {
  const uint64_t n = s->model->vocabulary;
  if (!s->ready) return LRT_NOTHING_READ;
  if (!(temperature >= 0 && temperature <= __FLT_MAX__ && top_p > 0 && top_p <= 1 && uniform >= 0 && uniform < 1))
    return LRT_BAD_OPTION;
  score(s);
  float *x = s->scores;
  const float most = largest(x, n);
  for (uint64_t i = 0; i < n; ++i)
    if (!(x[i] <= most && most < __builtin_inff() && most > -__builtin_inff())) return LRT_NO_PROBABILITIES;
  if ((float)temperature == 0) {
    uint64_t first = 0;
    while (x[first] != most) ++first;
    return (int)first;
  }
  if (top_k && top_k < n) {
    copy(s->sorted, x, n * sizeof(float));
    sort(s->sorted, n);
    for (uint64_t i = 0; i < n; ++i)
      if (x[i] < s->sorted[n - top_k]) x[i] = -__builtin_inff();
  }
  double total = softmax_weights(x, n, most, (float)temperature);
  if (top_p < 1) total = keep_nucleus(s, n, top_p, total);
  double passed = 0;
  for (uint64_t i = 0; i < n; ++i) {
    passed += x[i];
    if (passed > uniform * total) return (int)i;
  }
  return (int)n - 1;  // a rounding away from the last one
}

void lrt_seed(lrt_sequence *s, uint32_t low, uint32_t high) { s->generator = (uint64_t)high << 32 | low; }

double lrt_uniform(lrt_sequence *s) {
  uint64_t x = s->generator += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return (double)((x ^ x >> 31) >> 11) * 0x1p-53;
}

// States as bytes: a header, then the memory from `recent` on, then what is kept of the tokens that were read.

static uint64_t state_bytes(const lrt_model *m, uint64_t tokens) {
  return STATE_HEADER + 4 * (m->state_floats + kept_floats(m, tokens));
}

size_t lrt_state_size(const lrt_model *m) { return lrt_state_size_for(m, m->max_positions); }

size_t lrt_state_size_for(const lrt_model *m, uint32_t tokens) {
  return as_size_t(state_bytes(m, tokens < m->max_positions ? tokens : m->max_positions));
}

int lrt_save_state(const lrt_sequence *s, void *to, size_t size) {
  const lrt_model *m = s->model;
  const uint64_t bytes = state_bytes(m, s->seen), front = STATE_HEADER + 4 * m->state_floats;
  char *file = to;
  if (size != bytes) return LRT_WRONG_SIZE;
  __builtin_memset(file, 0, STATE_HEADER);
  copy(file, STATE_MAGIC, 8);
  copy(file + 8, &m->version, 4);
  copy(file + 16, &bytes, 8);
  copy(file + 24, &m->checksum, 4);
  copy(file + 28, &s->seen, 4);
  copy(file + 32, &s->generator, 8);
  copy(file + 40, &s->ended, 4);
  copy(file + 44, &s->symbol, 4);
  copy(file + STATE_HEADER, s->recent, front - STATE_HEADER);
  copy_kept(m, s->seen, (const char *)s->kept, s->room, file + front, s->seen);
  const uint32_t checksum = lrt_checksum(file + 16, size - 16);
  copy(file + 12, &checksum, 4);
  return LRT_OK;
}

int lrt_load_state(lrt_sequence *s, const void *from, size_t size) {
  const lrt_model *m = s->model;
  const uint64_t front = STATE_HEADER + 4 * m->state_floats;
  const char *file = from;
  const int error = check_file(file, size, STATE_MAGIC, STATE_HEADER, LRT_NOT_A_STATE);
  if (error) return error;
  if (word_at(file + 24) != m->checksum || word_at(file + 8) != m->version) return LRT_OTHER_MODEL;
  const uint32_t seen = word_at(file + 28);
  if (seen > m->max_positions) return LRT_TOO_LONG;
  if (size != state_bytes(m, seen)) return LRT_OTHER_MODEL;
  if (seen > s->room) return LRT_FULL;
  const uint32_t ended = word_at(file + 40), symbol = word_at(file + 44);
  for (int i = m->input == FRAME_INPUT ? 48 : 40; i < STATE_HEADER; ++i)
    if (file[i]) return LRT_BAD_PADDING;
  if (ended > 1 || symbol >= m->vocabulary) return LRT_BAD_TOKEN;
  const char *recent = file + STATE_HEADER, *state = recent + 4 * pad_to_lanes(m->max_lookback);
  for (uint64_t i = 0; i < pad_to_lanes(m->max_lookback); ++i) {
    const uint32_t token = word_at(recent + 4 * i);
    if (i < m->max_lookback && token >= m->symbols) return LRT_BAD_TOKEN;
    if (i >= m->max_lookback && token) return LRT_BAD_PADDING;
  }
  walk w = {.base = state};
  for (uint32_t i = 0; i < m->layers; ++i) {
    const layer_kind *k = &m->kind[kind_of(m, i)];
    if (k->update != KEPT) w.at = check_rows(&w, FLOAT32, w.at, (uint64_t)k->kv_heads * k->features, m->dim);
    if (k->sums) {
      w.at = check_rows(&w, FLOAT32, w.at, k->kv_heads, k->features);
      w.at = check_rows(&w, FLOAT32, w.at, 1, k->kv_heads);
    }
    if (k->conv) w.at = check_rows(&w, FLOAT32, w.at, k->conv - 1, k->qkv_width);
  }
  for (uint32_t i = 0; i < m->stages; ++i)
    w.at = check_rows(&w, FLOAT32, w.at, 1, i ? m->subsampled : m->inputs);
  for (uint32_t i = 0; i < m->layers; ++i) {
    const layer_kind *k = &m->kind[kind_of(m, i)];
    if (k->update == KEPT) w.at = check_rows(&w, FLOAT32, w.at, 2 * k->kv_heads * kept_rows(k, seen), m->dim);
  }
  if (w.error) return w.error;
  copy(s->recent, recent, front - STATE_HEADER);
  copy_kept(m, seen, file + front, seen, (char *)s->kept, s->room);
  copy(&s->generator, file + 32, 8);
  s->seen = seen;
  s->ended = ended;
  s->symbol = symbol;
  s->ready = 0;
  return LRT_OK;
}

int lrt_format(void) { return LRT_FORMAT; }

const char *lrt_error(int code) {
  switch (code) {
    case LRT_OK: return "nothing is wrong";
    case LRT_NOT_A_MODEL: return "this is no model for the runtime: it begins with other bytes";
    case LRT_OTHER_VERSION: return "this is of another version of the format than the program reads";
    case LRT_WRONG_SIZE: return "this is shorter or longer than it must be";
    case LRT_DAMAGED: return "this is damaged: its checksum differs";
    case LRT_UNKNOWN_KIND: return "the model is of a kind that this program does not know";
    case LRT_BAD_SIZES: return "the model has a size that is out of bounds or does not go with the others";
    case LRT_BAD_NUMBER: return "it holds a number that is infinite, not a number, or out of bounds";
    case LRT_BAD_PADDING: return "it holds something where there must be zeros";
    case LRT_NOT_ALIGNED: return "the memory does not begin at a multiple of 64 bytes";
    case LRT_NO_ROOM: return "the memory is too small";
    case LRT_BAD_TOKEN: return "a token is no symbol of the model";
    case LRT_TOO_LONG: return "the model has no position for so many tokens";
    case LRT_NOTHING_READ: return "there is nothing to draw from before a token was read";
    case LRT_NO_PROBABILITIES: return "the probabilities to draw from are no numbers: is the model sound?";
    case LRT_BAD_OPTION: return "an option is out of bounds";
    case LRT_NOT_A_STATE: return "this is no state of a sequence: it begins with other bytes";
    case LRT_OTHER_MODEL: return "the state is of another model";
    case LRT_OTHER_INPUT: return "the model reads frames where it was given tokens, or tokens where it was given frames";
    case LRT_ENDED: return "the utterance has ended with fewer frames than are read at once";
    case LRT_FULL: return "the sequence's memory has no room for so many tokens: copy it to where there is more";
    case LRT_BAD_NAMES: return "the names of the symbols are more or fewer than these, or one is empty";
    default: return "there is no such error";
  }
}
