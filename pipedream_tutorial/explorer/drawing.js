// Draws a timeline: ranks from top to bottom, time from left to right. `view` is what Pane.view gives.
"use strict";

function drawLanes(g, { layout, theme, scroll }) {
  g.fillStyle = theme.lane;
  const left = Math.max(layout.gutter, toX(layout, 0, scroll));
  const width = toX(layout, layout.longest, scroll) - left;
  for (let rank = 0; rank < layout.numRanks; rank++) {
    g.fillRect(left, rowTop(layout, rank), width, layout.row);
  }
}

function drawCells(g, view, versions) {
  const { layout, timeline } = view;
  const lasts = timeline.starts.flatMap((line, rank) =>
    line.map((start, k) => timeline.ends[rank][k] - start).filter(Boolean),
  );
  const letters = Math.min(...lasts) * timeline.tick.toNumber() * layout.perUnit > 26;
  // As wide as the widest label, so that a row has all of its numbers or none.
  const labels = versions ? [...versions.values()] : [timeline.schedule.numMicrobatches - 1];
  const widest = "8".repeat(String(labels.reduce((a, b) => Math.max(a, b), 0)).length);
  timeline.schedule.orders.forEach((order, rank) =>
    order.forEach((item, index) => {
      const { x, right, top, height } = boxOf(view, { rank, index });
      if (right < layout.gutter || x > layout.width) return;
      drawItem(g, view, item, { x, top, width: right - x, height, versions, letters, widest });
    }),
  );
}

// A pair is two halves, the forward pass on top. Without `widest` there is no label.
function drawItem(g, { theme, pale }, item, { x, top, width, height, versions, letters, widest }) {
  const each = height / item.parts.length;
  item.parts.forEach((op, part) => {
    const { fill, ink } = inkOf(theme, op, pale, versions);
    const gap = width > 5 ? 1 : width > 2.5 ? 0.5 : 0;
    const [y, wide] = [top + part * each, Math.max(width - gap, 0.5)];
    g.fillStyle = fill;
    g.fillRect(x, y, wide, each - (part ? 0 : gap ? 0.5 : 0));
    if (versions) { // the kind as a foot
      g.fillStyle = theme[op.kind];
      g.fillRect(x, y + 0.8 * each, wide, 0.2 * each);
    }
    if (!widest || width <= 11 || each <= 7) return;
    g.font = `${Math.min(13, Math.max(9, each * 0.55))}px ${theme.font}`;
    if (g.measureText(widest).width + 2 >= width) return;
    const number = versions ? versions.get(op.text) ?? "" : op.microbatch;
    g.fillStyle = ink;
    g.textAlign = "center";
    g.textBaseline = "middle";
    const text = (letters && !versions ? op.kind : "") + number;
    g.fillText(text, x + (width - gap) / 2, top + (part + (versions ? 0.43 : 0.53)) * each);
  });
}

// A measured run under its simulation: thinner, and at each foot how far the ends are apart.
function drawMeasured(g, view, measured) {
  const { layout, theme, scroll, links, timeline } = view;
  const height = layout.measured - 2;
  measured.schedule.orders.forEach((order, rank) => {
    const top = rowTop(layout, rank) + layout.row + 1;
    g.fillStyle = theme.lane;
    g.fillRect(layout.gutter, top, layout.width, height);
    order.forEach((item, k) => {
      const x = toX(layout, measured.starts[rank][k], scroll);
      const right = toX(layout, measured.ends[rank][k], scroll);
      if (right >= layout.gutter && x <= layout.width) {
        drawItem(g, view, item, { x, top, width: right - x, height });
      }
    });
    order.forEach((item, k) => {
      const late = lateness(timeline, links, measured, rank, k);
      const right = toX(layout, measured.ends[rank][k], scroll);
      const simulated = right - late * layout.perUnit;
      g.fillStyle = late > 0 ? theme.bad : theme.good;
      g.fillRect(Math.min(right, simulated), top + height - 3, Math.abs(right - simulated), 3);
    });
  });
}

// How much later an operation ended than simulated, in ms.
function lateness(timeline, links, measured, rank, k) {
  const place = links.places.get(measured.schedule.orders[rank][k].parts[0].text);
  const simulated = timeline.ends[place.rank][place.index] * timeline.tick.toNumber();
  return measured.ends[rank][k] - simulated;
}

function drawAxis(g, { layout, theme, scroll }) {
  const least = 70 / layout.perUnit;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((wide) => wide >= least);
  g.font = `10px ${theme.font}`;
  g.textBaseline = "alphabetic";
  for (let time = 0; time <= layout.longest + 1e-9; time += step) {
    const x = toX(layout, time, scroll);
    if (x < layout.gutter - 1 || x > layout.width) continue;
    g.fillStyle = theme.line;
    g.fillRect(x, 13, 1, layout.height - 13);
    g.fillStyle = theme.quiet;
    g.textAlign = time === 0 ? "left" : "center";
    g.fillText(shortNumber(time), x, 10);
  }
}

function drawGutter(g, { layout, theme, strips }) {
  const wide = layout.gutter > 50;
  g.fillStyle = theme.paper;
  g.fillRect(0, 0, layout.gutter - 2, layout.height);
  g.textAlign = "left";
  g.textBaseline = "middle";
  for (let rank = 0; rank < layout.numRanks; rank++) {
    const top = rowTop(layout, rank);
    g.fillStyle = theme.ink;
    g.font = `${Math.min(12, layout.row + 2)}px ${theme.font}`;
    g.fillText(wide ? `rank ${rank}` : `r${rank}`, 2, top + layout.row / 2);
    g.font = `${Math.min(10, layout.strip)}px ${theme.font}`;
    g.fillStyle = theme.quiet;
    if (layout.measured) {
      g.fillText(wide ? "measured" : "meas.", 2, top + layout.row + layout.measured / 2);
    }
    strips.forEach(({ text, peaks }, number) => {
      const y = stripTop(layout, rank, number) + layout.strip / 2;
      g.fillText(`${wide ? text : text[0]} ${shortNumber(peaks[rank])}`, 2, y);
    });
  }
}

const STRIPS = {
  held: { text: "held", of: (run) => heldActivations(run.timeline), shared: true },
  versions: { text: "versions", of: (run) => liveVersions(run.timeline, run.use), shared: true },
  stale: { text: "behind", of: (run) => stalenessSteps(run.timeline, run.use) },
};

// Under each rank what it holds over time: [{name, text, steps and peaks by rank, most}].
function buildStrips(run, chosen) {
  const v = run.timeline.schedule.stagesPerRank;
  return Object.entries(STRIPS)
    .filter(([name]) => chosen[name])
    .map(([name, { text, of, shared }]) => {
      const share = shared ? 1 / v : 1;
      const steps = of(run).map((line) => line.map(([time, value]) => [time, value * share]));
      const peaks = steps.map((line) => Math.max(0, ...line.map(([, value]) => value)));
      return { name, text, steps, peaks, most: Math.max(1, ...peaks) };
    });
}

function drawStrips(g, { layout, timeline, strips, theme, scroll }, limit) {
  const tick = timeline.tick.toNumber();
  const tall = layout.strip - 3;
  strips.forEach((strip, number) => {
    const limited = strip.name === "held" && limit;
    const most = limited ? Math.max(strip.most, limit) : strip.most;
    strip.steps.forEach((line, rank) => {
      const floor = stripTop(layout, rank, number) + tall;
      line.forEach(([time, value], k) => {
        const x = toX(layout, time * tick, scroll);
        const next = k + 1 < line.length ? line[k + 1][0] : timeline.last;
        const width = toX(layout, next * tick, scroll) - x;
        if (x + width < layout.gutter || x > layout.width) return;
        g.fillStyle = theme[strip.name];
        g.fillRect(x, floor - (tall * value) / most, width, (tall * value) / most);
        if (!limited || value <= limit) return;
        g.fillStyle = theme.bad;
        g.fillRect(x, floor - (tall * value) / most, width, (tall * (value - limit)) / most);
      });
      g.fillStyle = theme.line;
      g.fillRect(layout.gutter, floor, layout.width, 1);
      if (!limited) return;
      g.strokeStyle = theme.ink;
      g.lineWidth = 1;
      g.setLineDash([4, 3]);
      strokeLine(g, layout.gutter, floor - (tall * limit) / most, layout.width);
      g.setLineDash([]);
    });
  });
}

function strokeLine(g, x, y, right, low = y) {
  g.beginPath();
  g.moveTo(x, y);
  g.lineTo(right, low);
  g.stroke();
}

// Places of operations, messages between ranks, and who takes an operation's result in.
function buildLinks(timeline) {
  const places = timeline.schedule.places();
  const messages = [];
  const receivers = new Map();
  timeline.schedule.orders.forEach((order, rank) => {
    for (const op of order.flatMap((item) => item.parts)) {
      for (const need of timeline.wanted.of(op)) {
        receivers.set(need, [...(receivers.get(need) ?? []), op.text]);
        if (places.get(need).rank !== rank) messages.push([need, op.text]);
      }
    }
  });
  return { places, messages, receivers };
}

// Arrows from the end of operations that send to the arrival at those on other ranks that receive:
// all lines in one path and all heads in another, as there may be thousands.
function drawArrows(g, { layout, timeline, scroll, links }, pairs, head) {
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
      strokeLine(g, before.right, before.middle, box.x, middle);
    }
    g.strokeRect(box.x + 1.5, box.top + 1.5, Math.max(box.right - box.x - 4, 1), box.height - 3);
    before = { rank: place.rank, right: box.right, middle };
  }
}

// The item in focus, thick; what it waits for and what waits for it, with arrows.
function drawFocus(g, view, place) {
  const { theme, links, timeline } = view;
  const { parts } = timeline.schedule.orders[place.rank][place.index];
  const needed = parts.flatMap((op) => timeline.wanted.of(op).map((need) => [need, op.text]));
  const given = parts.flatMap(({ text }) => (links.receivers.get(text) ?? []).map((to) => [text, to]));
  g.strokeStyle = g.fillStyle = theme.accent;
  for (const [need] of needed) outline(g, boxOf(view, links.places.get(need)), 2);
  drawArrows(g, view, needed, 8);
  g.setLineDash([4, 3]);
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
function drawDrag(g, { layout, timeline, theme, scroll }, { rank, from, to, verdict }) {
  const before = timeline.ends[rank].filter((_, k) => k !== from)[to - 1] ?? 0;
  const x = toX(layout, before * timeline.tick.toNumber(), scroll);
  const top = rowTop(layout, rank);
  g.fillStyle = { illegal: theme.bad, longer: theme.path }[verdict] ?? theme.accent;
  g.fillRect(x - 2, top - 4, 4, layout.row + 8);
  g.beginPath();
  g.moveTo(x - 6, top - 7);
  g.lineTo(x + 6, top - 7);
  g.lineTo(x, top);
  g.fill();
  if (verdict !== "illegal") return;
  g.strokeStyle = theme.bad; // a cross, so that colour is not all that says it
  g.lineWidth = 3;
  const middle = top + layout.row / 2;
  for (const side of [-7, 7]) strokeLine(g, x - side, middle - 7, x + side, middle + 7);
}

function drawClock(g, { layout, theme, scroll }, time) {
  const x = toX(layout, time, scroll);
  g.fillStyle = theme.veil;
  g.fillRect(Math.max(x, layout.gutter), 14, layout.width, layout.height);
  if (x < layout.gutter) return;
  g.fillStyle = theme.accent;
  g.fillRect(x - 1, 12, 2, layout.height);
}
