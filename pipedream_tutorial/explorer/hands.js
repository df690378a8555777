// Pointer, finger and keyboard on a timeline: focus an operation, drag it within its rank.
"use strict";

const LONG_PRESS_MS = 450;

// app: {onFocus(pane), onMove(move, text, verdict), say(text, verdict), busy(), onKey(event)}
function attachHands(pane, app, { editable }) {
  const { canvas } = pane;
  let pressed = null; // {place, x}: what is held
  let waiting = null; // {timer, x, y}: a finger that lies still

  const pointAt = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const under = (event) => {
    if (!pane.run || !pane.layout) return null;
    return itemAt(pane.layout, pane.run.timeline, ...pointAt(event), pane.scroller.scrollLeft);
  };
  const stopWaiting = () => {
    clearTimeout(waiting?.timer);
    waiting = null;
  };
  const pickUp = (event, place) => {
    pressed = { place, x: pointAt(event)[0] };
    canvas.setPointerCapture(event.pointerId);
  };

  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = pointAt(event);
    if (waiting && Math.hypot(x - waiting.x, y - waiting.y) > 8) stopWaiting();
    if (pressed && !app.busy()) {
      if (!pane.drag && Math.abs(x - pressed.x) < 5) return;
      const to = placeFor(pane.layout, pane.run.timeline, pressed.place, x, pane.scroller.scrollLeft);
      aim(pane, app, { rank: pressed.place.rank, from: pressed.place.index, to });
      return;
    }
    const place = event.pointerType === "touch" ? null : under(event);
    canvas.style.cursor = place && editable ? "grab" : "default";
    if (place && (place.rank !== pane.focus?.rank || place.index !== pane.focus.index)) {
      pane.focus = place;
      app.onFocus(pane);
    }
  });
  canvas.addEventListener("pointerdown", (event) => {
    const place = under(event);
    pane.focus = place;
    app.onFocus(pane);
    if (!place || !editable || event.button) return;
    if (event.pointerType !== "touch") return pickUp(event, place);
    const [x, y] = pointAt(event);
    const timer = setTimeout(() => {
      stopWaiting();
      if (app.busy()) return;
      pickUp(event, place);
      aim(pane, app, { rank: place.rank, from: place.index, to: place.index });
      app.say("Picked up: drag it along its rank.", "same");
    }, LONG_PRESS_MS);
    waiting = { timer, x, y };
  });
  canvas.addEventListener("pointerup", () => {
    stopWaiting();
    pressed = null;
    if (pane.drag) drop(pane, app);
  });
  canvas.addEventListener("pointercancel", () => {
    stopWaiting();
    pressed = pane.drag = null;
    pane.draw();
  });
  // A finger that holds an operation neither scrolls the page nor opens a menu.
  canvas.addEventListener("touchmove", (event) => pressed && event.preventDefault(), { passive: false });
  canvas.addEventListener("contextmenu", (event) => (pressed || waiting) && event.preventDefault());
  canvas.addEventListener("keydown", (event) => {
    const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
    if (pane.run && plain && onKey(pane, app, event, editable)) event.preventDefault();
  });
}

// Says what a move would do, and shows where it would go.
function aim(pane, app, move) {
  if (pane.drag && pane.drag.to === move.to) return;
  const judged =
    move.to === move.from
      ? { verdict: "same", text: "Here it is now." }
      : judge(pane.run.timeline, pane.run.costs, move, pane.chosen.K || Infinity);
  pane.drag = { ...move, verdict: judged.verdict, text: judged.text };
  app.say(judged.text, judged.verdict);
  pane.draw();
}

function drop(pane, app) {
  const { rank, from, to, verdict, text } = pane.drag;
  pane.drag = null;
  if (to === from) app.onFocus(pane);
  else if (verdict === "illegal") pane.draw();
  else {
    pane.focus = { rank, index: to };
    app.onMove({ rank, from, to }, text, verdict);
  }
}

function onKey(pane, app, event, editable) {
  const { orders } = pane.run.timeline.schedule;
  if (pane.drag) return onDragKey(pane, app, event, orders);
  const { key } = event;
  if (!pane.focus) {
    if (!key.startsWith("Arrow")) return app.onKey(event);
    pane.focus = { rank: orders.findIndex((order) => order.length), index: 0 };
  } else if (key === "ArrowLeft" || key === "ArrowRight" || key === "Home" || key === "End") {
    const last = orders[pane.focus.rank].length - 1;
    const step = { ArrowLeft: pane.focus.index - 1, ArrowRight: pane.focus.index + 1, Home: 0 };
    const index = Math.min(last, Math.max(0, step[key] ?? last));
    pane.focus = { ...pane.focus, index };
  } else if (key === "ArrowUp" || key === "ArrowDown") {
    pane.focus = neighbour(pane.run.timeline, pane.focus, key === "ArrowUp" ? -1 : 1);
  } else if (key === "Enter" && editable && !app.busy()) {
    const { rank, index } = pane.focus;
    aim(pane, app, { rank, from: index, to: index });
    app.say("Picked up. Left and right move it, Enter puts it down, Escape leaves it.", "same");
    return true;
  } else if (key === "Escape") {
    pane.focus = null;
  } else {
    return app.onKey(event);
  }
  if (pane.focus) pane.reveal();
  app.onFocus(pane);
  return true;
}

function onDragKey(pane, app, event, orders) {
  const { rank, from, to } = pane.drag;
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    const last = orders[rank].length - 1;
    const next = Math.min(last, Math.max(0, to + (event.key === "ArrowLeft" ? -1 : 1)));
    aim(pane, app, { rank, from, to: next });
  } else if (event.key === "Enter") {
    drop(pane, app);
  } else if (event.key === "Escape") {
    pane.drag = null;
    app.onFocus(pane);
  } else {
    return event.key === "ArrowUp" || event.key === "ArrowDown";
  }
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
