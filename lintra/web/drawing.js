// What the page asks for, in a worker, or in slices between its other work where there are none.
//
//   receive({ do: "open", model, program, name, slice, length }) -> { told: "ready", ... }
//   receive({ do: "draw", job, given, count, seed, temperature, pace }) -> { told: "drawn", job, ... } until `done`
//   receive({ do: "race", job, again, seed, temperature }) -> { told: "raced", job, ... } until `done`
//   receive({ do: "pace", pace }), receive({ do: "stop", what: "draw" | "race" })
//
// Images that are drawn together take turns value by value. pace: values a second and image, 0 as fast as it goes.

const CHUNK = 16; // tokens of a beginning that are read before others may have their turn

function makeStudio(tell) {
  let model, plain, bytes, length, slice;
  let pace = 0;
  const current = { draw: null, race: null }; // the job that each is about

  const pause = makePause();
  const sleep = (seconds) => new Promise((go) => setTimeout(go, 1000 * seconds));

  async function open(message) {
    ({ length, slice } = message);
    bytes = decode(message.model);
    const { program, name } = message;
    const lrt = program && (await WasmModel.compile(decode(program)).catch(() => null)); // it may be forbidden
    model = lrt ? new WasmModel(lrt, bytes, name) : new PlainModel(bytes);
    plain = lrt ? null : model;
    tell({ told: "ready", name: model.name });
  }

  // Reads the given part once: its state is copied to the other sequences, however long it was.
  async function prepare(sequences, read, seed, still) {
    const last = read.length - 1;
    for (let at = 0, ends = now() + slice; at < last; at += CHUNK) {
      sequences[0].read(read.slice(at, Math.min(at + CHUNK, last)));
      if (now() < ends) continue;
      await pause();
      if (!still()) return;
      ends = now() + slice;
    }
    const state = sequences[0].save();
    sequences.forEach((sequence, i) => {
      if (i) sequence.load(state);
      sequence.seed(seed, i);
      sequence.step(read[last]);
    });
  }

  // The next value of every image.
  function advance(sequences, temperature, last) {
    return sequences.map((sequence) => {
      const value = sequence.sample(temperature);
      if (!last) sequence.step(value);
      return value;
    });
  }

  async function draw({ job, given, count, seed, temperature }) {
    const { start } = model, still = () => current.draw === job;
    const known = given.length || start >= 0 ? given : [0]; // a model without a start symbol wants a first value
    const sequences = [];
    try {
      while (sequences.length < count) sequences.push(model.sequence());
      await prepare(sequences, start >= 0 ? [start, ...known] : known, seed, still);
      let sent = given.length, fresh = sequences.map(() => known.slice(sent)), busy = 0, steps = 0;
      let ends = now() + slice, paced = { pace, since: now(), from: known.length };
      for (let at = known.length; at < length && still(); ++at) {
        const begun = now(), last = at + 1 === length;
        advance(sequences, temperature, last).forEach((value, i) => fresh[i].push(value));
        busy += now() - begun;
        steps += count;
        const early = pace ? (at + 1 - paced.from) / pace - (now() - paced.since) : 0;
        if (now() < ends && early <= 0 && !last) continue;
        tell({ told: "drawn", job, from: sent, values: fresh, speed: steps / busy, done: last });
        sent = at + 1;
        fresh = sequences.map(() => []);
        await (early > 0 ? sleep(early) : pause());
        if (pace !== paced.pace) paced = { pace, since: now(), from: at + 1 };
        ends = now() + slice;
      }
    } finally {
      sequences.forEach((sequence) => model.release(sequence));
    }
  }

  // One value after the other; yields after every token that is read, the value if it was drawn.
  function* runner(sequence, again, { seed, temperature }) {
    const { start } = model, read = [start >= 0 ? start : 0];
    sequence.seed(seed, 0);
    for (let left = length - (start < 0 ? 1 : 0); left; --left) {
      if (again) {
        sequence.start();
        for (const token of read.slice(0, -1)) {
          sequence.step(token, false);
          yield;
        }
      }
      sequence.step(read[read.length - 1]);
      const value = sequence.sample(temperature);
      read.push(value);
      yield value;
    }
  }

  // Linear attention and softmax in the same program with the same weights, in slices of equal length.
  async function race({ job, again, ...options }) {
    plain ??= new PlainModel(bytes);
    const runners = [
      runner(plain.sequence(length), false, options),
      runner(plain.softmaxSequence(length), again, options),
    ].map((steps) => ({ steps, busy: 0, done: false }));
    while (runners.some(({ done }) => !done)) {
      for (const [i, each] of runners.entries()) {
        const values = [], seconds = [], ends = now() + slice;
        while (!each.done && now() < ends) {
          const begun = now(), { value, done } = each.steps.next();
          each.busy += now() - begun;
          each.done = done;
          if (value !== undefined) {
            values.push(value);
            seconds.push(each.busy);
            each.busy = 0;
          }
        }
        if (seconds.length || each.done) tell({ told: "raced", job, which: i, values, seconds, done: each.done });
        await pause();
        if (current.race !== job) return;
      }
    }
  }

  const takes = (what, work) => async (message) => {
    current[what] = message.job;
    if (message.pace !== undefined) pace = message.pace;
    await work(message);
  };
  const verbs = {
    open,
    draw: takes("draw", draw),
    race: takes("race", race),
    pace: (message) => void (pace = message.pace),
    stop: ({ what }) => void (current[what] = null),
  };
  return answers(verbs, tell);
}
