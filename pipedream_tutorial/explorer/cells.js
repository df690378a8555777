// Draws the cells of a timeline: ranks from top to bottom, time from left to right.
"use strict";

function drawLanes(g, { layout, theme, scroll }) {
  g.fillStyle = theme.lane;
  const left = Math.max(layout.gutter, toX(layout, 0, scroll));
  for (let rank = 0; rank < layout.numRanks; rank++) {
    g.fillRect(left, rowTop(layout, rank), toX(layout, layout.longest, scroll) - left, layout.row);
  }
}

function drawCells(g, { layout, timeline, theme, pale, scroll, versions }) {
  const tick = timeline.tick.toNumber();
  const narrowest = Math.min(
    ...timeline.starts.flatMap((line, rank) =>
      line.map((start, k) => timeline.ends[rank][k] - start).filter(Boolean),
    ),
  );
  const letters = narrowest * tick * layout.perUnit > 26;
  // As wide as the widest label, so that a row has all of its numbers or none.
  const labels = versions ? [...versions.values()] : [timeline.schedule.numMicrobatches - 1];
  const widest = "8".repeat(String(labels.reduce((a, b) => Math.max(a, b), 0)).length);
  timeline.schedule.orders.forEach((order, rank) => {
    const top = rowTop(layout, rank);
    order.forEach((item, k) => {
      const x = toX(layout, timeline.starts[rank][k] * tick, scroll);
      const right = toX(layout, timeline.ends[rank][k] * tick, scroll);
      if (right < layout.gutter || x > layout.width) return;
      const width = right - x;
      drawItem(g, item, { x, top, width, height: layout.row, theme, pale, versions, letters, widest });
    });
  });
}

// A pair is two halves, the forward pass on top.
function drawItem(g, item, { x, top, width, height, theme, pale, versions, letters, widest }) {
  const each = height / item.parts.length;
  item.parts.forEach((op, part) => {
    const { fill, ink } = inkOf(theme, op, pale, versions);
    const gap = width > 5 ? 1 : width > 2.5 ? 0.5 : 0;
    g.fillStyle = fill;
    const [y, wide] = [top + part * each, Math.max(width - gap, 0.5)];
    g.fillRect(x, y, wide, each - (part ? 0 : gap ? 0.5 : 0));
    if (versions) { // the kind as a foot
      g.fillStyle = theme[op.kind];
      g.fillRect(x, y + 0.8 * each, wide, 0.2 * each);
    }
    if (width > 11 && each > 7) {
      const size = Math.min(13, Math.max(9, each * 0.55));
      g.font = `${size}px ${theme.font}`;
      const number = versions ? versions.get(op.text) ?? "" : op.microbatch;
      const text = (letters && !versions ? op.kind : "") + number;
      if (g.measureText(widest ?? text).width + 2 < width) {
        g.fillStyle = ink;
        g.textAlign = "center";
        g.textBaseline = "middle";
        g.fillText(text, x + (width - gap) / 2, top + (part + (versions ? 0.43 : 0.53)) * each);
      }
    }
  });
}

// A measured run under the prediction: the same colours, thinner.
function drawMeasured(g, { layout, measured, theme, pale, scroll }) {
  const widest = "8".repeat(20); // no labels: those of the prediction stand above
  measured.schedule.orders.forEach((order, rank) => {
    const top = rowTop(layout, rank) + layout.row + 1;
    g.fillStyle = theme.lane;
    g.fillRect(layout.gutter, top, layout.width, layout.measured - 2);
    order.forEach((item, k) => {
      const x = toX(layout, measured.starts[rank][k], scroll);
      const width = toX(layout, measured.ends[rank][k], scroll) - x;
      if (x + width < layout.gutter || x > layout.width) return;
      drawItem(g, item, { x, top, width, height: layout.measured - 2, theme, pale, widest });
    });
  });
}

function drawAxis(g, { layout, theme, scroll }) {
  const step = niceStep(70 / layout.perUnit);
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

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= least);
}

function drawGutter(g, { layout, theme, labels }) {
  g.fillStyle = theme.paper;
  g.fillRect(0, 0, layout.gutter - 2, layout.height);
  g.textAlign = "left";
  for (let rank = 0; rank < layout.numRanks; rank++) {
    const top = rowTop(layout, rank);
    g.textBaseline = "middle";
    g.fillStyle = theme.ink;
    g.font = `12px ${theme.font}`;
    g.fillText(layout.gutter > 50 ? `rank ${rank}` : `r${rank}`, 2, top + layout.row / 2);
    g.font = `10px ${theme.font}`;
    g.fillStyle = theme.quiet;
    const wide = layout.gutter > 50;
    if (layout.measured) {
      g.fillText(wide ? "measured" : "meas.", 2, top + layout.row + layout.measured / 2);
    }
    labels[rank].forEach(({ y, text, short }) => g.fillText(wide ? text : short, 2, y));
  }
}
