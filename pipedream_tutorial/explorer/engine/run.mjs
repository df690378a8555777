// From what the reader chose to a timeline with its numbers.

import { SCHEDULES, buildSchedule } from "./catalogue.mjs";
import { fromCsv } from "./csv.mjs";
import { moved } from "./edit.mjs";
import { summary } from "./measures.mjs";
import { RuleError, cutBackwards, recomputed, repeat } from "./ops.mjs";
import { POLICIES, weightUse } from "./policies.mjs";
import { asSchedule, buildProblem, startingWords } from "./search.mjs";
import { buildCosts, simulate } from "./simulator.mjs";

export const OWN = {
  search: "Search within the memory limit",
  csv: "From your file",
};

export function titleOf(name) {
  return SCHEDULES[name]?.title ?? OWN[name];
}

export function policyOf(name) {
  return POLICIES[SCHEDULES[name]?.policy ?? "flush"];
}

export function problemOf(chosen) {
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
export function wholeSchedule(name, chosen, words) {
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
export function run(name, chosen, { words, moves = [] } = {}) {
  const schedule = moves.reduce(moved, wholeSchedule(name, chosen, words));
  const costs = buildCosts(schedule, chosen);
  const timeline = simulate(schedule, costs);
  return { name, costs, ...withNumbers(name, timeline, chosen.n) };
}

export function withNumbers(name, timeline, numBatches) {
  const policy = policyOf(name);
  const batchSize = timeline.schedule.numMicrobatches / numBatches;
  const use = weightUse(timeline.schedule, policy, batchSize);
  return { timeline, policy, batchSize, use, numbers: summary(timeline, use) };
}
