// Runs the WebAssembly runtime in node: node run.mjs PROGRAM MODEL SEED TOKEN... prints the params after each token as
// JSON, then tokens drawn by the sequence's own generator, and the state afterwards, as base64; and whether a sequence
// that reads all tokens at once has the same params. Weights of float16 are read as they are, then as float32. The
// sequence has room for few tokens at first, and is copied to where there is more when it is full.
import { readFileSync } from "node:fs";

const [program, model, seed, ...tokens] = process.argv.slice(2);
const { exports: lrt } = new WebAssembly.Instance(new WebAssembly.Module(readFileSync(program)));
let end = lrt.__heap_base.value;

function room(bytes) {
  const at = Math.ceil(end / 64) * 64;
  end = at + bytes;
  const missing = end - lrt.memory.buffer.byteLength;
  if (missing > 0) lrt.memory.grow(Math.ceil(missing / 65536));
  return at;
}

function text(code) {
  const at = lrt.lrt_error(code);
  const bytes = new Uint8Array(lrt.memory.buffer, at);
  return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
}

function check(code) {
  if (code < 0) {
    console.log(JSON.stringify({ error: text(code) }));
    process.exit(0);
  }
  return code;
}

const file = readFileSync(model);
const content = room(file.length);
new Uint8Array(lrt.memory.buffer, content, file.length).set(file);
const loaded = room(lrt.lrt_model_size());
check(lrt.lrt_load(loaded, lrt.lrt_model_size(), content, file.length));
let size = lrt.lrt_sequence_size_for(loaded, 2);
let sequence = room(size);
check(lrt.lrt_start(sequence, size, loaded));
lrt.lrt_seed(sequence, Number(seed), 0);

function step(token) {
  for (let code; (code = lrt.lrt_step(sequence, token)); ) {
    if (code !== -21) check(code); // LRT_FULL
    const from = sequence;
    size = lrt.lrt_sequence_size_for(loaded, 2 * lrt.lrt_room(from));
    sequence = room(size);
    check(lrt.lrt_copy(sequence, size, from));
  }
}

const count = lrt.lrt_fact(loaded, 2);
const params = tokens.map((token) => {
  step(Number(token));
  return [...new Float32Array(lrt.memory.buffer, lrt.lrt_params(sequence), count)];
});
const drawn = [];
for (let i = 0; i < 40; ++i) {
  drawn.push(check(lrt.lrt_sample(sequence, 0.9, 0, 0.95, lrt.lrt_uniform(sequence))));
  step(drawn[i]);
}
const words = room(4 * tokens.length);
function prefilled() {
  check(lrt.lrt_start(sequence, size, loaded));
  new Uint32Array(lrt.memory.buffer, words, tokens.length).set(tokens.map(Number));
  check(lrt.lrt_prefill(sequence, words, tokens.length));
  const found = new Float32Array(lrt.memory.buffer, lrt.lrt_params(sequence), count);
  return found.every((x, i) => x === params.at(-1)[i]);
}
const bytes = lrt.lrt_state_size_for(loaded, lrt.lrt_seen(sequence));
const state = room(bytes);
check(lrt.lrt_save_state(sequence, state, bytes));
const saved = Buffer.from(new Uint8Array(lrt.memory.buffer, state, bytes)).toString("base64");
const same = [prefilled()], wide = lrt.lrt_float32_size(loaded);
if (wide) {
  const other = room(wide);
  check(lrt.lrt_to_float32(loaded, other, wide));
  check(lrt.lrt_load(loaded, lrt.lrt_model_size(), other, wide));
  same.push(prefilled());
}
console.log(JSON.stringify({ params, drawn, state: saved, same }));
