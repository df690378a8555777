// What there is to say about an operation, and the legend.
"use strict";

const KIND_TEXTS = {
  F: "forward pass",
  R: "forward pass once more, as its activations were not kept,",
  B: "backward pass",
  I: "input gradient, the first half of the backward pass",
  W: "weight gradient, the second half of the backward pass",
};
const KIND_NAMES = {
  F: "forward", R: "forward again", B: "backward", I: "input gradient", W: "weight gradient",
};

// Lines of text about the item in focus.
function describe(pane) {
  const { rank, index } = pane.focus;
  const { timeline } = pane.run;
  const item = timeline.schedule.orders[rank][index];
  const at = (ticks) => shortNumber(ticks * timeline.tick.toNumber());
  const [start, end] = [timeline.starts[rank][index], timeline.ends[rank][index]];
  const names = item.parts.map(
    (op) => `${op.text}: ${KIND_TEXTS[op.kind]} of microbatch ${op.microbatch} on stage ${op.stage}`,
  );
  return [
    `${names.join("; with ")}. Rank ${rank}, from ${at(start)} to ${at(end)}.`,
    waitText(pane, rank, index, at),
    ...item.parts.filter((op) => op.kind !== "W").map((op) => weightText(pane.run, op)),
    slackText(item, pane.slack[rank][index], at),
    ...measuredText(pane, item, end - start),
  ];
}

function waitText(pane, rank, index, at) {
  const { timeline } = pane.run;
  const order = timeline.schedule.orders[rank];
  const bound = timeline.bounds[rank][index];
  const wanted = timeline.wanted.ofItem(order[index]);
  if (!wanted.length) return "Waits for nothing: its input is the data.";
  const needs = wanted.map((need) => {
    const from = pane.links.places.get(need);
    const sent = timeline.ends[from.rank][from.index];
    if (from.rank === rank) return `${need} (own, ended at ${at(sent)})`;
    return `${need} (from rank ${from.rank}, there at ${at(sent + timeline.communication)})`;
  });
  const own = order[index - 1]?.parts.some((op) => op.text === bound) && !wanted.includes(bound);
  const reason = own ? `It starts when its rank has ended ${bound}.` : `${bound} came last.`;
  return `Waits for ${needs.join(" and ")}. ${bound ? reason : ""}`;
}

function weightText(run, op) {
  const use = run.use.get(op.stage);
  const [forward, backward] = [use.forward.get(op.microbatch), use.backward.get(op.microbatch)];
  if (op.kind === "R") return `Runs with weights of version ${backward}, as the backward pass will.`;
  if (op.kind === "F") return `Runs with weights of version ${forward}.`;
  const behind = use.staleness.get(op.microbatch);
  const same =
    forward === backward
      ? "the same as its forward pass"
      : `its forward pass had version ${forward}, so this is the gradient of no model`;
  const updates = behind === 1 ? "1 update" : `${behind} updates`;
  return `Runs with weights of version ${backward}, ${same}; ${updates} behind when applied.`;
}

// How late an operation may be, and which way it is worth moving.
function slackText(item, slack, at) {
  const weight = item.parts.every((op) => op.kind === "W");
  if (slack) {
    const free = `Slack ${at(slack)}: in this order it may end that much later, and the whole ends no later.`;
    return free + (weight ? " No other rank waits for a W: it may also move behind what comes after it." : "");
  }
  return weight
    ? "On a critical path. No other rank waits for a W, though: behind the next operation it may let that one start earlier."
    : "On a critical path: if it starts earlier or gets shorter, the whole may end earlier.";
}

function measuredText(pane, item, simulated) {
  if (!pane.measured) return [];
  const { schedule, starts, ends } = pane.measured;
  for (const [rank, order] of schedule.orders.entries()) {
    const index = order.findIndex((other) => other.text === item.text);
    if (index < 0) continue;
    const took = shortNumber(ends[rank][index] - starts[rank][index]);
    const wanted = shortNumber(simulated * pane.run.timeline.tick.toNumber());
    const late = lateText(lateness(pane.run.timeline, pane.links, pane.measured, rank, index));
    return [`Measured: ${took} ms (simulated ${wanted}), and it ended ${late}.`];
  }
  return [];
}

// What the frames, arrows and strips that are shown mean: [colour or "", text].
function legendOf(panes, chosen, theme) {
  const shown = panes.filter((pane) => pane.run);
  const ops = shown.flatMap((pane) => pane.run.timeline.schedule.ops());
  const used = new Set(ops.map((op) => op.kind));
  const kinds = Object.keys(KIND_NAMES).filter((kind) => used.has(kind));
  const entries = [
    ...kinds.map((kind) => [true, theme[kind], `${kind}, ${KIND_NAMES[kind]}`]),
    [shown.some((pane) => [...pane.pale.values()].some(Boolean)), "",
      "paler: a rank's later stages, or the second copy"],
    [chosen.byVersion, "", "the kind at the foot; above it the version of the weights that a pass runs with (W reads none)"],
    [shown.some((pane) => pane.measured), theme.bad, "under a measured operation: it ended later than simulated"],
    [shown.some((pane) => pane.measured), theme.good, "it ended earlier"],
    [chosen.held, theme.held, "held: microbatches whose activations the rank keeps"],
    [chosen.held && chosen.K, theme.bad, "above the memory limit, the dashed line"],
    [chosen.versions, theme.versions, "versions: copies of the weights that the rank keeps"],
    [chosen.stale, theme.stale, "behind: updates that the last gradient did not know of"],
    [chosen.path, theme.path, "framed: the critical path"],
    [chosen.arrows, theme.quiet, "thin arrow: a message"],
    [true, theme.ink, "thick frame: the operation pointed at"],
    [true, theme.accent, "framed, with an arrow: what it waits for; dashed arrow: what waits for it"],
  ];
  return entries.filter(([on]) => on).map(([, colour, text]) => [colour, text]);
}

function showLegend(entries) {
  const items = entries.map(([colour, text]) => {
    const box = el("span", { className: colour ? "swatch" : "" });
    box.style.background = colour;
    return el("span", {}, box, text);
  });
  byId("legend").replaceChildren(...items);
}
