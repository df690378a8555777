// Pointer, finger and keyboard on a timeline: focus an operation, drag it within its rank.
"use strict";

const LONG_PRESS_MS = 450;

function attachHands(pane, editable) {
  const { chart } = pane;
  let pressed = null; // {place, x}: what is held
  let waiting = null; // {timer, x, y}: a finger that lies still

  const under = ({ target }) => {
    const [rank, index] = target.dataset?.at?.split(".").map(Number) ?? [];
    return rank === undefined ? null : { rank, index };
  };
  const letGo = () => {
    clearTimeout(waiting?.timer);
    waiting = pressed = null;
  };
  const pickUp = (event, place) => {
    pressed = { place, x: event.clientX };
    chart.setPointerCapture(event.pointerId);
  };

  chart.addEventListener("pointermove", (event) => {
    const { clientX: x, clientY: y } = event;
    if (waiting && Math.hypot(x - waiting.x, y - waiting.y) > 8) letGo();
    if (pressed) {
      if (!pane.drag && Math.abs(x - pressed.x) < 5) return;
      aim(pane, pressed.place, placeAt(pane, pressed.place, x - chart.getBoundingClientRect().left));
      return;
    }
    const place = event.pointerType === "touch" ? null : under(event);
    chart.style.cursor = place && editable ? "grab" : "default";
    if (place && (place.rank !== pane.focus?.rank || place.index !== pane.focus.index)) focus(pane, place);
  });
  chart.addEventListener("pointerdown", (event) => {
    const place = under(event);
    focus(pane, place);
    if (!place || !editable || event.button) return;
    if (event.pointerType !== "touch") return pickUp(event, place);
    const timer = setTimeout(() => {
      letGo();
      pickUp(event, place);
      aim(pane, place, place.index);
      say("Picked up: drag it along its rank.", "same");
    }, LONG_PRESS_MS);
    waiting = { timer, x: event.clientX, y: event.clientY };
  });
  chart.addEventListener("pointerup", () => {
    letGo();
    if (pane.drag) drop(pane);
  });
  chart.addEventListener("pointercancel", () => {
    letGo();
    pane.drag = null;
    pane.draw();
  });
  // A finger that holds an operation neither scrolls the page nor opens a menu.
  chart.addEventListener("touchmove", (event) => pressed && event.preventDefault(), { passive: false });
  chart.addEventListener("contextmenu", (event) => (pressed || waiting) && event.preventDefault());
  chart.addEventListener("keydown", (event) => {
    const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
    if (pane.run && plain && onKey(pane, event, editable)) event.preventDefault();
  });
}

function focus(pane, place) {
  pane.focus = place;
  showFocus(pane);
}

// Where an item that is dragged to x would be put among the others of its rank.
function placeAt(pane, { rank, index }, x) {
  const { starts, ends } = pane.run.timeline;
  const middles = starts[rank].map((start, k) => toX(pane, (start + ends[rank][k]) / 2));
  return middles.filter((middle, other) => other !== index && middle < x).length;
}

// Says what a move would do, and shows where it would go.
function aim(pane, { rank, index }, to) {
  if (pane.drag?.to === to) return;
  const move = { rank, from: index, to };
  const judged =
    to === index
      ? { verdict: "same", text: "Here it is now." }
      : judge(pane.run.timeline, move, pane.chosen.K || Infinity);
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

// Moves the operation in focus, `by` places or to the end.
function move(by) {
  const { rank, index } = main.focus;
  const last = main.run.timeline.schedule.orders[rank].length - 1;
  const to = Math.max(0, Math.min(last, index + by));
  if (to === index) return;
  aim(main, main.focus, to);
  drop(main);
}

// Whether the key meant something. With Shift the arrows move the operation, else the focus.
function onKey(pane, { key, shiftKey }, editable) {
  const { orders } = pane.run.timeline.schedule;
  const along = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[key];
  const across = { ArrowUp: -1, ArrowDown: 1 }[key];
  const playing = { " ": () => player.toggle(), ".": () => player.step(1), ",": () => player.step(-1) }[key];
  if (playing) {
    playing();
  } else if (key === "Escape" && pane.focus) {
    pane.drag = null;
    focus(pane, null);
  } else if ((along || across) && !pane.focus) {
    focus(pane, { rank: orders.findIndex((order) => order.length), index: 0 });
  } else if (along && shiftKey) {
    if (editable) move(along);
  } else if (along) {
    const { rank, index } = pane.focus;
    focus(pane, { rank, index: Math.max(0, Math.min(orders[rank].length - 1, index + along)) });
  } else if (across) {
    focus(pane, neighbour(pane.run.timeline, pane.focus, across));
  } else {
    return false;
  }
  if (pane.focus && !playing) pane.reveal();
  return true;
}

// The item of the next rank that starts nearest in time.
function neighbour(timeline, { rank, index }, step) {
  const other = rank + step;
  if (!timeline.starts[other]?.length) return { rank, index };
  const start = timeline.starts[rank][index];
  const distance = timeline.starts[other].map((time) => Math.abs(time - start));
  return { rank: other, index: distance.indexOf(Math.min(...distance)) };
}
