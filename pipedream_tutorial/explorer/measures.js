// What a timeline costs: idle time, activations, versions, the critical path (simulate/measures.py).
"use strict";

// Idle time by rank, in ticks: until the last rank ends, and within the rank's own span.
function idle(timeline) {
  const { starts, ends, last } = timeline;
  const busy = ends.map((line, r) => line.reduce((sum, end, k) => sum + end - starts[r][k], 0));
  const spans = ends.map((line, r) => (line.length ? line.at(-1) - starts[r][0] : last));
  const total = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const share = (all) => new Fraction(BigInt(all - total(busy)), BigInt(all) || 1n);
  return {
    makespan: busy.map((b) => timeOf(timeline, last - b)),
    span: spans.map((s, r) => timeOf(timeline, s - busy[r])),
    makespanFraction: share(last * busy.length),
    spanFraction: share(total(spans)),
  };
}

// By rank: after each operation, how many stages' activations of a microbatch the rank holds. A
// forward pass adds one; it goes with the backward pass, or with W where that is cut in two. Where
// there is an R, the forward pass is there twice: with all that it computes (`begins`), and with the
// share that stays when it ends; R adds the rest. `parts`: the same, in units of 1/kept.d.
function activationSteps(schedule) {
  const all = Number(schedule.kept.d);
  const gone = all - Number(schedule.kept.n);
  const change = { F: all, R: gone, B: -all, I: 0, W: -all };
  const there = new Set(schedule.ops().map((op) => op.text));
  return schedule.orders.map((order) => {
    let parts = 0;
    const after = (op, more) => {
      parts += more;
      return { op, parts, held: parts / all, begins: more > 0 };
    };
    return order.flatMap((item) =>
      item.parts.flatMap((op) => {
        const again = op.kind === "F" && there.has(keyOf("R", op.stage, op.microbatch));
        return [after(op, change[op.kind]), ...(again ? [after(op, -gone)] : [])];
      }),
    );
  });
}

// Most activations that each rank holds, in microbatches of a rank's whole share.
function peakActivations(schedule) {
  const v = BigInt(schedule.stagesPerRank) * schedule.kept.d;
  return activationSteps(schedule).map(
    (steps) => new Fraction(BigInt(Math.max(0, ...steps.map((step) => step.parts))), v),
  );
}

// The items that fix the makespan, first to last, as {rank, index}.
function criticalPath(timeline) {
  const at = timeline.schedule.places();
  let rank = timeline.ends.findIndex((line) => line.at(-1) === timeline.last);
  let index = timeline.ends[rank].indexOf(timeline.last);
  const path = [{ rank, index }];
  while (timeline.bounds[rank][index] !== null) {
    ({ rank, index } = at.get(timeline.bounds[rank][index]));
    path.push({ rank, index });
  }
  return path.reverse();
}

// By rank and item: how much later, in ticks, it could end without the whole ending later.
function slackOf({ schedule, wanted, starts, ends, sequence, communication, last }) {
  const at = schedule.places();
  const latest = ends.map((line) => line.map(() => last));
  const lower = (rank, index, time) => {
    latest[rank][index] = Math.min(latest[rank][index], time);
  };
  for (const [rank, index] of [...sequence].reverse()) {
    const start = latest[rank][index] - (ends[rank][index] - starts[rank][index]);
    if (index) lower(rank, index - 1, start);
    for (const need of wanted.ofItem(schedule.orders[rank][index])) {
      const from = at.get(need);
      lower(from.rank, from.index, start - (from.rank === rank ? 0 : communication));
    }
  }
  return latest.map((line, rank) => line.map((time, index) => time - ends[rank][index]));
}

// By rank: [time in ticks, stages' activations held from then on], from the start of the pass that
// makes them to the end of the pass that frees them.
function heldActivations({ schedule, starts, ends }) {
  const at = schedule.places();
  return activationSteps(schedule).map((steps, rank) => {
    const time = ({ op, begins }) => (begins ? starts : ends)[rank][at.get(op.text).index];
    return changes(steps.map((step) => [time(step), step.held]), 0);
  });
}

// By rank: [time in ticks, weight versions of its stages kept from then on].
function liveVersions({ schedule, ends }, use) {
  return schedule.orders.map((order, rank) => {
    const stages = [...new Set(order.flatMap((item) => item.parts.map((op) => op.stage)))];
    const kept = new Map(stages.map((stage) => [stage, 1]));
    const after = new Map(stages.flatMap((s) => use.get(s).live.map((l) => [l.op.text, l.count])));
    const points = order.flatMap((item, index) =>
      item.parts.map((op) => {
        kept.set(op.stage, after.get(op.text));
        return [ends[rank][index], [...kept.values()].reduce((a, b) => a + b, 0)];
      }),
    );
    return changes(points, stages.length);
  });
}

// By rank: [time in ticks, how many updates behind the newest microbatch's weights were].
function stalenessSteps({ schedule, ends }, use) {
  const behind = (op) => use.get(op.stage).staleness.get(op.microbatch);
  return schedule.orders.map((order, rank) => {
    const points = order.flatMap((item, index) => {
      const last = item.parts.filter((op) => op.kind === "B" || op.kind === "W");
      return last.map((op) => [ends[rank][index], behind(op)]);
    });
    return changes(points, 0);
  });
}

// Only where the value changes; of several points at one time the last.
function changes(points, first) {
  const found = [];
  for (const [time, value] of new Map([[0, first], ...points])) {
    if (!found.length || found.at(-1)[1] !== value) found.push([time, value]);
  }
  return found;
}

// The numbers of the tutorial's tables for one timeline.
function summary(timeline, use) {
  const { schedule } = timeline;
  const uses = schedule.chains.flat().map((stage) => use.get(stage));
  return {
    makespan: timeOf(timeline, timeline.last),
    idle: idle(timeline),
    peakActivations: peakActivations(schedule),
    peakVersions: uses.map((u) => Math.max(...u.live.map((l) => l.count))),
    staleness: uses.map((u) => Math.max(...u.staleness.values())),
    mixed: uses.some((u) => [...u.backward].some(([i, version]) => u.forward.get(i) !== version)),
  };
}

function largest(fractions) {
  return fractions.reduce((a, b) => (a.compare(b) < 0 ? b : a), whole(0));
}
