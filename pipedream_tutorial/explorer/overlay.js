// What is drawn over the cells: messages, the critical path, the operation in focus, a drag.
"use strict";

// What drawing needs again and again: places of operations, and messages between ranks.
function buildLinks(timeline) {
  const places = placesOf(timeline.schedule);
  const messages = [];
  const receivers = new Map();
  timeline.schedule.orders.forEach((order, rank) => {
    for (const item of order) {
      for (const op of item.parts) {
        for (const need of timeline.wanted.of(op)) {
          if (!receivers.has(need)) receivers.set(need, []);
          receivers.get(need).push(op.text);
          if (places.get(need).rank !== rank) messages.push([need, op.text]);
        }
      }
    }
  });
  return { places, messages, receivers };
}

function boxOf(view, { rank, index }) {
  const { layout, timeline, scroll } = view;
  const tick = timeline.tick.toNumber();
  const x = toX(layout, timeline.starts[rank][index] * tick, scroll);
  const right = toX(layout, timeline.ends[rank][index] * tick, scroll);
  return { x, right, top: rowTop(layout, rank), height: layout.row };
}

// Arrows from the end of operations that send to the arrival at those on other ranks that receive:
// all lines in one path and all heads in another, as there may be thousands.
function drawArrows(g, view, pairs, head) {
  const { layout, timeline, scroll, links } = view;
  const tick = timeline.tick.toNumber();
  const heads = new Path2D();
  g.beginPath();
  for (const [from, to] of pairs) {
    const [sender, receiver] = [links.places.get(from), links.places.get(to)];
    if (sender.rank === receiver.rank) continue;
    const sent = timeline.ends[sender.rank][sender.index];
    const x0 = toX(layout, sent * tick, scroll);
    const x1 = toX(layout, (sent + timeline.communication) * tick, scroll);
    if (x1 < layout.gutter || x0 > layout.width) continue;
    const down = receiver.rank > sender.rank;
    const y0 = rowTop(layout, sender.rank) + layout.row * (down ? 0.8 : 0.2);
    const y1 = rowTop(layout, receiver.rank) + layout.row * (down ? 0.2 : 0.8);
    g.moveTo(x0, y0);
    g.lineTo(x1, y1);
    const angle = Math.atan2(y1 - y0, x1 - x0);
    heads.moveTo(x1, y1);
    for (const side of [-0.45, 0.45]) {
      heads.lineTo(x1 - head * Math.cos(angle + side), y1 - head * Math.sin(angle + side));
    }
  }
  g.stroke();
  g.fill(heads);
}

function drawMessages(g, view) {
  g.strokeStyle = g.fillStyle = view.theme.ink;
  g.globalAlpha = 0.55;
  g.lineWidth = 1;
  drawArrows(g, view, view.links.messages, view.layout.perUnit > 6 ? 6 : 3);
  g.globalAlpha = 1;
}

function drawPath(g, view, path) {
  g.strokeStyle = view.theme.path;
  g.lineWidth = view.layout.perUnit < 12 ? 1.5 : 3;
  let before = null;
  for (const place of path) {
    const box = boxOf(view, place);
    const middle = box.top + box.height / 2;
    if (before && before.rank !== place.rank) {
      g.beginPath();
      g.moveTo(before.right, before.middle);
      g.lineTo(box.x, middle);
      g.stroke();
    }
    g.strokeRect(box.x + 1.5, box.top + 1.5, Math.max(box.right - box.x - 4, 1), box.height - 3);
    before = { rank: place.rank, right: box.right, middle };
  }
}

// The item in focus, thick; what it waits for and what waits for it, with arrows.
function drawFocus(g, view, place) {
  const { theme, links, timeline } = view;
  const item = timeline.schedule.orders[place.rank][place.index];
  g.strokeStyle = g.fillStyle = theme.accent;
  const texts = item.parts.map((op) => op.text);
  const needed = item.parts.flatMap((op) => timeline.wanted.of(op).map((need) => [need, op.text]));
  for (const [need] of needed) outline(g, boxOf(view, links.places.get(need)), 2);
  drawArrows(g, view, needed, 8);
  g.setLineDash([4, 3]);
  const given = texts.flatMap((text) => (links.receivers.get(text) ?? []).map((to) => [text, to]));
  drawArrows(g, view, given, 8);
  g.setLineDash([]);
  g.strokeStyle = theme.ink;
  outline(g, boxOf(view, place), 3);
}

function outline(g, box, width) {
  g.lineWidth = width;
  g.strokeRect(box.x - 0.5, box.top - 0.5, Math.max(2, box.right - box.x), box.height + 1);
}

// Where a dragged item would go, and whether it may.
function drawDrag(g, view, drag) {
  const { layout, timeline, theme, scroll } = view;
  const { rank, from, to, verdict } = drag;
  const others = timeline.starts[rank].map((_, k) => k).filter((k) => k !== from);
  const before = others[to - 1];
  const tick = timeline.tick.toNumber();
  const time = before === undefined ? 0 : timeline.ends[rank][before] * tick;
  const x = toX(layout, time, scroll);
  const top = rowTop(layout, rank);
  g.fillStyle = { illegal: theme.bad, longer: theme.path }[verdict] ?? theme.accent;
  g.fillRect(x - 2, top - 4, 4, layout.row + 8);
  g.beginPath();
  g.moveTo(x - 6, top - 7);
  g.lineTo(x + 6, top - 7);
  g.lineTo(x, top);
  g.fill();
  if (verdict === "illegal") { // a cross, so that colour is not all that says it
    g.strokeStyle = theme.bad;
    g.lineWidth = 3;
    g.beginPath();
    for (const side of [-1, 1]) {
      g.moveTo(x - 7 * side, top + layout.row / 2 - 7);
      g.lineTo(x + 7 * side, top + layout.row / 2 + 7);
    }
    g.stroke();
  }
}

function drawClock(g, view, time) {
  const { layout, theme, scroll } = view;
  const x = toX(layout, time, scroll);
  g.fillStyle = theme.veil;
  g.fillRect(Math.max(x, layout.gutter), 14, layout.width, layout.height);
  if (x < layout.gutter) return;
  g.fillStyle = theme.accent;
  g.fillRect(x - 1, 12, 2, layout.height);
}
