// Runs the orders of a schedule against an exact clock of whole ticks (simulate/simulator.py).
"use strict";

// Durations by a stage's place in the model. `scale` has a factor for each equal share of the layers,
// a stage the mean of what it has of each; with v stages a rank a stage is 1/v of the work.
function buildCosts(schedule, { F, I, W, c, saving = 0, scale = [] }) {
  const numStages = schedule.chains[0].length;
  const given = scale.length ? scale.map(Fraction.parse) : [ONE];
  const parts = given.length; // of a stage; a share has numStages of them
  const share = new Fraction(1n, BigInt(schedule.stagesPerRank * parts));
  const factors = oneChain(numStages)[0].map((place) =>
    oneChain(parts)[0]
      .map((k) => given[Math.floor((place * parts + k) / numStages)])
      .reduce((sum, factor) => sum.plus(factor))
      .times(share),
  );
  const each = (value) => factors.map((factor) => Fraction.parse(value).times(factor));
  return {
    forward: each(F), inputGradient: each(I), weightGradient: each(W),
    communication: Fraction.parse(c), overlapSaving: Fraction.parse(saving),
  };
}

function exactDuration(item, costs, position) {
  if (item.parts.length === 2) {
    const [a, b] = item.parts.map((op) => exactDuration(op, costs, position));
    return a.plus(b).minus(costs.overlapSaving.times(a.compare(b) < 0 ? a : b));
  }
  const place = position.get(item.stage);
  const [first, second] = [costs.inputGradient[place], costs.weightGradient[place]];
  if (item.kind === "B") return first.plus(second);
  return { I: first, W: second }[item.kind] ?? costs.forward[place]; // F, and R again
}

function withoutMicrobatch(item) {
  return item.parts.map((op) => op.kind + op.stage).join("|");
}

// {tick, numbers of ticks}: a tick is the longest time of which each of `times` is a multiple.
function inTicks(times) {
  const scale = times.map((time) => time.d).reduce(lcm, 1n);
  const common = times.map((time) => (time.n * scale) / time.d).reduce(gcd, 0n) || 1n;
  const counts = times.map((time) => Number((time.n * scale) / time.d / common));
  return { tick: new Fraction(common, scale), counts };
}

function buildClock(schedule, costs) {
  const position = schedule.position();
  const items = new Map(schedule.orders.flat().map((item) => [withoutMicrobatch(item), item]));
  const exact = [...items.values()].map((item) => exactDuration(item, costs, position));
  const { tick, counts } = inTicks([costs.communication, ...exact]);
  if (counts.some((count) => count > 2 ** 40)) {
    throw new RuleError("the durations have no common tick that is in reach");
  }
  const durations = new Map([...items.keys()].map((key, k) => [key, counts[k + 1]]));
  return { tick, communication: counts[0], durations };
}

// {schedule, tick, starts, ends, bounds ...}: of the last three a list a rank, in its order, in ticks.
// A bound is the operation whose end (and sending) fixed the start; null at time 0.
function simulate(schedule, costs) {
  const wanted = new Needs(schedule);
  checkOnceAndWhole(schedule);
  const clock = buildClock(schedule, costs);
  const [starts, ends, bounds] = [0, 1, 2].map(() => schedule.orders.map(() => []));
  const run = {
    schedule, wanted, clock, starts, ends, bounds,
    sequence: [], // [rank, index] of items, each after all that it needs
    done: new Map(), // operation -> [when it ended, on which rank]
    waiting: new Map(), // operation -> ranks that wait for it
  };
  const ready = schedule.orders.map((_, rank) => rank);
  while (ready.length) ready.push(...advance(run, ready.pop()));
  if (run.waiting.size) {
    checkNeeds(schedule, wanted);
    throw deadlock(schedule, ends.map((line) => line.length), wanted, run.done);
  }
  const last = Math.max(...ends.map((line) => line.at(-1) ?? 0));
  const { tick, communication } = clock;
  const { sequence } = run;
  return { schedule, wanted, tick, communication, starts, ends, bounds, sequence, last };
}

// Run the rank's operations up to the first that has to wait; the ranks that this frees.
function advance({ schedule, wanted, clock, done, waiting, sequence, ...run }, rank) {
  const [order, starts, ends] = [schedule.orders[rank], run.starts[rank], run.ends[rank]];
  const freed = [];
  while (ends.length < order.length) {
    const item = order[ends.length];
    let start = ends.at(-1) ?? 0;
    let bound = ends.length ? order[ends.length - 1].parts.at(-1).text : null;
    for (const need of wanted.ofItem(item)) {
      const found = done.get(need);
      if (found === undefined) {
        waiting.set(need, [...(waiting.get(need) ?? []), rank]);
        return freed;
      }
      const arrival = found[1] === rank ? found[0] : found[0] + clock.communication;
      if (arrival > start) [start, bound] = [arrival, need];
    }
    const end = start + clock.durations.get(withoutMicrobatch(item));
    sequence.push([rank, ends.length]);
    starts.push(start);
    ends.push(end);
    run.bounds[rank].push(bound);
    for (const op of item.parts) {
      done.set(op.text, [end, rank]);
      freed.push(...(waiting.get(op.text) ?? []));
      waiting.delete(op.text);
    }
  }
  return freed;
}

function timeOf(timeline, ticks) {
  return timeline.tick.times(whole(ticks));
}

function makespan(timeline) {
  return timeOf(timeline, timeline.last);
}
