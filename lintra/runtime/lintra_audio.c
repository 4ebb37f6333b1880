// See lintra_audio.h. Everything is computed in double precision: a frame in a hundred a second takes no time.
#include "lintra_audio.h"

#define PI 3.14159265358979323846
#define PREEMPHASIS 0.97
#define FULL_SCALE 32768.0  // Kaldi's samples are those of 16 bit audio
#define FLOOR 0x1p-23       // of an energy, before its logarithm

// Followed in memory by what the pointers lead to.
struct lrt_features {
  lrt_features_config config;
  uint32_t padded, filled, ready;   // padded: points of the spectrum, a power of two; filled: samples there are
  double *window, *sine, *cosine;   // of a frame; of half a turn in padded / 2 steps
  double *real, *imaginary;         // the frame, then its spectrum
  double *weights;                  // of the frequencies in each filter, one filter after the other
  uint32_t *first, *count;          // of each filter: its lowest frequency, and how many
  float *samples, *energies;
};

// sin x for |x| <= pi / 2.
static double sine_of(double x) {
  double term = x, sum = x;
  for (int i = 3; i < 26; i += 2) {
    term *= -x * x / (double)(i * (i - 1));
    sum += term;
  }
  return sum;
}

// ln x for normal x > 0: x = 2^n m, m in [sqrt(1/2), sqrt(2)), and ln m = 2 artanh((m - 1) / (m + 1)).
static double logarithm_of(double x) {
  int64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  const int64_t n = (bits - 0x3fe6a09e667f3bcd) >> 52;
  bits -= n * ((int64_t)1 << 52);
  double m;
  __builtin_memcpy(&m, &bits, 8);
  const double t = (m - 1) / (m + 1);
  double power = t, sum = t;
  for (int i = 3; i < 26; i += 2) {
    power *= t * t;
    sum += power / i;
  }
  return (double)n * 0.69314718055994530942 + 2 * sum;
}

// e^x for -16 < x <= 0: the Taylor series of x / 1024, squared ten times.
static double exponential_of(double x) {
  double term = x / 1024, sum = 0;  // without the 1, which would take the last digits of a small sum
  for (int i = 1; i < 10; ++i) {
    sum += term;
    term *= x / 1024 / (i + 1);
  }
  for (int i = 0; i < 10; ++i) sum *= 2 + sum;
  return 1 + sum;
}

static double mel(double hz) { return 1127 * logarithm_of(1 + hz / 700); }

static uint32_t padded_length(const lrt_features_config *c) {
  uint32_t n = 2;
  while (n < c->frame) n *= 2;
  return n;
}

static void *carve(char *base, uint64_t *at, uint64_t bytes) {
  void *const here = base ? base + *at : 0;
  *at += (bytes + LRT_ALIGN - 1) / LRT_ALIGN * LRT_ALIGN;
  return here;
}

// Lays out the buffers from `base` on (null: only counts); returns how many bytes they take.
static uint64_t lay_out(lrt_features *f, const lrt_features_config *c, char *base) {
  const uint64_t padded = padded_length(c);
  uint64_t at = 0;
  carve(base, &at, sizeof *f);
  f->window = carve(base, &at, 8 * (uint64_t)c->frame);
  f->sine = carve(base, &at, 4 * padded);
  f->cosine = carve(base, &at, 4 * padded);
  f->real = carve(base, &at, 8 * padded);
  f->imaginary = carve(base, &at, 8 * padded);
  f->weights = carve(base, &at, 8 * padded);  // a frequency is in two filters at most
  f->first = carve(base, &at, 4 * (uint64_t)c->bins);
  f->count = carve(base, &at, 4 * (uint64_t)c->bins);
  f->samples = carve(base, &at, 4 * (uint64_t)c->frame);
  f->energies = carve(base, &at, 4 * (uint64_t)c->bins);
  return at;
}

size_t lrt_features_size(const lrt_features_config *config) {
  lrt_features unused;
  return lrt_features_valid(config) ? (size_t)lay_out(&unused, config, 0) : 0;
}

// Povey's window: a Hann window to the power 0.85.
static void fill_window(const lrt_features *f) {
  const uint32_t last = f->config.frame - 1;
  for (uint32_t i = 0; i <= last; ++i) {
    const uint32_t near = i < last - i ? i : last - i;
    f->window[i] = near ? exponential_of(1.7 * logarithm_of(sine_of(PI * near / last))) : 0;
  }
}

static void fill_turns(const lrt_features *f) {
  const uint32_t half = f->padded / 2;
  for (uint32_t i = 0; i < half; ++i) {
    f->sine[i] = sine_of(PI * (i < half - i ? i : half - i) / half);
    f->cosine[i] = sine_of(PI * ((double)half / 2 - i) / half);
  }
}

// Triangles in mel. Returns whether each holds a frequency.
static int fill_filters(const lrt_features *f) {
  const lrt_features_config *c = &f->config;
  const double low = mel(c->low_hz), step = (mel(c->high_hz) - low) / (c->bins + 1);
  double *weights = f->weights;
  uint32_t begin = 0;  // of the frequencies, the first that this filter or a later one may hold
  for (uint32_t bin = 0; bin < c->bins; ++bin) {
    const double left = low + bin * step, centre = low + (bin + 1) * step, right = low + (bin + 2) * step;
    uint32_t count = 0;
    for (uint32_t i = begin; i < f->padded / 2; ++i) {
      const double here = mel((double)i * c->rate / f->padded);
      if (here >= right) break;
      if (here <= left) {
        begin = i + 1;
        continue;
      }
      const double up = (here - left) / (centre - left), down = (right - here) / (right - centre);
      *weights++ = up < down ? up : down;
      ++count;
    }
    if (!count) return 0;
    f->first[bin] = begin;
    f->count[bin] = count;
  }
  return 1;
}

int lrt_features_start(lrt_features *f, size_t size, const lrt_features_config *config) {
  const size_t needed = lrt_features_size(config);
  if ((uintptr_t)f % LRT_ALIGN) return LRT_NOT_ALIGNED;
  if (!needed) return LRT_BAD_SIZES;
  if (size < needed) return LRT_NO_ROOM;
  __builtin_memset(f, 0, needed);
  f->config = *config;
  f->padded = padded_length(config);
  lay_out(f, config, (char *)f);
  fill_window(f);
  fill_turns(f);
  return fill_filters(f) ? LRT_OK : LRT_BAD_SIZES;
}

// The Fourier transform of f->real, in place: Cooley and Tukey 1965.
static void transform(const lrt_features *f) {
  const uint32_t n = f->padded;
  double *re = f->real, *im = f->imaginary;
  for (uint32_t i = 0; i < n; ++i) im[i] = 0;
  for (uint32_t i = 1, j = 0; i < n; ++i) {  // j: i with its bits in reverse
    uint32_t bit = n / 2;
    for (; j & bit; bit /= 2) j ^= bit;
    j ^= bit;
    if (i < j) {
      const double swap = re[i];
      re[i] = re[j];
      re[j] = swap;
    }
  }
  for (uint32_t half = 1; half < n; half *= 2)
    for (uint32_t from = 0; from < n; from += 2 * half)
      for (uint32_t i = from, turn = 0; i < from + half; ++i, turn += n / 2 / half) {
        const double c = f->cosine[turn], s = f->sine[turn], a = re[i + half], b = im[i + half];
        const double x = a * c + b * s, y = b * c - a * s;
        re[i + half] = re[i] - x;
        im[i + half] = im[i] - y;
        re[i] += x;
        im[i] += y;
      }
}

static void complete(lrt_features *f) {
  const lrt_features_config *c = &f->config;
  double mean = 0;
  for (uint32_t i = 0; i < c->frame; ++i) mean += f->samples[i] * FULL_SCALE;
  mean /= c->frame;
  double before = f->samples[0] * FULL_SCALE - mean;
  for (uint32_t i = 0; i < f->padded; ++i) {
    const double x = i < c->frame ? f->samples[i] * FULL_SCALE - mean : 0;
    f->real[i] = i < c->frame ? (x - PREEMPHASIS * before) * f->window[i] : 0;
    before = x;
  }
  transform(f);
  const double *weight = f->weights;
  for (uint32_t bin = 0; bin < c->bins; ++bin) {
    double energy = 0;
    for (uint32_t i = f->first[bin]; i < f->first[bin] + f->count[bin]; ++i)
      energy += *weight++ * (f->real[i] * f->real[i] + f->imaginary[i] * f->imaginary[i]);
    f->energies[bin] = (float)logarithm_of(energy > FLOOR ? energy : FLOOR);
  }
}

int lrt_features_push(lrt_features *f, const float *samples, size_t count) {
  const uint32_t room = f->config.frame - f->filled, taken = count < room ? (uint32_t)count : room;
  for (uint32_t i = 0; i < taken; ++i)
    if (!(samples[i] >= -__FLT_MAX__ && samples[i] <= __FLT_MAX__)) return LRT_BAD_NUMBER;
  __builtin_memcpy(f->samples + f->filled, samples, taken * sizeof *samples);
  f->filled += taken;
  f->ready = f->filled == f->config.frame;
  if (f->ready) {
    complete(f);
    f->filled -= f->config.shift;
    __builtin_memmove(f->samples, f->samples + f->config.shift, f->filled * sizeof *samples);
  }
  return (int)taken;
}

const float *lrt_features_frame(const lrt_features *f) { return f->ready ? f->energies : 0; }
