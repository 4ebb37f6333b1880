// What every page does: show numbers, and run its program in a worker or, without one, in slices on this thread.

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const size = (bytes) => {
  const power = Math.min(2, Math.floor(Math.log2(bytes || 1) / 10));
  return `${number.format(bytes / 1024 ** power)} ${["B", "KiB", "MiB"][power]}`;
};

const WASM = { "wasm-relaxed": "WebAssembly with relaxed SIMD", wasm: "WebAssembly with SIMD" };

function runs(id) {
  try {
    return WebAssembly.validate(Uint8Array.from(atob($(id).textContent), (letter) => letter.charCodeAt(0)));
  } catch {
    return false; // there is no WebAssembly at all
  }
}

// make: the name of the program's function; heard: what is done with its messages, by `told`; options: what it is opened
// with beside the model. Returns { ask, place }: what takes messages to it, and where it runs, in words.
function connect(make, heard, options) {
  const tell = (message) => heard[message.told](message), link = {};
  const open = (where, slice) => {
    link.place = where;
    const chosen = Object.keys(WASM).find(runs), program = chosen ? $(chosen).textContent : null;
    link.ask({ do: "open", model: $("model-file").textContent, program, name: WASM[chosen], slice, ...options });
  };
  const here = () => {
    link.ask = globalThis[make]((message) => queueMicrotask(() => tell(message))); // as a worker: not before this returns
    open("in slices beside the page's other work", 0.008);
  };
  let answered = false;
  try {
    const parts = [$("program").textContent, `const receive = ${make}((message) => postMessage(message));`];
    const source = new Blob([...parts, "onmessage = ({ data }) => receive(data);"], { type: "text/javascript" });
    const worker = new Worker(URL.createObjectURL(source));
    worker.onmessage = ({ data }) => {
      answered = true;
      tell(data);
    };
    worker.onerror = (event) => {
      event.preventDefault();
      if (answered) return heard.failed({ reason: `the worker has stopped: ${event.message}` });
      worker.terminate();
      here();
    };
    link.ask = (message) => worker.postMessage(message);
    open("in a worker", 0.025);
  } catch {
    here();
  }
  return link;
}
