// Strips under each rank: what it holds over time.
"use strict";

const STRIPS = {
  held: { text: "held", short: "h", of: (run) => heldActivations(run.timeline), shared: true },
  versions: {
    text: "versions", short: "v", of: (run) => liveVersions(run.timeline, run.use), shared: true,
  },
  stale: { text: "behind", short: "b", of: (run) => stalenessSteps(run.timeline, run.use) },
};

// [{name, steps by rank, most, share}] for the strips that are on.
function buildStrips(run, chosen) {
  const v = run.timeline.schedule.stagesPerRank;
  return Object.entries(STRIPS)
    .filter(([name]) => chosen[name])
    .map(([name, { text, short, of, shared }]) => {
      const share = shared ? 1 / v : 1;
      const steps = of(run).map((line) => line.map(([time, value]) => [time, value * share]));
      const peaks = steps.map((line) => Math.max(0, ...line.map(([, value]) => value)));
      return { name, text, short, steps, peaks, most: Math.max(1, ...peaks) };
    });
}

function stripLabels(layout, strips, rank) {
  return strips.map(({ text, short, peaks }, number) => {
    const peak = shortNumber(peaks[rank]);
    const y = stripTop(layout, rank, number) + STRIP_HEIGHT / 2 + 1;
    return { y, text: `${text} ${peak}`, short: `${short} ${peak}` };
  });
}

function drawStrips(g, { layout, timeline, strips, theme, scroll, limit }) {
  const tick = timeline.tick.toNumber();
  strips.forEach((strip, number) => {
    const most = strip.name === "held" ? Math.max(strip.most, limit) : strip.most;
    strip.steps.forEach((line, rank) => {
      const top = stripTop(layout, rank, number);
      const floor = top + STRIP_HEIGHT;
      line.forEach(([time, value], k) => {
        const x = toX(layout, time * tick, scroll);
        const next = k + 1 < line.length ? line[k + 1][0] : timeline.last;
        const right = toX(layout, next * tick, scroll);
        if (right < layout.gutter || x > layout.width || !value) return;
        const height = (STRIP_HEIGHT * value) / most;
        g.fillStyle = theme[strip.name];
        g.fillRect(x, floor - height, right - x, height);
        if (strip.name !== "held" || !limit || value <= limit) return;
        g.fillStyle = theme.bad;
        g.fillRect(x, floor - height, right - x, (STRIP_HEIGHT * (value - limit)) / most);
      });
      g.fillStyle = theme.line;
      g.fillRect(layout.gutter, floor, layout.width, 1);
      if (strip.name === "held" && limit) drawLimit(g, layout, floor, limit / most, theme);
    });
  });
}

function drawLimit(g, layout, floor, share, theme) {
  g.strokeStyle = theme.ink;
  g.lineWidth = 1;
  g.setLineDash([4, 3]);
  g.beginPath();
  g.moveTo(layout.gutter, floor - STRIP_HEIGHT * share + 0.5);
  g.lineTo(layout.width, floor - STRIP_HEIGHT * share + 0.5);
  g.stroke();
  g.setLineDash([]);
}
