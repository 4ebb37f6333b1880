// A recogniser in the runtime (lintra/runtime/lintra_audio.h): samples in, text out.

class WasmRecogniser {
  // model: a WasmModel. Raises Error where it reads no audio.
  constructor(model) {
    const { lrt, at } = model, config = lrt.lrt_features_of(at);
    if (!config) throw new Error("the model reads no audio");
    const [rate, bins] = new Uint32Array(lrt.memory.buffer, config, 2);
    Object.assign(this, { model, lrt, config, rate, frameBytes: 4 * bins });
    this.group = lrt.lrt_fact(at, 11); // LRT_SUBSAMPLE
    this.space = lrt.lrt_fact(at, 12) ? " " : ""; // LRT_SPACED
    this.featureBytes = lrt.lrt_features_size(config);
    this.features = model.room(this.featureBytes);
    this.samples = model.room(4 * WasmRecogniser.SAMPLES);
    this.frames = model.room(this.group * this.frameBytes);
    this.sequence = model.sequence();
    this.start();
  }

  static SAMPLES = 4096; // handed over at once

  // Before any sample.
  start() {
    this.model.check(this.lrt.lrt_features_start(this.features, this.featureBytes, this.config));
    this.sequence.start();
    this.waiting = 0; // frames that a group is not full of yet
    this.said = false;
  }

  // Samples at `rate`, in [-1, 1] -> the text that they add, which is often none.
  push(samples) {
    const { lrt, model } = this;
    let text = "";
    for (let from = 0; from < samples.length; from += WasmRecogniser.SAMPLES) {
      const part = samples.subarray(from, from + WasmRecogniser.SAMPLES);
      new Float32Array(lrt.memory.buffer, this.samples, part.length).set(part);
      for (let done = 0; done < part.length; ) {
        done += model.check(lrt.lrt_features_push(this.features, this.samples + 4 * done, part.length - done));
        const frame = lrt.lrt_features_frame(this.features);
        if (frame) text += this.take(frame);
      }
    }
    return text;
  }

  // The text that the last frames add; then comes `start`.
  finish() {
    return this.waiting ? this.read() : "";
  }

  take(frame) {
    const to = this.frames + this.waiting++ * this.frameBytes;
    new Uint8Array(this.lrt.memory.buffer).copyWithin(to, frame, frame + this.frameBytes);
    return this.waiting === this.group ? this.read() : "";
  }

  read() {
    const { lrt, model } = this, { at } = this.sequence;
    model.check(lrt.lrt_read(at, this.frames, this.waiting));
    this.waiting = 0;
    const name = lrt.lrt_symbol(model.at, model.check(lrt.lrt_new_symbol(at)));
    if (!name) return "";
    const text = (this.said ? this.space : "") + model.text(name);
    this.said = true;
    return text;
  }
}
