// What each instruction set's build of the kernels offers to library.cpp.
#pragma once
#include "abi.h"

// The batch of the tensors of tokens.
template <class Call>
inline i64 lintra_rows(const Call& call) {
  return call.cu_seqlens ? 1 : call.b;
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
