// Define the reader's choices: accepted values, their form in the URL, and the resulting timeline.
// Also define the menus, sliders and switches. Each of them writes one key of the choices.
"use strict";

const START = {
  schedule: "1f1b", other: "", p: 4, m: 8, v: 2,
  n: 0, // consecutive batches; 0: one, or four if a schedule has no flush
  F: "1", I: "1", W: "1", c: "0", saving: "0", scale: [], K: 0,
  cut: false, moves: [], csv: "", path: false, arrows: false,
  held: true, versions: false, stale: false, byVersion: false, gradients: false, rate: "1",
  zoom: 1, level: 0, solved: [],
};
// Accepted values: whole numbers in a range, or numbers from 0 (or above 0 with `positive`) to
// `most`. A slider also has a label, help and, if they differ from the range, its ends.
const RULES = {
  p: { name: "num_stages", whole: [1, 16], label: "p, ranks", help: "GPUs; each holds one stage or more" },
  m: { name: "num_microbatches", whole: [1, 64], label: "m, microbatches", help: "microbatches per batch" },
  n: { name: "num_batches", whole: [1, 8], label: "batches", help: "consecutive batches" },
  v: { name: "chunks", whole: [1, 8], label: "v, chunks", help: "stages per rank, under interleaved 1F1B" },
  K: {
    name: "memory", whole: [1, 64], orNone: true, ends: [0, 64],
    label: "memory limit", help: "microbatches that a rank may hold; 0 means no limit",
  },
  F: { name: "forward", positive: true, ends: [0.25, 4], label: "F, forward", help: "time of a forward pass on one rank" },
  I: {
    name: "input_gradient", positive: true, ends: [0.25, 4],
    label: "I, input gradient", help: "first half of the backward pass",
  },
  W: { name: "weight_gradient", ends: [0, 4], label: "W, weight gradient", help: "second half of the backward pass" },
  c: {
    name: "communication", ends: [0, 4],
    label: "c, communication", help: "time of a message between two ranks, which keep computing meanwhile",
  },
  saving: {
    name: "overlap_saving", most: 1, ends: [0, 1],
    label: "overlap saving", help: "share of a pair's shorter half that is hidden (DualPipeV)",
  },
  scale: { name: "stage_scale", positive: true, most: 1000 },
  rate: { name: "learning_rate", positive: true, most: 100 },
  zoom: { name: "zoom", whole: [1, 32] },
  level: { name: "level", whole: [0, 6] },
};
const SLIDERS = Object.keys(RULES).filter((key) => RULES[key].label);
const SWITCHES = {
  path: "critical path", arrows: "messages", held: "memory", versions: "weight versions",
  stale: "staleness", byVersion: "cells by weight version", gradients: "gradient error",
  cut: "cut every B into I and W",
};
const MOST_CELLS = 15000; // Python has no such limit, but a page should answer at once.

// Return the choices with the number of batches filled in.
function resolved(chosen) {
  const names = [chosen.schedule, chosen.other].filter(Boolean);
  return { ...chosen, n: chosen.n || (names.every((name) => policyOf(name).flushes) ? 1 : 4) };
}

// Parse a value as the scripts do. Throws RuleError, in the command line's words, for other values.
function accepted(key, given) {
  const { name, whole, orNone, positive, most = 1e6 } = RULES[key];
  const text = String(given).trim();
  const value = Fraction.parse(text);
  if (orNone && /^(none|0)$/i.test(text)) return 0;
  const number = value?.toNumber();
  let kind = `a whole number from ${whole?.join(" to ")}${orNone ? ", or None" : ""}`;
  if (whole && value?.d === 1n && number >= whole[0] && number <= whole[1]) return number;
  if (!whole) {
    const fits = value && number <= most && value.d <= 10n ** 9n;
    if (fits && number >= (positive ? 1e-9 : 0)) return text;
    kind = `a number from ${positive ? "1e-09" : 0} to ${most}, such as 2, 0.5 or 1/3`;
  }
  throw new RuleError(`${name}=${text || "''"} is not accepted; give ${kind}`);
}

// Parse factors as the command line does: none, or the same number for each rank.
function acceptedList(text, p) {
  if (/^(none)?$/i.test(text.trim())) return [];
  const list = text.split(",").map((one) => accepted("scale", one));
  if (list.length % p === 0) return list;
  const fix = `give ${p}, such as stage_scale=${range(p).fill(1)}, or a multiple of ${p}, one per chunk`;
  throw new RuleError(`stage_scale has ${list.length} factors for ${p} ranks; ${fix}`);
}

function toHash(chosen) {
  const written = (value) => {
    if (Array.isArray(value)) return value.map(written).join("_");
    if (typeof value === "boolean") return value ? "1" : "0";
    return typeof value === "object" ? Object.values(value).join(".") : String(value); // a move
  };
  const parts = Object.keys(START).map((key) => [key, written(chosen[key])]);
  const start = startOf(chosen.level);
  return "#" + new URLSearchParams(parts.filter(([key, text]) => text !== written(start[key])));
}

// Return {chosen, refused}. A rejected value keeps its default, and `refused` has the reason.
function fromHash(hash) {
  const given = new URLSearchParams(hash.slice(1));
  const chosen = startOf(given.get("level"));
  const refused = [...given].map(([key, text]) => refusal(() => {
    if (!(key in START)) throw new RuleError(`the link has the unknown key ${key}`);
    chosen[key] = readValue(key, text);
  }));
  if (chosen.schedule === "csv" && !chosen.csv) chosen.schedule = START.schedule;
  return { chosen, refused: refused.filter(Boolean) };
}

function readValue(key, plain) {
  if (key === "csv") return plain;
  if (typeof START[key] === "boolean") return plain === "1";
  if (key === "schedule" || key === "other") {
    const names = [...Object.keys(SCHEDULES), ...(key === "schedule" ? ["csv"] : [])];
    if (names.includes(plain) || (key === "other" && !plain)) return plain;
    throw new RuleError(`${key}=${plain} is not accepted; give one of ${names.join(", ")}`);
  }
  if (!Array.isArray(START[key])) return accepted(key, plain);
  const list = plain ? plain.split("_") : [];
  if (key !== "moves") return list.map((one) => accepted(key === "solved" ? "level" : key, one));
  return list.map((text) => {
    const [rank, from, to] = text.split(".").map(Number);
    if ([rank, from, to].every((n) => Number.isInteger(n) && n >= 0)) return { rank, from, to };
    throw new RuleError(`moves=${text} is not accepted; a move is rank.from.to`);
  });
}

// Return the choices after a change. Moves name positions in an order, so a new order removes them.
function changed(chosen, patch) {
  const next = { ...chosen, ...patch };
  const keys = ["schedule", "p", "m", "v", "n", "cut", "csv"];
  const [before, after] = [resolved(chosen), resolved(next)];
  if (!("moves" in patch) && keys.some((key) => after[key] !== before[key])) next.moves = [];
  if (next.scale.length % next.p) { // one per rank, or the same number for each rank
    next.scale = range(next.p).map((rank) => next.scale[rank] ?? "1");
  }
  return next;
}

// Return all batches, before any move. Flushing schedules are repeated, and others continue without
// a pause.
function wholeSchedule(name, chosen) {
  const { p, m, n, v, cut } = chosen;
  const count = p * m * n * 3 * (name === "interleaved" ? v : 1);
  if (count > MOST_CELLS) {
    const limit = `this page shows at most ${MOST_CELLS}`;
    throw new RuleError(`there would be about ${count} operations, but ${limit}; use fewer batches`);
  }
  const { flushes } = policyOf(name);
  let schedule = name === "csv" ? fromCsv(chosen.csv) : SCHEDULES[name].build(p, flushes ? m : m * n, v);
  if (flushes) schedule = repeat(schedule, n);
  return cut ? cutBackwards(schedule) : schedule;
}

// Return {timeline, policy, use, batchSize, numbers}. Throws RuleError for choices that do not work.
function run(name, chosen, moves = []) {
  const schedule = moves.reduce(moved, wholeSchedule(name, chosen));
  const timeline = simulate(schedule, buildCosts(schedule, chosen));
  const policy = policyOf(name);
  const batchSize = schedule.numMicrobatches / chosen.n;
  const use = weightUse(schedule, policy, batchSize);
  return { timeline, policy, batchSize, use, numbers: summary(timeline, use) };
}

// el("button", { className: "x", onclick }, "text", child)
function el(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

function buildControls() {
  for (const [key, text] of [["schedule", "Schedule"], ["other", "Compare with"]]) {
    const select = el("select", { id: key, onchange: () => store.change({ [key]: select.value }) });
    byId("menus").append(el("label", {}, text, select));
  }
  byId("sliders").append(...SLIDERS.map((key) => {
    const { label, help: title, whole, ends: [min, max] = whole } = RULES[key];
    const slider = el("input", { type: "range", id: key, min, max, title });
    slider.oninput = () => store.change({ [key]: accepted(key, slider.value) });
    // A field that accepts exact numbers, such as 1/3.
    const field = el("input", { id: `${key}-field`, className: "field", inputMode: "decimal" });
    field.ariaLabel = `${label}, ${title}`;
    field.onchange = () => enter(key, field.value);
    const name = el("label", { htmlFor: key, title }, label);
    return el("div", { className: "slider", id: `${key}-box` }, name, slider, field);
  }));
  for (const [key, name] of Object.entries(SWITCHES)) {
    const box = el("input", { type: "checkbox", id: key });
    box.onchange = () => store.change({ [key]: box.checked });
    byId("switches").append(el("label", { className: "switch" }, box, name));
  }
  const zoom = el("input", { type: "range", id: "zoom", min: 1, max: 32, step: 1 });
  zoom.oninput = () => store.change({ zoom: Number(zoom.value) });
  byId("switches").append(el("label", { className: "switch" }, "zoom", zoom));
  for (const key of ["rate", "scale"]) byId(key).onchange = () => enter(key, byId(key).value);
}

// Handle typed text. If it is rejected, the field shows the current value again.
function enter(key, text) {
  const error = refusal(() => {
    store.change({ [key]: key === "scale" ? acceptedList(text, store.chosen.p) : accepted(key, text) });
  });
  if (error) store.change({});
  say(error && `error: ${error}`, "illegal");
}

function fillMenu(select, names, value) {
  select.replaceChildren(...names.map((name) =>
    el("option", { value: name }, name ? entryOf(name).title : "nothing"),
  ));
  select.value = value;
}

// Show the state. `level` may allow only some schedules and controls.
function showControls(chosen, level) {
  const own = Object.keys(SCHEDULES);
  fillMenu(byId("schedule"), level?.schedules ?? [...own, ...(chosen.csv ? ["csv"] : [])], chosen.schedule);
  fillMenu(byId("other"), ["", ...own], chosen.other);
  const locked = (key) => Boolean(level) && !level.controls.includes(key);
  for (const key of SLIDERS) {
    const { whole, ends } = RULES[key];
    const number = Fraction.parse(chosen[key]).toNumber();
    if (!whole) { // this leaves space for the typed text
      byId(key).max = Math.max(ends[1], 2 ** Math.ceil(Math.log2(Math.max(number, 1))));
      byId(key).step = Number.isInteger(number * 4) ? 0.25 : "any";
    }
    byId(key).value = number;
    byId(`${key}-field`).value = key === "K" && !number ? "none" : String(chosen[key]);
    byId(`${key}-box`).hidden = locked(key) || !isOfUse(key, chosen);
  }
  for (const key of Object.keys(SWITCHES)) byId(key).checked = chosen[key];
  byId("cut").parentElement.hidden = locked("cut");
  byId("uneven").hidden = locked("scale");
  byId("zoom").value = chosen.zoom;
  byId("rate").value = chosen.rate;
  byId("scale").value = chosen.scale.join() || "none";
}

function isOfUse(key, { schedule, other }) {
  if ((key === "p" || key === "m") && schedule === "csv") return Boolean(other);
  const needs = { v: ["interleaved"], saving: ["dualpipe-v"] }[key];
  return !needs || needs.includes(schedule) || needs.includes(other);
}
