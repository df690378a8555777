// Define the page: one state, and everything that is drawn from this state.
"use strict";

const WIDE = matchMedia("(min-width: 1100px)"); // as in style.css: controls left, timelines right
const DETAIL_HEIGHT = 104;

const opened = fromHash(location.hash);
const store = {
  chosen: opened.chosen,
  change(patch) {
    store.set(changed(store.chosen, patch));
  },
  restart(chosen) {
    player.reset();
    main.focus = main.drag = null;
    say("", "");
    store.set(chosen);
  },
  set(chosen) {
    store.chosen = chosen;
    clearTimeout(store.writing); // browsers allow few changes of the URL per second
    store.writing = setTimeout(store.write, 150);
    refresh();
  },
  write() {
    history.replaceState(null, "", toHash(store.chosen));
  },
};

const main = new Pane(byId("panes"), "Timeline. Arrow keys select an operation. With Shift, they move the operation.");
const beside = new Pane(byId("panes"), "Timeline of the schedule to compare with");
const panes = [main, beside];
const player = new Player();

function refresh() {
  const chosen = resolved(store.chosen);
  main.show(chosen.schedule, chosen, chosen.moves);
  beside.box.hidden = !chosen.other;
  beside.run = null;
  if (chosen.other) beside.show(chosen.other, chosen, []);
  showControls(chosen, LEVELS[chosen.level - 1]);
  const trained = main.run && train(main.run, chosen);
  showTrained(trained, chosen);
  byId("undo").disabled = byId("reset").disabled = !chosen.moves.length;
  byId("link").hidden = true;
  showLegend(panes, chosen);
  place();
  showFocus(beside.focus && !main.focus ? beside : main);
  showLesson(main.run && { ...main.run, trained });
}

function place() {
  player.setTimes(panes.flatMap((pane) => pane.times));
  // In a wide window, all timelines and the text about an operation are visible together.
  const top = byId("panes").getBoundingClientRect().top + scrollY;
  const shown = panes.filter((pane) => pane.run);
  const room = (innerHeight - top - DETAIL_HEIGHT) / Math.max(1, shown.length) - 16;
  // Two timelines keep only their numbers, so that a window shows more of both.
  const numLetters = shown.length === 1 ? 1 : 0;
  const rate = Math.max(...shown.map((pane) => readableRate(pane.run, numLetters)));
  shown.forEach((pane) => pane.place(player.longest, WIDE.matches ? room : Infinity, rate));
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
  byId("movers").hidden = pane !== main;
}

// Show the URL in a field, so that it can be copied even if the browser denies clipboard access.
async function share() {
  store.write();
  const field = byId("link");
  field.hidden = false;
  field.value = location.href;
  const what = "It contains everything that you see.";
  try {
    await navigator.clipboard.writeText(location.href);
    say(`The link was copied to the clipboard. ${what}`, "same");
  } catch { // clipboard access needs https and may be denied
    field.focus();
    field.select();
    say(`The browser does not let this page use the clipboard. Copy the link from the field. ${what}`, "same");
  }
}

function openAt({ chosen, refused }) {
  store.chosen = chosen;
  refresh();
  if (refused.length) say(`error: ${refused.join("; ")}`, "illegal");
}

buildLevelBar();
buildControls();
attachHands(main, true);
attachHands(beside, false);
attachFiles();
for (const pane of panes) {
  pane.scroller.onscroll = () => panes.forEach((other) => other.scroller.scrollLeft = pane.scroller.scrollLeft);
}
byId("undo").onclick = () => store.change({ moves: store.chosen.moves.slice(0, -1) });
byId("reset").onclick = () => store.change({ moves: [] });
byId("earlier").onclick = () => move(-1);
byId("later").onclick = () => move(1);
byId("last").onclick = () => move(Infinity);
byId("share").onclick = share;
byId("again").onclick = () => startLevel(store.chosen.level);
let drawnWidth = 0;
new ResizeObserver(() => {
  if (drawnWidth === byId("panes").clientWidth) return; // only as high as the drawing
  drawnWidth = byId("panes").clientWidth;
  place();
}).observe(byId("panes"));
addEventListener("resize", place);
addEventListener("hashchange", () => openAt(fromHash(location.hash)));
openAt(opened);
window.explorer = { store, main, beside, player }; // for the console, and the tests
