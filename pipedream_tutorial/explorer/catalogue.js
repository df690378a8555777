// The schedules by name (schedules/catalogue.py): what each does, and how long a rank idles.
"use strict";

const oneFOneB = (p, m) => alternating(p, m, (s) => p - s);

// `policy`: flush, if not given. `idle`: of a rank up to the end, for even stages and c = 0 without
// overlap, where `when` holds; in p, m, v, F, I, W and B = I + W.
const SCHEDULES = {
  naive: {
    build: (p, m) => alternating(p, m, () => 1),
    title: "Naive", idle: "(p - 1) * m * (F + B)",
    says: "One microbatch goes through all ranks and back before the next one starts.",
  },
  gpipe: {
    build: (p, m) => alternating(p, m, () => m),
    title: "GPipe", idle: "(p - 1) * (F + B)",
    says: "All forward passes, then all backward passes: a rank holds all m microbatches.",
  },
  "1f1b": {
    build: oneFOneB, title: "1F1B with flush", idle: "(p - 1) * (F + B)",
    says: "Each backward pass as early as it can run: rank r holds only p-r microbatches.",
  },
  "eager-1f1b": {
    build: (p, m) => alternating(p, m, (s) => 2 * (p - s) - 1),
    title: "Eager 1F1B", idle: "(p - 1) * (F + B)",
    says: "1F1B with more forward passes ahead, so that messages arrive before they are needed.",
  },
  pipedream: {
    build: oneFOneB, policy: "stash", title: "PipeDream", idle: "(p - 1) * (F + B)",
    says: "1F1B without a flush: an update after each backward pass, and old weights are kept for it.",
  },
  "pipedream-vertical": {
    build: oneFOneB, policy: "vertical", title: "PipeDream, vertical sync",
    idle: "(p - 1) * (F + B)",
    says: "PipeDream, and a microbatch uses the same version of the weights on every stage.",
  },
  "pipedream-no-stash": {
    build: oneFOneB, policy: "in-place", title: "PipeDream, no stashing",
    idle: "(p - 1) * (F + B)",
    says: "PipeDream that keeps no old weights: backward passes see newer ones, and gradients are wrong.",
  },
  "pipedream-2bw": {
    build: oneFOneB, policy: "2bw", title: "PipeDream-2BW", idle: "(p - 1) * (F + B)",
    says: "Without a flush, one update a batch, one batch behind: two versions of the weights do.",
  },
  interleaved: {
    build: interleaved, title: "Interleaved 1F1B",
    idle: "(p - 1) * (F + B) / v", when: "m >= p",
    says: "Each rank has v shorter stages, so that the pipeline fills v times as fast; more messages.",
  },
  "zb-h1": {
    build: (p, m) => alternating(p, m, (s) => p - s, (s) => s),
    title: "ZB-H1",
    idle: "(p - 1) * (F + I - min(F, I, W))", when: "m >= p",
    says: "The backward pass cut in two: W waits until its rank would idle, in 1F1B's memory.",
  },
  "zb-h2": {
    build: (p, m) => alternating(p, m, (s) => 2 * (p - s) - 1, (s) => 2 * s),
    title: "ZB-H2",
    idle: "(p - 1) * max(F, F + I - 2 * min(F, W))", when: "m >= 2 * p - 1",
    says: "More forward passes ahead: no rank pauses between its first and last operation, in twice the memory.",
  },
  "zb-v": {
    build: zbV, title: "ZB-V",
    idle: "(p - 1) * max(I - W, I / 2)", when: "m >= 2 * p - 1 && I >= F && I >= W",
    says: "Two stages a rank, down the ranks and up again: ZB-H2's density in 1F1B's memory.",
  },
  "v-half": {
    build: vHalf, title: "V-Half",
    idle: "(3 * ceil(p / 2) - 3.5) * F", when: "F === I && I === W && m >= p + 2 && p >= 3",
    says: "ZB-V's two stages a rank, spaced so that a microbatch is gone sooner: half of 1F1B's memory.",
  },
  "v-min": {
    build: vMin, title: "V-Min",
    idle: "(4 * p - 5) * F / 2",
    when: "F === I && I === W && m >= p + 1 && p >= 2 && p % 3 > 0",
    says: "As tight as two stages a rank allow: a third of 1F1B's memory, and pauses in between.",
  },
  "dualpipe-v": {
    build: dualpipeV, title: "DualPipeV",
    idle: "(p - 1) * (2 * F + I - min(I, W)) / 2", when: "F >= I",
    says: "Two stages a rank; a forward and a backward pass run as one pair, to hide messages.",
  },
  dualpipe: {
    build: dualpipe, title: "DualPipe",
    idle: "(p / 2 - 1) * (2 * F + I - min(I, W))", when: "F >= I",
    says: "Two copies of the model, filled from both ends of the pipeline; passes run in pairs.",
  },
  chimera: {
    build: chimera, title: "Chimera",
    idle: "(p - 2) * (max(F, B) + (m / p - 1) * abs(F - B))",
    says: "Two copies of the model in opposite directions: each fills the other one's pauses.",
  },
};
const OWN = {
  search: {
    title: "Search within the memory limit",
    says: "Moves single operations and keeps what is not longer, within the memory limit.",
  },
  csv: { title: "From a file", says: "The orders of the file, timed by the same rules." },
};

function entryOf(name) {
  return SCHEDULES[name] ?? OWN[name];
}

function policyOf(name) {
  return POLICIES[entryOf(name).policy ?? "flush"];
}

// What an expression of `idle` or `when` comes to for these choices.
function evaluate(expression, { p, m, v, F, I, W }) {
  const [f, i, w] = [F, I, W].map((value) => Fraction.parse(value).toNumber());
  const formula = new Function(
    "p", "m", "v", "F", "I", "W", "B", "min", "max", "abs", "ceil", `return ${expression};`,
  );
  return formula(p, m, v, f, i, w, i + w, Math.min, Math.max, Math.abs, Math.ceil);
}

// A sentence on a schedule, and its idle time as a formula, with its value where it holds.
function aboutOf(name, chosen) {
  const { says, idle, when = "" } = entryOf(name);
  if (name === "search") return `${says} ${searchText(searchedFor(chosen))}`;
  if (!idle) return says;
  const { flushes } = policyOf(name);
  const even = !chosen.scale.length && [chosen.c, chosen.saving].every((value) => Number(value) === 0);
  const own = !chosen.cut && !chosen.recompute && !chosen.moves.length && chosen.n === 1 && flushes;
  const value = even && own && evaluate(when || "true", chosen) ? shortNumber(evaluate(idle, chosen)) : "";
  const ranges = when.split(" && ").map((range) => range.replace("===", "=").replace(" * ", " "));
  const where = ["even stages", "c = 0", ...ranges.filter(Boolean)].join(", ");
  const text = `${says} A rank idles ${idle.replaceAll(" * ", " ")}`;
  return value ? `${text} = ${value}.` : `${text} ${flushes ? "a batch" : "once"} (${where}).`;
}

function searchText({ length, bound, tried, unit }) {
  const [found, least] = [length, bound].map((ticks) => shortNumber(ticks * unit));
  return `${found} after ${tried} tries; ${length === bound ? "shortest possible" : `no order takes less than ${least}`}.`;
}
