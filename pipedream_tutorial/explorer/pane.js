// One timeline on a canvas, with its title and numbers. The cells are drawn once into a canvas of
// their own; what changes from frame to frame is drawn over them.
"use strict";

class Pane {
  constructor(parent, label) {
    this.title = el("h2");
    this.about = el("p", { className: "about" });
    this.numbers = el("dl", { className: "numbers" });
    this.canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": label });
    this.spacer = el("div", { className: "spacer" }, this.canvas);
    this.scroller = el("div", { className: "scroller", tabIndex: -1 }, this.spacer);
    this.error = el("p", { className: "error", role: "alert" });
    this.box = el("section", { className: "pane" }, this.title, this.about, this.numbers, this.error);
    this.box.append(this.scroller);
    parent.append(this.box);
    this.under = document.createElement("canvas");
    this.focus = null;
    this.drag = null;
    this.run = null;
    this.scroller.addEventListener("scroll", () => this.draw());
  }

  // result: what run() gives, or {error}; measured: from a trace, or null.
  show(title, about, result, measured) {
    this.title.textContent = title;
    this.about.textContent = about;
    this.error.textContent = result.error ?? "";
    this.error.hidden = !result.error;
    this.scroller.hidden = this.numbers.hidden = Boolean(result.error);
    this.run = result.error ? null : result;
    this.measured = measured;
    if (!this.run) return;
    const { timeline } = this.run;
    this.pale = paleness(timeline.schedule);
    this.links = buildLinks(timeline);
    this.path = criticalPath(timeline);
    this.slack = slackOf(timeline);
    if (this.focus && !timeline.schedule.orders[this.focus.rank]?.[this.focus.index]) this.focus = null;
    const numbers = numbersOf(this.run, measured, this.links).map(([term, value]) =>
      el("div", {}, el("dt", {}, term), el("dd", {}, String(value))),
    );
    this.numbers.replaceChildren(...numbers);
  }

  get units() {
    if (!this.run) return 0;
    const { timeline } = this.run;
    return Math.max(timeline.last * timeline.tick.toNumber(), this.measured ? lastEnd(this.measured) : 0);
  }

  // Lays the canvas out anew; `longest` is shared by both panes, so that a unit is as wide in both.
  place(chosen, theme, longest, room) {
    this.theme = theme;
    this.chosen = chosen;
    const width = this.scroller.clientWidth; // 0 while the page is not shown
    if (!this.run || !width) return;
    this.strips = buildStrips(this.run, chosen);
    this.layout = buildLayout({
      numRanks: this.run.timeline.schedule.numRanks,
      strips: this.strips,
      hasMeasured: Boolean(this.measured),
      width, zoom: chosen.zoom, longest,
      room: room - this.title.offsetHeight - this.about.offsetHeight - this.numbers.offsetHeight - 16,
    });
    this.spacer.style.width = `${this.layout.whole}px`;
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.under]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(this.layout.height * ratio);
    }
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.layout.height}px`;
    this.drawnAt = null;
    this.draw();
  }

  view() {
    const { layout, theme, pale, links, strips } = this;
    const scroll = this.scroller.scrollLeft;
    return { timeline: this.run.timeline, layout, theme, pale, links, strips, scroll };
  }

  drawUnder(view) {
    const g = this.under.getContext("2d");
    const ratio = window.devicePixelRatio || 1;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = this.theme.paper;
    g.fillRect(0, 0, this.layout.width, this.layout.height);
    drawLanes(g, view);
    drawAxis(g, view);
    drawCells(g, view, this.chosen.byVersion ? versionsOf(this.run.use) : null);
    drawStrips(g, view, this.chosen.K);
    if (this.measured) drawMeasured(g, view, this.measured);
    if (this.chosen.arrows) drawMessages(g, view);
    if (this.chosen.path) drawPath(g, view, this.path);
    this.drawnAt = view.scroll;
  }

  draw(time = this.time) {
    if (!this.run || !this.layout) return;
    this.time = time;
    const view = this.view();
    if (this.drawnAt !== view.scroll) this.drawUnder(view);
    const g = this.canvas.getContext("2d");
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.drawImage(this.under, 0, 0);
    const ratio = window.devicePixelRatio || 1;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (time !== null && time !== undefined) drawClock(g, view, time);
    if (this.focus) drawFocus(g, view, this.focus);
    if (this.drag) drawDrag(g, view, this.drag);
    drawGutter(g, view);
  }

  // Scrolls so that the item in focus can be seen.
  reveal() {
    const { timeline } = this.run;
    const { rank, index } = this.focus;
    const start = timeline.starts[rank][index] * timeline.tick.toNumber() * this.layout.perUnit;
    const { scrollLeft, clientWidth } = this.scroller;
    if (start < scrollLeft || start > scrollLeft + clientWidth - this.layout.gutter - 40) {
      this.scroller.scrollLeft = start - clientWidth / 2;
    }
  }
}

function lastEnd(measured) {
  return Math.max(...measured.ends.map((line) => line.at(-1) ?? 0));
}

// What stands over a timeline: [term, value].
function numbersOf({ numbers, timeline }, measured, links) {
  const { idle } = numbers;
  const pairs = [
    ["time", shortNumber(numbers.makespan.toNumber())],
    ["idle", percent(idle.makespanFraction.toNumber())],
    ["idle in own spans", percent(idle.spanFraction.toNumber())],
    ["held at most", shortNumber(largest(numbers.peakActivations).toNumber())],
    ["weight versions", Math.max(...numbers.peakVersions)],
    ["updates behind", Math.max(...numbers.staleness)],
  ];
  if (numbers.mixed) pairs.push(["gradients", "wrong"]);
  if (!measured) return pairs;
  const took = lastEnd(measured);
  const off = took / numbers.makespan.toNumber() - 1;
  pairs.push(["measured", `${took.toPrecision(4)} ms, ${off < 0 ? "" : "+"}${percent(off)}`]);
  const apart = measured.schedule.orders.flatMap((order, rank) =>
    order.map((item, k) => ({ item, late: lateness(timeline, links, measured, rank, k) })),
  );
  const { item, late } = apart.reduce((a, b) => (Math.abs(b.late) > Math.abs(a.late) ? b : a));
  return [...pairs, ["farthest apart", `${item.text}, ${lateText(late)}`]];
}

function lateText(late) {
  return `${shortNumber(Math.abs(late))} ms ${late < 0 ? "earlier" : "later"} than simulated`;
}
