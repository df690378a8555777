// Where things are on a timeline's canvas: time to x, rank to y, and back.
"use strict";

const AXIS = 18;
const STRIP = 14;
const GAP = 7;

function buildLayout({ numRanks, strips, hasMeasured, width, zoom, longest }) {
  const gutter = width < 500 ? 40 : 58;
  const row = numRanks <= 4 ? 32 : numRanks <= 8 ? 26 : 19;
  const measured = hasMeasured ? Math.round(row * 0.6) : 0;
  const rank = row + measured + strips.length * STRIP + GAP;
  const inner = (width - gutter - 10) * zoom;
  return {
    width, gutter, row, measured, rank, strips, numRanks, longest,
    perUnit: inner / (longest || 1),
    inner,
    whole: inner + gutter + 10,
    height: AXIS + numRanks * rank + 2,
  };
}

function toX(layout, time, scroll) {
  return layout.gutter + time * layout.perUnit - scroll;
}

function toTime(layout, x, scroll) {
  return (x - layout.gutter + scroll) / layout.perUnit;
}

function rowTop(layout, rank) {
  return AXIS + rank * layout.rank;
}

function stripTop(layout, rank, number) {
  return rowTop(layout, rank) + layout.row + layout.measured + number * STRIP + 2;
}

const STRIP_HEIGHT = STRIP - 3;

// The item at a point, as {rank, index}; null where there is none.
function itemAt(layout, timeline, x, y, scroll) {
  const rank = Math.floor((y - AXIS) / layout.rank);
  if (rank < 0 || rank >= layout.numRanks || x < layout.gutter) return null;
  if (y - rowTop(layout, rank) > layout.row) return null;
  const ticks = toTime(layout, x, scroll) / timeline.tick.toNumber();
  const index = timeline.ends[rank].findIndex((end) => end > ticks);
  return index >= 0 && timeline.starts[rank][index] <= ticks ? { rank, index } : null;
}

// Where an item that is dragged to a time would be put among the others of its rank.
function placeFor(layout, timeline, { rank, index }, x, scroll) {
  const ticks = toTime(layout, x, scroll) / timeline.tick.toNumber();
  let place = 0;
  timeline.starts[rank].forEach((start, other) => {
    if (other !== index && (start + timeline.ends[rank][other]) / 2 < ticks) place += 1;
  });
  return place;
}
