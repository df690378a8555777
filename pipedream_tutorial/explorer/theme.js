// Colours, from the style sheet, so that light and dark are written in one place.
"use strict";

const NAMES = [
  "F", "R", "B", "I", "W", "paper", "lane", "line", "ink", "quiet", "accent", "bad", "held", "versions",
  "stale", "veil", "path",
];

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const theme = Object.fromEntries(
    NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
  );
  theme.font = style.getPropertyValue("--font").trim();
  theme.fills = new Map();
  return theme;
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// The colour of a kind, mixed with the paper for a rank's second, third ... stage: {fill, ink}.
function fillOf(theme, kind, pale) {
  const key = kind + pale;
  if (!theme.fills.has(key)) {
    const [own, paper] = [channels(theme[kind]), channels(theme.paper)];
    const mixed = own.map((value, k) => Math.round(value + pale * (paper[k] - value)));
    const linear = mixed.map((value) => {
      const c = value / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    const ink = (luminance + 0.05) ** 2 > 0.05 * 1.05 ? "#000000" : "#ffffff";
    theme.fills.set(key, { fill: `rgb(${mixed.join()})`, ink });
  }
  return theme.fills.get(key);
}

// Colours for weight versions, in turn: neighbours differ in lightness too.
const VERSION_COLOURS = ["#56b4e9", "#d55e00", "#f0e442", "#00664a", "#cc79a7", "#0072b2", "#e69f00"];

// The colour of a cell: of its kind, or of the version of the weights that it runs with.
function inkOf(theme, op, pale, versions) {
  if (!versions) return fillOf(theme, op.kind, pale.get(op.stage) ?? 0);
  const version = versions.get(op.text);
  if (version === undefined) return { fill: theme.line, ink: theme.ink }; // W reads no weights
  const name = `version ${version % VERSION_COLOURS.length}`;
  theme[name] = VERSION_COLOURS[version % VERSION_COLOURS.length];
  return fillOf(theme, name, 0);
}

// operation -> the version of its stage's weights that it runs with; none for W.
function versionsOf(use) {
  const found = new Map();
  for (const [stage, { forward, backward, live }] of use) {
    for (const { op } of live) {
      const own = { F: forward, R: backward, B: backward, I: backward }[op.kind];
      if (own) found.set(`${stage}${op.kind}${op.microbatch}`, own.get(op.microbatch));
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
