// Menus, sliders and switches. Each reads the state and writes one key of it.
"use strict";

const SLIDERS = [
  ["p", "p, ranks", "GPUs; each holds one stage or more"],
  ["m", "m, microbatches", "that a batch is cut into"],
  ["n", "batches", "one after the other"],
  ["v", "v, chunks", "stages a rank, under interleaved 1F1B"],
  ["K", "memory limit", "microbatches that a rank may hold; 0 is no limit"],
  ["F", "F, forward", "time of a forward pass on one rank"],
  ["I", "I, input gradient", "first half of the backward pass"],
  ["W", "W, weight gradient", "second half of the backward pass"],
  ["c", "c, communication", "time from one rank to the next; occupies neither"],
  ["saving", "overlap saving", "share of a pair's shorter half that is hidden (DualPipeV)"],
  ["kept", "kept until R", "share of its activations that a stage keeps between F and R: its input"],
];
const RANGES = { F: [0.25, 4], I: [0.25, 4], W: [0, 4], c: [0, 4], saving: [0, 1], kept: [0, 1] };
const SWITCHES = [
  ["path", "critical path"], ["arrows", "messages"], ["held", "memory"],
  ["versions", "weight versions"], ["stale", "staleness"],
  ["byVersion", "cells by weight version"], ["gradients", "gradient error"],
  ["cut", "cut every B into I and W"], ["recompute", "recompute activations (R)"],
];

function buildControls(store, say) {
  for (const [key, text] of [["schedule", "Schedule"], ["other", "Compare with"]]) {
    const select = el("select", { id: key, onchange: () => store.change({ [key]: select.value }) });
    byId("menus").append(el("label", {}, text, select));
  }
  const sliders = SLIDERS.map(([key, name, help]) => slider(store, say, key, name, help));
  byId("sliders").append(...sliders);
  for (const [key, name] of SWITCHES) {
    const box = el("input", { type: "checkbox", id: key });
    box.onchange = () => store.change({ [key]: box.checked });
    byId("switches").append(el("label", { className: "switch" }, box, name));
  }
  const zoom = el("input", { type: "range", id: "zoom", min: 1, max: 32, step: 1 });
  zoom.oninput = () => store.change({ zoom: Number(zoom.value) });
  byId("switches").append(el("label", { className: "switch" }, "zoom", zoom));
  byId("rate").onchange = () => enter(store, say, "rate", byId("rate").value);
}

// A range to drag and a field that takes exact numbers, such as 1/3.
function slider(store, say, key, name, help) {
  const [low, high] = key === "K" ? [0, WHOLE.K[1]] : WHOLE[key] ?? RANGES[key];
  const range = el("input", { type: "range", id: key, min: low, max: high, title: help });
  range.step = key in WHOLE ? 1 : 0.25;
  range.oninput = () => store.change({ [key]: accepted(key, range.value) });
  const field = el("input", { id: `${key}-field`, className: "field", inputMode: "decimal" });
  field.setAttribute("aria-label", `${name}, ${help}`);
  field.onchange = () => enter(store, say, key, field.value);
  const label = el("label", { for: key, title: help }, name);
  return el("div", { className: "slider", id: `${key}-box` }, label, range, field);
}

// What was typed; where it is refused, the field shows again what holds.
function enter(store, say, key, text) {
  try {
    store.change({ [key]: accepted(key, text) });
    say("", "same");
  } catch (error) {
    if (!(error instanceof RuleError)) throw error;
    store.change({});
    say(`error: ${error.message}`, "illegal");
  }
}

function showField(chosen, key) {
  const [range, field] = [byId(key), byId(`${key}-field`)];
  const value = Fraction.parse(chosen[key]).toNumber();
  if (!(key in WHOLE)) {
    range.max = Math.max(RANGES[key][1], 2 ** Math.ceil(Math.log2(Math.max(value, 1))));
    range.step = Number.isInteger(value * 4) ? 0.25 : "any";
  }
  range.value = value;
  field.value = key === "K" && !value ? "none" : String(chosen[key]);
}

function fillMenu(select, entries, value) {
  const wanted = entries.map(([name]) => name).join();
  if (select.dataset.entries !== wanted) {
    const options = entries.map(([name, text]) => el("option", { value: name, textContent: text }));
    select.replaceChildren(...options);
    select.dataset.entries = wanted;
  }
  select.value = value;
}

// Shows the state; `level` may allow some schedules and controls only.
function showControls(chosen, level) {
  const own = Object.entries(SCHEDULES).map(([name, { title }]) => [name, title]);
  const all = [...own, ["search", OWN.search], ...(chosen.csv ? [["csv", OWN.csv]] : [])];
  const allowed = all.filter(([name]) => !level?.schedules || level.schedules.includes(name));
  fillMenu(byId("schedule"), allowed, chosen.schedule);
  fillMenu(byId("other"), [["", "nothing"], ...own, ["search", OWN.search]], chosen.other);
  const locked = (key) => Boolean(level) && !level.controls.includes(key);
  for (const [key] of SLIDERS) {
    showField(chosen, key);
    byId(key).disabled = byId(`${key}-field`).disabled = locked(key);
    byId(`${key}-box`).hidden = locked(key) || !isOfUse(key, chosen);
  }
  for (const [key] of SWITCHES) byId(key).checked = chosen[key];
  for (const key of ["cut", "recompute"]) byId(key).parentElement.hidden = locked(key);
  byId("uneven").hidden = locked("scale");
  byId("zoom").value = chosen.zoom;
  byId("rate").value = chosen.rate;
}

function isOfUse(key, { schedule, other, recompute }) {
  if (key === "kept") return recompute;
  if ((key === "p" || key === "m") && schedule === "csv") return Boolean(other);
  const needs = { v: ["interleaved"], saving: ["dualpipe-v", "dualpipe"] }[key];
  return !needs || needs.includes(schedule) || needs.includes(other);
}

// One small slider for each p-th of the layers, or for each stage where a rank has several.
function showScales(store, schedule) {
  const { p, scale } = store.chosen;
  const perRank = schedule?.stagesPerRank ?? 1;
  const count = scale.length || p;
  const set = (now) => {
    store.change({ scale: now.length === p && now.every((f) => f === "1") ? [] : now });
  };
  byId("chunked").parentElement.hidden = perRank === 1 && count === p;
  byId("chunked").checked = count > p;
  byId("chunked").onchange = () => {
    const parts = byId("chunked").checked ? p * perRank : p;
    set(Array.from({ length: parts }, (_, k) => scale[Math.floor((k * count) / parts)] ?? "1"));
  };
  const box = byId("scales");
  if (box.children.length !== count) {
    box.replaceChildren(...Array.from({ length: count }, () => {
      const range = el("input", { type: "range", min: 0.25, max: 4, step: 0.25 });
      return el("label", {}, el("span"), range, el("output"));
    }));
  }
  const ranks = schedule?.chains[0].length === count ? rankOfPlaces(schedule) : null;
  [...box.children].forEach((label, part) => {
    const factor = scale[part] ?? "1";
    const value = Fraction.parse(factor).toNumber();
    const [name, range, shown] = label.children;
    name.textContent = `part ${part}` + (ranks ? `, rank ${ranks[part]}` : "");
    range.step = Number.isInteger(value * 4) ? 0.25 : "any";
    range.value = value;
    range.oninput = () => {
      const now = scale.length ? [...scale] : new Array(p).fill("1");
      now[part] = range.value;
      set(now);
    };
    shown.textContent = `× ${factor}`;
  });
}

// The rank of each place in the model.
function rankOfPlaces(schedule) {
  const rankOf = new Map();
  schedule.orders.forEach((order, rank) => {
    for (const item of order) for (const op of item.parts) rankOf.set(op.stage, rank);
  });
  return schedule.chains[0].map((stage) => rankOf.get(stage));
}
