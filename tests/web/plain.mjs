// The page's plain JavaScript in node: node plain.mjs SOURCE MODEL ATTENTION TOKEN... prints the params after each token.
import { readFileSync } from "node:fs";

const [source, model, attention, ...tokens] = process.argv.slice(2);
const { PlainModel } = new Function(`"use strict"; ${readFileSync(source)}; return { PlainModel };`)();
try {
  const opened = new PlainModel(new Uint8Array(readFileSync(model)));
  const sequence = attention === "softmax" ? opened.softmaxSequence(tokens.length) : opened.sequence(tokens.length);
  const params = tokens.map((token) => {
    sequence.step(Number(token));
    return [...sequence.params];
  });
  // A saved state continues like one that was not saved.
  let resumed = null;
  if (attention === "linear") {
    const other = opened.sequence(tokens.length), middle = tokens.length >> 1;
    other.read(tokens.slice(0, middle).map(Number));
    const saved = other.save();
    other.start();
    other.load(saved);
    for (const token of tokens.slice(middle)) other.step(Number(token));
    resumed = [...other.params];
  }
  sequence.seed(7, 9);
  const uniforms = [sequence.uniform(), sequence.uniform()];
  sequence.uniform = () => 0.4;
  console.log(JSON.stringify({ params, resumed, uniforms, drawn: sequence.sample(0.8) }));
} catch (error) {
  console.log(JSON.stringify({ error: error.message }));
}
