// Define six lessons (levels). Each has a start, allowed changes, and goals that depend on the
// numbers. Below them are the level bar, and the text and goals of the current level.
"use strict";

// A goal: its text, and a test of whether a timeline's {numbers, trained} meet it.
const timeAtMost = (limit) => [`time at most ${limit}`, ({ numbers }) => numbers.makespan <= limit + 1e-9];
const idleAtMost = (share) => [`at most ${100 * share}% idle`, ({ numbers }) => numbers.idle.share <= share + 1e-9];
const heldAtMost = (limit) => [
  `no rank holds more than ${limit} microbatches`,
  ({ numbers }) => Math.max(...numbers.peakActivations) <= limit,
];

const EVEN = { F: "1", I: "1", W: "1", c: "0", scale: [], n: 1, K: 0 };

// An order that a search found after 30 tries.
const STOPPED = [
  "0F0,0F1,0F2,0I0,0W0,0I1,0F3,0I2,0W1,0F4,0W2,0F5,0I3,0W3,0I4,0W4,0I5,0W5",
  "1F0,1F1,1F2,1I0,1W0,1I1,1W1,1I2,1W2,1F3,1F4,1I3,1F5,1W3,1I4,1W4,1I5,1W5",
  "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2W1,2W2,2F3,2I3,2W3,2F4,2I4,2W4,2F5,2I5,2W5",
].join("\n");

const LEVELS = [
  {
    title: "Fill the pipeline",
    text: "With one microbatch at a time, 4 ranks are busy a quarter of the time. Each rank waits for the previous rank, and on the way back for the next rank. Cut the batch into more microbatches, so that several are in flight at the same time.",
    start: { ...EVEN, schedule: "naive", p: 4, m: 4 },
    schedules: ["naive", "gpipe"],
    controls: ["m"],
    goals: [idleAtMost(0.2)],
    hint: "Under GPipe, each rank idles in 3 of m + 3 time slots. For which m is this share a fifth?",
    learned: "Each rank idles for (p-1)(F+B) per batch, for any number of microbatches. More microbatches make this a smaller share: 12 are enough for 20%.",
  },
  {
    title: "Beat GPipe's memory",
    text: "GPipe keeps the activations of all 12 microbatches until the backward passes begin. Find an order that takes no more time and holds only 4.",
    start: { ...EVEN, schedule: "gpipe", p: 4, m: 12, held: true },
    schedules: ["naive", "gpipe", "eager-1f1b", "1f1b"],
    controls: [],
    goals: [timeAtMost(45), heldAtMost(4)],
    hint: "A backward pass frees its microbatch's activations. Look for the schedule that runs each backward pass as early as possible.",
    learned: "1F1B takes the same time, because the last rank still works without a pause. However, rank r holds only p-r microbatches, so you can increase m without using more memory.",
  },
  {
    title: "Hide W in idle time",
    text: "The previous rank waits only for the input gradient I. No rank waits for the weight gradient W. Cut every backward pass in two, and then drag W operations into the gaps.",
    start: { ...EVEN, schedule: "1f1b", p: 3, m: 4, K: 3, held: true },
    schedules: ["1f1b"],
    controls: ["cut"],
    goals: [timeAtMost(15), heldAtMost(3)],
    hint: "Switch on \"cut every B into I and W\", which reduces the time from 18 to 16. Then drag 2W0, the first W of the last rank, to the end of its line. The I after 2W0 then starts earlier.",
    learned: "Filling and draining the pipeline now cost (p-1)(F+I), and W fills a part of this time. ZB-H1 fills it on every rank and takes 14. Compare ZB-H1 with your order.",
  },
  {
    title: "Messages take time (c > 0)",
    text: "A message now takes as long as a forward pass. Sending occupies no rank, but 1F1B waits in every round trip and takes 49 instead of 33. Reach a time of 39 or less with whole backward passes and at most 7 microbatches in memory.",
    start: { ...EVEN, schedule: "1f1b", p: 4, m: 8, c: "1", held: true, arrows: true },
    schedules: ["naive", "gpipe", "1f1b", "eager-1f1b"],
    controls: [],
    goals: [timeAtMost(39), heldAtMost(7)],
    hint: "Ranks that run further ahead have work while messages travel.",
    learned: "Eager 1F1B starts with 2(p-r)-1 forward passes instead of p-r, so messages arrive before they are needed. It holds 7 microbatches instead of 4.",
  },
  {
    title: "Stash the weights",
    text: "Without a flush, the ranks are busy 91% of the time. However, each rank updates its weights in place after every backward pass, so forward and backward passes use different versions. Point at a backward pass to see its versions. The gradient error below comes from training a small network. Make it exactly 0, and keep no more than 2 versions of the weights.",
    start: { ...EVEN, schedule: "pipedream-no-stash", p: 4, m: 8, n: 4, versions: true, stale: true, held: false, gradients: true },
    schedules: ["1f1b", "pipedream-no-stash", "pipedream", "pipedream-vertical", "pipedream-2bw"],
    controls: [],
    goals: [
      ["gradient error exactly 0", ({ trained }) => trained?.whole === 0],
      idleAtMost(0.1),
      ["at most 2 weight versions on every stage", ({ numbers }) => numbers.peakVersions <= 2],
    ],
    hint: "With stashing, the error is 0, but the first rank keeps 4 versions. One of the other schedules updates once per batch, one batch late.",
    learned: "With stashing, the gradient is exact at the weights that the forward pass used. But these weights are old, as the error at the newest weights shows. PipeDream-2BW needs two versions for any p, but its weights are a whole batch behind. In this small network, old weights cost more than a wrong gradient. The final loss of PipeDream-2BW is 1.49. Without stashing, it is 0.28, because the gradient is only 4% off. At p = 8 and learning rate 4 (in Free play), training diverges without stashing. With stashing, the loss falls.",
  },
  {
    title: "Beat the search",
    text: "A rank may hold 3 microbatches, and a message takes as long as a forward pass. A search that was stopped after 30 tries found an order that takes 29. Drag operations to reach 28. OR-Tools proved that no order is faster.",
    start: { ...EVEN, schedule: "csv", csv: STOPPED, p: 3, m: 6, c: "1", K: 3, held: true },
    schedules: ["csv"],
    controls: [],
    goals: [timeAtMost(28), heldAtMost(3)],
    hint: "Moves that gain nothing also help, because they make other moves possible. On rank 0, move F3 before I1, which costs no time. Then move W1 and F4 before I2.",
    learned: "A search works in the same way. It moves single operations, and keeps a move if the batch does not take longer. To search with other sizes, run python -m pipedream --set schedule=search --csv found.csv, and load the file in Free play.",
  },
];

function buildLevelBar() {
  const names = ["Free play", ...LEVELS.map(({ title }, k) => `${k + 1}. ${title}`)];
  byId("levels").append(...names.map((textContent, level) =>
    el("button", { type: "button", textContent, onclick: () => startLevel(level) }),
  ));
}

const startOf = (level) => ({ ...START, ...LEVELS[level - 1]?.start });

function startLevel(level) {
  const { solved } = store.chosen;
  store.restart({ ...startOf(level), solved, level });
}

// facts: {numbers, trained} of the timeline, or null if it cannot run.
function showLesson(facts) {
  const { level, solved } = store.chosen;
  [...byId("levels").children].forEach((button, number) => {
    button.ariaCurrent = number === level ? "step" : "false";
    button.classList.toggle("solved", solved.includes(number));
  });
  byId("lesson").hidden = !level;
  if (!level) return;
  const own = LEVELS[level - 1];
  const goals = own.goals.map(([text, isMet]) => [text, Boolean(facts && isMet(facts))]);
  const done = goals.every(([, met]) => met);
  if (byId("lesson").dataset.level !== String(level)) {
    byId("lesson").dataset.level = level;
    byId("lesson-title").textContent = `Level ${level}: ${own.title}`;
    for (const part of ["text", "hint", "learned"]) byId(`lesson-${part}`).textContent = own[part];
    byId("hint").open = false;
  }
  byId("goals").replaceChildren(...goals.map(([text, met]) =>
    el("li", { className: met ? "met" : "unmet", textContent: `${met ? "✓" : "○"} ${text}` }),
  ));
  byId("learned").hidden = !done;
  byId("next").hidden = level === LEVELS.length;
  byId("next").onclick = () => startLevel(level + 1);
  if (done && !solved.includes(level)) store.change({ solved: [...solved, level].sort() });
}
