// A trained model as an RNN, one token or frame at a time, in one C11 file: no library, -lm neither (but for processors
// other than x86-64, ARMv8 and WebAssembly compile with -fno-math-errno), no allocation, no global variable.
// Compiled for the machine or for WebAssembly; the models it reads are written by `lintra export --to runtime`, their
// format is docs/format.md.
//
//   lrt_model *model = aligned(lrt_model_size());              memory is the caller's, aligned to LRT_ALIGN bytes
//   lrt_load(model, lrt_model_size(), file, bytes);            the file is read in place, and must stay there
//   lrt_sequence *sequence = aligned(lrt_sequence_size(model));
//   lrt_start(sequence, lrt_sequence_size(model), model);      any number of sequences may share a model
//   lrt_step(sequence, lrt_fact(model, LRT_START));            the start symbol, then
//   token = lrt_sample(sequence, 1, 0, 1, lrt_uniform(sequence));
//   lrt_step(sequence, token);                                 and so on
//
// A recogniser of speech reads frames in place of tokens; lintra_audio.h computes them from audio:
//   lrt_read(sequence, frames, lrt_fact(model, LRT_SUBSAMPLE));
//   text = lrt_symbol(model, lrt_new_symbol(sequence));        null where there is no new symbol
//
// Whatever a file, a state or an argument holds, nothing outside the given memory is read or written: a call that cannot
// be served changes nothing and returns one of the negative numbers below. A null pointer is the caller's error. One
// thread at a time may use a sequence; a loaded model is only read.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LRT_FORMAT 3  // the newest version of files and states that is read; older ones are read too
#define LRT_ALIGN 64  // bytes

enum {
  LRT_OK = 0,
  LRT_NOT_A_MODEL = -1,
  LRT_OTHER_VERSION = -2,
  LRT_WRONG_SIZE = -3,
  LRT_DAMAGED = -4,
  LRT_UNKNOWN_KIND = -5,
  LRT_BAD_SIZES = -6,
  LRT_BAD_NUMBER = -7,
  LRT_BAD_PADDING = -8,
  LRT_NOT_ALIGNED = -9,
  LRT_NO_ROOM = -10,
  LRT_BAD_TOKEN = -11,
  LRT_TOO_LONG = -12,
  LRT_NOTHING_READ = -13,
  LRT_NO_PROBABILITIES = -14,
  LRT_BAD_OPTION = -15,
  LRT_NOT_A_STATE = -16,
  LRT_OTHER_MODEL = -17,
  LRT_OTHER_INPUT = -18,
  LRT_ENDED = -19,
  LRT_BAD_NAMES = -20,
  LRT_FULL = -21
};

// What lrt_fact reports of a model.
enum {
  LRT_VOCABULARY,  // n: the symbols are 0 .. n-1
  LRT_START,       // the start symbol, n, which stands before the first; -1: there is none
  LRT_PARAMS,      // parameters of the distribution of the next symbol
  LRT_COMPONENTS,  // of the mixture that these describe; 0: they are logits
  LRT_POSITIONS,   // the most tokens of a sequence, the start symbol included; 2^24 where all are kept; -1: about 2^32
  LRT_LAYERS,
  LRT_WIDTH,
  LRT_HEADS,     // of the first kind of layers, where they differ
  LRT_KV_HEADS,  // of these too
  LRT_WEIGHTS,    // bits of a weight: 32, 16 (floats) or 8 (integers)
  LRT_INPUT,      // numbers of a frame, for a model that reads frames; 0: it reads tokens
  LRT_SUBSAMPLE,  // frames that become one step: 1, 2 or 4; 0: it reads tokens
  LRT_SPACED      // 1: a space stands between the symbols of a text
};

typedef struct lrt_model lrt_model;
typedef struct lrt_sequence lrt_sequence;
typedef struct lrt_features_config lrt_features_config;  // of lintra_audio.h

// LRT_FORMAT of the program.
int lrt_format(void);

// The meaning of a return value, as a sentence without a full stop. Never null.
const char *lrt_error(int code);

// Bytes of an lrt_model, whatever the file.
size_t lrt_model_size(void);

// Checks a whole file and makes a model of it at `memory`.
int lrt_load(lrt_model *memory, size_t size, const void *file, size_t bytes);

int lrt_fact(const lrt_model *model, int which);

// The file of a model whose weights are float16, with the same numbers as float32, at `to`, aligned, of that many bytes;
// 0 where they are of another kind. For processors that have no instruction for float16, WebAssembly among them: there
// they are read more slowly than float32. States of one file do not fit the other.
size_t lrt_float32_size(const lrt_model *model);
int lrt_to_float32(const lrt_model *model, void *to, size_t size);

// Bytes of an lrt_sequence: the state and working memory. 0 where that is more than a size_t holds. Softmax attention
// keeps the keys and values of all tokens, or of as many as its window has: lrt_sequence_size has room for all positions
// of the model, lrt_sequence_size_for for so many tokens. Without softmax both are the same.
size_t lrt_sequence_size(const lrt_model *model);
size_t lrt_sequence_size_for(const lrt_model *model, uint32_t tokens);

// Makes a sequence before any token, with the seed 0, and with room for as many tokens as `size` bytes hold; a token more
// is LRT_FULL. What is kept of tokens lies at the end of the memory, which is not touched before they come.
int lrt_start(lrt_sequence *memory, size_t size, const lrt_model *model);

// The tokens, or steps of frames, that a sequence has room for, including those it has read.
uint32_t lrt_room(const lrt_sequence *sequence);

// Makes a copy of a sequence at `memory`, elsewhere, which differs in its room alone: to continue with more room, or
// from one beginning in several ways.
int lrt_copy(lrt_sequence *memory, size_t size, const lrt_sequence *sequence);

// Decodes one token; lrt_params then has the distribution of the next.
int lrt_step(lrt_sequence *sequence, uint32_t token);

// Decodes several tokens, to the bit as lrt_step does, but reads the weights once for up to 16 of them; params are
// computed for the last one alone.
int lrt_prefill(lrt_sequence *sequence, const uint32_t *tokens, size_t count);

// Reads LRT_SUBSAMPLE frames of LRT_INPUT finite numbers each, one after the other; the last ones of an utterance may be
// fewer, and nothing may follow then. lrt_params, lrt_log_probs and lrt_new_symbol return the results. The symbols are
// CTC's: 0 is the blank.
int lrt_read(lrt_sequence *sequence, const float *frames, size_t count);

// The symbol that the last frames add to the most probable path; 0 where they repeat the last one, or are blank.
int lrt_new_symbol(const lrt_sequence *sequence);

// The name of a symbol, UTF-8, of a model that reads frames; null for the blank and for other numbers.
const char *lrt_symbol(const lrt_model *model, uint32_t symbol);

// How a model's frames are computed from audio; null for one that is given frames, or tokens.
const lrt_features_config *lrt_features_of(const lrt_model *model);

// The number of tokens read so far, or of steps of frames.
uint32_t lrt_seen(const lrt_sequence *sequence);

// The LRT_PARAMS parameters after the last token; null before any.
const float *lrt_params(const lrt_sequence *sequence);

// The natural logarithms of the probabilities of all symbols, until the next call; null before any token.
const float *lrt_log_probs(lrt_sequence *sequence);

// The symbol at which the cumulative probability passes `uniform`, a number in [0, 1). temperature >= 0 divides the
// log-probabilities, 0 takes the most probable symbol; top_k > 0 keeps the k most probable ones and any as probable as
// the last of them, 0 keeps all; top_p in (0, 1] the fewest that hold at least that share. Returns the symbol, or an error.
int lrt_sample(lrt_sequence *sequence, double temperature, uint32_t top_k, double top_p, double uniform);

// Numbers in [0, 1) from a generator of the sequence's own: SplitMix64 (Steele et al. 2014), the upper 53 bits. Sequence i
// of `lintra generate --seed S`, counted from 0, has the seed S + 2^32 i modulo 2^64: low = S and high = i for S < 2^32.
void lrt_seed(lrt_sequence *sequence, uint32_t low, uint32_t high);
double lrt_uniform(lrt_sequence *sequence);

// A sequence as bytes: its state, the count of tokens and the generator; not the params, which the next token gives. With
// softmax attention there are more of them the more tokens were read: lrt_state_size_for(model, lrt_seen(sequence)), and
// lrt_state_size after the last position. A state needs room for its tokens where it is loaded, else LRT_FULL.
size_t lrt_state_size(const lrt_model *model);
size_t lrt_state_size_for(const lrt_model *model, uint32_t tokens);
int lrt_save_state(const lrt_sequence *sequence, void *to, size_t size);
int lrt_load_state(lrt_sequence *sequence, const void *from, size_t size);

// CRC-32 of zlib, gzip and PNG, which files and states carry.
uint32_t lrt_checksum(const void *data, size_t bytes);

#ifdef __cplusplus
}
#endif
