// What the programs of all pages share.

function decode(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), found = new Uint8Array(text.length);
  for (let i = 0; i < text.length; ++i) found[i] = text.charCodeAt(i);
  return found;
}

const now = () => performance.now() / 1000;

// A function that lets messages and frames in between: a message channel is not slowed down as timers are.
function makePause() {
  const channel = new MessageChannel(), waiting = [];
  channel.port1.onmessage = () => waiting.shift()();
  return () => new Promise((go) => (waiting.push(go), channel.port2.postMessage(0)));
}

// Does what messages ask for, by `do`, and tells of what goes wrong.
const answers = (verbs, tell) => async (message) => {
  try {
    await verbs[message.do](message);
  } catch (error) {
    tell({ told: "failed", do: message.do, job: message.job, reason: error.message });
  }
};
