// Draw a timeline as SVG, with its title and its numbers. Ranks run from top to bottom, and time
// runs from left to right. The style sheet has the colors. The functions take a pane and return the
// drawing as a string.
"use strict";

const AXIS = 18;
const NUM_VERSION_COLORS = 7;

// Return the pixels per unit of time at which all cells of a run keep their labels.
function readableRate(run, numLetters) {
  return (labelWidth(run, numLetters) + 1) / shortestOf(run);
}

// Sizes in pixels. `longest`: the shown time. `room`: the largest height, if possible. `rate`: the
// largest readable rate of all shown runs.
function buildLayout({ run, strips, chosen }, width, longest, room, rate) {
  const { numRanks } = run.timeline.schedule;
  const gutter = width < 500 ? 40 : 58;
  let [row, strip, gap] = [numRanks <= 4 ? 32 : numRanks <= 8 ? 26 : 19, 14, 7];
  if (AXIS + 2 + numRanks * (row + strips.length * strip + gap) > room) {
    [strip, gap] = [8, 3];
    const each = (room - AXIS - 2) / numRanks - strips.length * strip - gap;
    row = Math.max(8, Math.min(row, Math.floor(each)));
  }
  const rank = row + strips.length * strip + gap;
  const visible = (width - gutter) * chosen.zoom;
  // In a narrow window, cells keep their labels if three screens are enough. The timeline scrolls.
  const readable = longest * rate + 10;
  const whole = readable <= 3 * visible ? Math.max(visible, readable) : visible;
  const perUnit = (whole - 10) / (longest || 1);
  return { gutter, row, rank, strip, whole, perUnit, longest, height: AXIS + numRanks * rank + 2 };
}

function rowTop(layout, rank) {
  return AXIS + rank * layout.rank;
}

function stripTop(layout, rank, number) {
  return rowTop(layout, rank) + layout.row + number * layout.strip + 2;
}

// Return the x of a time in ticks.
function toX({ run, layout }, ticks) {
  return ticks * run.timeline.tick * layout.perUnit;
}

// Return the position of a cell: {x, right, top, middle}.
function boxOf(view, { rank, start, end }) {
  const top = rowTop(view.layout, rank);
  return { x: toX(view, start), right: toX(view, end), top, middle: top + view.layout.row / 2 };
}

function rect(className, x, y, width, height, more = "") {
  const [left, top, wide, high] = [x, y, Math.max(0, width), height].map((value) => Number(value.toFixed(2)));
  return `<rect class="${className}" x="${left}" y="${top}" width="${wide}" height="${high}" ${more}/>`;
}

function label(className, x, y, size, text) {
  return `<text class="${className}" x="${x.toFixed(1)}" y="${y.toFixed(1)}" font-size="${size}">${text}</text>`;
}

function drawAxis({ layout, run }) {
  const { orders } = run.timeline.schedule;
  const lanes = orders.map((_, rank) =>
    rect("lane", 0, rowTop(layout, rank), layout.longest * layout.perUnit, layout.row),
  );
  const least = 70 / layout.perUnit;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((wide) => wide >= least);
  const marks = range(1 + Math.floor(layout.longest / step + 1e-9)).map((k) => {
    const x = k * step * layout.perUnit;
    return rect("line", x, 13, 1, layout.height - 13) + label(k ? "mark" : "mark first", x, 10, 10, shortNumber(k * step));
  });
  return [...lanes, ...marks];
}

// Return the duration of the shortest cell, in units.
function shortestOf({ timeline }) {
  const durations = timeline.lines.flat().map(({ start, end }) => end - start);
  return Math.min(...durations.filter(Boolean)) * timeline.tick;
}

// Return the width in pixels that a cell needs for its number, and for its letter if there is one.
function labelWidth({ timeline }, numLetters) {
  const digits = String(timeline.schedule.numMicrobatches - 1).length;
  return Math.max(11, (numLetters + digits) * 13 * 0.62 + 2);
}

function drawCells(view) {
  const { layout, run, chosen } = view;
  const cells = run.timeline.lines.flat();
  // All labels of a row need the width of its widest label, so that a row has all of its numbers or
  // none.
  const versions = [...run.use.values()].map(({ version }) => version ?? 0);
  const largest = chosen.byVersion ? Math.max(...versions) : run.timeline.schedule.numMicrobatches - 1;
  const labels = { letters: shortestOf(run) * layout.perUnit > labelWidth(run, 1), digits: String(largest).length };
  return cells.map((cell) => drawCell(view, cell, boxOf(view, cell), layout.row, labels));
}

// A pair has two halves, with the forward pass on top. Without `labels`, only the kinds are shown.
function drawCell({ run, chosen }, { item, rank, index }, { x, right, top }, height, labels) {
  const each = height / item.length;
  const width = right - x;
  const gap = width > 5 ? 1 : width > 2.5 ? 0.5 : 0;
  const wide = Math.max(width - gap, 0.5);
  const byVersion = chosen.byVersion && labels;
  return item.map((op, part) => {
    const y = top + part * each;
    const pale = byVersion ? 0 : paleness(run.timeline.schedule, op.stage);
    const { version } = run.use.get(op.text);
    let kind = op.kind;
    if (byVersion) kind = version === undefined ? "none" : `v${version % NUM_VERSION_COLORS}`;
    const more = `fill-opacity="${1 - pale}" ${labels ? `data-at="${rank}.${index}"` : ""}`;
    let drawn = rect(kind, x, y, wide, each - (part ? 0 : gap / 2), more);
    // Show the kind as a bar at the bottom.
    if (byVersion) drawn += rect(op.kind, x, y + 0.8 * each, wide, 0.2 * each);
    const size = Math.min(13, Math.max(9, each * 0.55));
    if (!labels || width <= Math.max(11, labels.digits * size * 0.62 + 2) || each <= 7) return drawn;
    const text = byVersion ? version ?? "" : (labels.letters ? op.kind : "") + op.microbatch;
    const middle = y + (byVersion ? 0.43 : 0.53) * each;
    return drawn + label(pale > 0.3 ? "on pale" : `on on-${kind}`, x + wide / 2, middle, size, text);
  }).join("");
}

// Return 0 for a rank's first stage, and higher numbers, which mean paler shades, for others.
function paleness({ stagesPerRank, numRanks }, stage) {
  return Math.floor(stage / numRanks) / Math.max(2, stagesPerRank);
}

function drawGutter({ layout, run, strips }) {
  const wide = layout.gutter > 50;
  return run.timeline.schedule.orders.map((_, rank) => {
    const top = rowTop(layout, rank);
    const small = Math.min(10, layout.strip);
    const name = label("", 2, top + layout.row / 2, Math.min(12, layout.row + 2), wide ? `rank ${rank}` : `r${rank}`);
    const texts = strips.map(({ text, peaks }, number) => {
      const y = stripTop(layout, rank, number) + layout.strip / 2;
      return label("quiet", 2, y, small, `${wide ? text : text[0]} ${shortNumber(peaks[rank])}`);
    });
    return name + texts.join("");
  });
}

const STRIPS = {
  held: { text: "held", of: (run) => heldActivations(run.timeline) },
  versions: { text: "versions", of: (run) => liveVersions(run.timeline, run.use) },
  stale: { text: "behind", of: (run) => stalenessSteps(run.timeline, run.use) },
};

// Draw each rank's memory over time below it: [{name, text, steps and peaks by rank, most}].
function buildStrips(run, chosen) {
  const shown = Object.entries(STRIPS).filter(([name]) => chosen[name]);
  return shown.map(([name, { text, of }]) => {
    const steps = of(run);
    const peaks = steps.map((line) => Math.max(0, ...line.map(([, value]) => value)));
    return { name, text, steps, peaks, most: Math.max(1, ...peaks) };
  });
}

function drawStrips(view) {
  const { layout, strips, chosen, run: { timeline } } = view;
  return strips.flatMap(({ name, steps, most }, number) => {
    const limit = name === "held" && chosen.K ? chosen.K : Infinity;
    const high = (layout.strip - 3) / Math.max(most, limit < Infinity ? limit : 0);
    return steps.flatMap((line, rank) => {
      const floor = stripTop(layout, rank, number) + layout.strip - 3;
      const bars = line.flatMap(([time, value], k) => {
        const x = toX(view, time);
        const width = toX(view, line[k + 1]?.[0] ?? timeline.last) - x;
        const over = Math.max(0, value - limit);
        const bar = rect(name, x, floor - high * value, width, high * value);
        return over ? [bar, rect("bad", x, floor - high * value, width, high * over)] : [bar];
      });
      const ground = rect("line", 0, floor, layout.whole, 1);
      if (limit === Infinity) return [...bars, ground];
      return [...bars, ground, path("limit", [[0, floor - high * limit], [layout.whole, floor - high * limit]])];
    });
  });
}

function path(className, ...lines) {
  const text = lines.map((points) => "M" + points.map((point) => point.map((at) => at.toFixed(1)).join(" ")).join("L"));
  return `<path class="${className}" d="${text.join("")}"/>`;
}

// Draw arrows from the ends of sending cells to the arrival at receiving cells on other ranks.
function drawArrows(view, className, links, head) {
  const { layout: { row }, run: { timeline } } = view;
  const lines = links.filter(([from, to]) => from.rank !== to.rank).flatMap(([from, to]) => {
    const leaving = to.rank > from.rank ? 0.8 : 0.2; // share of the row's height
    const [x0, y0] = [toX(view, from.end), rowTop(view.layout, from.rank) + row * leaving];
    const tip = [toX(view, from.end + timeline.c), rowTop(view.layout, to.rank) + row * (1 - leaving)];
    const angle = Math.atan2(tip[1] - y0, tip[0] - x0);
    const side = (turn) => [tip[0] - head * Math.cos(angle + turn), tip[1] - head * Math.sin(angle + turn)];
    return [[[x0, y0], tip], [tip, side(-0.45), side(0.45), tip]];
  });
  return path(className, ...lines);
}

// Return [sender, receiver] of all results that cells use.
function buildLinks({ schedule, lines, cells }) {
  return lines.flat().flatMap((cell) => schedule.needs(cell.item).map((need) => [cells.get(need), cell]));
}

function drawPath(view) {
  const cells = criticalPath(view.run.timeline);
  const className = view.layout.perUnit < 12 ? "path thin" : "path";
  const frames = cells.map((cell) => {
    const { x, right, top } = boxOf(view, cell);
    return rect(className, x + 1.5, top + 1.5, Math.max(right - x - 4, 1), view.layout.row - 3);
  });
  const steps = cells.slice(1).map((cell, k) => [cells[k], cell]).filter(([from, to]) => from.rank !== to.rank);
  const lines = steps.map((step) => {
    const [from, to] = step.map((cell) => boxOf(view, cell));
    return [[from.right, from.middle], [to.x, to.middle]];
  });
  return [...frames, path(className, ...lines)];
}

// Outline the cell in focus, and draw arrows to the cells that it waits for and that wait for it.
function drawFocus(view) {
  const cell = focused(view);
  const [needed, given] = [1, 0].map((end) => view.links.filter((link) => link[end] === cell));
  const outline = (className, at) => {
    const { x, right, top } = boxOf(view, at);
    return rect(className, x - 0.5, top - 0.5, Math.max(2, right - x), view.layout.row + 1);
  };
  return [
    ...needed.map(([sender]) => outline("needed", sender)),
    drawArrows(view, "needed", needed, 8), drawArrows(view, "given", given, 8), outline("focus", cell),
  ].join("");
}

// Return the cell under the pointer, if any.
function focused({ run, focus }) {
  return focus && run?.timeline.lines[focus.rank]?.[focus.index];
}

// Show the target of a dragged item, and whether the target is allowed. A forbidden target has a
// cross, so that it differs in more than color.
function drawDrag(view, { rank, from, to, verdict }) {
  const before = view.run.timeline.lines[rank].toSpliced(from, 1)[to - 1];
  const [x, top, { row }] = [toX(view, before?.end ?? 0), rowTop(view.layout, rank), view.layout];
  const middle = top + row / 2;
  const cross = [-7, 7].map((side) => [[x - side, middle - 7], [x + side, middle + 7]]);
  return rect(`drag ${verdict}`, x - 2, top - 4, 4, row + 8) +
    path(`drag ${verdict}`, [[x - 6, top - 7], [x + 6, top - 7], [x, top]]) +
    (verdict === "illegal" ? path("cross", ...cross) : "");
}

class Pane {
  constructor(parent, text) {
    this.box = el("section", { className: "pane" });
    this.box.innerHTML = `<h2></h2><p class="about"></p><dl class="numbers"></dl>
      <p class="error" role="alert"></p>
      <div class="scroller" tabindex="-1"><svg class="gutter"></svg>
      <svg class="chart" tabindex="0" role="application" aria-label="${text}"><g></g><g></g><g></g></svg></div>`;
    [this.title, this.about, this.numbers, this.error, this.scroller] = this.box.children;
    [this.gutter, this.chart] = this.scroller.children;
    parent.append(this.box);
    this.run = this.focus = this.drag = this.time = null;
  }

  // Show a schedule with the choices and moves, or why it does not work.
  show(name, chosen, moves) {
    Object.assign(this, { chosen, run: null });
    const error = refusal(() => {
      this.run = run(name, chosen, moves);
    });
    this.title.textContent = entryOf(name).title + (moves.length ? ", edited" : "");
    this.about.textContent = error ? "" : aboutOf(name, chosen);
    this.error.textContent = error && `error: ${error}`;
    this.error.hidden = !error;
    this.scroller.hidden = this.numbers.hidden = Boolean(error);
    if (error) return;
    this.links = buildLinks(this.run.timeline);
    this.slack = slackOf(this.run.timeline);
    this.strips = buildStrips(this.run, chosen);
    if (!focused(this)) this.focus = null;
    this.numbers.replaceChildren(...numbersOf(this).map(([term, value]) =>
      el("div", {}, el("dt", {}, term), el("dd", {}, String(value))),
    ));
  }

  // Return all starts and ends, in units.
  get times() {
    if (!this.run) return [];
    const { lines, tick } = this.run.timeline;
    return lines.flat().flatMap(({ start, end }) => [start * tick, end * tick]);
  }

  // Draw everything. Both panes share `longest` and `rate`, so that a unit has the same width in both.
  place(longest, room, rate) {
    const width = this.scroller.clientWidth; // 0 while the page is not shown
    if (!this.run || !width) return;
    const head = this.title.offsetHeight + this.about.offsetHeight + this.numbers.offsetHeight + 16;
    this.layout = buildLayout(this, width, longest, room - head, rate);
    const { gutter, whole, height } = this.layout;
    for (const [svg, wide] of [[this.gutter, gutter], [this.chart, whole]]) {
      svg.setAttribute("width", wide);
      svg.setAttribute("height", height);
    }
    const messages = this.chosen.arrows ? [drawArrows(this, "message", this.links, 5)] : [];
    const parts = [
      drawAxis(this), drawCells(this), drawStrips(this), messages,
      this.chosen.path ? drawPath(this) : [],
    ];
    this.chart.children[0].innerHTML = parts.flat().join("");
    this.gutter.innerHTML = drawGutter(this).join("");
    this.draw();
  }

  // Draw the layer over the cells. time: the clock's time; null shows everything.
  draw(time = this.time) {
    this.time = time;
    if (!this.run || !this.layout) return;
    const { height, whole, perUnit } = this.layout;
    const [, clock, over] = this.chart.children;
    const x = time * perUnit;
    clock.innerHTML = time === null ? "" : rect("veil", x, 14, whole - x, height) + rect("now", x - 1, 12, 2, height);
    over.innerHTML = (this.focus ? drawFocus(this) : "") + (this.drag ? drawDrag(this, this.drag) : "");
  }

  // Scroll so that the item in focus is visible.
  reveal() {
    const { x } = boxOf(this, focused(this));
    const { scrollLeft, clientWidth } = this.scroller;
    if (x < scrollLeft || x > scrollLeft + clientWidth - this.layout.gutter - 40) {
      this.scroller.scrollLeft = x - clientWidth / 2;
    }
  }
}

// Return the numbers above a timeline: [term, value].
function numbersOf(pane) {
  const { run: { numbers }, chosen: { K } } = pane;
  const pairs = [
    ["time", shortNumber(numbers.makespan)],
    ["idle", percent(numbers.idle.share)],
    ["idle in own spans", percent(numbers.span.share)],
    ["microbatches held", shortNumber(Math.max(...numbers.peakActivations))],
    ["weight versions", numbers.peakVersions],
    ["updates behind", numbers.staleness],
  ];
  // The memory limit applies to moves. For fixed schedules, the page only reports
  // whether they exceed it.
  const over = numbers.peakActivations.flatMap((held, rank) => (K && held > K ? [rank] : []));
  if (over.length) pairs.push(["over the memory limit", `rank ${over.join(", ")}`]);
  if (numbers.mixed) pairs.push(["gradients", "wrong"]);
  return pairs;
}
