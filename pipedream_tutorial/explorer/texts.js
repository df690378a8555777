// Text about the operation in focus, and the legend.
"use strict";

const KINDS = {
  F: ["forward", "forward pass"],
  B: ["backward", "backward pass"],
  I: ["input gradient", "input gradient, the first half of the backward pass"],
  W: ["weight gradient", "weight gradient, the second half of the backward pass"],
};

// Lines of text about the cell in focus.
function describe(pane) {
  const { run: { timeline, use } } = pane;
  const cell = focused(pane);
  const { item, rank, start, end } = cell;
  const at = (ticks) => shortNumber(ticks * timeline.tick);
  const names = item.map((op) => `${op.text}: ${KINDS[op.kind][1]} of microbatch ${op.microbatch} on stage ${op.stage}`);
  return [
    `${names.join("; with ")}. Rank ${rank}, from ${at(start)} to ${at(end)}.`,
    waitText(timeline, cell, at),
    ...item.filter((op) => op.kind !== "W").map((op) => weightText(use, op)),
    slackText(item, pane.slack.get(cell), at),
  ];
}

function waitText({ schedule, lines, cells, c }, { item, rank, index, bound }, at) {
  const wanted = schedule.needs(item);
  if (!wanted.length) return "It waits for nothing, because its input is the data.";
  const needs = wanted.map((need) => {
    const from = cells.get(need);
    const there = at(arrivalOf(from, rank, c));
    return from.rank === rank ? `${need} (on this rank, ended at ${there})` : `${need} (from rank ${from.rank}, arrived at ${there})`;
  });
  const own = lines[rank][index - 1]?.item.some((op) => op.text === bound) && !wanted.includes(bound);
  const reason = own ? `It starts when its rank has finished ${bound}.` : `${bound} arrived last.`;
  return `It waits for ${needs.join(" and ")}. ${bound ? reason : ""}`;
}

function weightText(use, op) {
  const { version, behind } = use.get(op.text);
  if (op.kind === "F") return `It runs with weights of version ${version}.`;
  const [own, update] = ["F", "W"].map((kind) => use.get(keyOf(kind, op.stage, op.microbatch)));
  let same = "like its forward pass";
  if (own.version !== version) same = `but its forward pass used version ${own.version}, so the gradient is not the gradient of any model`;
  const late = behind ?? update.behind;
  const updates = late === 1 ? "1 update" : `${late} updates`;
  return `It runs with weights of version ${version}, ${same}. Its gradient is ${updates} behind when it is applied.`;
}

// Describe how late an operation may be, and in which direction a move may help.
function slackText(item, slack, at) {
  const weight = item.every((op) => op.kind === "W");
  if (slack) {
    const free = `Slack ${at(slack)}: the operation can end this much later without delaying the end of the batch.`;
    return free + (weight ? " No other rank waits for a W, so you can also move it after the next operation." : "");
  }
  return weight
    ? "On a critical path. No other rank waits for a W. If you move this W after the next operation, the next operation may start earlier."
    : "On a critical path: if the operation starts earlier or becomes shorter, the last rank may end earlier.";
}

// Return the legend for the visible frames, arrows and strips: a swatch color, if any, and text.
function showLegend(panes, chosen) {
  const shown = panes.filter((pane) => pane.run);
  const schedules = shown.map((pane) => pane.run.timeline.schedule);
  const used = new Set(schedules.flatMap((schedule) => schedule.ops.map((op) => op.kind)));
  const entries = [
    ...Object.keys(KINDS).map((kind) => [used.has(kind), kind, `${kind}, ${KINDS[kind][0]}`]),
    [schedules.some(({ stagesPerRank }) => stagesPerRank > 1), "", "paler: a rank's later stages"],
    [chosen.byVersion, "", "below: the kind of operation; above: the version of the weights that it uses (W uses none)"],
    [chosen.held, "held", "held: microbatches whose activations the rank keeps"],
    [chosen.held && chosen.K, "bad", "above the memory limit (dashed line)"],
    [chosen.versions, "versions", "versions: copies of the weights that the rank keeps"],
    [chosen.stale, "stale", "behind: updates that the last gradient missed"],
    [chosen.path, "path", "framed: the critical path"],
    [chosen.arrows, "quiet", "thin arrow: a message"],
    [true, "ink", "thick frame: the operation in focus"],
    [true, "accent", "framed, with an arrow: its inputs; dashed arrow: the users of its result"],
  ];
  const items = entries.filter(([on]) => on).map(([, color, text]) => {
    const swatch = el("span", { className: color ? "swatch" : "" });
    swatch.style.background = `var(--${color})`;
    return el("span", {}, swatch, text);
  });
  byId("legend").replaceChildren(...items);
}
