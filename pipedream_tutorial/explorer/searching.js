// Runs the search a little in every frame, so that the page stays alive.
"use strict";

const FRAME_MS = 8;

class Searcher {
  // onFound(): called when the order got shorter, and at the end.
  constructor(onFound) {
    this.onFound = onFound;
    this.key = null;
    this.found = null;
  }

  // What was found so far for these choices, {words, length, bound, tried, tries, ticksPerUnit};
  // starts a search when they are new.
  best(chosen) {
    const of = [...DURATIONS, "p", "m", "K", "scale", "tries"].map((key) => chosen[key]);
    const key = JSON.stringify(of);
    if (key !== this.key) {
      this.key = key;
      const problem = problemOf(chosen);
      const steps = search(problem, chosen.tries || undefined);
      this.found = { ...steps.next().value, ticksPerUnit: problem.ticksPerUnit };
      this.go(steps, key);
    }
    return this.found;
  }

  get busy() {
    return this.found !== null && this.found.tried < this.found.tries;
  }

  go(steps, key) {
    const frame = () => {
      if (this.key !== key) return;
      const until = performance.now() + FRAME_MS;
      const before = this.found.length;
      let step = { done: false };
      while (!step.done && performance.now() < until) {
        step = steps.next();
        if (!step.done) this.found = { ...this.found, ...step.value };
      }
      this.onFound(this.found.length < before || step.done);
      if (!step.done) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }
}

function showSearch(searcher, { schedule, other }) {
  byId("searching").hidden = ![schedule, other].includes("search") || !searcher.found;
  if (byId("searching").hidden) return;
  const { length, bound, tried, tries, ticksPerUnit } = searcher.found;
  const [best, least] = [length, bound].map((ticks) => shortNumber(ticks / ticksPerUnit));
  const state = length === bound ? "shortest possible" : `no order takes less than ${least}`;
  byId("searching").textContent = `Search: ${best} after ${tried} of ${tries} tries; ${state}.`;
}
