// One timeline on a canvas, with its title and numbers. The cells are drawn once into a canvas of
// their own; what changes from frame to frame is drawn over them.
"use strict";

class Pane {
  constructor(parent, label) {
    this.title = el("h2");
    this.numbers = el("dl", { className: "numbers" });
    this.canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": label });
    this.spacer = el("div", { className: "spacer" }, this.canvas);
    this.scroller = el("div", { className: "scroller", tabIndex: -1 }, this.spacer);
    this.error = el("p", { className: "error", role: "alert" });
    this.box = el("section", { className: "pane" }, this.title, this.numbers, this.error);
    this.box.append(this.scroller);
    parent.append(this.box);
    this.under = document.createElement("canvas");
    this.focus = null;
    this.drag = null;
    this.run = null;
    this.scroller.addEventListener("scroll", () => this.draw());
  }

  // result: what engine/run.mjs gives, or {error}; measured: from a trace, or null.
  show(title, result, measured) {
    this.title.textContent = title;
    this.error.textContent = result.error ?? "";
    this.error.hidden = !result.error;
    this.scroller.hidden = this.numbers.hidden = Boolean(result.error);
    this.run = result.error ? null : result;
    this.measured = measured;
    if (!this.run) return;
    this.pale = paleness(this.run.timeline.schedule);
    this.links = buildLinks(this.run.timeline);
    this.path = criticalPath(this.run.timeline);
    this.onPath = new Set(this.path.map(({ rank, index }) => `${rank}.${index}`));
    const { orders } = this.run.timeline.schedule;
    if (this.focus && !orders[this.focus.rank]?.[this.focus.index]) this.focus = null;
    this.writeNumbers();
  }

  get units() {
    if (!this.run) return 0;
    const own = this.run.timeline.last * this.run.timeline.tick.toNumber();
    const ends = this.measured?.ends.map((line) => line.at(-1) ?? 0) ?? [];
    return Math.max(own, ...ends);
  }

  writeNumbers() {
    const { numbers, timeline } = this.run;
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
    if (this.measured) {
      const took = Math.max(...this.measured.ends.map((line) => line.at(-1) ?? 0));
      const predicted = timeline.last * timeline.tick.toNumber();
      const off = took / predicted - 1;
      pairs.push(["measured", `${took.toPrecision(4)} ms, ${off < 0 ? "" : "+"}${percent(off)}`]);
    }
    this.numbers.replaceChildren(
      ...pairs.map(([term, value]) =>
        el("div", {}, el("dt", { textContent: term }), el("dd", { textContent: String(value) })),
      ),
    );
  }

  // Lays the canvas out anew; `longest` is shared by both panes, so that a unit is as wide in both.
  place(chosen, theme, longest) {
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
    const { timeline } = this.run;
    const { layout, theme, pale, links } = this;
    return { timeline, layout, theme, pale, links, scroll: this.scroller.scrollLeft };
  }

  drawUnder(view) {
    const g = this.under.getContext("2d");
    const ratio = window.devicePixelRatio || 1;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = this.theme.paper;
    g.fillRect(0, 0, this.layout.width, this.layout.height);
    drawLanes(g, view);
    drawAxis(g, view);
    const versions = this.chosen.byVersion ? versionsOf(this.run.use) : null;
    drawCells(g, { ...view, versions });
    drawStrips(g, { ...view, strips: this.strips, limit: this.chosen.K });
    if (this.measured) drawMeasured(g, { ...view, measured: this.measured });
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
    const labels = this.run.timeline.schedule.orders.map((_, rank) =>
      stripLabels(this.layout, this.strips, rank),
    );
    drawGutter(g, { ...view, labels });
  }

  // Scrolls so that the item in focus can be seen.
  reveal() {
    const { timeline } = this.run;
    const { rank, index } = this.focus;
    const middle = timeline.starts[rank][index] * timeline.tick.toNumber() * this.layout.perUnit;
    const { scrollLeft, clientWidth } = this.scroller;
    if (middle < scrollLeft || middle > scrollLeft + clientWidth - this.layout.gutter - 40) {
      this.scroller.scrollLeft = middle - clientWidth / 2;
    }
  }
}
