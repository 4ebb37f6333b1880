// What the microphone gives, in blocks of a few hundredths of a second: a processor of an AudioWorklet.
registerProcessor("tap", class extends AudioWorkletProcessor {
  constructor() {
    super();
    this.block = new Float32Array(1024);
    this.filled = 0;
  }

  process([[channel]]) {
    if (!channel) return true; // nothing is connected yet
    this.block.set(channel, this.filled); // 128 samples, which divide the block
    this.filled += channel.length;
    if (this.filled >= this.block.length) {
      this.port.postMessage(this.block.slice());
      this.filled = 0;
    }
    return true;
  }
});
