// The clock: play, and step from one start or end to the next. Before each play comes a question.
"use strict";

const SECONDS = 12; // for the whole of it

class Player {
  // draw(time): null shows everything. idle(): of each rank in its own span, or null where there is
  // no timeline. (Up to the end of all, ranks with equal work idle alike.)
  constructor(draw, idle) {
    this.drawAt = draw;
    this.idle = idle;
    this.time = null;
    this.playing = false;
    this.guess = null;
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
    if (this.playing) return this.pause();
    const atStart = this.time === null || this.time >= this.longest;
    if (atStart && byId("question").hidden) this.ask();
    else this.start();
  }

  pause() {
    this.playing = false;
    byId("play").textContent = "Play";
  }

  start() {
    byId("question").hidden = true;
    this.playing = true;
    byId("play").textContent = "Pause";
    if (this.time === null || this.time >= this.longest) this.time = 0;
    let before = performance.now();
    const frame = (now) => {
      if (!this.playing) return;
      this.show(this.time + ((now - before) / 1000 / SECONDS) * this.longest);
      before = now;
      if (this.time >= this.longest) this.finish();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  ask() {
    this.guess = null;
    this.asker = document.activeElement ?? byId("play");
    const idle = this.idle();
    if (!idle || idle.length === 1) return this.start();
    const answer = (text, guess) =>
      el("button", { type: "button", textContent: text, onclick: () => this.answered(guess) });
    const buttons = idle.map((_, rank) => answer(`rank ${rank}`, rank));
    byId("question").replaceChildren(
      el("p", {}, "First a guess: between its first and its last operation, which rank idles longest?"),
      ...buttons, answer("all alike", "alike"), answer("just play", null),
    );
    byId("question").hidden = false;
    buttons[0].focus();
  }

  answered(guess) {
    this.guess = guess;
    this.asker.focus();
    this.start();
  }

  finish() {
    this.pause();
    const idle = this.idle();
    if (this.guess === null || !idle) return;
    byId("question").replaceChildren(el("p", {}, verdictOf(this.guess, idle)));
    byId("question").hidden = false;
    this.guess = null;
  }

  step(direction) {
    this.pause();
    const now = this.time ?? (direction > 0 ? -1 : Infinity);
    const next =
      direction > 0
        ? this.times.find((time) => time > now + 1e-9)
        : this.times.findLast((time) => time < now - 1e-9);
    if (next !== undefined) this.show(next);
  }

  reset() {
    this.pause();
    this.guess = null;
    byId("question").hidden = true;
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

// idle: exact, by rank. A rank that shares the first place is right, too.
function verdictOf(guess, idle) {
  const most = largest(idle);
  const first = idle.flatMap((time, rank) => (time.compare(most) ? [] : [rank]));
  const alike = first.length === idle.length;
  const right = alike ? guess === "alike" : first.includes(guess);
  const time = shortNumber(most.toNumber());
  const others = first.slice(0, -1).join(", ");
  const some = others ? `ranks ${others} and ${first.at(-1)} idle` : `rank ${first[0]} idles`;
  const who = alike ? "all ranks idle alike" : `${some} longest`;
  return `${right ? "Right" : "No"}: ${who}, for ${time}. By rank: ` +
    `${idle.map((own) => shortNumber(own.toNumber())).join(", ")}.`;
}
