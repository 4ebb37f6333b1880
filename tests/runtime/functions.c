// The runtime's own functions against those of the C library in double precision: prints the largest error of each in
// units of the last place of the result, or, for those that are added to others, of 1. tests/runtime/test_program.py reads it.
#include <math.h>
#include <stdio.h>

#include "../../lintra/runtime/lintra_runtime.c"

static double from_bits(uint32_t bits) {
  float x;
  copy(&x, &bits, 4);
  return x;
}

static double place_of(double right) {  // the value of the last bit of a float of that size
  int exponent;
  frexp(right, &exponent);
  return ldexp(1, exponent < -125 ? -149 : exponent - 24);
}

static vf exp_of(vf x) { return exponential(x); }
static vf log_of(vf x) { return logarithm(x); }
static vf sigmoid_of(vf x) { return sigmoid(x); }
static vf softplus_of(vf x) { return softplus(x); }
static vf gelu_of(vf x) { return gelu(x); }
static vf log_sigmoid_of(vf x) { return log_sigmoid(x); }
static vf one_minus_exp_of(vf x) { return one_minus_exp(x); }
static double exact_sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double exact_softplus(double x) { return log1p(exp(x)); }
static double exact_gelu(double x) { return x / 2 * erfc(-x / sqrt(2)); }
static double exact_log_sigmoid(double x) { return x < 0 ? x - log1p(exp(x)) : -log1p(exp(-x)); }
static double exact_one_minus_exp(double x) { return -expm1(-x); }

// Every 997th float of either sign whose size is from `least` to `most`.
static void compare(const char *name, vf (*mine)(vf), double (*right)(double), float least, float most, int negative,
                    int relative) {
  uint32_t first, last;
  copy(&first, &least, 4);
  copy(&last, &most, 4);
  double worst = 0;
  for (int sign = 0; sign <= negative; ++sign)
    for (uint32_t bits = first; bits <= last; bits += 997) {
      const double x = from_bits(bits | (uint32_t)sign << 31), exact = right(x);
      const double off = fabs(mine(splat((float)x))[W - 1] - exact) / (relative ? place_of(exact) : ldexp(1, -24));
      worst = off > worst || off != off ? off : worst;
    }
  printf("%s %.3f\n", name, worst);
}

static void count_subnormal(void) {
  uint32_t found = 0;
  for (float x = -20; x < 0; x += 1e-5f) found += fpclassify(gelu(splat(x))[W - 1]) == FP_SUBNORMAL;
  printf("subnormal gelu %u\n", found);
  printf("infinite gelu %d\n", !(gelu(splat(INFINITY))[W - 1] == INFINITY && gelu(splat(-INFINITY))[W - 1] == 0));
}

static void compare_halves(void) {
  uint32_t wrong = 0;
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) continue;
    const double size = exponent ? ldexp(1024 + fraction, (int)exponent - 25) : ldexp(fraction, -24);
    uint16_t halves[W];
    for (int i = 0; i < W; ++i) halves[i] = (uint16_t)bits;
    wrong += widen(FLOAT16, (const char *)halves)[W - 1] != (bits >> 15 ? -size : size);
  }
  printf("halves %u\n", wrong);
}

// Sums of bytes times integers: the largest ones fill a block of sums to the last bit, and the last block is not full.
// In units of the last place of the sum of the sizes of all products.
static void compare_products(void) {
  enum { COLUMNS = 2 * BLOCK + 3 * LANES };
  static int8_t weights[ROWS][COLUMNS];
  static int16_t x[COLUMNS];
  double worst = 0;
  for (int any = 0; any < 2; ++any) {
    double exact[ROWS] = {0}, sizes[ROWS] = {0};
    for (int i = 0; i < COLUMNS; ++i) {
      x[i] = any ? (int16_t)(i * 7919 % 65535 - 32767) : -32767;
      for (int r = 0; r < ROWS; ++r) {
        weights[r][i] = any ? (int8_t)((i * 31 + r * 77) % 256 - 128) : -128;
        exact[r] += weights[r][i] * (double)x[i];
        sizes[r] += fabs(weights[r][i] * (double)x[i]);
      }
    }
    float sums[ROWS];
    dot_bytes(ROWS, (const char *)weights, COLUMNS, x, COLUMNS, sums);
    for (int r = 0; r < ROWS; ++r) worst = fmax(worst, fabs(sums[r] - exact[r]) / place_of(sizes[r]));
  }
  printf("products %.3f\n", worst);
}

// In units of the scale.
static void compare_quantization(void) {
  float x[2 * LANES];
  int16_t found[2 * LANES];
  double worst = 0;
  for (uint32_t bits = 0x0da24261; bits < 0x7f000000; bits += 99991) {  // above 1e-30
    for (int i = 0; i < 2 * LANES; ++i) x[i] = (float)(from_bits(bits) * cos(i * 1.7));
    const double scale = quantize(x, 2 * LANES, found);
    for (int i = 0; i < 2 * LANES; ++i) worst = fmax(worst, fabs(found[i] - x[i] / scale));
  }
  printf("quantization %.3f\n", worst);
  const float odd[] = {0, 1e-36f, INFINITY, -INFINITY, NAN};
  int right = 0;
  for (int kind = 0; kind < 5; ++kind) {
    for (int i = 0; i < 2 * LANES; ++i) x[i] = i == 5 ? odd[kind] : kind < 2 ? 0 : 1;
    const float scale = quantize(x, 2 * LANES, found);
    right += kind < 2 ? scale < 1e-36f && !found[5] : !found[5] && !(scale <= __FLT_MAX__);
  }
  printf("odd numbers %d\n", right);
}

static void compare_sin_cos(void) {
  double worst = 0;
  for (uint32_t i = 0; i < 2000000; ++i) {
    const double angle = (i % 2 ? -1 : 1) * exp(i * (22.18 / 2000000)) * (1 - 1e-9 * i);
    float sine, cosine;
    sin_cos(angle, &sine, &cosine);
    const double off = fmax(fabs(sine - sin(angle)), fabs(cosine - cos(angle)));
    worst = off > worst || off != off ? off : worst;
  }
  float sine, cosine;
  sin_cos(NAN, &sine, &cosine);
  printf("sin_cos %.3f\nno angle %d\n", worst * 0x1p24, sine != sine && cosine != cosine);
}

int main(void) {
  compare("exponential", exp_of, exp, 0x1p-30f, 87.0f, 1, 1);
  compare("logarithm", log_of, log, 0x1p-126f, __FLT_MAX__, 0, 1);
  compare("sigmoid", sigmoid_of, exact_sigmoid, 0x1p-30f, 87.0f, 1, 1);
  compare("softplus", softplus_of, exact_softplus, 0x1p-30f, 87.0f, 1, 1);
  compare("gelu", gelu_of, exact_gelu, 0x1p-30f, 5.0f, 1, 1);
  compare("far gelu", gelu_of, exact_gelu, 5.0f, 1e30f, 1, 0);
  compare("log sigmoid", log_sigmoid_of, exact_log_sigmoid, 0x1p-30f, 80.0f, 1, 0);
  compare("one minus exp", one_minus_exp_of, exact_one_minus_exp, 0x1p-30f, 1e30f, 0, 1);
  count_subnormal();
  compare_halves();
  compare_products();
  compare_quantization();
  compare_sin_cos();
  return 0;
}
