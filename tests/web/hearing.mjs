// The program by which the page hears, in node: hearing.mjs reads JSON { sources, program, model, work, pieces } and prints
// its messages; or { sources, rates, pieces }, and prints what the resampler makes of them, twice.
import { readFileSync } from "node:fs";

const job = JSON.parse(readFileSync(0));
const source = job.sources.map((file) => readFileSync(file, "utf8")).join("\n");
const names = "{ WasmModel, WasmRecogniser, Resampler, makeListener }";
const { Resampler, makeListener } = new Function(`"use strict"; ${source}; return ${names};`)();
const pieces = job.pieces.map((piece) => Float32Array.from(piece));
if (job.rates) {
  const resampler = new Resampler(...job.rates);
  // Twice: a finished resampler is as good as new.
  const once = () => [...pieces.map((piece) => [...resampler.push(piece)]), [...resampler.finish()]].flat();
  console.log(JSON.stringify([once(), once()]));
} else {
  const told = [], base64 = (file) => readFileSync(file).toString("base64");
  const receive = makeListener((message) => told.push(message));
  const program = job.program && base64(job.program);
  await receive({ do: "open", model: base64(job.model), program, name: "node", slice: 1 });
  for (const work of job.work) {
    if (work.do === "file") work.samples = pieces[0];
    if (work.do === "hear") work.samples = pieces[work.piece];
    await receive(work);
  }
  console.log(JSON.stringify(told));
  process.exit(0); // the message channel would wait forever
}
