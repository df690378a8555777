// One timeline with its title and numbers. The cells are drawn once; what changes from frame to
// frame, the focus, a drag and the clock, lies over them.
"use strict";

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
    this.run = this.measured = this.focus = this.drag = this.time = null;
  }

  // run: what run() gives, or null and an error; measured: from a trace, or null.
  show({ title, about, error, run, measured, chosen }) {
    this.title.textContent = title;
    this.about.textContent = about;
    this.error.textContent = error && `error: ${error}`;
    this.error.hidden = !error;
    this.scroller.hidden = this.numbers.hidden = Boolean(error);
    Object.assign(this, { run, measured, chosen });
    if (!run) return;
    const { timeline } = this.run;
    this.links = buildLinks(timeline.schedule);
    this.slack = slackOf(timeline);
    this.strips = buildStrips(this.run, chosen);
    if (this.focus && !timeline.schedule.orders[this.focus.rank]?.[this.focus.index]) this.focus = null;
    this.numbers.replaceChildren(...numbersOf(this).map(([term, value]) =>
      el("div", {}, el("dt", {}, term), el("dd", {}, String(value))),
    ));
  }

  get units() {
    if (!this.run) return 0;
    const { last, tick } = this.run.timeline;
    return Math.max(last * tick, this.measured ? lastEnd(this.measured) : 0);
  }

  // Draws all anew; `longest` is shared by both panes, so that a unit is as wide in both.
  place(longest, room) {
    const width = this.scroller.clientWidth; // 0 while the page is not shown
    if (!this.run || !width) return;
    this.layout = buildLayout({
      numRanks: this.run.timeline.schedule.numRanks, numStrips: this.strips.length,
      hasMeasured: Boolean(this.measured), width, zoom: this.chosen.zoom, longest,
      room: room - this.title.offsetHeight - this.about.offsetHeight - this.numbers.offsetHeight - 16,
    });
    const { gutter, whole, height } = this.layout;
    for (const [svg, wide] of [[this.gutter, gutter], [this.chart, whole]]) {
      svg.setAttribute("width", wide);
      svg.setAttribute("height", height);
    }
    const messages = this.chosen.arrows ? [drawArrows(this, "message", this.links, 5)] : [];
    const parts = [
      drawAxis(this), drawCells(this), drawStrips(this), drawMeasured(this), messages,
      this.chosen.path ? drawPath(this) : [],
    ];
    this.chart.children[0].innerHTML = parts.flat().join("");
    this.gutter.innerHTML = drawGutter(this).join("");
    this.draw();
  }

  // What lies over the cells. time: of the clock; null shows all.
  draw(time = this.time) {
    this.time = time;
    if (!this.run || !this.layout) return;
    const { height, whole, perUnit } = this.layout;
    const [, clock, over] = this.chart.children;
    const x = time * perUnit;
    clock.innerHTML = time === null ? "" : rect("veil", x, 14, whole - x, height) + rect("now", x - 1, 12, 2, height);
    over.innerHTML = (this.focus ? drawFocus(this, this.focus) : "") + (this.drag ? drawDrag(this, this.drag) : "");
  }

  // Scrolls so that the item in focus can be seen.
  reveal() {
    const { x } = boxOf(this, this.focus);
    const { scrollLeft, clientWidth } = this.scroller;
    if (x < scrollLeft || x > scrollLeft + clientWidth - this.layout.gutter - 40) {
      this.scroller.scrollLeft = x - clientWidth / 2;
    }
  }
}

function lastEnd(measured) {
  return Math.max(...measured.ends.map((line) => line.at(-1) ?? 0));
}

// What stands over a timeline: [term, value].
function numbersOf(pane) {
  const { run: { numbers }, measured, chosen: { K } } = pane;
  const pairs = [
    ["time", shortNumber(numbers.makespan)],
    ["idle", percent(numbers.idle.share)],
    ["idle in own spans", percent(numbers.span.share)],
    ["held at most", shortNumber(Math.max(...numbers.peakActivations))],
    ["weight versions", Math.max(...numbers.peakVersions)],
    ["updates behind", Math.max(...numbers.staleness)],
  ];
  // A limit binds the search and what is dragged; fixed schedules are only said to exceed it.
  const over = numbers.peakActivations.flatMap((held, rank) => (K && held > K ? [rank] : []));
  if (over.length) pairs.push(["over the memory limit", `rank ${over.join(", ")}`]);
  if (numbers.mixed) pairs.push(["gradients", "wrong"]);
  if (!measured) return pairs;
  const off = lastEnd(measured) / numbers.makespan - 1;
  pairs.push(["measured", `${lastEnd(measured).toPrecision(4)} ms, ${off < 0 ? "" : "+"}${percent(off)}`]);
  const apart = measured.schedule.orders.flatMap((order, rank) =>
    order.map((item, k) => ({ item, late: lateness(pane, rank, k) })),
  );
  const { item, late } = apart.reduce((a, b) => (Math.abs(b.late) > Math.abs(a.late) ? b : a));
  return [...pairs, ["farthest apart", `${item.text}, ${lateText(late)}`]];
}

function lateText(late) {
  return `${shortNumber(Math.abs(late))} ms ${late < 0 ? "earlier" : "later"} than simulated`;
}
