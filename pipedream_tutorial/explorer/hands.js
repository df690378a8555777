// Handle pointer, touch and keyboard input on a timeline: focus an operation, or drag it within its
// rank. Also control the clock: play, and step from one start or end to the next.
"use strict";

const LONG_PRESS_MS = 450;

function attachHands(pane, editable) {
  const { chart } = pane;
  // {place, x, y, held}; a finger holds an operation after it has rested for a while.
  let pressed = null;
  let tapped = false; // after a tap, show its menu later, because the tap would hit it

  const under = ({ target }) => {
    const [rank, index] = target.dataset?.at?.split(".").map(Number) ?? [];
    return rank === undefined ? null : { rank, index };
  };
  const letGo = () => {
    clearTimeout(pressed?.timer);
    pressed = null;
  };

  chart.addEventListener("pointermove", (event) => {
    const { clientX: x, clientY: y } = event;
    if (pressed?.held) {
      if (!pane.drag && Math.abs(x - pressed.x) < 5) return;
      const { rank, index } = pressed.place;
      const others = pane.run.timeline.lines[rank].toSpliced(index, 1);
      const dragged = x - chart.getBoundingClientRect().left;
      const before = others.filter(({ start, end }) => toX(pane, (start + end) / 2) < dragged);
      return aim(pane, pressed.place, before.length);
    }
    if (pressed && Math.hypot(x - pressed.x, y - pressed.y) > 8) letGo();
    const place = event.pointerType === "touch" ? null : under(event);
    chart.style.cursor = place && editable ? "grab" : "default";
    if (place && (place.rank !== pane.focus?.rank || place.index !== pane.focus.index)) focus(pane, place);
  });
  chart.addEventListener("pointerdown", (event) => {
    letGo();
    const place = under(event);
    tapped = event.pointerType === "touch";
    if (!tapped) focus(pane, place);
    if (!place || !editable || event.button) return;
    pressed = { place, x: event.clientX, y: event.clientY, held: false };
    const pickUp = () => {
      pressed.held = true;
      chart.setPointerCapture(event.pointerId);
    };
    if (!tapped) return pickUp();
    pressed.timer = setTimeout(() => {
      tapped = false;
      pickUp();
      focus(pane, place);
      aim(pane, place, place.index);
      say("You have picked up the operation. Drag it along its rank.", "same");
    }, LONG_PRESS_MS);
  });
  chart.addEventListener("pointerup", () => {
    letGo();
    if (pane.drag) drop(pane);
  });
  chart.addEventListener("click", (event) => {
    if (tapped) focus(pane, under(event));
  });
  chart.addEventListener("pointercancel", () => {
    letGo();
    pane.drag = null;
    pane.draw();
  });
  // A finger that holds an operation does not scroll the page or open a menu.
  chart.addEventListener("touchmove", (event) => pressed?.held && event.preventDefault(), { passive: false });
  chart.addEventListener("contextmenu", (event) => pressed && event.preventDefault());
  chart.addEventListener("keydown", (event) => {
    const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
    if (pane.run && plain && onKey(pane, event, editable)) event.preventDefault();
  });
}

function focus(pane, place) {
  pane.focus = place;
  showFocus(pane);
}

// Describe the effect of a move, and show its target.
function aim(pane, { rank, index }, to) {
  if (pane.drag?.to === to) return;
  const move = { rank, from: index, to };
  const here = { verdict: "same", text: "The operation is here now." };
  const judged = to === index ? here : judge(pane.run.timeline, move, pane.chosen.K || Infinity);
  pane.drag = { ...move, ...judged };
  say(judged.text, judged.verdict);
  pane.draw();
}

function drop(pane) {
  const { rank, from, to, verdict, text } = pane.drag;
  pane.drag = null;
  if (to === from || verdict === "illegal") return showFocus(pane);
  pane.focus = { rank, index: to };
  store.change({ moves: [...store.chosen.moves, { rank, from, to }] });
  say(text, verdict);
}

// Move the operation in focus by `by` positions or to the end.
function move(by) {
  const { rank, index } = main.focus;
  const last = main.run.timeline.lines[rank].length - 1;
  const to = Math.max(0, Math.min(last, index + by));
  if (to === index) return;
  aim(main, main.focus, to);
  drop(main);
}

// Handle a key, and return whether it has a meaning. With Shift, the arrows move the operation;
// otherwise they move the focus.
function onKey(pane, { key, shiftKey }, editable) {
  const { lines } = pane.run.timeline;
  const along = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[key];
  const across = { ArrowUp: -1, ArrowDown: 1 }[key];
  const playing = { " ": () => player.toggle(), ".": () => player.step(1), ",": () => player.step(-1) }[key];
  if (playing) {
    playing();
  } else if (key === "Escape" && pane.focus) {
    pane.drag = null;
    focus(pane, null);
  } else if ((along || across) && !pane.focus) {
    focus(pane, { rank: lines.findIndex((line) => line.length), index: 0 });
  } else if (along && shiftKey) {
    if (editable) move(along);
  } else if (along) {
    const { rank, index } = pane.focus;
    focus(pane, { rank, index: Math.max(0, Math.min(lines[rank].length - 1, index + along)) });
  } else if (across) {
    focus(pane, neighbor(pane, across));
  } else {
    return false;
  }
  if (pane.focus && !playing) pane.reveal();
  return true;
}

// Return the cell on the next rank whose start is nearest in time. Return the cell in focus if there
// is no next rank.
function neighbor(pane, step) {
  const cell = focused(pane);
  const distance = ({ start }) => Math.abs(start - cell.start);
  const others = pane.run.timeline.lines[cell.rank + step] ?? [];
  return others.reduce((best, other) => (distance(other) < distance(best) ? other : best), others[0] ?? cell);
}

const SECONDS = 12; // duration of the whole timeline

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

  // Idle time of each rank within its own span. (Measured until all ranks have ended, ranks with
  // equal work idle equally.)
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
    const buttons = [...answers, ["all equally long", "alike"], ["skip the question", null]].map(([textContent, guess]) => {
      const onclick = () => {
        this.guess = guess;
        asker.focus();
        this.start();
      };
      return el("button", { type: "button", textContent, onclick });
    });
    const text = "Before you play, guess: which rank idles longest between its first and its last operation?";
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

// idle: by rank. If several ranks idle longest, each of them is a right answer.
function answerText(guess, idle) {
  const most = Math.max(...idle);
  const first = range(idle.length).filter((rank) => idle[rank] > most - 1e-9);
  const alike = first.length === idle.length;
  const right = alike ? guess === "alike" : first.includes(guess);
  const others = first.slice(0, -1).join(", ");
  const some = others ? `ranks ${others} and ${first.at(-1)} idle` : `rank ${first[0]} idles`;
  const who = alike ? "all ranks idle equally long" : `${some} longest`;
  return `${right ? "Right" : "No"}: ${who}, for ${shortNumber(most)}. By rank: ` +
    `${idle.map(shortNumber).join(", ")}.`;
}
