// Define the schedules (schedules/orders.py, which names the papers; V-Half and V-Min can be loaded
// from CSV files): an order per rank for p ranks and m microbatches, a description of each schedule, and the idle time
// of its ranks.
//
// A rank's order is a word, as in pipedream_simple.py, with one letter per operation and two per
// pair. Lowercase letters belong to the rank's second stage, which is on the way up a V.
"use strict";

// Each kind runs a stage's microbatches in order. A whole backward pass counts as both halves. A
// step is a list of one [kind, stage], or of two for a pair.
function numbered(steps) {
  const counts = {};
  const next = ([kind, stage]) => {
    const counted = [...(kind === "B" ? "IW" : kind)].map((one) => one + stage);
    const microbatch = counts[counted[0]] ?? 0;
    for (const key of counted) counts[key] = microbatch + 1;
    return buildOp(kind, stage, microbatch);
  };
  return steps.map((step) => step.map(next));
}

// Return orders from the words of the ranks. Microbatches from m on are omitted.
function fromWords(words, m = Infinity) {
  const orders = words.map((word, r) => {
    const stageOf = (letter) => (letter < "a" ? r : 2 * words.length - 1 - r);
    const steps = [...word].map((step) => [...step].map((letter) => [letter.toUpperCase(), stageOf(letter)]));
    return numbered(steps).filter(([op]) => op.microbatch < m);
  });
  return new Schedule(orders);
}

// Return orders from the word of rank r of p.
function byRank(wordOf) {
  return (p, m) => fromWords(range(p).map((r) => wordOf(r, p, m)), m);
}

function times(count, ...steps) {
  return range(count).flatMap(() => steps);
}

// `ahead` forwards, then alternately one forward and one backward, then the remaining backwards.
function inTurn(forwards, backwards, ahead) {
  const turns = backwards.flatMap((backward, k) => [...forwards.slice(ahead + k, ahead + k + 1), backward]);
  return [...forwards.slice(0, ahead), ...turns];
}

function alternating(m, ahead) {
  return inTurn(times(m, "F"), times(m, "B"), ahead);
}

// Split the backward pass. Each W comes `delay` microbatches after its I.
function zeroBubble(m, ahead, delay) {
  const late = Math.min(delay, m);
  const backwards = [...times(late, "I"), ...times(m - late, "IW")];
  return inTurn(times(m, "F"), backwards, ahead).join("") + "W".repeat(late);
}

// v stages per rank, whose numbers are p apart. Microbatches pass the ranks v times, in rounds of
// about p.
function interleaved(p, m, v) {
  const rounds = Math.max(1, Math.floor(m / p));
  if (m % rounds) {
    const what = `${m} microbatches cannot be cut into ${rounds} equal rounds over ${p} ranks`;
    throw new RuleError(`${what}; use a multiple of ${p}, such as ${rounds * p} or ${(rounds + 1) * p}`);
  }
  const size = m / rounds;
  const chunks = range(m * v).map((step) => Math.floor(step / size) % v);
  return new Schedule(range(p).map((r) => {
    const forwards = chunks.map((chunk) => [["F", chunk * p + r]]);
    const backwards = chunks.map((chunk) => [["B", (v - 1 - chunk) * p + r]]);
    return numbered(inTurn(forwards, backwards, (v - 1) * size + 2 * (p - 1 - r)));
  }));
}

// ZB-V in torch's order, for 2p - 1 or more microbatches.
function zbV(r, p, m) {
  const count = Math.max(m, 2 * p - 1);
  let word = "F".repeat(2 * (p - r) - 1) + "fF".repeat(r) + "fiw".repeat(p - r);
  for (let i = 0; i < count - p; i++) {
    if (i < count - (2 * p - 1 - r)) word += "F"; // until all microbatches have passed the way down
    word += "IWfiw";
  }
  return word + "Ii".repeat(r) + "IW".repeat(p - r) + "w".repeat(r) + "W".repeat(r);
}

function dualpipeV(p, m) {
  if (m < 2 * p) {
    const what = `dualpipe-v needs at least 2 microbatches per rank, not ${m} for ${p} ranks`;
    throw new RuleError(`${what}; set num_microbatches to ${2 * p} or more`);
  }
  return byRank(dualpipeWord)(p, m);
}

// DualPipe's eight phases on rank r.
function dualpipeWord(r, p, m) {
  const behind = p - 1 - r;
  const pairs = times(m - 2 * p + r + 1, "Fb", "fB");
  if (!behind) pairs.splice(0, 1, "F", "b"); // the first backward must wait
  // 2 (r + 1) alternating backwards. W is delayed in the second half.
  const backwards = times(r + 1, "b", "B");
  const cut = [...backwards.slice(r + 1), ...times(behind, "B")];
  const gradients = cut.map((backward) => (backward === "b" ? "i" : "I"));
  const weights = cut.map((backward) => (backward === "b" ? "w" : "W"));
  return [
    ...times(2 * behind, "F"), ...times(r + 1, "F", "f"), ...times(behind, "i", "w", "f"),
    ...pairs, ...times(behind, "b", "fB"),
    ...backwards.slice(0, r + 1), ...gradients.slice(0, r + 1),
    ...gradients.slice(r + 1).flatMap((gradient, k) => [weights[k], gradient]),
    ...weights.slice(behind),
  ];
}

const oneFOneB = byRank((r, p, m) => alternating(m, p - 1 - r));

// `policy`: flush by default. `idle`: idle time of a rank until the end, for equal stages and c = 0
// without overlap, if `when` holds. It is a formula in p, m, v, F, I, W and B = I + W, by default
// IDLE.
const IDLE = "(p - 1) * (F + B)";
const SCHEDULES = {
  naive: {
    build: byRank((r, p, m) => "FB".repeat(m)), title: "Naive", idle: "(p - 1) * m * (F + B)",
    says: "One microbatch goes through all ranks and back before the next one starts.",
  },
  gpipe: {
    build: byRank((r, p, m) => "F".repeat(m) + "B".repeat(m)), title: "GPipe",
    says: "All forward passes run before all backward passes, so a rank holds all m microbatches.",
  },
  "1f1b": {
    build: oneFOneB, title: "1F1B with flush",
    says: "Each backward pass runs as early as possible, so rank r holds only p-r microbatches.",
  },
  "eager-1f1b": {
    build: byRank((r, p, m) => alternating(m, 2 * (p - 1 - r))), title: "Eager 1F1B",
    says: "Each rank starts with more forward passes than under 1F1B, so that messages arrive before they are needed.",
  },
  pipedream: {
    build: oneFOneB, policy: "stash", title: "PipeDream",
    says: "The order is the same as under 1F1B, but without a flush. Weights change after each backward pass, and old versions are kept.",
  },
  "pipedream-vertical": {
    build: oneFOneB, policy: "vertical", title: "PipeDream, vertical sync",
    says: "As under PipeDream, but each microbatch uses the same version of the weights on every stage.",
  },
  "pipedream-no-stash": {
    build: oneFOneB, policy: "in-place", title: "PipeDream, no stashing",
    says: "As under PipeDream, but no old versions are kept. Backward passes use newer weights, so gradients are wrong.",
  },
  "pipedream-2bw": {
    build: oneFOneB, policy: "2bw", title: "PipeDream-2BW",
    says: "Without a flush, each stage updates once per batch, one batch late. Two versions are enough if m >= p - 1.",
  },
  interleaved: {
    build: interleaved, title: "Interleaved 1F1B",
    idle: "(p - 1) * (F + B) / v", when: "m >= p",
    says: "Each rank has v shorter stages, so the pipeline fills v times as fast, but sends more messages.",
  },
  "zb-h1": {
    build: byRank((r, p, m) => zeroBubble(m, p - 1 - r, r)), title: "ZB-H1",
    idle: "(p - 1) * (F + I - min(F, I, W))", when: "m >= p",
    says: "The backward pass is cut into I and W. Rank r delays W by r microbatches. No rank holds more than rank 0 under 1F1B.",
  },
  "zb-h2": {
    build: byRank((r, p, m) => zeroBubble(m, 2 * (p - 1 - r), 2 * r)), title: "ZB-H2",
    idle: "(p - 1) * max(F, F + I - 2 * min(F, W))", when: "m >= 2 * p - 1",
    says: "More forward passes run ahead, with nearly twice the memory. If F + I <= 2 min(F, W), m >= 2p - 1 and c = 0, no rank pauses between its first and its last operation.",
  },
  "zb-v": {
    build: byRank(zbV), title: "ZB-V",
    idle: "(p - 1) * max(I - W, I / 2)", when: "m >= 2 * p - 1 && I >= F && I >= W",
    says: "Each rank has two stages, placed in a V. No rank holds more than rank 0 under 1F1B.",
  },
  "dualpipe-v": {
    build: dualpipeV, title: "DualPipeV",
    idle: "(p - 1) * (2 * F + I - min(I, W)) / 2", when: "F >= I",
    says: "Each rank has two stages. A forward and a backward pass run as a pair to hide messages.",
  },
};
const FROM_FILE = {
  title: "From a file", says: "The orders come from a file and are timed by the same rules.",
};

function entryOf(name) {
  return SCHEDULES[name] ?? FROM_FILE;
}

function policyOf(name) {
  return POLICIES[entryOf(name).policy ?? "flush"];
}

// Return the value of an expression of `idle` or `when` for these choices.
function evaluate(expression, { p, m, v, F, I, W }) {
  const [f, i, w] = [F, I, W].map((value) => Fraction.parse(value).toNumber());
  const known = { p, m, v, F: f, I: i, W: w, B: i + w, min: Math.min, max: Math.max };
  return new Function(...Object.keys(known), `return ${expression};`)(...Object.values(known));
}

// Return a sentence about a schedule, and its idle time as a formula, with its value if it is
// valid.
function aboutOf(name, chosen) {
  const { says, idle = IDLE, when = "" } = entryOf(name);
  if (name === "csv") return says;
  const { flushes } = policyOf(name);
  const even = !chosen.scale.length && [chosen.c, chosen.saving].every((value) => Number(value) === 0);
  const own = !chosen.cut && !chosen.moves.length && chosen.n === 1 && flushes;
  const text = `${says} A rank idles for ${idle.replaceAll(" * ", " ")}`;
  if (even && own && evaluate(when || "true", chosen)) return `${text} = ${shortNumber(evaluate(idle, chosen))}.`;
  const ranges = when.split(" && ").map((range) => range.replace("===", "=").replace(" * ", " "));
  const where = ["even stages", "c = 0", ...ranges.filter(Boolean)].join(", ");
  return `${text} ${flushes ? "per batch" : "once"} (${where}).`;
}
