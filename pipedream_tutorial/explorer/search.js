// Search for the shortest order under a limit on activations (simulate/search.py).
//
// Each rank has one stage, and backward passes are split. A rank's order is a word of m letters F,
// I and W. In every prefix, there are at least as many F as I and as many I as W, and at most
// `memory` more F than W. Rules build words, and moves of single letters improve them. Among
// equally short orders, an order whose longest span is shorter is better for consecutive batches.
// The random numbers differ from Python's, so the words may also differ. The bound is the same.
"use strict";

function buildProblem(chosen) {
  const { p, m, K } = chosen;
  const costs = buildCosts({ numStages: p, stagesPerRank: 1 }, chosen);
  const kinds = range(p).flatMap((rank) => [..."FIW"].map((kind) => costs[kind][rank]));
  const { tick, counts: [c, ...counts] } = inTicks([costs.c, ...kinds]);
  const durations = range(p).map((rank) => {
    const [F, I, W] = counts.slice(3 * rank);
    return { F, I, W };
  });
  return { m, c, durations, memory: Math.min(K || m, m), tick: tick.toNumber() };
}

// Return, in ticks, the makespan and the longest time between a rank's first start and its last
// end. It is Infinity for words that wait for each other in a circle. It does not check memory.
// (simulate() gives the same result and is thirty times slower.)
function score({ durations, c }, words) {
  const p = durations.length;
  const [place, free] = [new Array(p).fill(0), new Array(p).fill(0)];
  const ends = durations.map(() => ({ F: [], I: [], W: [] }));
  const ready = range(p);
  while (ready.length) {
    const rank = ready.pop();
    const [word, own, lasts] = [words[rank], ends[rank], durations[rank]];
    const sources = { F: ends[rank - 1]?.F, I: ends[rank + 1]?.I };
    for (; place[rank] < word.length; place[rank]++) {
      const kind = word[place[rank]];
      const source = sources[kind];
      if (source) {
        const i = own[kind].length;
        if (i >= source.length) break;
        free[rank] = Math.max(free[rank], source[i] + c);
      }
      free[rank] += lasts[kind];
      own[kind].push(free[rank]);
      if (kind === "F" && rank + 1 < p) ready.push(rank + 1);
      else if (kind === "I" && rank) ready.push(rank - 1);
    }
  }
  if (words.some((word, rank) => place[rank] < word.length)) return { length: Infinity, span: Infinity };
  const spans = free.map((end, rank) => end - (ends[rank].F[0] - durations[rank].F));
  return { length: Math.max(...free), span: Math.max(...spans) };
}

function byLength(one, other) {
  return one.length - other.length || one.span - other.span;
}

// Return a lower bound on the makespans of all orders, in ticks. simulate/search.py derives it.
function lowerBound({ m, memory, c, durations }) {
  const total = (times, of) => sum(times.map(of));
  const bounds = durations.map((own, rank) => {
    const head = total(durations.slice(0, rank), (t) => t.F + c);
    const trip = total(durations.slice(rank + 1), (t) => t.F + t.I + 2 * c);
    const each = own.F + own.I + own.W;
    const waits = head + own.F + trip + m * each - memory * own.F;
    const [rounds, rest] = [Math.floor((m - 1) / memory), (m - 1) % memory];
    const chain = head + rounds * (trip + each) + rest * own.F + own.F + trip + own.I;
    const tail = total(durations.slice(0, rank), (t) => c + t.I);
    return Math.max(waits, head + m * each, chain + Math.max(own.W, tail));
  });
  return Math.max(...bounds);
}

// Return {words, length, span, bound, tried} after improving the best words that the rules build.
function search(problem, tries) {
  const { durations, memory, m } = problem;
  // ZB-H1, ZB-H2 and orders between them: each rank runs `step` fewer microbatches ahead than the
  // previous rank.
  const patterns = [0, 1, 2].flatMap((step) => range(memory + step * durations.length).map((ahead) =>
    durations.map((_, rank) => {
      const lead = Math.max(0, Math.min(memory - 1, ahead - step * rank));
      return zeroBubble(m, lead, memory - 1 - lead);
    }),
  ));
  const starts = patterns.map((words) => ({ words, ...score(problem, words) })).sort(byLength);
  const bound = lowerBound(problem);
  const goal = { length: bound, span: Math.max(...durations.map(({ F, I, W }) => m * (F + I + W))) };
  let [best, tried] = [starts[0], 0];
  for (const [seed, start] of starts.slice(0, 2).entries()) {
    const found = improve(problem, start, Math.floor(tries / 2), seed, goal);
    if (byLength(found, best) < 0) best = found;
    tried += found.tried;
  }
  return { ...best, bound, tried };
}

// Move single letters. Keep changes that do not lengthen the order, and sometimes others.
function improve(problem, start, tries, seed, goal) {
  const chance = generator(seed);
  const below = (n) => Math.floor(chance() * n);
  const now = [...start.words];
  const times = problem.durations.flatMap((own) => Object.values(own)).filter((time) => time);
  const unit = Math.min(...times);
  let [best, { length }, tried] = [start, start, 0];
  for (; tried < tries && byLength(goal, best) < 0; tried++) {
    const rank = below(now.length);
    const old = now[rank];
    const source = below(old.length);
    const target = Math.max(0, source + (chance() < 0.5 ? -1 : 1) * (1 + below(6)));
    const rest = old.slice(0, source) + old.slice(source + 1);
    const fresh = rest.slice(0, target) + old[source] + rest.slice(target);
    if (fresh === old || !allowed(fresh, problem.memory)) continue;
    now[rank] = fresh;
    const found = score(problem, now);
    const heat = (unit * (1 - tried / tries)) / 3 + 1e-9;
    if (found.length <= length || chance() < Math.exp((length - found.length) / heat)) {
      length = found.length;
      if (byLength(found, best) < 0) best = { words: [...now], ...found };
    } else {
      now[rank] = old;
    }
  }
  return { ...best, tried };
}

// Mulberry32: a small random generator for [0, 1). Equal seeds give equal numbers in every browser.
function generator(seed) {
  let state = seed + 1;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

function allowed(word, memory) {
  const count = { F: 0, I: 0, W: 0 };
  return [...word].every((kind) => {
    count[kind] += 1;
    return count.W <= count.I && count.I <= count.F && count.F <= count.W + memory;
  });
}
