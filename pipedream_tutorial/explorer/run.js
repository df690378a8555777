// From what the reader chose to a timeline with its numbers.
"use strict";

function problemOf(chosen) {
  const schedule = buildSchedule("1f1b", chosen.p, 1);
  return buildProblem(buildCosts(schedule, chosen), chosen.m, Math.min(chosen.K || chosen.m, chosen.m));
}

// One batch, before anything was moved. `words` is what the search has found so far.
function oneBatch(name, chosen, words) {
  if (name === "search") return asSchedule(words ?? startingWords(problemOf(chosen))[0].words);
  if (name === "csv") return fromCsv(chosen.csv, "csv");
  return buildSchedule(name, chosen.p, chosen.m, chosen.v);
}

// All batches: flushing schedules again and again, the others without a pause.
function wholeSchedule(name, chosen, words) {
  const all = policyOf(name).flushes
    ? repeat(oneBatch(name, chosen, words), chosen.n)
    : buildSchedule(name, chosen.p, chosen.m * chosen.n);
  const whole = chosen.cut ? cutBackwards(all) : all;
  if (chosen.recompute && name === "search") {
    throw new RuleError("search has no recomputation; switch it off");
  }
  return chosen.recompute ? recomputed(whole, chosen.kept) : whole;
}

// {schedule, costs, timeline, policy, use, batchSize, numbers}; RuleError says what does not go.
function run(name, chosen, { words, moves = [] } = {}) {
  const schedule = moves.reduce(moved, wholeSchedule(name, chosen, words));
  const costs = buildCosts(schedule, chosen);
  const timeline = simulate(schedule, costs);
  return { name, costs, ...withNumbers(name, timeline, chosen.n) };
}

function withNumbers(name, timeline, numBatches) {
  const policy = policyOf(name);
  const batchSize = timeline.schedule.numMicrobatches / numBatches;
  const use = weightUse(timeline.schedule, policy, batchSize);
  return { timeline, policy, batchSize, use, numbers: summary(timeline, use) };
}
