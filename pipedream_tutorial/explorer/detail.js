// What there is to say about an operation, and the legend.
"use strict";

const KINDS = {
  F: ["forward", "forward pass"],
  R: ["forward again", "forward pass once more, as its activations were not kept,"],
  B: ["backward", "backward pass"],
  I: ["input gradient", "input gradient, the first half of the backward pass"],
  W: ["weight gradient", "weight gradient, the second half of the backward pass"],
};

// Lines of text about the item in focus.
function describe(pane) {
  const { run, focus: { rank, index } } = pane;
  const { schedule, tick, starts, ends } = run.timeline;
  const item = schedule.orders[rank][index];
  const at = (ticks) => shortNumber(ticks * tick);
  const names = item.parts.map(
    (op) => `${op.text}: ${KINDS[op.kind][1]} of microbatch ${op.microbatch} on stage ${op.stage}`,
  );
  return [
    `${names.join("; with ")}. Rank ${rank}, from ${at(starts[rank][index])} to ${at(ends[rank][index])}.`,
    waitText(run.timeline, rank, index, at),
    ...item.parts.filter((op) => op.kind !== "W").map((op) => weightText(run, op)),
    slackText(item, pane.slack[rank][index], at),
    ...measuredText(pane, item),
  ];
}

function waitText({ schedule, ends, bounds, c }, rank, index, at) {
  const order = schedule.orders[rank];
  const bound = bounds[rank][index];
  const wanted = schedule.needs(order[index]);
  if (!wanted.length) return "Waits for nothing: its input is the data.";
  const needs = wanted.map((need) => {
    const from = schedule.places.get(need);
    const sent = ends[from.rank][from.index];
    if (from.rank === rank) return `${need} (own, ended at ${at(sent)})`;
    return `${need} (from rank ${from.rank}, there at ${at(sent + c)})`;
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

function measuredText(pane, item) {
  const { run: { timeline }, measured, focus } = pane;
  const place = measured?.schedule.places.get(item.parts[0].text);
  if (!place) return [];
  const took = (times, { rank, index }) => times.ends[rank][index] - times.starts[rank][index];
  const [real, wanted] = [took(measured, place), took(timeline, focus) * timeline.tick].map(shortNumber);
  const late = lateText(lateness(pane, place.rank, place.index));
  return [`Measured: ${real} ms (simulated ${wanted}), and it ended ${late}.`];
}

// What the frames, arrows and strips that are shown mean: a swatch's colour, or none, and a text.
function showLegend(panes, chosen) {
  const shown = panes.filter((pane) => pane.run);
  const schedules = shown.map((pane) => pane.run.timeline.schedule);
  const used = new Set(schedules.flatMap((schedule) => schedule.ops.map((op) => op.kind)));
  const measured = shown.some((pane) => pane.measured);
  const entries = [
    ...Object.keys(KINDS).map((kind) => [used.has(kind), kind, `${kind}, ${KINDS[kind][0]}`]),
    [schedules.some(({ copies, stagesPerRank }) => copies * stagesPerRank > 1), "",
      "paler: a rank's later stages, or the second copy"],
    [chosen.byVersion, "", "the kind at the foot; above it the version of the weights that a pass runs with (W reads none)"],
    [measured, "bad", "under a measured operation: it ended later than simulated"],
    [measured, "good", "it ended earlier"],
    [chosen.held, "held", "held: microbatches whose activations the rank keeps"],
    [chosen.held && chosen.K, "bad", "above the memory limit, the dashed line"],
    [chosen.versions, "versions", "versions: copies of the weights that the rank keeps"],
    [chosen.stale, "stale", "behind: updates that the last gradient did not know of"],
    [chosen.path, "path", "framed: the critical path"],
    [chosen.arrows, "quiet", "thin arrow: a message"],
    [true, "ink", "thick frame: the operation pointed at"],
    [true, "accent", "framed, with an arrow: what it waits for; dashed arrow: what waits for it"],
  ];
  const items = entries.filter(([on]) => on).map(([, colour, text]) => {
    const swatch = el("span", { className: colour ? "swatch" : "" });
    swatch.style.background = `var(--${colour})`;
    return el("span", {}, swatch, text);
  });
  byId("legend").replaceChildren(...items);
}
