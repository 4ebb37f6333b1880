// From a call to its sweeps: which operands each pass has, and where its states come from and go.
#pragma once
#include "parallel.h"
#include "sweep.h"

namespace lintra {
namespace LINTRA_ISA {

enum Pass { kForward, kQueryGradient, kKeyGradient, kValueGradient };

template <class T>
struct Problem {
  const lintra_call& call;
  i64 group;                     // query heads per key-value head
  double* query_dots = nullptr;  // [b g t]: q . dq and
  double* key_dots = nullptr;    // [b g s]: k . dk, for the gradients of log_decay and log_input
  double* final_dots = nullptr;  // [b g]: <gradient of the final state, final state>
  T* states = nullptr;           // [g checkpoints size]: the states of the sweep of dq, and
  T* gradients = nullptr;        // their gradients, which the sweep of dk lays out alike
  i64 checkpoint_interval = 0;

  static constexpr i64 kSize = sizeof(T);

  bool packed() const { return call.cu_seqlens && call.b > 1; }
  // States that decay become subnormal; sums of inputs do not.
  Subnormals subnormals() const { return call.log_decay.data ? Subnormals::kFlushed : Subnormals::kKept; }
  lintra_sequence sequence(i64 b) const { return lintra_sequence_of(call, b); }
  i64 queries(i64 b) const { return sequence(b).tokens; }
  i64 keys(i64 b) const { return call.cu_seqlens ? sequence(b).tokens : call.s; }
  // The number of the sequence's first token among those of an array [b t], or of one [b g t] the head's.
  i64 first_token(i64 b, i64 tokens) const {
    const lintra_sequence at = sequence(b);
    return at.row * tokens + at.first;
  }
  i64 first_token(i64 b, i64 g, i64 tokens) const {
    const lintra_sequence at = sequence(b);
    return (at.row * call.g + g) * tokens + at.first;
  }
  i64 checkpoint_count() const { return lintra_checkpoint_count(call, checkpoint_interval); }  // of one head
  i64 checkpoint_size() const {
    Sweep<T> s = {};
    s.inner = call.e + 1;
    s.outer = call.f;
    return Shape::of(s).state();
  }
  // The first checkpoint of a sequence.
  T* checkpoints(T* states, i64 b, i64 g) const {
    if (!states) return nullptr;
    const i64 first = lintra_first_checkpoint(call, sequence(b), checkpoint_interval);
    return states + (g * checkpoint_count() + first) * checkpoint_size();
  }

  char* first_row(const lintra_tensor& x, i64 b, i64 head, i64 size) const {
    const lintra_sequence at = sequence(b);
    return x.data + (at.row * x.b + at.first * x.t + head * x.h) * size;
  }

  Operand operand(Operand::Kind kind, const lintra_tensor& x, i64 b, i64 head, i64 width, i64 map) const {
    Operand o = tensor_rows(first_row(x, b, head, element_size(call.dtype)), x, width, call.dtype);
    o.kind = kind;
    o.map = map;
    return o;
  }
  Operand query(i64 b, i64 g) const {
    return operand(Operand::plain, call.q, b, g * group, call.f, call.feature_map);
  }
  Operand key(i64 b, i64 g) const { return operand(Operand::plain, call.k, b, g, call.f, call.feature_map); }
  Operand value(Operand::Kind kind, i64 b, i64 g) const {
    return operand(kind, call.v, b, g, call.e, LINTRA_IDENTITY);
  }
  Operand gradient(Operand::Kind kind, i64 b, i64 g) const {
    const i64 size = element_size(call.dtype), head = g * group;
    Operand o = operand(kind, call.dy, b, head, call.e, LINTRA_IDENTITY);
    if (call.normalize) {
      const i64 first = first_token(b, call.t) * call.h + head;
      o.y = (const char*)call.y + first * call.e * size;
      o.lost = call.lost ? (const char*)call.lost + first * call.e * size : nullptr;
      o.y_token = call.h * call.e * size;
      o.y_head = call.e * size;
      o.den = (const char*)call.den + first * kSize;
      o.den_token = call.h * kSize;
      o.den_head = kSize;
    }
    return o;
  }
  Output output(void* data, i64 b, i64 tokens, i64 head, i64 heads, i64 width) const {
    const i64 size = element_size(call.dtype);
    return {(char*)data + (first_token(b, tokens) * heads + head) * width * size, heads * width * size, width * size,
            call.dtype};
  }
  Tokens mask(i64 b) const {
    return {call.mask.data ? first_row(call.mask, b, 0, 1) : nullptr, call.mask.t};
  }
  const char* per_key(const lintra_tensor& x, i64 b, i64 g) const {
    return x.data ? first_row(x, b, g, kSize) : nullptr;
  }

  Sweep<T> make(Pass pass, i64 b, i64 g) const {
    Sweep<T> s = {};
    s.backwards = pass == kKeyGradient || pass == kValueGradient;
    s.causal = call.causal;
    s.readers = s.backwards ? 1 : group;
    s.writers = s.backwards ? group : 1;
    s.inner = pass == kForward || pass == kValueGradient ? call.f : call.e + 1;
    s.outer = pass == kForward || pass == kValueGradient ? call.e : call.f;
    if (s.causal || s.backwards) s.read_tokens = mask(b);
    if (s.causal || !s.backwards) s.write_tokens = mask(b);
    s.log_decay = per_key(call.log_decay, b, g);
    s.log_input = per_key(call.log_input, b, g);
    s.log_decay_token = call.log_decay.t * kSize;
    s.log_input_token = call.log_input.t * kSize;
    switch (pass) {
      case kForward:
        s.a = query(b, g);
        s.b = key(b, g);
        s.c = value(Operand::plain, b, g);
        s.out = output(call.y, b, call.t, g * group, call.h, call.e);
        if (call.lost) s.lost = output(call.lost, b, call.t, g * group, call.h, call.e).data;
        s.denominators = true;
        s.normalize = call.normalize;
        s.eps = T(call.eps);
        s.den = (char*)call.den + (first_token(b, call.t) * call.h + g * group) * kSize;
        s.den_token = call.h * kSize;
        s.den_head = kSize;
        break;
      case kQueryGradient:
        s.a = gradient(Operand::extended, b, g);
        s.b = value(Operand::ones, b, g);
        s.c = key(b, g);
        s.out = output(call.dq, b, call.t, g * group, call.h, call.f);
        s.features = query(b, g);
        s.chain = call.feature_map != LINTRA_IDENTITY;
        s.dots = query_dots ? query_dots + first_token(b, g, call.t) : nullptr;
        break;
      case kKeyGradient:
        s.a = value(Operand::ones, b, g);
        s.b = gradient(Operand::extended, b, g);
        s.c = query(b, g);
        s.out = output(call.dk, b, call.s, g, call.g, call.f);
        s.features = key(b, g);
        s.chain = call.feature_map != LINTRA_IDENTITY;
        s.dots = key_dots ? key_dots + first_token(b, g, call.s) : nullptr;
        break;
      case kValueGradient:
        s.a = key(b, g);
        s.b = query(b, g);
        s.c = gradient(Operand::gradient, b, g);
        s.out = output(call.dv, b, call.s, g, call.g, call.e);
        break;
    }
    s.checkpoint_interval = checkpoint_interval;
    if (pass == kQueryGradient) s.checkpoints = checkpoints(states, b, g);
    if (pass == kKeyGradient) s.checkpoints = checkpoints(gradients, b, g);
    return s;
  }

  // Elements of a state in panels, from and to the caller's kv [f e] and z [f]; the sweeps of dq and dk hold the
  // transpose with z as its last row.
  template <class F>
  void each_element(const Sweep<T>& s, bool transposed, F&& f) const {
    const Shape shape = Shape::of(s);
    for (i64 column = 0; column < s.outer; column += kPanelWidth<T>) {
      const i64 left = shape.outer - column, width = left < kPanelWidth<T> ? left : kPanelWidth<T>;
      const i64 end = column + width < s.outer ? column + width : s.outer;
      for (i64 k = 0; k < s.inner; ++k) {
        const i64 at = column * shape.rows + k * width - column;
        for (i64 n = column; n < end; ++n) f(at + n, transposed ? n : k, transposed ? k : n);
      }
    }
  }
  void start(Pass pass, i64 b, i64 g, const Sweep<T>& s, State<T> state) const {
    const Shape shape = Shape::of(s);
    memset(state.sum, 0, size_t(shape.state()) * kSize);
    const i64 item = b * call.g + g, e = call.e;
    const T* kv = (const T*)(s.backwards ? call.dkv : call.kv);
    const T* z = (const T*)(s.backwards ? call.dz : call.z);
    if (kv) kv += item * call.f * e;
    if (z) z += item * call.f;
    if (!kv && !z) return;
    const bool transposed = pass == kQueryGradient || pass == kKeyGradient;
    each_element(s, transposed, [&](i64 at, i64 i, i64 n) {
      if (n < e ? kv != nullptr : z != nullptr) state.sum[at] = n < e ? kv[i * e + n] : z[i];
    });
    if (pass == kForward && z) memcpy(state.z, z, size_t(call.f) * kSize);
  }
  void finish(Pass pass, i64 b, i64 g, const Sweep<T>& s, State<T> state) const {
    const i64 item = b * call.g + g, e = call.e, f = call.f;
    if (pass == kQueryGradient) {
      if (!final_dots) return;
      const T* dkv = call.dkv ? (const T*)call.dkv + item * f * e : nullptr;
      const T* dz = call.dz ? (const T*)call.dz + item * f : nullptr;
      double total = 0;
      each_element(s, true, [&](i64 at, i64 i, i64 n) {
        const double gradient = n < e ? (dkv ? dkv[i * e + n] : 0) : (dz ? dz[i] : 0);
        total += gradient * double(state.sum[at]);
      });
      final_dots[item] = total;
      return;
    }
    T* kv = (T*)(pass == kForward ? call.kv_out : call.dkv_in) + item * f * e;
    T* z = (T*)(pass == kForward ? call.z_out : call.dz_in) + item * f;
    if (pass == kForward) memcpy(z, state.z, size_t(f) * kSize);
    each_element(s, pass == kKeyGradient, [&](i64 at, i64 i, i64 n) {
      if (pass != kKeyGradient)
        kv[i * e + n] = state.sum[at];
      else if (n == e)
        z[i] = state.sum[at];
    });
  }

  // Sweeps in one mode, for bidirectional attention. Weights belong to keys: they apply where the keys are.
  void sweep_mode(HeadSweep<T>* heads, i64 count, i64 from, i64 to, int mode, Scratch<T>& r) const {
    HeadSweep<T> plain[kMaxHeads];
    for (i64 i = 0; i < count; ++i) {
      plain[i] = heads[i];
      if ((mode == kRead) != heads[i].sweep.backwards) plain[i].sweep.log_input = nullptr;
    }
    sweep(plain, count, from, to, mode, r);
  }
  i64 write_length(const Sweep<T>& s, i64 b) const { return s.backwards ? queries(b) : keys(b); }
  i64 read_length(const Sweep<T>& s, i64 b) const { return s.backwards ? keys(b) : queries(b); }

  // Sweeps all tokens for `count` key-value heads from g.
  void sweep_heads(Pass pass, i64 b, i64 g, i64 count, Scratch<T>& r) const {
    HeadSweep<T> heads[kMaxHeads];
    for (i64 i = 0; i < count; ++i) {
      heads[i].sweep = make(pass, b, g + i);
      heads[i].state = Shape::of(heads[i].sweep).state_at(r.states, i);
      start(pass, b, g + i, heads[i].sweep, heads[i].state);
    }
    if (call.causal) {
      sweep(heads, count, 0, queries(b), kRead | kWrite, r);
    } else {
      sweep_mode(heads, count, 0, write_length(heads[0].sweep, b), kWrite, r);
      sweep_mode(heads, count, 0, read_length(heads[0].sweep, b), kRead, r);
    }
    for (i64 i = 0; i < count; ++i) finish(pass, b, g + i, heads[i].sweep, heads[i].state);
  }

  T decay_over(const Sweep<T>& s, i64 from, i64 to) const {
    if (!s.log_decay) return 1;
    double total = 0;
    for (i64 token = from; token < to; ++token)
      if (s.read_tokens.real(token)) total += double(scalar<T>(s.log_decay, s.log_decay_token, token));
    return exp<T>(splat(T(total)))[0];
  }
};

}  // namespace LINTRA_ISA
}  // namespace lintra
