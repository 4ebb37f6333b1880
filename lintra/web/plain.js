// The model in plain JavaScript: for browsers without WebAssembly's SIMD, and for the contrast with softmax, where both
// attentions run in the same program. It reads what docs/format.md describes, of models with linear attention.

const [FLOAT32, FLOAT16, INT8] = [0, 1, 2];
const [GELU, SWIGLU, PRE, LAYER_NORM, MIXTURE] = [0, 1, 0, 0, 1];
const [, SINUSOIDAL, CONCATENATED, , ROTARY] = [0, 1, 2, 3, 4];
const FEATURE_MAPS = [
  (x) => x,
  (x) => (x > 0 ? x + 1 : Math.exp(x)),
  (x) => (x < 0 ? 0 : x),
  (x) => (x < 0 ? 0 : x * x),
];

const padToLanes = (n) => Math.ceil(n / 16) * 16; // rows are filled up to 16 numbers

function half(bits) {
  const exponent = (bits >> 10) & 31;
  const size = exponent ? 2 ** (exponent - 15) * (1 + (bits & 1023) / 1024) : ((bits & 1023) / 1024) * 2 ** -14;
  return bits & 0x8000 ? -size : size;
}

// Takes the sections of a file one after the other. Raises Error where it ends too early.
class Sections {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  take(count, size) {
    const at = this.at;
    this.at += Math.ceil((count * size) / 64) * 64;
    if (this.at > this.bytes.length) throw new Error("the model's file is shorter than it must be");
    return at;
  }

  vector(count) {
    const at = this.take(padToLanes(count), 4);
    return Float32Array.from({ length: count }, (_, i) => this.view.getFloat32(at + 4 * i, true));
  }

  doubles(count) {
    const at = this.take(count, 8);
    return Float64Array.from({ length: count }, (_, i) => this.view.getFloat64(at + 8 * i, true));
  }

  matrix(kind, rows, columns) {
    const scale = kind === INT8 ? this.vector(rows) : null;
    const size = [4, 2, 1][kind], step = padToLanes(columns);
    const first = this.take(rows * step, size), weights = new Float32Array(rows * columns), view = this.view;
    for (let row = 0, to = 0; row < rows; ++row) {
      for (let i = 0, at = first + row * step * size; i < columns; ++i, at += size, ++to) {
        if (kind === FLOAT32) weights[to] = view.getFloat32(at, true);
        else if (kind === FLOAT16) weights[to] = half(view.getUint16(at, true));
        else weights[to] = view.getInt8(at) * scale[row];
      }
    }
    return { weights, rows, columns };
  }

  linear(kind, rows, columns) {
    return { ...this.matrix(kind, rows, columns), bias: this.vector(rows) };
  }

  norm(width, kind) {
    return { weight: this.vector(width), bias: kind === LAYER_NORM ? this.vector(width) : null };
  }
}

function readHeader(sections) {
  const { view, bytes } = sections;
  const magic = String.fromCharCode(...bytes.subarray(0, 8));
  if (magic !== "lintraRT" || view.getUint32(8, true) !== 1) throw new Error("this is not a model that this page reads");
  let at = 24;
  const word = () => view.getUint32((at += 4) - 4, true);
  const words = (count) => Array.from({ length: count }, word);
  const header = {};
  const names = ["weights", "vocabulary", "start", "layers", "width", "heads", "kvHeads", "projected", "hidden"];
  for (const name of [...names, "activation", "normOrder", "normKind", "finalNorm", "position"]) header[name] = word();
  const axes = word();
  header.axes = words(8).slice(0, axes);
  const lookbacks = word();
  header.lookbacks = words(32).slice(0, lookbacks);
  const kinds = ["featureMap", "decay", "denominator", "headNorm", "headGate", "output", "components"];
  for (const name of kinds) header[name] = word();
  header.eps = view.getFloat32(at, true);
  header.normEps = view.getFloat32(at + 4, true);
  sections.at = 320;
  if (header.projected || header.decay || header.headNorm || header.headGate)
    throw new Error("plain JavaScript knows linear attention only, which this model has not");
  return header;
}

function product({ weights, rows, columns, bias }, x, y, add) {
  const even = columns & ~3;
  for (let row = 0, at = 0; row < rows; ++row, at += columns) {
    let a = 0, b = 0, c = 0, d = 0;
    for (let i = 0; i < even; i += 4) {
      a += weights[at + i] * x[i];
      b += weights[at + i + 1] * x[i + 1];
      c += weights[at + i + 2] * x[i + 2];
      d += weights[at + i + 3] * x[i + 3];
    }
    for (let i = even; i < columns; ++i) a += weights[at + i] * x[i];
    const sum = a + b + (c + d) + bias[row];
    y[row] = add ? y[row] + sum : sum;
  }
}

// x Phi(x), with erfc as in Press et al., Numerical Recipes, section 6.2.
function gelu(x) {
  const z = Math.abs(x) * Math.SQRT1_2, t = 1 / (1 + z / 2);
  let p = 0.17087277;
  const others = [-0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368];
  for (const c of others) p = p * t + c;
  const tail = (x / 2) * t * Math.exp(p * t - 1.26551223 - z * z);
  return x > 0 ? x - tail : tail;
}

const silu = (x) => x / (1 + Math.exp(-x));
const logSigmoid = (x) => Math.min(x, 0) - Math.log1p(Math.exp(-Math.abs(x)));

class PlainModel {
  constructor(bytes) {
    const sections = new Sections(bytes);
    const m = (this.header = readHeader(sections));
    m.dim = m.width / m.heads;
    m.embedded = m.position === CONCATENATED ? m.width / 2 : m.width;
    m.maxLookback = Math.max(0, ...m.lookbacks);
    const symbols = m.vocabulary + m.start, tables = m.weights === FLOAT32 ? FLOAT32 : FLOAT16;
    this.embedding = [0, ...m.lookbacks].map(() => sections.matrix(tables, symbols, m.embedded));
    this.code = m.axes.map((size) => sections.matrix(tables, size, m.width));
    const pairs = m.position === ROTARY ? m.dim / 2 : m.embedded / 2;
    if ([SINUSOIDAL, CONCATENATED, ROTARY].includes(m.position)) this.frequencies = sections.doubles(pairs);
    this.layers = Array.from({ length: m.layers }, () => ({
      attentionNorm: sections.norm(m.width, m.normKind),
      qkvProjection: sections.linear(m.weights, (m.heads + 2 * m.kvHeads) * m.dim, m.width),
      outProjection: sections.linear(m.weights, m.width, m.width),
      mlpNorm: sections.norm(m.width, m.normKind),
      up: sections.linear(m.weights, m.hidden * (m.activation === SWIGLU ? 2 : 1), m.width),
      down: sections.linear(m.weights, m.width, m.hidden),
    }));
    this.norm = m.finalNorm ? sections.norm(m.width, m.normKind) : null;
    this.head = sections.linear(m.weights, m.output === MIXTURE ? 3 * m.components : m.vocabulary, m.width);
    this.start = m.start ? m.vocabulary : -1; // the symbol that stands before the first; -1: there is none
    this.name = "plain JavaScript";
  }

  sequence(length) {
    return new PlainSequence(this, new LinearAttention(this.header), length);
  }

  release() {}

  softmaxSequence(length) {
    return new PlainSequence(this, new SoftmaxAttention(this.header, length), length);
  }
}

// y = phi(q) S / (phi(q) z), with S += phi(k) v and z += phi(k): its state has a constant size.
class LinearAttention {
  constructor({ layers, heads, kvHeads, dim, featureMap, denominator, eps }) {
    Object.assign(this, { heads, kvHeads, dim, denominator, eps });
    this.phi = FEATURE_MAPS[featureMap];
    this.sums = Array.from({ length: layers }, () => new Float32Array(kvHeads * dim * dim));
    this.weights = Array.from({ length: layers }, () => new Float32Array(kvHeads * dim));
    this.mapped = new Float32Array(2 * dim);
  }

  start() {
    for (const sum of [...this.sums, ...this.weights]) sum.fill(0);
  }

  save() {
    return [...this.sums, ...this.weights].map((sum) => sum.slice());
  }

  load(saved) {
    [...this.sums, ...this.weights].forEach((sum, i) => sum.set(saved[i]));
  }

  // rotate: the function that rotates features in place by the angles of this position, or null.
  step(layer, q, k, v, to, rotate) {
    const { heads, kvHeads, dim, phi, mapped } = this, sum = this.sums[layer], weights = this.weights[layer];
    for (let g = 0; g < kvHeads; ++g) {
      for (let i = 0; i < dim; ++i) mapped[i] = phi(k[g * dim + i]);
      for (let i = 0; i < dim; ++i) weights[g * dim + i] += mapped[i];
      if (rotate) rotate(mapped.subarray(0, dim));
      for (let i = 0, at = g * dim * dim; i < dim; ++i)
        for (let j = 0; j < dim; ++j, ++at) sum[at] += mapped[i] * v[g * dim + j];
    }
    for (let head = 0; head < heads; ++head) {
      const g = Math.floor((head * kvHeads) / heads), first = head * dim;
      let weight = this.eps;
      for (let i = 0; i < dim; ++i) mapped[i] = phi(q[first + i]);
      for (let i = 0; i < dim; ++i) weight += mapped[i] * weights[g * dim + i];
      if (rotate) rotate(mapped.subarray(0, dim));
      to.fill(0, first, first + dim);
      for (let i = 0, at = g * dim * dim; i < dim; ++i)
        for (let j = 0; j < dim; ++j, ++at) to[first + j] += mapped[i] * sum[at];
      if (this.denominator) for (let j = 0; j < dim; ++j) to[first + j] = weight === 0 ? 0 : to[first + j] / weight;
    }
  }
}

// y = softmax(q K / sqrt(d)) V over all keys and values so far, which are kept.
class SoftmaxAttention {
  constructor({ layers, heads, kvHeads, dim }, length) {
    Object.assign(this, { heads, kvHeads, dim, length });
    this.keys = Array.from({ length: layers }, () => new Float32Array(length * kvHeads * dim));
    this.values = Array.from({ length: layers }, () => new Float32Array(length * kvHeads * dim));
    this.counts = new Uint32Array(layers);
    this.scores = new Float32Array(length);
  }

  start() {
    this.counts.fill(0);
  }

  step(layer, q, k, v, to, rotate) {
    const { heads, kvHeads, dim, scores } = this, step = kvHeads * dim, count = ++this.counts[layer];
    const keys = this.keys[layer], values = this.values[layer];
    keys.set(k, (count - 1) * step);
    values.set(v, (count - 1) * step);
    for (let g = 0; rotate && g < kvHeads; ++g) rotate(keys.subarray((count - 1) * step + g * dim).subarray(0, dim));
    for (let head = 0; head < heads; ++head) {
      const first = head * dim, g = Math.floor((head * kvHeads) / heads), query = q.subarray(first, first + dim);
      if (rotate) rotate(query);
      let most = -Infinity, total = 0;
      for (let t = 0; t < count; ++t) {
        let score = 0;
        for (let i = 0, at = t * step + g * dim; i < dim; ++i, ++at) score += query[i] * keys[at];
        scores[t] = score / Math.sqrt(dim);
        most = Math.max(most, scores[t]);
      }
      to.fill(0, first, first + dim);
      for (let t = 0; t < count; ++t) {
        const weight = Math.exp(scores[t] - most);
        total += weight;
        for (let i = 0, at = t * step + g * dim; i < dim; ++i, ++at) to[first + i] += weight * values[at];
      }
      for (let i = 0; i < dim; ++i) to[first + i] /= total;
    }
  }
}

const WORD = (1n << 64n) - 1n;

class PlainSequence {
  constructor(model, attention) {
    const m = model.header;
    Object.assign(this, { model, attention });
    for (const name of ["x", "normed", "attended"]) this[name] = new Float32Array(m.width);
    this.qkv = new Float32Array((m.heads + 2 * m.kvHeads) * m.dim);
    this.hidden = new Float32Array(2 * m.hidden);
    this.params = new Float32Array(model.head.rows);
    this.scores = new Float32Array(m.vocabulary);
    this.random = 0n;
    this.start();
  }

  start() {
    this.seen = 0;
    this.recent = new Uint32Array(this.model.header.maxLookback).fill(this.model.header.vocabulary);
    this.attention.start();
  }

  save() {
    return { seen: this.seen, recent: this.recent.slice(), attention: this.attention.save() };
  }

  load({ seen, recent, attention }) {
    this.seen = seen;
    this.recent = recent.slice();
    this.attention.load(attention);
  }

  seed(low, high) {
    this.random = (BigInt(high) << 32n) | BigInt(low);
  }

  // SplitMix64, the upper 53 bits.
  uniform() {
    let x = (this.random = (this.random + 0x9e3779b97f4a7c15n) & WORD);
    x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & WORD;
    x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & WORD;
    return Number((x ^ (x >> 31n)) >> 11n) * 2 ** -53;
  }

  read(tokens) {
    tokens.forEach((token, i) => this.step(token, i === tokens.length - 1));
  }

  // Without `last` nothing is computed of what comes next.
  step(token, last = true) {
    const { model, x, normed } = this, m = model.header, pre = m.normOrder === PRE;
    const rotate = this.embed(token);
    model.layers.forEach((layer, i) => {
      const [keys, values] = [m.heads * m.dim, (m.heads + m.kvHeads) * m.dim];
      if (pre) this.normalize(layer.attentionNorm, x, normed);
      product(layer.qkvProjection, pre ? normed : x, this.qkv, false);
      const [q, k, v] = [this.qkv.subarray(0, keys), this.qkv.subarray(keys, values), this.qkv.subarray(values)];
      this.attention.step(i, q, k, v, this.attended, rotate);
      product(layer.outProjection, this.attended, x, true);
      this.normalize(pre ? layer.mlpNorm : layer.attentionNorm, x, pre ? normed : x);
      this.mlp(layer, pre ? normed : x);
      if (!pre) this.normalize(layer.mlpNorm, x, x);
    });
    if (m.maxLookback) this.recent[this.seen % m.maxLookback] = token;
    this.seen += 1;
    if (!last) return;
    if (model.norm) this.normalize(model.norm, x, normed);
    product(model.head, model.norm ? normed : x, this.params, false);
  }

  // Sets x to the embeddings -> the function that rotates features in place, for rotary positions, or null.
  embed(token) {
    const { model, x, seen, recent } = this, m = model.header;
    const add = ({ weights, columns }, row) => {
      for (let i = 0, at = row * columns; i < columns; ++i, ++at) x[i] += weights[at];
    };
    x.fill(0);
    add(model.embedding[0], token);
    m.lookbacks.forEach((lookback, i) => add(model.embedding[i + 1], recent[(seen + m.maxLookback - lookback) % m.maxLookback]));
    for (let i = m.axes.length, rest = seen; i--; rest = Math.floor(rest / m.axes[i]))
      add(model.code[i], rest % m.axes[i]);
    if (m.position === ROTARY) {
      const angles = Array.from(model.frequencies, (f) => f * seen), middle = m.dim / 2;
      const [cosine, sine] = [angles.map(Math.cos), angles.map(Math.sin)];
      return (y) => {
        for (let i = 0; i < middle; ++i) {
          const a = y[i], b = y[i + middle];
          y[i] = a * cosine[i] - b * sine[i];
          y[i + middle] = a * sine[i] + b * cosine[i];
        }
      };
    }
    if (m.position === SINUSOIDAL || m.position === CONCATENATED) {
      const first = m.position === CONCATENATED ? m.embedded : 0;
      model.frequencies.forEach((f, i) => {
        x[first + 2 * i] += Math.sin(f * seen);
        x[first + 2 * i + 1] += Math.cos(f * seen);
      });
    }
    return null;
  }

  normalize({ weight, bias }, from, to) {
    const n = weight.length;
    let mean = 0, square = 0;
    for (let i = 0; bias && i < n; ++i) mean += from[i] / n;
    for (let i = 0; i < n; ++i) square += ((from[i] - mean) * (from[i] - mean)) / n;
    const scale = 1 / Math.sqrt(square + this.model.header.normEps);
    for (let i = 0; i < n; ++i) to[i] = (from[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0);
  }

  mlp({ up, down }, from) {
    const { hidden } = this, { hidden: n, activation } = this.model.header;
    product(up, from, hidden, false);
    for (let i = 0; i < n; ++i) {
      const x = hidden[i];
      hidden[i] = activation === GELU ? gelu(x) : activation === SWIGLU ? silu(x) * hidden[n + i] : Math.max(0, x);
    }
    product(down, hidden, this.x, true);
  }

  // The symbol at which the cumulative probability passes the next random number.
  sample(temperature) {
    const { scores } = this, uniform = this.uniform();
    if (this.model.header.output === MIXTURE) this.scoreLevels();
    else scores.set(this.params);
    const most = scores.reduce((a, b) => Math.max(a, b));
    if (temperature === 0) return scores.indexOf(most);
    let total = 0, passed = 0;
    for (let i = 0; i < scores.length; ++i) total += scores[i] = Math.exp((scores[i] - most) / temperature);
    for (let i = 0; i < scores.length; ++i) if ((passed += scores[i]) > uniform * total) return i;
    return scores.length - 1;
  }

  // Levels on [-1, 1], each the mass of its interval under a mixture of logistics: lintra.nn.distributions.
  scoreLevels() {
    const { params, scores } = this, { components, vocabulary: n } = this.model.header, reach = 1 / (n - 1);
    const most = params.subarray(0, components).reduce((a, b) => Math.max(a, b));
    for (let level = 0; level < n; ++level) {
      let mass = 0;
      for (let i = 0; i < components; ++i) {
        const steep = Math.exp(-Math.min(7, Math.max(-7, params[2 * components + i])));
        const off = (2 * level * reach - 1 - params[components + i]) * steep, wide = reach * steep;
        const below = level === n - 1 ? 0 : logSigmoid(off + wide), above = level === 0 ? 0 : logSigmoid(wide - off);
        const between = level === 0 || level === n - 1 ? 0 : Math.log(-Math.expm1(-2 * wide));
        mass += Math.exp(params[i] - most + below + above + between);
      }
      scores[level] = Math.log(mass);
    }
  }
}
