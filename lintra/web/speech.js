"use strict";
// What the visitor says and reads; the text comes from hearing.js.
(() => {
  const about = JSON.parse($("about").textContent);
  const heard = {};
  let program; // what the worker runs, or this thread
  const ask = (message) => program.ask(message);
  let ready = false, job = 0, running = 0, rate = 0; // running: the job, 0: none; rate: of the model, Hz
  let stopped = 0; // the job that Stop was pressed for
  const finishing = () => running > 0 && stopped === running; // what was heard before is still being recognised
  let microphone = null; // { stream, context, begun } while it is open; begun: its sound is heard
  let line = null; // the paragraph of what is being said

  function say(text, wrong = false) {
    $("status").textContent = text;
    $("status").classList.toggle("wrong", wrong);
  }

  function label() {
    $("go").textContent = finishing() ? "Finishing…" : running ? "Stop" : "Start listening";
    $("go").disabled = !ready;
    $("go").setAttribute("aria-disabled", finishing()); // it keeps the keyboard's focus
    $("file").disabled = !ready || Boolean(running);
    $("file-label").classList.toggle("off", $("file").disabled);
    $("hint").hidden = Boolean($("text").textContent);
  }

  heard.ready = ({ name, rate: its }) => {
    $("engine").textContent = `in ${name}`;
    $("how").textContent = `It runs in ${name}, ${program.place}.`;
    rate = its;
    ready = true;
    label();
    say("Ready.");
  };

  heard.failed = ({ do: what, reason }) => {
    close();
    ready = what !== undefined && what !== "open"; // else there is no model, or no worker any more
    running = 0;
    label();
    say(`This does not work here: ${reason}.`, true);
  };

  heard.heard = ({ job, text, seconds, busy, done }) => {
    if (job !== running) return;
    if (text) {
      line ??= $("text").appendChild(document.createElement("p"));
      line.append(text);
      $("sheet").scrollTop = $("sheet").scrollHeight;
    }
    if (busy) $("speed").textContent = number.format(seconds / busy);
    const cache = Math.ceil(seconds / about.step_seconds) * about.cache_bytes;
    $("cache").textContent = size(cache);
    $("cache-told").textContent = `what a key-value cache of softmax would hold after ${seconds.toFixed(1)} s`;
    if (done) {
      running = 0;
      const heard = line ? `Finished: ${seconds.toFixed(1)} s were heard.` : `Nothing was recognised in ${seconds.toFixed(1)} s.`;
      say(cause + heard);
    }
    if (text || done) label();
  };

  function begin() {
    running = ++job;
    line = null;
    quietSince = null;
    cause = "";
    return running;
  }

  // The microphone.
  const REASONS = {
    NotAllowedError: "The microphone was refused: allow it to this page in the browser, or choose a recording.",
    SecurityError: "The browser's settings forbid pages the microphone: choose a recording.",
    NotFoundError: "There is no microphone: connect one, or choose a recording.",
    NotReadableError: "The microphone cannot be had: another program may be using it. Close that, or choose a recording.",
  };
  const NO_DEVICES =
    "The browser gives this page no microphone: open it at https:, at localhost or from a file, or choose a recording.";
  const QUIET = 5, SILENCE = 1e-9; // seconds that are worth a word, of a power that no open microphone has
  let quietSince = null;
  let cause = ""; // why it ended, where the visitor did not ask for that

  async function listen() {
    if (!navigator.mediaDevices?.getUserMedia) return say(NO_DEVICES, true);
    const mine = begin(), opened = { stream: null, context: null, begun: false };
    microphone = opened;
    label();
    say("Asking for the microphone…");
    try {
      opened.context = new AudioContext(); // now, while the browser takes it for the visitor's doing
      // As it is: what cleans up for telephony takes parts of words away, and levels the model has learned.
      const audio = { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false };
      opened.stream = await navigator.mediaDevices.getUserMedia({ audio });
      if (running !== mine) return release(opened);
      await opened.context.resume();
      if (running !== mine) return release(opened);
      ask({ do: "begin", job: mine, rate: opened.context.sampleRate });
      await tap(opened, (samples) => {
        if (running !== mine || microphone !== opened) return; // blocks come after Stop, too
        ask({ do: "hear", job: mine, samples, rate: opened.context.sampleRate });
        showLevel(samples);
      });
      if (running !== mine) return release(opened);
      opened.begun = true;
      opened.context.onstatechange = () => {
        if (running !== mine || microphone !== opened) return;
        if (opened.context.state === "running") say("Listening: speak.");
        else say("The browser has paused the sound: press Stop, then start again.", true);
      };
      for (const track of opened.stream.getTracks())
        track.onended = () => {
          if (running !== mine) return;
          cause = "The microphone was disconnected. ";
          end(cause);
        };
      say("Listening: speak.");
    } catch (error) {
      release(opened);
      if (running !== mine) return;
      running = 0;
      microphone = null;
      ask({ do: "stop" });
      label();
      say(REASONS[error.name] ?? `The microphone does not work here: ${error.message || error.name}.`, true);
    }
  }

  // Hands over what the microphone hears, block by block.
  async function tap({ stream, context }, take) {
    const source = context.createMediaStreamSource(stream);
    let node;
    try {
      // Not a blob's address: to a page from a file that is of another origin.
      await context.audioWorklet.addModule(`data:text/javascript,${encodeURIComponent($("tap").textContent)}`);
      node = new AudioWorkletNode(context, "tap", { channelCount: 1, channelCountMode: "explicit" });
      node.port.onmessage = ({ data }) => take(data);
    } catch {
      node = context.createScriptProcessor(2048, 1, 1); // of older browsers
      node.onaudioprocess = ({ inputBuffer }) => take(inputBuffer.getChannelData(0).slice());
    }
    source.connect(node);
    node.connect(context.destination); // it outputs silence, and must be connected to run
  }

  function release({ stream, context }) {
    for (const track of stream?.getTracks() ?? []) track.stop();
    if (context && context.state !== "closed") context.close();
  }

  function close() {
    if (microphone) release(microphone);
    microphone = null;
    showLevel(null);
  }

  function end(told) {
    const begun = microphone?.begun; // else the browser still asks or starts, or it is a recording
    close();
    if (!begun) {
      ask({ do: "stop" });
      running = 0;
      label();
      return say("Stopped.");
    }
    stopped = running;
    label();
    say(told);
    ask({ do: "finish", job: running });
  }

  // samples: a block of them; null: nothing is heard any more.
  function showLevel(samples) {
    const power = samples ? samples.reduce((sum, x) => sum + x * x, 0) / samples.length : 0;
    const decibels = Math.max(-60, 10 * Math.log10(power + 1e-12));
    $("level").value = 1 + decibels / 60;
    $("level-told").textContent = samples ? `${whole.format(decibels)} dB` : "";
    if (!samples) return;
    if (power > SILENCE) {
      if (quietSince === Infinity) say("Listening: speak.");
      quietSince = null;
    } else if (quietSince === null) quietSince = performance.now();
    else if (performance.now() - quietSince > 1000 * QUIET) {
      quietSince = Infinity; // once
      say("Listening, but the microphone gives silence: is it muted?");
    }
  }

  $("go").addEventListener("click", () => {
    if (finishing()) return; // the last words are still to come
    if (running) end("Finishing…");
    else listen();
  });

  // Recordings.
  async function read(file) {
    if (!ready || running || !file) return;
    const mine = begin();
    label();
    say(`Reading ${file.name}…`);
    try {
      const content = await file.arrayBuffer();
      // Decoded at the rate of the model where browsers can: what has that rate then stays as it is.
      const context = new OfflineAudioContext(1, 1, Math.max(8000, rate));
      const decoded = await context.decodeAudioData(content).catch(() => {
        throw new Error("it is not audio that this browser reads");
      });
      if (running !== mine) return;
      const samples = new Float32Array(decoded.length), channels = decoded.numberOfChannels;
      for (let i = 0; i < channels; ++i)
        decoded.getChannelData(i).forEach((x, at) => void (samples[at] += x / channels));
      say(`Hearing ${file.name}, ${decoded.duration.toFixed(1)} s…`);
      ask({ do: "file", job: mine, samples, rate: decoded.sampleRate });
    } catch (error) {
      if (running !== mine) return;
      running = 0;
      label();
      say(`${file.name} cannot be heard: ${error.message}.`, true);
    }
  }

  $("file").addEventListener("change", () => {
    read($("file").files[0]);
    $("file").value = ""; // so that the same one may be chosen again
  });
  addEventListener("dragover", (event) => {
    event.preventDefault();
    $("sheet").classList.toggle("over", ready && !running);
  });
  addEventListener("dragleave", () => $("sheet").classList.remove("over"));
  addEventListener("drop", (event) => {
    event.preventDefault(); // else the browser would leave the page for it
    $("sheet").classList.remove("over");
    if (running) say("Stop first: one thing is heard at a time.");
    else if (!ready) say("The model is not ready yet: drop the recording again in a moment.");
    else read(event.dataTransfer.files[0]);
  });
  $("clear").addEventListener("click", () => {
    $("text").replaceChildren();
    line = null;
    label();
    if (!running) say("The text is empty.");
  });

  $("state").textContent = size(about.state_bytes);
  showLevel(null);
  label();
  program = connect("makeListener", heard, {});
})();
