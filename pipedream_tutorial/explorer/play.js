// The clock: play, and step from one start or end to the next.
"use strict";

const SECONDS = 12; // for the whole of it

class Player {
  // draw(time): null shows everything.
  constructor(draw) {
    this.drawAt = draw;
    this.time = null;
    this.playing = false;
    byId("play").onclick = () => this.toggle();
    byId("forward").onclick = () => this.step(1);
    byId("back").onclick = () => this.step(-1);
    byId("all").onclick = () => this.reset();
    byId("clock").oninput = () => this.show((byId("clock").value / 1000) * this.longest);
  }

  // times: all starts and ends, in units.
  setTimes(times) {
    this.times = [...new Set(times)].sort((a, b) => a - b);
    this.longest = this.times.at(-1) ?? 0;
    if (this.time !== null) this.show(Math.min(this.time, this.longest));
  }

  toggle() {
    this.playing = !this.playing;
    byId("play").textContent = this.playing ? "Pause" : "Play";
    if (!this.playing) return;
    if (this.time === null || this.time >= this.longest) this.time = 0;
    let before = performance.now();
    const frame = (now) => {
      if (!this.playing) return;
      this.show(this.time + ((now - before) / 1000 / SECONDS) * this.longest);
      before = now;
      if (this.time >= this.longest) this.toggle();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  step(direction) {
    if (this.playing) this.toggle();
    const now = this.time ?? (direction > 0 ? -1 : Infinity);
    const next =
      direction > 0
        ? this.times.find((time) => time > now + 1e-9)
        : this.times.findLast((time) => time < now - 1e-9);
    if (next !== undefined) this.show(next);
  }

  reset() {
    if (this.playing) this.toggle();
    this.time = null;
    byId("clock").value = 1000;
    this.drawAt(null);
  }

  show(time) {
    this.time = Math.min(time, this.longest);
    byId("clock").value = this.longest ? (1000 * this.time) / this.longest : 0;
    this.drawAt(this.time);
  }
}
