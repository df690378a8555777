// Pointer, finger and keyboard on a timeline: focus an operation, drag it within its rank.
"use strict";

const LONG_PRESS_MS = 450;

// app: {onFocus(pane), onMove(move, text, verdict), say(text, verdict), move(by), onKey(key)}
function attachHands(pane, app, editable) {
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
      aim(pane, app, pressed.place, placeAt(pane, pressed.place, x - chart.getBoundingClientRect().left));
      return;
    }
    const place = event.pointerType === "touch" ? null : under(event);
    chart.style.cursor = place && editable ? "grab" : "default";
    if (place && (place.rank !== pane.focus?.rank || place.index !== pane.focus.index)) focus(pane, app, place);
  });
  chart.addEventListener("pointerdown", (event) => {
    const place = under(event);
    focus(pane, app, place);
    if (!place || !editable || event.button) return;
    if (event.pointerType !== "touch") return pickUp(event, place);
    const timer = setTimeout(() => {
      letGo();
      pickUp(event, place);
      aim(pane, app, place, place.index);
      app.say("Picked up: drag it along its rank.", "same");
    }, LONG_PRESS_MS);
    waiting = { timer, x: event.clientX, y: event.clientY };
  });
  chart.addEventListener("pointerup", () => {
    letGo();
    if (pane.drag) drop(pane, app);
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
    if (pane.run && plain && onKey(pane, app, event, editable)) event.preventDefault();
  });
}

function focus(pane, app, place) {
  pane.focus = place;
  app.onFocus(pane);
}

// Where an item that is dragged to x would be put among the others of its rank.
function placeAt(pane, { rank, index }, x) {
  const { starts, ends } = pane.run.timeline;
  const middles = starts[rank].map((start, k) => toX(pane, (start + ends[rank][k]) / 2));
  return middles.filter((middle, other) => other !== index && middle < x).length;
}

// Says what a move would do, and shows where it would go.
function aim(pane, app, { rank, index }, to) {
  if (pane.drag?.to === to) return;
  const move = { rank, from: index, to };
  const judged =
    to === index
      ? { verdict: "same", text: "Here it is now." }
      : judge(pane.run.timeline, move, pane.chosen.K || Infinity);
  pane.drag = { ...move, ...judged };
  app.say(judged.text, judged.verdict);
  pane.draw();
}

function drop(pane, app) {
  const { rank, from, to, verdict, text } = pane.drag;
  pane.drag = null;
  if (to === from || verdict === "illegal") return app.onFocus(pane);
  pane.focus = { rank, index: to };
  app.onMove({ rank, from, to }, text, verdict);
}

// Whether the key meant something. With Shift the arrows move the operation, else the focus.
function onKey(pane, app, { key, shiftKey }, editable) {
  const { orders } = pane.run.timeline.schedule;
  const along = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[key];
  const across = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (!along && !across && (key !== "Escape" || !pane.focus)) return app.onKey(key);
  if (key === "Escape") {
    pane.focus = pane.drag = null;
  } else if (!pane.focus) {
    pane.focus = { rank: orders.findIndex((order) => order.length), index: 0 };
  } else if (along && shiftKey) {
    if (editable) app.move(along);
    return true;
  } else if (along) {
    const { rank, index } = pane.focus;
    pane.focus = { rank, index: Math.max(0, Math.min(orders[rank].length - 1, index + along)) };
  } else {
    pane.focus = neighbour(pane.run.timeline, pane.focus, across);
  }
  if (pane.focus) pane.reveal();
  app.onFocus(pane);
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
