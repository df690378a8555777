// The clock: play, and step from one start or end to the next. Before each play comes a question.
"use strict";

const SECONDS = 12; // for the whole of it

class Player {
  constructor() {
    Object.assign(this, { time: null, playing: false, guess: null });
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
    if (this.time !== null) this.show(this.time);
  }

  // Of each rank in its own span. (Up to the end of all, ranks with equal work idle alike.)
  get idle() {
    return main.run?.numbers.span.ranks;
  }

  get ended() {
    return this.time === null || this.time >= this.longest;
  }

  setPlaying(playing) {
    this.playing = playing;
    byId("play").textContent = playing ? "Pause" : "Play";
  }

  toggle() {
    if (this.playing) this.setPlaying(false);
    else if (this.ended && byId("question").hidden && this.idle?.length > 1) this.ask();
    else this.start();
  }

  start() {
    byId("question").hidden = true;
    this.setPlaying(true);
    if (this.ended) this.time = 0;
    let before = performance.now();
    const frame = (now) => {
      if (!this.playing) return;
      this.show(this.time + ((now - before) / 1000 / SECONDS) * this.longest);
      before = now;
      if (this.ended) this.finish();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  ask() {
    const asker = document.activeElement ?? byId("play");
    const answers = this.idle.map((_, rank) => [`rank ${rank}`, rank]);
    const buttons = [...answers, ["all alike", "alike"], ["just play", null]].map(([textContent, guess]) => {
      const onclick = () => {
        this.guess = guess;
        asker.focus();
        this.start();
      };
      return el("button", { type: "button", textContent, onclick });
    });
    const text = "First a guess: between its first and its last operation, which rank idles longest?";
    byId("question").replaceChildren(el("p", {}, text), ...buttons);
    byId("question").hidden = false;
    buttons[0].focus();
  }

  finish() {
    this.setPlaying(false);
    if (this.guess === null || !this.idle) return;
    byId("question").replaceChildren(el("p", {}, answerText(this.guess, this.idle)));
    byId("question").hidden = false;
    this.guess = null;
  }

  step(direction) {
    this.setPlaying(false);
    const now = this.time ?? (direction > 0 ? -1 : Infinity);
    const beyond = (time) => (time - now) * direction > 1e-9;
    const next = direction > 0 ? this.times.find(beyond) : this.times.findLast(beyond);
    if (next !== undefined) this.show(next);
  }

  reset() {
    this.setPlaying(false);
    this.time = this.guess = null;
    byId("question").hidden = true;
    byId("clock").value = 1000;
    panes.forEach((pane) => pane.draw(null));
  }

  show(time) {
    this.time = Math.min(time, this.longest);
    byId("clock").value = this.longest ? (1000 * this.time) / this.longest : 0;
    panes.forEach((pane) => pane.draw(this.time));
  }
}

// idle: by rank. A rank that shares the first place is right, too.
function answerText(guess, idle) {
  const most = Math.max(...idle);
  const first = range(idle.length).filter((rank) => idle[rank] > most - 1e-9);
  const alike = first.length === idle.length;
  const right = alike ? guess === "alike" : first.includes(guess);
  const others = first.slice(0, -1).join(", ");
  const some = others ? `ranks ${others} and ${first.at(-1)} idle` : `rank ${first[0]} idles`;
  const who = alike ? "all ranks idle alike" : `${some} longest`;
  return `${right ? "Right" : "No"}: ${who}, for ${shortNumber(most)}. By rank: ` +
    `${idle.map(shortNumber).join(", ")}.`;
}
