// Run the explorer's engine without a browser: read a list of questions as JSON, and write the
// answers. test_explorer_engine.py compares the answers with the Python simulator.

import { readFileSync } from "node:fs";
import { runInThisContext } from "node:vm";

const TUTORIAL = new URL("../", import.meta.url);
const page = readFileSync(new URL("explorer.html", TUTORIAL), "utf8");
for (const [, path] of page.matchAll(/<script src="([^"]+)"/g)) {
  if (path.endsWith("/main.js")) continue; // needs a document
  runInThisContext(readFileSync(new URL(path, TUTORIAL), "utf8"), { filename: path });
}
// Declarations of a script, such as run and SCHEDULES, are available to all later scripts and to
// this one.

const answer = {
  // Return the formula of a rank's idle time, if it is valid, and the simulated idle time.
  idle({ name, chosen }) {
    const { idle = IDLE, when = "true" } = SCHEDULES[name];
    if (!evaluate(when, chosen)) return null;
    return [evaluate(idle, chosen), run(name, chosen).numbers.idle.ranks];
  },

  run({ name, chosen }) {
    const { timeline, numbers, use } = run(name, chosen);
    const { schedule, lines, tick, c } = timeline;
    const { idle, span, peakActivations, mixed } = numbers;
    const usesOf = (stage) => schedule.ops.filter((op) => op.stage === stage).map((op) => [op, use.get(op.text)]);
    const byStage = range(schedule.numStages).map(usesOf);
    const most = (key) => byStage.map((uses) => Math.max(...uses.map(([, own]) => own[key] ?? 0)));
    const forward = byStage.map((uses) => uses.filter(([op]) => op.kind === "F"));
    return {
      tick, c, mixed,
      cells: lines.map((line) => line.map(({ item }) => itemText(item)).join()),
      starts: lines.map((line) => line.map(({ start }) => start)),
      ends: lines.map((line) => line.map(({ end }) => end)),
      floats: [...idle.ranks, ...span.ranks, idle.share, span.share, ...peakActivations],
      versions: most("kept"),
      staleness: most("behind"),
      forward: forward.map((uses) => uses.map(([op, { version }]) => [op.microbatch, version])),
      path: criticalPath(timeline).map(({ item }) => itemText(item)),
    };
  },

  csv({ text }) {
    const schedule = fromCsv(text);
    return { again: toCsv(schedule), stagesPerRank: schedule.stagesPerRank };
  },

  move({ name, chosen, move, memory }) {
    return judge(run(name, chosen).timeline, move, memory);
  },

  hash({ hash }) {
    return fromHash(hash).refused;
  },

  exact({ numStages, microbatch, batchSize }) {
    const chance = generator(0);
    const model = range(numStages).map(() => randomStage(chance));
    const { x, wanted } = buildTask()[microbatch];
    const plain = ({ U, V }) => ({ U: [...U], V: [...V] });
    const { gradients: found, loss } = exactGradients(model, { x, wanted }, batchSize);
    return {
      sizes: { WIDTH, ROWS }, weights: model.map(plain), x: [...x], wanted: [...wanted],
      gradients: found.map(plain), loss,
    };
  },

  train({ name, chosen, learningRate }) {
    return trainAlong(run(name, chosen), learningRate);
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
