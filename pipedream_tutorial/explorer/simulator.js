// Runs the orders of a schedule against an exact clock of whole ticks (simulate/simulator.py).
"use strict";

// Durations by a stage's place in the model. `scale` has a factor for each equal share of the layers,
// a stage the mean of what it has of each; with v stages a rank a stage is 1/v of the work.
function buildCosts(schedule, durations) {
  const numStages = schedule.chains[0].length;
  const given = durations.scale?.length ? durations.scale.map(Fraction.parse) : [ONE];
  const share = new Fraction(1n, BigInt(schedule.stagesPerRank));
  const parts = given.length; // of a stage; a share has numStages of them
  const factors = Array.from({ length: numStages }, (_, place) =>
    Array.from({ length: parts }, (_, k) => given[Math.floor((place * parts + k) / numStages)])
      .reduce((sum, factor) => sum.plus(factor))
      .times(share)
      .over(new Fraction(BigInt(parts))),
  );
  const each = (value) => factors.map((factor) => Fraction.parse(value).times(factor));
  return {
    forward: each(durations.F),
    inputGradient: each(durations.I),
    weightGradient: each(durations.W),
    communication: Fraction.parse(durations.c),
    overlapSaving: Fraction.parse(durations.saving ?? 0),
  };
}

function exactDuration(item, costs, position) {
  if (item.parts.length === 2) {
    const [a, b] = item.parts.map((op) => exactDuration(op, costs, position));
    return a.plus(b).minus(costs.overlapSaving.times(a.compare(b) < 0 ? a : b));
  }
  const place = position.get(item.stage);
  const [first, second] = [costs.inputGradient[place], costs.weightGradient[place]];
  return { F: costs.forward[place], R: costs.forward[place], B: first.plus(second), I: first, W: second }[item.kind];
}

function withoutMicrobatch(item) {
  if (item.parts.length === 1) return item.kind + item.stage;
  return item.parts.map((op) => op.kind + op.stage).join("|");
}

// A tick is the longest time of which every duration is a multiple.
function buildClock(schedule, costs) {
  const position = schedule.position();
  const exact = new Map();
  for (const order of schedule.orders) {
    for (const item of order) {
      const key = withoutMicrobatch(item);
      if (!exact.has(key)) exact.set(key, exactDuration(item, costs, position));
    }
  }
  const times = [costs.communication, ...exact.values()];
  const scale = times.map((time) => time.d).reduce(lcm, 1n);
  const ticks = times.map((time) => (time.n * scale) / time.d).reduce(gcd, 0n) || 1n;
  const tick = new Fraction(ticks, scale);
  const inTicks = (time) => {
    const count = Number(time.over(tick).n);
    if (count > 2 ** 40) throw new RuleError("the durations have no common tick that is in reach");
    return count;
  };
  const durations = new Map([...exact].map(([key, time]) => [key, inTicks(time)]));
  return { tick, communication: inTicks(costs.communication), durations };
}

// {schedule, tick, starts, ends, bounds ...}: of the last three a list a rank, in its order, in ticks.
// A bound is the operation whose end (and sending) fixed the start; null at time 0.
function simulate(schedule, costs) {
  const wanted = new Needs(schedule);
  checkOnceAndWhole(schedule);
  const clock = buildClock(schedule, costs);
  const lists = () => schedule.orders.map(() => []);
  const run = {
    schedule, wanted, clock, starts: lists(), ends: lists(), bounds: lists(),
    sequence: [], // [rank, index] of items, each after all that it needs
    done: new Map(), // operation -> [when it ended, on which rank]
    waiting: new Map(), // operation -> ranks that wait for it
  };
  const ready = schedule.orders.map((_, rank) => rank);
  while (ready.length) ready.push(...advance(run, ready.pop()));
  if (run.waiting.size) {
    checkNeeds(schedule, wanted);
    throw deadlock(schedule, run.ends.map((line) => line.length), wanted, run.done);
  }
  const { starts, ends, bounds, sequence } = run;
  const last = Math.max(...ends.map((line) => line.at(-1) ?? 0));
  const { tick, communication } = clock;
  return { schedule, wanted, tick, communication, starts, ends, bounds, sequence, last };
}

// Run the rank's operations up to the first that has to wait; the ranks that this frees.
function advance(run, rank) {
  const { schedule, wanted, clock, done, waiting } = run;
  const [order, starts, ends] = [schedule.orders[rank], run.starts[rank], run.ends[rank]];
  const freed = [];
  while (ends.length < order.length) {
    const item = order[ends.length];
    let start = ends.at(-1) ?? 0;
    let bound = ends.length ? order[ends.length - 1].parts.at(-1).text : null;
    for (const need of wanted.ofItem(item)) {
      const found = done.get(need);
      if (found === undefined) {
        if (!waiting.has(need)) waiting.set(need, []);
        waiting.get(need).push(rank);
        return freed;
      }
      const arrival = found[1] === rank ? found[0] : found[0] + clock.communication;
      if (arrival > start) [start, bound] = [arrival, need];
    }
    const end = start + clock.durations.get(withoutMicrobatch(item));
    starts.push(start);
    ends.push(end);
    run.sequence.push([rank, ends.length - 1]);
    run.bounds[rank].push(bound);
    for (const op of item.parts) {
      done.set(op.text, [end, rank]);
      if (waiting.has(op.text)) freed.push(...waiting.get(op.text));
      waiting.delete(op.text);
    }
  }
  return freed;
}

function timeOf(timeline, ticks) {
  return ticks ? timeline.tick.times(new Fraction(BigInt(ticks))) : ZERO;
}

function makespan(timeline) {
  return timeOf(timeline, timeline.last);
}
