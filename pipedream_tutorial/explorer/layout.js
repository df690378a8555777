// Where things are on a timeline's canvas: time to x, rank to y, and back. And their colours.
"use strict";

const AXIS = 18;

// `room`: the height in pixels that the canvas had better not exceed.
function buildLayout({ numRanks, strips, hasMeasured, width, zoom, longest, room }) {
  const gutter = width < 500 ? 40 : 58;
  const share = hasMeasured ? 1.6 : 1;
  let [row, strip, gap] = [numRanks <= 4 ? 32 : numRanks <= 8 ? 26 : 19, 14, 7];
  if (AXIS + 2 + numRanks * (row * share + strips.length * strip + gap) > room) {
    [strip, gap] = [8, 3];
    const each = (room - AXIS - 2) / numRanks - strips.length * strip - gap;
    row = Math.max(8, Math.min(row, Math.floor(each / share)));
  }
  const measured = hasMeasured ? Math.round(row * 0.6) : 0;
  const rank = row + measured + strips.length * strip + gap;
  const inner = (width - gutter - 10) * zoom;
  return {
    width, gutter, row, measured, rank, strip, strips, numRanks, longest,
    perUnit: inner / (longest || 1),
    whole: inner + gutter + 10,
    height: AXIS + numRanks * rank + 2,
  };
}

function toX(layout, time, scroll) {
  return layout.gutter + time * layout.perUnit - scroll;
}

function rowTop(layout, rank) {
  return AXIS + rank * layout.rank;
}

function stripTop(layout, rank, number) {
  return rowTop(layout, rank) + layout.row + layout.measured + number * layout.strip + 2;
}

function toTicks(layout, timeline, x, scroll) {
  return (x - layout.gutter + scroll) / layout.perUnit / timeline.tick.toNumber();
}

// The item at a point, as {rank, index}; null where there is none.
function itemAt(layout, timeline, x, y, scroll) {
  const rank = Math.floor((y - AXIS) / layout.rank);
  if (rank < 0 || rank >= layout.numRanks || x < layout.gutter) return null;
  if (y - rowTop(layout, rank) > layout.row) return null;
  const ticks = toTicks(layout, timeline, x, scroll);
  const index = timeline.ends[rank].findIndex((end) => end > ticks);
  return index >= 0 && timeline.starts[rank][index] <= ticks ? { rank, index } : null;
}

// Where an item that is dragged to a time would be put among the others of its rank.
function placeFor(layout, timeline, { rank, index }, x, scroll) {
  const ticks = toTicks(layout, timeline, x, scroll);
  const middles = timeline.starts[rank].map((start, k) => (start + timeline.ends[rank][k]) / 2);
  return middles.filter((middle, other) => other !== index && middle < ticks).length;
}

// The box of an item's cell.
function boxOf({ layout, timeline, scroll }, { rank, index }) {
  const tick = timeline.tick.toNumber();
  const x = toX(layout, timeline.starts[rank][index] * tick, scroll);
  const right = toX(layout, timeline.ends[rank][index] * tick, scroll);
  return { x, right, top: rowTop(layout, rank), height: layout.row };
}

const COLOUR_NAMES = [
  "F", "R", "B", "I", "W", "paper", "lane", "line", "ink", "quiet", "accent", "bad", "good",
  "held", "versions", "stale", "veil", "path", "font",
];
// For weight versions, in turn: neighbours differ in lightness too.
const VERSION_COLOURS = ["#56b4e9", "#d55e00", "#f0e442", "#00664a", "#cc79a7", "#0072b2", "#e69f00"];

// From the style sheet, so that light and dark are written in one place.
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => [name, style.getPropertyValue(`--${name}`).trim()];
  return { ...Object.fromEntries(COLOUR_NAMES.map(read)), fills: new Map() };
}

// A colour mixed with the paper for a rank's second, third ... stage: {fill, ink}.
function fillOf(theme, colour, pale) {
  const key = colour + pale;
  if (!theme.fills.has(key)) {
    const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    const [own, paper] = [channels(colour), channels(theme.paper)];
    const mixed = own.map((value, k) => Math.round(value + pale * (paper[k] - value)));
    const [red, green, blue] = mixed.map((value) => {
      const c = value / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    const ink = (luminance + 0.05) ** 2 > 0.05 * 1.05 ? "#000000" : "#ffffff";
    theme.fills.set(key, { fill: `rgb(${mixed.join()})`, ink });
  }
  return theme.fills.get(key);
}

// The colour of a cell: of its kind, or of the version of the weights that it runs with.
function inkOf(theme, op, pale, versions) {
  if (!versions) return fillOf(theme, theme[op.kind], pale.get(op.stage) ?? 0);
  const version = versions.get(op.text);
  if (version === undefined) return { fill: theme.line, ink: theme.ink }; // W reads no weights
  return fillOf(theme, VERSION_COLOURS[version % VERSION_COLOURS.length], 0);
}

// operation -> the version of its stage's weights that it runs with; none for W.
function versionsOf(use) {
  const found = new Map();
  for (const { forward, backward, live } of use.values()) {
    for (const { op } of live) {
      const own = op.kind === "F" ? forward : op.kind === "W" ? null : backward;
      if (own) found.set(op.text, own.get(op.microbatch));
    }
  }
  return found;
}

// stage -> how pale: 0 for a rank's first stage (or the first copy of the model).
function paleness(schedule) {
  const position = schedule.position();
  const copy = new Map(schedule.chains.flatMap((c, number) => c.map((stage) => [stage, number])));
  const found = new Map();
  for (const order of schedule.orders) {
    const own = [...new Set(order.flatMap((item) => item.parts.map((op) => op.stage)))];
    own.sort((a, b) => copy.get(a) - copy.get(b) || position.get(a) - position.get(b));
    own.forEach((stage, place) => found.set(stage, place / Math.max(2, own.length)));
  }
  return found;
}
