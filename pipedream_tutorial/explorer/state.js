// What the reader has chosen, what is accepted, and how it is written into the address.
"use strict";

const START = {
  schedule: "1f1b", other: "", p: 4, m: 8, v: 2,
  n: 0, // batches in a row; 0: one, or four where a schedule has no flush
  F: "1", I: "1", W: "1", c: "0", saving: "0", scale: [], K: 0, tries: 0,
  recompute: false, kept: "1/20", cut: false, moves: [], csv: "", path: false, arrows: false,
  held: true, versions: false, stale: false, byVersion: false, gradients: false, rate: "0.5",
  zoom: 1, level: 0, solved: [],
};
const WHOLE = {
  p: [1, 16], m: [1, 64], v: [1, 8], n: [1, 8], K: [1, 64], tries: [0, 20000], zoom: [1, 32],
  level: [0, 6],
};
const DURATIONS = ["F", "I", "W", "c", "saving", "kept"];
const MOST = { saving: 1, kept: 1, rate: 100, scale: 1000 };
const ABOVE_ZERO = ["F", "I", "scale", "rate"];
const IN_CONFIG = { // the scripts' names
  p: "num_stages", m: "num_microbatches", v: "chunks", n: "num_batches", K: "memory",
  F: "forward", I: "input_gradient", W: "weight_gradient", c: "communication",
  saving: "overlap_saving", kept: "recompute", scale: "stage_scale", rate: "learning_rate",
};

function withoutFlush(name) {
  return Boolean(name) && !policyOf(name).flushes;
}

// The choices with the number of batches that they mean.
function resolved(chosen) {
  const several = withoutFlush(chosen.schedule) || withoutFlush(chosen.other);
  return { ...chosen, n: chosen.n || (several ? 4 : 1) };
}

// A value as the scripts accept it; RuleError, in the command line's words, for what they refuse.
function accepted(key, given) {
  const text = String(given).trim();
  const value = Fraction.parse(text);
  const name = IN_CONFIG[key] ?? key;
  const refuse = (kind) => {
    throw new RuleError(`${name}=${text || "''"} is not accepted; ${name} is ${kind}`);
  };
  if (key in WHOLE) {
    if (key === "K" && /^(none|0)$/i.test(text)) return 0;
    const [low, high] = WHOLE[key];
    const number = value?.d === 1n ? value.toNumber() : NaN;
    if (number >= low && number <= high) return number;
    refuse(`a whole number from ${low} to ${high}${key === "K" ? ", or None" : ""}`);
  }
  const most = MOST[key] ?? 1e6;
  const above = ABOVE_ZERO.includes(key);
  const enough = value && (above ? value.n > 0n : value.n >= 0n);
  if (enough && value.toNumber() <= most && value.d < 10n ** 9n) return text;
  const range = above ? `above 0, ${most} at most` : `from 0 to ${most}`;
  return refuse(`a number ${range}, such as 2, 0.5 or 1/3`);
}

function acceptedChoice(key, text) {
  const names = [...Object.keys(SCHEDULES), "search", ...(key === "schedule" ? ["csv"] : [])];
  if (names.includes(text) || (key === "other" && !text)) return text;
  throw new RuleError(`${key}=${text} is not accepted; ${key} is one of ${names.join(", ")}`);
}

function toHash(chosen) {
  const written = (key, value) => {
    if (typeof value === "boolean") return value ? "1" : "0";
    if (!Array.isArray(value)) return encodeURIComponent(value);
    const one = key === "moves" ? ({ rank, from, to }) => `${rank}.${from}.${to}` : encodeURIComponent;
    return value.map(one).join("_");
  };
  const parts = Object.keys(START).map((key) => [key, written(key, chosen[key])]);
  const changed = parts.filter(([key, text]) => text !== written(key, START[key]));
  return "#" + changed.map(([key, text]) => `${key}=${text}`).join("&");
}

// {chosen, refused}: what is not accepted is left at its usual value, and refused says why.
function fromHash(hash) {
  const chosen = { ...START };
  const refused = [];
  for (const part of hash.replace(/^#/, "").split("&").filter(Boolean)) {
    const [key, text] = [part.slice(0, part.indexOf("=")), part.slice(part.indexOf("=") + 1)];
    try {
      if (!(key in START)) throw new RuleError(`the address has the unknown key ${key}`);
      chosen[key] = readValue(key, decodeURIComponent(text));
    } catch (error) {
      if (!(error instanceof RuleError || error instanceof URIError)) throw error;
      refused.push(error.message);
    }
  }
  if (chosen.schedule === "csv" && !chosen.csv) chosen.schedule = START.schedule;
  return { chosen, refused };
}

function readValue(key, plain) {
  if (key in WHOLE || DURATIONS.includes(key) || key === "rate") return accepted(key, plain);
  if (key === "schedule" || key === "other") return acceptedChoice(key, plain);
  if (typeof START[key] === "boolean") return plain === "1";
  if (key === "csv") return plain;
  const list = plain ? plain.split("_") : [];
  if (key === "moves") return list.map(readMove);
  return list.map((one) => accepted(key === "solved" ? "level" : key, one));
}

function readMove(text) {
  const [rank, from, to] = text.split(".").map(Number);
  if ([rank, from, to].every((n) => Number.isInteger(n) && n >= 0)) return { rank, from, to };
  throw new RuleError(`moves=${text} is not accepted; a move is rank.from.to`);
}

// The choices after a change. Moves name places in an order, so they go when that is another one.
function changed(chosen, patch) {
  const next = { ...chosen, ...patch };
  const keys = ["schedule", "p", "m", "v", "n", "cut", "recompute", "csv"];
  if (next.schedule === "search") keys.push(...DURATIONS, "K", "scale", "tries");
  const [before, after] = [resolved(chosen), resolved(next)];
  if (!("moves" in patch) && keys.some((key) => after[key] !== before[key])) next.moves = [];
  if (next.scale.length % next.p) { // one a rank, or the same number for each
    next.scale = Array.from({ length: next.p }, (_, rank) => next.scale[rank] ?? "1");
  }
  return next;
}
