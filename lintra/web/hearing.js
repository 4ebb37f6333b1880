// What the page that hears asks for, in a worker, or between its other work where there are none.
//
//   receive({ do: "open", model, program, name, slice }) -> { told: "ready", name, rate }
//   receive({ do: "begin", job, rate }), then receive({ do: "hear", job, samples, rate }) any number of times, then
//   receive({ do: "finish", job }) -> { told: "heard", job, text, seconds, busy, done } after each of the last two
//   receive({ do: "file", job, samples, rate }) -> the same, several times, until `done`
//   receive({ do: "stop" })
//
// text: what is added; seconds: of audio heard so far; busy: of them, in computing.

function makeListener(tell) {
  const pause = makePause(), PIECE = 0.25; // seconds of a file that are heard at once
  let ear, slice, resampler;
  let current = null, seconds = 0, busy = 0; // current: the job

  async function open({ model, program, name, slice: given }) {
    if (!program) throw new Error("this browser has no WebAssembly with SIMD, which the recogniser needs");
    slice = given;
    ear = new WasmRecogniser(new WasmModel(await WasmModel.compile(decode(program)), decode(model), name));
    tell({ told: "ready", name, rate: ear.rate });
  }

  function begin({ job, rate }) {
    current = job;
    seconds = busy = 0;
    resampler = new Resampler(Math.round(rate), ear.rate);
    ear.start();
  }

  function take(samples, done) {
    const begun = now();
    let text = "";
    if (done) text = ear.push(resampler.finish()) + ear.finish();
    else text = ear.push(resampler.push(samples));
    busy += now() - begun;
    return text;
  }

  function hear({ job, samples, rate }) {
    if (job !== current) return;
    seconds += samples.length / rate;
    tell({ told: "heard", job, text: take(samples, false), seconds, busy, done: false });
  }

  function finish({ job }) {
    if (job !== current) return;
    current = null;
    tell({ told: "heard", job, text: take(null, true), seconds, busy, done: true });
  }

  async function file({ job, samples, rate }) {
    begin({ job, rate });
    const step = Math.ceil(PIECE * rate);
    for (let at = 0, ends = now() + slice; at < samples.length; at += step) {
      hear({ job, samples: samples.subarray(at, at + step), rate });
      if (now() < ends) continue;
      await pause();
      if (current !== job) return;
      ends = now() + slice;
    }
    finish({ job });
  }

  return answers({ open, begin, hear, finish, file, stop: () => void (current = null) }, tell);
}
