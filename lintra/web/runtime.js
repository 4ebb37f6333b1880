// The runtime in WebAssembly (lintra/runtime/lintra_runtime.h) with the interface of plain.js.

class WasmModel {
  // Returns what a .wasm file exports. Raises Error where the browser or the page's policy forbids it.
  static async compile(program) {
    return (await WebAssembly.instantiate(program)).instance.exports;
  }

  // lrt: the exports; bytes: the model's file. Raises Error with the runtime's reason.
  constructor(lrt, bytes, name) {
    Object.assign(this, { lrt, name, end: lrt.__heap_base.value });
    const file = this.room(bytes.length);
    this.bytes(file, bytes.length).set(bytes);
    this.at = this.room(lrt.lrt_model_size());
    this.check(lrt.lrt_load(this.at, lrt.lrt_model_size(), file, bytes.length));
    this.widen();
    this.start = lrt.lrt_fact(this.at, 1); // LRT_START
    this.state = this.room(lrt.lrt_state_size(this.at));
    this.words = this.room(4 * WasmModel.CHUNK);
    this.free = [];
  }

  // WebAssembly has no instruction that reads float16: such weights become float32 once, not at every token.
  widen() {
    const { lrt } = this, size = lrt.lrt_float32_size(this.at);
    if (!size) return;
    const file = this.room(size);
    this.check(lrt.lrt_to_float32(this.at, file, size));
    this.check(lrt.lrt_load(this.at, lrt.lrt_model_size(), file, size));
  }

  static CHUNK = 64; // tokens handed over at once

  // Memory that begins where the runtime wants it.
  room(size) {
    const at = Math.ceil(this.end / 64) * 64, { memory } = this.lrt;
    const missing = at + size - memory.buffer.byteLength;
    if (missing > 0) memory.grow(Math.ceil(missing / 65536));
    this.end = at + size; // not before that much is there
    return at;
  }

  bytes(at, size) {
    return new Uint8Array(this.lrt.memory.buffer, at, size);
  }

  check(code) {
    if (code >= 0) return code;
    throw new Error(this.text(this.lrt.lrt_error(code)));
  }

  // What ends with a 0.
  text(at) {
    const bytes = new Uint8Array(this.lrt.memory.buffer, at);
    return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
  }

  // Those given back are used again: a page draws for hours in the same memory.
  sequence() {
    const sequence = this.free.pop() ?? new WasmSequence(this, this.room(this.lrt.lrt_sequence_size(this.at)));
    sequence.start();
    return sequence;
  }

  release(sequence) {
    this.free.push(sequence);
  }
}

class WasmSequence {
  constructor(model, at) {
    Object.assign(this, { model, at, lrt: model.lrt });
  }

  start() {
    this.model.check(this.lrt.lrt_start(this.at, this.lrt.lrt_sequence_size(this.model.at), this.model.at));
  }

  seed(low, high) {
    this.lrt.lrt_seed(this.at, low, high);
  }

  read(tokens) {
    const { model } = this;
    for (let i = 0; i < tokens.length; i += WasmModel.CHUNK) {
      const part = tokens.slice(i, i + WasmModel.CHUNK);
      new Uint32Array(this.lrt.memory.buffer, model.words, part.length).set(part);
      model.check(this.lrt.lrt_prefill(this.at, model.words, part.length));
    }
  }

  step(token) {
    this.model.check(this.lrt.lrt_step(this.at, token));
  }

  sample(temperature) {
    return this.model.check(this.lrt.lrt_sample(this.at, temperature, 0, 1, this.lrt.lrt_uniform(this.at)));
  }

  save() {
    const { state } = this.model, size = this.lrt.lrt_state_size_for(this.model.at, this.lrt.lrt_seen(this.at));
    this.model.check(this.lrt.lrt_save_state(this.at, state, size));
    return this.model.bytes(state, size).slice();
  }

  load(saved) {
    const { state } = this.model;
    this.model.bytes(state, saved.length).set(saved);
    this.model.check(this.lrt.lrt_load_state(this.at, state, saved.length));
  }
}
