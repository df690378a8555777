// Runs the explorer's engine without a browser: reads a list of questions as JSON, writes the
// answers. test_explorer_engine.py compares them with the Python simulator.

import { readFileSync } from "node:fs";
import { runInThisContext } from "node:vm";

const TUTORIAL = new URL("../", import.meta.url);
const page = readFileSync(new URL("explorer.html", TUTORIAL), "utf8");
for (const [, path] of page.matchAll(/<script src="([^"]+)"/g)) {
  if (path.endsWith("/main.js")) continue; // needs a document
  runInThisContext(readFileSync(new URL(path, TUTORIAL), "utf8"), { filename: path });
}
const {
  RuleError, SCHEDULES, buildCosts, buildSchedule, criticalPath, evaluate, fromCsv, judge, makespan,
  readTrace, run, simulate, toCsv, rules, gradients,
} = runInThisContext(`({
  RuleError, SCHEDULES, buildCosts, buildSchedule, criticalPath, evaluate, fromCsv, judge, makespan,
  readTrace, run, simulate, toCsv,
  rules: { buildProblem, leads, greedy, pattern, lowerBound, search, asSchedule },
  gradients: {
    buildModel, buildTask, exactGradients, trainAlong, WIDTH, HIDDEN, CLASSES, ROWS,
  },
})`);

const answer = {
  names: () =>
    Object.entries(SCHEDULES).map(([name, { title, policy }]) => [name, title, policy]),

  // The formula of a rank's idle time: where it holds, beside what is simulated.
  idle({ name, chosen }) {
    const { idle, when = "true" } = SCHEDULES[name];
    if (!idle || !evaluate(when, chosen)) return null;
    return [evaluate(idle, chosen), run(name, chosen).numbers.idle.makespan.map((time) => time.toNumber())];
  },

  run({ name, chosen }) {
    const { timeline, numbers, use } = run(name, chosen);
    const path = criticalPath(timeline).map(
      ({ rank, index }) => timeline.schedule.orders[rank][index].text,
    );
    return {
      tick: timeline.tick.toString(),
      cells: timeline.schedule.orders.map((order) => order.map((item) => item.text).join()),
      starts: timeline.starts,
      ends: timeline.ends,
      bounds: timeline.bounds,
      makespan: numbers.makespan.toString(),
      idle: numbers.idle.makespan.map(String),
      span: numbers.idle.span.map(String),
      shares: [numbers.idle.makespanFraction, numbers.idle.spanFraction].map(String),
      activations: numbers.peakActivations.map(String),
      versions: numbers.peakVersions,
      staleness: numbers.staleness,
      mixed: numbers.mixed,
      forward: [...use].map(([stage, own]) => [stage, [...own.forward]]),
      path,
    };
  },

  rules({ chosen, m, memory }) {
    const costs = buildCosts(buildSchedule("1f1b", chosen.p, 1), chosen);
    const problem = rules.buildProblem(costs, m, memory);
    const lead = rules.leads(problem);
    return {
      leads: lead,
      greedy: lead.map((each) => rules.greedy(problem, each)),
      pattern: lead.map((each) => rules.pattern(problem, each)),
      bound: rules.lowerBound(problem) / problem.ticksPerUnit,
    };
  },

  search({ chosen, m, memory, tries }) {
    const costs = buildCosts(buildSchedule("1f1b", chosen.p, 1), chosen);
    const problem = rules.buildProblem(costs, m, memory);
    const found = [...rules.search(problem, tries)].at(-1);
    const timeline = simulate(rules.asSchedule(found.words), costs);
    return { words: found.words, makespan: makespan(timeline).toString() };
  },

  csv({ text }) {
    const schedule = fromCsv(text, "csv");
    return { again: toCsv(schedule), stagesPerRank: schedule.stagesPerRank };
  },

  move({ name, chosen, move, memory }) {
    const { timeline, costs } = run(name, chosen);
    const judged = judge(timeline, costs, move, memory ?? Infinity);
    return { verdict: judged.verdict, text: judged.text };
  },

  trace({ text }) {
    const { group, schedule, starts, ends, durations } = readTrace(text);
    return { group, csv: toCsv(schedule), starts, ends, durations };
  },

  exact({ numStages, microbatch, batchSize }) {
    const model = gradients.buildModel(numStages);
    const batch = gradients.buildTask()(microbatch);
    const plain = (weights) =>
      Object.fromEntries(Object.entries(weights).map(([key, w]) => [key, [...w]]));
    const { gradients: found, loss } = gradients.exactGradients(model, batch, batchSize);
    const { WIDTH, HIDDEN, CLASSES, ROWS } = gradients;
    return {
      sizes: { WIDTH, HIDDEN, CLASSES, ROWS },
      weights: model.map(plain), x: [...batch.x], classes: batch.classes,
      gradients: found.map(plain), loss,
    };
  },

  train({ name, chosen, learningRate }) {
    const { timeline, policy, use, batchSize } = run(name, chosen);
    return gradients.trainAlong(timeline, policy, use, batchSize, learningRate);
  },

};

const questions = JSON.parse(readFileSync(0, "utf8"));
const answers = questions.map((question) => {
  try {
    return answer[question.ask](question);
  } catch (error) {
    if (!(error instanceof RuleError)) throw error;
    return { error: error.message };
  }
});
process.stdout.write(JSON.stringify(answers));
