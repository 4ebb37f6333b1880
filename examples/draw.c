// Draws an image value by value, with a model in the runtime's format, and writes it as PGM:
//
//   lintra export --to runtime --model mnist-small --out mnist-small.lrt && make draw
//   build/runtime/draw mnist-small.lrt 3 28 > three.pgm
//
// This is the first image of `lintra generate --seed 3`; a fourth argument of 1 draws the second.
//
// Without make: cc -O3 -march=native -ffp-contract=fast -fno-math-errno -Ilintra/runtime examples/draw.c
// lintra/runtime/lintra_runtime.c
#include <stdio.h>
#include <stdlib.h>

#include "lintra_runtime.h"

static int fail(const char *what, const char *why) {
  fprintf(stderr, "draw: %s: %s\n", what, why);
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

int main(int argc, char **argv) {
  if (argc != 4 && argc != 5) return fail("usage", "draw MODEL SEED WIDTH [NUMBER] > image.pgm");
  size_t bytes;
  void *file = read_file(argv[1], &bytes);
  if (!file) return fail(argv[1], "cannot be read");
  lrt_model *model = aligned(lrt_model_size());
  int code = model ? lrt_load(model, lrt_model_size(), file, bytes) : LRT_NO_ROOM;
  if (code < 0) return fail(argv[1], lrt_error(code));

  const int start = lrt_fact(model, LRT_START), values = lrt_fact(model, LRT_POSITIONS), width = atoi(argv[3]);
  if (start < 0 || values < 0 || values >= 1 << 24)  // softmax: as many as the runtime can keep
    return fail(argv[1], "draws no images: it has no start symbol or no last position");
  if (width < 1 || values % width) return fail(argv[3], "no width of the model's images");
  const size_t size = lrt_sequence_size(model);
  lrt_sequence *sequence = size ? aligned(size) : 0;
  code = sequence ? lrt_start(sequence, size, model) : LRT_NO_ROOM;
  if (code < 0) return fail(argv[1], lrt_error(code));

  const int levels = lrt_fact(model, LRT_VOCABULARY);
  const unsigned long long seed = strtoull(argv[2], 0, 10);
  lrt_seed(sequence, (uint32_t)seed, (uint32_t)(seed >> 32) + (argc > 4 ? (uint32_t)strtoul(argv[4], 0, 10) : 0));
  printf("P2 %d %d %d\n", width, values / width, levels > 1 ? levels - 1 : 1);
  for (int i = 0, token = start; i < values; ++i) {
    code = lrt_step(sequence, (uint32_t)token);
    if (code == LRT_OK) code = token = lrt_sample(sequence, 1, 0, 1, lrt_uniform(sequence));
    if (code < 0) return fail(argv[1], lrt_error(code));
    printf("%d%c", token, (i + 1) % width ? ' ' : '\n');
  }
  free(sequence);
  free(model);
  free(file);
  return 0;
}
