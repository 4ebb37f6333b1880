// Transcribes 16-bit samples on standard input, with a recogniser in the runtime's format:
//
//   lintra export --to runtime --model spoken-digits --out spoken-digits.lrt && make hear
//   arecord -q -t raw -f S16_LE -r 8000 | build/runtime/hear spoken-digits.lrt
//   sox three.wav -t raw -e signed -b 16 -r 8000 -c 1 - | build/runtime/hear spoken-digits.lrt
//
// Without make: cc -O3 -march=native -ffp-contract=fast -fno-math-errno -Ilintra/runtime examples/hear.c
// lintra/runtime/lintra_runtime.c lintra/runtime/lintra_audio.c
#include <stdio.h>
#include <stdlib.h>

#include "lintra_audio.h"

enum { PIECE = 256 };  // samples

static int fail(const char *what, const char *why) {
  fprintf(stderr, "hear: %s: %s\n", what, why);
  return 1;
}

static void *aligned(size_t bytes) { return aligned_alloc(LRT_ALIGN, (bytes + LRT_ALIGN - 1) / LRT_ALIGN * LRT_ALIGN); }

static void *read_file(const char *name, size_t *bytes) {
  FILE *file = fopen(name, "rb");
  if (!file) return 0;
  fseek(file, 0, SEEK_END);
  const long size = ftell(file);
  void *content = size > 0 ? aligned((size_t)size) : 0;
  rewind(file);
  *bytes = content ? fread(content, 1, (size_t)size, file) : 0;
  fclose(file);
  return content;
}

// The state of the recogniser. frames: a group of frames, of which `waiting` have arrived.
typedef struct {
  lrt_model *model;
  lrt_features *features;
  lrt_sequence *sequence;
  float *frames;
  size_t inputs, group, waiting;
  int said;
} listener;

static int start(listener *l) {
  const lrt_features_config *config = lrt_features_of(l->model);
  const size_t features = lrt_features_size(config), sequence = lrt_sequence_size(l->model);
  l->inputs = (size_t)lrt_fact(l->model, LRT_INPUT);
  l->group = (size_t)lrt_fact(l->model, LRT_SUBSAMPLE);
  l->features = features ? aligned(features) : 0;
  l->sequence = sequence ? aligned(sequence) : 0;
  l->frames = aligned(l->group * l->inputs * sizeof *l->frames);
  if (!l->features || !l->sequence || !l->frames) return LRT_NO_ROOM;
  const int code = lrt_features_start(l->features, features, config);
  return code < 0 ? code : lrt_start(l->sequence, sequence, l->model);
}

// Reads the waiting frames, and prints the symbol that they add.
static int read_group(listener *l) {
  int code = lrt_read(l->sequence, l->frames, l->waiting);
  l->waiting = 0;
  if (code == LRT_OK) code = lrt_new_symbol(l->sequence);
  if (code <= 0) return code;
  printf("%s%s", l->said && lrt_fact(l->model, LRT_SPACED) ? " " : "", lrt_symbol(l->model, (uint32_t)code));
  fflush(stdout);
  l->said = 1;
  return LRT_OK;
}

static int hear(listener *l, const float *samples, size_t count) {
  while (count) {
    int code = lrt_features_push(l->features, samples, count);
    if (code < 0) return code;
    samples += code;
    count -= (size_t)code;
    const float *frame = lrt_features_frame(l->features);
    if (!frame) continue;
    for (size_t i = 0; i < l->inputs; ++i) l->frames[l->waiting * l->inputs + i] = frame[i];
    if (++l->waiting == l->group && (code = read_group(l)) < 0) return code;
  }
  return LRT_OK;
}

int main(int argc, char **argv) {
  if (argc != 2) return fail("usage", "hear MODEL < samples of 16 bits, one channel, little-endian");
  size_t bytes;
  void *file = read_file(argv[1], &bytes);
  if (!file) return fail(argv[1], "cannot be read");
  listener l = {.model = aligned(lrt_model_size())};
  int code = l.model ? lrt_load(l.model, lrt_model_size(), file, bytes) : LRT_NO_ROOM;
  if (code < 0) return fail(argv[1], lrt_error(code));
  if (!lrt_features_of(l.model)) return fail(argv[1], "reads no audio");
  code = start(&l);

  uint8_t raw[2 * PIECE];
  float samples[PIECE];
  for (size_t got; code >= 0 && (got = fread(raw, 2, PIECE, stdin));) {
    for (size_t i = 0; i < got; ++i) samples[i] = (float)(int16_t)(raw[2 * i] | raw[2 * i + 1] << 8) / 32768;
    code = hear(&l, samples, got);
  }
  if (code >= 0 && l.waiting) code = read_group(&l);
  putchar('\n');
  if (code < 0) return fail(argv[1], lrt_error(code));
  free(l.frames);
  free(l.sequence);
  free(l.features);
  free(l.model);
  free(file);
  return 0;
}
