// Audio at another rate, in pieces of any size: the sum of sincs in a Kaiser window, at each place between the samples
// that occurs. What is above 0.9 of the lower of the two highest frequencies fades, and is gone at 1, by 80 dB.

const CROSSINGS = 48; // of zero, of a sinc to either side
const STEEPNESS = 8; // beta of the window
const CUTOFF = 0.95;

function bessel(x) { // I0
  let term = 1, sum = 1;
  for (let i = 1; term > 1e-12 * sum; ++i) sum += term *= (x / (2 * i)) ** 2;
  return sum;
}

class Resampler {
  // Hz, whole numbers.
  constructor(from, to) {
    let a = from, b = to;
    while (b) [a, b] = [b, a % b];
    this.up = to / a; // places between two samples that occur
    this.down = from / a; // of these, from one result to the next
    this.cutoff = CUTOFF * Math.min(1, to / from);
    this.half = Math.ceil(CROSSINGS / this.cutoff); // samples to either side
    this.kernels = new Map(); // by the place between two samples; as many are kept as occur, and no more than MOST
    this.start();
  }

  static MOST = 2048;

  start() {
    this.samples = new Float32Array(this.half); // those that are still needed; before the first there is silence
    this.at = 0; // of `samples`, the first under the next result
    this.place = 0;
  }

  kernel(place) {
    let found = this.kernels.get(place);
    if (found) return found;
    const { half, cutoff } = this, top = bessel(STEEPNESS);
    found = Float32Array.from({ length: 2 * half + 1 }, (_, i) => {
      const off = i - half - place / this.up, x = Math.PI * cutoff * off, edge = 1 - (off / (half + 1)) ** 2;
      return cutoff * (x ? Math.sin(x) / x : 1) * (bessel(STEEPNESS * Math.sqrt(Math.max(0, edge))) / top);
    });
    if (this.kernels.size < Resampler.MOST) this.kernels.set(place, found);
    return found;
  }

  // Samples -> those at the other rate that they complete.
  push(samples) {
    if (this.up === this.down) return samples;
    const all = new Float32Array(this.samples.length + samples.length), found = [], reach = 2 * this.half + 1;
    all.set(this.samples);
    all.set(samples, this.samples.length);
    for (; this.at + reach <= all.length; this.place %= this.up) {
      const kernel = this.kernel(this.place);
      let sum = 0;
      for (let i = 0, at = this.at; i < reach; ++i, ++at) sum += kernel[i] * all[at];
      found.push(sum);
      this.place += this.down;
      this.at += Math.floor(this.place / this.up);
    }
    const left = Math.min(this.at, all.length);
    this.samples = all.slice(left);
    this.at -= left;
    return Float32Array.from(found);
  }

  // Those that are left; then it is as if new.
  finish() {
    const found = this.up === this.down ? new Float32Array(0) : this.push(new Float32Array(this.half));
    this.start();
    return found;
  }
}
