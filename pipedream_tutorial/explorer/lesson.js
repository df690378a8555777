// The bar of levels, and the text and goals of the one that is on.
"use strict";

function buildLevelBar(store) {
  const bar = byId("levels");
  const names = ["Free play", ...LEVELS.map(({ title }, k) => `${k + 1}. ${title}`)];
  bar.append(
    ...names.map((text, level) =>
      el("button", { type: "button", textContent: text, onclick: () => startLevel(store, level) }),
    ),
  );
}

function startLevel(store, level) {
  const { solved } = store.chosen;
  store.restart({ ...START, solved, ...(LEVELS[level - 1]?.start ?? {}), level });
}

// facts: {numbers, trained} of the timeline, or null where it cannot run.
function showLesson(store, facts) {
  const { level, solved } = store.chosen;
  [...byId("levels").children].forEach((button, number) => {
    button.setAttribute("aria-current", number === level ? "step" : "false");
    button.classList.toggle("solved", solved.includes(number));
  });
  byId("lesson").hidden = !level;
  if (!level) return;
  const own = LEVELS[level - 1];
  const goals = judgeLevel(own, facts);
  const done = goals.every((goal) => goal.met);
  if (byId("lesson").dataset.level !== String(level)) {
    byId("lesson").dataset.level = level;
    byId("lesson-title").textContent = `Level ${level}: ${own.title}`;
    byId("lesson-text").textContent = own.text;
    byId("hint").open = false;
    byId("hint-text").textContent = own.hint;
    byId("learned-text").textContent = own.learned;
  }
  byId("goals").replaceChildren(
    ...goals.map(({ text, met }) =>
      el("li", { className: met ? "met" : "unmet", textContent: `${met ? "✓" : "○"} ${text}` }),
    ),
  );
  byId("learned").hidden = !done;
  byId("next").hidden = level === LEVELS.length;
  byId("next").onclick = () => startLevel(store, level + 1);
  if (done && !solved.includes(level)) store.change({ solved: [...solved, level].sort() });
}
