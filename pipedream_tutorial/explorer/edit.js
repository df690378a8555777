// Moving one operation within its rank: whether that is possible, and what it costs.
"use strict";

function moved(schedule, { rank, from, to }) {
  const length = schedule.orders[rank]?.length ?? 0;
  if (from >= length || to >= length) throw new RuleError("a move names a place that is not there");
  const orders = [...schedule.orders];
  orders[rank] = [...orders[rank]];
  const [item] = orders[rank].splice(from, 1);
  orders[rank].splice(to, 0, item);
  return schedule.withOrders(orders);
}

// {timeline, verdict: "illegal" | "same" | "longer" | "shorter", text}; no timeline where illegal.
function judge(timeline, costs, move, memory = Infinity) {
  const { schedule } = timeline;
  const item = schedule.orders[move.rank][move.from];
  const changed = moved(schedule, move);
  const illegal = (text) => ({ verdict: "illegal", text: `Not possible: ${text}` });
  const broken = ownNeeds(changed, move.rank);
  if (broken) return illegal(`${broken.op} needs ${broken.need}, which this rank would run later.`);
  const most = (one) => Math.max(...activationSteps(one)[move.rank].map((step) => step.held));
  const held = most(changed);
  if (held > memory * schedule.stagesPerRank && held > most(schedule)) {
    const [shown, limit] = [held / schedule.stagesPerRank, memory];
    return illegal(
      `rank ${move.rank} would hold ${shortNumber(shown)} microbatches, and the limit is ${limit}.`,
    );
  }
  let after;
  try {
    after = simulate(changed, costs);
  } catch (error) {
    if (!(error instanceof DeadlockError)) throw error;
    return illegal(`the ranks would wait for each other. ${circleText(error.circle)}`);
  }
  return { timeline: after, ...costText(timeline, after, item) };
}

// The first operation of the rank that would run before one of its own that it needs.
function ownNeeds(schedule, rank) {
  const wanted = new Needs(schedule);
  const [own, done] = [new Set(), new Set()];
  for (const item of schedule.orders[rank]) for (const op of item.parts) own.add(op.text);
  for (const item of schedule.orders[rank]) {
    const need = wanted.ofItem(item).find((key) => own.has(key) && !done.has(key));
    if (need) return { op: item.parts.map((op) => op.text).join(" | "), need };
    for (const op of item.parts) done.add(op.text);
  }
  return null;
}

function circleText(circle) {
  const steps = circle.map(({ rank, op, need }) => `Rank ${rank} is at ${op.text} and needs ${need}`);
  return steps.join(". ") + ".";
}

function costText(before, after, item) {
  const [old, now] = [makespan(before), makespan(after)];
  const [was, is] = [shortNumber(old.toNumber()), shortNumber(now.toNumber())];
  const change = now.compare(old);
  const by = shortNumber(Math.abs(now.minus(old).toNumber()));
  const name = item.parts.map((op) => op.text).join(" | ");
  if (change === 0) return { verdict: "same", text: `Free: ${name} may move, time stays ${is}.` };
  if (change < 0) return { verdict: "shorter", text: `Gains ${by}: time falls from ${was} to ${is}.` };
  return { verdict: "longer", text: `Costs ${by}: time rises from ${was} to ${is}.` };
}
