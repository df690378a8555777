// Measured runs from a Chrome trace that the tutorial wrote (simulate/trace.py).
"use strict";

const FIRST_PID = { measured: 2000, predicted: 1000 };
const MOST_RANKS = 1000;

// {group, schedule, starts, ends (ms, by rank in the rank's order), durations: mean ms}.
function readTrace(text) {
  let document;
  try {
    document = JSON.parse(text);
  } catch {
    throw new RuleError("this is no JSON; give a file that --trace wrote");
  }
  const slices = (document.traceEvents ?? []).filter((e) => e.ph === "X" && e.cat === "compute");
  slices.sort((a, b) => a.ts - b.ts || a.dur - b.dur);
  for (const [group, first] of Object.entries(FIRST_PID)) {
    const own = slices.filter(({ pid }) => pid >= first && pid < first + MOST_RANKS);
    const numRanks = 1 + Math.max(...own.map(({ pid }) => pid - first));
    if (own.length) return readRun(group, range(numRanks).map((r) => own.filter((e) => e.pid === first + r)));
  }
  throw new RuleError("it holds no run of a pipeline; give a file that --trace wrote");
}

// lines: slices by rank.
function readRun(group, lines) {
  const orders = lines.map((line) =>
    line.map(({ args }) => {
      const ops = (args.parts ?? [args]).map((op) => new Op(op.kind, op.stage, op.microbatch));
      return ops.length === 2 ? new Pair(...ops) : ops[0];
    }),
  );
  const stages = orders.flat(1).flatMap((item) => item.parts.map((op) => op.stage));
  const schedule = new Schedule(orders, 1 + Math.max(...stages));
  const first = Math.min(...lines.flat().map((e) => e.ts));
  const starts = lines.map((line) => line.map((e) => (e.ts - first) / 1000));
  const ends = lines.map((line) => line.map((e) => (e.ts + e.dur - first) / 1000));
  return { group, schedule, starts, ends, durations: meanDurations({ schedule, starts, ends }) };
}

// In ms: means of a rank's whole share, each rank's factor on them, and the sending time. A backward
// pass that is not cut is halved between I and W.
function meanDurations({ schedule, starts, ends }) {
  const rounded = (value) => Math.round(value * 100) / 100;
  const mean = (numbers) => sum(numbers) / numbers.length;
  const lasts = ends.map((line, rank) => line.map((end, k) => end - starts[rank][k]));
  const share = (kind) => {
    const own = schedule.orders.flatMap((order, rank) => lasts[rank].filter((_, k) => order[k].kind === kind));
    return own.length ? mean(own) * schedule.stagesPerRank : null;
  };
  const half = (share("B") ?? 0) / 2;
  const busy = lasts.map(sum);
  const positive = (value) => Math.max(0.01, rounded(value));
  return {
    F: positive(share("F") ?? 1),
    I: positive(share("I") ?? half),
    W: positive(share("W") ?? half),
    c: rounded(sendingTime({ schedule, starts, ends })),
    scale: busy.map((time) => positive(time / mean(busy))),
  };
}

// Median time, in ms, from the end of an operation to the start of the one on another rank that
// takes its result in, over those that had nothing else to do (runtime/prediction.py).
function sendingTime({ schedule, starts, ends }) {
  const gaps = schedule.orders.flatMap((order, rank) =>
    order.flatMap((item, index) =>
      schedule.needs(item).flatMap((need) => {
        const from = schedule.places.get(need);
        const sent = ends[from.rank][from.index];
        const idle = index === 0 || ends[rank][index - 1] <= sent;
        return from.rank !== rank && idle ? [starts[rank][index] - sent] : [];
      }),
    ),
  );
  gaps.sort((a, b) => a - b);
  const middle = gaps.length / 2;
  const median = (gaps[Math.ceil(middle) - 1] + gaps[Math.floor(middle)]) / 2;
  return gaps.length ? Math.max(0, median) : 0;
}
