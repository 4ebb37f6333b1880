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

// Of weights of 8 bits the sums are integers, of which a register or two hold LANES. BLOCK columns are summed before
// they become a float: 512 * 2^7 * (2^15 - 1) < 2^31.
enum { PIECE = VECTOR < 32 ? 16 : 32, PIECES = 2 * LANES / PIECE, BLOCK = 512 };
typedef int16_t shorts __attribute__((vector_size(PIECE)));
typedef int32_t pairs __attribute__((vector_size(PIECE)));

enum { HEADER = 320, FRAMES_HEADER = 64, STATE_HEADER = 64, AXES = 8, LOOKBACKS = 32, STAGES = 2 };
enum { FLOAT32, FLOAT16, INT8 };
enum { GELU, SWIGLU, RELU_MLP };
enum { PRE, POST };
enum { LAYER_NORM, RMS_NORM };
enum { NO_POSITION, SINUSOIDAL, CONCATENATED, LEARNED, ROTARY };
enum { IDENTITY, ELU_PLUS_ONE, RELU, SQUARED_RELU, TRIGONOMETRIC, ARC_COSINE };
enum { NO_DECAY, FIXED, GATED };
enum { NO_DENOMINATOR, SUM, BOUNDED };
enum { LOGITS, MIXTURE };
enum { TOKENS, FRAMES };
enum { GIVEN, FILTERBANK };

#define MODEL_MAGIC "lintraRT"
#define STATE_MAGIC "lintraST"
#define LAST_POSITION 0xffffffffu

// Rows of weights in the file, at a distance from where their section begins.
typedef struct {
  uint64_t at, scale;  // scale: of INT8 alone
  uint32_t rows, columns, kind;
} table;

typedef struct {
  table qkv_proj, gate_proj, decay_proj, out_proj, up, down;
  uint64_t qkv_bias, gate_bias, decay_bias, out_bias, up_bias, down_bias;
  uint64_t attn_norm_weight, attn_norm_bias, mlp_norm_weight, mlp_norm_bias, decay;
  table projection;
  uint64_t bytes;
} layer_map;

struct lrt_model {
  const char *file;
  uint32_t checksum;
  uint32_t weights, vocabulary, start, layers, width, heads, kv_heads, projections, hidden;
  uint32_t activation, norm_order, norm_kind, final_norm;
  uint32_t position, axes, axis[AXES], lookbacks, lookback[LOOKBACKS];
  uint32_t feature_map, decay, denominator, head_norm, head_gate, output, components;
  float eps, norm_eps;
  uint32_t input, inputs, subsampled, stages, names_bytes, spaced, audio;  // of FRAMES from `inputs` on
  lrt_features_config features_config;
  // Derived from these.
  uint32_t dim, features, embedding_width, qkv_width, symbols, params, max_lookback, max_positions;
  table embedding, lookback_embedding[LOOKBACKS], axis_embedding[AXES], head;
  table stage[STAGES], input_proj;
  uint64_t mean, scale, stage_bias[STAGES], input_bias, names;
  uint64_t edge_floats;  // of the frames before, in the state
  uint64_t frequencies, final_weight, final_bias, head_bias;
  uint64_t layers_offset, head_offset;  // in the file
  layer_map layer;              // of each alike
  uint64_t kv_floats, layer_floats, state_floats;  // of a key-value head, a layer, and all layers with `recent`
};

// Followed in memory by the state (`recent`, then for each layer and key-value head kv, z and n, then for each stage the
// last frame that went in) and scratch buffers.
struct lrt_sequence {
  const lrt_model *model;
  uint64_t generator;
  uint32_t seen, ready;  // ready: whether params are those of the last token
  uint32_t ended, symbol, before;  // symbol: the most probable one of the last frames, and of those before them
  uint32_t *recent;      // ring buffer of tokens
  float *edges, *rows, *gathered;  // rows: frames, and what becomes of them
  float *state, *x, *normed, *qkv, *attn_out, *gates, *decay_logits, *hidden;
  float *k, *q, *rotated_k, *rotated_q, *v, *y, *unit, *sine, *cosine;
  float *params, *mixture, *scores, *sorted;
  int16_t *quantized;  // the input of a product with INT8 weights
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
INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__wasm_relaxed_simd__)
  return __builtin_wasm_relaxed_madd_f32x4(a, b, c);
#else
  return a * b + c;
#endif
}

// Lanes 0 .. 15 in halves: i with i + 8, then i + 4, i + 2, i + 1.
INLINE float horizontal_sum(const vf *x) {
  union {
    vf parts[PARTS];
    quad quads[4];
  } lanes;
  UNROLL
  for (int i = 0; i < PARTS; ++i) lanes.parts[i] = x[i];
  const quad sums = (lanes.quads[0] + lanes.quads[2]) + (lanes.quads[1] + lanes.quads[3]);
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// exp(x) to about 1 unit in the last place: x = n ln 2 + r and the Taylor series in |r| <= 0.35, whose first dropped term
// is below a tenth of that unit. NaN stays NaN, too small becomes 0. Not inlined: that makes the WebAssembly a tenth larger.
static __attribute__((noinline)) vf exponential(vf x) {
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

// ln x for normal x > 0: x = 2^n m, m in [sqrt(1/2), sqrt(2)), and ln m = 2 artanh((m - 1) / (m + 1)).
INLINE vf logarithm(vf x) {
  const vi n = ((vi)x - 0x3f3504f3) >> 23;
  const vf m = (vf)((vu)x - ((vu)n << 23)), s = (m - 1.0f) / (m + 1.0f), t = s * s;
  vf p = splat(1.0f / 9);
  p = p * t + 1.0f / 7;
  p = p * t + 1.0f / 5;
  p = p * t + 1.0f / 3;
  const vf k = __builtin_convertvector(n, vf);
  return k * 0.693359375f + (s * t * p * 2.0f - k * 2.12194440e-4f + 2.0f * s);
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

INLINE vf sigmoid(vf x) { return 1.0f / (exponential(-x) + 1.0f); }

// x Phi(x), Hendrycks and Gimpel 2016, arXiv:1606.08415, with erfc as t exp(-z^2 + p(t)), t = 1 / (1 + z / 2), after Press
// et al., Numerical Recipes, section 6.2: within 1.2e-7 of itself for every z >= 0.
INLINE vf gelu(vf x) {
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
  const vf tail = x * 0.5f * t * exponential(p - z * z);  // x times the smaller share
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

// The arguments of a product of a matrix and a vector.
typedef struct {
  const table *map;
  const char *base;
  const float *bias, *x;     // bias may be null
  const int16_t *quantized;  // x for INT8, and
  float x_scale;             // its scale
  float *y;
  int add;  // to y, instead of overwriting it
} operands;

// Rows `first`, first + stride, ... of scale (W x) + bias.
INLINE void matvec_rows(uint32_t kind, int rows, const operands *o, uint64_t first, uint64_t stride) {
  const uint64_t columns = pad_to_lanes(o->map->columns), step = columns * element_size(kind);
  const char *weights = o->base + o->map->at + first * step;
  const float *scale = (const float *)(o->base + o->map->scale);
  float sums[ROWS];
  if (kind == INT8)
    dot_bytes(rows, weights, stride * step, o->quantized, columns, sums);
  else
    dot_rows(kind, rows, weights, stride * step, o->x, columns, sums);
  UNROLL
  for (int r = 0; r < rows; ++r) {
    const uint64_t row = first + (uint64_t)r * stride;
    float sum = sums[r];
    if (kind == INT8) {
      sum *= o->x_scale * scale[row];
      __asm__("" : "+r"(sum));  // rounded here: compilers would fuse it with the next sum for some processors only
    }
    if (o->bias) sum += o->bias[row];
    o->y[row] = o->add ? o->y[row] + sum : sum;
  }
}

INLINE void matvec_kind(uint32_t kind, const operands *o) {
  const uint64_t stride = o->map->rows / ROWS;
  for (uint64_t row = 0; row < stride; ++row) matvec_rows(kind, ROWS, o, row, stride);
  for (uint64_t row = stride * ROWS; row < o->map->rows; ++row) matvec_rows(kind, 1, o, row, 0);
}

static void matvec(const lrt_sequence *s, const table *map, const char *base, const float *bias, const float *x,
                    float *y, int add) {
  operands o = {map, base, bias, x, s->quantized, 0, y, add};
  if (map->kind == INT8) o.x_scale = quantize(x, pad_to_lanes(map->columns), s->quantized);
  if (map->kind == FLOAT32)
    matvec_kind(FLOAT32, &o);
  else if (map->kind == FLOAT16)
    matvec_kind(FLOAT16, &o);
  else
    matvec_kind(INT8, &o);
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
  int error;
} walk;

// Moves past a section of the file and the zeros up to the next multiple of LRT_ALIGN; returns where it begins.
static uint64_t section(walk *w, uint64_t bytes) {
  const uint64_t at = w->at;
  w->at += round_up(bytes, LRT_ALIGN);
  if (w->base)
    for (uint64_t i = at + bytes; i < w->at; ++i)
      if (w->base[i]) w->error = LRT_BAD_PADDING;
  return at;
}

// Returns whether some of these are NaN or infinite. Not inlined, and neither is its caller: see exponential.
static __attribute__((noinline)) int has_nonfinite(uint32_t kind, const char *from, uint64_t count) {
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
static __attribute__((noinline)) uint64_t check_rows(walk *w, uint32_t kind, uint64_t at, uint64_t rows,
                                                     uint64_t columns) {
  const uint64_t size = element_size(kind), step = pad_to_lanes(columns) * size;
  for (uint64_t row = 0; row < rows; ++row) {
    const char *from = w->base + at + row * step;
    if (has_nonfinite(kind, from, columns)) w->error = LRT_BAD_NUMBER;
    for (uint64_t i = columns * size; i < step; ++i)
      if (from[i]) w->error = LRT_BAD_PADDING;
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
      if (!(x[i] >= least && x[i] <= most)) w->error = LRT_BAD_NUMBER;
  }
  return at;
}

static uint64_t vector(walk *w, uint64_t count) { return bounded_vector(w, count, -__FLT_MAX__, __FLT_MAX__); }

static table matrix(walk *w, uint32_t kind, uint32_t rows, uint32_t columns) {
  table map = {.rows = rows, .columns = columns, .kind = kind};
  if (kind == INT8) map.scale = bounded_vector(w, rows, 0, __FLT_MAX__);
  map.at = section(w, rows * pad_to_lanes(columns) * element_size(kind));
  if (w->base) check_rows(w, kind, map.at, rows, columns);
  return map;
}

// The names of the symbols, each with a 0 behind it.
static void walk_names(lrt_model *m, walk *w) {
  m->names = section(w, m->names_bytes);
  if (!w->base) return;
  const char *names = w->base + m->names;
  uint32_t count = 0;
  for (uint32_t i = 0; i < m->names_bytes; ++i) {
    if (names[i]) continue;
    ++count;
    if (!i || !names[i - 1]) w->error = LRT_BAD_NAMES;
  }
  if (count != m->vocabulary - 1 || names[m->names_bytes - 1]) w->error = LRT_BAD_NAMES;
}

// What frames go through before the layers.
static void walk_frames(lrt_model *m, walk *w) {
  m->mean = vector(w, m->inputs);
  m->scale = vector(w, m->inputs);
  for (uint32_t i = 0; i < m->stages; ++i) {
    m->stage[i] = matrix(w, m->weights, m->subsampled, 3 * (i ? m->subsampled : m->inputs));
    m->stage_bias[i] = vector(w, m->subsampled);
  }
  m->input_proj = matrix(w, m->weights, m->embedding_width, m->subsampled);
  m->input_bias = vector(w, m->embedding_width);
  walk_names(m, w);
}

static void walk_embeddings(lrt_model *m, walk *w) {
  const uint32_t kind = m->weights == FLOAT32 ? FLOAT32 : FLOAT16;  // a row is read at a time: int8 would gain nothing
  if (m->input == FRAMES)
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
      if (!(x >= 0 && x <= 1)) w->error = LRT_BAD_NUMBER;  // so that no angle reaches 2^32
    }
  }
}

static void walk_norm(const lrt_model *m, walk *w, uint64_t *weight, uint64_t *bias) {
  *weight = vector(w, m->width);
  *bias = m->norm_kind == LAYER_NORM ? vector(w, m->width) : 0;
}

static void walk_layer(lrt_model *m, walk *w) {
  layer_map *l = &m->layer;
  walk_norm(m, w, &l->attn_norm_weight, &l->attn_norm_bias);
  l->qkv_proj = matrix(w, m->weights, m->qkv_width, m->width);
  l->qkv_bias = vector(w, m->qkv_width);
  if (m->head_gate) {
    l->gate_proj = matrix(w, m->weights, m->width, m->width);
    l->gate_bias = vector(w, m->width);
  }
  if (m->decay == GATED) {
    l->decay_proj = matrix(w, m->weights, m->kv_heads, m->width);
    l->decay_bias = vector(w, m->kv_heads);
  }
  if (m->decay == FIXED) l->decay = bounded_vector(w, m->kv_heads, 0, 1);
  if (m->projections) l->projection = matrix(w, FLOAT32, m->kv_heads * m->projections, m->dim);
  l->out_proj = matrix(w, m->weights, m->width, m->width);
  l->out_bias = vector(w, m->width);
  walk_norm(m, w, &l->mlp_norm_weight, &l->mlp_norm_bias);
  const uint32_t up_rows = m->hidden * (m->activation == SWIGLU ? 2 : 1);
  l->up = matrix(w, m->weights, up_rows, m->width);
  l->up_bias = vector(w, up_rows);
  l->down = matrix(w, m->weights, m->width, m->hidden);
  l->down_bias = vector(w, m->width);
  l->bytes = w->at;
}

static void walk_head(lrt_model *m, walk *w) {
  if (m->final_norm) walk_norm(m, w, &m->final_weight, &m->final_bias);
  m->head = matrix(w, m->weights, m->params, m->width);
  m->head_bias = vector(w, m->params);
}

typedef struct {
  const char *at;
  int error;
} reader;

static uint32_t read_word(reader *r, uint32_t least, uint32_t most, int error) {
  const uint32_t x = word_at(r->at);
  r->at += 4;
  if (!r->error && (x < least || x > most)) r->error = error;
  return x;
}

static uint32_t read_enum(reader *r, uint32_t last) { return read_word(r, 0, last, LRT_UNKNOWN_KIND); }
static uint32_t read_size(reader *r, uint32_t least, uint32_t most) { return read_word(r, least, most, LRT_BAD_SIZES); }

static float read_float(reader *r) {
  float x;
  copy(&x, r->at, 4);
  r->at += 4;
  if (!r->error && !(x >= 0 && x <= __FLT_MAX__)) r->error = LRT_BAD_NUMBER;
  return x;
}

// The fields, each within bounds that keep every product below within 64 bits.
static int read_header(lrt_model *m, const char *file) {
  reader r = {file + 24, LRT_OK};
  m->weights = read_enum(&r, INT8);
  m->vocabulary = read_size(&r, 1, 1 << 24);
  m->start = read_enum(&r, 1);
  m->layers = read_size(&r, 1, 1 << 12);
  m->width = read_size(&r, 1, 1 << 16);
  m->heads = read_size(&r, 1, 1 << 16);
  m->kv_heads = read_size(&r, 1, 1 << 16);
  m->projections = read_size(&r, 0, 1 << 15);
  m->hidden = read_size(&r, 1, 1 << 20);
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
  m->feature_map = read_enum(&r, ARC_COSINE);
  m->decay = read_enum(&r, GATED);
  m->denominator = read_enum(&r, BOUNDED);
  m->head_norm = read_enum(&r, 1);
  m->head_gate = read_enum(&r, 1);
  m->output = read_enum(&r, MIXTURE);
  m->components = read_size(&r, 0, 1 << 16);
  m->eps = read_float(&r);
  m->norm_eps = read_float(&r);
  while (r.at < file + HEADER - 4) read_word(&r, 0, 0, LRT_BAD_PADDING);
  m->input = read_enum(&r, FRAMES);
  return r.error;
}

// The header behind the header of a model that reads frames.
static int read_frames_header(lrt_model *m, const char *file) {
  reader r = {file + HEADER, LRT_OK};
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
  while (r.at < file + HEADER + FRAMES_HEADER) read_word(&r, 0, 0, LRT_BAD_PADDING);
  if (r.error) return r.error;
  if ((m->stages == 0 && m->subsampled != m->inputs) || m->start || m->lookbacks || m->output != LOGITS ||
      m->vocabulary < 2)
    return LRT_BAD_SIZES;
  if (m->audio == GIVEN) return c->low_hz == 0 && c->high_hz == 0 ? LRT_OK : LRT_BAD_SIZES;
  return c->rate >= 1 && c->rate <= 1 << 24 && c->frame >= 2 && c->frame <= 1 << 15 && c->shift >= 1 &&
                 c->shift <= c->frame && c->bins >= 3 && c->low_hz < c->high_hz && c->high_hz <= (float)c->rate / 2
             ? LRT_OK
             : LRT_BAD_SIZES;
}

// Checks the fields against each other and computes what follows from them.
static int derive(lrt_model *m) {
  const int projects = m->feature_map == TRIGONOMETRIC || m->feature_map == ARC_COSINE;
  if (m->width % m->heads || m->heads % m->kv_heads || (m->projections != 0) != projects ||
      (m->position == LEARNED) != (m->axes != 0) || (m->lookbacks && !m->start) ||
      (m->output == MIXTURE) != (m->components != 0) || (m->output == MIXTURE && m->vocabulary < 2))
    return LRT_BAD_SIZES;
  m->dim = m->width / m->heads;
  m->features = !projects ? m->dim : m->feature_map == TRIGONOMETRIC ? 2 * m->projections : m->projections;
  m->embedding_width = m->position == CONCATENATED ? m->width / 2 : m->width;
  if ((m->position == SINUSOIDAL && m->width % 2) || (m->position == CONCATENATED && m->width % 4) ||
      (m->position == ROTARY && m->dim % 2))
    return LRT_BAD_SIZES;
  m->qkv_width = (m->heads + 2 * m->kv_heads) * m->dim;
  m->symbols = m->vocabulary + m->start;
  m->params = m->output == MIXTURE ? 3 * m->components : m->vocabulary;
  for (uint32_t i = 0; i < m->lookbacks; ++i)
    m->max_lookback = m->lookback[i] > m->max_lookback ? m->lookback[i] : m->max_lookback;
  uint64_t last = m->axes ? 1 : LAST_POSITION;
  for (uint32_t i = 0; i < m->axes; ++i) {
    last *= m->axis[i];
    if (last > LAST_POSITION) last = LAST_POSITION;
  }
  m->max_positions = (uint32_t)last;
  m->kv_floats = m->features * pad_to_lanes(m->dim);
  m->layer_floats = m->kv_heads * (m->kv_floats + pad_to_lanes(m->features)) + pad_to_lanes(m->kv_heads);
  m->edge_floats = m->stages ? pad_to_lanes(m->inputs) + (m->stages - 1) * pad_to_lanes(m->subsampled) : 0;
  m->state_floats = pad_to_lanes(m->max_lookback) + m->layers * m->layer_floats + m->edge_floats;
  return LRT_OK;
}

static float *carve(float *base, uint64_t *at, uint64_t floats) {
  float *const here = base ? base + *at : 0;
  *at += pad_to_lanes(floats);
  return here;
}

static uint64_t larger_size(uint64_t a, uint64_t b) { return a > b ? a : b; }

static uint64_t row_floats(const lrt_model *m) { return pad_to_lanes(larger_size(m->inputs, m->subsampled)); }

// Lays out the buffers of a sequence from `base` on (null: only counts); returns how many floats they take.
static uint64_t lay_out(lrt_sequence *s, const lrt_model *m, float *base) {
  uint64_t at = 0;
  s->recent = (uint32_t *)carve(base, &at, m->max_lookback);
  s->state = carve(base, &at, m->layers * m->layer_floats);
  s->edges = carve(base, &at, m->edge_floats);
  s->x = carve(base, &at, m->width);
  s->normed = carve(base, &at, m->width);
  s->qkv = carve(base, &at, m->qkv_width);
  s->attn_out = carve(base, &at, m->width);
  s->gates = carve(base, &at, m->width);
  s->decay_logits = carve(base, &at, m->kv_heads);
  s->hidden = carve(base, &at, 2 * m->hidden + LANES);
  s->k = carve(base, &at, m->features);
  s->q = carve(base, &at, m->features);
  s->rotated_k = carve(base, &at, m->features);
  s->rotated_q = carve(base, &at, m->features);
  s->v = carve(base, &at, m->dim);
  s->y = carve(base, &at, m->dim);
  s->unit = carve(base, &at, m->dim);
  s->sine = carve(base, &at, m->dim);
  s->cosine = carve(base, &at, m->dim);
  s->params = carve(base, &at, m->params);
  s->mixture = carve(base, &at, 4 * pad_to_lanes(m->components));
  s->scores = carve(base, &at, m->vocabulary);
  s->sorted = carve(base, &at, m->vocabulary);
  const uint64_t gathered = m->stages ? 3 * larger_size(m->inputs, m->subsampled) : 0;
  s->rows = carve(base, &at, (uint64_t)(1u << m->stages) * row_floats(m));
  s->gathered = carve(base, &at, gathered);
  const uint64_t longest = larger_size(larger_size(m->hidden, m->width), larger_size(gathered, m->subsampled));
  s->quantized = (int16_t *)carve(base, &at, pad_to_lanes(longest) / 2);
  return at;
}

static int same_magic(const char *a, const char *b) {  // of the eight bytes of a magic
  return word_at(a) == word_at(b) && word_at(a + 4) == word_at(b + 4);
}

static int aligned(const void *at) { return (uintptr_t)at % LRT_ALIGN == 0; }

size_t lrt_model_size(void) { return (size_t)round_up(sizeof(lrt_model), LRT_ALIGN); }

// Checks the header and the checksum of a file or state. bad_magic: the error where it begins with other bytes.
static int check_file(const char *file, uint64_t size, const char *magic, uint64_t header, int bad_magic) {
  if (size < 8 || !same_magic(file, magic)) return bad_magic;
  if (size < 12) return LRT_WRONG_SIZE;
  if (word_at(file + 8) != LRT_FORMAT) return LRT_OTHER_VERSION;
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
  lrt_model m = {.file = file, .checksum = word_at(file + 12)};
  error = read_header(&m, file);
  if (error) return error;
  const uint64_t body = HEADER + (m.input == FRAMES ? FRAMES_HEADER : 0);
  if (bytes < body) return LRT_WRONG_SIZE;
  if (m.input == FRAMES) error = read_frames_header(&m, file);
  if (!error) error = derive(&m);
  if (error) return error;
  walk front = {0, body, LRT_OK}, layer = {0, 0, LRT_OK}, back = {0, 0, LRT_OK};
  walk_embeddings(&m, &front);
  walk_layer(&m, &layer);
  walk_head(&m, &back);
  m.layers_offset = front.at;
  m.head_offset = front.at + m.layers * layer.at;
  if (m.head_offset + back.at != bytes) return LRT_WRONG_SIZE;
  walk check = {file, body, LRT_OK};
  walk_embeddings(&m, &check);
  for (uint32_t i = 0; i < m.layers; ++i) {
    check.base = file + m.layers_offset + i * layer.at;
    check.at = 0;
    walk_layer(&m, &check);
  }
  check.base = file + m.head_offset;
  check.at = 0;
  walk_head(&m, &check);
  if (check.error) return check.error;
  copy(memory, &m, sizeof m);
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
    case LRT_HEADS: return (int)m->heads;
    case LRT_KV_HEADS: return (int)m->kv_heads;
    case LRT_WEIGHTS: return m->weights == FLOAT32 ? 32 : m->weights == FLOAT16 ? 16 : 8;
    case LRT_INPUT: return (int)m->inputs;
    case LRT_SUBSAMPLE: return m->input == FRAMES ? 1 << m->stages : 0;
    case LRT_SPACED: return (int)m->spaced;
    default: return LRT_BAD_OPTION;
  }
}

const char *lrt_symbol(const lrt_model *m, uint32_t symbol) {
  if (m->input != FRAMES || !symbol || symbol >= m->vocabulary) return 0;
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

static uint64_t sequence_bytes(const lrt_model *m) {
  lrt_sequence unused;
  return SEQUENCE_BYTES + 4 * lay_out(&unused, m, 0);
}

static size_t as_size_t(uint64_t bytes) { return bytes <= SIZE_MAX / 2 ? (size_t)bytes : 0; }

size_t lrt_sequence_size(const lrt_model *m) { return as_size_t(sequence_bytes(m)); }

int lrt_start(lrt_sequence *s, size_t size, const lrt_model *m) {
  const size_t needed = lrt_sequence_size(m);
  if (!aligned(s)) return LRT_NOT_ALIGNED;
  if (!needed || size < needed) return LRT_NO_ROOM;
  __builtin_memset(s, 0, needed);
  s->model = m;
  lay_out(s, m, (float *)((char *)s + SEQUENCE_BYTES));
  for (uint32_t i = 0; i < m->max_lookback; ++i) s->recent[i] = m->vocabulary;
  return LRT_OK;
}

uint32_t lrt_seen(const lrt_sequence *s) { return s->seen; }

// Beyond its width a row stays 0, as its weight and bias are.
static void norm(const lrt_model *m, const char *base, uint64_t weight, uint64_t bias, const float *from, float *to) {
  const uint64_t n = m->width;
  const float *scale_of = (const float *)(base + weight), *shift = (const float *)(base + bias);
  const int centred = m->norm_kind == LAYER_NORM;
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
  const float scale = 1 / __builtin_sqrtf(horizontal_sum(squares) / (float)n + m->norm_eps);
  for (uint64_t at = 0; at < pad_to_lanes(n); at += W) {
    const vf y = (load(from + at) - mean) * scale * load(scale_of + at);
    store(to + at, centred ? y + load(shift + at) : y);
  }
}

// Rotary embedding: rotates the pairs (i, i + d/2) by the angles of this position.
static void apply_rope(const lrt_sequence *s, const float *from, float *to) {
  const uint32_t half = s->model->dim / 2;
  for (uint32_t i = 0; i < half; ++i) {
    const float a = from[i], b = from[i + half];
    to[i] = a * s->cosine[i] - b * s->sine[i];
    to[i + half] = a * s->sine[i] + b * s->cosine[i];
  }
}

// to = the features of a query or key x [d] of key-value head g.
static void map_features(const lrt_sequence *s, const char *base, uint32_t g, const float *x, float *to) {
  const lrt_model *m = s->model;
  copy(s->unit, x, m->dim * sizeof *x);
  clear(s->unit, m->dim, pad_to_lanes(m->dim));
  if (!m->projections) {
    for (uint64_t at = 0; at < pad_to_lanes(m->dim); at += W) {
      const vf y = load(s->unit + at);
      vf mapped = y;
      if (m->feature_map == ELU_PLUS_ONE) mapped = blend(y > 0.0f, y + 1.0f, exponential(y));
      if (m->feature_map == RELU) mapped = blend(y < 0.0f, (vf){0}, y);  // NaN stays
      if (m->feature_map == SQUARED_RELU) mapped = blend(y < 0.0f, (vf){0}, y * y);
      store(to + at, mapped);
    }
    clear(to, m->dim, pad_to_lanes(m->dim));
    return;
  }
  if (m->position == ROTARY) apply_rope(s, x, s->unit);
  vf squares[PARTS] = {{0}};
  for (uint64_t at = 0; at < pad_to_lanes(m->dim); at += LANES)
    for (int i = 0; i < PARTS; ++i) {
      const vf y = load(s->unit + at + i * W);
      squares[i] = multiply_add(y, y, squares[i]);
    }
  const float length = __builtin_sqrtf(horizontal_sum(squares)), inverse = 1 / (length < 1e-6f ? 1e-6f : length);
  for (uint64_t at = 0; at < pad_to_lanes(m->dim); at += W) store(s->unit + at, load(s->unit + at) * inverse);
  table rows = m->layer.projection;
  rows.rows = m->projections;
  rows.at += (uint64_t)g * m->projections * pad_to_lanes(m->dim) * sizeof(float);
  matvec(s, &rows, base, 0, s->unit, to, 0);
  for (uint32_t i = 0; i < m->projections; ++i) {
    if (m->feature_map == TRIGONOMETRIC)
      sin_cos(to[i], to + i, to + m->projections + i);
    else
      to[i] = to[i] < 0 ? 0 : to[i];
  }
}

// y = q kv.
static void read_state(const float *kv, const float *q, uint64_t features, uint64_t width, float *y) {
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

// Updates the state of a key-value head with its key and value.
static void write_state(const lrt_sequence *s, float keep, float write, float *kv, float *z, const float *k,
                        const float *rotated) {
  const uint64_t width = pad_to_lanes(s->model->dim);
  for (uint64_t i = 0; i < s->model->features; ++i) {
    const vf weight = splat(rotated[i] * write);
    z[i] = z[i] * keep + k[i] * write;
    for (uint64_t at = 0; at < width; at += W)
      store(kv + i * width + at, multiply_add(weight, load(s->v + at), load(kv + i * width + at) * keep));
  }
}

// Applies the denominator, the norm and the gate to the output of a query head.
static void finish_head(const lrt_sequence *s, uint32_t head, float denominator) {
  const lrt_model *m = s->model;
  float *y = s->y;
  if (m->denominator != NO_DENOMINATOR)
    for (uint32_t i = 0; i < m->dim; ++i) y[i] = denominator == 0 ? 0 : y[i] / denominator;
  if (m->head_norm) {
    const float scale = 1 / __builtin_sqrtf(dot(y, y, m->dim) / (float)m->dim + 1e-6f);
    for (uint32_t i = 0; i < m->dim; ++i) y[i] *= scale;
  }
  if (m->head_gate) {
    const float *gate = s->gates + head * m->dim;
    for (uint32_t i = 0; i < m->dim; ++i) y[i] *= gate[i];
  }
  copy(s->attn_out + head * m->dim, y, m->dim * sizeof *y);
}

// A key-value head, and the query heads that share it.
static void attend_head(const lrt_sequence *s, const char *base, float *state, uint32_t g) {
  const lrt_model *m = s->model;
  const uint32_t d = m->dim, group = m->heads / m->kv_heads;
  const float *queries = s->qkv, *keys = queries + m->heads * d, *values = keys + m->kv_heads * d;
  float *kv = state + g * m->kv_floats, *z = state + m->kv_heads * m->kv_floats + g * pad_to_lanes(m->features);
  float *n = state + m->layer_floats - pad_to_lanes(m->kv_heads) + g;
  const int rotated = m->position == ROTARY && !m->projections;
  float keep = 1, write = 1;
  if (m->decay == FIXED) keep = ((const float *)(base + m->layer.decay))[g] + 0.0f;  // -0 would get into the padding
  if (m->decay == GATED) {
    const float x = s->decay_logits[g], logit = x < -60 ? -60 : x > 60 ? 60 : x;  // STEEPEST of lintra/attention/rfa.py
    keep = sigmoid(splat(logit))[0];
    write = sigmoid(splat(-logit))[0];
  }
  map_features(s, base, g, keys + g * d, s->k);
  if (rotated) apply_rope(s, s->k, s->rotated_k);
  copy(s->v, values + g * d, d * sizeof *values);
  write_state(s, keep, write, kv, z, s->k, rotated ? s->rotated_k : s->k);
  *n = *n * keep + write;
  for (uint32_t head = g * group; head < (g + 1) * group; ++head) {
    map_features(s, base, g, queries + head * d, s->q);
    if (rotated) apply_rope(s, s->q, s->rotated_q);
    read_state(kv, rotated ? s->rotated_q : s->q, m->features, pad_to_lanes(d), s->y);
    float denominator = dot(s->q, z, m->features);
    if (m->denominator == SUM) denominator += m->eps;
    if (m->denominator == BOUNDED && !(denominator > m->eps * *n)) denominator = m->eps * *n;
    finish_head(s, head, denominator);
  }
}

static void attention_layer(const lrt_sequence *s, const char *base, float *state, const float *input, float *to) {
  const lrt_model *m = s->model;
  const layer_map *l = &m->layer;
  matvec(s, &l->qkv_proj, base, (const float *)(base + l->qkv_bias), input, s->qkv, 0);
  if (m->head_gate) {
    matvec(s, &l->gate_proj, base, (const float *)(base + l->gate_bias), input, s->gates, 0);
    for (uint64_t at = 0; at < pad_to_lanes(m->width); at += W) {
      const vf x = load(s->gates + at);
      store(s->gates + at, x * sigmoid(x));
    }
  }
  if (m->decay == GATED)
    matvec(s, &l->decay_proj, base, (const float *)(base + l->decay_bias), input, s->decay_logits, 0);
  for (uint32_t g = 0; g < m->kv_heads; ++g) attend_head(s, base, state, g);
  matvec(s, &l->out_proj, base, (const float *)(base + l->out_bias), s->attn_out, to, 1);
}

static void mlp(const lrt_sequence *s, const char *base, const float *input, float *to) {
  const lrt_model *m = s->model;
  const layer_map *l = &m->layer;
  const uint64_t n = m->hidden;
  float *hidden = s->hidden;
  matvec(s, &l->up, base, (const float *)(base + l->up_bias), input, hidden, 0);
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
  matvec(s, &l->down, base, (const float *)(base + l->down_bias), hidden, to, 1);
}

// s->x = the embeddings of a token, or of s->rows, of those `lookback` tokens before it, and of its position.
static void embed(const lrt_sequence *s, uint32_t token) {
  const lrt_model *m = s->model;
  const char *base = m->file;
  clear(s->x, 0, pad_to_lanes(m->width));
  if (m->input == FRAMES)
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

// Decodes one token, which is a valid symbol at a valid position; computes params where `last`.
static void decode_token(lrt_sequence *s, uint32_t token, int last) {
  const lrt_model *m = s->model;
  const int pre = m->norm_order == PRE;
  embed(s, token);
  for (uint32_t i = 0; i < m->layers; ++i) {
    const char *base = m->file + m->layers_offset + i * m->layer.bytes;
    const layer_map *l = &m->layer;
    if (pre) norm(m, base, l->attn_norm_weight, l->attn_norm_bias, s->x, s->normed);
    attention_layer(s, base, s->state + i * m->layer_floats, pre ? s->normed : s->x, s->x);
    norm(m, base, pre ? l->mlp_norm_weight : l->attn_norm_weight, pre ? l->mlp_norm_bias : l->attn_norm_bias, s->x,
         pre ? s->normed : s->x);
    mlp(s, base, pre ? s->normed : s->x, s->x);
    if (!pre) norm(m, base, l->mlp_norm_weight, l->mlp_norm_bias, s->x, s->x);
  }
  if (m->max_lookback) s->recent[s->seen % m->max_lookback] = token;
  s->seen += 1;
  s->ready = (uint32_t)last;
  if (!last) return;
  const char *base = m->file + m->head_offset;
  if (m->final_norm) norm(m, base, m->final_weight, m->final_bias, s->x, s->normed);
  matvec(s, &m->head, base, (const float *)(base + m->head_bias), m->final_norm ? s->normed : s->x, s->params, 0);
}

int lrt_prefill(lrt_sequence *s, const uint32_t *tokens, size_t count) {
  const lrt_model *m = s->model;
  if (m->input != TOKENS) return LRT_OTHER_INPUT;
  for (size_t i = 0; i < count; ++i)
    if (tokens[i] >= m->symbols) return LRT_BAD_TOKEN;
  if (count > m->max_positions - s->seen) return LRT_TOO_LONG;
  for (size_t i = 0; i < count; ++i) decode_token(s, tokens[i], i + 1 == count);
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
  if (m->input != FRAMES) return LRT_OTHER_INPUT;
  if (!count || count > 1u << m->stages) return LRT_BAD_OPTION;
  if (s->ended) return LRT_ENDED;
  if (s->seen >= m->max_positions) return LRT_TOO_LONG;
  if (has_nonfinite(FLOAT32, (const char *)frames, count * n)) return LRT_BAD_NUMBER;
  const float *mean = (const float *)(m->file + m->mean), *scale = (const float *)(m->file + m->scale);
  for (uint64_t row = 0; row < count; ++row) {
    float *to = s->rows + row * step;
    copy(to, frames + row * n, n * sizeof *frames);
    for (uint64_t i = 0; i < n; ++i) to[i] = (to[i] - mean[i]) * scale[i];
    clear(to, n, step);
  }
  uint32_t left = (uint32_t)count;
  for (uint32_t i = 0; i < m->stages; ++i) left = subsample(s, i, left);
  decode_token(s, 0, 1);
  s->ended = count < 1u << m->stages;
  s->before = s->symbol;
  s->symbol = most_probable(s);
  return LRT_OK;
}

int lrt_new_symbol(const lrt_sequence *s) {
  if (s->model->input != FRAMES) return LRT_OTHER_INPUT;
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

// States as bytes: a header, then the memory from `recent` on.

static uint64_t state_bytes(const lrt_model *m) { return STATE_HEADER + 4 * m->state_floats; }

size_t lrt_state_size(const lrt_model *m) { return as_size_t(state_bytes(m)); }

int lrt_save_state(const lrt_sequence *s, void *to, size_t size) {
  const lrt_model *m = s->model;
  const uint64_t bytes = state_bytes(m);
  char *file = to;
  if (size != bytes) return LRT_WRONG_SIZE;
  const uint32_t version = LRT_FORMAT;
  __builtin_memset(file, 0, STATE_HEADER);
  copy(file, STATE_MAGIC, 8);
  copy(file + 8, &version, 4);
  copy(file + 16, &bytes, 8);
  copy(file + 24, &m->checksum, 4);
  copy(file + 28, &s->seen, 4);
  copy(file + 32, &s->generator, 8);
  copy(file + 40, &s->ended, 4);
  copy(file + 44, &s->symbol, 4);
  copy(file + STATE_HEADER, s->recent, bytes - STATE_HEADER);
  const uint32_t checksum = lrt_checksum(file + 16, size - 16);
  copy(file + 12, &checksum, 4);
  return LRT_OK;
}

int lrt_load_state(lrt_sequence *s, const void *from, size_t size) {
  const lrt_model *m = s->model;
  const uint64_t bytes = state_bytes(m);
  const char *file = from;
  const int error = check_file(file, size, STATE_MAGIC, STATE_HEADER, LRT_NOT_A_STATE);
  if (error) return error;
  if (word_at(file + 24) != m->checksum || size != bytes) return LRT_OTHER_MODEL;
  const uint32_t ended = word_at(file + 40), symbol = word_at(file + 44);
  for (int i = m->input == FRAMES ? 48 : 40; i < STATE_HEADER; ++i)
    if (file[i]) return LRT_BAD_PADDING;
  if (ended > 1 || symbol >= m->vocabulary) return LRT_BAD_TOKEN;
  const uint32_t seen = word_at(file + 28);
  if (seen > m->max_positions) return LRT_TOO_LONG;
  const char *recent = file + STATE_HEADER, *state = recent + 4 * pad_to_lanes(m->max_lookback);
  for (uint64_t i = 0; i < pad_to_lanes(m->max_lookback); ++i) {
    const uint32_t token = word_at(recent + 4 * i);
    if (i < m->max_lookback && token >= m->symbols) return LRT_BAD_TOKEN;
    if (i >= m->max_lookback && token) return LRT_BAD_PADDING;
  }
  walk w = {state, 0, LRT_OK};
  for (uint32_t i = 0; i < m->layers; ++i) {
    w.at = check_rows(&w, FLOAT32, w.at, (uint64_t)m->kv_heads * m->features, m->dim);
    w.at = check_rows(&w, FLOAT32, w.at, m->kv_heads, m->features);
    w.at = check_rows(&w, FLOAT32, w.at, 1, m->kv_heads);
  }
  for (uint32_t i = 0; i < m->stages; ++i)
    w.at = check_rows(&w, FLOAT32, w.at, 1, i ? m->subsampled : m->inputs);
  if (w.error) return w.error;
  copy(s->recent, recent, bytes - STATE_HEADER);
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
    case LRT_BAD_NAMES: return "the names of the symbols are more or fewer than these, or one is empty";
    default: return "there is no such error";
  }
}
