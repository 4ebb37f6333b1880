// A few tokens of the short causal convolution, y_t = act(bias + sum_j weight[j] x_{t-width+1+j}), whose last inputs
// are in a buffer of the caller's that is updated in place. Compiled once per instruction set, with
// LINTRA_ISA naming the namespace.
#include "kernel.h"
#include "parallel.h"
#include "rows.h"

LINTRA_DECLARE(LINTRA_ISA)

namespace lintra {
namespace LINTRA_ISA {

constexpr i64 kStepChannels = 128;             // of a block
constexpr double kParallelStep = 1 << 16;      // inputs below which waking a thread costs more than it saves

// T: of the sums. E: an unsigned integer as wide as an element, which is moved as it is.
template <class T, class E>
struct Conv1dStep {
  const lintra_conv1d_step& call;

  // `n` elements, a number of elements apart.
  static void move(const E* from, i64 from_step, E* to, i64 to_step, i64 n) {
    for (i64 i = 0; i < n; ++i) to[i * to_step] = from[i * from_step];
  }
  void read(const E* from, i64 step, i64 n, T* row) const {
    E elements[kStepChannels];
    if (step != 1) {
      move(from, step, elements, 1, n);
      from = elements;
    }
    read_row((const char*)from, row, n, call.dtype);
  }

  // The channels from `channel` on of one sequence; `rows` has room for 2 width + 2 of them.
  void block(i64 sequence, i64 channel, T* rows) const {
    constexpr i64 W = kLanes<T>;
    const i64 width = call.width, length = call.length, before = width - 1;
    const i64 left = call.c - channel, n = left < kStepChannels ? left : kStepChannels;
    const i64 row = call.rows ? call.rows[sequence] : sequence;
    E* y = (E*)call.y + sequence * call.t * call.c + channel;
    if (row < 0) {
      for (i64 t = 0; t < call.t; ++t) memset((void*)(y + t * call.c), 0, size_t(n) * sizeof(E));
      return;
    }
    const E* x = (const E*)call.x + sequence * call.x_b + channel * call.x_c;
    E* buffer = (E*)call.buffer + row * call.buffer_row + channel * call.buffer_c;
    auto place = [&](i64 l) { return buffer + l * call.buffer_l; };

    T *inputs = rows, *weight = inputs + width * kStepChannels, *bias = weight + width * kStepChannels;
    T* sum = bias + kStepChannels;
    memset((void*)rows, 0, size_t(2 * width + 2) * kStepChannels * sizeof(T));  // lanes beyond the channels count too
    const T* weights = (const T*)call.weight + channel * width;
    for (i64 i = 0; i < n; ++i)
      for (i64 j = 0; j < width; ++j) weight[j * kStepChannels + i] = weights[i * width + j];
    if (call.bias) memcpy(bias, (const T*)call.bias + channel, size_t(n) * sizeof(T));

    i64 start = call.starts ? call.starts[sequence] % length : 0;
    if (start < 0) start += length;
    const i64 end = call.starts ? start + length : length;  // one past the latest input, before the circle is closed
    for (i64 j = 0; j < before; ++j)
      read(place((end - before + j) % length), call.buffer_c, n, inputs + (j + 1) * kStepChannels);
    if (!call.starts)
      for (i64 l = 0; l + call.t < length; ++l) move(place(l + call.t), call.buffer_c, place(l), call.buffer_c, n);

    for (i64 t = 0; t < call.t; ++t) {
      const E* token = x + t * call.x_t;
      memmove((void*)inputs, inputs + kStepChannels, size_t(before) * kStepChannels * sizeof(T));
      read(token, call.x_c, n, inputs + before * kStepChannels);
      const i64 to = call.starts ? (start + t) % length : length - call.t + t;
      if (to >= 0) move(token, call.x_c, place(to), call.buffer_c, n);
      for (i64 i = 0; i < n; i += W) {
        Vec<T> pre = load(bias + i);
        for (i64 j = 0; j < width; ++j) pre += load(weight + j * kStepChannels + i) * load(inputs + j * kStepChannels + i);
        store(sum + i, call.silu ? silu<T>(pre) : pre);
      }
      write_row((char*)(y + t * call.c), sum, n, call.dtype);
    }
  }

  int run(lintra_launch launch) const {
    const i64 blocks = (call.c + kStepChannels - 1) / kStepChannels, n = call.b * blocks;
    if (!n) return LINTRA_OK;
    const double work = double(call.b) * double(call.t) * double(call.c);
    const i64 workers = worker_count(work, kParallelStep, call.threads, n);
    const i64 size = (2 * call.width + 2) * kStepChannels;
    Memory memory;
    T* rows = (T*)memory.get(workers * size * i64(sizeof(T)), false);
    if (!rows) return LINTRA_NO_MEMORY;
    parallel(launch, workers, n, Subnormals::kKept, [&](i64 i, i64 worker) {
      block(i / blocks, i % blocks * kStepChannels, rows + worker * size);
    });
    return LINTRA_OK;
  }
};

int conv1d_step(const lintra_conv1d_step& call, lintra_launch launch) {
  switch (call.dtype) {
    case LINTRA_FLOAT64: return Conv1dStep<double, uint64_t>{call}.run(launch);
    case LINTRA_FLOAT32: return Conv1dStep<float, uint32_t>{call}.run(launch);
    default: return Conv1dStep<float, uint16_t>{call}.run(launch);
  }
}

}  // namespace LINTRA_ISA
}  // namespace lintra
