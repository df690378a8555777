// What the reader has chosen, and how it is written into the address.
"use strict";

const START = {
  schedule: "1f1b", other: "", p: 4, m: 8, v: 2, n: 1,
  F: "1", I: "1", W: "1", c: "0", saving: "0", scale: [], K: 0, tries: 0,
  recompute: false, kept: "1/20",
  cut: false, moves: [], csv: "", path: false, arrows: false,
  held: true, versions: false, stale: false, byVersion: false, gradients: false, rate: "0.5",
  zoom: 1, level: 0, solved: [],
};

const WHOLE = { p: [1, 16], m: [1, 64], v: [1, 8], n: [1, 8], K: [0, 64], tries: [0, 20000] };
const DURATIONS = ["F", "I", "W", "c", "saving", "kept"];

// A duration as the rules of the scripts accept it; null for what they refuse.
function checkDuration(key, text) {
  const value = Fraction.parse(text);
  if (!value) return null;
  const most = { saving: 1, kept: 1, rate: 100 }[key] ?? 1e6;
  const above = ["F", "I", "scale", "rate"].includes(key) ? value.n > 0n : value.n >= 0n;
  return above && value.toNumber() <= most && value.d < 10n ** 9n ? String(text).trim() : null;
}

const write = {
  boolean: (value) => (value ? "1" : "0"),
  number: String,
  string: encodeURIComponent,
};

function writeList(key, list) {
  if (key === "moves") return list.map(({ rank, from, to }) => `${rank}.${from}.${to}`).join("_");
  return list.map(encodeURIComponent).join("_");
}

function toHash(chosen) {
  const parts = [];
  for (const [key, value] of Object.entries(chosen)) {
    const text = Array.isArray(value) ? writeList(key, value) : write[typeof value](value);
    const usual = Array.isArray(START[key]) ? "" : write[typeof START[key]](START[key]);
    if (text !== usual) parts.push(`${key}=${text}`);
  }
  return "#" + parts.join("&");
}

// What is not known or not allowed is left at its usual value.
function fromHash(hash) {
  const chosen = { ...START };
  for (const part of hash.replace(/^#/, "").split("&")) {
    const [key, text] = [part.slice(0, part.indexOf("=")), part.slice(part.indexOf("=") + 1)];
    const value = key in START ? readValue(key, text) : null;
    if (value !== null) chosen[key] = value;
  }
  if (chosen.schedule === "csv" && !chosen.csv) chosen.schedule = START.schedule;
  return chosen;
}

function readValue(key, text) {
  let plain;
  try {
    plain = decodeURIComponent(text);
  } catch {
    return null;
  }
  if (key in WHOLE) return inRange(Number(plain), WHOLE[key]);
  if (DURATIONS.includes(key) || key === "rate") return checkDuration(key, plain);
  if (key === "zoom") return inRange(Number(plain), [1, 32]);
  if (key === "level") return inRange(Number(plain), [0, 6]);
  if (key === "schedule") return plain in SCHEDULES || plain in OWN ? plain : null;
  if (key === "other") return plain in SCHEDULES || plain === "search" ? plain : null;
  if (typeof START[key] === "boolean") return plain === "1";
  if (key === "csv") return plain;
  const list = plain ? plain.split("_") : [];
  if (key === "solved") return list.map(Number).filter((level) => level >= 1 && level <= 6);
  if (key === "moves") return list.map(readMove).filter(Boolean);
  return list.every((factor) => checkDuration("scale", factor)) ? list : null;
}

function inRange(value, [low, high]) {
  return Number.isInteger(value) ? Math.min(high, Math.max(low, value)) : null;
}

function readMove(text) {
  const [rank, from, to] = text.split(".").map(Number);
  return [rank, from, to].every((n) => Number.isInteger(n) && n >= 0) ? { rank, from, to } : null;
}

// Moves name places in an order, so they go when the order is another one.
const ORDER_KEYS = ["schedule", "p", "m", "v", "n", "cut", "recompute", "csv"];

function changed(chosen, patch) {
  const next = { ...chosen, ...patch };
  const searched = next.schedule === "search" && [...DURATIONS, "K", "scale", "tries"];
  const keys = [...ORDER_KEYS, ...(searched || [])];
  if (!("moves" in patch) && keys.some((key) => next[key] !== chosen[key])) next.moves = [];
  if (next.scale.length % next.p) { // one a rank, or the same number for each
    next.scale = Array.from({ length: next.p }, (_, rank) => next.scale[rank] ?? "1");
  }
  return next;
}
