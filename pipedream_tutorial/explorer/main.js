// The page: one state, and everything that is drawn from it.
"use strict";

const store = {
  chosen: fromHash(location.hash),
  change(patch) {
    store.set(changed(store.chosen, patch));
  },
  restart(chosen) {
    measured = null;
    player.reset();
    main.focus = main.drag = null;
    byId("said").textContent = "";
    byId("said").className = "";
    store.set(chosen);
  },
  set(chosen) {
    store.chosen = chosen;
    clearTimeout(store.writing); // browsers allow few changes of the address a second
    store.writing = setTimeout(store.write, 150);
    refresh();
  },
  write() {
    history.replaceState(null, "", toHash(store.chosen));
  },
};

const MOST_CELLS = 30000;

let measured = null;
let theme = readTheme();
const main = new Pane(byId("panes"), "Timeline. Arrow keys choose an operation, Enter picks it up.");
const beside = new Pane(byId("panes"), "Timeline of the schedule beside it");
const panes = [main, beside];
const player = new Player((time) => panes.forEach((pane) => pane.draw(time)));
const searcher = new Searcher((improved) => (improved ? refresh() : showSearch()));

// What the engine says of a schedule, or {error}.
function attempt(name, chosen, moves) {
  try {
    checkSize(name, chosen);
    if (name !== "search") return run(name, chosen, { moves });
    const { words } = searcher.best(chosen);
    return run(name, chosen, { words, moves: searcher.busy ? [] : moves });
  } catch (error) {
    if (!(error instanceof RuleError)) throw error;
    return { error: `This cannot run: ${error.message}.` };
  }
}

// Python has no such limit; a page should answer at once.
function checkSize(name, { p, m, n, v }) {
  const count = p * m * n * 3 * (name === "interleaved" ? v : 1);
  if (count > MOST_CELLS) {
    throw new RuleError(`about ${count} operations are too many for a page; take fewer batches`);
  }
}

function refresh() {
  const { chosen } = store;
  const level = LEVELS[chosen.level - 1];
  const result = attempt(chosen.schedule, chosen, chosen.moves);
  const title = titleOf(chosen.schedule) + (chosen.moves.length ? ", changed by you" : "");
  main.show(title, result, chosen.schedule === "csv" ? measured : null);
  beside.box.hidden = !chosen.other;
  if (chosen.other) beside.show(titleOf(chosen.other), attempt(chosen.other, chosen, []), null);
  else beside.run = null;
  showControls(chosen, level);
  showScales(store, level, result.timeline?.schedule);
  const trained = result.error ? null : train(result, chosen);
  showTrained(trained, chosen);
  showSearch();
  showLimit(result);
  byId("undo").disabled = byId("reset").disabled = !chosen.moves.length;
  place();
  showFocus(main.focus ? main : beside.focus ? beside : main);
  showLesson(store, result.error ? null : { ...result, trained });
}

function place() {
  const longest = Math.max(...panes.map((pane) => pane.units));
  const times = panes.flatMap(({ run: own }) =>
    own ? [...own.timeline.starts, ...own.timeline.ends].flat().map((t) => t * own.timeline.tick.toNumber()) : [],
  );
  panes.forEach((pane) => pane.place(store.chosen, theme, longest));
  player.setTimes(times);
  showLegend();
}

function showSearch() {
  const { schedule, other } = store.chosen;
  byId("searching").hidden = ![schedule, other].includes("search");
  if (byId("searching").hidden || !searcher.found) return;
  const { length, bound, tried, tries, ticksPerUnit } = searcher.found;
  const [best, least] = [length, bound].map((ticks) => shortNumber(ticks / ticksPerUnit));
  const state = length === bound ? "shortest possible" : `no order takes less than ${least}`;
  byId("searching").textContent = `Search: ${best} after ${tried} of ${tries} tries; ${state}.`;
}

// A limit binds the search and what is dragged; fixed schedules are only said to exceed it.
function showLimit(result) {
  const { K } = store.chosen;
  const over = [];
  if (K && !result.error) {
    result.numbers.peakActivations.forEach((held, rank) => {
      if (held.toNumber() > K) over.push(rank);
    });
  }
  byId("limit").hidden = !over.length;
  byId("limit").textContent = `Over the memory limit of ${K} on rank${over.length > 1 ? "s" : ""} ${over.join(", ")}.`;
}

function showLegend() {
  const names = {
    F: "forward", R: "forward again", B: "backward", I: "input gradient", W: "weight gradient",
  };
  const ops = panes.flatMap((pane) => pane.run?.timeline.schedule.ops() ?? []);
  const kinds = Object.keys(names).filter((kind) => ops.some((op) => op.kind === kind));
  const swatches = kinds.map((kind) => {
    const box = el("span", { className: "swatch" });
    box.style.background = fillOf(theme, kind, 0).fill;
    return el("span", {}, box, `${kind}, ${names[kind]}`);
  });
  const several = panes.some((pane) => pane.pale && pane.run && [...pane.pale.values()].some(Boolean));
  if (several) swatches.push(el("span", {}, "paler: a rank's later stages, or the second copy"));
  if (store.chosen.byVersion) {
    const text = "at the foot; above it the version of the weights that a pass runs with (W reads none)";
    swatches.push(el("span", {}, text));
  }
  byId("legend").replaceChildren(...swatches);
}

function say(text, verdict) {
  byId("said").textContent = text;
  byId("said").className = verdict;
}

function showFocus(pane) {
  panes.forEach((other) => {
    if (other !== pane) other.focus = null;
    other.draw();
  });
  byId("detail").hidden = !pane.focus || !pane.run;
  if (byId("detail").hidden) return;
  byId("lines").replaceChildren(...describe(pane).map((line) => el("p", {}, line)));
  const own = pane === main && !main.measured;
  byId("earlier").hidden = byId("later").hidden = !own;
}

function move(by) {
  const { rank, index } = main.focus;
  const to = index + by;
  if (hands.busy() || to < 0 || to >= main.run.timeline.schedule.orders[rank].length) return;
  aim(main, hands, { rank, from: index, to });
  drop(main, hands);
}

const hands = {
  say,
  busy() {
    const busy = store.chosen.schedule === "search" && searcher.busy;
    if (busy) say("Wait until the search has ended.", "illegal");
    return busy;
  },
  onFocus: showFocus,
  onMove({ rank, from, to }, text, verdict) {
    store.change({ moves: [...store.chosen.moves, { rank, from, to }] });
    say(text, verdict);
  },
  onKey(event) {
    const act = { " ": () => player.toggle(), ".": () => player.step(1), ",": () => player.step(-1) };
    act[event.key]?.();
    return event.key in act;
  },
};

function attachButtons() {
  byId("undo").onclick = () => store.change({ moves: store.chosen.moves.slice(0, -1) });
  byId("reset").onclick = () => store.change({ moves: [] });
  byId("earlier").onclick = () => move(-1);
  byId("later").onclick = () => move(1);
  byId("share").onclick = async () => {
    store.write();
    await navigator.clipboard?.writeText(location.href);
    say("The address of this page holds all that you see but a trace; it is in the clipboard now.", "same");
  };
  byId("again").onclick = () => startLevel(store, store.chosen.level);
  byId("rate").onchange = () => {
    const rate = checkDuration("rate", byId("rate").value);
    store.change({ rate: rate ?? store.chosen.rate });
  };
}

function start() {
  buildLevelBar(store);
  buildControls(store);
  attachHands(main, hands, { editable: true });
  attachHands(beside, hands, { editable: false });
  attachFiles({ store, pane: main, say, setMeasured(found) {
    measured = found;
    refresh();
  } });
  attachButtons();
  new ResizeObserver(place).observe(byId("panes"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    theme = readTheme();
    place();
  });
  addEventListener("hashchange", () => {
    store.chosen = fromHash(location.hash);
    refresh();
  });
  refresh();
}

start();
window.explorer = { store, main, beside, player, searcher, run }; // for the console, and the tests
