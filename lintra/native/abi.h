// The C interface of the native library: one flat block of 64-bit words, so that Python can build it with a single
// struct.pack and no binding generator. Change LINTRA_ABI whenever a word is added, removed or gets another meaning.
#pragma once
#include <stdint.h>

#define LINTRA_ABI 4

#define LINTRA_PANEL 64  // outputs of a panel of weights

typedef int64_t i64;

enum { LINTRA_FLOAT32, LINTRA_FLOAT64, LINTRA_BFLOAT16, LINTRA_FLOAT16, LINTRA_INT8 };  // element types
enum { LINTRA_IDENTITY, LINTRA_ELU_PLUS_ONE, LINTRA_RELU };                         // feature maps
enum { LINTRA_MLP_GELU, LINTRA_MLP_SWIGLU, LINTRA_MLP_RELU };                    // activations of the MLP
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
  // Absent, or [b+1]: b sequences one behind the other in one row of t = s tokens, whose first tokens stand at these
  // places; the last is t. The tensors of tokens then have 1 in the place of b, the states keep it.
  const i64* cu_seqlens;
  // Contiguous from here on.
  const void *kv, *z;  // s, [b g f e] [b g f]: the state before; both or neither
  void *y, *den;       // [b t h e]; s, [b t h]: written by forward, read by backward
  void *kv_out, *z_out;
  // Backward only.
  lintra_tensor dy;          // [b t h e]
  const void *dkv, *dz;      // s: gradients of the state after; each may be absent
  void *dq, *dk, *dv;        // like q, k, v, contiguous
  void *dlog_decay, *dlog_input;  // s, [b s g]; absent when not wanted
  void *dkv_in, *dz_in;      // s: gradients of the state before
} lintra_call;

// Decoding of one token by a whole model. float32 throughout, but for the weights.

// y = scale (W x) + bias, with the weights of LINTRA_PANEL outputs one behind the other: [panels][inputs / n][outputs][n]
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
