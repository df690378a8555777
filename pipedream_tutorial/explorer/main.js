// The page: one state, and everything that is drawn from it.
"use strict";

const MOST_CELLS = 30000; // Python has no such limit; a page should answer at once.
const WIDE = matchMedia("(min-width: 1100px)"); // as in style.css: controls left, timelines right

const opened = fromHash(location.hash);
const store = {
  chosen: opened.chosen,
  change(patch) {
    store.set(changed(store.chosen, patch));
  },
  restart(chosen) {
    measured = null;
    player.reset();
    main.focus = main.drag = null;
    say("", "");
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

let measured = null;
let theme = readTheme();
const main = new Pane(byId("panes"), "Timeline. Arrow keys choose an operation, Enter picks it up.");
const beside = new Pane(byId("panes"), "Timeline of the schedule beside it");
const panes = [main, beside];
const player = new Player(
  (time) => panes.forEach((pane) => pane.draw(time)),
  () => main.run && main.run.numbers.idle.span,
);
const searcher = new Searcher((improved) =>
  improved ? refresh() : showSearch(searcher, store.chosen),
);

// What the engine says of a schedule, or {error}.
function attempt(name, chosen, moves) {
  try {
    checkSize(name, chosen);
    if (name !== "search") return run(name, chosen, { moves });
    const { words } = searcher.best(chosen);
    return run(name, chosen, { words, moves: searcher.busy ? [] : moves });
  } catch (error) {
    if (!(error instanceof RuleError)) throw error;
    return { error: `error: ${error.message}` };
  }
}

function checkSize(name, { p, m, n, v }) {
  const count = p * m * n * 3 * (name === "interleaved" ? v : 1);
  if (count > MOST_CELLS) {
    throw new RuleError(`about ${count} operations are too many for a page; take fewer batches`);
  }
}

function refresh() {
  const chosen = resolved(store.chosen);
  const level = LEVELS[chosen.level - 1];
  const result = attempt(chosen.schedule, chosen, chosen.moves);
  const title = titleOf(chosen.schedule) + (chosen.moves.length ? ", changed by you" : "");
  const about = (name, { error }) => (error ? "" : aboutOf(name, chosen));
  main.show(title, about(chosen.schedule, result), result, chosen.schedule === "csv" ? measured : null);
  beside.box.hidden = !chosen.other;
  beside.run = null;
  if (chosen.other) {
    const other = attempt(chosen.other, chosen, []);
    beside.show(titleOf(chosen.other), about(chosen.other, other), other, null);
  }
  showControls(chosen, level);
  showScales(store, result.timeline?.schedule);
  const trained = result.error ? null : train(result, chosen);
  showTrained(trained, chosen);
  showSearch(searcher, chosen);
  showLimit(result, chosen.K);
  byId("undo").disabled = byId("reset").disabled = !chosen.moves.length;
  byId("link").hidden = true;
  place();
  showFocus(main.focus ? main : beside.focus ? beside : main);
  showLesson(store, result.error ? null : { ...result, trained });
}

function place() {
  const chosen = resolved(store.chosen);
  const longest = Math.max(...panes.map((pane) => pane.units));
  showLegend(legendOf(panes, chosen, theme));
  panes.forEach((pane) => pane.place(chosen, theme, longest, roomForPane()));
  player.setTimes(panes.flatMap(({ run: own }) => {
    if (!own) return [];
    const tick = own.timeline.tick.toNumber();
    return [...own.timeline.starts, ...own.timeline.ends].flat().map((ticks) => ticks * tick);
  }));
}

const DETAIL_HEIGHT = 104;

// On a wide window all timelines are in view together, and what is said of an operation.
function roomForPane() {
  if (!WIDE.matches) return Infinity;
  const top = byId("panes").getBoundingClientRect().top + scrollY;
  const shown = panes.filter((pane) => pane.run).length;
  return (innerHeight - top - DETAIL_HEIGHT) / Math.max(1, shown) - 16;
}

// A limit binds the search and what is dragged; fixed schedules are only said to exceed it.
function showLimit(result, limit) {
  const held = limit && !result.error ? result.numbers.peakActivations : [];
  const over = held.flatMap((most, rank) => (most.toNumber() > limit ? [rank] : []));
  byId("limit").hidden = !over.length;
  byId("limit").textContent =
    `Over the memory limit of ${limit} on rank${over.length > 1 ? "s" : ""} ${over.join(", ")}.`;
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
  byId("movers").hidden = pane !== main || Boolean(main.measured);
}

// Moves the operation in focus to the place that `target` gives for its own and the last one.
function move(target) {
  const { rank, index } = main.focus;
  const last = main.run.timeline.schedule.orders[rank].length - 1;
  const to = target(index, last);
  if (hands.busy() || to < 0 || to > last || to === index) return;
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

// The address stands in a field, whether or not the browser lets a page use the clipboard.
async function share() {
  store.write();
  const field = byId("link");
  field.hidden = false;
  field.value = location.href;
  const what = "It holds all that you see but a measured run.";
  try {
    await navigator.clipboard.writeText(location.href);
    say(`The address is in the clipboard. ${what}`, "same");
  } catch { // no clipboard without https, or not allowed
    field.focus();
    field.select();
    say(`The browser gives this page no clipboard: copy the address from the field. ${what}`, "same");
  }
}

function attachButtons() {
  byId("undo").onclick = () => store.change({ moves: store.chosen.moves.slice(0, -1) });
  byId("reset").onclick = () => store.change({ moves: [] });
  byId("earlier").onclick = () => move((index) => index - 1);
  byId("later").onclick = () => move((index) => index + 1);
  byId("last").onclick = () => move((index, last) => last);
  byId("share").onclick = share;
  byId("again").onclick = () => startLevel(store, store.chosen.level);
}

function showRefused(refused) {
  if (refused.length) say(`error: ${refused.join("; ")}`, "illegal");
}

function begin() {
  buildLevelBar(store);
  buildControls(store, say);
  attachHands(main, hands, { editable: true });
  attachHands(beside, hands, { editable: false });
  attachFiles({ store, pane: main, say, setMeasured(found) {
    measured = found;
    refresh();
  } });
  attachButtons();
  new ResizeObserver(place).observe(byId("panes"));
  addEventListener("resize", place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    theme = readTheme();
    place();
  });
  addEventListener("hashchange", () => {
    const found = fromHash(location.hash);
    store.chosen = found.chosen;
    refresh();
    showRefused(found.refused);
  });
  refresh();
  showRefused(opened.refused);
}

begin();
window.explorer = { store, main, beside, player, searcher, run }; // for the console, and the tests
