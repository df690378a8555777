// Menus, sliders and switches. Each reads the state and writes one key of it.
"use strict";

// key: [name, help, ends of the slider where RULES has none]
const SLIDERS = {
  p: ["p, ranks", "GPUs; each holds one stage or more"],
  m: ["m, microbatches", "that a batch is cut into"],
  n: ["batches", "one after the other"],
  v: ["v, chunks", "stages a rank, under interleaved 1F1B"],
  K: ["memory limit", "microbatches that a rank may hold; 0 is no limit", [0, 64]],
  F: ["F, forward", "time of a forward pass on one rank", [0.25, 4]],
  I: ["I, input gradient", "first half of the backward pass", [0.25, 4]],
  W: ["W, weight gradient", "second half of the backward pass", [0, 4]],
  c: ["c, communication", "time from one rank to the next; occupies neither", [0, 4]],
  saving: ["overlap saving", "share of a pair's shorter half that is hidden (DualPipeV)", [0, 1]],
  kept: ["kept until R", "share of its activations that a stage keeps between F and R: its input", [0, 1]],
};
const SWITCHES = {
  path: "critical path", arrows: "messages", held: "memory", versions: "weight versions",
  stale: "staleness", byVersion: "cells by weight version", gradients: "gradient error",
  cut: "cut every B into I and W", recompute: "recompute activations (R)",
};

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
  byId("sliders").append(...Object.entries(SLIDERS).map(([key, [name, help, ends]]) => {
    const [min, max] = ends ?? RULES[key].whole;
    const slider = el("input", { type: "range", id: key, min, max, title: help });
    slider.oninput = () => store.change({ [key]: accepted(key, slider.value) });
    // A field that takes exact numbers, such as 1/3.
    const field = el("input", { id: `${key}-field`, className: "field", inputMode: "decimal" });
    field.ariaLabel = `${name}, ${help}`;
    field.onchange = () => enter(key, field.value);
    const label = el("label", { htmlFor: key, title: help }, name);
    return el("div", { className: "slider", id: `${key}-box` }, label, slider, field);
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

// What was typed; where it is refused, the field shows again what holds.
function enter(key, text) {
  const error = refusal(() => {
    store.change({ [key]: key === "scale" ? acceptedList(text, store.chosen.p) : accepted(key, text) });
  });
  if (error) store.change({});
  say(error && `error: ${error}`, "illegal");
}

function fillMenu(select, names, value) {
  if (select.dataset.names !== names.join()) {
    const options = names.map((name) => el("option", { value: name }, name ? entryOf(name).title : "nothing"));
    select.replaceChildren(...options);
    select.dataset.names = names.join();
  }
  select.value = value;
}

// Shows the state; `level` may allow some schedules and controls only.
function showControls(chosen, level) {
  const own = [...Object.keys(SCHEDULES), "search"];
  fillMenu(byId("schedule"), level?.schedules ?? [...own, ...(chosen.csv ? ["csv"] : [])], chosen.schedule);
  fillMenu(byId("other"), ["", ...own], chosen.other);
  const locked = (key) => Boolean(level) && !level.controls.includes(key);
  for (const [key, [, , ends]] of Object.entries(SLIDERS)) {
    const number = Fraction.parse(chosen[key]).toNumber();
    if (!RULES[key].whole) { // it makes room for what was typed
      byId(key).max = Math.max(ends[1], 2 ** Math.ceil(Math.log2(Math.max(number, 1))));
      byId(key).step = Number.isInteger(number * 4) ? 0.25 : "any";
    }
    byId(key).value = number;
    byId(`${key}-field`).value = key === "K" && !number ? "none" : String(chosen[key]);
    byId(`${key}-box`).hidden = locked(key) || !isOfUse(key, chosen);
  }
  for (const key of Object.keys(SWITCHES)) byId(key).checked = chosen[key];
  for (const key of ["cut", "recompute"]) byId(key).parentElement.hidden = locked(key);
  byId("uneven").hidden = locked("scale");
  byId("zoom").value = chosen.zoom;
  byId("rate").value = chosen.rate;
  byId("scale").value = chosen.scale.join() || "none";
}

function isOfUse(key, { schedule, other, recompute }) {
  if (key === "kept") return recompute;
  if ((key === "p" || key === "m") && schedule === "csv") return Boolean(other);
  const needs = { v: ["interleaved"], saving: ["dualpipe-v", "dualpipe"] }[key];
  return !needs || needs.includes(schedule) || needs.includes(other);
}
