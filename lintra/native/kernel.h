// What each instruction set's build of the kernels offers to library.cpp.
#pragma once
#include "abi.h"

// A sequence of a call: its tokens from number `first` of a row of the batch, which packed sequences share.
struct lintra_sequence {
  i64 number, row, first, tokens;
};
template <class Call>
inline lintra_sequence lintra_sequence_of(const Call& call, i64 number) {
  if (!call.cu_seqlens) return {number, number, 0, call.t};
  const i64 first = call.cu_seqlens[number];
  return {number, 0, first, call.cu_seqlens[number + 1] - first};
}
// The batch of the tensors of tokens.
template <class Call>
inline i64 lintra_rows(const Call& call) {
  return call.cu_seqlens ? 1 : call.b;
}

// Checkpoints of all sequences, one after the other: a sequence of t tokens has at most t / interval + 1.
template <class Call>
inline i64 lintra_checkpoint_count(const Call& call, i64 interval) {
  return lintra_rows(call) * call.t / interval + call.b;
}
template <class Call>
inline i64 lintra_first_checkpoint(const Call& call, const lintra_sequence& at, i64 interval) {
  return (at.row * call.t + at.first) / interval + at.number;
}

// Runs work(context) on up to `threads` threads at once, the caller's among them, and waits for all.
typedef void (*lintra_launch)(void (*work)(void*), void* context, i64 threads);

#define LINTRA_DECLARE(isa)                                   \
  namespace lintra {                                          \
  namespace isa {                                             \
  int forward(const lintra_call& call, lintra_launch launch);  \
  int backward(const lintra_call& call, lintra_launch launch); \
  int recurrence_forward(const lintra_recurrence& call, lintra_launch launch);  \
  int recurrence_backward(const lintra_recurrence& call, lintra_launch launch); \
  int conv1d(const lintra_conv1d& call, bool gradients, lintra_launch launch);  \
  int conv1d_step(const lintra_conv1d_step& call, lintra_launch launch);        \
  int scan_forward(const lintra_scan& call, lintra_launch launch);  \
  int scan_backward(const lintra_scan& call, lintra_launch launch); \
  int softmax_forward(const lintra_softmax& call, lintra_launch launch);  \
  int softmax_backward(const lintra_softmax& call, lintra_launch launch); \
  int decode(const lintra_decoder& call, lintra_launch launch); \
  }                                                           \
  }
