// Schedules from search: the shortest order under a limit on activations (simulate/search.py).
//
// One stage a rank, backward passes in halves. A rank's order is a word of m letters F, I and W; in
// every beginning of it F leads I, I leads W, and F is at most `memory` ahead of W. Rules write
// words (`greedy`, `pattern`), and moving single letters improves them. Of equally short orders the
// one with the shorter span (of the rank where it is longest) is better for batches in a row. The
// random numbers are not Python's, so the words may differ from its; bound and rules do not.
"use strict";

function buildProblem(costs, numMicrobatches, memory) {
  if (memory < 1) throw new RuleError(`memory=${memory}; a rank holds 1 microbatch at least`);
  const kinds = { F: costs.forward, I: costs.inputGradient, W: costs.weightGradient };
  const all = [costs.communication, ...Object.values(kinds).flat()];
  const { tick, counts } = inTicks(all);
  const [communication, ...lasts] = counts;
  const p = costs.forward.length;
  const durations = costs.forward.map((_, r) => ({ F: lasts[r], I: lasts[p + r], W: lasts[2 * p + r] }));
  const ticksPerUnit = Number(tick.d) / Number(tick.n);
  return { numMicrobatches, memory, durations, communication, ticksPerUnit };
}

// In ticks: makespan, and the longest time between a rank's first start and its last end. Infinity
// for words that wait for each other in a circle. Does not look at memory.
function wordsScore(problem, words) {
  const { durations, communication: c } = problem;
  const p = durations.length;
  const [place, free] = [new Array(p).fill(0), new Array(p).fill(0)];
  const ends = durations.map(() => ({ F: [], I: [], W: [] }));
  const ready = durations.map((_, rank) => rank);
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
  if (words.some((word, rank) => place[rank] < word.length)) {
    return { length: Infinity, span: Infinity };
  }
  const spans = free.map((end, rank) => end - (ends[rank].F[0] - durations[rank].F));
  return { length: Math.max(...free), span: Math.max(...spans) };
}

function better(one, other) {
  return one.length < other.length || (one.length === other.length && one.span < other.span);
}

// What no order can be shorter than, in ticks; simulate/search.py derives it.
function lowerBound(problem) {
  const { numMicrobatches: m, memory, communication: c, durations } = problem;
  const sum = (times, of) => times.reduce((total, t) => total + of(t), 0);
  return Math.max(
    ...durations.map((own, rank) => {
      const head = sum(durations.slice(0, rank), (t) => t.F + c);
      const trip = sum(durations.slice(rank + 1), (t) => t.F + t.I + 2 * c);
      const [held, each] = [Math.min(m, memory), own.F + own.I + own.W];
      const waits = head + own.F + trip + m * each - held * own.F;
      const [rounds, rest] = [Math.floor((m - 1) / memory), (m - 1) % memory];
      const cycle = own.F + trip + own.I + own.W;
      const chain = head + rounds * cycle + rest * own.F + own.F + trip + own.I;
      const tail = sum(durations.slice(0, rank), (t) => c + t.I);
      return Math.max(waits, head + m * each, chain + Math.max(own.W, tail));
    }),
  );
}

// By rank: how many forwards may lead I. Equal for all, and fewer on later ranks.
function leads(problem) {
  const [p, most] = [problem.durations.length, problem.memory];
  const every = new Map();
  for (const step of [0, 1, 2]) {
    for (let ahead = 1; ahead <= most + step * p; ahead++) {
      const lead = Array.from({ length: p }, (_, rank) =>
        Math.max(1, Math.min(most, ahead - step * rank)),
      );
      every.set(lead.join(), lead);
    }
  }
  const stride = 1 + Math.floor(every.size / 40);
  return [...every.values()].filter((_, number) => number % stride === 0);
}

// ZB-H1 and ZB-H2, and what lies between.
function pattern(problem, lead) {
  const m = problem.numMicrobatches;
  return lead.map((ahead) => {
    const [first, delay] = [Math.min(ahead, m), problem.memory - ahead];
    let word = "F".repeat(first);
    for (let i = 0; i < m; i++) {
      word += "I" + (i >= delay ? "W" : "") + (first + i < m ? "F" : "");
    }
    return word + "W".repeat(Math.min(m, delay));
  });
}

// Whoever is free first runs I, or else F, or else W, if the limits allow.
function greedy(problem, lead) {
  const { durations, numMicrobatches: m, communication: c, memory } = problem;
  const p = durations.length;
  const [words, free] = [durations.map(() => ""), durations.map(() => 0)];
  const ends = durations.map(() => ({ F: [], I: [], W: [] }));
  // When the rank's next operation of a kind could start; Infinity while that is not known.
  const earliest = (rank, kind) => {
    const own = ends[rank];
    const i = own[kind].length;
    if (i === m) return Infinity;
    if (kind === "W") return own.I[i] ?? Infinity;
    if (kind === "F") {
      if (i - own.W.length === memory || i - own.I.length === lead[rank]) return Infinity;
      return rank === 0 ? 0 : (ends[rank - 1].F[i] ?? Infinity) + c;
    }
    if (rank === p - 1) return own.F[i] ?? Infinity;
    return (ends[rank + 1].I[i] ?? Infinity) + c;
  };
  for (let step = 0; step < 3 * m * p; step++) {
    let best = { time: Infinity };
    for (const kind of "IFW") {
      for (let rank = 0; rank < p; rank++) {
        const time = Math.max(earliest(rank, kind), free[rank]);
        if (time < best.time) best = { time, rank, kind };
      }
    }
    const { time, rank, kind } = best;
    free[rank] = time + durations[rank][kind];
    ends[rank][kind].push(free[rank]);
    words[rank] += kind;
  }
  return words;
}

function defaultTries(problem) {
  const size = 3 * problem.durations.length * problem.numMicrobatches;
  return Math.max(200, Math.min(20000, Math.floor(4e6 / size)));
}

// The three best words that the rules write, shortest first.
function startingWords(problem) {
  const starts = leads(problem).flatMap((lead) => [greedy(problem, lead), pattern(problem, lead)]);
  const scored = starts.map((words) => ({ words, ...wordsScore(problem, words) }));
  return scored.sort((a, b) => a.length - b.length || a.span - b.span).slice(0, 3);
}

// Yields {words, length, bound, tried, tries} now and then, so that a page can show it; the last
// one is the result.
function* search(problem, tries = defaultTries(problem)) {
  const starts = startingWords(problem);
  const bound = lowerBound(problem);
  let best = starts[0];
  let tried = 0;
  for (const [seed, start] of starts.entries()) {
    for (const { now, turn } of improve(problem, start, Math.floor(tries / 3), seed, bound)) {
      if (better(now, best)) best = now;
      yield { ...best, bound, tried: tried + turn, tries };
    }
    tried += Math.floor(tries / 3);
  }
  yield { ...best, bound, tried: tries, tries };
}

// Moves single letters and keeps what is not longer, and now and then what is.
function* improve(problem, start, tries, seed, goal) {
  const chance = generator(seed);
  const below = (n) => Math.floor(chance() * n);
  const now = [...start.words];
  let length = start.length;
  let best = start;
  const times = problem.durations.flatMap((own) => Object.values(own)).filter((time) => time);
  const unit = Math.min(...times);
  const work = problem.durations.map((own) => problem.numMicrobatches * (own.F + own.I + own.W));
  const goals = { length: goal, span: Math.max(...work) };
  for (let turn = 0; turn < tries && better(goals, best); turn++) {
    if (turn % 50 === 49) yield { now: best, turn };
    const rank = below(now.length);
    const old = now[rank];
    const source = below(old.length);
    const target = source + (chance() < 0.5 ? -1 : 1) * (1 + below(6));
    const rest = old.slice(0, source) + old.slice(source + 1);
    const cut = Math.max(0, target);
    const fresh = rest.slice(0, cut) + old[source] + rest.slice(cut);
    if (fresh === old || !allowed(fresh, problem.memory)) continue;
    now[rank] = fresh;
    const found = wordsScore(problem, now);
    const heat = (unit * (1 - turn / tries)) / 3 + 1e-9;
    if (found.length <= length || chance() < Math.exp((length - found.length) / heat)) {
      length = found.length;
      if (better(found, best)) best = { words: [...now], ...found };
    } else {
      now[rank] = old;
    }
  }
  yield { now: best, turn: tries };
}

function allowed(word, memory) {
  const count = { F: 0, I: 0, W: 0 };
  for (const kind of word) {
    count[kind] += 1;
    if (!(count.W <= count.I && count.I <= count.F && count.F <= count.W + memory)) return false;
  }
  return true;
}

// Orders, microbatches numbered by kind from 0.
function asSchedule(words, name = "search") {
  const orders = words.map((word, rank) => {
    const count = { F: 0, I: 0, W: 0 };
    return [...word].map((kind) => new Op(kind, rank, count[kind]++));
  });
  return new Schedule(name, orders, oneChain(words.length));
}
