// Log-mel filterbank features of audio that comes in pieces, as lintra.audio.features defines them, for the models of
// lintra_runtime.h that hear: no library, no allocation, no global variable, and the same rules for memory and errors.
//
//   const lrt_features_config *config = lrt_features_of(model);
//   lrt_features *features = aligned(lrt_features_size(config));
//   lrt_features_start(features, lrt_features_size(config), config);
//   for (int taken; count; samples += taken, count -= taken) {
//     if ((taken = lrt_features_push(features, samples, count)) < 0) ...
//     const float *frame = lrt_features_frame(features);     then lrt_read, with the number of frames the model requires
//   }
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "lintra_runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

struct lrt_features_config {
  uint32_t rate;          // Hz
  uint32_t bins;          // triangular filters, evenly spaced on the mel scale; 3 to 2^15
  uint32_t frame, shift;  // samples of a frame, 2 to 2^15, and from the beginning of one to that of the next
  float low_hz, high_hz;  // where the first filter begins and the last one ends
};

// Whether the fields are within these bounds; those of a file are checked as a caller's are.
static inline int lrt_features_valid(const lrt_features_config *c) {
  return c->rate >= 1 && c->rate <= 1 << 24 && c->frame >= 2 && c->frame <= 1 << 15 && c->shift >= 1 &&
         c->shift <= c->frame && c->bins >= 3 && c->bins <= 1 << 15 && c->low_hz >= 0 && c->low_hz < c->high_hz &&
         c->high_hz <= (float)c->rate / 2;
}

typedef struct lrt_features lrt_features;

// Bytes of an lrt_features; 0 for a configuration that is out of bounds.
size_t lrt_features_size(const lrt_features_config *config);

// Makes a stream before any sample. LRT_BAD_SIZES may also say that a filter holds no frequency: the memory then holds
// no stream, also if it held one before.
int lrt_features_start(lrt_features *memory, size_t size, const lrt_features_config *config);

// Takes samples in [-1, 1] up to the end of the next frame and returns how many, at least 1 of 1 or more; or an error,
// for some that are infinite or NaN.
int lrt_features_push(lrt_features *features, const float *samples, size_t count);

// The natural logarithms of the energies in the filters [bins], of the frame that the last call completed and until the
// next one; null where it completed none.
const float *lrt_features_frame(const lrt_features *features);

#ifdef __cplusplus
}
#endif
