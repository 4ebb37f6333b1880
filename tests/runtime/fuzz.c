// A fuzz target: files and states that may hold anything, and all that is done with them. The input is a byte, a model of
// as many bytes as its header says (or all there are), and then a state. Unless the byte is odd, checksums are corrected
// first: otherwise they would hide all checks that follow.
//
// With -fsanitize=fuzzer, libFuzzer drives it. With -DMUTATE it has a main of its own, which mutates inputs by a seeded
// generator: fuzz SECONDS SEED FILE...; it prints how often each result occurred. SECONDS 0 runs the files unchanged.
#define _POSIX_C_SOURCE 200112L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../lintra/runtime/lintra_audio.h"

enum { MOST = 1 << 24, RESULTS = 32, ROOM = 22 };  // room: for fewer tokens than are read, where all are kept

static unsigned long results[RESULTS];

static int count(int code) {
  ++results[code < 0 ? -code % RESULTS : 0];
  if (!lrt_error(code)[0]) abort();
  return code;
}

// Memory of exactly this size, so that a read beyond it is detected.
static uint8_t *exact(const uint8_t *from, size_t bytes) {
  void *to = 0;
  if (posix_memalign(&to, LRT_ALIGN, bytes ? bytes : 1)) abort();
  if (from && bytes) memcpy(to, from, bytes);
  return to;
}

static void put_right(uint8_t *file, size_t bytes) {
  if (bytes <= 16) return;
  const uint32_t sum = lrt_checksum(file + 16, bytes - 16);
  memcpy(file + 12, &sum, 4);
}

// The frames that so many samples give, and the symbols of all of them.
static void hear(lrt_sequence *sequence, const lrt_model *model) {
  const size_t inputs = (size_t)lrt_fact(model, LRT_INPUT), group = (size_t)lrt_fact(model, LRT_SUBSAMPLE);
  float *frames = (float *)exact(0, group * inputs * sizeof *frames);
  for (size_t i = 0; i < group * inputs; ++i) frames[i] = (float)(i % 7);
  count(lrt_new_symbol(sequence));
  for (size_t given = group + 1; given + 1; --given) count(lrt_read(sequence, frames, given));
  const int symbol = count(lrt_new_symbol(sequence));
  for (uint32_t i = 0; i < 3; ++i)
    if (lrt_symbol(model, (uint32_t)symbol + i) && !lrt_symbol(model, (uint32_t)symbol + i)[0]) abort();
  lrt_symbol(model, (uint32_t)lrt_fact(model, LRT_VOCABULARY) - 1);
  free(frames);
  const lrt_features_config *config = lrt_features_of(model);
  if (!config) return;
  const size_t needed = lrt_features_size(config);
  if (!needed) abort();
  lrt_features *features = (lrt_features *)exact(0, needed);
  const float samples[] = {0, 0.5f, -1, 1e30f, 3e38f};
  if (count(lrt_features_start(features, needed, config)) == LRT_OK)
    for (uint32_t i = 0; i < config->frame + config->shift; i += 5) {
      int taken = count(lrt_features_push(features, samples, 5));
      const float *frame = lrt_features_frame(features);
      if (taken < 1 || (frame && !(frame[config->bins - 1] < 300))) abort();
    }
  free(features);
}

static void use(lrt_sequence *sequence, const lrt_model *model, const uint8_t *state, size_t bytes) {
  uint32_t tokens[20] = {0, (uint32_t)lrt_fact(model, LRT_VOCABULARY) - 1, (uint32_t)lrt_fact(model, LRT_START)};
  count(lrt_sample(sequence, 1, 0, 1, 0.5));
  count(lrt_prefill(sequence, tokens, 2));
  count(lrt_step(sequence, tokens[2]));
  tokens[2] = 0;
  count(lrt_prefill(sequence, tokens, 20));
  count(lrt_load_state(sequence, state, bytes));
  if (lrt_fact(model, LRT_INPUT)) hear(sequence, model);
  for (int i = 0; i < 3; ++i) {
    count(lrt_step(sequence, tokens[0]));
    const int token = count(lrt_sample(sequence, i, (uint32_t)i, 1 - 0.2 * i, lrt_uniform(sequence)));
    if (token >= 0) count(lrt_step(sequence, (uint32_t)token));
  }
  lrt_log_probs(sequence);
  const size_t size = lrt_state_size_for(model, lrt_seen(sequence));
  uint8_t *saved = exact(0, size);
  if (count(lrt_save_state(sequence, saved, size)) < 0) abort();
  const int again = count(lrt_load_state(sequence, saved, size));
  if (again < 0 && again != LRT_BAD_NUMBER) abort();
  free(saved);
}

// In memory of exactly its size, with room for few tokens and then for more: a copy equals its original.
static void copy_and_use(const lrt_sequence *sequence, const lrt_model *model) {
  const size_t needed = lrt_sequence_size_for(model, lrt_seen(sequence) + 2 * ROOM);
  if (!needed || needed > MOST) return;
  lrt_sequence *other = (lrt_sequence *)exact(0, needed);
  const size_t less = lrt_sequence_size_for(model, lrt_seen(sequence));
  if (count(lrt_copy(other, less - 1, sequence)) != LRT_NO_ROOM) abort();
  if (count(lrt_copy(other, needed, sequence)) != LRT_OK) abort();
  if (lrt_seen(other) != lrt_seen(sequence) || lrt_room(other) < lrt_seen(other)) abort();
  const size_t size = lrt_state_size_for(model, lrt_seen(sequence));
  uint8_t *one = exact(0, size), *two = exact(0, size);
  if (lrt_save_state(sequence, one, size) < 0 || lrt_save_state(other, two, size) < 0 || memcmp(one, two, size)) abort();
  free(two);
  free(one);
  use(other, model, 0, 0);
  free(other);
}

// The same model with weights of float32, which must be sound where the first is.
static void widen_all(const lrt_model *model) {
  const size_t bytes = lrt_float32_size(model);
  if (!bytes || bytes > MOST) return;
  uint8_t *file = exact(0, bytes), *other = exact(0, lrt_model_size());
  if (lrt_to_float32(model, file, bytes - 1) != LRT_WRONG_SIZE || lrt_to_float32(model, file, bytes) != LRT_OK) abort();
  if (lrt_load((lrt_model *)other, lrt_model_size(), file, bytes) != LRT_OK) abort();
  free(other);
  free(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 25) return 0;
  const int repair = !(data[0] & 1);
  uint64_t declared;
  memcpy(&declared, data + 17, 8);
  const size_t bytes = declared < size - 1 ? (size_t)declared : size - 1;
  uint8_t *file = exact(data + 1, bytes), *state = exact(data + 1 + bytes, size - 1 - bytes);
  if (repair) {
    put_right(file, bytes);
    put_right(state, size - 1 - bytes);
    if (bytes > 16 && size - 1 - bytes >= 28) memcpy(state + 24, file + 12, 4);  // of this model
    put_right(state, size - 1 - bytes);
  }
  lrt_model *model = (lrt_model *)exact(0, lrt_model_size());
  if (count(lrt_load(model, lrt_model_size(), file, bytes)) == LRT_OK) {
    widen_all(model);
    const size_t least = lrt_sequence_size_for(model, 0), needed = lrt_sequence_size_for(model, ROOM);
    if (needed && needed <= MOST) {
      lrt_sequence *sequence = (lrt_sequence *)exact(0, needed);
      if (count(lrt_start(sequence, least - 1, model)) != LRT_NO_ROOM) abort();
      if (count(lrt_start(sequence, needed, model)) != LRT_OK) abort();
      use(sequence, model, state, size - 1 - bytes);
      copy_and_use(sequence, model);
      free(sequence);
    }
  }
  free(model);
  free(state);
  free(file);
  return 0;
}

#ifdef MUTATE
static uint64_t generator;

static uint64_t draw(uint64_t below) {
  generator = generator * 6364136223846793005u + 1442695040888963407u;
  return (generator >> 33) % below;
}

static size_t mutate(uint8_t *data, size_t size, size_t room) {
  static const uint32_t words[] = {0, 1, 2, 3, 16, 64, 255, 0xffff, 0x10000, 0x7fffffff, 0x80000000, 0xffffffff,
                                   0x7f800000, 0x7fc00000, 0xff800000, 0x3f800000, 0x00800000, 0x7f7fffff};
  for (uint64_t times = 1 + draw(3); times; --times) {
    // Half of them in the headers, where most of what is checked lies.
    const size_t reach = draw(2) && size > 577 ? 577 : size, at = (size_t)draw(reach), word = 1 + (at - (at > 0)) / 4 * 4;
    switch (draw(7)) {
      case 0: data[at] ^= (uint8_t)(1 << draw(8)); break;
      case 1: data[at] = (uint8_t)draw(256); break;
      case 2:
      case 3:
        if (word + 4 <= size) memcpy(data + word, &words[draw(sizeof words / 4)], 4);
        break;
      case 4: {
        uint32_t x;
        if (word + 4 > size) break;
        memcpy(&x, data + word, 4);
        x += (uint32_t)draw(9) - 4;
        memcpy(data + word, &x, 4);
        break;
      }
      case 5: {  // cut off, sometimes with the new size in the header
        size = draw(3) ? size - (size_t)draw(size / 2 + 1) : (size_t)draw(size) + 1;
        const uint64_t declared = size - 1;
        if (draw(2) && size > 25) memcpy(data + 17, &declared, 8);
        break;
      }
      default: {  // longer
        const size_t more = (size_t)draw(256) < room - size ? (size_t)draw(256) : 0;
        memset(data + size, (int)draw(2), more);
        size += more;
      }
    }
  }
  return size;
}

static double now(void) {
  struct timespec time;
  timespec_get(&time, TIME_UTC);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int main(int argc, char **argv) {
  if (argc < 4) return fprintf(stderr, "usage: fuzz SECONDS SEED FILE...\n"), 2;
  const double seconds = atof(argv[1]);
  generator = strtoull(argv[2], 0, 10);
  unsigned long inputs = 0;
  const double start = now();
  do {
    for (int i = 3; i < argc; ++i) {
      FILE *file = fopen(argv[i], "rb");
      if (!file) return perror(argv[i]), 2;
      fseek(file, 0, SEEK_END);
      const size_t size = (size_t)ftell(file), room = size + 4096;
      rewind(file);
      uint8_t *given = malloc(room), *data = malloc(room);
      if (!given || !data || fread(given, 1, size, file) != size) return perror(argv[i]), 2;
      fclose(file);
      LLVMFuzzerTestOneInput(given, size);
      ++inputs;
      for (int round = 0; seconds > 0 && round < 50; ++round, ++inputs) {
        memcpy(data, given, size);
        LLVMFuzzerTestOneInput(data, mutate(data, size, room));
      }
      free(given);
      free(data);
    }
  } while (now() - start < seconds);
  printf("inputs %lu\n", inputs);
  for (int i = 0; i < RESULTS; ++i)
    if (results[i]) printf("%d %lu\n", -i, results[i]);
  return 0;
}
#endif
