// Colours, from the style sheet, so that light and dark are written in one place.

const NAMES = [
  "F", "B", "I", "W", "paper", "lane", "line", "ink", "quiet", "accent", "bad", "held", "versions",
  "stale", "veil", "path",
];

export function readTheme() {
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
export function fillOf(theme, kind, pale) {
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

// stage -> how pale: 0 for a rank's first stage (or the first copy of the model).
export function paleness(schedule) {
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
