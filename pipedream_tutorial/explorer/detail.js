// What there is to say about an operation, in words.
"use strict";

const KIND_TEXTS = {
  F: "forward pass",
  R: "forward pass once more, as its activations were not kept,",
  B: "backward pass",
  I: "input gradient, the first half of the backward pass",
  W: "weight gradient, the second half of the backward pass",
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
  const path = pane.onPath.has(`${rank}.${index}`);
  return [
    `${names.join("; with ")}. Rank ${rank}, from ${at(start)} to ${at(end)}.`,
    waitText(pane, rank, index, at),
    ...item.parts.map((op) => weightText(pane.run, op)).filter(Boolean),
    path
      ? "On the critical path: make it shorter or start it earlier, and the whole may end earlier."
      : "Not on the critical path.",
    ...measuredText(pane, item, end - start),
  ];
}

function waitText(pane, rank, index, at) {
  const { timeline } = pane.run;
  const item = timeline.schedule.orders[rank][index];
  const bound = timeline.bounds[rank][index];
  const needs = timeline.wanted.ofItem(item).map((need) => {
    const from = pane.links.places.get(need);
    const sent = timeline.ends[from.rank][from.index];
    if (from.rank === rank) return `${need} (own, ended at ${at(sent)})`;
    const arrives = at(sent + timeline.communication);
    return `${need} (from rank ${from.rank}, there at ${arrives})`;
  });
  if (!needs.length) return "Waits for nothing: its input is the data.";
  const before = timeline.schedule.orders[rank][index - 1];
  const own = before?.parts.some((op) => op.text === bound) && !needs.some((n) => n.startsWith(`${bound} `));
  const reason = own ? `It starts when its rank has ended ${bound}.` : `${bound} came last.`;
  return `Waits for ${needs.join(" and ")}. ${bound ? reason : ""}`;
}

function weightText(run, op) {
  if (op.kind === "W") return "";
  const use = run.use.get(op.stage);
  const [forward, backward] = [use.forward.get(op.microbatch), use.backward.get(op.microbatch)];
  if (op.kind === "R") return `Runs with weights of version ${backward}, as the backward pass will.`;
  if (op.kind === "F") return `Runs with weights of version ${forward}.`;
  const behind = use.staleness.get(op.microbatch);
  const same =
    forward === backward
      ? `the same as its forward pass`
      : `its forward pass had version ${forward}, so this is the gradient of no model`;
  const updates = behind === 1 ? "1 update" : `${behind} updates`;
  return `Runs with weights of version ${backward}, ${same}; ${updates} behind when applied.`;
}

function measuredText(pane, item, predicted) {
  if (!pane.measured) return [];
  for (const [rank, order] of pane.measured.schedule.orders.entries()) {
    const index = order.findIndex((other) => other.text === item.text);
    if (index < 0) continue;
    const took = pane.measured.ends[rank][index] - pane.measured.starts[rank][index];
    const wanted = predicted * pane.run.timeline.tick.toNumber();
    const start = shortNumber(pane.measured.starts[rank][index]);
    return [`Measured: ${shortNumber(took)} ms from ${start} (predicted ${shortNumber(wanted)}).`];
  }
  return [];
}
