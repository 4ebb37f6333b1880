// The C interface of the native library: one flat block of 64-bit words, so that Python can build it with a single
// struct.pack and no binding generator. Change LINTRA_ABI whenever a word is added, removed or gets another meaning.
#pragma once
#include <stdint.h>

#define LINTRA_ABI 9

#define LINTRA_PANEL 64  // outputs of a panel of weights

typedef int64_t i64;

enum { LINTRA_FLOAT32, LINTRA_FLOAT64, LINTRA_BFLOAT16, LINTRA_FLOAT16, LINTRA_INT8 };  // element types
enum { LINTRA_IDENTITY, LINTRA_ELU_PLUS_ONE, LINTRA_RELU, LINTRA_EXP };             // feature maps
enum { LINTRA_MLP_GELU, LINTRA_MLP_SWIGLU, LINTRA_MLP_RELU };                    // activations of the MLP
enum { LINTRA_BAND, LINTRA_SEGMENTS, LINTRA_BLOCKS, LINTRA_SORTED };               // which keys a softmax reads
enum { LINTRA_CAUSAL = 1, LINTRA_SEE_SELF = 2, LINTRA_ACROSS_BUCKETS = 4, LINTRA_WRAP = 8, LINTRA_EXACT_UNION = 16 };
enum { LINTRA_OK, LINTRA_NO_MEMORY, LINTRA_BAD_CALL };                              // return values
enum { LINTRA_BASELINE, LINTRA_AVX2, LINTRA_AVX512, LINTRA_NEON, LINTRA_ISA_COUNT };  // instruction sets

// Strides count elements. The last axis, if the tensor has one beyond these, is contiguous. data == 0: absent.
typedef struct {
  char* data;
  i64 b, t, h;
} lintra_tensor;

// The sum dtype is float64 for float64 inputs and float32 otherwise; tensors "in the sum dtype" carry an s below.
typedef struct {
  i64 isa, threads, dtype, causal, normalize, feature_map;
  i64 b, t, s, h, g, f, e;
  double eps;
  lintra_tensor q, k, v;               // [b t h f] [b s g f] [b s g e]
  lintra_tensor log_decay, log_input;  // s, [b s g]
  lintra_tensor mask;                  // bytes, [b s]; h is unused
  // Absent, or [b+1]: b sequences one after the other in one row of t = s tokens, whose first tokens are at these
  // places; the last is t. The tensors of tokens then have 1 in the place of b, the states keep it.
  const i64* cu_seqlens;
  // Contiguous from here on.
  const void *kv, *z;  // s, [b g f e] [b g f]: the state before; both or neither
  void *y, *den;       // [b t h e]; s, [b t h]: written by forward, read by backward
  void* lost;          // like y, of 16 bits: what y lost when it was rounded, rounded itself; may be absent
  void *kv_out, *z_out;
  // Backward only.
  lintra_tensor dy;          // [b t h e]
  const void *dkv, *dz;      // s: gradients of the state after; each may be absent
  void *dq, *dk, *dv;        // like q, k, v, contiguous
  void *dlog_decay, *dlog_input;  // s, [b s g]; absent when not wanted
  void *dkv_in, *dz_in;      // s: gradients of the state before
} lintra_call;

// The sum without a denominator whose state forgets every key feature at a rate of its own, or whose tokens write by the
// delta rule: recurrence.h. n states [f e], g a sequence; output head j reads state j / (h / g), query head
// j / (h / query_heads), and state i has key head i / (g / key_heads) and value head i / (g / value_heads).
typedef struct {
  i64 isa, threads, dtype;
  i64 b, t, h, g, query_heads, key_heads, value_heads, f, e;
  i64 parts;       // into which the columns of the state are cut, where sequences and heads are few
  i64 per_feature;  // log_decay is [b t g f]
  i64 interval;    // tokens from one checkpoint to the next: whole chunks
  double scale;    // of q
  lintra_tensor q, k, v;          // [b t query_heads f] [b t key_heads f] [b t value_heads e]
  lintra_tensor log_decay, beta;  // s, [b t g] or [b t g f], [b t g]; without beta: the sum
  lintra_tensor mask;             // bytes, [b t]
  const i64* cu_seqlens;          // as above
  // Contiguous from here on.
  const void* state;  // s, [n g f e]; absent: zeros. One token may be added in place: state == state_out
  void *y, *state_out;  // [b t h e]; s, [n g f e]
  // s, [n', g, f, e]: the states before the tokens at multiples of the interval, of all sequences one after the other.
  // Those of sequence i begin with number (the tokens of those before) / interval + i, so n' is (all tokens) / interval
  // + n. Written by forward unless absent.
  void* checkpoints;
  // Backward only.
  lintra_tensor dy;      // [b t h e]
  const void* dstate;    // s: gradient of the state after; may be absent
  void *dq, *dk, *dlog_decay, *dbeta;  // s, [parts b t h f] [parts b t g f] like log_decay and beta, to be summed over parts
  void *dv, *dstate_in;  // s, [b t g e], [n g f e]
} lintra_recurrence;

// The short causal convolution of every channel with itself, over the real tokens: conv1d.cpp.
typedef struct {
  i64 isa, threads, dtype;
  i64 b, t, c, width;      // b: of sequences
  i64 silu;                // after the sum
  i64 groups;              // of sequences, each with sums of its own of the gradients of weight and bias
  lintra_tensor x;         // [b t c]; h is unused
  lintra_tensor mask;      // bytes, [b t]
  const i64* cu_seqlens;   // as above
  // Contiguous from here on.
  const void *weight, *bias;  // s, [width c], the last row for the token itself, and [c]; bias may be absent
  const void* state;          // s, [n width-1 c]: the last inputs, the latest last; absent: zeros
  void *y, *state_out;        // [b t c]; s, [n width-1 c], which may be the state before
  // Backward only.
  lintra_tensor dy;            // [b t c]
  const void* dstate;          // s: gradient of the state after; may be absent
  void *dx;                    // [b t c]
  void *dweight, *dbias;       // s, [groups width c] [groups c]
  void* dstate_in;             // s, [n width-1 c]; absent when not wanted
} lintra_conv1d;
// A few tokens of it from a buffer of the last inputs and into that buffer, in place. Strides count elements.
typedef struct {
  i64 isa, threads, dtype;
  i64 b, t, c, width, length;  // length: of the buffer, at least width - 1
  i64 silu;
  const char* x;               // [b t c]
  i64 x_b, x_t, x_c;
  char* buffer;                // [rows c length], in the dtype of x; none is used twice
  i64 buffer_row, buffer_c, buffer_l;
  // i64 [b]: the row of each sequence, below 0 for none, whose y is 0 (absent: that of its number); and where in
  // the buffer, used in a circle, its first token goes (absent: inputs move up and the latest is last).
  const i64 *rows, *starts;
  const void *weight, *bias;   // s, [c width] and [c], contiguous; bias may be absent
  void* y;                     // [b t c], contiguous
} lintra_conv1d_step;
// The selective scan: scan.h. c channels in g groups of neighbours, n states to a channel. Of tensors [b t c] the last
// stride h is that of the channels; it or that of time is 1, and with t = 1 it is that of the channels.
typedef struct {
  i64 isa, threads, dtype;
  i64 b, t, c, g, n;
  i64 softplus;             // delta is softplus(dt + dt_bias)
  i64 interval;             // tokens of a tile and from one checkpoint to the next, a multiple of 16
  i64 tied;                 // A is [c], one rate for all states of a channel: of one token forward alone
  lintra_tensor u, dt, z;   // [b t c]; z may be absent
  lintra_tensor B, C;       // [b t g n]
  lintra_tensor mask;       // bytes, [b t]
  const i64* cu_seqlens;    // as above
  const void *A, *D, *dt_bias;  // s, [c n] [c] [c], contiguous; D and dt_bias may be absent
  const void* state;        // s, [b c n], contiguous; absent: zeros. state == state_out is allowed without checkpoints
  lintra_tensor y;          // [b t c]
  void* state_out;          // s, [b c n], contiguous
  // s, numbered like those of lintra_recurrence, each [g parts n 64] where a group's channels make `parts` blocks of
  // 64. Written by forward unless absent.
  void* checkpoints;
  // Backward only.
  lintra_tensor dy;           // [b t c]
  const void* dstate;         // s: gradient of the state after; may be absent
  lintra_tensor du, ddt, dz;  // [b t c]
  // s, contiguous, to be summed over the first axis: [b c n], [b c] twice, [parts b t g n] twice. dD and ddt_bias may
  // be absent.
  void *dA, *dD, *ddt_bias, *dB, *dC;
  void* dstate_in;            // s, [b c n]
} lintra_scan;
// Softmax attention to some of the keys, no score kept: softmax.h. Query heads j / (h / g) share a head of keys. kind:
// LINTRA_BAND: the queries are the last t of the s places; that at place i sees the keys at places j with
//   -after dilation <= i - j <= before dilation, i - j a multiple of dilation.
// LINTRA_SEGMENTS: a query sees the segment of `unit` places it is in, `before` places before and `after` after it; t == s,
//   or there is one segment.
// LINTRA_BLOCKS: a block of `unit` queries sees the blocks of keys on its list, and of its own block of keys the offsets
//   up to the query's.
// LINTRA_SORTED: t == s, h == g; in each of several rounds the visible tokens are in an order of their own, in chunks of
//   `unit`, and a query sees the `before` chunks before its own, its own and the `after` chunks after it, by the rule.
typedef struct {
  i64 isa, threads, dtype, kind;
  i64 b, t, s, h, g, d, e;
  i64 before, after, dilation, unit;
  i64 entries;  // of a list
  double scale;
  lintra_tensor q, k, v;  // [b t h d] [b s g d] [b s g e]
  lintra_tensor visible;  // bytes, [b s]; h is unused
  lintra_tensor blocks, listed, own;  // i64 [b g n l], bytes [b g n l], i64 [b n], with n for t and g for h
  // Of LINTRA_SORTED, contiguous [b h rounds n], n = whole chunks: the tokens by rank, and by token its chunk and bucket.
  i64 rounds, rule;
  const i64* token;
  const int32_t *place, *bucket;
  void *o, *logsumexp;    // s, [b t h e] [b t h], contiguous: written by forward, read by backward
  // Backward only.
  lintra_tensor dO;         // s, [b t h e]
  const void* dlogsumexp;   // s, [b t h], contiguous; absent: 0
  void *dq, *dk, *dv;       // like q, k, v, contiguous
} lintra_softmax;

// Decoding of one token by a whole model. float32 throughout, except for the weights.

// y = scale (W x) + bias, with the weights of LINTRA_PANEL outputs one after the other: [panels][inputs / n][outputs][n]
// in words of 32 bits, which hold n = 1 float32, 2 bfloat16 or 4 int8. Zeros fill up the last word of inputs and the last
// panel of outputs, in scale and bias too.
typedef struct {
  const char* panels;
  const float *scale, *bias;  // scale: of int8 alone, otherwise absent
  i64 inputs, outputs;
} lintra_map;

// Padded with zeros to whole panels. bias: of LayerNorm alone; weight absent: no norm.
typedef struct {
  const float *weight, *bias;
} lintra_norm;

typedef struct {
  lintra_map qkv_proj, out_proj;  // to q, k, v side by side, and from the heads
  lintra_map up, down;            // SwiGLU: panels of gates and of values alternate
  lintra_norm attn_norm, mlp_norm;
  float *kv, *z;  // [b g d d] [b g d]: the state, changed in place
} lintra_layer;

typedef struct {
  i64 isa, threads;
  const float* x;                    // [b c]: input of the first layer
  float* params;                     // [b, padded to panels]: output of the head
  i64 dtype;                         // of the weights: float32, bfloat16 or int8
  i64 b, layers, c, h, g, d, hidden;  // hidden: width of the MLP
  i64 feature_map, normalize, norm_first, activation;
  double eps, norm_eps;
  const lintra_layer* layer;
  lintra_norm norm;
  lintra_map head;
} lintra_decoder;
