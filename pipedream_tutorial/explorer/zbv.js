// Build ZB-V as its authors do. F and I follow a pattern, and W fills the time in which a rank would
// otherwise wait. pipedream_simple.py explains the steps, and this file builds the same orders.
"use strict";

const STEPS = { F: 0, f: 0, i: 0, I: 0 };
// By step: the direction of the rank that gives its input, and its own rank's previous step.
const GIVEN_BY = { F: -1, f: 1, i: -1, I: 1 };

// One filling. `allowed`: how much longer than the others each rank may idle before it runs a W.
// `more`: whether i and F may wait for one more W.
function fillV(p, m, lasts, allowed, more) {
  const ranks = range(p).map(() => ({
    word: [], clock: 0, idle: 0, held: 0, late: [], done: { ...STEPS }, ends: { F: [], f: [], i: [], I: [] },
  }));
  let mostIdle = 0;

  const arrivalOf = (r, step) => {
    const from = ranks[r + GIVEN_BY[step]];
    return from ? from.ends[step][ranks[r].done[step]] + lasts.c : 0;
  };
  const runWeights = (own) => {
    own.held -= 1;
    own.clock += lasts.W;
    own.word.push(own.late.shift());
  };
  const runStep = (r, step) => {
    const own = ranks[r];
    const start = Math.max(own.clock, arrivalOf(r, step));
    if (own.done.F) own.idle += start - own.clock;
    mostIdle = Math.max(mostIdle, own.idle);
    own.done[step] += 1;
    own.clock = start + lasts[step.toUpperCase()];
    own.ends[step].push(own.clock);
    own.word.push(step);
    if (step === "F" || step === "f") own.held += 1;
    else own.late.push(step === "i" ? "w" : "W");
  };
  const runAfterWeights = (r, step, oneMore) => {
    const own = ranks[r];
    const arrival = arrivalOf(r, step);
    while (own.late.length && arrival >= own.clock + lasts.W) runWeights(own);
    const spare = Math.max(mostIdle, allowed[r]) - own.idle;
    if (oneMore && own.late.length && arrival - own.clock > spare) runWeights(own);
    runStep(r, step);
  };

  // Microbatch 0 goes down the V and up again, with more F in the free time.
  for (const r of range(p)) runStep(r, "F");
  for (const r of range(p).reverse()) {
    const own = ranks[r];
    const arrival = arrivalOf(r, "f");
    while (own.held + 2 * (r + 1) <= 2 * p && own.clock + lasts.F <= arrival && own.done.F < m) {
      for (const rank of range(r + 1)) runStep(rank, "F");
    }
    runStep(r, "f");
  }
  // Each rank catches up with the previous rank.
  let turns = 0;
  for (let r = 1; r < p; r++) {
    const [before, own] = [ranks[r - 1].done, ranks[r].done];
    while (own.F + own.f < before.F + before.f || (own.f <= before.f && before.f < m)) {
      const step = "Ff"[turns++ % 2];
      for (let rank = p - 1; rank >= r; rank--) if (ranks[rank].done[step] < m) runStep(rank, step);
    }
  }
  // Alternate one backward and one forward.
  for (let round = 0; round < 2 * m; round++) {
    const steps = ranks.map(({ done }, r) => {
      const arrived = r === p - 1 || done.I < ranks[r + 1].done.I || done.i === m;
      return done.I < done.i && arrived ? "I" : "i";
    });
    for (const r of range(p).reverse()) if (steps[r] === "I") runAfterWeights(r, "I", true);
    for (const r of range(p)) if (steps[r] === "i") runAfterWeights(r, "i", more.i);
    for (const [r, own] of ranks.entries()) {
      const { F, f } = own.done;
      let step = "";
      if (f < F && (r === p - 1 || f < ranks[r + 1].done.f)) step = "f";
      else if (F < m && (f === F || r === 0 || F < ranks[r - 1].done.F)) step = "F";
      if (!step) continue;
      while (own.held === 2 * p) runWeights(own);
      runAfterWeights(r, step, more.F);
    }
  }
  for (const own of ranks) while (own.late.length) runWeights(own);
  return { words: ranks.map(({ word }) => word), idle: ranks.map(({ idle }) => idle), mostIdle };
}

// Return the filling whose ranks idle least.
function zbV(p, m, v, { F, I, W, c }) {
  const { counts } = inTicks([F, I, W, c].map(Fraction.parse));
  // A stage has half of a rank's work.
  const lasts = { F: counts[0], I: counts[1], W: counts[2], c: 2 * counts[3] };
  let [best, least] = [null, Infinity];
  for (const more of [{ i: true, F: true }, { i: true, F: false }, { i: false, F: true }, { i: false, F: false }]) {
    let [allowed, before] = [times(p, 0), Infinity];
    while (least) {
      const { words, idle, mostIdle } = fillV(p, m, lasts, allowed, more);
      if (mostIdle < least) [best, least] = [words, mostIdle];
      if (mostIdle >= before) break;
      before = mostIdle;
      allowed = idle.map((own) => before - own);
    }
  }
  return fromWords(best);
}
