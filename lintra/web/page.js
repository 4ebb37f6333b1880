"use strict";
// What the visitor sees and does; the numbers come from drawing.js.
(() => {
  const about = JSON.parse($("about").textContent);
  const { width, height, levels } = about, length = width * height;
  const PACES = [15, 30, 60, 120, 250, 500, 1000, 2000, 0]; // values a second and image; 0: as fast as it goes
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // An image: its values, and how many of them were given. Ink is opacity, so the paper may have any colour.
  class Picture {
    static all = new Set();

    constructor(canvas) {
      const context = canvas.getContext("2d", { willReadFrequently: true }); // no graphics card for so few pixels
      Object.assign(this, { canvas, context, values: new Uint32Array(length), given: 0 });
      Picture.all.add(this);
    }

    begin(given) {
      this.values.fill(0);
      this.values.set(given);
      this.given = given.length;
      this.show();
    }

    // here: the place that is drawn now, if any.
    show(here = -1) {
      const image = this.context.createImageData(width, height);
      const [ink, accent] = ["--ink", "--accent"].map((name) => parseInt(colour(name).slice(1), 16));
      for (let i = 0; i < length; ++i) {
        const rgb = i < this.given || i === here ? accent : ink;
        const opacity = i === here ? 255 : Math.round((this.values[i] * 255) / (levels - 1));
        image.data.set([rgb >> 16, (rgb >> 8) & 255, rgb & 255, opacity], 4 * i);
      }
      this.context.putImageData(image, 0, 0);
    }
  }

  const heard = {};
  let program; // what the worker runs, or this thread
  const ask = (message) => program.ask(message);

  function say(text, wrong = false) {
    $("status").textContent = text;
    $("status").classList.toggle("wrong", wrong);
  }

  heard.failed = ({ do: what, reason }) => {
    const told = `This does not work here: ${reason}.`;
    if (what === "race") {
      $("race-status").textContent = told;
      return endRace();
    }
    ready = what === "draw"; // else there is no model, or no worker any more
    $("go").disabled = $("race").disabled = !ready;
    if (running) name("stopped");
    running = 0;
    label();
    say(told, true);
  };

  heard.ready = ({ name }) => {
    $("engine").textContent = `in ${name}`;
    $("how").textContent = `It runs in ${name}, ${program.place}.`;
    ready = true;
    $("go").disabled = $("race").disabled = false;
    say("Ready.");
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) draw();
  };

  // The drawing.
  const own = new Picture($("own")), canvas = own.canvas;
  let rows = Number($("rows").value), erasing = false;
  let ready = false;
  const REACH = 1.6; // pixels from the middle of a stroke to where its ink ends

  function setRows(wanted) {
    rows = wanted;
    $("rows").value = rows;
    $("rows-told").textContent = rows;
    $("below").style.top = `${(100 * rows) / height}%`;
    $("hint").style.top = `calc(${(50 * rows) / height}% - 0.8em)`;
    own.values.fill(0, rows * width);
    touched();
  }

  const isEmpty = () => !own.values.some((value) => value > 0);

  function touched() {
    own.given = rows * width;
    own.show();
    $("hint").hidden = !isEmpty();
    label();
  }

  function dot(x, y, erase) {
    for (let row = Math.max(0, Math.floor(y - 2)); row < Math.min(rows, y + 3); ++row) {
      for (let column = Math.max(0, Math.floor(x - 2)); column < Math.min(width, x + 3); ++column) {
        const off = Math.hypot(column + 0.5 - x, row + 0.5 - y), at = row * width + column;
        const ink = Math.round((levels - 1) * Math.min(1, Math.max(0, (REACH - off) / 0.9)));
        if (erase && ink) own.values[at] = 0;
        else if (!erase) own.values[at] = Math.max(own.values[at], ink);
      }
    }
  }

  function stroke([fromX, fromY], [x, y], erase) {
    stop();
    const steps = Math.max(1, Math.ceil(Math.hypot(x - fromX, y - fromY) * 3));
    for (let i = 1; i <= steps; ++i) dot(fromX + ((x - fromX) * i) / steps, fromY + ((y - fromY) * i) / steps, erase);
    touched();
  }

  let pen = null; // { id, at }: the pointer that draws, and where it was last; another finger beside it does not
  const spot = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * width, ((event.clientY - box.top) / box.height) * height];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button || pen) return;
    canvas.setPointerCapture(event.pointerId);
    pen = { id: event.pointerId, at: spot(event) };
    stroke(pen.at, pen.at, erasing);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (event.pointerId !== pen?.id) return;
    const passed = event.getCoalescedEvents ? event.getCoalescedEvents() : [];
    for (const each of passed.length ? passed : [event]) {
      const to = spot(each);
      stroke(pen.at, to, erasing);
      pen.at = to;
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (event.pointerId !== pen?.id || isEmpty()) return;
    draw();
    $("drawn").scrollIntoView({ block: "nearest", behavior: "auto" }); // of a small screen
  });
  canvas.addEventListener("lostpointercapture", (event) => { // after it was lifted, or taken away
    if (event.pointerId === pen?.id) pen = null;
  });

  const cursor = [Math.floor(width / 2), Math.floor(height / 4)];
  const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  function showCursor() {
    const { style } = $("cursor");
    style.left = `${(100 * cursor[0]) / width}%`;
    style.top = `${(100 * cursor[1]) / height}%`;
    style.width = `${100 / width}%`;
    style.height = `${100 / height}%`;
  }
  canvas.addEventListener("keydown", (event) => {
    const move = MOVES[event.key], before = cursor.map((x) => x + 0.5);
    const erase = event.key === "Delete" || event.key === "Backspace";
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Enter") draw();
    else if (move) {
      cursor[0] = Math.min(width - 1, Math.max(0, cursor[0] + move[0]));
      cursor[1] = Math.min(rows - 1, Math.max(0, cursor[1] + move[1]));
      if (event.shiftKey) stroke(before, cursor.map((x) => x + 0.5), erasing);
    } else if (event.key === " ") stroke(before, before, erasing);
    else if (erase) stroke(before, before, true);
    else return;
    event.preventDefault();
    showCursor();
    const ink = own.values[cursor[1] * width + cursor[0]] > levels / 2 ? "ink" : "empty";
    if (event.key !== "Enter") say(`Row ${cursor[1] + 1}, column ${cursor[0] + 1}: ${ink}.`);
  });

  $("rows").addEventListener("input", () => {
    stop();
    setRows(Number($("rows").value));
    cursor[1] = Math.min(cursor[1], rows - 1);
    showCursor();
  });
  $("erase").addEventListener("click", () => {
    erasing = !erasing;
    $("erase").setAttribute("aria-pressed", String(erasing));
  });
  $("clear").addEventListener("click", () => {
    stop();
    own.values.fill(0);
    touched();
    say("The drawing is empty.");
  });

  // Strokes of a few digits, in hundredths of the width and height.
  const EXAMPLES = [
    "34,26 48,20 61,25 62,36 48,46 62,54 64,68 50,78 34,72",
    "64,24 42,24 38,44 54,43 65,54 62,70 46,78 34,72",
    "32,34 37,25 50,21 62,26 63,38 55,50 42,64 33,76 68,75",
    "63,32 52,24 40,29 37,40 46,48 58,43 63,32 61,55 55,78",
    "30,27 68,25 58,46 48,78",
  ];
  let example = 0;
  $("example").hidden = !about.examples;
  $("example").addEventListener("click", () => {
    const pairs = EXAMPLES[example++ % EXAMPLES.length].split(" ").map((pair) => pair.split(",").map(Number));
    const points = pairs.map(([x, y]) => [(x * width) / 100, (y * height) / 100]);
    own.values.fill(0);
    points.slice(1).forEach((point, i) => stroke(points[i], point, false));
    draw();
  });

  // The images of the model.
  let pictures = [], job = 0, running = 0, began = 0; // running: the job, 0: none

  function arrange() {
    const n = Number($("count").value);
    for (const { canvas } of pictures) canvas.parentNode.remove();
    for (const picture of pictures) Picture.all.delete(picture);
    pictures = Array.from({ length: n }, (_, i) => {
      const paper = document.createElement("div"), canvas = document.createElement("canvas");
      paper.className = "paper";
      Object.assign(canvas, { width, height });
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Image ${i + 1} of ${n}`);
      paper.append(canvas);
      $("images").append(paper);
      return new Picture(canvas);
    });
    $("images").style.setProperty("--columns", n === 1 ? 1 : n === 6 ? 3 : 2);
    $("images").style.setProperty("--phone-columns", n === 6 ? 3 : n === 1 ? 2 : n);
  }

  function label() {
    $("go").textContent = isEmpty() ? `Draw ${about.things}` : "Complete it";
    offer($("stop"), running, $("go"));
  }

  // A button that stops something can be pressed while there is something to stop; whoever has the keyboard
  // there goes back to the one that begins.
  function offer(button, works, begin) {
    if (!works && document.activeElement === button) begin.focus({ preventScroll: true });
    button.disabled = !works;
  }

  function stop() {
    if (!running) return;
    ask({ do: "stop", what: "draw" });
    running = 0;
    for (const picture of pictures) picture.show();
    name("stopped");
    label();
    say("Stopped.");
  }

  function draw() {
    if (!ready || !$("controls").reportValidity()) return;
    stop();
    if (pictures.length !== Number($("count").value)) arrange();
    const given = isEmpty() ? [] : [...own.values.slice(0, rows * width)];
    running = ++job;
    began = performance.now();
    for (const picture of pictures) picture.begin(given);
    name("being drawn");
    const what = pictures.length === 1 ? "one image" : `${pictures.length} images`;
    say(given.length ? `Completing your drawing, ${what}…` : `Nothing is drawn: ${what} from the first pixel on…`);
    label();
    ask({ do: "draw", job, given, count: pictures.length, ...settings() });
  }

  heard.drawn = ({ job, from, values, speed, done }) => {
    if (job !== running) return;
    const next = from + values[0].length;
    for (const [i, picture] of pictures.entries()) {
      picture.values.set(values[i], from);
      picture.show(done ? -1 : next);
    }
    if (Number.isFinite(speed)) $("speed").textContent = number.format(speed); // clocks of 0.1 s may see none pass
    remember(next);
    if (!done) return;
    running = 0;
    label();
    name("finished");
    const seconds = number.format((performance.now() - began) / 1000);
    say(`Finished in ${seconds} s${isEmpty() ? ", from nothing. Draw a beginning and they go on from it." : "."}`);
  };

  // For those who do not see them: how far the images are, and where their ink is.
  function name(stage) {
    for (const [i, picture] of pictures.entries()) {
      const ink = stage === "being drawn" ? "" : `: ${describe(picture)}`;
      picture.canvas.setAttribute("aria-label", `Image ${i + 1} of ${pictures.length}, ${stage}${ink}`);
    }
  }

  function describe({ values }) {
    const inked = [...values.keys()].filter((i) => values[i] > levels / 2);
    if (!inked.length) return "no ink";
    const columns = inked.map((i) => i % width), lines = inked.map((i) => Math.floor(i / width));
    const [left, right] = [Math.min(...columns) + 1, Math.max(...columns) + 1];
    const [top, bottom] = [Math.min(...lines) + 1, Math.max(...lines) + 1];
    return `ink in rows ${top} to ${bottom}, columns ${left} to ${right}`;
  }

  const settings = () => ({
    pace: PACES[$("pace").value],
    seed: Number($("seed").value),
    temperature: Number($("temperature").value),
  });
  function showSettings() {
    const { pace, temperature } = settings();
    const told = pace ? `${whole.format(pace)} pixels/s` : "as fast as it can";
    $("pace-told").textContent = told;
    $("pace").setAttribute("aria-valuetext", told);
    $("temperature-told").textContent = temperature === 0 ? "0: the likeliest" : temperature.toFixed(2);
  }
  $("pace").addEventListener("input", () => {
    showSettings();
    if (running) ask({ do: "pace", pace: settings().pace });
  });
  $("temperature").addEventListener("input", showSettings);
  $("count").addEventListener("change", () => {
    stop();
    arrange();
    draw();
  });
  $("other-seed").addEventListener("click", () => {
    $("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % 10000;
    draw();
  });
  $("controls").addEventListener("submit", (event) => {
    event.preventDefault();
    draw();
  });
  $("stop").addEventListener("click", stop);

  // Memory. The curves are known; the drawing's place on them is shown.
  const line = (points) => `M${points.map(([x, y]) => `${x},${y}`).join("L")}`;
  const most = about.cache_bytes * length;
  const [cacheLine, stateLine, hereLine] = $("memory-chart").querySelectorAll("path");
  const state = 100 - (100 * about.state_bytes) / most;
  cacheLine.setAttribute("d", line([[0, 100], [100, 0]]));
  stateLine.setAttribute("d", line([[0, state], [100, state]]));
  $("memory-chart").querySelector(".top span").textContent = `up to ${size(most)}`;
  $("memory-chart").setAttribute(
    "aria-label",
    `The state has ${size(about.state_bytes)} throughout; ` +
      `a key-value cache grows by ${size(about.cache_bytes)} a pixel to ${size(most)}.`,
  );
  $("state").textContent = size(about.state_bytes);
  function remember(values) {
    const cache = values * about.cache_bytes;
    $("cache").textContent = size(cache);
    $("cache-told").textContent = `an image: what a key-value cache would hold at pixel ${whole.format(values)}`;
    hereLine.setAttribute("d", line([[(100 * values) / length, 0], [(100 * values) / length, 100]]));
  }

  // The contrast.
  const racers = [new Picture($("race-0")), new Picture($("race-1"))];
  let racing = 0, times = [[], []], finished = [false, false];

  function endRace() {
    racing = 0;
    offer($("race-stop"), false, $("race"));
  }
  function stopRace() {
    if (!racing) return;
    ask({ do: "stop", what: "race" });
    $("race-status").textContent = "Stopped.";
    endRace();
  }
  $("race-stop").addEventListener("click", stopRace);
  $("race").addEventListener("click", () => {
    if (!$("controls").reportValidity()) return;
    stopRace();
    times = [[], []];
    finished = [false, false];
    for (const picture of racers) picture.begin([]);
    $("race-status").textContent = "Both are drawing.";
    racing = ++job;
    offer($("race-stop"), true);
    const { seed, temperature } = settings();
    ask({ do: "race", job: racing, again: Boolean($("again").value), seed, temperature });
  });
  $("again").addEventListener("change", stopRace);

  heard.raced = ({ job, which, values, seconds, done }) => {
    if (job !== racing) return;
    const picture = racers[which], spent = times[which], offset = about.first;
    picture.values.set(values, offset + spent.length);
    spent.push(...seconds.map((each) => 1000 * each));
    picture.show(done ? -1 : offset + spent.length);
    finished[which] = done;
    const total = spent.reduce((a, b) => a + b, 0) / 1000;
    const told = done ? "finished" : `pixel ${whole.format(spent.length)} of ${whole.format(length)}`;
    const speed = `${number.format(latest(spent))} ms a pixel, ${total.toFixed(1)} s in all`;
    $(`race-told-${which}`).textContent = `${told}, ${speed}`;
    showTimes();
    if (!finished[0] || !finished[1]) return;
    endRace();
    $("race-status").textContent = "Both have finished.";
  };

  // Other programs take their time too: medians of a few pixels tell more than one.
  const FEW = 9;
  const median = (xs) => [...xs].sort((a, b) => a - b)[Math.floor(xs.length / 2)] ?? 0;
  const latest = (spent) => median(spent.slice(-FEW));

  function showTimes() {
    const smooth = times.map((spent) => {
      const points = [];
      for (let i = 0; i < spent.length; i += FEW) {
        const part = spent.slice(i, i + FEW);
        points.push([(100 * (i + part.length / 2)) / length, median(part)]);
      }
      return points;
    });
    const top = Math.max(1, ...smooth.flat().map(([, ms]) => ms)) * 1.05;
    const [softmax, linear] = $("race-chart").querySelectorAll("path");
    const scaled = smooth.map((points) => points.map(([x, ms]) => [x, 100 - (100 * ms) / top]));
    for (const [path, points] of [[linear, scaled[0]], [softmax, scaled[1]]])
      path.setAttribute("d", points.length ? line(points) : "");
    const [a, b] = times.map((spent) => number.format(latest(spent)));
    $("race-chart").querySelector(".top span").textContent = `up to ${number.format(top)} ms a pixel`;
    $("race-chart").setAttribute("aria-label", `Milliseconds a pixel by now: linear ${a}, softmax ${b}`);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const picture of Picture.all) picture.show();
  });
  setRows(rows);
  showCursor();
  showSettings();
  arrange();
  program = connect("makeStudio", heard, { length });
})();
